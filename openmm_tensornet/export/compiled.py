"""A potential as the module of a force: made, checked against the reference model, and described."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..common.atoms import Atoms
from ..common.float32 import ieee_float32
from ..common.interrupts import delivered
from ..graph.capture import check_graph_safety
from ..models.accuracy import TOLERANCES, Deviation, deviation, geometries, packing
from ..models.tensornet import TensorNet
from ..static.potential import (
    DEFAULTS,
    KERNELS,
    Options,
    StaticPotential,
    choose_coulomb_cutoff,
    expected_energies_and_forces,
)
from ..static.program import box_cutoff, coulomb_cutoff_of
from .modules import ByDevice, Charges, EnergyAndForces, Scaled
from .programs import PartialCharges, Potential, cpu_program, made
from .specification import Specification, key_of

FORMAT, FORMAT_VERSION = "openmm-tensornet", 3
DEVICES = ("cpu", "cuda")  # in the order in which a potential names what it has for each


def model_hash(model: TensorNet) -> str:
    """SHA-256 of a model's configuration, units and weights."""
    digest = hashlib.sha256(json.dumps([asdict(model.config), asdict(model.units)], sort_keys=True).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().double().contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Exported:
    """A checked module for a force, what it says of itself, and the bytes of the specification, unless it holds its programs itself."""

    module: EnergyAndForces | torch.jit.ScriptModule
    metadata: dict
    content: bytes | bytearray = b""

    @classmethod
    def of_data(cls, metadata: dict, content: bytes | bytearray, scripted: bool = False) -> Exported:
        """A module of operators that find the programs of a specification in this process; TorchScript, which TorchForce runs, or not."""
        content = bytearray(content)  # which the module shares; PyTorch takes no memory that cannot be written
        given = torch.frombuffer(content, dtype=torch.uint8), metadata["key"], len(metadata["total_charge"]), scripted
        charges = PartialCharges(*given) if metadata["partial_charges"] else None
        module: Any = _wrapped(metadata, Potential(*given), charges)
        if scripted:
            from .torchscript import inlined  # deprecated in PyTorch, and loaded for TorchForce alone

            module = inlined(module)
        return cls(module, {}, content).describe(**metadata)

    def describe(self, **entries) -> Exported:
        """The same module, which from now on also says `entries` of itself."""
        metadata = self.metadata | entries
        self.module.metadata = json.dumps(metadata)
        return Exported(self.module, metadata, self.content)

    def scaled(self) -> Exported:
        """As TorchScript, with one more argument, by which it multiplies energy and forces."""
        from .torchscript import inlined

        return Exported(inlined(Scaled(self.module, json.dumps(self.metadata))), self.metadata, self.content)


@torch.enable_grad()  # wherever the user is: the backward pass is recorded
@ieee_float32
@delivered()
def compile_potential(
    model: TensorNet,
    atoms: Atoms,
    options: Options = DEFAULTS,
    *,
    particles: list[int] | None = None,
    positions: Tensor | None = None,
    box: Tensor | None = None,
    coulomb_cutoff: float | None = None,
    scripted: bool = False,
    self_contained: bool = False,
) -> Exported:
    """Make and check the module that a force runs.

    Parameters
    ----------
    model : TensorNet
    atoms : Atoms
    options : Options
    particles : list of int, optional
        Index in the System of each atom; by default the System has these atoms alone.
    positions, box : Tensor, optional
        Of the atoms, in nm: geometries for the checks. Random packings otherwise.
    coulomb_cutoff : float, optional
        nm; see :func:`~openmm_tensornet.static.potential.choose_coulomb_cutoff`.
    scripted : bool
        Whether the module is TorchScript, for TorchForce.
    self_contained : bool
        Whether it is TorchScript that holds its programs, rather than what they are made of.

    Raises
    ------
    RuntimeError
        If the module, frozen where it is TorchScript, disagrees with the reference model.
    GraphSafetyError
        If it could not be captured in a CUDA graph.
    """
    periodic, precision = options.periodic, options.precision
    model = choose_coulomb_cutoff(model, periodic, coulomb_cutoff)
    if periodic and box is None:
        edge = max(2.2 * model.cutoff * model.units.nm_per_length, (len(atoms.numbers) / 60) ** (1 / 3))
        box = torch.eye(3, dtype=torch.float64) * edge
    cutoff = model.network_cutoff * model.units.nm_per_length
    cases = geometries(atoms, cutoff, positions, box if periodic else None)
    expected = expected_energies_and_forces(model, atoms, cases)
    check = [(*cases[k], expected[k]) for k in cases]
    potential = StaticPotential.make(model, atoms, options, check=check)
    # Where PyTorch's own operators do it, the program for GPUs runs here too; a list would take GBs of memory.
    if (
        potential.gpu_program is not potential.program
        and KERNELS[options.kernels][1] == "portable"
        and potential.capacity is None
    ):
        for name, case in cases.items():
            _check(potential.gpu_program(*case[: 1 + periodic]), expected[name], name, precision)
    specification = Specification(model, atoms, options, potential.plan)
    content = specification.pack()
    metadata = {
        **describe(specification),
        "key": key_of(content),
        "package_version": __version__,
        "torch_version": torch.__version__,
        "particles": particles,
        "tabulation": potential.tabulation,
    }
    if self_contained:
        exported = Exported(_self_contained(specification, potential, metadata), metadata)
    else:
        exported = Exported.of_data(metadata, content, scripted)
    with made(metadata["key"], specification, potential):
        found = check_graph_safety(exported.module, *example_inputs(specification, particles))
        assert found.fixed_results
        worst = _compare(exported.module, cases, expected, particles, precision)
    return exported.describe(launches=found.kernels, deviation=worst)


def example_inputs(specification: Specification, particles: list[int] | None) -> list[Tensor]:
    """Positions of all particles, and a box where there is one; in single precision, as CUDA gives them unless told otherwise."""
    atoms, cutoff = specification.atoms, box_cutoff(specification.model)
    positions = packing(atoms, 1)
    if particles is not None:
        positions = positions.new_zeros(max(particles) + 1, 3).index_copy(0, torch.tensor(particles), positions)
    edge = 3 * max(cutoff, float(positions.abs().max()))
    return [positions.float(), torch.eye(3) * edge][: 1 + specification.options.periodic]


def describe(specification: Specification) -> dict:
    """What follows from a specification."""
    model, atoms, plan = specification.model, specification.atoms, specification.plan
    list_plan, coulomb = plan.gpu_list_plans[0], plan.list_plans[1]
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": model.metadata,
        "model_hash": model_hash(model),
        "atomic_numbers": list(atoms.numbers),
        "elements": sorted(set(atoms.numbers)),
        "replicas": list(atoms.replicas),
        "total_charge": list(atoms.charges),
        "cutoff_nm": box_cutoff(model),
        "network_cutoff_nm": model.network_cutoff * model.units.nm_per_length,
        "coulomb_cutoff_nm": coulomb_cutoff_of(model),
        "periodic": specification.options.periodic,
        "precision": specification.options.precision,
        "max_pairs": list_plan.capacity,
        "pair_lists": None
        if list_plan.capacity is None
        else dict(zip(DEVICES, (plan.list_plans[0].finder, list_plan.finder), strict=True)),
        "max_coulomb_pairs": None if coulomb is None else coulomb.capacity,
        "kernels": specification.options.kernels,
        "partial_charges": specification.has_charges,
        "units": {"positions": "nm", "energy": "kJ/mol", "forces": "kJ/mol/nm"},
    }


def _self_contained(specification: Specification, potential: StaticPotential, metadata: dict) -> torch.jit.ScriptModule:
    """TorchScript of the programs for CPUs and GPUs themselves."""
    from .torchscript import inlined, scriptable

    on_cpu, on_gpu = cpu_program(specification, potential, scriptable), scriptable(potential.gpu_program)
    charges = None if potential.charge_program is None else scriptable(potential.charge_program)
    return inlined(_wrapped(metadata, ByDevice(on_gpu, on_cpu), charges))


def _wrapped(metadata: dict, program: nn.Module, charges: nn.Module | None) -> EnergyAndForces:
    index = None if metadata["particles"] is None else torch.tensor(metadata["particles"])
    given = index, len(metadata["atomic_numbers"]), metadata["periodic"]
    if charges is not None:
        charges = Charges(charges, *given)
    return EnergyAndForces(program, charges, *given)


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
    """Largest deviations of the module, frozen if it is TorchScript, from the reference; raises if they are too large."""
    frozen = module
    if isinstance(module, torch.jit.ScriptModule):
        from ..common import jit

        frozen = jit.freeze(module.eval())
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
        numbers = sorted(z for z, m in zip(atoms.numbers, atoms.replicas, strict=True) if m == molecule)
        if numbers != sorted(meant["atomic_numbers"]):
            raise ValueError(
                f"model: it was trained for {meant['name']} ({len(meant['atomic_numbers'])} atoms) and nothing else, "
                f"received another molecule ({len(numbers)} atoms), whose energies and forces would be wrong; use a general model, or "
                "pass any_molecule=True (--any-molecule)"
            )
