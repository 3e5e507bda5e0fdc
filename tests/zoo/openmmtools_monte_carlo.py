"""openmmtools: a molecule is displaced and turned, which changes no energy in vacuum, and one atom, which does."""

from openmm.app import PDBFile
from openmm.unit import kelvin, nanometers
from openmmtools import mcmc, states

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
thermodynamic = states.ThermodynamicState(system, 300 * kelvin)
sampler_state = states.SamplerState(pdb.positions)
whole = list(range(22))
sampler = mcmc.MCMCSampler(
    thermodynamic,
    sampler_state,
    mcmc.SequenceMove(
        [
            mcmc.MCDisplacementMove(displacement_sigma=0.5 * nanometers, atom_subset=whole),
            mcmc.MCRotationMove(atom_subset=whole),
            mcmc.MCDisplacementMove(displacement_sigma=1.0 * nanometers, atom_subset=[21]),
        ]
    ),
)
sampler.run(5)
moved, turned, pulled = sampler.move.move_list
assert (moved.n_accepted, turned.n_accepted) == (5, 5)
assert pulled.n_accepted < pulled.n_proposed == 5
