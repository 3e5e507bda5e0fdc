"""Factors between a model's units and OpenMM's.

Inside a model everything is in the model's own units (angstrom and eV unless its loader was told
otherwise). OpenMM's side is nm, kJ/mol and kJ/mol/nm. The static program takes and gives these:
:mod:`openmm_tensornet.static.program` applies the factors, and :mod:`openmm_tensornet.models.accuracy` for the reference model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .checks import TRUTH_VALUES, array

if TYPE_CHECKING:
    from numpy.typing import NDArray

AVOGADRO = 6.02214076e23  # 1/mol, exact (SI 2019)
ELEMENTARY_CHARGE = 1.602176634e-19  # C, exact (SI 2019)
KJ_PER_MOL_PER_EV = ELEMENTARY_CHARGE * AVOGADRO / 1000.0  # 96.48533212331
NM_PER_ANGSTROM = 0.1


@dataclass(frozen=True)
class ModelUnits:
    """The units in which a model takes positions and returns energies.

    Attributes
    ----------
    length, energy : str
        Names for people.
    nm_per_length : float
        One model length in nm.
    kj_per_mol_per_energy : float
        One model energy in kJ/mol.
    """

    length: str = "angstrom"
    energy: str = "eV"
    nm_per_length: float = NM_PER_ANGSTROM
    kj_per_mol_per_energy: float = KJ_PER_MOL_PER_EV

    @classmethod
    def from_openmm(cls, length_unit: Any = None, energy_unit: Any = None) -> ModelUnits:
        """Make units from OpenMM units; None keeps the default (angstrom, eV).

        Parameters
        ----------
        length_unit, energy_unit : openmm.unit.Unit, optional
            For example ``openmm.unit.bohr`` and ``openmm.unit.hartree``. An energy may be given for a
            particle (hartree) or for a mole (kilocalorie_per_mole).

        Raises
        ------
        TypeError
            If an argument is no OpenMM unit or not of the right dimension.
        """
        if length_unit is None and energy_unit is None:
            return cls()
        from openmm import unit

        values: dict[str, Any] = {}
        if length_unit is not None:
            if not unit.is_unit(length_unit) or not length_unit.is_compatible(unit.nanometer):
                raise TypeError(
                    f"length_unit: expected an OpenMM unit of length such as openmm.unit.bohr, received {length_unit!r}"
                )
            values["length"] = length_unit.get_name()
            values["nm_per_length"] = float(length_unit.conversion_factor_to(unit.nanometer))
        if energy_unit is not None:
            if unit.is_unit(energy_unit) and energy_unit.is_compatible(unit.kilojoule_per_mole):
                factor = energy_unit.conversion_factor_to(unit.kilojoule_per_mole)
            elif unit.is_unit(energy_unit) and energy_unit.is_compatible(unit.joule):
                factor = energy_unit.conversion_factor_to(unit.joule) * AVOGADRO / 1000.0
            else:
                raise TypeError(
                    "energy_unit: expected an OpenMM unit of energy such as openmm.unit.hartree or "
                    f"openmm.unit.kilocalorie_per_mole, received {energy_unit!r}"
                )
            values["energy"] = energy_unit.get_name()
            values["kj_per_mol_per_energy"] = float(factor)
        return cls(**values)


def number_in(name: str, value: Any, unit: Any) -> float:
    """A plain number or Quantity as a float in `unit`; ValueError if it is not finite."""
    from openmm.unit import is_quantity

    if is_quantity(value):
        if not value.unit.is_compatible(unit):
            raise ValueError(f"{name}: expected a Quantity in {unit.get_name()}, received {value}")
        value = value.value_in_unit(unit)
    try:
        if isinstance(value, (*TRUTH_VALUES, str, bytes)):  # of which float() makes numbers too
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name}: expected a number or Quantity in {unit.get_name()}, received {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number in {unit.get_name()}, received {number}")
    return number


def positive_in(name: str, value: Any, unit: Any) -> float:
    """The same; ValueError also where it is not positive."""
    number = number_in(name, value, unit)
    if number <= 0:
        raise ValueError(f"{name}: expected more than 0 {unit.get_name()}, received {number:g}")
    return number


def lengths_in_nm(name: str, value: Any, shape: tuple[int | None, int]) -> NDArray:
    """A Quantity (or a list of them), or plain numbers in nm, as an array of float64; None in `shape` is any length.

    TypeError if it is of another kind, ValueError if it has another shape.
    """
    from openmm import unit

    try:
        if unit.is_quantity(value):
            value = value.value_in_unit(unit.nanometer)
        else:
            value = [v.value_in_unit(unit.nanometer) if unit.is_quantity(v) else v for v in value]
    except TypeError as error:
        raise TypeError(
            f"{name}: expected lengths (a Quantity, or numbers in nm), received {type(value).__name__} ({error})"
        ) from None
    return array(name, value, shape)
