"""Topology and positions of Amber files; the potential in place of the force field's."""

from openmm import LangevinMiddleIntegrator
from openmm.app import AmberInpcrdFile, AmberPrmtopFile, Simulation
from openmm.unit import femtoseconds, kelvin, picosecond
from openmmtools.testsystems import get_data_filename

from openmm_tensornet import create_system

folder = "data/alanine-dipeptide-gbsa/alanine-dipeptide"
prmtop = AmberPrmtopFile(get_data_filename(f"{folder}.prmtop"))
inpcrd = AmberInpcrdFile(get_data_filename(f"{folder}.crd"))
system = create_system(prmtop.topology, "alanine_dipeptide.safetensors")
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(prmtop.topology, system, integrator)
simulation.context.setPositions(inpcrd.positions)
before = simulation.context.getState(energy=True).getPotentialEnergy()
simulation.minimizeEnergy()
assert simulation.context.getState(energy=True).getPotentialEnergy() < before
