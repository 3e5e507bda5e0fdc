"""openmmtools: Langevin dynamics at two temperatures that share a Context."""

from openmm.app import PDBFile
from openmm.unit import femtoseconds, kelvin, picosecond
from openmmtools import mcmc, states

from openmm_tensornet import create_system

pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")

cold, hot = (states.ThermodynamicState(system, temperature * kelvin) for temperature in (300, 600))
assert cold.is_state_compatible(hot)
sampler_state = states.SamplerState(pdb.positions)
sampler = mcmc.MCMCSampler(
    cold,
    sampler_state,
    mcmc.LangevinDynamicsMove(timestep=0.5 * femtoseconds, collision_rate=1 / picosecond, n_steps=20),
)
sampler.minimize(max_iterations=50)
sampler.run(2)
sampler.thermodynamic_state = hot
sampler.run(2)
assert sampler.sampler_state.kinetic_energy._value > 0
assert hot.reduced_potential(sampler.sampler_state) * 2 - cold.reduced_potential(sampler.sampler_state) < 1e-3
