"""How the coordinates in this folder were made. Not needed to run the benchmark.

    python benchmarks/data/build.py

needs RDKit and OpenMM (made with RDKit 2026.09.1 and OpenMM 8.5.2) and takes minutes. Rounding and threads
make the coordinates differ a little from one run to the next.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import openmm
from openmm import app, unit
from rdkit import Chem  # type: ignore[import-not-found]
from rdkit.Chem import AllChem, rdMolDescriptors  # type: ignore[import-not-found]

HERE = Path(__file__).parent
TESTOSTERONE = "C[C@]12CC[C@H]3[C@@H](CCC4=CC(=O)CC[C@]34C)[C@@H]1CC[C@@H]2O"
TESTOSTERONE_KEY = "MUMGGOZAMZWBJJ-DYKIIFRCSA-N"
CLN025 = "YYDPETGTWY"
WATERS = 64
WATER_DENSITY = 33.4  # molecules/nm³ at 300 K
SOLVENT = 778  # waters, so that there are 166 + 3·778 = 2500 atoms
SEED = 2024


def main() -> None:
    """Make all files."""
    testosterone()
    peptide = cln025()
    water()
    solvated(*peptide)


def write(name: str, note: str, symbols: list[str], positions: np.ndarray, box: np.ndarray | None = None) -> None:
    """Write extended XYZ, Å; positions in nm, shape (N, 3), box in nm, shape (3, 3)."""
    lattice = "" if box is None else 'Lattice="' + " ".join(f"{10 * c:.3f}" for c in box.flatten()) + '" '
    lines = [str(len(symbols)), f'{lattice}Properties=species:S:1:pos:R:3 note="{note}"']
    for symbol, (x, y, z) in zip(symbols, 10 * positions, strict=True):
        lines.append(f"{symbol} {x:.3f} {y:.3f} {z:.3f}")
    (HERE / f"{name}.xyz").write_text("\n".join(lines) + "\n")
    print(name, len(symbols))


def symbols_of(topology: app.Topology) -> list[str]:
    """Element symbol of each atom."""
    return [atom.element.symbol for atom in topology.atoms()]


def embed(molecule: Chem.Mol) -> Chem.Mol:
    """Add hydrogens and coordinates: distance geometry, then MMFF94."""
    molecule = Chem.AddHs(molecule, addResidueInfo=True)
    assert AllChem.EmbedMolecule(molecule, randomSeed=SEED) == 0
    AllChem.MMFFOptimizeMolecule(molecule, maxIters=5000)
    return molecule


def testosterone() -> None:
    """Testosterone, C19H28O2, from SMILES."""
    molecule = Chem.MolFromSmiles(TESTOSTERONE)
    assert Chem.MolToInchiKey(molecule) == TESTOSTERONE_KEY, Chem.MolToInchiKey(molecule)
    assert rdMolDescriptors.CalcMolFormula(molecule) == "C19H28O2"
    molecule = embed(molecule)
    positions = molecule.GetConformer().GetPositions() / 10
    symbols = [atom.GetSymbol() for atom in molecule.GetAtoms()]
    write("testosterone", "testosterone; RDKit, ETKDG, MMFF94 minimum", symbols, positions - positions.mean(0))


def run(topology, positions, system: openmm.System, picoseconds: float, pressure: bool = False):
    """Minimise, run Langevin dynamics at 300 K, minimise; returns positions and box in nm."""
    if pressure:
        system.addForce(openmm.MonteCarloBarostat(1 * unit.bar, 300 * unit.kelvin, 25))
    integrator = openmm.LangevinMiddleIntegrator(300 * unit.kelvin, 2 / unit.picosecond, 2 * unit.femtosecond)
    integrator.setRandomNumberSeed(SEED)
    simulation = app.Simulation(topology, system, integrator, openmm.Platform.getPlatformByName("CPU"))
    simulation.context.setPositions(positions)
    simulation.minimizeEnergy()
    simulation.context.setVelocitiesToTemperature(300 * unit.kelvin, SEED)
    simulation.step(round(picoseconds / 0.002))
    simulation.minimizeEnergy()
    # Molecules whole and in one box, as a trajectory would have them.
    state = simulation.context.getState(positions=True, enforcePeriodicBox=system.usesPeriodicBoundaryConditions())
    box = state.getPeriodicBoxVectors(asNumpy=True).value_in_unit(unit.nanometer)
    return state.getPositions(asNumpy=True).value_in_unit(unit.nanometer), box


def cln025() -> tuple[app.Topology, np.ndarray]:
    """CLN025, a chignolin variant, 166 atoms at pH 7 (total charge −2), collapsed in implicit solvent."""
    heavy = Chem.RemoveHs(embed(Chem.MolFromSequence(CLN025)))
    pdb = app.PDBFile(StringIO(Chem.MolToPDBBlock(heavy)))
    forcefield = app.ForceField("amber14-all.xml", "implicit/gbn2.xml")
    modeller = app.Modeller(pdb.topology, pdb.positions)
    modeller.addHydrogens(forcefield, pH=7.0)
    system = forcefield.createSystem(modeller.topology, nonbondedMethod=app.NoCutoff, constraints=app.HBonds)
    positions, _ = run(modeller.topology, modeller.positions, system, 50)
    positions -= positions.mean(0)
    assert len(positions) == 166, len(positions)
    note = "CLN025 (YYDPETGTWY), total charge -2; RDKit, then Amber14/GBn2: 50 ps at 300 K, minimum"
    write("cln025", note, symbols_of(modeller.topology), positions)
    return modeller.topology, positions


def water() -> None:
    """64 waters at the density of the liquid, periodic."""
    forcefield = app.ForceField("amber14/tip3p.xml")
    modeller = app.Modeller(app.Topology(), [] * unit.nanometer)
    edge = (WATERS / WATER_DENSITY) ** (1 / 3)
    # A few more than wanted, then remove the last ones: addSolvent with numAdded chooses the box itself.
    modeller.addSolvent(forcefield, boxSize=openmm.Vec3(1.1, 1.1, 1.1) * edge * unit.nanometer)
    modeller.delete(list(modeller.topology.residues())[WATERS:])
    modeller.topology.setUnitCellDimensions(openmm.Vec3(edge, edge, edge) * unit.nanometer)
    system = forcefield.createSystem(
        modeller.topology, nonbondedMethod=app.PME, nonbondedCutoff=0.6 * unit.nanometer, rigidWater=True
    )
    positions, box = run(modeller.topology, modeller.positions, system, 100)
    note = "64 TIP3P waters, 33.4 molecules/nm3; OpenMM: 100 ps at 300 K, minimum"
    write("water", note, symbols_of(modeller.topology), positions, box)


def solvated(topology: app.Topology, positions: np.ndarray) -> None:
    """CLN025 in water, 2,500 atoms, periodic."""
    forcefield = app.ForceField("amber14-all.xml", "amber14/tip3p.xml")
    modeller = app.Modeller(topology, positions * unit.nanometer)
    modeller.addSolvent(forcefield, numAdded=SOLVENT, neutralize=False)
    system = forcefield.createSystem(
        modeller.topology,
        nonbondedMethod=app.PME,
        nonbondedCutoff=0.9 * unit.nanometer,
        constraints=app.HBonds,
    )
    positions, box = run(modeller.topology, modeller.positions, system, 20, pressure=True)
    assert len(positions) == 2500, len(positions)
    note = "CLN025 (total charge -2) in 778 TIP3P waters; Amber14/TIP3P: 20 ps at 300 K and 1 bar, minimum"
    write("cln025_in_water", note, symbols_of(modeller.topology), positions, box)


if __name__ == "__main__":
    main()
