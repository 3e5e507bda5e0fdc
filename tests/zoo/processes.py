"""A worker that is spawned gets the System and gives back an energy."""

import multiprocessing

from openmm import Context, VerletIntegrator
from openmm.app import PDBFile
from openmm.unit import femtoseconds, kilojoules_per_mole

from openmm_tensornet import create_system


def energy(system, positions):
    context = Context(system, VerletIntegrator(0.5 * femtoseconds))
    context.setPositions(positions)
    return context.getState(energy=True).getPotentialEnergy().value_in_unit(kilojoules_per_mole)


if __name__ == "__main__":
    pdb = PDBFile("alanine_dipeptide.pdb")
    system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(energy, (system, pdb.positions))
    assert abs(found - energy(system, pdb.positions)) < 1e-3
