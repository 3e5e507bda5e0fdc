"""Replica exchange of alanine dipeptide between 300 and 500 K, with openmmtools, in one process or in several.

    python replica_exchange.py [MODEL]                # one process
    mpiexec -n 2 python replica_exchange.py [MODEL]   # two, which share the replicas

Needs the extras "exchange" and "md". MODEL is a TorchMD-Net checkpoint (by default the model of the package). Everything is
written to a folder; started again with it, a run that was stopped, or killed, goes on after its last iteration. The result
does not depend on the number of processes.
"""

import argparse
import copy
import logging
import os
import shutil
from pathlib import Path

# Only one process writes, and no other reads after it has begun: locks, which many clusters' file systems lack, are not needed.
os.environ["HDF5_USE_FILE_LOCKING"] = "FALSE"

import mdtraj
import mpiplus
import netCDF4
import numpy as np
import torch
from openmm import Context, Platform
from openmm.app import PDBFile
from openmm.unit import femtosecond, kelvin, kilojoule_per_mole, picosecond
from openmmtools import cache, mcmc
from openmmtools.constants import kB
from openmmtools.integrators import LangevinIntegrator
from openmmtools.multistate import MultiStateReporter, ReplicaExchangeSampler
from openmmtools.states import SamplerState, ThermodynamicState
from pymbar import MBAR
from pymbar.timeseries import statistical_inefficiency

from openmm_tensornet import create_system
from openmm_tensornet.md.analysis import BASINS, compute_basins, compute_phi_psi

PDB = Path(__file__).with_name("alanine_dipeptide.pdb")
FILES = ("exchange.nc", "exchange_checkpoint.nc")  # energies and states; positions


def velocity_verlet(timestep, temperature) -> LangevinIntegrator:
    """Langevin dynamics without friction and noise. To an integrator that knows no temperature openmmtools adds a thermostat."""
    return LangevinIntegrator(temperature, timestep=timestep, collision_rate=0 / picosecond, splitting="V R O R V")


class HybridMonteCarlo(mcmc.MCMCMove):
    """Molecular dynamics with new velocities, accepted or rejected by the change of the total energy.

    It samples the canonical distribution without an error of the time step. Its random numbers follow from the seed and from how
    often it was made; those of openmmtools' own moves depend on which replicas share a process.
    """

    def __init__(self, timestep, steps: int, seed: list[int]):
        super().__init__()
        self.timestep, self.steps, self.seed = timestep, steps, seed
        self.statistics = {"made": 0, "accepted": 0}  # openmmtools passes them on between the processes

    def apply(self, thermodynamic_state, sampler_state, context_cache=None):
        temperature = thermodynamic_state.temperature
        context, integrator = context_cache.get_context(
            thermodynamic_state, velocity_verlet(self.timestep, temperature)
        )
        random = np.random.default_rng([*self.seed, self.statistics["made"]])
        sampler_state.apply_to_context(context, ignore_velocities=True)
        context.setVelocitiesToTemperature(temperature, int(random.integers(1, 2**31)))
        before = total_energy(context)
        integrator.step(self.steps)
        change = (total_energy(context) - before) / (kB * temperature)
        accepted = random.random() < np.exp(-max(change, 0.0))
        if accepted:
            sampler_state.update_from_context(context)
        self.statistics = {key: self.statistics[key] + n for key, n in (("made", 1), ("accepted", int(accepted)))}

    def __getstate__(self):
        return dict(timestep=self.timestep, steps=self.steps, seed=self.seed, statistics=self.statistics)

    def __setstate__(self, state):
        super().__init__()
        self.__dict__.update(state)


class State(ThermodynamicState):
    """Its copies share the System, which openmmtools would write as XML and read again for each: seconds, with a network in it."""

    def __deepcopy__(self, memo):
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other


class Reporter(MultiStateReporter):
    """Leaves the System out of the files: as text it takes tens of MB and a minute to write. A run that goes on makes it again."""

    def __init__(self, path: Path, states: list[State]):
        # Every iteration is a checkpoint, so that none is lost.
        super().__init__(str(path), checkpoint_interval=1)
        self.states = states

    def write_thermodynamic_states(self, thermodynamic_states, unsampled_states):
        pass

    def read_thermodynamic_states(self):
        return self.states, []


def total_energy(context: Context):
    state = context.getState(energy=True)
    return state.getKineticEnergy() + state.getPotentialEnergy()


def choose_gpu() -> None:
    """One GPU for each process of a node; openmmtools would take the first for all of them."""
    if torch.cuda.is_available():
        comm, rank = mpiplus.get_mpicomm(), 0
        if comm is not None:
            from mpi4py import MPI

            rank = comm.Split_type(MPI.COMM_TYPE_SHARED).rank  # among the processes of this node
        device = rank % torch.cuda.device_count()
        torch.cuda.set_device(device)  # for the backend "python"
        properties = {"DeviceIndex": str(device), "Precision": "mixed"}
        cache.global_context_cache.set_platform(Platform.getPlatformByName("CUDA"), properties)


# ------------------------------------------------------------------------------------------ files that survive a kill


def last_iteration(folder: Path) -> int | None:
    """None where the files are missing or damaged."""
    try:
        with netCDF4.Dataset(folder / FILES[0]) as file, netCDF4.Dataset(folder / FILES[1]):
            return int(file["last_iteration"][0])
    except (OSError, RuntimeError, IndexError):
        return None


def keep_copy(folder: Path) -> None:
    """Of the files, while nothing writes to them, so that at any time these or the copies are undamaged."""
    (folder / "copy").mkdir(exist_ok=True)
    for name in reversed(FILES):
        shutil.copy(folder / name, folder / "copy" / name)


def restore(folder: Path) -> bool:
    """Put undamaged files in place; whether there are any."""
    written, copied = last_iteration(folder), last_iteration(folder / "copy")
    if not written and not copied:  # nothing, or stopped before the first iteration
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        return False
    # Files that are no further than their copy may have been killed amid the next iteration.
    if copied is not None and (written is None or written <= copied):
        for name in FILES:
            shutil.copy(folder / "copy" / name, folder / name)
    return True


# ------------------------------------------------------------------------------------------ run and analysis


def temperatures(count: int) -> np.ndarray:
    """In K."""
    return np.geomspace(300, 500, count)


def thermodynamic_states(options: argparse.Namespace) -> list[State]:
    pdb = PDBFile(str(PDB))
    # Hybrid Monte Carlo needs a total energy that nothing else changes, such as a CMMotionRemover.
    system = create_system(
        pdb.topology, options.model, positions=pdb.positions, remove_cm_motion=False, backend=options.backend
    )
    states = [State(system, 300 * kelvin)]
    for temperature in temperatures(options.replicas)[1:]:
        states.append(copy.deepcopy(states[0]))
        states[-1].temperature = temperature * kelvin
    return states


def start(options: argparse.Namespace, reporter: Reporter) -> ReplicaExchangeSampler:
    sampler = ReplicaExchangeSampler(
        mcmc_moves=[
            HybridMonteCarlo(options.timestep * femtosecond, options.steps, [options.seed, state])
            for state in range(options.replicas)
        ],
        number_of_iterations=options.iterations,
        replica_mixing_scheme="swap-neighbors",  # by NumPy's random numbers, which can be seeded
        online_analysis_interval=None,
    )
    sampler.create(reporter.states, SamplerState(PDBFile(str(PDB)).positions), reporter, metadata=settings(options))
    return sampler


def settings(options: argparse.Namespace) -> dict:
    """What must stay as it is while a run is continued."""
    return {name: str(getattr(options, name)) for name in ("model", "replicas", "steps", "timestep", "seed")}


def run(options: argparse.Namespace) -> None:
    states = thermodynamic_states(options)
    # Made first, this Context serves openmmtools' evaluations of energies too.
    cache.global_context_cache.get_context(states[0], velocity_verlet(options.timestep * femtosecond, 300 * kelvin))
    reporter = Reporter(options.output / FILES[0], states)
    if mpiplus.run_single_node(0, restore, options.output, broadcast_result=True):
        sampler = ReplicaExchangeSampler.from_storage(reporter)
        if not settings(options).items() <= sampler.metadata.items():
            raise SystemExit(
                f"{options.output} has a run with other options: {sampler.metadata}; choose another --output"
            )
        sampler.number_of_iterations = options.iterations
    else:
        sampler = start(options, reporter)
    for iteration in range(sampler.iteration, options.iterations):
        np.random.seed([options.seed, iteration])
        sampler.run(1)
        mpiplus.run_single_node(0, keep_copy, options.output)
        mpiplus.run_single_node(0, print, f"iteration {iteration + 1} of {options.iterations}", flush=True)


def analyze(folder: Path) -> None:
    """Print, for each temperature, mean energy, free energy and populations by MBAR, which uses the samples of all temperatures."""
    with netCDF4.Dataset(folder / FILES[0]) as file:
        reduced, states = file["energies"][:].data, file["states"][:].data
        accepted, proposed = file["accepted"][1:].data.sum(0), file["proposed"][1:].data.sum(0)
    with netCDF4.Dataset(folder / FILES[1]) as file:
        positions = file["positions"][:].data
    beta = 1 / (kB.value_in_unit(kilojoule_per_mole / kelvin) * temperatures(reduced.shape[2]))
    energies = reduced[:, :, 0] / beta[0]  # of each iteration and replica, kJ/mol
    energies -= energies[0, 0]  # of the structure that the run started from
    print(f"exchanges accepted: {np.diag(accepted, 1).sum() / max(np.diag(proposed, 1).sum(), 1):.0%}")

    # From replicas to temperatures, without the first fifth, and at most one frame for each correlation time.
    replicas = np.argsort(states, axis=1)
    begin = 1 + len(energies) // 5
    coldest = np.take_along_axis(energies, replicas, axis=1)[begin:, 0]
    stride = 1 if np.ptp(coldest) == 0 else int(np.ceil(statistical_inefficiency(coldest)))
    frames = np.arange(begin, len(energies), stride)[:, None], replicas[begin::stride]
    energy = energies[frames].T.ravel()
    trajectory = mdtraj.Trajectory(
        positions[frames].swapaxes(0, 1).reshape(len(energy), -1, 3), mdtraj.load(str(PDB)).top
    )
    basins = compute_basins(compute_phi_psi(trajectory)[:, 0])

    mbar = MBAR(beta[:, None] * energy, [len(frames[1])] * len(beta))
    free = mbar.compute_free_energy_differences()["Delta_f"][0]
    mean = mbar.compute_expectations(energy)
    populations = mbar.weights().T @ (basins[:, None] == range(len(BASINS)))
    print(f"T (K)  f - f(300 K) (kT)  mean energy (kJ/mol)   {'  '.join(f'{name:>6}' for name in BASINS)}")
    for k, temperature in enumerate(temperatures(len(beta))):
        shares = "  ".join(f"{share:6.1%}" for share in populations[k])
        print(f"{temperature:5.1f}  {free[k]:17.2f}  {mean['mu'][k]:11.2f} ± {mean['sigma'][k]:.2f}   {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="alanine-dipeptide-gfn2", metavar="MODEL", help="(%(default)s)")
    parser.add_argument("--replicas", type=int, default=6, help="temperatures from 300 to 500 K (%(default)s)")
    parser.add_argument("--iterations", type=int, default=500, help="in all; more continue a run (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of molecular dynamics in an iteration (%(default)s)")
    parser.add_argument("--timestep", type=float, default=0.5, help="fs (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--backend", choices=("torch", "python"), help="(torch where openmmtorch is installed)")
    parser.add_argument("--output", type=Path, default=Path("out/exchange"), help="folder (%(default)s)")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # openmmtools: "the API is experimental", and so on
    choose_gpu()
    run(options)
    mpiplus.run_single_node(0, analyze, options.output)


if __name__ == "__main__":
    main()
