"""Watch a minimisation, and stop it."""

from openmm import LangevinMiddleIntegrator, MinimizationReporter
from openmm.app import PDBFile, Simulation
from openmm.unit import femtoseconds, kelvin, picosecond

from openmm_tensornet import create_system


class Watch(MinimizationReporter):
    def __init__(self):
        super().__init__()
        self.energies = []

    def report(self, iteration, positions, gradient, arguments):
        self.energies.append(arguments["system energy"])
        return iteration >= 5


pdb = PDBFile("alanine_dipeptide.pdb")
system = create_system(pdb.topology, "alanine_dipeptide.safetensors")
integrator = LangevinMiddleIntegrator(300 * kelvin, 1 / picosecond, 0.5 * femtoseconds)
simulation = Simulation(pdb.topology, system, integrator)
simulation.context.setPositions(pdb.positions)

watch = Watch()
simulation.minimizeEnergy(reporter=watch)
assert 5 < len(watch.energies) < 10 and watch.energies[-1] < watch.energies[0]
