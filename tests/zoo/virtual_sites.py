"""A virtual site, on which a force of the user's own acts, beside the atoms of the potential."""

import numpy as np
from openmm import Context, CustomExternalForce, System, ThreeParticleAverageSite, Vec3, VerletIntegrator
from openmm.app import PDBFile
from openmm.unit import femtoseconds, nanometers

from openmm_tensornet import TensorNetForce

pdb = PDBFile("alanine_dipeptide.pdb")
system = System()
for atom in pdb.topology.atoms():
    system.addParticle(atom.element.mass)
system.addForce(TensorNetForce("alanine_dipeptide_among_others.safetensors", pdb.topology, atoms=range(22)))
site = system.addParticle(0)
system.setVirtualSite(site, ThreeParticleAverageSite(4, 5, 6, 0.4, 0.3, 0.3))
pull = CustomExternalForce("-100*x")
pull.addParticle(site)
system.addForce(pull)
context = Context(system, VerletIntegrator(0.5 * femtoseconds))
context.setPositions([*pdb.positions.value_in_unit(nanometers), Vec3(0, 0, 0)])
context.computeVirtualSites()
context.getIntegrator().step(50)
state = context.getState(positions=True, velocities=True)
positions = state.getPositions(asNumpy=True)._value
assert np.allclose(positions[site], np.array([0.4, 0.3, 0.3]) @ positions[4:7])
masses = [system.getParticleMass(index)._value for index in range(site)]
momentum = masses @ state.getVelocities(asNumpy=True)._value[:site]
assert np.allclose(momentum, [100 * 0.025, 0, 0], atol=0.01)  # the pull on the site reaches its atoms
