"""Check this package on an NVIDIA GPU, then time it; `python -m benchmarks.gpu --help`."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from openmm_tensornet.common.files import replace_file
from openmm_tensornet.models.registry import find_model

from .measure import Settings, Worker, WorkerFailed
from .report import digits, table
from .run import MODEL, REMEDY, describe, has_weights, log
from .systems import CASES, ROOT

CASE_SECONDS = 150
THREADS = 8  # for references, exports and OpenMM's CPU platform
FIRST, CHARGES, PERIODIC = "alanine-dipeptide", "alanine-dipeptide-charges", "water"
REPLICAS = f"64 x {FIRST}"
SIZES = ("21", "23", "1", "2", "3")  # and 22, the first
FEW_IN_A_BOX = "23 in a box"  # whose pairs are all compared
KERNELS = ("portable", "fused")
TIMED = ("module", "steps")  # commands whose failure is no wrong result


@dataclass(frozen=True)
class Command:
    """One case: a method of :class:`benchmarks.gpu_worker.Device` and its arguments."""

    do: str
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """The case in one line."""
        words = [v for v in self.arguments.values() if isinstance(v, str)]
        variants = dict.fromkeys(v[0] for v in self.arguments.get("variants", ()))
        return " / ".join([self.do, *words, *self.arguments.get("modes", ()), *variants])


def plan(charges: bool) -> Iterator[Command]:
    """All cases, the most important first; `charges` tells whether the checkpoint of that system is there."""

    def each(do: str, system: str, **arguments: Any) -> Iterator[Command]:
        return (Command(do, {"system": system, "kernels": kernels, **arguments}) for kernels in KERNELS)

    def steps(system: str, *variants: tuple[str, bool, str]) -> Command:
        return Command("steps", {"system": system, "variants": [list(v) for v in variants], **turn})

    def ours(*precisions: str) -> list[tuple[str, bool, str]]:
        return [(kernels, graphs, p) for p in precisions for kernels in KERNELS for graphs in (True, False)]

    turn = {"rounds": 5, "block_seconds": 0.5}
    with_peer = [("portable", True, "mixed"), ("fused", True, "mixed"), ("openmm-ml", False, "mixed")]
    more = [CHARGES] if charges else []
    others = [name for name in CASES if name not in (FIRST, CHARGES)]
    for system in (FIRST, *SIZES, FEW_IN_A_BOX, PERIODIC, REPLICAS, *more):
        yield from each("capture", system)
    for system in (FIRST, PERIODIC, REPLICAS, *more):
        yield from each("dynamics", system, backend="torch", steps=10)
    for system in (FIRST, PERIODIC):
        yield Command("dynamics", {"system": system, "kernels": "fused", "backend": "python", "steps": 10})
    for system in (FIRST, *more):
        yield from each("elsewhere", system)
    for system in (FIRST, PERIODIC, *more):
        for precision in ("mixed", "double"):
            yield from each("contexts", system, precision=precision)
    for system in (FIRST, PERIODIC, REPLICAS):
        yield from each("kernels", system)
    yield from each("module", FIRST, modes=["reduce-overhead"], **turn)
    yield steps(FIRST, *ours("single", "mixed"))
    yield steps(FIRST, *with_peer)
    yield steps(REPLICAS, *ours("mixed"))
    yield from each("module", FIRST, modes=["max-autotune"], **turn)
    for system in (*others, *more):
        yield steps(system, *ours("mixed"))
    for system in (*others, *more):
        yield steps(system, *with_peer)
    for system in (REPLICAS, *others):
        yield from each("module", system, modes=["reduce-overhead"], **turn)


def rehearsal() -> Iterator[Command]:
    """One small case of each kind, for a CPU."""
    turn = {"rounds": 2, "block_seconds": 0.01}
    yield Command("capture", {"system": FEW_IN_A_BOX, "kernels": "portable"})
    yield Command("dynamics", {"system": FEW_IN_A_BOX, "kernels": "portable", "backend": "python", "steps": 1})
    yield Command("elsewhere", {"system": FIRST, "kernels": "portable"})
    yield Command("contexts", {"system": FIRST, "kernels": "portable", "precision": "mixed"})
    yield Command("kernels", {"system": FIRST, "kernels": "portable"})
    yield Command("module", {"system": FIRST, "kernels": "portable", "modes": [], **turn})
    variants = [["portable", True, "mixed"], ["openmm-ml", False, "mixed"]]
    yield Command("steps", {"system": f"2 x {FIRST}", "variants": variants, **turn})


def run(
    commands: list[Command], start: Callable[[], Worker], prepared: dict, seconds: float, record: Callable[[dict], None]
) -> None:
    """Run cases one by one in a worker, after a failure that has spoilt it in a new one.

    Parameters
    ----------
    commands : list of Command
    start : callable
        Makes a worker.
    prepared : dict
        Arguments of its first command, `prepare`.
    seconds : float
        For all cases; what has not begun by then is recorded as not run.
    record : callable
        Takes what the results keep of a case.
    """
    end = monotonic() + seconds
    worker: Worker | None = None

    def call(do: str, limit: float, **arguments: Any) -> dict | None:
        """End the worker if it takes longer."""
        assert worker is not None
        timer = threading.Timer(limit, worker.kill)
        timer.start()
        try:
            return worker.call(do, **arguments)
        finally:
            timer.cancel()

    with ExitStack() as stack:
        for command in commands:
            begin = monotonic()
            case: dict[str, Any] = {"name": command.name, "do": command.do, **command.arguments, "passed": False}
            if begin >= end:
                record({**case, "error": f"not run: {seconds:g} s are over"})
                continue
            try:
                if worker is None:
                    worker = stack.enter_context(start())
                    call("prepare", CASE_SECONDS, **prepared)
                case |= call(command.do, min(CASE_SECONDS, end - monotonic()), **command.arguments) or {}
                checks = case.get("checks", [{"passed": True}])  # the environment has none
                case["passed"] = bool(checks) and all(check["passed"] for check in checks)
            except WorkerFailed as error:
                case["error"] = f"after {monotonic() - begin:.0f} s: {error}"
            if "error" in case or case.get("failures"):
                try:
                    call("alive", CASE_SECONDS)
                except WorkerFailed:
                    stack.close()
                    worker = None
            record({**case, "seconds": monotonic() - begin})


def render(results: dict) -> str:
    """What was found, as Markdown."""
    cases = [case for case in results["cases"] if case["do"] != "environment"]
    checked = [[c["name"], _verdict(c), *_worst(c), f"{c.get('seconds', 0):.0f}"] for c in cases]
    counted = [
        [c["system"], c["kernels"], str(c["declared"]), f"{c['counted']:g}", f"{c['ratio']:.2f}×"]
        for c in cases
        if "counted" in c
    ]
    calls, steps = [], []
    for c in cases:
        for name, found in c.get("times", {}).items():
            cells = []
            for kind, over in c["ratios"][name].items():
                cells += [digits(1e6 * found[f"{kind}_s"]), f"{digits(over['median'])}×"]
            if c["do"] == "module":
                calls.append([c["system"], c["kernels"], name, *cells])
            else:
                steps.append([c["system"], name, *cells, digits(found["ns_per_day"])])
    text, ratio = ["case", "result", "system", "kernels", "program", "variant"], "over the first"
    parts = [
        (["case", "result", "energy (eV an atom)", "forces (relative)", "took (s)"], checked),
        (["system", "kernels", "declared launches", "counted", "ratio"], counted),
        (["system", "kernels", "program", "evaluation (µs)", ratio], calls),
        (["system", "variant", "MD step (µs)", ratio, "energy and forces (µs)", ratio, "ns/day"], steps),
    ]
    lines = [_caption(results)]
    for columns, rows in parts:
        lines += ["", *table(columns, rows, text)] if rows else []
    lines += ["", *(f"- {name}: {reason}" for c in cases for name, reason in _reasons(c))]
    return "\n".join(lines).rstrip() + "\n"


def _verdict(case: dict) -> str:
    if case["passed"]:
        return "right"
    return "not run" if case.get("error", "").startswith("not run") else "WRONG"


def _worst(case: dict) -> list[str]:
    """Largest deviations of a case."""
    kinds = ("energy_eV_per_atom", "relative_force")
    checks = [check for check in case.get("checks", ()) if kinds[0] in check]
    # NaN is the largest
    worst = (max((check[kind] for check in checks), key=lambda v: (v != v, v), default=None) for kind in kinds)
    return ["" if value is None else f"{value:.1e}" for value in worst]


def _reasons(case: dict) -> Iterator[tuple[str, str]]:
    """What failed in a case, in one line each; the JSON has the whole of it."""
    if "error" in case:
        yield case["name"], case["error"].splitlines()[0]
    for name, text in case.get("failures", {}).items():
        yield f"{case['name']}, {name}", text.strip().splitlines()[-1]
    for check in case.get("checks", ()):
        if not check["passed"]:
            yield case["name"], f"{check['name']}: beyond {check['tolerance']}"


def _caption(results: dict) -> str:
    found: dict = next((c for c in results["cases"] if "versions" in c), {"gpu": None, "versions": {}})
    settings = results["settings"]
    installed = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{'A rehearsal on a CPU, whose times mean nothing. ' if results['rehearsal'] else ''}"
        f"{found['gpu'] or results['machine']['cpu']}, OpenMM platform {settings['platform']}, {settings['integrator']}, "
        f"{settings['timestep_fs']} fs; {results['model']['file']}, network in single precision; medians of alternating rounds. "
        f"{results['date'][:10]}, commit {results['commit']}. {installed}."
    )


def _without_folders(value: Any) -> Any:
    """The same with absolute paths cut to their last two parts."""
    if isinstance(value, str):
        return re.sub(r"(?:/[\w.+@-]+)+(?=/[\w.+@-]+/[\w.+@-]+)", "", value)
    if isinstance(value, dict):
        return {key: _without_folders(v) for key, v in value.items()}
    return [_without_folders(v) for v in value] if isinstance(value, list) else value


def main(arguments: list[str] | None = None) -> int:
    """Run the cases and write JSON and Markdown after each; 0, 1 where a check failed or was not run, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--model", default=MODEL, help=f"checkpoint, or a known model's name (default: {MODEL})")
    parser.add_argument(
        "--output", type=Path, help="JSON file, beside which the table goes (default: benchmarks/results/gpu.json)"
    )
    parser.add_argument(
        "--seconds", type=float, default=540, help="for everything; what does not fit is left out (default: 540)"
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases whose names match, such as 'capture*'")
    parser.add_argument("--rehearse", action="store_true", help="run small cases on the CPU, to test the script")
    options = parser.parse_args(arguments)
    if not options.rehearse and not torch.cuda.is_available():
        print(
            f"an NVIDIA GPU is missing: PyTorch {torch.__version__} sees none (--rehearse needs none)", file=sys.stderr
        )
        return 2
    try:
        model = find_model(options.model, download=False)
    except (OSError, ImportError, ValueError) as error:
        parser.error(f"--model: {error}; {REMEDY}")
    output = options.output or ROOT / "benchmarks" / "results" / ("quick-gpu.json" if options.rehearse else "gpu.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    device, threads = ("cpu", 1) if options.rehearse else ("cuda", THREADS)
    results = describe(Settings(str(model), threads=threads), model)
    results["settings"] = {k: results["settings"][k] for k in ("integrator", "timestep_fs", "threads")} | {
        "platform": device.upper(),
        "seconds": options.seconds,
    }
    results["rehearsal"] = options.rehearse

    def record(case: dict) -> None:
        results["cases"].append(_without_folders(case))
        log(f"{case['name']}: {_verdict(case)}")
        replace_file(output, (json.dumps(results, indent=1) + "\n").encode())
        replace_file(output.with_suffix(".md"), render(results).encode())

    charges = not options.rehearse and has_weights(CASES[CHARGES], model)
    chosen = rehearsal() if options.rehearse else plan(charges)
    commands = [Command("environment", {}), *(c for c in chosen if fnmatch(c.name, options.only))]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        run(
            commands,
            lambda: Worker(sys.executable, device, threads, "benchmarks.gpu_worker"),
            {"model": str(model.resolve()), "folder": folder, "threads": threads},
            options.seconds,
            record,
        )
    print(render(results))
    return int(any(not c["passed"] for c in results["cases"] if c["do"] not in TIMED))


if __name__ == "__main__":
    sys.exit(main())
