"""What only many tries find: damaged and hostile files, runs that are killed, random models and molecules.

    python tests/soak.py                          # half an hour on two cores; prints what was tried
    python tests/soak.py --files 300 --kills 4 --minutes 1 --seed 7

Each part is also a function, a few tries of which are tests (tests/test_soak.py). A try is made again by its seed.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import io
import os
import pickletools
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openmm
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from openmm import unit

from openmm_tensornet import runfiles, simulation
from openmm_tensornet.atoms import Atoms
from openmm_tensornet.charges import TensorNet2, TensorNet2Config
from openmm_tensornet.checkpoint import load_model
from openmm_tensornet.export import compile_potential, export_potential, load_exported, model_hash
from openmm_tensornet.model import ACTIVATIONS, TensorNet, TensorNetConfig
from openmm_tensornet.neighbors import CellPairs, Grid, SelectedPairs, find_pairs
from openmm_tensornet.potential import choose_coulomb_cutoff, copy_double
from openmm_tensornet.system import create_system, force_class
from openmm_tensornet.testing import TOLERANCES, deviation, reference_energy_and_forces

# ------------------------------------------------------------------------------------------- mutated files

SECONDS = 20  # for one file, which takes some ms
MEMORY = 3 << 30  # bytes beyond what the process has
# What no file may bring about (https://docs.python.org/3/library/audit_events.html).
FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.startfile", "os.mkdir", "os.remove", "os.rename",
    "os.rmdir", "os.chmod", "os.symlink", "os.putenv", "shutil.", "subprocess.", "socket.", "urllib.", "ctypes.dlopen",
    "pickle.find_class", "exec", "compile", "code.__new__", "webbrowser.", "tempfile.", "open",
)  # fmt: skip


class Damage:
    """Random changes of the bytes of a file, as disks and networks make them."""

    def __init__(self, random: np.random.Generator):
        self.random = random

    def __call__(self, data: bytes) -> bytes:
        kinds = (self.flip, self.flip_structure, self.zeros, self.truncate, self.insert, self.delete, self.swap)
        return kinds[self.random.integers(len(kinds))](data)

    def place(self, data: bytes, room: int = 1) -> int:
        return int(self.random.integers(max(1, len(data) - room)))

    def flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.random.integers(1, 9)):
            changed[self.place(data)] ^= 1 << int(self.random.integers(8))
        return bytes(changed)

    def flip_structure(self, data: bytes) -> bytes:
        """In a header of the zip."""
        changed = bytearray(data)
        headers = [k for mark in (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7") for k in _all(data, mark)]
        at = headers[self.random.integers(len(headers))] if headers else 0
        for _ in range(self.random.integers(1, 4)):
            changed[min(at + int(self.random.integers(60)), len(data) - 1)] = int(self.random.integers(256))
        return bytes(changed)

    def zeros(self, data: bytes) -> bytes:
        at, length = self.place(data), int(self.random.integers(1, 4097))
        return data[:at] + bytes(len(data[at : at + length])) + data[at + length :]

    def truncate(self, data: bytes) -> bytes:
        return data[: self.place(data)]

    def insert(self, data: bytes) -> bytes:
        at = self.place(data)
        return data[:at] + self.random.bytes(int(self.random.integers(1, 65))) + data[at:]

    def delete(self, data: bytes) -> bytes:
        at = self.place(data)
        return data[:at] + data[at + int(self.random.integers(1, 65)) :]

    def swap(self, data: bytes) -> bytes:
        a, b = sorted((self.place(data), self.place(data)))
        length = min(int(self.random.integers(1, 4097)), b - a)
        return data[:a] + data[b : b + length] + data[a + length : b] + data[a : a + length] + data[b + length :]


def _all(data: bytes, mark: bytes) -> Iterator[int]:
    at = data.find(mark)
    while at >= 0:
        yield at
        at = data.find(mark, at + 1)


class Edit(Damage):
    """Random changes of what a checkpoint says, with the checksums put right, as an attacker makes them."""

    def __call__(self, data: bytes) -> bytes:
        kinds = (self.pickle_bytes, self.pickle_opcodes, self.option, self.weight, self.members, self.pickle_bytes)
        return kinds[self.random.integers(len(kinds))](data)

    def archive(self, data: bytes, change: Callable[[str, bytes], bytes | None]) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
            for name in old.namelist():
                content = change(name, old.read(name))
                if content is not None:
                    new.writestr(name, content)
        return buffer.getvalue()

    def pickled(self, data: bytes, change: Callable[[bytes], bytes]) -> bytes:
        return self.archive(data, lambda name, content: change(content) if name.endswith("/data.pkl") else content)

    def pickle_bytes(self, data: bytes) -> bytes:
        return self.pickled(data, Damage(self.random))

    def pickle_opcodes(self, data: bytes) -> bytes:
        """Opcodes left out, repeated, moved, replaced, or some that call things."""

        def change(content: bytes) -> bytes:
            starts = [at for _, _, at in pickletools.genops(content)] + [len(content)]
            parts = [content[a:b] for a, b in pairwise(starts)]
            for _ in range(self.random.integers(1, 4)):
                at = int(self.random.integers(len(parts)))
                kind = self.random.integers(5)
                if kind == 0:
                    del parts[at]
                elif kind == 1:
                    parts.insert(at, parts[self.random.integers(len(parts))])
                elif kind == 2:
                    other = int(self.random.integers(len(parts)))
                    parts[at], parts[other] = parts[other], parts[at]
                elif kind == 3:
                    codes = [code.code.encode("latin-1") for code in pickletools.opcodes]
                    parts[at] = codes[self.random.integers(len(codes))] + parts[at][1:]
                else:
                    calls = (
                        b"cos\nsystem\nX\4\0\0\0true\x85R", b"cbuiltins\neval\nX\3\0\0\0" b"1+1\x85R",
                        b"ctorch\nload\nX\1\0\0\0x\x85R", b"cbuiltins\ngetattr\n)R", b"ctorch._utils\n_rebuild_tensor_v2\n)R",
                        b"ctorch\nempty\nJ\xff\xff\xff\x7f\x85R", b"csubprocess\nPopen\nX\4\0\0\0true\x85R",
                        b"ccollections\nOrderedDict\n)R", b"ctorch._utils\n_rebuild_sparse_tensor\n)R",
                    )  # fmt: skip
                    parts.insert(at, calls[self.random.integers(len(calls))])
            return b"".join(parts)

        return self.pickled(data, change)

    def content(self, data: bytes, change: Callable[[dict, dict], None]) -> bytes:
        content = torch.load(io.BytesIO(data), weights_only=True)
        change(content["hyper_parameters"], content["state_dict"])
        buffer = io.BytesIO()
        torch.save(content, buffer)
        return buffer.getvalue()

    def option(self, data: bytes) -> bytes:
        values = (
            None, True, False, 0, 1, -1, 2, 10**6, 10**20, 0.5, -1.0, 1e300, float("nan"), float("inf"), "", "no", "tensornet",
            "tensornet2", "sum", "mean", "gauss", "Atomref", "ZBL", [], [1], {}, {"ZBL": {}}, [{"D2": None}], (1,), torch.ones(2), 32, 64,
        )  # fmt: skip

        def change(options: dict, _: dict) -> None:
            for _ in range(self.random.integers(1, 4)):
                name = sorted(options)[self.random.integers(len(options))]
                if self.random.random() < 0.2:
                    del options[name]
                else:
                    options[name] = values[self.random.integers(len(values))]

        return self.content(data, change)

    def weight(self, data: bytes) -> bytes:
        def change(_: dict, state: dict) -> None:
            name = sorted(state)[self.random.integers(len(state))]
            value = state[name]
            ways: tuple[Callable[[], Any], ...] = (
                lambda: value.double(), lambda: value.half(), lambda: value.long(), lambda: value.flatten(), lambda: value.unsqueeze(0),
                lambda: value * float("nan"), lambda: value * 1e38 * 1e38, lambda: value.flatten()[:1], lambda: None, lambda: 3.0,
                lambda: value.to(torch.bfloat16), lambda: value.to(torch.complex64), lambda: value.to_sparse() if value.dim() else value,
                lambda: torch.empty(0), lambda: value.expand(1, *value.shape), lambda: torch.zeros(()).expand(value.shape),
            )  # fmt: skip
            choice = self.random.integers(len(ways) + 2)
            if choice == len(ways):
                del state[name]
            elif choice > len(ways):
                state[f"{name}x"] = state.pop(name)
            else:
                state[name] = ways[choice]()

        return self.content(data, change)

    def members(self, data: bytes) -> bytes:
        """Members of the archive left out, shortened, lengthened."""
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            chosen = archive.namelist()[self.random.integers(len(archive.namelist()))]

        def change(name: str, content: bytes) -> bytes | None:
            if name != chosen:
                return content
            kind = self.random.integers(4)
            return (
                None if kind == 0 else content[: len(content) // 2] if kind == 1 else content * 2 if kind == 2 else b""
            )

        return self.archive(data, change)


def read_checkpoint(path: Path) -> str:
    """What a checkpoint gives: a hash of its weights, options and the numbers of a molecule."""
    model = load_model(path)
    numbers = [z % model.config.max_z or 1 for z in (8, 1, 1)]
    x = torch.tensor([[0.0, 0, 0], [0.096, 0, 0], [-0.024, 0.093, 0]], dtype=torch.float64)
    energy, forces = reference_energy_and_forces(copy_double(model), Atoms.make(numbers), x)
    described = {k: v for k, v in model.metadata.items() if k != "source_hash"}
    return hashlib.sha256(repr((model_hash(model), described, energy.tolist(), forces.tolist())).encode()).hexdigest()


def read_exported(path: Path) -> str:
    """The same of an exported file."""
    exported = load_exported(path)
    x = torch.tensor([[0.0, 0, 0], [0.096, 0, 0], [-0.024, 0.093, 0]], dtype=torch.float64)
    return repr((exported.metadata, [v.tolist() for v in exported.module(x)]))


def read_run(path: Path) -> str:
    """The same of the checkpoint of a run."""
    return repr(runfiles.Checkpoint.read(path, 3))


READERS: dict[str, Callable[[Path], str]] = {
    "checkpoint": read_checkpoint, "exported file": read_exported, "run": read_run,
}  # fmt: skip


def originals(folder: Path, models: list[Path]) -> list[tuple[str, Path]]:
    """Files to mutate: checkpoints of several shapes, an exported file, and the checkpoint of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    exported = folder / "exported.pt"
    export_potential(load_model(models[0]), exported, atomic_numbers=[8, 1, 1])
    topology, system, positions = small_system(exported)
    summary = simulation.simulate(topology, system, positions, output=folder / "run", **RUN | {"time": 0.02})
    return [*(("checkpoint", path) for path in models), ("exported file", exported), ("run", summary.files.checkpoint)]


def mutate(seed: int, files: list[tuple[str, Path]]) -> tuple[str, str, bytes]:
    """Kind of file, way and bytes of a mutated file. Checkpoints are the majority."""
    random = np.random.default_rng(seed)
    pick = random.random()
    chosen = [f for f in files if f[0] == ("exported file" if pick < 0.05 else "run" if pick < 0.1 else "checkpoint")]
    kind, path = chosen[random.integers(len(chosen))]
    edited = kind == "checkpoint" and random.random() < 0.5
    return kind, "edited" if edited else "damaged", (Edit if edited else Damage)(random)(path.read_bytes())


def try_file(seed: int, files: list[tuple[str, Path]], expected: dict[str, set[str]], path: Path) -> str:
    """Outcome of one mutated file; text that does not begin with "ok" is a defect."""
    kind, way, data = mutate(seed, files)
    path.write_bytes(data)
    try:
        with forbidden():
            found = READERS[kind](path)
    except ValueError as error:
        if "\n" in str(error) or str(path) not in str(error):
            return f"a message without the file or of several lines: {error}"
        return f"ok {kind} {way}: refused"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    if found in expected[kind]:
        return f"ok {kind} {way}: the same"
    if way == "damaged":
        return f"{kind}: other numbers from a damaged file"
    return f"ok {kind} {way}: read as what it says now"


class Executed(BaseException):
    """A file brought about something that no file may."""


_watching = False


@contextmanager
def forbidden() -> Iterator[None]:
    """Turn the events of :data:`FORBIDDEN` into :class:`Executed`."""
    global _watching
    _watching = True
    try:
        yield
    finally:
        _watching = False


def _audit(event: str, arguments: tuple) -> None:
    global _watching
    if not _watching or not event.startswith(FORBIDDEN):
        return
    if event == "open" and "w" not in str(arguments[1]) and not int(arguments[2] or 0) & os.O_CREAT:
        return
    # Importing a module when it is first needed is no harm.
    if event in ("exec", "compile") and os.path.isfile(str(getattr(arguments[0], "co_filename", arguments[-1]))):
        return
    _watching = False
    raise Executed(f"{event} {arguments!r}"[:300])


def mutated_files(count: int, first_seed: int, models: list[Path], folder: Path) -> Counter[str]:
    """Try so many mutated files in processes that may crash; counts of outcomes.

    A process that dies or takes longer than :data:`SECONDS` counts as a defect of the file that it was at.
    """
    repr(
        (torch.ones(2), torch.ones(2).to_sparse())
    )  # for a message; torch imports, and evaluates annotations, when it is first asked
    files = originals(folder, models)
    expected: dict[str, set[str]] = {}
    for kind, path in files:
        expected.setdefault(kind, set()).add(READERS[kind](path))
    outcomes: Counter[str] = Counter()
    next_seed, end = first_seed, first_seed + count
    while next_seed < end:
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(read)
            _worker(range(next_seed, end), files, expected, folder, write)
        os.close(write)
        with os.fdopen(read, "rb", buffering=0) as results:
            while next_seed < end:
                outcome = _line(results, SECONDS)
                if outcome is None:
                    os.kill(process, signal.SIGKILL)
                    outcome = "no answer: crashed or hung"
                if not outcome.startswith("ok"):
                    print(f"seed {next_seed}: {outcome}", flush=True)
                    outcome = f"DEFECT {outcome.split(':')[0]}"
                outcomes[outcome.removeprefix("ok ")] += 1
                next_seed += 1
                if outcome.startswith("DEFECT no answer"):
                    break
        os.waitpid(process, 0)
    return outcomes


def _line(stream: Any, seconds: float) -> str | None:
    """A line from a pipe within some time; None if none came."""
    import select

    text = b""
    while not text.endswith(b"\n"):
        if not select.select([stream], [], [], seconds)[0]:
            return None
        byte = stream.read(1)
        if not byte:
            return None
        text += byte
    return text.decode().rstrip("\n")


def _worker(seeds: range, files: list, expected: dict, folder: Path, write: int) -> None:
    size = (
        int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        if sys.platform == "linux"
        else None
    )
    if size is not None:
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    sys.dont_write_bytecode = True
    warnings.simplefilter("ignore")
    faulthandler.disable()  # a crash is counted, and its trace would be taken for one of the tests'
    path = folder / f"mutated-{os.getpid()}"
    sys.addaudithook(_audit)
    try:
        for seed in seeds:
            outcome = try_file(seed, files, expected, path)
            os.write(write, (" ".join(outcome.split())[:1000] + "\n").encode())
    finally:
        path.unlink(missing_ok=True)
        os._exit(0)


# ---------------------------------------------------------------------------------------------- killed runs

# Short, and yet with some hundred reports.
RUN: dict[str, Any] = dict(
    time=0.5, report_interval=5, equilibration_time=0.005, seed=5, quiet=True, platform="Reference", temperature=200
)


def small_system(model: Path) -> tuple[Any, openmm.System, np.ndarray]:
    """A water whose energy is a model's plus springs that keep it whole."""
    from openmm.app import Element, Topology

    topology = Topology()
    residue = topology.addResidue("HOH", topology.addChain())
    atoms = [topology.addAtom(name, Element.getBySymbol(name[0]), residue) for name in ("O", "H1", "H2")]
    topology.addBond(atoms[0], atoms[1])
    topology.addBond(atoms[0], atoms[2])
    positions = np.array([[0.0, 0.0, 0.0], [0.096, 0.0, 0.0], [-0.024, 0.093, 0.0]])
    system = create_system(topology, model)
    springs = openmm.HarmonicBondForce()
    for k in (1, 2):
        springs.addBond(0, k, 0.096, 3e5)
    springs.addBond(1, 2, 0.15, 1e5)
    system.addForce(springs)
    return topology, system, positions


def killed_runs(kills: int, seed: int, models: list[Path], folder: Path) -> Counter[str]:
    """Kill runs at random moments, again and again until they are done, and compare with undisturbed ones; counts.

    `models` are exported files. Trajectory, energies and charges must be the same to the last bit.
    """
    random = np.random.default_rng(seed)
    counts: Counter[str] = Counter()
    undisturbed = []
    for number, model in enumerate(models):
        topology, system, positions = small_system(model)
        options = RUN | {"charges": "q_dim" in load_exported(model).metadata["model"]["config"]}
        started = time.perf_counter()
        files = simulation.simulate(
            topology, system, positions, output=folder / f"undisturbed-{number}", **options
        ).files
        undisturbed.append(((topology, system, positions), options, files, time.perf_counter() - started))
    while counts["kills"] < kills:
        arguments, options, expected, seconds = undisturbed[counts["runs"] % len(undisturbed)]
        output = folder / "killed"
        shutil.rmtree(output, ignore_errors=True)
        resume = False
        while True:
            process = os.fork()
            if process == 0:
                simulation.CHECKPOINT_SECONDS = float(random.choice([0, 0.02, 0.1]))
                status = 1
                try:
                    simulation.simulate(*arguments, output=output, resume=resume and output.exists(), **options)
                    status = 0
                finally:
                    os._exit(status)
            time.sleep(random.uniform(0, seconds))
            os.kill(process, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            resume = True
            if status == -signal.SIGKILL:
                counts["kills"] += 1
                state = runfiles.RunFiles.in_directory(output)
                counts[
                    "kills before the first checkpoint" if not state.checkpoint.exists() else "kills during the run"
                ] += 1
                continue
            if status != 0:
                counts["DEFECT a run that could not be resumed"] += 1
            break
        found = runfiles.RunFiles.in_directory(output)
        same = status == 0 and all(_content(getattr(found, n)) == _content(getattr(expected, n)) for n in _OUTPUTS)
        counts["runs"] += 1
        counts["runs equal to the last bit" if same else "DEFECT another trajectory"] += 1
        leftover = [path.name for path in output.iterdir() if path.name.endswith(".tmp")]
        counts["half files that a kill left under another name"] += len(leftover)
    return counts


_OUTPUTS = ("trajectory", "energies", "charges", "final", "start")


def _content(path: Path) -> bytes | None:
    """A file without the date in the header of a DCD and in a PDB's remark; None if there is none."""
    if not path.exists():
        return None
    content = path.read_bytes()
    if path.suffix == ".dcd":
        return content[:96] + content[runfiles.DCD_HEADER_BYTES :]
    return b"\n".join(line for line in content.splitlines() if not line.startswith(b"REMARK"))


# ------------------------------------------------------------------------------------------------ properties


@st.composite
def models(draw: Any) -> TensorNet:
    """A small model of any shape, with random weights."""
    lower = draw(st.sampled_from([0.0, 0.0, 0.5]))
    shape: dict[str, Any] = dict(
        embedding_dimension=draw(st.integers(2, 9)),
        num_layers=draw(st.integers(0, 2)),
        num_rbf=draw(st.integers(3, 8)),
        rbf_type=draw(st.sampled_from(["expnorm", "gauss"])),
        trainable_rbf=draw(st.booleans()),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        cutoff_lower=lower,
        cutoff_upper=draw(st.sampled_from([2.5, 3.5, 5.0])),
        max_z=draw(st.integers(10, 40)),
        group=draw(st.sampled_from(["O(3)", "SO(3)"])),
        reduce_op=draw(st.sampled_from(["sum", "sum", "mean"])),
        head_hidden_layers=draw(st.integers(0, 2)),
    )
    torch.manual_seed(draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        return TensorNet(TensorNetConfig(**shape)).eval()
    coulomb = draw(st.booleans())
    cutoff = draw(st.sampled_from([None, 3.0, 6.0])) if coulomb else None
    return TensorNet2(
        TensorNet2Config(**shape, q_dim=draw(st.integers(1, 3)), coulomb=coulomb, coulomb_cutoff=cutoff)
    ).eval()


@st.composite
def geometries(draw: Any, model: TensorNet) -> dict[str, Any]:
    """Atoms, positions (nm), a box or None, and where in a System the atoms are."""
    count = draw(st.integers(1, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.11, 0.16, 0.3]))
    lattice = np.array(list(np.ndindex(2, 2, 2)))[random.permutation(8)[:count]]
    positions = lattice * spread + random.uniform(-0.02, 0.02, (count, 3)) + random.uniform(-5, 5, 3)
    several = count > 1 and draw(st.booleans())
    molecules = np.sort(random.integers(0, 2, count)).tolist() if several else [0] * count
    molecules = [m - molecules[0] for m in molecules]
    charges = random.integers(-1, 2, max(molecules) + 1).tolist()
    numbers = random.integers(1, 10, count).tolist()
    box = None
    if max(molecules) == 0 and draw(st.booleans()):
        coulomb = isinstance(model, TensorNet2) and model.config.coulomb
        cutoff = max(model.network_cutoff, (model.config.coulomb_cutoff or 12.0) if coulomb else 0.0) / 10
        edges = 2 * cutoff * random.uniform(1.01, 1.5, 3)
        box = np.diag(edges)
        if draw(st.booleans()):
            box[1, 0], box[2, 0] = random.uniform(-0.5, 0.5, 2) * edges[0]
            box[2, 1] = random.uniform(-0.5, 0.5) * edges[1]
    particles = random.permutation(count + 3)[:count].tolist() if draw(st.booleans()) else None
    return dict(
        atoms=Atoms.make(numbers, molecules, charges), positions=positions, box=box, particles=particles, random=random
    )


def _evaluate(
    force: openmm.Force, particles: int, box: np.ndarray | None, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Energy (kJ/mol), shape (1,), and forces (kJ/mol/nm) on the Reference platform."""
    system = openmm.System()
    for _ in range(particles):
        system.addParticle(1.0)
    if box is not None:
        system.setDefaultPeriodicBoxVectors(*(openmm.Vec3(*row) for row in box))
    system.addForce(force)
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(positions)
    state = context.getState(energy=True, forces=True)
    energy = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    return np.array([energy]), state.getForces(asNumpy=True).value_in_unit(unit.kilojoule_per_mole / unit.nanometer)


def _agree(found: tuple[Any, Any], reference: tuple[Any, Any], what: str) -> None:
    pairs = [tuple(torch.as_tensor(np.asarray(v), dtype=torch.float64) for v in pair) for pair in (found, reference)]
    difference = deviation(pairs[0], pairs[1])
    # Forces that cancel have no norm to compare with.
    absolute = float((pairs[0][1] - pairs[1][1]).abs().max())
    tolerance = TOLERANCES["double"]
    assert difference.energy <= tolerance.energy, (what, difference)
    assert difference.force <= tolerance.force or absolute < 1e-4, (what, difference, absolute)


def one_potential(data: Any) -> None:
    """Reference = exported = reloaded = both back ends; symmetries; outside of the domain NaN."""
    model = data.draw(models())
    case = data.draw(geometries(model))
    atoms, x, box, particles, random = (case[k] for k in ("atoms", "positions", "box", "particles", "random"))
    count = len(x)
    options = dict(precision="double", periodic=box is not None, particles=particles, kernels="portable")
    tensors = torch.tensor(x), None if box is None else torch.tensor(box)
    chosen = choose_coulomb_cutoff(model, box is not None, None)
    reference = reference_energy_and_forces(copy_double(chosen), atoms, *tensors)
    total = reference[0].sum().reshape(1), reference[1]

    size = count if particles is None else count + 3
    places = list(range(count)) if particles is None else particles

    def everywhere(own: np.ndarray) -> np.ndarray:
        full = random.uniform(-9, 9, (size, 3))
        full[places] = own
        return full

    exported = compile_potential(model, atoms, positions=tensors[0], box=tensors[1], **options)
    arguments = [torch.tensor(everywhere(x))] + ([] if box is None else [tensors[1]])
    energy, forces = exported.module(*arguments)
    _agree((energy.reshape(1), forces[places]), total, "exported")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        from openmm_tensornet.export import save

        save(exported, path)
        common: dict[str, Any] = dict(
            atomic_numbers=list(atoms.numbers), molecules=list(atoms.molecules), total_charge=list(atoms.charges), atoms=particles,
            box_vectors=box,
        )  # fmt: skip
        made = {backend: force_class(backend)(path, **common) for backend in ("torch", "python")}
    for backend, force in made.items():
        evaluated = _evaluate(force, size, box, everywhere(x))
        _agree((evaluated[0], evaluated[1][places]), total, backend)
        others = np.delete(evaluated[1], places, axis=0)
        assert (others == 0).all(), "a force on an atom that is none of the force's"

    def module(own: np.ndarray, lattice: np.ndarray | None = box) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = [torch.tensor(everywhere(own))] + ([] if lattice is None else [torch.tensor(lattice)])
        energy, forces = exported.module(*inputs)
        return energy.reshape(1), forces[places]

    if box is None:
        turn, _ = np.linalg.qr(random.normal(size=(3, 3)))
        if np.linalg.det(turn) < 0 and model.config.group == "SO(3)":
            turn[0] *= -1
        energy, forces = module(x @ turn.T + random.uniform(-3, 3, 3))
        _agree((energy, forces @ torch.tensor(turn)), total, "rotation and translation")
    else:
        _agree(
            module(x + random.integers(-3, 4, (count, 3)) @ box + random.uniform(-3, 3, 3)),
            total,
            "lattice translation",
        )
    order = np.arange(count)
    labels = list(zip(atoms.numbers, atoms.molecules, strict=True))
    for label in set(labels):
        like = [k for k in range(count) if labels[k] == label]
        order[like] = random.permutation(like)
    energy, forces = module(x[order])
    back = np.argsort(order)
    _agree((energy, forces[back]), total, "permutation of like atoms")

    # Outside of the domain
    broken = x.copy()
    broken[random.integers(count), random.integers(3)] = random.choice([np.nan, np.inf, -np.inf])
    _all_nan(module(broken), "a coordinate that is no number")
    same = [(i, j) for i in range(count) for j in range(i) if atoms.molecules[i] == atoms.molecules[j]]
    if same:
        i, j = same[random.integers(len(same))]
        near = x.copy()
        near[i] = near[j]
        _all_nan(module(near), "two atoms in one place")
    if box is not None:
        small = box.copy()
        k = random.integers(3)
        small[:, k] *= random.uniform(0.01, 0.999) * 2 * exported.metadata["cutoff_nm"] / box[k, k]
        _all_nan(module(x, small), "a box below twice the cutoff")


def _all_nan(found: tuple[torch.Tensor, torch.Tensor], what: str) -> None:
    assert bool(found[0].isnan().all()) and bool(found[1].isnan().all()), (what, found)


def one_list(data: Any) -> None:
    """Every list has all pairs, or says that it has not."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    count = data.draw(st.integers(2, 120))
    cutoff = float(random.uniform(0.3, 0.6))
    box = None
    edges = random.uniform(2.01, 4.5, 3) * cutoff
    if data.draw(st.booleans()):
        box = torch.diag(torch.tensor(edges))
        if data.draw(st.booleans()):
            box[1, 0], box[2, 0] = (float(v) for v in random.uniform(-0.5, 0.5, 2) * edges[0])
            box[2, 1] = float(random.uniform(-0.5, 0.5) * edges[1])
    x = torch.tensor(
        random.uniform(0, 1, (count, 3)) * edges * random.choice([0.3, 1.0, 3.0]) + random.uniform(-9, 9, 3)
    )
    molecules = torch.tensor(random.integers(0, random.integers(1, 4), count))
    listed = find_pairs(x, molecules, cutoff, box).edge_index
    pairs = {tuple(pair) for pair in listed.T.tolist() if pair[0] < pair[1]}
    capacity = max(1, len(pairs) + int(random.integers(-3, 4)))
    finders: list[Any] = []
    if bool((torch.bincount(molecules) > 1).any()):
        finders.append(SelectedPairs(molecules, box is not None, cutoff, capacity))
    cells = tuple(int(v) for v in np.maximum(3, random.integers(3, 6, 3)))
    finders.append(CellPairs(molecules, box is not None, cutoff, capacity, Grid(cells, int(random.integers(2, 80)))))  # type: ignore[arg-type]
    from openmm_tensornet.kernels.definitions import geometry
    from openmm_tensornet.kernels.functions import FusedPairs
    from openmm_tensornet.kernels.operators import available

    lattice = torch.zeros(0, 3, dtype=torch.float64) if box is None else box
    if available():
        finders.append(FusedPairs(molecules, box is not None, cutoff, capacity))
    for finder in finders:
        index, vector, overflow = finder(x, box)
        assert index.shape[1] == capacity
        if bool(overflow):
            continue
        fused = isinstance(finder, FusedPairs)  # whose vectors come with the operator that follows
        distance = geometry(x, lattice, index, index, 2 * cutoff, False)[0] if fused else vector.norm(dim=1)
        near = (distance < cutoff).tolist()
        found = [tuple(sorted(p)) for p, within in zip(index.T.tolist(), near, strict=True) if within]
        assert len(found) == len(set(found)), (type(finder), "a pair twice")
        assert set(found) == pairs, (type(finder), "pairs missing without a word", pairs ^ set(found))
        assert len(pairs) <= capacity


PROPERTIES: dict[str, Callable[[Any], None]] = {"potentials": one_potential, "lists of pairs": one_list}


def check_property(name: str, examples: int, seed: int) -> None:
    """Try a property on so many examples; AssertionError with the first one that fails (a smaller one would take minutes to find)."""

    @with_seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.data())
    def run(data: Any) -> None:
        PROPERTIES[name](data)

    run()


def properties(minutes: float, seed: int) -> Counter[str]:
    """Try all properties for some time; counts of examples."""
    counts: Counter[str] = Counter()
    end = time.monotonic() + 60 * minutes
    batches = {"potentials": 5, "lists of pairs": 50}
    while time.monotonic() < end:
        for name, examples in batches.items():
            try:
                check_property(name, examples, seed)
                counts[f"examples of {name}"] += examples
            except Exception as error:
                print(f"seed {seed}: {name}: {error}", flush=True)
                counts[f"DEFECT {name}"] += 1
        seed += 1
    return counts


# --------------------------------------------------------------------------------------------------- program


def exported_models(folder: Path) -> list[Path]:
    """One model without and one with charges, exported for a water."""
    from conftest import CHARGE_VARIANTS, VARIANTS

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, case in (("plain", VARIANTS["zero-layers"]), ("charges", CHARGE_VARIANTS["no-layers"])):
        paths.append(folder / f"{name}.pt")
        export_potential(load_model(case.checkpoint), paths[-1], atomic_numbers=[8, 1, 1])
    return paths


def checkpoints() -> list[Path]:
    """Small checkpoints, one for each corner of the format."""
    from conftest import CHARGE_VARIANTS, VARIANTS

    return [case.checkpoint for case in (*VARIANTS.values(), *CHARGE_VARIANTS.values())]


def main() -> int:
    """Run the parts, those that fork beside the properties."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=10_000, help="mutated files (default: 10000)")
    parser.add_argument("--kills", type=int, default=60, help="kills (default: 60)")
    parser.add_argument("--minutes", type=float, default=25, help="for the properties (default: 25)")
    parser.add_argument("--seed", type=int, default=None, help="first seed (default: from the clock, and printed)")
    parser.add_argument("--part", choices=("faults", "properties"), help="one of the two alone")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    if options.part is None:
        print(f"first seed {seed}", flush=True)
        common = ["--files", options.files, "--kills", options.kills, "--minutes", options.minutes, "--seed", seed]
        parts = [
            subprocess.Popen([sys.executable, __file__, "--part", part, *map(str, common)])
            for part in ("faults", "properties")
        ]
        return max(part.wait() for part in parts)
    torch.set_num_threads(1)
    started = time.monotonic()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.part == "properties":
            counts += properties(options.minutes, seed)
        else:
            counts += mutated_files(options.files, seed, checkpoints(), folder / "files")
            counts += killed_runs(options.kills, seed, exported_models(folder / "models"), folder)
    print(f"\n{options.part}, {(time.monotonic() - started) / 60:.1f} minutes:")
    for outcome, count in sorted(counts.items()):
        print(f"{count:8,}  {outcome}")
    return int(any(outcome.startswith("DEFECT") for outcome in counts))


if __name__ == "__main__":
    sys.exit(main())
