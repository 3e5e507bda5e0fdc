"""Several Contexts of one System at once."""

from openmm import Context, VerletIntegrator
from openmm.app import PDBFile
from openmm.unit import femtoseconds, nanometers

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
contexts = [Context(system, VerletIntegrator(0.5 * femtoseconds)) for _ in range(3)]
positions = pdb.getPositions(asNumpy=True).value_in_unit(nanometers)
for scale, context in zip((1.0, 1.02, 1.04), contexts, strict=True):
    context.setPositions(positions * scale)
energies = [context.getState(energy=True).getPotentialEnergy()._value for context in contexts]
assert len(set(energies)) == 3
contexts[0].getIntegrator().step(5)
del contexts[0]
again = [context.getState(energy=True).getPotentialEnergy()._value for context in contexts]
assert again == energies[1:]
