"""System and integrator as XML."""

from openmm import LangevinMiddleIntegrator, XmlSerializer
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
with open("system.xml", "w") as file:
    file.write(XmlSerializer.serialize(system))
with open("integrator.xml", "w") as file:
    file.write(XmlSerializer.serialize(integrator))

copied = Simulation(pdb.topology, "system.xml", "integrator.xml")
energies = set()
for simulation in (Simulation(pdb.topology, system, integrator), copied):
    simulation.context.setPositions(pdb.positions)
    energies.add(simulation.context.getState(energy=True).getPotentialEnergy()._value)
assert len(energies) == 1
