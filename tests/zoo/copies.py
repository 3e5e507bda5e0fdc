"""A System copied and pickled."""

import copy
import pickle

from openmm import Context, VerletIntegrator
from openmm.app import PDBFile
from openmm.unit import femtoseconds

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
energies = set()
for one in (system, copy.deepcopy(system), pickle.loads(pickle.dumps(system))):
    context = Context(one, VerletIntegrator(0.5 * femtoseconds))
    context.setPositions(pdb.positions)
    energies.add(context.getState(energy=True).getPotentialEnergy()._value)
assert len(energies) == 1
