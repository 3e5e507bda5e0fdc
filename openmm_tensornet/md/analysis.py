"""What a run shows: phi and psi, energies, temperature, bonds, angles and the conservation of energy.

The `compute_*` functions take a mdtraj trajectory, or arrays, and return arrays; lengths in nm, angles in degrees, energies
in kJ/mol, times in ps. The `plot_*` functions draw them with matplotlib; :func:`analyze` does everything for the
directory of a run.
"""

from __future__ import annotations

import io
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..common.files import replace_file
from .runfiles import BROKEN, DCD_HEADER_BYTES, RunFiles

if TYPE_CHECKING:
    import mdtraj
    import openmm
    from matplotlib.figure import Figure
    from numpy.typing import NDArray


class Basin(NamedTuple):
    """A region of phi and psi, in degrees: from the first value up to the second, across ±180 where that is lower."""

    phi: tuple[float, float]
    psi: tuple[float, float]


# Conformers of alanine dipeptide in vacuum. The regions do not overlap; what is in none of them counts as "other".
BASINS = {
    "C7eq": Basin((-130, 0), (20, 120)),
    "C5": Basin((110, -90), (120, -120)),
    "C7ax": Basin((0, 130), (-120, 20)),
    "alphaR": Basin((-180, 0), (-120, 20)),
}
# Debye in an elementary charge times nm.
DEBYE = 48.03205


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"the analysis needs {name.split('.')[0]}, which cannot be imported ({error}); "
            "install it with `pip install openmm-tensornet[md]`"
        ) from error


# ------------------------------------------------------------------------------------------ numbers


def compute_phi_psi(trajectory: mdtraj.Trajectory) -> NDArray:
    """Backbone angles of every residue that has both.

    Parameters
    ----------
    trajectory : mdtraj.Trajectory
        m frames.

    Returns
    -------
    array, shape (m, residues, 2)
        phi and psi in degrees, −180 to 180; of no residues where the molecule is no peptide.
    """
    mdtraj = _import("mdtraj")
    phi_atoms, phi = mdtraj.compute_phi(trajectory, periodic=False)
    psi_atoms, psi = mdtraj.compute_psi(trajectory, periodic=False)
    # N, CA and C of a residue are the last three atoms of its phi and the first three of its psi.
    column = {tuple(atoms[:3]): k for k, atoms in enumerate(psi_atoms)}
    both = [(k, column[tuple(atoms[1:])]) for k, atoms in enumerate(phi_atoms) if tuple(atoms[1:]) in column]
    angles = [np.stack((phi[:, a], psi[:, b]), axis=-1) for a, b in both]
    return np.degrees(np.stack(angles, axis=1)) if angles else np.empty((len(trajectory), 0, 2))


def compute_basins(phi_psi: NDArray) -> NDArray:
    """Which of :data:`BASINS` each pair of angles is in.

    Parameters
    ----------
    phi_psi : array, shape (..., 2)
        Degrees.

    Returns
    -------
    array of int, shape (...)
        Index in :data:`BASINS`, or −1 for "other".
    """
    phi_psi = np.asarray(phi_psi)
    if phi_psi.shape[-1:] != (2,):
        raise ValueError(f"phi_psi: expected shape (..., 2), received {phi_psi.shape}")
    found = np.full(phi_psi.shape[:-1], -1)
    for index, basin in enumerate(BASINS.values()):
        inside = np.ones(found.shape, dtype=bool)
        for angle, (low, high) in zip(np.moveaxis(phi_psi, -1, 0), basin, strict=True):
            inside &= (angle - low) % 360 < (high - low) % 360
        found[inside] = index
    return found


def compute_populations(phi_psi: NDArray, weights: NDArray | None = None) -> dict[str, float]:
    """Share of each basin, and of "other"; the shares sum to 1.

    Parameters
    ----------
    phi_psi : array, shape (..., 2)
        Degrees.
    weights : array, shape (...), optional
        Of the frames; equal by default.
    """
    basins = compute_basins(phi_psi).ravel()
    if not basins.size:
        raise ValueError("phi_psi: expected at least one pair of angles, received none")
    counts = np.bincount(basins + 1, None if weights is None else np.ravel(weights), len(BASINS) + 1)
    shares = counts / counts.sum()
    return dict(zip([*BASINS, "other"], [*map(float, shares[1:]), float(shares[0])], strict=True))


def compute_bond_lengths(trajectory: mdtraj.Trajectory) -> tuple[NDArray, NDArray]:
    """Lengths of the topology's bonds.

    Returns
    -------
    bonds : array of int, shape (b, 2)
    lengths : array, shape (m, b)
        nm.
    """
    mdtraj = _import("mdtraj")
    bonds = np.array([(a.index, b.index) for a, b in trajectory.topology.bonds], dtype=int).reshape(-1, 2)
    return bonds, mdtraj.compute_distances(trajectory, bonds, periodic=False)


def compute_angles(trajectory: mdtraj.Trajectory) -> tuple[NDArray, NDArray]:
    """Angles between the bonds of each atom.

    Returns
    -------
    triples : array of int, shape (a, 3)
        The atom in the middle is the one in the middle.
    angles : array, shape (m, a)
        Degrees.
    """
    mdtraj = _import("mdtraj")
    neighbors: dict[int, list[int]] = {}
    for a, b in trajectory.topology.bonds:
        neighbors.setdefault(a.index, []).append(b.index)
        neighbors.setdefault(b.index, []).append(a.index)
    triples = np.array(
        [
            (others[i], middle, others[j])
            for middle, others in sorted(neighbors.items())
            for i in range(len(others))
            for j in range(i + 1, len(others))
        ],
        dtype=int,
    ).reshape(-1, 3)
    return triples, np.degrees(mdtraj.compute_angles(trajectory, triples, periodic=False))


def compute_broken_bonds(trajectory: mdtraj.Trajectory) -> NDArray:
    """Number of broken bonds in each frame, shape (m,): those 1.6 times as long as in the first frame."""
    _, lengths = compute_bond_lengths(trajectory)
    return (lengths > BROKEN * lengths[:1]).sum(1)


def compute_drift(time: NDArray, total_energy: NDArray) -> tuple[float, float]:
    """Drift of the total energy of a run at constant energy.

    Parameters
    ----------
    time, total_energy : array, shape (m,)
        ps and kJ/mol.

    Returns
    -------
    drift : float
        Slope of a straight line through the energies, kJ/mol/ps.
    fluctuation : float
        Root mean square deviation from that line, kJ/mol.
    """
    time, energy = np.asarray(time, dtype=float), np.asarray(total_energy, dtype=float)
    if time.shape != energy.shape or time.ndim != 1 or len(time) < 3:
        raise ValueError(
            f"time, total_energy: expected the same number of values, 3 or more, received {time.shape} and {energy.shape}"
        )
    slope, intercept = np.polyfit(time, energy, 1)
    return float(slope), float(np.sqrt(np.mean((energy - slope * time - intercept) ** 2)))


def compute_dipole(positions: NDArray, charges: NDArray, masses: NDArray | None = None) -> NDArray:
    """Dipole moment of each frame of a molecule that is whole; the charges may differ from frame to frame.

    Parameters
    ----------
    positions : array, shape (frames, N, 3)
        nm.
    charges : array, shape (frames, N) or (N,)
        In elementary charges, such as those of :func:`read_charges`.
    masses : array, shape (N,), optional
        The moment of a charged molecule depends on the origin, which is the centre of these masses; by default the mean position.

    Returns
    -------
    array, shape (frames, 3)
        Elementary charge times nm, see :data:`DEBYE`; from negative to positive charge.
    """
    x, q = np.asarray(positions, dtype=float), np.asarray(charges, dtype=float)
    if x.ndim != 3 or x.shape[2] != 3:
        raise ValueError(f"positions: expected shape (frames, atoms, 3), received {x.shape}")
    if q.shape not in (x.shape[:2], x.shape[1:2]):
        raise ValueError(f"charges: expected shape {x.shape[:2]} or {x.shape[1:2]}, received {q.shape}")
    origin = np.average(x, axis=1, weights=masses)
    return (q[..., None] * (x - origin[:, None])).sum(1)


def run_constant_energy(
    system: openmm.System,
    positions: Any,
    *,
    temperature: float = 300.0,
    time: float = 2.0,
    timestep: float = 0.5,
    interval: int = 10,
    seed: int = 1,
    platform: str | None = None,
) -> tuple[NDArray, NDArray]:
    """Run at constant energy, to see how well the forces are those of the energy.

    Parameters
    ----------
    system : openmm.System
    positions : (n, 3) array or Quantity
        nm.
    temperature : float
        Of the velocities that it starts with, K.
    time, timestep : float
        ps and fs.
    interval : int
        Steps between energies.
    seed : int
        Of the velocities.
    platform : str, optional
        OpenMM platform; its fastest by default.

    Returns
    -------
    time, total_energy : array, shape (m,)
        ps and kJ/mol.
    """
    from openmm import Context, Platform, VerletIntegrator, unit

    integrator = VerletIntegrator(timestep / 1000)
    chosen = () if platform is None else (Platform.getPlatformByName(platform),)
    context = Context(system, integrator, *chosen)
    context.setPositions(positions)
    context.setVelocitiesToTemperature(temperature, seed)
    times, energies = [], []
    for _ in range(max(3, round(time * 1000 / timestep / interval))):
        integrator.step(interval)
        state = context.getState(energy=True)
        energy = state.getPotentialEnergy() + state.getKineticEnergy()
        times.append(state.getTime().value_in_unit(unit.picosecond))
        energies.append(energy.value_in_unit(unit.kilojoule_per_mole))
    return np.array(times), np.array(energies)


# ------------------------------------------------------------------------------------------ figures


def _figure(columns: int = 1, rows: int = 1) -> tuple[Figure, NDArray]:
    """A figure of panels that belongs to no window; the panels have shape (rows, columns)."""
    figure = _import("matplotlib.figure").Figure((5.5 * columns, 4 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def plot_ramachandran(phi_psi: NDArray) -> Figure:
    """Map of phi and psi, shape (..., 2), degrees, with the basins and their populations."""
    figure, panels = _figure()
    panel = panels[0, 0]
    flat = np.reshape(phi_psi, (-1, 2))
    edges = np.linspace(-180, 180, 61)
    *_, image = panel.hist2d(flat[:, 0], flat[:, 1], bins=(edges, edges), cmin=1, cmap="viridis")
    figure.colorbar(image, label="frames")
    for name, share in compute_populations(flat).items():
        if name not in BASINS:
            continue
        (left, right), (bottom, top) = BASINS[name]
        for x, width in _spans(left, right):
            for y, height in _spans(bottom, top):
                panel.add_patch(
                    _import("matplotlib.patches").Rectangle((x, y), width, height, fill=False, edgecolor="0.5", lw=0.8)
                )
        x, y = (left if left < right else -180) + 4, (top if bottom < top else 180) - 4
        panel.text(x, y, f"{name} {100 * share:.1f} %", va="top", fontsize=8)
    panel.set(xlabel="phi (degrees)", ylabel="psi (degrees)", xlim=(-180, 180), ylim=(-180, 180))
    panel.set(xticks=range(-180, 181, 60), yticks=range(-180, 181, 60), title=f"{len(flat)} frames")
    return figure


def _spans(low: float, high: float) -> list[tuple[float, float]]:
    """Start and width of the pieces of an interval of angles."""
    return [(low, high - low)] if low < high else [(low, 180 - low), (-180, high + 180)]


def plot_energies(energies: NDArray) -> Figure:
    """Potential energy and temperature over time, from the table of a run's energies."""
    figure, panels = _figure(rows=2)
    for panel, column, label in (
        (panels[0, 0], "potential_energy_kJ_per_mol", "potential energy (kJ/mol)"),
        (panels[1, 0], "temperature_K", "temperature (K)"),
    ):
        panel.plot(energies["time_ps"], energies[column], lw=0.8)
        panel.axhline(energies[column].mean(), color="0.5", lw=0.8)
        panel.set(xlabel="time (ps)", ylabel=label, title=f"mean {energies[column].mean():.6g}")
        panel.ticklabel_format(useOffset=True)
    return figure


def plot_geometry(trajectory: mdtraj.Trajectory) -> Figure:
    """Distributions of bond lengths and of angles, by the elements that they join."""
    figure, panels = _figure(columns=2)
    for panel, (atoms, values), label in (
        (panels[0, 0], compute_bond_lengths(trajectory), "bond length (nm)"),
        (panels[0, 1], compute_angles(trajectory), "angle (degrees)"),
    ):
        groups: dict[str, list[int]] = {}
        for column, members in enumerate(atoms):
            symbols = [trajectory.topology.atom(k).element.symbol for k in members]
            groups.setdefault("-".join(min(symbols, symbols[::-1])), []).append(column)
        for name, columns in sorted(groups.items()):
            panel.hist(values[:, columns].ravel(), bins=100, density=True, histtype="step", label=name)
        panel.set(xlabel=label, ylabel="density")
        panel.legend(fontsize=7, ncols=2)
    return figure


def plot_drift(time: NDArray, total_energy: NDArray) -> Figure:
    """Total energy of a run at constant energy, and its drift."""
    drift, fluctuation = compute_drift(time, total_energy)
    figure, panels = _figure()
    panel = panels[0, 0]
    panel.plot(time, total_energy - total_energy[0], lw=0.8)
    panel.set(
        xlabel="time (ps)",
        ylabel="change of the total energy (kJ/mol)",
        title=f"drift {drift:.3g} kJ/mol/ps, fluctuation {fluctuation:.3g} kJ/mol",
    )
    return figure


def plot_dipole(time: NDArray, moments: NDArray) -> Figure:
    """Magnitude of a molecule's dipole moment over time, and its distribution.

    Parameters
    ----------
    time : array, shape (m,)
        ps.
    moments : array, shape (m, 3)
        From :func:`compute_dipole`.
    """
    figure, panels = _figure(columns=2)
    magnitudes = DEBYE * np.linalg.norm(moments, axis=1)
    trace, distribution = panels[0]
    trace.plot(time, magnitudes, lw=0.8)
    trace.set(xlabel="time (ps)", ylabel="dipole moment (D)")
    distribution.hist(magnitudes, bins=50, density=True, histtype="step")
    distribution.set(xlabel="dipole moment (D)", ylabel="density", title=f"mean {magnitudes.mean():.3g} D")
    return figure


# ---------------------------------------------------------------------------------------- a whole run


def read_energies(directory: str | os.PathLike[str]) -> NDArray:
    """The table of energies of the run in a directory, as an array with the columns' names."""
    return np.atleast_1d(np.genfromtxt(RunFiles.in_directory(directory).energies, delimiter=",", names=True))


def read_trajectory(directory: str | os.PathLike[str]) -> mdtraj.Trajectory:
    """The trajectory of the run in a directory.

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If it has no frame.
    """
    files = RunFiles.in_directory(directory)
    for file in (files.start, files.trajectory, files.energies):
        if not file.exists():
            raise FileNotFoundError(
                f"{file}: no such file; expected the directory of a run, as `openmm-tensornet simulate` writes it"
            )
    if files.trajectory.stat().st_size <= DCD_HEADER_BYTES:
        raise ValueError(f"{files.trajectory}: expected frames, found none; let the run go on until its first report")
    return _import("mdtraj").load(str(files.trajectory), top=str(files.start))


def read_charges(directory: str | os.PathLike[str]) -> tuple[NDArray, NDArray] | None:
    """Partial charges of the run in a directory; None if it has none.

    Returns
    -------
    atoms : array of int, shape (n,)
        Those that have charges.
    charges : array, shape (m, n)
        Elementary charges; one row a frame.
    """
    file = RunFiles.in_directory(directory).charges
    if not file.exists():
        return None
    with open(file, encoding="ascii") as lines:
        atoms = np.array(lines.readline().split(",")[1:], dtype=int)
        return atoms, np.loadtxt(lines, delimiter=",", ndmin=2)[:, 1:]


def analyze(
    directory: str | os.PathLike[str], constant_energy: tuple[NDArray, NDArray] | None = None
) -> tuple[list[str], list[Path]]:
    """Draw everything about the run in a directory.

    Parameters
    ----------
    directory : path
        As :func:`~openmm_tensornet.simulate` writes it; the pictures go there too.
    constant_energy : pair of arrays, optional
        What :func:`run_constant_energy` returned.

    Returns
    -------
    lines : list of str
        What was found, for people.
    files : list of Path
        ``energies.png``, ``geometry.png``, for a peptide ``ramachandran.png``, for a run of one molecule with charges
        ``dipole.png`` and, given `constant_energy`, ``constant_energy.png``.
    """
    trajectory, energies = read_trajectory(directory), read_energies(directory)
    phi_psi = compute_phi_psi(trajectory)
    broken = compute_broken_bonds(trajectory)
    lines = [
        f"{len(trajectory)} frames, {energies['time_ps'][-1]:g} ps, mean temperature {energies['temperature_K'].mean():.1f} K",
        f"broken bonds: {broken.max() or 'none'}",
    ]
    figures = {"energies": plot_energies(energies), "geometry": plot_geometry(trajectory)}
    if phi_psi.size:
        shares = compute_populations(phi_psi)
        lines.append("populations: " + ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items()))
        figures["ramachandran"] = plot_ramachandran(phi_psi)
    found = read_charges(directory)
    # Several molecules have a moment each, and with periodic boundaries one that depends on the image.
    if found is not None and trajectory.unitcell_lengths is None and len(trajectory.topology.find_molecules()) == 1:
        atoms, charges = found
        masses = np.array([trajectory.topology.atom(i).element.mass for i in atoms])
        # A run that goes on has written some of them earlier than others.
        frames = min(len(trajectory), len(charges), len(energies))
        moments = compute_dipole(trajectory.xyz[:frames, atoms], charges[:frames], masses)
        lines.append(f"dipole moment: mean {DEBYE * np.linalg.norm(moments, axis=1).mean():.3g} D")
        figures["dipole"] = plot_dipole(energies["time_ps"][:frames], moments)
    if constant_energy is not None:
        drift, fluctuation = compute_drift(*constant_energy)
        lines.append(
            f"at constant energy: drift {1000 * drift / trajectory.n_atoms:.3g} J/mol/ps an atom, fluctuation {fluctuation:.3g} kJ/mol"
        )
        figures["constant_energy"] = plot_drift(*constant_energy)
    written = []
    for name, figure in figures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        path = Path(directory) / f"{name}.png"
        replace_file(path, buffer.getvalue())
        written.append(path)
    return lines, written
