"""Analysis of runs: numbers with known answers, and the pictures of a real run."""

import numpy as np
import openmm
import pytest
from openmm import unit
from openmm.app import DCDFile, PDBFile

from openmm_tensornet.md import analysis, cli
from openmm_tensornet.md.analysis import BASINS

md = pytest.importorskip("mdtraj")
pytest.importorskip("matplotlib")

EXAMPLE = "examples/alanine_dipeptide.pdb"


@pytest.fixture(scope="module")
def trajectory(request):
    return md.load(str(request.config.rootpath / EXAMPLE))


def torsion(x, atoms):
    """Plain definition: the angle between the planes, signed; degrees."""
    a, b, c, d = x[list(atoms)]
    first, axis, last = b - a, c - b, d - c
    left, right = np.cross(first, axis), np.cross(axis, last)
    return np.degrees(np.arctan2(np.linalg.norm(axis) * first @ right, left @ right))


def test_phi_psi(trajectory):
    rng = np.random.default_rng(0)
    moved = trajectory.xyz[0] + rng.normal(0, 0.01, (4, *trajectory.xyz.shape[1:]))
    found = analysis.compute_phi_psi(md.Trajectory(moved, trajectory.topology))
    assert found.shape == (4, 1, 2)
    for frame, angles in zip(moved, found[:, 0], strict=True):
        expected = torsion(frame, (4, 6, 8, 14)), torsion(frame, (6, 8, 14, 16))
        np.testing.assert_allclose(angles, expected, atol=1e-2)


def test_phi_psi_of_what_is_no_peptide():
    topology = md.Topology()
    residue = topology.add_residue("HOH", topology.add_chain())
    for name, symbol in (("O", "O"), ("H1", "H"), ("H2", "H")):
        topology.add_atom(name, md.element.Element.getBySymbol(symbol), residue)
    water = md.Trajectory(np.zeros((2, 3, 3)), topology)
    assert analysis.compute_phi_psi(water).shape == (2, 0, 2)


@pytest.mark.parametrize(
    ("phi", "psi", "name"),
    [
        (-80, 70, "C7eq"),
        (-155, 160, "C5"),
        (-155, -170, "C5"),
        (175, 165, "C5"),
        (70, -60, "C7ax"),
        (-65, -40, "alphaR"),
        (60, 60, "other"),
        (-70, 150, "other"),
        (-130, 20, "C7eq"),
        (0, 20, "other"),
    ],
)
def test_basins(phi, psi, name):
    index = int(analysis.compute_basins(np.array([phi, psi])))
    assert [*BASINS, "other"][index] == name


def test_basins_do_not_overlap():
    angles = np.stack(np.meshgrid(np.arange(-180, 180, 2.5), np.arange(-180, 180, 2.5)), axis=-1).reshape(-1, 2)
    inside = np.zeros(len(angles), dtype=int)
    for basin in BASINS.values():
        member = np.ones(len(angles), dtype=bool)
        for angle, (low, high) in zip(angles.T, basin, strict=True):
            member &= (low <= angle) & (angle < high) if low < high else (angle >= low) | (angle < high)
        inside += member
    assert inside.max() == 1
    assert (inside == (analysis.compute_basins(angles) >= 0)).all()


def test_populations():
    angles = np.array([[-80, 70], [-80, 70], [70, -60], [0, 180]])
    shares = analysis.compute_populations(angles)
    assert shares == {"C7eq": 0.5, "C5": 0.0, "C7ax": 0.25, "alphaR": 0.0, "other": 0.25}
    weighted = analysis.compute_populations(angles, np.array([1, 1, 6, 0]))
    assert weighted["C7ax"] == 0.75 and weighted["other"] == 0
    with pytest.raises(ValueError, match="phi_psi: expected at least one pair of angles"):
        analysis.compute_populations(np.empty((3, 0, 2)))
    with pytest.raises(ValueError, match=r"phi_psi: expected shape \(..., 2\), received \(3,\)"):
        analysis.compute_basins(np.zeros(3))


def test_bonds_and_angles(trajectory):
    bonds, lengths = analysis.compute_bond_lengths(trajectory)
    triples, angles = analysis.compute_angles(trajectory)
    assert bonds.shape == (21, 2) and lengths.shape == (1, 21)
    assert triples.shape == (36, 3) and angles.shape == (
        1,
        36,
    )  # 6 for each of five sp3 carbons, 3 for each of two C and two N
    x = trajectory.xyz[0].astype(float)
    np.testing.assert_allclose(lengths[0], np.linalg.norm(x[bonds[:, 0]] - x[bonds[:, 1]], axis=1), atol=1e-6)
    left, right = x[triples[:, 0]] - x[triples[:, 1]], x[triples[:, 2]] - x[triples[:, 1]]
    cosine = (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
    np.testing.assert_allclose(angles[0], np.degrees(np.arccos(cosine)), atol=1e-2)


def test_broken_bonds(trajectory):
    """One hydrogen of a methyl group is pulled away."""
    x = np.repeat(trajectory.xyz.astype(float), 3, axis=0)
    away = x[0, 0] - x[0, 1]
    x[1, 0] += 0.55 * away
    x[2, 0] += 0.65 * away
    assert analysis.compute_broken_bonds(md.Trajectory(x, trajectory.topology)).tolist() == [0, 0, 1]


def test_drift():
    time = np.linspace(0, 2, 101)
    wave = np.sin(2 * np.pi * 10 * time)
    drift, fluctuation = analysis.compute_drift(time, -700 + 0.3 * time + 0.1 * wave)
    assert drift == pytest.approx(0.3, abs=0.01)
    assert fluctuation == pytest.approx(0.1 / np.sqrt(2), rel=0.02)
    with pytest.raises(ValueError, match=r"3 or more, received \(2,\) and \(2,\)"):
        analysis.compute_drift(np.zeros(2), np.zeros(2))


def test_constant_energy():
    """A harmonic oscillator keeps its energy within the error of the integrator, and the times are what was asked for."""
    system = openmm.System()
    for _ in range(2):
        system.addParticle(12.0)
    bond = openmm.HarmonicBondForce()
    bond.addBond(0, 1, 0.1, 1e5)
    system.addForce(bond)
    time, energy = analysis.run_constant_energy(
        system, [[0, 0, 0], [0.1, 0, 0]], time=0.5, timestep=0.5, interval=5, platform="Reference"
    )
    np.testing.assert_allclose(time, np.arange(1, 201) * 2.5e-3)
    drift, fluctuation = analysis.compute_drift(time, energy)
    assert energy.mean() > 0.1 and abs(drift) < 0.01 * energy.mean() and fluctuation < 0.01 * energy.mean()


def test_dipole():
    """A unit charge and its opposite, 0.1 nm apart, are 4.803 debye; an ion's depends on the origin."""
    x = np.array([[[0, 0, 0], [0, 0, 0.1]], [[1, 1, 1], [1.1, 1, 1]]])
    moment = analysis.compute_dipole(x, np.array([-1.0, 1.0]))
    np.testing.assert_allclose(moment, [[0, 0, 0.1], [0.1, 0, 0]], atol=1e-12)
    assert np.linalg.norm(moment[0]) * analysis.DEBYE == pytest.approx(4.8032, abs=1e-4)
    np.testing.assert_allclose(
        analysis.compute_dipole(x, np.array([[-1.0, 1.0], [-2.0, 2.0]]))[1], [0.2, 0, 0], atol=1e-12
    )
    np.testing.assert_allclose(analysis.compute_dipole(x, np.array([0.0, 1.0]))[0], [0, 0, 0.05], atol=1e-12)
    np.testing.assert_allclose(
        analysis.compute_dipole(x, np.array([0.0, 1.0]), [3.0, 1.0])[0], [0, 0, 0.075], atol=1e-12
    )
    with pytest.raises(ValueError, match=r"charges: expected shape \(2, 2\) or \(2,\), received \(3,\)"):
        analysis.compute_dipole(x, np.zeros(3))
    with pytest.raises(ValueError, match=r"positions: expected shape \(frames, atoms, 3\), received \(2, 3\)"):
        analysis.compute_dipole(x[0], np.zeros(2))


@pytest.fixture
def run(tmp_path, request):
    """The directory of a run with five frames of the example."""
    pdb = PDBFile(str(request.config.rootpath / EXAMPLE))
    x = pdb.getPositions(asNumpy=True).value_in_unit(unit.nanometer)
    for name in ("start.pdb", "final.pdb"):
        with open(tmp_path / name, "w") as file:
            PDBFile.writeFile(pdb.topology, pdb.positions, file)
    rng = np.random.default_rng(1)
    with open(tmp_path / "trajectory.dcd", "wb") as file:
        dcd = DCDFile(file, pdb.topology, 0.0005 * unit.picosecond, 10, 10)
        for _ in range(5):
            dcd.writeModel((x + rng.normal(0, 0.002, x.shape)) * unit.nanometer)
    header = "step,time_ps,potential_energy_kJ_per_mol,kinetic_energy_kJ_per_mol,total_energy_kJ_per_mol,temperature_K"
    rows = [f"{10 * k},{0.005 * k},{-700 - k},80,{-620 - k},{290 + k}" for k in range(1, 6)]
    (tmp_path / "energies.csv").write_text("\n".join([header, *rows]) + "\n")
    return tmp_path


def test_analyze_a_run(run, capsys):
    assert cli.main(["analyze", str(run)]) == 0
    text = capsys.readouterr()
    assert "5 frames, 0.025 ps, mean temperature 293.0 K" in text.out
    assert "broken bonds: none" in text.out
    assert "populations: C7eq 0.0 %, C5 100.0 %, C7ax 0.0 %" in text.out
    assert text.err == ""
    for name in ("energies", "geometry", "ramachandran"):
        path = run / f"{name}.png"
        assert str(path) in text.out
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    assert not (run / "constant_energy.png").exists()


def test_analyze_charges(run):
    """Two charges of ±0.5 e on the first carbon and nitrogen; a row more than frames, as a run that goes on may have."""
    (run / "charges.csv").write_text("step,4,6\n" + "".join(f"{10 * k},0.5,-0.5\n" for k in range(1, 7)))
    lines, files = analysis.analyze(run)
    x = md.load(str(run / "trajectory.dcd"), top=str(run / "start.pdb")).xyz
    expected = 0.5 * 48.03205 * np.linalg.norm(x[:, 4] - x[:, 6], axis=1).mean()
    assert lines[-1] == f"dipole moment: mean {expected:.3g} D"
    assert files[-1] == run / "dipole.png" and files[-1].exists()


def test_analyze_with_constant_energy(run):
    time = np.linspace(0, 2, 50)
    lines, files = analysis.analyze(run, (time, -600 + 0.22 * time))
    assert lines[-1].startswith("at constant energy: drift 10 J/mol/ps an atom")
    assert files[-1] == run / "constant_energy.png" and files[-1].exists()


def test_analyze_what_is_no_run(tmp_path, run, capsys):
    assert cli.main(["analyze", str(tmp_path / "nowhere")]) == 2
    assert "expected the directory of a run" in capsys.readouterr().err
    content = (run / "trajectory.dcd").read_bytes()
    (run / "trajectory.dcd").write_bytes(content[:276])
    assert cli.main(["analyze", str(run)]) == 2
    assert "trajectory.dcd: expected frames, found none" in capsys.readouterr().err
