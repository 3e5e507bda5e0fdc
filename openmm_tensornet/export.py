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
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from . import __version__
from .atoms import Atoms, check_particles
from .checks import array, flag
from .files import DAMAGED, check_file, open_archive, replace_file, rewrite_archive
from .geometry import check_positions
from .graphsafety import check_graph_safety
from .model import TensorNet
from .module import Module
from .neighbors import check_box
from .potential import StaticPotential, choose_coulomb_cutoff, expected_energies_and_forces
from .program import coulomb_cutoff_of
from .scriptcode import DESCRIPTION, MEMBERS, check_operators, runs_when_loaded
from .testing import TOLERANCES, deviation, geometries

FORMAT = "openmm-tensornet"
FORMAT_VERSION = 1
# Modules that register operators; a file that needs them says so, and they must be imported before it is loaded.
FUSED, NNPOPS = "openmm_tensornet.kernels.operators", "openmm_tensornet.neighbors"
_ATEN = torch.ops.aten
# Replicas are evaluated in blocks of about so many atoms, whose intermediate values stay in a CPU's cache: 64 alanine
# dipeptides at once take three times as long.
BLOCK_ATOMS = 96


class _OfAtoms(Module):
    """A program for the potential's atoms that takes positions of the whole System, shape (S, 3)."""

    def __init__(self, program: nn.Module, atoms: Tensor | None, count: int):
        super().__init__()
        self.program, self.count = program, count
        self.subset = atoms is not None
        self.register_buffer("atoms", atoms if atoms is not None else torch.empty(0, dtype=torch.long))

    def check(self, positions: Tensor):
        """Refuse a System of another size (a shape is known without asking the device)."""
        if not self.subset and positions.size(0) != self.count:
            raise RuntimeError(
                "TensorNetForce: the System has another number of particles than the force has atoms; pass atoms="
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

    The CPU platforms hand over positions that require gradients. `no_grad` keeps autograd from recording anything; a
    `detach` would not do, since freezing removes it. Nothing may raise inside the block: TorchScript crashes.
    """

    def __init__(self, program: nn.Module, charges: nn.Module | None, atoms: Tensor | None, count: int):
        super().__init__(program, atoms, count)
        self.metadata = ""
        self.charges = charges  # not run by forward, so that freezing drops it

    def forward(self, positions: Tensor):
        energies, forces = self.evaluate(positions)
        return energies.sum(), forces

    @torch.jit.export
    def evaluate(self, positions: Tensor):
        """Energies of the molecules, shape (M,), and forces (S, 3)."""
        self.check(positions)
        with torch.no_grad():
            energies, forces = self.program(self.gather(positions))
            forces = self.scatter(positions, forces)
        return energies, forces

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
        return energies.sum(), forces

    @torch.jit.export
    def evaluate(self, positions: Tensor, boxvectors: Tensor):  # type: ignore[override]
        self.check(positions)
        with torch.no_grad():
            energies, forces = self.program(self.gather(positions), boxvectors.to(positions.dtype))
            forces = self.scatter(positions, forces)
        return energies, forces


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
        with torch.no_grad():
            forces = forces * scale.to(forces.dtype)
        return energy * scale.to(energy.dtype), forces


class _ScaledPeriodic(_Scaled):
    """The same with box vectors."""

    def forward(self, positions: Tensor, boxvectors: Tensor, scale: Tensor):  # type: ignore[override]
        energy, forces = self.plain(positions, boxvectors)
        return self.scaled(energy, forces, scale)


class _ByDevice(Module):
    """The same program twice: for GPUs, operator by operator, and for CPUs, with sequences of kernels in one call."""

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
    """Equal molecules without a box: all at once on a GPU, where launches cost, and block by block on a CPU.

    Parameters
    ----------
    together, block : nn.Module
        Programs for all molecules and for a block of them: positions to energies, shape (M,), and forces, shape (N, 3).
    members : Tensor of int64, shape (blocks, atoms of a block)
        The atoms of each block.
    """

    def __init__(self, together: nn.Module, block: nn.Module, members: Tensor):
        super().__init__()
        self.together, self.block = together, block
        self.register_buffer("members", members)
        self.register_buffer("place", torch.argsort(members.flatten()))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if positions.is_cuda:
            energy, force = self.together(positions)
            return energy, force
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


def scriptable(program: fx.GraphModule) -> fx.GraphModule:
    """A copy of a flat graph that `torch.jit.script` takes.

    Overload names and device arguments go, and matrix products are written so that TorchScript's optimiser neither
    splits them (addmm) nor mistakes the shape of a constant left operand (mm, bmm).
    """
    graph = fx.Graph()
    output = graph.graph_copy(program.graph, {})
    graph.output(output)
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
        return Exported(torch.jit.script(wrapper(self.module, json.dumps(self.metadata)).eval()), self.metadata)


@torch.enable_grad()  # wherever the user is: the backward pass is recorded
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
    cases = geometries(atoms, model.network_cutoff * model.units.nm_per_length, positions, box if periodic else None)
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
        "pair_list": None if potential.capacity is None else potential.finder,
        "max_coulomb_pairs": None if potential.rooms[1] is None else potential.rooms[1].capacity,
        "kernels": kernels,
        "needs_imports": [
            module for module, needed in ((FUSED, kernels == "fused"), (NNPOPS, potential.finder == "nnpops")) if needed
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
    program = _program(potential)
    blocks = None if periodic or potential.capacity is not None else replica_blocks(atoms)
    if blocks is not None:
        together = torch.jit.script(_Cluster(program, None, index, count).eval())
        _compare(together, cases, expected, particles, precision)
        options = {"precision": precision, "tabulate": tabulate, "kernels": kernels}
        program = _Replicas(program, _block_program(model, atoms, blocks[0], cases, expected, options), blocks)
    module = torch.jit.script(wrapper(program, charges, index, count).eval())
    example = [torch.zeros(count if particles is None else max(particles) + 1, 3)]
    if periodic:
        example.append(torch.eye(3))
    # The fused kernels are for CPUs: without a GPU in sight the question does not arise, and its answer would import PyTorch's compiler.
    checked = kernels == "portable" or torch.cuda.is_available()
    metadata["launches"] = check_graph_safety(module, *example).kernels if checked else None
    metadata["deviation"] = _compare(module, cases, expected, particles, precision)
    return Exported(module, {}).describe(**metadata)  # complete only now; freezing above took a copy


def _block_program(
    model: TensorNet, atoms: Atoms, members: Tensor, cases: dict, expected: dict, options: dict
) -> nn.Module:
    """The program for some molecules alone."""
    own = [atoms.molecules[k] for k in members]
    first = sorted(set(own))
    block = Atoms.make(
        [atoms.numbers[k] for k in members], [first.index(m) for m in own], [atoms.charges[m] for m in first]
    )
    check = [
        (x[members], None, (expected[name][0][first], expected[name][1][members])) for name, (x, _) in cases.items()
    ]
    potential = StaticPotential(model, block, **options, check=check)
    return _program(potential)


def _program(potential: StaticPotential) -> nn.Module:
    """What TorchScript is made of."""
    program = scriptable(potential.program)
    if not potential.fused:
        return program
    from .kernels.lowering import lower  # which needs numba

    by_device = _PeriodicByDevice if potential.periodic else _ByDevice
    return by_device(program, scriptable(lower(potential.program)))


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
            found = deviation((energy.reshape(1), forces), (energies.sum().reshape(1), own))
            if not found.within(TOLERANCES[precision]):
                raise RuntimeError(
                    f"the exported module disagrees with the reference model on geometry '{name}': energy off by "
                    f"{found.energy:.2e} eV an atom (at most {TOLERANCES[precision].energy:.0e}), forces by {found.force:.2e} of "
                    f"their norm (at most {TOLERANCES[precision].force:.0e}); try precision='double', and please report it"
                )
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

    Returns
    -------
    dict
        The file's metadata.
    """
    if not isinstance(model, TensorNet):
        raise TypeError(f"model: expected a TensorNet, received {type(model).__name__}; read it with load_model")
    atoms = Atoms.make(atomic_numbers, molecules, total_charge)
    check_supported(model, atoms)
    flag("periodic", periodic)
    flag("tabulate", tabulate)
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
        kernels=kernels,
        positions=own,
        box=box,
        coulomb_cutoff=coulomb_cutoff,
    )
    save(exported, path)
    return exported.metadata


def check_supported(model: TensorNet, atoms: Atoms, labels: list[str] | None = None) -> None:
    """Refuse elements that the model does not know, and warn where it was made for another molecule.

    Parameters
    ----------
    labels : list of str, optional
        What to call each atom in the message.
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
    if "molecule" in model.about:
        _warn_about_another_molecule(model.about["molecule"], atoms)


def _warn_about_another_molecule(meant: dict, atoms: Atoms) -> None:
    for molecule in range(len(atoms.charges)):
        numbers = sorted(z for z, m in zip(atoms.numbers, atoms.molecules, strict=True) if m == molecule)
        if numbers != sorted(meant["atomic_numbers"]):
            warnings.warn(
                f"model: it was trained for {meant['name']} ({len(meant['atomic_numbers'])} atoms) and nothing else, "
                f"received another molecule ({len(numbers)} atoms); energies and forces will be wrong: use a general model",
                stacklevel=4,
            )
            return


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
        for module in (FUSED, NNPOPS):
            if module in metadata["needs_imports"]:
                importlib.import_module(module)
        module = torch.jit.load(io.BytesIO(content), map_location="cpu")
        check_operators(module)
    except Exception as error:
        raise ValueError(
            f"{os.fspath(path)}: expected an exported TensorNet file, received one that cannot be loaded "
            f"({' '.join(str(error).split())[:300]})"
        ) from None
    return Exported(module, metadata)
