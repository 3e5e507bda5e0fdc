"""Render results as Markdown; `python -m benchmarks.report results.json [--readme README.md]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

MARKER = "<!-- benchmark table -->"
TOP_OPERATORS = 10
COLUMNS = (
    "system",
    "atoms",
    "backend",
    "MD step (ms)",
    "ns/day",
    "ours is faster by",
    "energy and forces (ms)",
    "ours is faster by",
    "first energy (s)",
    "full speed (s)",
    "peak memory (MB)",
    "kernels",
)


def render(results: dict) -> str:
    """The table and what was run, as Markdown that ends in a newline.

    Parameters
    ----------
    results : dict
        As `benchmarks.run` writes it.
    """
    rows = [row for case in results["cases"] for row in _rows(case)]
    lines = [*table(COLUMNS, rows, ("system", "backend")), "", _caption(results)]
    if "breakdown" in results:
        lines += ["", *_breakdown(results["breakdown"])]
    return "\n".join(lines) + "\n"


def quote(document: str, text: str) -> str:
    """Put a table between the two markers of a document; where there is one marker, between it and a new one.

    Raises
    ------
    ValueError
        If the document has neither one nor two markers.
    """
    parts = document.split(MARKER)
    if len(parts) not in (2, 3):
        raise ValueError(f"expected one or two markers {MARKER} in the document, received {len(parts) - 1}")
    return f"{parts[0]}{MARKER}\n{text.strip()}\n{MARKER}{parts[-1]}"


def _rows(case: dict) -> list[list[str]]:
    """One row for each backend; the first row names the system."""
    rows = []
    for k, (name, found) in enumerate(case["backends"].items()):
        ratios = case["ratios"].get(name)
        kernels = found["kernels"]
        rows.append(
            [
                "" if k else case["description"],
                "" if k else f"{case['atoms']:,}",
                name,
                digits(1000 * found["step_s"]),
                digits(found["ns_per_day"]),
                "" if ratios is None else f"{digits(ratios['step']['median'])}×",
                digits(1000 * found["evaluation_s"]),
                "" if ratios is None else f"{digits(ratios['evaluation']['median'])}×",
                digits(found["first_energy_s"]),
                digits(found["ready_s"]),
                f"{found['memory']['peak_MB']:,.0f}",
                "" if kernels is None else str(kernels),
            ]
        )
    return rows


def _caption(results: dict) -> str:
    settings, machine = results["settings"], results["machine"]
    versions: dict[str, dict] = {}
    for case in results["cases"]:
        for name, found in case["backends"].items():
            versions.setdefault(name, found["versions"])
    installed = "; ".join(f"{name}: " + ", ".join(f"{k} {v}" for k, v in of.items()) for name, of in versions.items())
    threads = f"{settings['threads']} thread" + ("s" if settings["threads"] > 1 else "")
    return (
        f"{results['model']['file']}, {settings['precision']} precision, OpenMM platform "
        f"{settings['platform']}, {threads}, {settings['integrator']}, {settings['timestep_fs']} fs; "
        f"medians of {settings['rounds']} alternating rounds. {machine['cpu']} ({machine['cores']} cores, "
        f"load {machine['load_average_at_start']:.1f} at the start), {results['date'][:10]}, "
        f"commit {results['commit']}. {installed}."
    )


def _breakdown(breakdown: dict) -> list[str]:
    """Two parts of a step, then the operators of the module."""
    step, module, overhead = (1000 * breakdown[k] for k in ("step_s", "module_s", "overhead_s"))
    shown = breakdown["operators"][:TOP_OPERATORS]
    rest = breakdown["operators"][TOP_OPERATORS:]
    keys = ("calls", "share", "operations", "bytes", "floor_s")
    total = {key: sum(o[key] for o in rest) for key in keys}
    if rest:
        shown = [*shown, {"name": f"{len(rest)} others", **total}]
    everything = {key: sum(o[key] for o in shown) for key in keys}
    speed = breakdown["machine"]
    return [
        f"Where a step of {breakdown['case']} goes: {digits(step)} ms, of which the module {digits(module)} ms, "
        f"OpenMM and its plugin {digits(overhead)} ms. Operators of the module, with the additions and multiplications that they "
        "make, and the bytes that they read and write. The floor is the time of the longer of the two, at "
        f"{digits(speed['operations_per_s'] / 1e9)} Gflop/s, those of a large matrix product, and "
        f"{digits(speed['bytes_per_s'] / 1e9)} GB/s, those of a copy within the cache, measured in the same run:",
        "",
        *table(
            ["operator", "calls", "share", "ms", "Mflop", "MB", "floor, ms"],
            (
                [
                    o["name"],
                    f"{o['calls']:.0f}",
                    f"{100 * o['share']:.0f} %",
                    *(
                        digits(v)
                        for v in (o["share"] * module, o["operations"] / 1e6, o["bytes"] / 1e6, 1000 * o["floor_s"])
                    ),
                ]
                for o in [*shown, {"name": "together", **everything}]
            ),
            ["operator"],
        ),
    ]


def table(columns: Sequence[str], rows: Iterable[Iterable[str]], text: Sequence[str]) -> list[str]:
    """Lines of a table; the columns that are not `text` are set to the right."""
    return [_line(columns), _line("---" if column in text else "---:" for column in columns), *map(_line, rows)]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"


def main(arguments: list[str] | None = None) -> None:
    """Print a results file's table, or put it into a document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--readme", type=Path, help=f"document with {MARKER} to put the table into")
    options = parser.parse_args(arguments)
    text = render(json.loads(options.results.read_text()))
    if options.readme is None:
        print(text, end="")
    else:
        options.readme.write_text(quote(options.readme.read_text(), text))


if __name__ == "__main__":
    main()
