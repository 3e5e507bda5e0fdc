"""Where the time of one evaluation goes. Imported by the worker of this package alone."""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Any

WARMUP = 20
NAMESPACES = ("aten::", "openmm_tensornet::")


def profile(force: Any, context: Any, count: int) -> dict:
    """Time a force's frozen module outside OpenMM, then profile it.

    The profiler slows small operators down, so it gives shares, and the time comes from runs without it. The kernels of a sequence that
    is one operator are timed one by one, and have their shares of it.

    Parameters
    ----------
    force : TorchForce
    context : openmm.Context
        Gives positions and box.
    count : int
        Evaluations timed, and evaluations profiled.

    Returns
    -------
    dict
        `module_s`: seconds an evaluation of the module, median. `operators`: list of name, calls an
        evaluation, share of the time spent in the operator itself, largest first, its operations and bytes, and the seconds that these take
        at least. `machine`: what they are reckoned with, see :mod:`benchmarks.floor`.
    """
    import openmmtorch
    import torch
    from openmm import unit
    from torch.profiler import ProfilerActivity

    from .floor import SEQUENCE, kernel_times, machine
    from .floor import count as count_work

    module = torch.jit.freeze(openmmtorch.TorchForce.cast(force).getModule().eval())
    state = context.getState(positions=True)
    inputs = [torch.tensor(state.getPositions(asNumpy=True).value_in_unit(unit.nanometer))]
    if force.usesPeriodicBoundaryConditions():
        inputs.append(torch.tensor(state.getPeriodicBoxVectors(asNumpy=True).value_in_unit(unit.nanometer)))

    def evaluate() -> float:
        begin = perf_counter()
        module(*inputs)
        return perf_counter() - begin

    with torch.no_grad():
        for _ in range(WARMUP):
            evaluate()
        seconds = statistics.median(evaluate() for _ in range(count))
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(count):
                evaluate()
    speed, work = machine(), count_work(module, *inputs)
    events = [event for event in profiler.key_averages() if event.key.startswith(NAMESPACES)]
    total = sum(event.self_cpu_time_total for event in events)
    found: dict[str, tuple[float, float]] = {}  # calls an evaluation, and share of the time
    for event in events:
        name, share = event.key.partition("::")[2], event.self_cpu_time_total / total
        parts = kernel_times(module, *inputs) if name == SEQUENCE else {name: (event.count / count, 1.0)}
        whole = sum(part for _, part in parts.values())
        found |= {kernel: (calls, share * part / whole) for kernel, (calls, part) in parts.items()}
    operators = [
        {
            "name": name,
            "calls": calls,
            "share": share,
            **_floor(work.get(name, {"operations": 0, "bytes": 0}), speed),
        }
        for name, (calls, share) in sorted(found.items(), key=lambda item: -item[1][1])
    ]
    return {"module_s": seconds, "operators": operators, "machine": speed}


def _floor(work: dict, speed: dict) -> dict:
    """Operations and bytes, and the time of what takes longer."""
    return {
        **work,
        "floor_s": max(work["operations"] / speed["operations_per_s"], work["bytes"] / speed["bytes_per_s"]),
    }
