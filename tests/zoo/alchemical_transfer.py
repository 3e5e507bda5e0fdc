"""Alchemical transfer: the energy before and after a displacement of one atom."""

from openmm import ATMForce, Context, System, Vec3, VerletIntegrator
from openmm.app import PDBFile
from openmm.unit import femtoseconds, nanometers

from openmm_tensornet import TensorNetForce

pdb = PDBFile("alanine_dipeptide.pdb")


def context_of(force):
    system = System()
    for atom in pdb.topology.atoms():
        system.addParticle(atom.element.mass)
    system.addForce(force)
    return Context(system, VerletIntegrator(0.5 * femtoseconds))


transfer = ATMForce(0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
for atom in range(22):
    transfer.addParticle(Vec3(0.01, 0, 0) if atom == 21 else Vec3(0, 0, 0))
transfer.addForce(TensorNetForce("alanine_dipeptide.safetensors", pdb.topology))
context = context_of(transfer)
context.setPositions(pdb.positions)
context.getState(energy=True, forces=True)
found = [value._value for value in transfer.getPerturbationEnergy(context)[:2]]

plain = context_of(TensorNetForce("alanine_dipeptide.safetensors", pdb.topology))
positions = pdb.getPositions(asNumpy=True).value_in_unit(nanometers)
expected = []
for moved in (0, 0.01):
    positions[21, 0] += moved
    plain.setPositions(positions)
    expected.append(plain.getState(energy=True).getPotentialEnergy()._value)
assert abs(expected[1] - expected[0]) > 1
assert all(abs(a - b) < 0.02 for a, b in zip(sorted(found), sorted(expected), strict=True))
context.getIntegrator().step(5)
