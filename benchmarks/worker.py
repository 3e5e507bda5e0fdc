"""A process that evaluates one system with one backend: commands as JSON lines on stdin, answers on stdout.

    python -m benchmarks.worker --backend ours

One process for each system and backend, the same code for all of them, so that all are measured in the same
way. It imports only what its environment has: NumPy, OpenMM, PyTorch and the backend.

A command is ``{"do": name, …}`` with the name and arguments of a public method of :class:`Session`; an answer
is ``{"result": …}`` or ``{"error": …}``. Positions are in nm, energies in kJ/mol, forces in kJ/mol/nm, times in
seconds.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from .systems import CASES, Structure, load

KJ_PER_EV = 96.48533212331
# Evaluations that count as warm-up. TorchScript settles within the first ones, torch.compile in the second.
WARMUP_EVALUATIONS = 5
TEMPERATURE = 300  # K
SEED = 7
MOVE = 1e-4  # nm


def system_ours(
    topology: Any,
    structure: Structure,
    model: str,
    charge: int,
    precision: str,
    force_class: Any = None,
    **options: Any,
) -> Any:
    """A System with a force of the class, TensorNetForce by default, which takes the options."""
    import openmm

    from openmm_tensornet import TensorNetForce

    system = openmm.System()
    for atom in topology.atoms():
        system.addParticle(atom.element.mass)
    if structure.box is not None:
        system.setDefaultPeriodicBoxVectors(*structure.box)
    force = (force_class or TensorNetForce)(
        model,
        topology,
        total_charge=charge,
        positions=structure.positions,
        precision=precision,
        any_molecule=True,  # of a model for one molecule the times count
        **options,
    )
    system.addForce(force)
    return system


def kernels_ours(system: Any) -> int:
    """What one evaluation would launch on a GPU."""
    import torch

    from openmm_tensornet import TensorNetForce, check_graph_safety

    force = TensorNetForce.cast(system.getForce(0))
    inputs = [torch.zeros(system.getNumParticles(), 3)]
    if force.metadata["periodic"]:
        inputs.append(torch.eye(3))
    return check_graph_safety(force.getModule(), *inputs).kernels


def system_openmm_ml(topology: Any, structure: Structure, model: str, charge: int, precision: str) -> Any:
    """The System that openmm-ml makes, given the right factor from eV (its own default is 96.4916)."""
    from openmmml import MLPotential

    if precision != "single":
        raise ValueError(f"precision: expected 'single', which is what openmm-ml computes in, received {precision!r}")
    potential = MLPotential("torchmdnet", modelPath=model, energyScale=KJ_PER_EV)
    return potential.createSystem(topology, removeCMMotion=False, charge=charge)


@dataclass(frozen=True)
class Backend:
    """How to make a System, what to import before the clock starts, whose versions to report, and how to count kernels."""

    make_system: Callable[..., Any]
    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    kernels: Callable[[Any], int | None] = lambda system: None


BACKENDS = {
    "ours": Backend(
        system_ours,
        ("openmm_tensornet.forces.torchforce", "openmm_tensornet.kernels.cpu.atoms"),
        ("openmm-tensornet", "acellera-openmmtorch-cpu", "numba"),
        kernels_ours,
    ),
    "openmm-ml": Backend(system_openmm_ml, ("openmmml", "torchmdnet.models.model"), ("openmmml", "torchmd-net")),
}


class Session:
    """One system with one backend. Public methods are commands."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def call(self, do: str, **arguments: Any) -> Any:
        """Run a command."""
        return getattr(self, do)(**arguments)

    def start(
        self,
        case: str,
        model: str,
        precision: str,
        threads: int,
        timestep_fs: float,
        *,
        replicas: int = 1,
        platform_name: str = "CPU",
        properties: dict[str, str] | None = None,
        options: dict[str, Any] | None = None,
    ) -> dict:
        """Make the force and bring it to full speed.

        `replicas` are copies of the system; `properties`, for the CPU platform by default the number of threads, are those of the
        platform; `options` go to the backend's System.

        Returns
        -------
        dict
            `first_energy_s`: from making the force to the first energy. `ready_s`: to the end of the
            warm-up. `imported_MB`: memory before the force is made. `versions`: of
            Python and packages.
        """
        import openmm
        import torch

        torch.set_num_threads(threads)
        for module in self._backend.modules:
            importlib.import_module(module)
        structure = load(CASES[case]).repeated(replicas)
        topology = make_topology(structure)
        imported = memory("VmRSS")
        begin = perf_counter()
        self._system = self._backend.make_system(
            topology, structure, model, CASES[case].total_charge, precision, **(options or {})
        )
        self._integrator = openmm.VerletIntegrator(timestep_fs / 1000)
        self._context = openmm.Context(
            self._system,
            self._integrator,
            openmm.Platform.getPlatformByName(platform_name),
            properties or ({"Threads": str(threads)} if platform_name == "CPU" else {}),
        )
        self._positions = structure.positions
        self._context.setPositions(self._positions)
        self._context.getState(energy=True, forces=True).getPotentialEnergy()
        first = perf_counter() - begin
        for k in range(WARMUP_EVALUATIONS):
            self._evaluate_moved(k)
        return {
            "first_energy_s": first,
            "ready_s": perf_counter() - begin,
            "imported_MB": imported,
            "torch_threads": torch.get_num_threads(),
            "versions": {
                "python": platform.python_version(),
                "openmm": openmm.__version__,
                "torch": torch.__version__,
                **versions(self._backend.distributions),
            },
        }

    def evaluate(self, positions: list) -> dict:
        """Energy and forces at some positions, shape (N, 3)."""
        from openmm import unit

        self._context.setPositions(np.array(positions))
        state = self._context.getState(energy=True, forces=True)
        per_nm = unit.kilojoule_per_mole / unit.nanometer
        return {
            "energy": state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole),
            "forces": state.getForces(asNumpy=True).value_in_unit(per_nm).tolist(),
        }

    def reference(self, case: str, model: str, positions: list) -> list[dict]:
        """The same at several positions as our force is checked against, float64, without OpenMM; needs no start."""
        import torch

        from openmm_tensornet import load_model
        from openmm_tensornet.common.atoms import Atoms
        from openmm_tensornet.static.potential import choose_coulomb_cutoff, expected_energies_and_forces

        structure = load(CASES[case])
        numbers = [atom.element.atomic_number for atom in make_topology(structure).atoms()]
        atoms = Atoms.make(numbers, None, CASES[case].total_charge)
        box = None if structure.box is None else torch.tensor(structure.box)
        network = choose_coulomb_cutoff(load_model(model), box is not None, None)
        cases = {str(k): (torch.tensor(x, dtype=torch.float64), box) for k, x in enumerate(positions)}
        found = expected_energies_and_forces(network, atoms, cases).values()
        return [{"energy": float(energy.sum()), "forces": forces.tolist()} for energy, forces in found]

    def time_steps(self, count: int) -> float:
        """Seconds a step of molecular dynamics, mean of `count` steps from the same start every time."""
        self._context.setPositions(self._positions)
        self._context.setVelocitiesToTemperature(TEMPERATURE, SEED)
        self._integrator.step(1)  # brings code and weights back into the caches
        self._wait()
        begin = perf_counter()
        self._integrator.step(count)
        self._wait()
        seconds = (perf_counter() - begin) / count
        if not np.isfinite(self._context.getState(energy=True).getPotentialEnergy()._value):
            raise ArithmeticError(f"the energy is not finite after {count + 1} steps")
        return seconds

    def time_evaluations(self, count: int) -> float:
        """Seconds an evaluation of energy and forces, median of `count`; before each one an atom moves."""
        self._evaluate_moved(0)
        return statistics.median(self._evaluate_moved(k) for k in range(1, count + 1))

    def breakdown(self, count: int) -> dict:
        """See :func:`benchmarks.breakdown.profile`; ours only."""
        from .breakdown import profile

        return profile(self._system.getForce(0), self._context, count)

    def kernels(self) -> int | None:
        """What one evaluation would launch on a GPU; None where that is not known."""
        return self._backend.kernels(self._system)

    def memory(self) -> dict:
        """Largest and present memory of this process, MB."""
        return {"peak_MB": memory("VmHWM"), "present_MB": memory("VmRSS")}

    def _wait(self) -> None:
        """Until a GPU has done what was asked of it."""
        self._context.getState(positions=True)

    def _evaluate_moved(self, k: int) -> float:
        """Move one coordinate a little, then time getState."""
        positions = np.array(self._positions)
        positions[k % len(positions), 0] += MOVE
        self._context.setPositions(positions)
        begin = perf_counter()
        self._context.getState(energy=True, forces=True)
        return perf_counter() - begin


def make_topology(structure: Structure) -> Any:
    """One residue with all atoms: elements and box are all that the backends look at."""
    from openmm import app

    topology = app.Topology()
    residue = topology.addResidue("MOL", topology.addChain())
    for symbol in structure.symbols:
        topology.addAtom(symbol, app.Element.getBySymbol(symbol), residue)
    if structure.box is not None:
        topology.setPeriodicBoxVectors(structure.box)
    return topology


def versions(distributions: tuple[str, ...]) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    found = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def memory(field: str) -> float:
    """Resident memory of this process, MB; `field` is VmHWM (largest) or VmRSS (present).

    ru_maxrss stands in where /proc is missing; it is second choice because a process inherits its parent's.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        scale = 1e6 if sys.platform == "darwin" else 1e3
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines[field].split()[0]) * 1024 / 1e6


def main() -> None:
    """Answer commands until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    serve(Session(BACKENDS[parser.parse_args().backend]))


def serve(session: Any) -> None:
    """Answer the commands on stdin with the public methods of an object."""
    # Whatever a library prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"result": getattr(session, command.pop("do"))(**command)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
