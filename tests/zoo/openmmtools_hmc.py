"""openmmtools: hybrid Monte Carlo."""

from openmm.app import PDBFile
from openmm.unit import femtoseconds, kelvin, nanometers
from openmmtools import mcmc, states

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
thermodynamic = states.ThermodynamicState(system, 300 * kelvin)
sampler_state = states.SamplerState(pdb.positions)
move = mcmc.HMCMove(timestep=0.5 * femtoseconds, n_steps=5)
sampler = mcmc.MCMCSampler(thermodynamic, sampler_state, move)
sampler.minimize(max_iterations=50)
start = sampler.sampler_state.positions.value_in_unit(nanometers).copy()
sampler.run(5)
moved = sampler.sampler_state.positions.value_in_unit(nanometers) - start
assert abs(moved).max() > 0, "every move was refused"
