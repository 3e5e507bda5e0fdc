"""Export of static potentials as TorchScript; the only module that knows TorchScript.

An exported file describes itself: its metadata are in the module's attribute `metadata` (JSON), which survives OpenMM's
XML, and once more as a plain entry of the archive, which can be read without loading any code.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from . import __version__
from .atoms import Atoms, check_particles
from .checks import array, flag
from .files import DAMAGED, check_file, open_archive, replace_file, rewrite_archive
from .geometry import check_positions
from .graphsafety import check_graph_safety, copied
from .interrupts import delivered
from .model import TensorNet
from .module import Module
from .neighbors import check_box
from .potential import (
    KERNELS,
    StaticPotential,
    choose_coulomb_cutoff,
    choose_kernels,
    expected_energies_and_forces,
)
from .program import coulomb_cutoff_of
from .scriptcode import DESCRIPTION, MEMBERS, check_operators, runs_when_loaded
from .testing import TOLERANCES, Deviation, deviation, geometries

FORMAT = "openmm-tensornet"
FORMAT_VERSION = 1
# Features that a file may need, and the module that must be imported before it is loaded, since it registers the operators.
FEATURES = {"fused": "openmm_tensornet.kernels.operators", "nnpops": "openmm_tensornet.neighbors"}
_ATEN = torch.ops.aten
DEVICES = ("cpu", "cuda")  # in the order in which a potential names what it has for each
# Replicas are evaluated in blocks of about so many atoms, whose intermediate values stay in a CPU's cache: 64 alanine
# dipeptides at once take three times as long.
BLOCK_ATOMS = 96


class _OfAtoms(Module):
    """A program for the potential's atoms that takes positions of the whole System, shape (S, 3)."""

    def __init__(self, program: nn.Module, atoms: Tensor | None, count: int):
        super().__init__()
        self.program, self.count = program, count
        self.subset = atoms is not None
        self.largest = int(atoms.max()) if atoms is not None else count - 1
        self.register_buffer("atoms", atoms if atoms is not None else torch.empty(0, dtype=torch.long))

    def check(self, positions: Tensor):
        """Refuse a System of another size (a shape is known without asking the device)."""
        if not self.subset and positions.size(0) != self.count:
            raise RuntimeError(
                "TensorNetForce: the System has another number of particles than the force has atoms; pass atoms="
            )
        if positions.size(0) <= self.largest:  # a gather would read other memory
            raise RuntimeError(
                f"atoms: expected indices below the number of the System's particles, {positions.size(0)}, received {self.largest}; "
                "make the force with the indices of this System"
            )

    def gather(self, positions: Tensor) -> Tensor:
        """Positions of the potential's atoms."""
        return positions.index_select(0, self.atoms) if self.subset else positions


class _Charges(_OfAtoms):
    """Partial charges, shape (N,), without a box."""

    def forward(self, positions: Tensor):
        self.check(positions)
        return self.program(self.gather(positions))


class _PeriodicCharges(_OfAtoms):
    """The same with box vectors."""

    def forward(self, positions: Tensor, boxvectors: Tensor):
        self.check(positions)
        return self.program(self.gather(positions), boxvectors.to(positions.dtype))


class _Cluster(_OfAtoms):
    """What TorchForce calls, without a box: positions (S, 3) of the whole System to (energy, forces).

    The results lie in the same memory at every call. On CUDA TorchForce captures one graph that gives the energy alone and one that
    gives both, but reads the results of the last capture whichever it replays.

    The CPU platforms hand over positions that require gradients; their `data` do not, and nothing is recorded. A `detach` would
    not do, since freezing removes it, nor a `no_grad` block, in which an exception (of a signal, say) ends the process.
    """

    def __init__(self, program: nn.Module, charges: nn.Module | None, atoms: Tensor | None, count: int):
        super().__init__(program, atoms, count)
        self.metadata = ""
        self.charges = charges  # not run by forward, so that freezing drops it
        self.register_buffer("energy", torch.zeros((), dtype=torch.float64))
        # One for each dtype of positions, since on a GPU nothing may convert it later.
        self.register_buffer("forces_single", torch.zeros(0, 3))
        self.register_buffer("forces_double", torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, positions: Tensor):
        energies, forces = self.evaluate(positions)
        return self.fixed(energies, forces)

    def fixed(self, energies: Tensor, forces: Tensor):
        """Energy, shape (), and forces, (S, 3), where they are at every call."""
        own = self.forces_double if forces.dtype == torch.float64 else self.forces_single
        if own.size(0) != forces.size(0):  # at the first call; from then on they stay in one place
            own.set_(torch.zeros_like(forces))
        return self.energy.copy_(energies.sum()), own.copy_(forces)

    @torch.jit.export
    def evaluate(self, positions: Tensor):
        """Energies of the molecules, shape (M,), and forces (S, 3)."""
        self.check(positions)
        positions = positions.data
        energies, forces = self.program(self.gather(positions))
        return energies, self.scatter(positions, forces)

    def scatter(self, positions: Tensor, forces: Tensor) -> Tensor:
        """Forces of all particles of the System."""
        forces = forces.to(positions.dtype)
        if self.subset:
            return torch.zeros_like(positions).index_copy(0, self.atoms, forces)
        return forces


class _Periodic(_Cluster):
    """The same with box vectors."""

    def forward(self, positions: Tensor, boxvectors: Tensor):  # type: ignore[override]
        energies, forces = self.evaluate(positions, boxvectors)
        return self.fixed(energies, forces)

    @torch.jit.export
    def evaluate(self, positions: Tensor, boxvectors: Tensor):  # type: ignore[override]
        self.check(positions)
        positions = positions.data
        energies, forces = self.program(self.gather(positions), boxvectors.to(positions.dtype))
        return energies, self.scatter(positions, forces)


class _Scaled(Module):
    """A module that TorchForce calls, times a global parameter by which it differentiates the energy."""

    def __init__(self, plain: nn.Module, metadata: str):
        super().__init__()
        self.plain, self.metadata = plain, metadata

    def forward(self, positions: Tensor, scale: Tensor):
        energy, forces = self.plain(positions)
        return self.scaled(energy, forces, scale)

    def scaled(self, energy: Tensor, forces: Tensor, scale: Tensor):
        """The scale has shape (), or (1,) on CUDA, where its dtype would win over that of the 0-d energy."""
        return energy * scale.to(energy.dtype), forces * scale.data.to(forces.dtype)


class _ScaledPeriodic(_Scaled):
    """The same with box vectors."""

    def forward(self, positions: Tensor, boxvectors: Tensor, scale: Tensor):  # type: ignore[override]
        energy, forces = self.plain(positions, boxvectors)
        return self.scaled(energy, forces, scale)


class _ByDevice(Module):
    """Two programs that compute the same, for GPUs and for CPUs."""

    def __init__(self, on_gpu: nn.Module, on_cpu: nn.Module):
        super().__init__()
        self.on_gpu, self.on_cpu = on_gpu, on_cpu

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if positions.is_cuda:
            energies, forces = self.on_gpu(positions)
        else:
            energies, forces = self.on_cpu(positions)
        return energies, forces


class _PeriodicByDevice(_ByDevice):
    """The same with box vectors."""

    def forward(self, positions: Tensor, boxvectors: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if positions.is_cuda:
            energies, forces = self.on_gpu(positions, boxvectors)
        else:
            energies, forces = self.on_cpu(positions, boxvectors)
        return energies, forces


class _Replicas(Module):
    """Equal molecules without a box, block by block.

    Parameters
    ----------
    block : nn.Module
        Program for a block of them: positions to energies and forces.
    members : Tensor of int64, shape (blocks, atoms of a block)
        The atoms of each block.
    """

    def __init__(self, block: nn.Module, members: Tensor):
        super().__init__()
        self.block = block
        self.register_buffer("members", members)
        self.register_buffer("place", torch.argsort(members.flatten()))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        energies, forces = [], []
        for atoms in self.members.unbind(0):
            energy, force = self.block(positions.index_select(0, atoms))
            energies.append(energy)
            forces.append(force)
        energy, force = torch.cat(energies), torch.cat(forces).index_select(0, self.place)
        return energy, torch.add(force, energy.sum(), alpha=0)  # NaN of one makes all forces NaN


def replica_blocks(atoms: Atoms) -> Tensor | None:
    """The atoms of each block of equal molecules, shape (blocks, atoms of a block); None where there is but one block."""
    numbers, molecules, charges = atoms.tensors()
    sizes = torch.bincount(molecules, minlength=len(charges))
    if len(sizes) == 1 or int(sizes.min()) != int(sizes.max()) or len(set(atoms.charges)) > 1:
        return None
    members = torch.argsort(molecules, stable=True).view(len(sizes), -1)
    if bool((numbers[members] != numbers[members[0]]).any()):
        return None
    fitting = max(1, BLOCK_ATOMS // members.shape[1])
    count = max(k for k in range(1, min(fitting, len(sizes)) + 1) if len(sizes) % k == 0)
    return None if count == len(sizes) else members.view(len(sizes) // count, -1)


def inlined(module: nn.Module) -> torch.jit.ScriptModule:
    """Script a module and write what it calls into its own methods; tensors stay attributes, which move to another device.

    TorchForce freezes the module for each Context. Where that has something to inline, an exception in an operator (of a signal, say)
    ends the process: the interpreter looks up names of functions that freezing has removed.
    """
    scripted = torch.jit.script(module.eval())
    kept = [name for name in ("evaluate", "metadata", "charges", "plain") if hasattr(scripted, name)]
    frozen = torch.jit.freeze(scripted, [*kept, *(name for name, _ in scripted.named_buffers())])
    return copied(frozen)  # whose parts are modules for Python again


def keep_attributes(x: Tensor, tensors: list[Tensor]) -> None:
    """No-op that keeps freezing from making constants of tensors: they seem to be written.

    Constants stay in memory as long as the force exists, for every Context that was ever made of it.
    """
    if x.dim() == 0:
        for tensor in tensors:
            tensor.zero_()


def scriptable(program: fx.GraphModule) -> fx.GraphModule:
    """A copy of a flat graph that `torch.jit.script` takes.

    Overload names and device arguments go, and matrix products are written so that TorchScript's optimiser neither
    splits them (addmm) nor mistakes the shape of a constant left operand (mm, bmm).
    """
    graph = fx.Graph()
    output = graph.graph_copy(program.graph, {})
    graph.output(output)
    first = next(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        own = [graph.get_attr(name) for name, _ in program.named_buffers()]
        graph.call_function(keep_attributes, (first, own))
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("layout", "device", "pin_memory")}
        if node.target in (_ATEN.mm.default, _ATEN.bmm.default) and node.args[0].op == "get_attr":
            node.target = torch.matmul
        elif node.target is _ATEN.addmm.default and not node.kwargs:
            bias, left, right = node.args
            with graph.inserting_before(node):
                turned = graph.call_function(torch.ops.aten.t, (right,))
            node.target, node.args = torch.ops.aten.linear, (left, turned, bias)
        elif node.target is _ATEN._to_copy.default:  # nothing to do where the dtype is right already
            node.op, node.target = "call_method", "to"
        else:
            node.target = node.target.overloadpacket
    return fx.GraphModule(program, graph)


def model_hash(model: TensorNet) -> str:
    """SHA-256 of a model's configuration, units and weights."""
    digest = hashlib.sha256(json.dumps([asdict(model.config), asdict(model.units)], sort_keys=True).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().double().contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Exported:
    """A checked TorchScript module and what it says of itself."""

    module: torch.jit.ScriptModule
    metadata: dict

    def describe(self, **entries) -> Exported:
        """The same module, which from now on also says `entries` of itself."""
        metadata = self.metadata | entries
        self.module.metadata = json.dumps(metadata)
        return Exported(self.module, metadata)

    def scaled(self) -> Exported:
        """A module that takes one more argument, by which it multiplies energy and forces."""
        wrapper = _ScaledPeriodic if self.metadata["periodic"] else _Scaled
        return Exported(inlined(wrapper(self.module, json.dumps(self.metadata))), self.metadata)


@torch.enable_grad()  # wherever the user is: the backward pass is recorded
@delivered()
def compile_potential(
    model: TensorNet,
    atoms: Atoms,
    *,
    particles: list[int] | None = None,
    periodic: bool = False,
    precision: str = "single",
    tabulate: bool = True,
    max_pairs: int | None = None,
    kernels: str = "portable",
    positions: Tensor | None = None,
    box: Tensor | None = None,
    coulomb_cutoff: float | None = None,
) -> Exported:
    """Make, script and check the module that TorchForce runs.

    Parameters
    ----------
    model : TensorNet
    atoms : Atoms
    particles : list of int, optional
        Index in the System of each atom; by default the System has these atoms alone.
    periodic : bool
    precision : str
        "single" or "double".
    tabulate : bool
        False evaluates the radial functions themselves.
    max_pairs, kernels
        See :class:`~openmm_tensornet.potential.StaticPotential`.
    positions, box : Tensor, optional
        Of the atoms, in nm: geometries for the checks. Random packings otherwise.
    coulomb_cutoff : float, optional
        nm; see :func:`~openmm_tensornet.potential.choose_coulomb_cutoff`.

    Raises
    ------
    RuntimeError
        If the scripted and frozen module disagrees with the reference model.
    GraphSafetyError
        If it could not be captured in a CUDA graph.
    """
    model = choose_coulomb_cutoff(model, periodic, coulomb_cutoff)
    if periodic and box is None:
        edge = max(2.2 * model.cutoff * model.units.nm_per_length, (len(atoms.numbers) / 60) ** (1 / 3))
        box = torch.eye(3, dtype=torch.float64) * edge
    cases = geometries(atoms, positions, box if periodic else None)
    expected = expected_energies_and_forces(model, atoms, cases)
    potential = StaticPotential(
        model,
        atoms,
        periodic=periodic,
        precision=precision,
        tabulate=tabulate,
        max_pairs=max_pairs,
        kernels=kernels,
        check=[(*cases[k], expected[k]) for k in cases],
    )
    elements = sorted(set(atoms.numbers))
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "package_version": __version__,
        "torch_version": torch.__version__,
        "model": model.metadata,
        "model_hash": model_hash(model),
        "atomic_numbers": list(atoms.numbers),
        "elements": elements,
        "molecules": list(atoms.molecules),
        "total_charge": list(atoms.charges),
        "particles": particles,
        "cutoff_nm": potential.cutoff,
        "network_cutoff_nm": model.network_cutoff * model.units.nm_per_length,
        "coulomb_cutoff_nm": coulomb_cutoff_of(model),
        "periodic": periodic,
        "precision": precision,
        "max_pairs": potential.capacity,
        "pair_lists": None if potential.capacity is None else dict(zip(DEVICES, potential.finders, strict=True)),
        "max_coulomb_pairs": None if potential.rooms[1] is None else potential.rooms[1].capacity,
        "kernels": kernels,
        "features": [
            name
            for name, needed in (("fused", "fused" in KERNELS[kernels]), ("nnpops", "nnpops" in potential.finders))
            if needed
        ],
        "tabulation": potential.tabulation,
        "units": {"positions": "nm", "energy": "kJ/mol", "forces": "kJ/mol/nm"},
    }
    index = None if particles is None else torch.tensor(particles)
    count = len(atoms.numbers)
    charges: nn.Module | None = None
    if potential.charge_program is not None:
        charges = (_PeriodicCharges if periodic else _Charges)(scriptable(potential.charge_program), index, count)
    wrapper = _Periodic if periodic else _Cluster
    program: nn.Module = scriptable(potential.gpu_program)
    on_cpu = None if potential.program is potential.gpu_program else _cpu_program(potential)
    blocks = None if periodic or potential.capacity is not None else replica_blocks(atoms)
    if blocks is not None:
        options = {"precision": precision, "tabulate": tabulate, "kernels": kernels}
        on_cpu = _Replicas(_cpu_program(_block_potential(model, atoms, blocks[0], cases, expected, options)), blocks)
    if on_cpu is not None:
        # Where PyTorch's own operators do it, the program for GPUs runs here too; a list would take GBs of memory.
        if KERNELS[kernels][1] == "portable" and potential.capacity is None:
            for name, case in cases.items():
                _check(potential.gpu_program(*case[: 1 + periodic]), expected[name], name, precision)
        program = (_PeriodicByDevice if periodic else _ByDevice)(program, on_cpu)
    module = inlined(wrapper(program, charges, index, count))
    example = [torch.zeros(count if particles is None else max(particles) + 1, 3)]
    if periodic:
        example.append(torch.eye(3))
    found = check_graph_safety(module, *example)
    assert found.fixed_results
    metadata["launches"] = found.kernels
    metadata["deviation"] = _compare(module, cases, expected, particles, precision)
    return Exported(module, {}).describe(**metadata)  # complete only now; freezing above took a copy


def _block_potential(
    model: TensorNet, atoms: Atoms, members: Tensor, cases: dict, expected: dict, options: dict
) -> StaticPotential:
    """The potential of some molecules alone."""
    own = [atoms.molecules[k] for k in members]
    first = sorted(set(own))
    block = Atoms.make(
        [atoms.numbers[k] for k in members], [first.index(m) for m in own], [atoms.charges[m] for m in first]
    )
    check = [
        (x[members], None, (expected[name][0][first], expected[name][1][members])) for name, (x, _) in cases.items()
    ]
    return StaticPotential(model, block, **options, check=check)


def _cpu_program(potential: StaticPotential) -> nn.Module:
    """What TorchScript is made of for CPUs."""
    if not potential.fused:
        return scriptable(potential.program)
    from .kernels.lowering import lower  # which needs numba

    return scriptable(lower(potential.program))


def _check(found, expected, name: str, precision: str) -> Deviation:
    """How far energies and forces are from the reference; raises if that is too far."""
    off = deviation(found, expected)
    if not off.within(TOLERANCES[precision]):
        raise RuntimeError(
            f"the exported module disagrees with the reference model on geometry '{name}': energy off by "
            f"{off.energy:.2e} eV an atom (at most {TOLERANCES[precision].energy:.0e}), forces by {off.force:.2e} of "
            f"their norm (at most {TOLERANCES[precision].force:.0e}); try precision='double', and please report it"
        )
    return off


def _compare(module, cases: dict, expected: dict, particles: list[int] | None, precision: str) -> dict:
    """Largest deviations of the frozen module from the reference; raises if they are too large."""
    frozen = torch.jit.freeze(module.eval())
    worst = {"energy_eV_per_atom": 0.0, "relative_force": 0.0}
    for _ in range(2):  # the profiling executor changes its plan after the first calls
        for name, (x, box) in cases.items():
            if particles is not None:
                full = x.new_zeros(max(particles) + 1, 3)
                full[particles] = x
            else:
                full = x
            with torch.no_grad():
                energy, forces = frozen(full) if box is None else frozen(full, box)
            if particles is not None:
                forces = forces[particles]
            energies, own = expected[name]
            found = _check((energy.reshape(1), forces), (energies.sum().reshape(1), own), name, precision)
            worst["energy_eV_per_atom"] = max(worst["energy_eV_per_atom"], found.energy)
            worst["relative_force"] = max(worst["relative_force"], found.force)
    return worst


def save(exported: Exported, path: str | os.PathLike) -> None:
    """Write an exported module, atomically."""
    check_operators(exported.module)  # or it could not be read again
    buffer = io.BytesIO()
    torch.jit.save(exported.module, buffer, _extra_files={"metadata.json": json.dumps(exported.metadata)})
    replace_file(path, buffer.getvalue())


def export_torchscript(
    model: TensorNet,
    path: str | os.PathLike,
    *,
    atomic_numbers,
    molecules=None,
    total_charge=0,
    particles: list[int] | None = None,
    periodic: bool = False,
    precision: str = "single",
    tabulate: bool = True,
    max_pairs: int | None = None,
    kernels: str = "portable",
    positions=None,
    box_vectors=None,
    coulomb_cutoff: float | None = None,
    any_molecule: bool = False,
) -> dict:
    """Write a self-describing TorchScript file that TorchForce runs, after checking it against the reference model.

    Parameters
    ----------
    model : TensorNet
    path : path
        Written atomically, and only if the frozen module agrees with the model and can be captured in a CUDA graph.
    atomic_numbers : sequence of int
    molecules : sequence of int, optional
        Molecule of each atom; molecules do not see each other.
    total_charge : number or sequence of numbers
        Of the one molecule, or one for each molecule.
    particles : list of int, optional
        Index in the System of each atom.
    periodic, precision, tabulate, max_pairs, kernels
        See :class:`~openmm_tensornet.potential.StaticPotential`.
    positions, box_vectors : array of shape (N, 3) and (3, 3), optional
        nm; geometries for the checks.
    coulomb_cutoff : float, optional
        nm, of a model with a Coulomb interaction. By default the model's own; where it has none, 1.2 with periodic boundaries and no
        cutoff in vacuum.
    any_molecule : bool
        Take a model that was trained for one molecule for others too, whose energies and forces will be wrong.

    Returns
    -------
    dict
        The file's metadata.
    """
    if not isinstance(model, TensorNet):
        raise TypeError(f"model: expected a TensorNet, received {type(model).__name__}; read it with load_model")
    atoms = Atoms.make(atomic_numbers, molecules, total_charge)
    check_supported(model, atoms, any_molecule=flag("any_molecule", any_molecule))
    periodic, tabulate = flag("periodic", periodic), flag("tabulate", tabulate)
    if particles is not None:
        particles = check_particles(particles)
        if len(particles) != len(atoms.numbers):
            raise ValueError(
                f"particles: expected one index for each of {len(atoms.numbers)} atoms, received {len(particles)}"
            )
    own = None if positions is None else torch.from_numpy(array("positions", positions, (len(atoms.numbers), 3)))
    box = None if box_vectors is None else torch.from_numpy(array("box_vectors", box_vectors, (3, 3)))
    if box is not None:
        if not periodic:
            raise ValueError("box_vectors: expected None with periodic=False, received a box; pass periodic=True")
        chosen = choose_coulomb_cutoff(model, periodic, coulomb_cutoff)
        check_box(box, chosen.cutoff * chosen.units.nm_per_length, "box_vectors", " nm")
    if own is not None:
        check_positions(own, atoms, [f"atom {k} (atomic number {z})" for k, z in enumerate(atoms.numbers)], box)
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"path: expected a file in a directory that exists, received {os.fspath(path)}")
    exported = compile_potential(
        model,
        atoms,
        particles=particles,
        periodic=periodic,
        precision=precision,
        tabulate=tabulate,
        max_pairs=max_pairs,
        kernels=choose_kernels(kernels),
        positions=own,
        box=box,
        coulomb_cutoff=coulomb_cutoff,
    )
    save(exported, path)
    return exported.metadata


def check_supported(
    model: TensorNet, atoms: Atoms, labels: list[str] | None = None, *, any_molecule: bool = False
) -> None:
    """Refuse elements that the model does not know, and molecules that it was not made for.

    Parameters
    ----------
    labels : list of str, optional
        What to call each atom in the message.
    any_molecule : bool
        Take a model that was made for one molecule for others too.
    """
    for k, z in enumerate(atoms.numbers):
        label = f"atom {k} (atomic number {z})" if labels is None else labels[k]
        if z >= model.config.max_z:
            raise ValueError(
                f"{label}: expected an atomic number below the model's max_z, {model.config.max_z}, received {z}"
            )
        if model.elements is not None and z not in model.elements:
            raise ValueError(
                f"{label}: expected an element that the model was trained on (atomic numbers {', '.join(map(str, model.elements))}), "
                f"received {z}; use another model for this molecule"
            )
    if "molecule" in model.about and not any_molecule:
        _refuse_another_molecule(model.about["molecule"], atoms)


def _refuse_another_molecule(meant: dict, atoms: Atoms) -> None:
    for molecule in range(len(atoms.charges)):
        numbers = sorted(z for z, m in zip(atoms.numbers, atoms.molecules, strict=True) if m == molecule)
        if numbers != sorted(meant["atomic_numbers"]):
            raise ValueError(
                f"model: it was trained for {meant['name']} ({len(meant['atomic_numbers'])} atoms) and nothing else, "
                f"received another molecule ({len(numbers)} atoms), whose energies and forces would be wrong; use a general model, or "
                "pass any_molecule=True (--any-molecule)"
            )


def read_metadata(path: str | os.PathLike) -> dict:
    """Metadata of an exported file; no code of the file is loaded.

    Raises
    ------
    ValueError
        If the file is damaged, was not written by this package, or is of a newer format.
    """
    return _read(os.fspath(path))[0]


def _read(name: str) -> tuple[dict, bytes]:
    """Metadata, and the file as it may be given to PyTorch."""
    if not os.path.lexists(name):
        raise FileNotFoundError(f"{name}: expected an exported TensorNet file, which does not exist")
    check_file(name, "an exported TensorNet file")
    try:
        with open(name, "rb") as file, open_archive(file) as archive:
            content = rewrite_archive(archive)
            members = archive.namelist()
            text = archive.read(DESCRIPTION) if DESCRIPTION in members else None
            surplus = [n for n in members if not MEMBERS.fullmatch(n)]
            runs = any(runs_when_loaded(archive.read(n)) for n in members if n.endswith((".py", ".pkl")))
    except DAMAGED as error:
        raise ValueError(
            f"{name}: expected an exported TensorNet file, received another or a damaged or truncated one ({error}); "
            "export the model again"
        ) from None
    if any(n.endswith("/data.pkl") for n in members) and not any(n.endswith("/constants.pkl") for n in members):
        raise ValueError(f"{name}: expected an exported TensorNet file, received a checkpoint; read it with load_model")
    if runs:
        raise ValueError(
            f"{name}: expected an exported TensorNet file, received one that runs code when it is loaded; export the model again"
        )
    if text is None:
        raise ValueError(
            f"{name}: expected a file written by export_torchscript, received another TorchScript or zip file; export the model "
            "with it"
        )
    if surplus:
        raise ValueError(
            f"{name}: expected an exported TensorNet file, received one with the member {surplus[0]!r}, which no such file has; "
            "export the model again"
        )
    return parse_metadata(text.decode("utf-8", "replace"), name), content


def parse_metadata(text: str, name: str) -> dict:
    """Check metadata given as JSON."""
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ValueError(f"{name}: expected metadata of {FORMAT}, received something else; export the model again")
    version = metadata.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(
            f"{name}: expected format version {FORMAT_VERSION} or older, received {version!r}; update openmm-tensornet "
            f"(the file was written by {metadata.get('package_version')})"
        )
    return metadata


def load_exported(path: str | os.PathLike) -> Exported:
    """Load an exported file; raises ValueError as :func:`read_metadata`."""
    metadata, content = _read(os.fspath(path))
    try:
        for feature in metadata["features"]:
            importlib.import_module(FEATURES[feature])
        module = torch.jit.load(io.BytesIO(content), map_location="cpu")
        check_operators(module)
    except Exception as error:
        raise ValueError(
            f"{os.fspath(path)}: expected an exported TensorNet file, received one that cannot be loaded "
            f"({' '.join(str(error).split())[:300]})"
        ) from None
    return Exported(module, metadata)
