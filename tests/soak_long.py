"""Long runs of alanine dipeptide with the model of the package, in stages that can be stopped and continued.

    python tests/soak_long.py [--output out/soak-long] [--scale 1] [--stage nvt ...]

The stages are 1 ns at constant temperature, 200 ps at constant energy, 1,000 Contexts made and deleted, and two Contexts in two threads.
What a stage found is kept in the output directory and printed; a stage that is done is not done again. `--scale 0.001` tries them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openmm
import torch
from openmm import unit
from openmm.app import PDBFile

from openmm_tensornet.common.files import replace_file
from openmm_tensornet.forces.system import create_system
from openmm_tensornet.md.analysis import compute_drift
from openmm_tensornet.md.simulation import simulate

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "alanine_dipeptide.pdb"
MODEL = "alanine-dipeptide-gfn2"
TIMESTEP = 0.5  # fs
PIECE = 10_000  # steps between looks at the memory, and between checkpoints at constant energy
INTERVAL = 200  # steps between reports
FLAT = 0.02  # by which the memory of a process may grow


def resident_memory() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def load_system(backend: str | None = None) -> tuple[PDBFile, openmm.System]:
    """Alanine dipeptide and its System."""
    structure = PDBFile(str(EXAMPLE))
    return structure, create_system(structure.topology, MODEL, positions=structure.positions, backend=backend)


def flat(memory: list[int]) -> dict:
    """First and last memory of a process, MB, and whether it stayed flat."""
    return {
        "memory_first_MB": memory[0] / 1e6, "memory_last_MB": memory[-1] / 1e6, "flat": memory[-1] <= (1 + FLAT) * memory[0],
    }  # fmt: skip


def constant_temperature(output: Path, scale: float) -> dict:
    """1 ns in one Context, resumed where it was stopped: memory from 10⁴ steps on, the mean temperature, no broken bond, no gap."""
    structure, system = load_system()
    folder = output / "nvt"
    steps = max(2, round(2_000_000 * scale / PIECE)) * PIECE
    table, memory, over = folder / "energies.csv", [], threading.Event()

    def rows() -> int:
        return table.read_bytes().count(b"\n") - 1 if table.exists() else 0

    before = rows()

    def watch() -> None:
        while not over.wait(1.0):
            if (rows() - before) * INTERVAL >= PIECE:
                memory.append(resident_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        summary = simulate(
            structure.topology, system, structure.positions, output=folder, time=steps * TIMESTEP / 1000, timestep=TIMESTEP,
            temperature=300, seed=1, report_interval=INTERVAL, stop_at_broken_bond=True, resume=folder.exists(), quiet=True,
        )  # fmt: skip
    finally:
        over.set()
        thread.join()
    found = np.genfromtxt(table, delimiter=",", names=True)
    return {
        "steps": summary.steps,
        "frames": len(found), "ns_per_day": summary.ns_per_day,
        "steps_of_this_process": (len(found) - before) * INTERVAL,
        "mean_temperature_K": float(found["temperature_K"].mean()), "no_gap": bool((np.diff(found["step"]) == INTERVAL).all()),
        **(flat(memory) if memory else {}),
    }  # fmt: skip


def constant_energy(output: Path, scale: float) -> dict:
    """200 ps with the Verlet integrator from 300 K; drift of the total energy, memory. The state is kept after every piece."""
    structure, system = load_system()
    folder = output / "nve"
    folder.mkdir(parents=True, exist_ok=True)
    pieces = max(2, round(400_000 * scale / PIECE))
    integrator = openmm.VerletIntegrator(TIMESTEP / 1000)
    context = openmm.Context(system, integrator)
    table, state = folder / "energies.json", folder / "state.xml"
    rows: list[list[float]] = []
    if table.exists() and state.exists():
        rows = json.loads(table.read_text())
        context.setState(openmm.XmlSerializer.deserialize(state.read_text()))
        rows = rows[: round(context.getTime().value_in_unit(unit.picosecond) * 1000 / TIMESTEP / 100)]
    else:
        langevin = openmm.LangevinMiddleIntegrator(300, 5, TIMESTEP / 1000)
        langevin.setRandomNumberSeed(1)
        warm = openmm.Context(system, langevin)
        warm.setPositions(structure.positions)
        warm.setVelocitiesToTemperature(300, 1)
        langevin.step(4000)
        found = warm.getState(positions=True, velocities=True)
        context.setPositions(found.getPositions())
        context.setVelocities(found.getVelocities())
        del warm, langevin
    memory = []
    while len(rows) < pieces * PIECE // 100:
        for _ in range(PIECE // 100):
            integrator.step(100)
            now = context.getState(energy=True)
            total = now.getPotentialEnergy() + now.getKineticEnergy()
            rows.append([now.getTime()._value, total.value_in_unit(unit.kilojoule_per_mole)])
        memory.append(resident_memory())
        replace_file(table, json.dumps(rows).encode())
        complete = context.getState(positions=True, velocities=True)
        replace_file(state, openmm.XmlSerializer.serialize(complete).encode())
    times, energies = np.array(rows).T
    drift, fluctuation = compute_drift(times, energies)
    return {
        "ps": float(times[-1]), "drift_kJ_per_mol_per_ps": drift, "fluctuation_kJ_per_mol": fluctuation,
        "finite": bool(np.isfinite(energies).all()), **(flat(memory) if memory else {}),
    }  # fmt: skip


def many_contexts(output: Path, scale: float) -> dict:
    """1,000 Contexts of each back end made, used and deleted: what each leaves behind in memory, and one energy from all.

    openmmtorch 1.10 keeps a copy of its module for every Context that ever was, whoever wrote the module; PythonForce keeps nothing.
    """
    count = max(20, round(1000 * scale))
    found: dict = {"contexts": count}
    for backend in ("python", "torch"):
        structure, system = load_system(backend)
        memory, energies = [], set()
        for _ in range(count):
            context = openmm.Context(system, openmm.VerletIntegrator(0.0005), openmm.Platform.getPlatformByName("CPU"))
            context.setPositions(structure.positions)
            context.getIntegrator().step(1)
            energies.add(round(context.getState(energy=True).getPotentialEnergy()._value, 3))
            del context
            gc.collect()
            memory.append(resident_memory())
        start = count // 10
        found[f"{backend}_MB_per_context"] = (memory[-1] - memory[start]) / 1e6 / (count - 1 - start)
        found[f"{backend}_one_energy"] = len(energies) == 1
        if backend == "python":
            found |= flat(memory[start:])
    return found


def two_threads(output: Path, scale: float) -> dict:
    """Two Contexts in two threads at once give the trajectories that each gives alone."""
    structure, system = load_system()
    steps = max(20, round(20_000 * scale))

    def run(seed: int, results: dict) -> None:
        # No thermostat: on the Reference platform all Contexts of a process draw from one sequence of random numbers.
        integrator = openmm.VerletIntegrator(TIMESTEP / 1000)
        context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName("Reference"))
        context.setPositions(structure.positions)
        context.setVelocitiesToTemperature(300, seed)
        integrator.step(steps)
        results[seed] = context.getState(positions=True).getPositions(asNumpy=True)._value

    alone: dict[int, np.ndarray] = {}
    together: dict[int, np.ndarray] = {}
    for seed in (1, 2):
        run(seed, alone)
    threads = [threading.Thread(target=run, args=(seed, together)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    largest = max(float(np.abs(alone[seed] - together[seed]).max()) for seed in (1, 2))
    return {"steps": steps, "largest_difference_nm": largest, "the_same": largest == 0}


STAGES: dict[str, Callable[[Path, float], dict]] = {
    "nvt": constant_temperature, "nve": constant_energy, "contexts": many_contexts, "threads": two_threads,
}  # fmt: skip


def main() -> int:
    """Do the stages that are not done yet; 1 if one found something wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("out/soak-long"))
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths (default: 1)")
    parser.add_argument("--stage", nargs="*", choices=STAGES, default=list(STAGES), help="default: all")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    openmm.Platform.getPlatformByName("CPU").setPropertyDefaultValue("Threads", "1")
    good = True
    for name in options.stage:
        path = options.output / f"{name}.json"
        if not path.exists():
            replace_file(path, json.dumps(STAGES[name](options.output, options.scale)).encode())
        found = json.loads(path.read_text())
        print(
            f"{name}: "
            + ", ".join(
                f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items()
            ),
            flush=True,
        )
        good = good and all(value for value in found.values() if isinstance(value, bool))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
