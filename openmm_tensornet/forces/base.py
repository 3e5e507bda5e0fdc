"""What the forces of both back ends have in common: their arguments, copies, and what they can tell of a Context."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import openmm
import torch
from openmm import unit
from torch import Tensor

from ..common.atoms import Atoms
from ..common.checks import either_order, flag, integer, renamed
from ..common.interrupts import delivered, translate
from ..export.compiled import Exported
from ..export.modules import EnergyAndForces
from ..models.tensornet import TensorNet
from ..neighbors.reference import check_box, find_pairs
from ..static.positions import ClosePair, check_positions, nearest_neighbors
from .arguments import prepare

if TYPE_CHECKING:
    from typing_extensions import Self

MAXIMUM_WARMUP = 10_000  # evaluations before the capture of a CUDA graph: minutes
translate(openmm.OpenMMException)


class PotentialForce:
    """Base of :class:`~openmm_tensornet.TensorNetForce`, which explains the arguments.

    A subclass derives from an OpenMM Force too, makes that from a module (`_build`), and gets the module back from one that
    was read (`_adopt`).

    Attributes
    ----------
    metadata : dict
        What the force says of itself: model, elements, replicas, charges, particles, cutoff, precision, name, scale parameter.
    """

    metadata: dict
    _module: EnergyAndForces | torch.jit.ScriptModule  # without the scale parameter
    _scripted: bool  # whether the OpenMM Force runs TorchScript

    @either_order
    def __init__(
        self,
        model: str | os.PathLike | TensorNet,
        topology: Any = None,
        *,
        atomic_numbers: Any = None,
        atoms: Any = None,
        replicas: Any = None,
        total_charge: Any = 0,
        periodic: bool | None = None,
        positions: Any = None,
        box_vectors: Any = None,
        coulomb_cutoff: Any = None,
        max_pairs: int | None = None,
        kernels: str = "auto",
        precision: str = "single",
        cuda_graphs: bool = True,
        warmup_steps: int = 10,
        scale_parameter: str | None = None,
        name: str | None = None,
        any_molecule: bool = False,
        molecules: Any = None,
    ):
        replicas = renamed("replicas", replicas, "molecules", molecules)
        cuda_graphs = flag("cuda_graphs", cuda_graphs)
        warmup_steps = integer("warmup_steps", warmup_steps, 10, MAXIMUM_WARMUP)
        if scale_parameter is not None and not (isinstance(scale_parameter, str) and scale_parameter.isidentifier()):
            raise ValueError(
                f"scale_parameter: expected a name of letters, digits and underscores, received {scale_parameter!r}"
            )
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name: expected a string, received {name!r}")
        exported = prepare(
            model,
            topology,
            atomic_numbers=atomic_numbers,
            atoms=atoms,
            replicas=replicas,
            total_charge=total_charge,
            periodic=periodic,
            positions=positions,
            box_vectors=box_vectors,
            coulomb_cutoff=coulomb_cutoff,
            max_pairs=max_pairs,
            kernels=kernels,
            precision=precision,
            any_molecule=flag("any_molecule", any_molecule),
            scripted=self._scripted,
        ).describe(name=type(self).__name__ if name is None else name, scale_parameter=scale_parameter)
        self._build(exported, cuda_graphs, warmup_steps)
        self.setUsesPeriodicBoundaryConditions(exported.metadata["periodic"])
        self._describe(exported)

    def _build(self, exported: Exported, cuda_graphs: bool, warmup_steps: int) -> None:
        """Initialise the OpenMM Force."""
        raise NotImplementedError

    def _adopt(self, force: openmm.Force) -> Exported:
        """Become a view of the object behind a Force; TypeError if that is none of this class."""
        raise NotImplementedError

    def _describe(self, exported: Exported) -> None:
        self._module, self.metadata = exported.module, exported.metadata
        self.setName(self.metadata["name"])

    if TYPE_CHECKING:  # what the OpenMM Force brings

        def setName(self, name: str) -> None: ...

        def setUsesPeriodicBoundaryConditions(self, periodic: bool) -> None: ...

    @classmethod
    def cast(cls, force: openmm.Force) -> Self:
        """The force behind what OpenMM returns: `system.getForce(i)`, or a System or force that was copied or read from XML.

        Parameters
        ----------
        force : openmm.Force
            The result is another view of the same object, not a copy.

        Returns
        -------
        TensorNetForce or TensorNetPythonForce
            With its metadata (replicas, model, ...) and its name, which OpenMM's formats do not keep. The name is the one
            that the force was made with.

        Raises
        ------
        TypeError
            If it is a force of another kind.
        """
        if isinstance(force, cls):
            return force
        view = getattr(force, "_view", None)  # a second view would take the place of this one, which may own the object
        if not isinstance(view, cls):
            view = cls.__new__(cls)
            view._describe(view._adopt(force))
        return view

    def __copy__(self) -> Self:
        return type(self).cast(openmm.XmlSerializer.clone(self))

    def __setstate__(self, text: str) -> None:
        self.__dict__.update(type(self).cast(openmm.XmlSerializer.deserialize(text)).__dict__)

    def replica_energies(self, context: openmm.Context) -> unit.Quantity:
        """Energy of each replica at the positions of a Context; costs one evaluation.

        Parameters
        ----------
        context : openmm.Context
            Of a System that has this force.

        Returns
        -------
        Quantity of shape (replicas,)
            kJ/mol; their sum is what the force adds to the potential energy, the scale parameter included.
        """
        scale = self.metadata["scale_parameter"]
        factor = 1.0 if scale is None else context.getParameter(scale)
        energies = self._energies(context, *self._geometry(context))
        return factor * energies.cpu().numpy() * unit.kilojoule_per_mole

    def molecule_energies(self, context: openmm.Context) -> unit.Quantity:
        """Former name of :meth:`replica_energies`."""
        warnings.warn("molecule_energies is called replica_energies now", FutureWarning, stacklevel=2)
        return self.replica_energies(context)

    @delivered()
    def partial_charges(self, context: openmm.Context) -> np.ndarray:
        """Partial charges that a TensorNet2 predicts for the positions, and the box, of a Context.

        The mean over the charge channels of the network's last layer; those of a replica sum to its total charge. They are
        evaluated anew.

        Parameters
        ----------
        context : openmm.Context

        Returns
        -------
        array of float64, shape (atoms,)
            Of the force's atoms, in elementary charges.

        Raises
        ------
        ValueError
            If the model has no partial charges.
        """
        charges = getattr(self._module, "charges", None)
        if charges is None:
            raise ValueError(
                "partial_charges: expected a force of a model with partial charges (TensorNet2, such as AceFF-2.0), received one without"
            )
        arguments = [t for t in self._geometry(context) if t is not None]
        with torch.no_grad():
            return charges.cpu()(*arguments).numpy()

    def closest_atoms(self, context: openmm.Context) -> ClosePair:
        """The closest two atoms of one replica at the positions of a Context; nothing is evaluated.

        Parameters
        ----------
        context : openmm.Context
            Of a System that has this force.

        Returns
        -------
        ClosePair
            Indices of the two particles in the System, and their distance in nm; infinite where every replica is one atom.
        """
        positions, box = self._geometry(context)
        particles = self.metadata["particles"] or range(len(positions))
        found = nearest_neighbors(positions[list(particles)], self._atoms(), box).closest()
        return ClosePair(particles[found.first], particles[found.second], found.distance)

    def diagnose(self, context: openmm.Context) -> str | None:
        """Why the energy and the forces at the positions of a Context are NaN.

        Parameters
        ----------
        context : openmm.Context
            Of a System that has this force.

        Returns
        -------
        str or None
            One line that names the cause, with what was expected and what was found; None where all is well.
        """
        scale = self.metadata["scale_parameter"]
        if scale is not None and not np.isfinite(context.getParameter(scale)):
            return f"{scale}: expected a finite number, found {context.getParameter(scale)}"
        positions, box = self._geometry(context)
        if bool(torch.isfinite(self._energies(context, positions, box)).all()):
            return None
        metadata = self.metadata
        particles = metadata["particles"] or range(len(positions))
        own = positions[list(particles)]
        atoms = self._atoms()
        labels = [f"particle {p} (atomic number {z})" for p, z in zip(particles, atoms.numbers, strict=True)]
        try:
            if box is not None:
                check_box(box, metadata["cutoff_nm"], "box_vectors", " nm")
            check_positions(own, atoms, labels, box)
        except ValueError as error:
            return str(error)
        for kind, most in (("network", metadata["max_pairs"]), ("coulomb", metadata["max_coulomb_pairs"])):
            if most is None:
                continue
            cutoff = metadata[f"{kind}_cutoff_nm"]
            pairs = find_pairs(own, atoms.tensors()[1], cutoff, box).edge_index.shape[1] // 2
            if pairs > most:
                return (
                    f"positions: expected at most {most} pairs closer than the cutoff of {cutoff:g} nm, found {pairs}; make the force "
                    "with positions= of a geometry as dense as this one"
                )
        return (
            "positions: the network gives NaN, or atoms are more crowded than the cells of the pair list have room for; "
            "make the force with positions= of a geometry as dense as this one"
        )

    def _atoms(self) -> Atoms:
        metadata = self.metadata
        return Atoms.make(metadata["atomic_numbers"], metadata["replicas"], metadata["total_charge"])

    def _geometry(self, context: openmm.Context) -> tuple[Tensor, Tensor | None]:
        """Positions of all particles and, where periodic, the box; nm, float64."""
        state = context.getState(positions=True)
        positions = torch.tensor(state.getPositions(asNumpy=True).value_in_unit(unit.nanometer))
        if not self.metadata["periodic"]:
            return positions, None
        return positions, torch.tensor(state.getPeriodicBoxVectors(asNumpy=True).value_in_unit(unit.nanometer))

    @delivered()
    def _energies(self, context: openmm.Context, positions: Tensor, box: Tensor | None) -> Tensor:
        """Energies of the replicas, kJ/mol, without the scale parameter, from the device of the Context."""
        platform, device = context.getPlatform(), "cpu"
        if platform.getName() == "CUDA":
            device = f"cuda:{platform.getPropertyValue(context, 'DeviceIndex').split(',')[0]}"
        arguments = [t.to(device) for t in (positions, box) if t is not None]
        return self._module.to(device).evaluate(*arguments)[0]
