"""Time this package and its peers; `python -m benchmarks.run --help`."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from openmm_tensornet.models.registry import find_model

from . import report
from .measure import Evaluator, Settings, Worker, WorkerFailed, WrongResult, measure, start
from .systems import CASES, ROOT, Case

FORMAT = 1
MODEL = "aceff-1.1"
REMEDY = "`make models` fetches AceFF's weights; --model alanine-dipeptide-gfn2 (make: MODEL=...) needs none"
PEERS = {"openmm-ml": ROOT / ".venv-peers" / "bin" / "python"}
QUICK_ATOMS = 200
QUICK_ROUNDS = 3
QUICK_SECONDS = 0.5
BREAKDOWN_CASE = "alanine-dipeptide"
BREAKDOWN_EVALUATIONS = 200


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Time this package and its peers.")
    parser.add_argument("--model", default=MODEL, help=f"checkpoint, or a known model's name (default: {MODEL})")
    parser.add_argument("--peers", action="store_true", help="time the peers too, once they agree")
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help=f"short rounds, and by default up to {QUICK_ATOMS} atoms")
    parser.add_argument("--breakdown", action="store_true", help=f"show where the time goes for {BREAKDOWN_CASE}")
    parser.add_argument(
        "--platform", choices=("Reference", "CPU"), default="Reference", help="of OpenMM (default: Reference)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of OpenMM and of PyTorch (default: 1)")
    parser.add_argument("--precision", choices=("single", "double"), default="single")
    parser.add_argument("--name", help="of the result files (default: quick or full, and -peers)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder")
    parsed = parser.parse_args(arguments)
    try:
        parsed.model = find_model(parsed.model, download=False)
    except (OSError, ImportError, ValueError) as error:
        parser.error(f"--model: {error}; {REMEDY}")
    if not parsed.model.is_file():
        parser.error(f"--model: expected a checkpoint, received {parsed.model}, which is no file")
    if parsed.threads < 1:
        parser.error(f"--threads: expected at least 1, received {parsed.threads}")
    if parsed.peers:
        for name, python in PEERS.items():
            if not python.exists():
                parser.error(f"--peers: the environment of {name} is missing; run `make bench-peers`")
        if parsed.precision != "single":
            parser.error("--peers: expected --precision single, which is what the peers compute in")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Measure, write JSON and Markdown after every case, and print the table."""
    options = parse_arguments(arguments)
    settings = Settings(
        str(options.model.resolve()), precision=options.precision, platform=options.platform, threads=options.threads
    )
    if options.quick:
        settings = replace(settings, rounds=QUICK_ROUNDS, block_seconds=QUICK_SECONDS)
    largest = QUICK_ATOMS if options.quick else max(case.atoms for case in CASES.values())
    names = options.cases or [n for n, case in CASES.items() if case.atoms <= largest]
    names = [n for n in names if has_weights(CASES[n], options.model)]
    if not names:
        return 1
    name = options.name or ("quick" if options.quick else "full") + ("-peers" if options.peers else "")
    results = describe(settings, options.model)
    try:
        for case in (CASES[n] for n in names):
            results["cases"].append(run_case(case, settings, options.peers))
            write(results, options.output, name)
        if options.breakdown:
            results["breakdown"] = run_breakdown(CASES[BREAKDOWN_CASE], settings)
            write(results, options.output, name)
    except (WrongResult, WorkerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report.render(results))
    return 0


def has_weights(case: Case, model: Path) -> bool:
    """Whether the weights of a case are on this machine; says so if not."""
    try:
        case.checkpoint(model)
    except (OSError, ImportError, ValueError) as error:
        log(f"{case.name}: left out: {error}; {REMEDY}")
        return False
    return True


def run_case(case: Case, settings: Settings, peers: bool) -> dict:
    """Measure one case; without peers this package is compared with its own reference model."""
    settings = replace(settings, model=case.checkpoint(settings.model))
    pythons = {"ours": Path(sys.executable), **(PEERS if peers else {})}
    with ExitStack() as stack:
        workers: dict[str, Evaluator] = {
            name: stack.enter_context(Worker(python, name, settings.threads)) for name, python in pythons.items()
        }
        reference = None if peers else stack.enter_context(Worker(sys.executable, "ours", settings.threads))
        return measure(case, settings, workers, reference, log)


def run_breakdown(case: Case, settings: Settings) -> dict:
    """Operators of one evaluation, and what OpenMM adds to it in a step."""
    log(f"{case.name}: breakdown")
    with Worker(sys.executable, "ours", settings.threads) as worker:
        start(worker, case, settings)
        steps, found = [], []
        for _ in range(settings.rounds):
            steps.append(worker.call("time_steps", count=BREAKDOWN_EVALUATIONS))
            found.append(worker.call("breakdown", count=BREAKDOWN_EVALUATIONS))
    modules = [each["module_s"] for each in found]
    return {
        "case": case.name,
        "step_s": statistics.median(steps),
        "module_s": statistics.median(modules),
        "overhead_s": statistics.median(a - b for a, b in zip(steps, modules, strict=True)),
        "operators": found[-1]["operators"],
        "machine": found[-1]["machine"],
    }


def describe(settings: Settings, model: Path) -> dict:
    """Everything about a run but its numbers. Of paths only the names of files are kept."""
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "model": {"file": model.name, "sha256": hashlib.sha256(model.read_bytes()).hexdigest()},
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "load_average_at_start": os.getloadavg()[0],
        },
        "settings": {
            "platform": settings.platform,
            "integrator": "VerletIntegrator",
            "timestep_fs": settings.timestep_fs,
            "precision": settings.precision,
            "threads": settings.threads,
            "rounds": settings.rounds,
            "block_seconds": settings.block_seconds,
        },
        "cases": [],
    }


def write(results: dict, folder: Path, name: str) -> None:
    """Write NAME.json and NAME.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / f"{name}.md").write_text(report.render(results))


def commit() -> str | None:
    """The commit that was run, with "+" where tracked files were changed; None outside a repository."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_name() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def log(line: str) -> None:
    """Say what happens, on stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
