"""The process in which :mod:`benchmarks.gpu` runs its cases; commands as for :mod:`benchmarks.worker`.

    python -m benchmarks.gpu_worker --backend cuda

A system is a name of the registry, copies of one ("64 x alanine-dipeptide"), or so many atoms in a random packing ("23", "23 in a box").
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import openmm
import torch
from openmm import unit
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from openmm_tensornet import TensorNetForce, check_graph_safety, export_potential, export_torchscript, load_model
from openmm_tensornet.common.atoms import Atoms
from openmm_tensornet.export.exported import read_metadata
from openmm_tensornet.forces.system import force_class
from openmm_tensornet.models.accuracy import TOLERANCES, Tolerance, deviation, packing
from openmm_tensornet.models.tensornet import TensorNet
from openmm_tensornet.static.potential import (
    Options,
    StaticPotential,
    choose_coulomb_cutoff,
    expected_energies_and_forces,
)

from .measure import Settings, alternate, geometries, ratios, summary, tolerances
from .systems import CASES, ROOT, Case, Structure, load
from .worker import BACKENDS, Session, make_topology, serve, system_ours, versions

# Two runs of the same kernels in single precision, whose sums may be in another order.
SAME = Tolerance(1e-6, 1e-5)
LAUNCH_FACTOR = 1.5  # an operator may launch more than one kernel (a copy, a second pass of a sum)
WARMUP = 10  # evaluations before a capture, as in TensorNetForce
PROFILED = 10
STEPS = 20
EDGE = 1.3  # nm, of a box of few atoms
APART = 1e-4  # nm; steps with stale forces are a hundred times as far apart
ORDER = (0, 1, 0)  # of the geometries
PACKAGES = (
    *("openmm-tensornet", "acellera-openmmtorch-cpu", "acellera-openmmtorch-cu12", "acellera-openmmtorch-cu13"),
    *("openmm-cuda-12", "openmm-cuda-13", "numba", "triton", "openmmml", "torchmd-net"),
)


class Captured:
    """A module in a CUDA graph, captured as TorchForce does it; on a CPU, the module itself. Inputs are copied to those of the graph."""

    def __init__(self, module: Callable, inputs: Sequence[Tensor]):
        self._inputs = [t.clone() for t in inputs]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._evaluate = lambda: module(*self._inputs)
        if self._inputs[0].is_cuda:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARMUP):
                    self._evaluate()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._outputs = self._evaluate()
            self._graph = graph

    def replay(self) -> None:
        """Evaluate at the inputs as they are."""
        if self._graph is None:
            self._outputs = self._evaluate()
        else:
            self._graph.replay()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self.replay()
        return self._outputs


@dataclass(frozen=True)
class System:
    """What is evaluated: copies of a case of the registry, or a packing, which is none."""

    case: Case | None
    replicas: int
    checkpoint: str
    structure: Structure

    @classmethod
    def named(cls, name: str, model: str) -> System:
        """The system of that name, with the checkpoint of the run."""
        replicas, _, last = name.rpartition(" x ")
        number, boxed, _ = last.partition(" in a box")
        if number.isdigit():
            return cls(None, 1, model, _packing(int(number), EDGE * np.eye(3) if boxed else None))
        case = CASES[last]
        count = int(replicas or 1)
        return cls(case, count, case.checkpoint(model), load(case).repeated(count))

    @property
    def charge(self) -> int:
        """Of each replica."""
        return 0 if self.case is None else self.case.total_charge

    @cached_property
    def atoms(self) -> Atoms:
        """Elements, molecules and charges."""
        numbers = [atom.element.atomic_number for atom in make_topology(self.structure).atoms()]
        members = np.repeat(range(self.replicas), len(numbers) // self.replicas)
        return Atoms.make(numbers, members.tolist(), [self.charge] * self.replicas)

    @cached_property
    def model(self) -> TensorNet:
        """The reference; a Coulomb interaction reaches as far as the box allows."""
        model, box = load_model(self.checkpoint), self.structure.box
        reach = 0.499 * box.diagonal().min() if box is not None and getattr(model.config, "coulomb", False) else None
        return choose_coulomb_cutoff(model, box is not None, reach)

    @cached_property
    def inputs(self) -> list[tuple[Tensor, Tensor | None]]:
        """Positions and box at each geometry, nm, float64."""
        box = None if self.structure.box is None else torch.tensor(self.structure.box)
        return [(torch.tensor(x), box) for x in geometries(self.structure)]

    @cached_property
    def expected(self) -> list[tuple[Tensor, Tensor]]:
        """Energies of the molecules, kJ/mol, and forces, kJ/mol/nm, of the reference model at each geometry, float64."""
        cases = {str(k): x for k, x in enumerate(self.inputs)}
        return list(expected_energies_and_forces(self.model, self.atoms, cases).values())


def check(name: str, found: Sequence, expected: Sequence, tolerance: Tolerance) -> dict:
    """Largest deviations of energies and forces over several geometries, and whether all are within the tolerance."""
    each = [deviation(_total(f), _total(e)) for f, e in zip(found, expected, strict=True)]
    return {
        "name": name,
        "energy_eV_per_atom": float(np.max([d.energy for d in each])),  # max() would lose a NaN
        "relative_force": float(np.max([d.force for d in each])),
        "tolerance": asdict(tolerance),
        "passed": all(d.within(tolerance) for d in each),
    }


def verified(makers: dict[str, Callable], evaluate: Callable, expected: Sequence) -> tuple[dict[str, Any], dict]:
    """Make what is to be timed; what can be made and is right, and the checks and failures for the results."""
    kept: dict[str, Any] = {}
    checks: list[dict] = []
    failures: dict[str, str] = {}
    for name, make in makers.items():
        try:
            made = make()
            found = evaluate(made)
        except Exception:
            failures[name] = traceback.format_exc(limit=-3)
            continue
        checks.append(check(name, found, expected, TOLERANCES["single"]))
        if checks[-1]["passed"]:
            kept[name] = made
    return kept, {"checks": checks, "failures": failures}


class Device:
    """Runs cases on a device, "cuda" or "cpu". Public methods are commands; each returns what the results keep of a case."""

    def __init__(self, device: str):
        self._device = torch.device(device)
        self._platform, self._cuda = device.upper(), device == "cuda"
        self._systems: dict[str, System] = {}

    def prepare(self, model: str, folder: str, threads: int) -> None:
        """Name the checkpoint, and the folder for exported files."""
        torch.set_num_threads(threads)
        self._model, self._folder, self._threads = model, Path(folder), threads

    def alive(self) -> None:
        """Fail if an earlier failure has left the device unusable."""
        Captured(lambda x: (2 * x,), [torch.ones(2, device=self._device)]).replay()
        self._synchronize()

    def environment(self) -> dict:
        """Names and versions."""
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return {
            "gpu": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
            if self._cuda
            else None,
            "cuda": torch.version.cuda,
            "platforms": [openmm.Platform.getPlatform(k).getName() for k in range(openmm.Platform.getNumPlatforms())],
            "plugin_failures": list(openmm.Platform.getPluginLoadFailures()),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "openmm": openmm.__version__,
                **versions(PACKAGES),
            },
        }

    def capture(self, system: str, kernels: str) -> dict:
        """Capture by hand the exported file's module and the frozen one of a force, and replay with new positions."""
        inputs = self._inputs(system)
        file = torch.jit.load(self._exported(system, kernels, export_torchscript, ".pt"), map_location=self._device)
        checks = []
        for source, module in (("file", file), ("force", self._module(system, kernels))):
            captured = Captured(module, inputs[0])
            found = [[t.clone() for t in captured(*inputs[k])] for k in ORDER]
            eager = [[t.clone() for t in module(*inputs[k])] for k in ORDER]
            right = [self._system(system).expected[k] for k in ORDER]
            checks += [
                check(f"{source}, replayed and eager", found, eager, SAME),
                check(f"{source}, replayed and reference", found, right, TOLERANCES["single"]),
            ]
            if source == "force":  # its operators switch TF32 off
                torch.set_float32_matmul_precision("high")
                try:
                    captured = Captured(self._module(system, kernels), inputs[0])
                    found = [[t.clone() for t in captured(*inputs[k])] for k in ORDER]
                finally:
                    torch.set_float32_matmul_precision("highest")
                checks.append(check("force with TF32 on, replayed and reference", found, right, TOLERANCES["single"]))
        return {"checks": checks}

    def elsewhere(self, system: str, kernels: str) -> dict:
        """Evaluate, in a Context and in its captured graphs, a file that was made by a process that sees no GPU."""
        hidden = self._folder / "no-gpu"
        hidden.mkdir(exist_ok=True)
        made = "from benchmarks.gpu_worker import Device; d = Device('cpu'); d.prepare({!r}, {!r}, {}); d._exported({!r}, {!r})"
        code = made.format(self._model, str(hidden), self._threads, system, kernels)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment, capture_output=True)
        path, here = hidden / self._exported(system, kernels).name, self._exported(system, kernels)
        keys = {read_metadata(file)["key"] for file in (path, here)}
        geometry, own = geometries(self._system(system).structure), self._system(system)
        context = self._context(system, kernels, "mixed", file=path)
        found = [_evaluate(context, geometry[k]) for k in ORDER]
        checks = [check("evaluated, and reference", found, [own.expected[k] for k in ORDER], TOLERANCES["single"])]
        return {
            "checks": [*checks, {"name": "same data as made here", "tolerance": {"keys": 1}, "passed": len(keys) == 1}]
        }

    def dynamics(self, system: str, kernels: str, backend: str, steps: int) -> dict:
        """Steps of LangevinMiddleIntegrator, which asks for no energies, with reports of the energy alone, and in a box a barostat.

        The same random numbers with and without graphs give the same positions, and at the end energy and forces are the CPU's.
        """
        own, checks = self._system(system), []
        on_cpu = self._context(system, "portable", "mixed", "CPU")
        for barostat in (False, True)[: 1 + (own.structure.box is not None)]:
            for first in ("energy", "forces"):
                ends = []
                for graphs in (True, False):
                    context = self._context(
                        system, kernels, "mixed", graphs=graphs, backend=backend, langevin=True, barostat=barostat
                    )
                    _evaluate(context, own.structure.positions, first)
                    for _ in range(steps):
                        context.getIntegrator().step(1)
                        _evaluate(context, what="energy")
                    ends.append(context)
                states = [c.getState(positions=True) for c in ends]
                positions = [state.getPositions(asNumpy=True)._value for state in states]
                boxes = [state.getPeriodicBoxVectors(asNumpy=True)._value for state in states]
                apart = max(float(np.abs(a - b).max()) for a, b in (positions, boxes))
                name = f"{'barostat, ' if barostat else ''}{first} first"
                checks.append({"name": f"{name}: positions in nm, with and without graphs", "tolerance": {"nm": APART}})
                checks[-1] |= {"nm": apart, "passed": apart <= APART}
                on_cpu.setPeriodicBoxVectors(*boxes[0])
                expected, tolerance = _evaluate(on_cpu, positions[0]), Tolerance(*tolerances(len(positions[0])))
                checks.append(check(f"{name}: the end, and CPU", [_evaluate(ends[0])], [expected], tolerance))
        return {"checks": checks}

    def contexts(self, system: str, kernels: str, precision: str) -> dict:
        """First calls in each order, two Contexts at once, and steps, in OpenMM; against graphs off and the CPU platform."""
        geometry = geometries(self._system(system).structure)
        make = partial(self._context, system, kernels, precision)
        without, on_cpu = make(graphs=False), self._context(system, "portable", precision, "CPU")
        right = {
            "graphs off": ([_evaluate(without, x) for x in geometry], SAME),
            "CPU": ([_evaluate(on_cpu, x) for x in geometry], Tolerance(*tolerances(len(geometry[0])))),
        }
        checks = [check("graphs off, and CPU", right["graphs off"][0], *right["CPU"])]

        def compare(name: str, found: list[tuple[int, Any, Any]]) -> None:
            """Energy and forces by number of the geometry; what was not asked for, None, is as expected."""
            for other, (expected, tolerance) in right.items():
                filled = [
                    (expected[k][0] if energy is None else energy, expected[k][1] if forces is None else forces)
                    for k, energy, forces in found
                ]
                checks.append(check(f"{name}, and {other}", filled, [expected[k] for k, *_ in found], tolerance))

        for first, order in (("energy first", ("energy", "both")), ("forces first", ("forces", "energy", "both"))):
            context = make()
            compare(first, [(k, *_evaluate(context, geometry[k], what)) for k in ORDER for what in order])
        contexts = [make(), make()]
        turns = ((0, 0), (1, 1), (0, 1), (1, 0))
        compare("two Contexts", [(k, *_evaluate(contexts[c], geometry[k])) for c, k in turns])
        contexts[0].getIntegrator().step(STEPS)
        compare("the other Context after steps", [(0, *_evaluate(contexts[1]))])
        moved = contexts[0].getState(positions=True).getPositions(asNumpy=True)._value
        checks.append(
            check("after steps, and CPU", [_evaluate(contexts[0])], [_evaluate(on_cpu, moved)], right["CPU"][1])
        )
        return {"checks": checks}

    def kernels(self, system: str, kernels: str) -> dict:
        """Count the kernels, copies and fills of one evaluation, and compare with what `check_graph_safety` counts."""
        force, inputs = self._force(system, kernels), self._inputs(system)[0]
        declared = check_graph_safety(force.getModule(), *(t.cpu() for t in inputs)).kernels
        module = self._module(system, kernels)
        for _ in range(WARMUP):
            module(*inputs)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        for _ in range(2):  # the first one starts the profiler
            with torch.profiler.profile(activities=activities) as profiler:
                for _ in range(PROFILED):
                    module(*inputs)
                self._synchronize()
        names = Counter(event.name for event in profiler.events() if event.device_type == DeviceType.CUDA)
        counted = sum(names.values()) / PROFILED
        passed = 0 < counted <= LAUNCH_FACTOR * declared if self._cuda else counted == 0
        return {
            "declared": declared,
            "metadata": force.metadata["launches"],
            "counted": counted,
            "ratio": counted / declared,
            "names": {name: count / PROFILED for name, count in names.most_common()},
            "checks": [{"name": "counted over declared", "tolerance": {"ratio": LAUNCH_FACTOR}, "passed": passed}],
        }

    def module(self, system: str, kernels: str, modes: list[str], rounds: int, block_seconds: float) -> dict:
        """Time an evaluation without OpenMM: replayed, eager, and the static potential as torch.compile makes it."""
        own, inputs = self._system(system), self._inputs(system)
        module = self._module(system, kernels)

        def compiled(mode: str) -> Callable:
            given = [(*x, right) for x, right in zip(own.inputs, own.expected, strict=True)]
            periodic = own.structure.box is not None
            potential = StaticPotential.make(
                own.model, own.atoms, Options(periodic=periodic, kernels=kernels), check=given
            )
            return torch.compile(potential.to(self._device), mode=mode)

        programs, result = verified(
            {
                "replayed": lambda: Captured(module, inputs[0]),
                "eager": lambda: module,
                **{f"torch.compile, {mode}": partial(compiled, mode) for mode in modes},
            },
            lambda program: [[t.clone() for t in program(*inputs[k])] for k in ORDER],
            [own.expected[k] for k in ORDER],
        )
        calls = {name: getattr(program, "replay", partial(program, *inputs[0])) for name, program in programs.items()}
        counts = {name: max(3, round(block_seconds / self._time(call, 3))) for name, call in calls.items()}
        times: dict[str, dict[str, list[float]]] = {name: {"call_s": []} for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                times[name]["call_s"].append(self._time(call, counts[name]))
        medians = {n: {"call_s": statistics.median(t["call_s"]), "rounds": t} for n, t in times.items()}
        return {**result, "times": medians, "ratios": _ratios(times)}

    def steps(self, system: str, variants: list, rounds: int, block_seconds: float) -> dict:
        """Time steps and evaluations in OpenMM of variants: kernels (or "openmm-ml"), whether with CUDA graphs, and precision."""
        own = self._system(system)
        settings = Settings(self._model, threads=self._threads, rounds=rounds, block_seconds=block_seconds)

        def start(kernels: str, graphs: bool, precision: str) -> Session:
            ours = kernels != "openmm-ml"
            # Kernels for the CPU are not imported beforehand.
            session = Session(replace(BACKENDS["ours"], modules=()) if ours else BACKENDS[kernels])
            session.start(
                own.case.name,  # type: ignore[union-attr]
                str(self._exported(system, kernels)) if ours else own.checkpoint,
                settings.precision,
                settings.threads,
                settings.timestep_fs,
                replicas=own.replicas,
                platform_name=self._platform,
                properties=self._properties(self._platform, precision),
                options={"cuda_graphs": graphs} if ours else {},
            )
            return session

        sessions, result = verified(
            {f"{v[0]}, {'graphs, ' if v[1] else ''}{v[2]}": partial(start, *v) for v in variants},
            lambda session: [session.evaluate(x.tolist()).values() for x in geometries(own.structure)],
            own.expected,
        )
        times = alternate(sessions, settings)
        medians = {name: summary(each, settings.timestep_fs) for name, each in times.items()}
        return {**result, "times": medians, "ratios": _ratios(times)}

    def _system(self, name: str) -> System:
        if name not in self._systems:
            self._systems[name] = System.named(name, self._model)
        return self._systems[name]

    def _exported(
        self, name: str, kernels: str, export: Callable = export_potential, suffix: str = ".safetensors"
    ) -> Path:
        """The exported file, made where it is missing."""
        own, path = self._system(name), self._folder / f"{name.replace(' ', '-')}-{kernels}{suffix}"
        if not path.exists():
            export(
                own.model,
                path,
                atomic_numbers=own.atoms.numbers,
                replicas=own.atoms.replicas,
                total_charge=own.atoms.charges,
                periodic=own.structure.box is not None,
                kernels=kernels,
                positions=own.structure.positions,
                box_vectors=own.structure.box,
                any_molecule=True,  # of a model for one molecule the times count
            )
        return path

    def _force(self, name: str, kernels: str) -> TensorNetForce:
        own = self._system(name)
        numbers, box = own.atoms.numbers, own.structure.box
        return TensorNetForce(str(self._exported(name, kernels)), atomic_numbers=numbers, box_vectors=box)

    def _module(self, name: str, kernels: str) -> torch.jit.ScriptModule:
        """The module of a force, on the device and frozen, as TorchForce runs it."""
        return torch.jit.freeze(self._force(name, kernels).getModule().to(self._device).eval())

    def _context(
        self,
        name: str,
        kernels: str,
        precision: str,
        platform_name: str | None = None,
        graphs: bool = True,
        *,
        backend: str = "torch",
        langevin: bool = False,
        barostat: bool = False,
        file: Path | None = None,
    ) -> openmm.Context:
        platform_name, own = platform_name or self._platform, self._system(name)
        model, topology = str(file or self._exported(name, kernels)), make_topology(own.structure)
        options: dict[str, Any] = {"cuda_graphs": graphs}
        if backend == "python":
            options["device"] = self._device.type
        system = system_ours(
            topology, own.structure, model, own.charge, "single", force_class=force_class(backend), **options
        )
        if barostat:
            system.addForce(openmm.MonteCarloBarostat(1.0, 300.0, 1))
            system.getForce(1).setRandomNumberSeed(1)
        integrator = openmm.LangevinMiddleIntegrator(300, 1, 0.0005) if langevin else openmm.VerletIntegrator(0.0005)
        if langevin:
            integrator.setRandomNumberSeed(1)
        return openmm.Context(
            system,
            integrator,
            openmm.Platform.getPlatformByName(platform_name),
            self._properties(platform_name, precision),
        )

    def _properties(self, platform_name: str, precision: str) -> dict[str, str]:
        return {"Threads": str(self._threads)} if platform_name == "CPU" else {"Precision": precision}

    def _inputs(self, name: str) -> list[list[Tensor]]:
        """What OpenMM hands over at each geometry: float32, on the device."""
        return [[t.float().to(self._device) for t in x if t is not None] for x in self._system(name).inputs]

    def _time(self, call: Callable[[], Any], count: int) -> float:
        """Seconds a call, mean of `count`."""
        call()
        self._synchronize()
        begin = perf_counter()
        for _ in range(count):
            call()
        self._synchronize()
        return (perf_counter() - begin) / count

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def _packing(count: int, box: np.ndarray | None) -> Structure:
    """A random molecule."""
    x = packing(Atoms.make([1] * count), 1, None if box is None else torch.tensor(box)).numpy()
    return Structure([("C", "H", "N", "O")[k % 4] for k in range(count)], x, box)


def _total(result: Sequence) -> tuple[Tensor, Tensor]:
    """Energy, summed over the molecules, and forces, from whatever holds them."""
    energy, forces = (torch.as_tensor(t, dtype=torch.float64, device="cpu") for t in result)
    return energy.sum().reshape(1), forces


def _ratios(times: dict[str, dict[str, list[float]]]) -> dict:
    """How many times as long each takes as the first one."""
    return {name: ratios(each, next(iter(times.values()))) for name, each in times.items()}


def _evaluate(context: openmm.Context, positions: Any = None, what: str = "both") -> tuple[float | None, Any]:
    """Energy and forces, None where only the other one is asked for; at new positions where they are given."""
    if positions is not None:
        context.setPositions(positions)
    energy, forces = what != "forces", what != "energy"
    state = context.getState(energy=energy, forces=forces)
    return (
        state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole) if energy else None,
        state.getForces(asNumpy=True).value_in_unit(unit.kilojoule_per_mole / unit.nanometer) if forces else None,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("cuda", "cpu"), required=True)
    serve(Device(parser.parse_args().backend))
