"""A Context in each of two threads."""

import threading

import numpy as np
from openmm import Context, VerletIntegrator
from openmm.app import PDBFile
from openmm.unit import femtoseconds, kelvin

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")


def run(results, seed):
    context = Context(system, VerletIntegrator(0.5 * femtoseconds))
    context.setPositions(pdb.positions)
    context.setVelocitiesToTemperature(300 * kelvin, seed)
    context.getIntegrator().step(50)
    results[seed] = context.getState(positions=True).getPositions(asNumpy=True)._value


alone, together = {}, {}
for seed in (1, 2):
    run(alone, seed)
threads = [threading.Thread(target=run, args=(together, seed)) for seed in (1, 2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert all(np.array_equal(alone[seed], together[seed]) for seed in (1, 2))
