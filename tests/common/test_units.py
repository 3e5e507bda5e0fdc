"""Conversion factors, against OpenMM's units and published values."""

import pytest
from openmm import unit

from openmm_tensornet.common import units
from openmm_tensornet.common.units import ModelUnits

# OpenMM 8 keeps the constants of CODATA 2018 with ten or more digits; its Avogadro constant is the exact one.
OPENMM_DIGITS = 1e-9


def test_electronvolt_in_kilojoule_per_mole():
    volt = unit.elementary_charge * unit.volt
    expected = (1.0 * volt * unit.AVOGADRO_CONSTANT_NA).value_in_unit(unit.kilojoule_per_mole)
    assert pytest.approx(expected, rel=OPENMM_DIGITS) == units.KJ_PER_MOL_PER_EV
    # Faraday's constant, 96485.33212331... C/mol, exact since 2019.
    assert pytest.approx(96.48533212331, abs=1e-11) == units.KJ_PER_MOL_PER_EV


def test_angstrom_in_nanometre():
    assert units.NM_PER_ANGSTROM == pytest.approx((1 * unit.angstrom).value_in_unit(unit.nanometer), rel=1e-15)


def test_avogadro_as_in_openmm():
    assert units.AVOGADRO == pytest.approx(unit.AVOGADRO_CONSTANT_NA.value_in_unit(unit.mole**-1), rel=OPENMM_DIGITS)


def test_default_is_angstrom_and_electronvolt():
    default = ModelUnits.from_openmm()
    assert default == ModelUnits()
    assert (default.length, default.energy) == ("angstrom", "eV")
    assert default.nm_per_length == 0.1
    assert default.kj_per_mol_per_energy == pytest.approx(96.48533212331, abs=1e-11)


# Published: CODATA 2018 (bohr, hartree), the definitions of the calorie and the joule.
@pytest.mark.parametrize(
    ("given", "nm"),
    [
        (unit.bohr, 0.0529177210903),
        (unit.angstrom, 0.1),
        (unit.nanometer, 1.0),
        (unit.picometer, 1e-3),
        (unit.meter, 1e9),
    ],
    ids=lambda value: value.get_name() if unit.is_unit(value) else "",
)
def test_lengths(given, nm):
    made = ModelUnits.from_openmm(length_unit=given)
    assert made.nm_per_length == pytest.approx(nm, rel=1e-8)
    assert made.length == given.get_name()
    assert made.kj_per_mol_per_energy == units.KJ_PER_MOL_PER_EV  # the other one keeps its default


@pytest.mark.parametrize(
    ("given", "kj_per_mol"),
    [
        (unit.hartree, 2625.4996394799),
        (unit.kilocalorie_per_mole, 4.184),
        (unit.kilojoule_per_mole, 1.0),
        (unit.elementary_charge * unit.volt, 96.48533212331),
        (unit.kilojoule, 6.02214076e23),
    ],
    ids=lambda value: value.get_name() if unit.is_unit(value) else "",
)
def test_energies(given, kj_per_mol):
    made = ModelUnits.from_openmm(energy_unit=given)
    assert made.kj_per_mol_per_energy == pytest.approx(kj_per_mol, rel=1e-8)
    assert made.energy == given.get_name()
    assert made.nm_per_length == units.NM_PER_ANGSTROM


@pytest.mark.parametrize(
    "given",
    [
        unit.hartree,
        unit.nanometer**2,
        unit.dimensionless,
        1.0 * unit.bohr,  # a Quantity
        5 * unit.angstrom,
        "bohr",
        0.1,
        True,
    ],
    ids=repr,
)
def test_what_is_no_length_is_refused(given):
    with pytest.raises(TypeError, match=r"^length_unit: expected an OpenMM unit of length") as caught:
        ModelUnits.from_openmm(length_unit=given)
    assert str(caught.value).endswith(f"received {given!r}")


@pytest.mark.parametrize(
    "given",
    [
        unit.bohr,
        unit.kilojoule_per_mole / unit.nanometer,
        unit.kelvin,
        1.0 * unit.hartree,
        1.0 * unit.kilocalorie_per_mole,
        "eV",
        96.485,
    ],
    ids=repr,
)
def test_what_is_no_energy_is_refused(given):
    with pytest.raises(TypeError, match=r"^energy_unit: expected an OpenMM unit of energy") as caught:
        ModelUnits.from_openmm(energy_unit=given)
    assert str(caught.value).endswith(f"received {given!r}")
