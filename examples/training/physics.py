"""Is the physics right? Vibrations, the free energies of phi and psi, and long runs, against GFN2-xTB itself.

Everything is kept in files below one folder, so that what is stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import openmm
import torch
from matplotlib.figure import Figure
from openmm import unit
from openmm.app import BiasVariable, Metadynamics, Simulation
from scipy.optimize import minimize
from tqdm import tqdm

from openmm_tensornet import create_system
from openmm_tensornet.common.atoms import Atoms
from openmm_tensornet.common.units import KJ_PER_MOL_PER_EV, NM_PER_ANGSTROM
from openmm_tensornet.md.analysis import BASINS, compute_basins
from openmm_tensornet.models.accuracy import reference_energy_and_forces
from openmm_tensornet.models.checkpoint import load_model

from .gfn2 import GFN2, read_arrays, write_arrays
from .heldout import Trajectory, extend
from .sampling import C7AX, C7EQ, PDB, PHI, PSI, START, Amber, Z, heavy_hydrogens, langevin, positions

Potential = Callable[[np.ndarray], tuple[float, np.ndarray]]  # Å to eV and eV/Å

TEMPERATURE = 300.0  # K
BETA = 1 / (unit.MOLAR_GAS_CONSTANT_R * TEMPERATURE * unit.kelvin).value_in_unit(unit.kilojoule_per_mole)  # mol/kJ
MASSES = np.array([atom.element.mass.value_in_unit(unit.dalton) for atom in PDB.topology.atoms()])
# cm⁻¹ of the square root of one eV/Å²/Da.
WAVENUMBER = np.sqrt(KJ_PER_MOL_PER_EV * 1e26) / (2 * np.pi * 2.99792458e10)

# The free energies: frames of several walkers, every half a picosecond, on a bias that metadynamics has found.
WALKERS, FRAMES, STEPS = 8, 500, 250
METADYNAMICS_STEPS = 200_000  # of 2 fs


# ------------------------------------------------------------------------------------ vibrations


def reference_potential(model_file: Path) -> Potential:
    """The reference model in float64."""
    model = load_model(model_file).double()
    atoms = Atoms.make(Z)
    kj = model.units.kj_per_mol_per_energy

    def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
        energy, forces = reference_energy_and_forces(model, atoms, torch.tensor(x) * NM_PER_ANGSTROM)
        return float(energy) / kj, forces.numpy() * (NM_PER_ANGSTROM / kj)

    return evaluate


def relax(potential: Potential, x: np.ndarray) -> np.ndarray:
    """The nearest minimum, Å."""

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        energy, forces = potential(flat.reshape(-1, 3))
        return energy, -forces.ravel()

    found = minimize(value, x.ravel(), jac=True, method="BFGS", options={"gtol": 1e-4, "maxiter": 1000})
    return found.x.reshape(-1, 3)


def frequencies(potential: Potential, x: np.ndarray, step: float = 0.005) -> np.ndarray:
    """Harmonic wavenumbers (cm⁻¹) at a minimum, ascending, without the six of the molecule as a whole.

    Parameters
    ----------
    potential : callable
    x : array, shape (n, 3)
        Å.
    step : float
        Of the central differences of forces, Å.
    """
    n = x.size
    hessian = np.empty((n, n))
    for k in range(n):
        ends = []
        for sign in (1, -1):
            moved = x.ravel().copy()
            moved[k] += sign * step
            ends.append(potential(moved.reshape(-1, 3))[1].ravel())
        hessian[k] = (ends[1] - ends[0]) / (2 * step)
    root = np.sqrt(np.repeat(MASSES, 3))
    values = np.linalg.eigvalsh((hessian + hessian.T) / 2 / np.outer(root, root))
    wavenumbers = WAVENUMBER * np.sign(values) * np.sqrt(np.abs(values))
    return np.sort(np.delete(wavenumbers, np.argsort(np.abs(wavenumbers))[:6]))


def compare_frequencies(model_file: Path) -> dict:
    """Wavenumbers (cm⁻¹) of the model and of GFN2-xTB at C7eq and C7ax, each at its own minimum."""
    model, teacher = reference_potential(model_file), GFN2(Z)
    found = {}
    for name, (phi, psi) in (("C7eq", C7EQ), ("C7ax", C7AX)):
        amber = Amber(1)
        amber.start(phi, psi, 10.0, 1)
        start = relax(teacher, amber.frames(1, 1)[0])
        ours, theirs = frequencies(model, relax(model, start)), frequencies(teacher, start)
        found[name] = {
            "model": ours.round(1).tolist(),
            "gfn2": theirs.round(1).tolist(),
            "rms": float(np.sqrt(np.mean((ours - theirs) ** 2))),
            "largest": float(np.abs(ours - theirs).max()),
        }
    return found


# ---------------------------------------------------------------------------------- free energies


def phi_psi(frames: np.ndarray) -> np.ndarray:
    """phi and psi in degrees, shape (m, 2), of frames of shape (m, 22, 3)."""
    angles = []
    for a, b, c, d in (PHI, PSI):
        first, axis, last = (frames[:, j] - frames[:, i] for i, j in ((a, b), (b, c), (c, d)))
        left, right = np.cross(first, axis), np.cross(axis, last)
        sine = np.einsum("mi,mi->m", first, right) * np.linalg.norm(axis, axis=1)
        angles.append(np.degrees(np.arctan2(sine, np.einsum("mi,mi->m", left, right))))
    return np.stack(angles, axis=-1)


def _bias_variables() -> list[BiasVariable]:
    variables = []
    for atoms in (PHI, PSI):
        force = openmm.CustomTorsionForce("theta")
        force.addTorsion(*atoms)
        variables.append(BiasVariable(force, -np.pi, np.pi, 0.35, periodic=True, gridWidth=61))
    return variables


def find_bias(model_file: Path, folder: Path, seed: int) -> np.ndarray:
    """Bias potential (kJ/mol), shape (61, 61) with psi first, that makes phi and psi nearly uniform; by metadynamics with the model."""
    path = folder / "bias.npz"
    if not path.exists():
        system = heavy_hydrogens(create_system(model_file, PDB.topology, positions=PDB.positions))
        bias = Metadynamics(system, _bias_variables(), TEMPERATURE, 8.0, 1.0, 100)
        integrator = openmm.LangevinMiddleIntegrator(TEMPERATURE, 2, 0.002)
        integrator.setRandomNumberSeed(seed)
        cpu = openmm.Platform.getPlatformByName("CPU")
        simulation = Simulation(PDB.topology, system, integrator, cpu, {"Threads": "1"})
        simulation.context.setPositions(START / 10)
        simulation.context.setVelocitiesToTemperature(TEMPERATURE, seed)
        for _ in tqdm(range(METADYNAMICS_STEPS // 500), desc="metadynamics", unit="ps"):
            bias.step(simulation, 500)
        # Half of it is enough to cross the barriers, and leaves the minima their share of the frames.
        free_energy = bias.getFreeEnergy().value_in_unit(unit.kilojoule_per_mole)
        write_arrays(path, bias=-0.5 * np.minimum(free_energy - free_energy.min(), 60.0))
    return read_arrays(path)["bias"]


def sample(model_file: Path, folder: Path, seed: int) -> dict[str, np.ndarray]:
    """Frames of the model on the bias, labelled with GFN2-xTB; continues what `folder` holds.

    Returns
    -------
    dict
        ``positions`` (Å), ``walker``, ``bias``, ``model`` and ``gfn2`` (kJ/mol) of each frame.
    """
    table = find_bias(model_file, folder, seed)
    system = heavy_hydrogens(create_system(model_file, PDB.topology, positions=PDB.positions))
    force = openmm.CustomCVForce("table(phi, psi)")
    for name, variable in zip(("phi", "psi"), _bias_variables(), strict=True):
        force.addCollectiveVariable(name, variable.force)
    function = openmm.Continuous2DFunction(61, 61, table.ravel(), -np.pi, np.pi, -np.pi, np.pi, True)
    force.addTabulatedFunction("table", function)
    force.setForceGroup(1)
    system.addForce(force)
    teacher, walkers = GFN2(Z), []
    for walker in range(WALKERS):
        path = folder / f"walker-{walker}.npz"
        if not path.exists():
            write_arrays(path, **_walk(system, teacher, (C7EQ, C7AX)[walker % 2], seed + walker))
        walkers.append(read_arrays(path))
    found = {name: np.concatenate([w[name] for w in walkers]) for name in walkers[0]}
    return found | {"walker": np.repeat(np.arange(WALKERS), [len(w["model"]) for w in walkers])}


def _walk(system: openmm.System, teacher: GFN2, start: tuple[float, float], seed: int) -> dict[str, np.ndarray]:
    amber = Amber(seed)
    amber.start(*start, TEMPERATURE, seed)
    context = langevin(system, amber.frames(1, 1)[0], TEMPERATURE, seed)
    context.getIntegrator().step(20 * STEPS)
    rows: dict[str, list] = {"positions": [], "bias": [], "model": [], "gfn2": []}
    for _ in tqdm(range(FRAMES), desc=f"walker {seed}", unit="frame"):
        context.getIntegrator().step(STEPS)
        x = positions(context.getState(positions=True))
        rows["positions"].append(x)
        for name, group in (("bias", 1), ("model", 0)):
            energy = context.getState(energy=True, groups={group}).getPotentialEnergy()
            rows[name].append(energy.value_in_unit(unit.kilojoule_per_mole))
        rows["gfn2"].append(teacher(x)[0] * KJ_PER_MOL_PER_EV)
    return {name: np.array(values) for name, values in rows.items()}


def frame_weights(data: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Weights of the frames of :func:`sample` that take the bias out, and that turn the model into GFN2-xTB."""
    unbias = np.exp(BETA * (data["bias"] - data["bias"].max()))
    difference = data["gfn2"] - data["model"]
    # The constant part decides nothing; taken out, nothing overflows.
    return unbias, np.exp(-BETA * (difference - np.average(difference, weights=unbias)))


def basin_free_energies(angles: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Free energy (kJ/mol) of each of BASINS against the first, from weighted frames."""
    basins = compute_basins(angles)
    shares = np.array([weights[basins == k].sum() for k in range(len(BASINS))])
    with np.errstate(divide="ignore", invalid="ignore"):  # a basin without frames
        return -np.log(shares / shares[0]) / BETA


def free_energies(data: dict[str, np.ndarray], seed: int) -> dict:
    """Basins of the model and of GFN2-xTB, by weights, with errors from resampled walkers.

    Parameters
    ----------
    data : dict
        From :func:`sample`.
    """
    angles = phi_psi(data["positions"])
    unbias, teach = frame_weights(data)

    def both(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (
            basin_free_energies(angles[chosen], unbias[chosen]),
            basin_free_energies(angles[chosen], (unbias * teach)[chosen]),
        )

    def size(weights: np.ndarray) -> float:
        return float(weights.sum() ** 2 / (weights**2).sum())

    model, gfn2 = both(np.arange(len(angles)))
    rng = np.random.default_rng(seed)
    members = [np.flatnonzero(data["walker"] == w) for w in np.unique(data["walker"])]
    resampled = [
        both(np.concatenate([members[w] for w in rng.integers(0, len(members), len(members))])) for _ in range(200)
    ]
    with np.errstate(invalid="ignore"):
        changes = [there - here for here, there in resampled]

    def spread(values: list[np.ndarray], k: int) -> float:
        column = np.array([value[k] for value in values])
        return float(np.std(column[np.isfinite(column)]))

    return {
        "frames": len(angles),
        # Of the weights exp(−β(U_GFN2 − U_model)) alone, and beside what the bias costs.
        "effective_sample_size": size(teach) / len(teach),
        "effective_sample_size_unbiased": size(unbias * teach) / size(unbias),
        "basins": {
            name: {
                "model": float(model[k]),
                "gfn2": float(gfn2[k]),
                "change": float(gfn2[k] - model[k]),
                "gfn2_error": spread([there for _, there in resampled], k),
                "model_error": spread([here for here, _ in resampled], k),
                "change_error": spread(changes, k),
            }
            for k, name in enumerate(BASINS)
        },
    }


def plot_free_energies(data: dict[str, np.ndarray], found: dict, run: dict | None) -> Figure:
    """The surface of phi and psi by the model and by GFN2-xTB, and the basins with error bars (kJ/mol).

    Parameters
    ----------
    data, found : dict
        From :func:`sample` and :func:`free_energies`.
    run : dict, optional
        From :func:`teacher_run`.
    """
    figure = Figure((16, 4.5), layout="constrained")
    *maps, bars = figure.subplots(1, 3)
    unbias, teach = frame_weights(data)
    angles, edges = phi_psi(data["positions"]), np.linspace(-180, 180, 31)
    for panel, weights, title in zip(maps, (unbias, unbias * teach), ("model", "reweighted to GFN2-xTB"), strict=True):
        density = np.histogram2d(*angles.T, bins=(edges, edges), weights=weights)[0].T
        with np.errstate(divide="ignore"):
            surface = -np.log(density / density.max()) / BETA
        image = panel.pcolormesh(edges, edges, np.where(np.isfinite(surface), surface, np.nan), vmax=40)
        panel.set(xlabel="phi (degrees)", ylabel="psi (degrees)", title=title, aspect="equal")
        figure.colorbar(image, ax=panel, label="free energy (kJ/mol)")
    names = list(found["basins"])
    for shift, which, error in ((-0.2, "model", "model_error"), (0.0, "gfn2", "gfn2_error")):
        values = [[found["basins"][name][key] for name in names] for key in (which, error)]
        bars.errorbar(np.arange(len(names)) + shift, values[0], values[1], fmt="o", capsize=4, label=which)
    if run is not None:
        shares = np.array([[run["basins"][name][key] for name in names] for key in ("share", "error")])
        seen = shares[0] > 0
        values, errors = -np.log(shares[0, seen] / shares[0, 0]) / BETA, shares[1, seen] / shares[0, seen] / BETA
        bars.errorbar(np.flatnonzero(seen) + 0.2, values, errors, fmt="s", capsize=4, label="run of GFN2-xTB")
    bars.set(xticks=range(len(names)), xticklabels=names, ylabel="free energy against C7eq (kJ/mol)")
    bars.legend()
    return figure


def teacher_run(folder: Path, seed: int) -> dict:
    """100 ps of GFN2-xTB itself at 300 K from C7eq, a frame every 0.1 ps: shares of basins, with errors from ten blocks."""
    run = Trajectory(folder / "gfn2-300K.npz", TEMPERATURE, [seed, 300], C7EQ, 50)
    extend([run], 1020)
    basins = compute_basins(phi_psi(run.data["positions"][20:]))
    shares = {}
    for k, name in enumerate(BASINS):
        blocks = [float((block == k).mean()) for block in np.array_split(basins, 10)]
        shares[name] = {"share": float(np.mean(blocks)), "error": float(np.std(blocks, ddof=1) / np.sqrt(10))}
    return {"frames": len(basins), "basins": shares}
