"""What is watched in a run: energies, temperatures, distances and bonds that no sound run has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..forces.system import atom_name
from .runfiles import BROKEN, RunFiles

if TYPE_CHECKING:
    import openmm
    from numpy.typing import NDArray
    from openmm.app import Topology

    from ..forces.base import PotentialForce


# A temperature that thermal fluctuations do not reach: see `Sentinels.highest_temperature`.
RUNAWAY, IMPROBABILITY = 3.0, 50.0
# What a start that is not at rest gives off: not a fault, and much only beside a thermostat of a few K.
RELEASED = 300.0  # K


class SimulationError(RuntimeError):
    """A run that had to stop; the text says at which step and why."""


@dataclass(frozen=True)
class Sentinels:
    """What stops a run.

    Attributes
    ----------
    temperature : float
        Of the thermostat, K.
    degrees_of_freedom : int
    bonds : Bonds or None
        Bonds that must not break.
    names : list of str
        Of the particles, for people.
    forces : list of PotentialForce
        The TensorNet forces, found once: OpenMM has a module read anew for each view of a force.
    """

    temperature: float
    degrees_of_freedom: int
    bonds: Bonds | None
    names: list[str]
    forces: list[PotentialForce]

    def check(
        self,
        context: openmm.Context,
        state: openmm.State,
        where: str,
        files: RunFiles | None = None,
        minimized: bool = True,
    ) -> None:
        """SimulationError with the cause, if the state of a context is one that must stop the run.

        Before it is minimised a structure may have atoms that are close.
        """
        cause = self._found(state)
        if cause is None and minimized:
            cause = self._close_atoms(context)
        if cause is not None:
            raise SimulationError(f"{where}: {cause}{self.cause(context)}{last_checkpoint(files)}")

    def _found(self, state: openmm.State) -> str | None:
        import numpy as np

        # The Reference platform itself would go on with NaN.
        energy = state.getPotentialEnergy()._value
        positions = state.getPositions(asNumpy=True)._value
        if not np.isfinite(positions).all():
            return "positions are NaN or infinite (time step too long, or atoms too close)"
        if not math.isfinite(energy):
            value = "NaN" if math.isnan(energy) else "infinite"
            return f"the potential energy is {value} (a geometry that the model cannot evaluate, or atoms too close)"
        if not math.isfinite(state.getKineticEnergy()._value):
            return "velocities are NaN or infinite (time step too long)"
        found, highest = temperature_of(state, self.degrees_of_freedom), self.highest_temperature
        if found > highest:
            return (
                f"the temperature is {found:.0f} K, expected at most {highest:.0f} K with a thermostat of {self.temperature:g} K "
                "(time step too long, a bad start, or a geometry that the model does not know)"
            )
        if self.bonds is not None:
            return self.bonds.broken(positions, state.getPeriodicBoxVectors(asNumpy=True)._value)
        return None

    def _close_atoms(self, context: openmm.Context) -> str | None:
        from ..static.tables import ORDINARY

        for force in self.forces:
            first, second, distance = force.closest_atoms(context)
            if distance < ORDINARY:
                return (
                    f"{self.names[first]} and {self.names[second]} are {distance:.4f} nm apart, closer than the {ORDINARY} nm that any "
                    "model was trained on (time step too long, a bad start, or a geometry that the model does not know)"
                )
        return None

    def cause(self, context: openmm.Context) -> str:
        """The time step, and what the TensorNet forces find at the positions of the context."""
        timestep = context.getIntegrator().getStepSize()._value * 1000
        found = (force.diagnose(context) for force in self.forces)
        return f"; the time step is {timestep:g} fs" + "".join(f"; {cause}" for cause in found if cause is not None)

    @property
    def highest_temperature(self) -> float:
        """K; what thermal fluctuations exceed with a probability below exp(−:data:`IMPROBABILITY`), and at least :data:`RUNAWAY` times the
        thermostat's and :data:`RELEASED` above it.

        B. Laurent, P. Massart, Ann. Stat. 28, 1302 (2000), lemma 1: χ² with k degrees of freedom is beyond k + 2√(kx) + 2x with a
        probability of at most exp(−x).
        """
        x = IMPROBABILITY / self.degrees_of_freedom
        return max(self.temperature * max(RUNAWAY, 1 + 2 * math.sqrt(x) + 2 * x), self.temperature + RELEASED)


@dataclass(frozen=True)
class Bonds:
    """The bonds of a topology.

    Attributes
    ----------
    labels : list of str
    index : array of int, shape (2, B)
    lengths : array, shape (B,)
        At the start, nm.
    periodic : bool
    """

    labels: list[str]
    index: NDArray
    lengths: NDArray
    periodic: bool

    @classmethod
    def of(cls, topology: Topology, system: openmm.System, positions: NDArray) -> Bonds:
        """The bonds as they are at `positions` (n, 3), nm."""
        import numpy as np

        pairs = list(topology.bonds())
        labels = [f"{atom_name(first)} and {atom_name(second)}" for first, second in pairs]
        index = np.array([[atom.index for atom in pair] for pair in pairs], dtype=int).reshape(-1, 2).T
        if not pairs:
            raise ValueError(
                "stop_at_broken_bond: expected a topology with bonds, received one without; add bonds (CONECT records in a PDB "
                "file) or leave it out"
            )
        periodic = system.usesPeriodicBoundaryConditions()
        box = np.array([v._value for v in system.getDefaultPeriodicBoxVectors()])
        return cls(labels, index, _lengths(positions, index, box if periodic else None), periodic)

    def broken(self, positions: NDArray, box: NDArray) -> str | None:
        """Which bond is longer than :data:`BROKEN` times its length at the start, the worst one."""
        found = _lengths(positions, self.index, box if self.periodic else None)
        worst = int((found / self.lengths).argmax())
        if found[worst] <= BROKEN * self.lengths[worst]:
            return None
        return (
            f"the bond between {self.labels[worst]} is broken: expected at most {BROKEN:g} times its first length, "
            f"{self.lengths[worst]:.4f} nm, found {found[worst]:.4f} nm"
        )


def _lengths(positions: NDArray, index: NDArray, box: NDArray | None) -> NDArray:
    """Distances of pairs of atoms, index of shape (2, P), to the nearest image in a reduced box; nm, shape (P,)."""
    import numpy as np

    vector = positions[index[0]] - positions[index[1]]
    if box is not None:
        for k in (2, 1, 0):
            vector = vector - np.round(vector[:, k : k + 1] / box[k, k]) * box[k]
    return np.linalg.norm(vector, axis=1)


def last_checkpoint(files: RunFiles | None) -> str:
    if files is None or not files.checkpoint.exists():
        return ""
    return f"; the last good checkpoint is {files.checkpoint}"


def temperature_of(state: openmm.State, degrees_of_freedom: int) -> float:
    """K."""
    from openmm import unit

    kinetic = state.getKineticEnergy().value_in_unit(unit.kilojoule_per_mole)
    gas_constant = unit.MOLAR_GAS_CONSTANT_R.value_in_unit(unit.kilojoule_per_mole / unit.kelvin)
    return 2 * kinetic / (degrees_of_freedom * gas_constant)
