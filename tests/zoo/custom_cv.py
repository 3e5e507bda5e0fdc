"""The potential as a variable of an expression: a tenth of it is switched off by a parameter."""

from openmm import Context, CustomCVForce, System, VerletIntegrator
from openmm.app import PDBFile
from openmm.unit import femtoseconds

from openmm_tensornet import TensorNetForce

pdb = PDBFile("alanine_dipeptide.pdb")
system = System()
for atom in pdb.topology.atoms():
    system.addParticle(atom.element.mass)
scaled = CustomCVForce("scale*E")
scaled.addGlobalParameter("scale", 1.0)
scaled.addEnergyParameterDerivative("scale")
scaled.addCollectiveVariable("E", TensorNetForce("alanine_dipeptide.safetensors", pdb.topology))
system.addForce(scaled)
context = Context(system, VerletIntegrator(0.5 * femtoseconds))
context.setPositions(pdb.positions)
full = context.getState(energy=True, forces=True)
context.setParameter("scale", 0.9)
part = context.getState(energy=True, forces=True, parameterDerivatives=True)
assert abs(part.getPotentialEnergy() / full.getPotentialEnergy() - 0.9) < 1e-6
assert abs(part.getEnergyParameterDerivatives()["scale"] / full.getPotentialEnergy()._value - 1) < 1e-6
difference = part.getForces(asNumpy=True)._value - 0.9 * full.getForces(asNumpy=True)._value
assert abs(difference).max() < 1e-2
context.getIntegrator().step(5)
