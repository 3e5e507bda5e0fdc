"""What files of strangers, and other users of a folder, cannot do: docs/security.md names these tests."""

import io
import json
import os
import pickle
import re
import stat
import sys
import zipfile

import numpy as np
import openmm
import pytest
import torch
from openmm import app

from openmm_tensornet.common import files
from openmm_tensornet.common.files import open_own, replace_file
from openmm_tensornet.export.exported import export_potential, load_exported, read_metadata
from openmm_tensornet.export.specification import Specification, key_of, with_texts
from openmm_tensornet.forces.torchforce import TensorNetForce
from openmm_tensornet.md import runfiles, signature
from openmm_tensornet.md.simulation import simulate
from openmm_tensornet.models.checkpoint import load_model
from openmm_tensornet.models.priors import ZBL, Atomref
from openmm_tensornet.models.tensornet import ACTIVATIONS, TensorNet, TensorNetConfig

WATER = np.array([[0.0, 0.0, 0.0], [0.096, 0.0, 0.0], [-0.024, 0.093, 0.0]])  # nm


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """Where the user's key is."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def run(output, **options):
    """A water of independent atoms on springs; 10 reports of 5 steps."""
    topology, system = app.Topology(), openmm.System()
    residue = topology.addResidue("HOH", topology.addChain())
    springs = openmm.CustomExternalForce("k*(x^2+y^2+z^2)")
    springs.addGlobalParameter("k", 1000)
    for symbol in "OHH":
        atom = topology.addAtom(symbol, app.Element.getBySymbol(symbol), residue)
        system.addParticle(atom.element.mass)
        springs.addParticle(atom.index)
    system.addForce(springs)
    defaults = dict(
        time=0.025, report_interval=5, equilibration_time=0.01, seed=11, platform="Reference", minimize=False
    )
    return simulate(topology, system, WATER, output=output, **defaults | options).files


def edit(checkpoint, change):
    """Write a checkpoint anew, with members changed and checksums right."""
    with zipfile.ZipFile(checkpoint) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(checkpoint, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def described(**entries):
    """A change of what run.json says."""
    return lambda members: members.update({"run.json": json.dumps(json.loads(members["run.json"]) | entries).encode()})


# ------------------------------------------------------------------------------------------- images of OpenMM's memory


def test_an_image_goes_back_to_openmm_where_the_user_signed_it(tmp_path, state, capsys):
    undisturbed = run(tmp_path / "a", time=0.05)
    files = run(tmp_path / "b")
    run(tmp_path / "b", time=0.05, resume=True)
    assert "(complete state)" in capsys.readouterr().out
    assert files.energies.read_text() == undisturbed.energies.read_text()
    key = state / "openmm-tensornet" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(key.read_bytes()) == 32
    assert [path.name for path in key.parent.iterdir()] == ["key"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: m.update({"context.bin": m["context.bin"][:-4] + b"\0\0\0\xf0"}), id="another image"),
        pytest.param(described(seed=12), id="another description"),
        pytest.param(lambda m: m.update({"velocities": bytes(72)}), id="other velocities"),
        pytest.param(lambda m: m.update({"signature": b""}), id="an empty signature"),
        pytest.param(lambda m: m.pop("signature"), id="no signature"),
        pytest.param(lambda m: m.update({"signature": bytes(32)}), id="another signature"),
        pytest.param(lambda m: m.pop("context.bin"), id="no image"),
    ],
)
def test_openmm_never_reads_an_image_that_the_user_has_not_signed(tmp_path, monkeypatch, capsys, change):
    run(tmp_path / "run")
    edit(tmp_path / "run" / "checkpoint.zip", change)
    monkeypatch.setattr(openmm.Context, "loadCheckpoint", lambda *_: pytest.fail("the image was read"))
    run(tmp_path / "run", time=0.05, resume=True, seed=None)
    assert "(positions and velocities only: written by another user" in capsys.readouterr().out


def test_the_checkpoint_of_another_user(tmp_path, monkeypatch, capsys):
    undisturbed = run(tmp_path / "a", time=0.05)
    files = run(tmp_path / "b")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    run(tmp_path / "b", time=0.05, resume=True)
    assert "resumed at step 50 (positions and velocities only: written by another user" in capsys.readouterr().out
    was, now = (f.energies.read_text().splitlines() for f in (undisturbed, files))
    assert was[:11] == now[:11] and len(was) == len(now) == 21 and was[11:] != now[11:]


@pytest.mark.parametrize("kind", ["no folder for it", "readable for others", "a link", "another length"])
def test_without_a_key_of_its_own_a_run_writes_no_image(tmp_path, state, monkeypatch, capsys, kind):
    key = state / "openmm-tensornet" / "key"
    key.parent.mkdir(parents=True)
    if kind == "no folder for it":
        monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/state")
    elif kind == "a link":
        (state / "elsewhere").write_bytes(bytes(32))
        (state / "elsewhere").chmod(0o600)
        key.symlink_to(state / "elsewhere")
    else:
        key.write_bytes(bytes(32 if kind == "readable for others" else 31))
        key.chmod(0o640 if kind == "readable for others" else 0o600)
    files = run(tmp_path / "run")
    with zipfile.ZipFile(files.checkpoint) as archive:
        assert archive.namelist() == ["run.json", "positions", "velocities"]
    run(tmp_path / "run", time=0.05, resume=True)
    assert "resumed at step 50 (positions and velocities only" in capsys.readouterr().out


def test_a_signature_is_of_each_text_in_its_place():
    assert signature.is_signed([b"ab", b"c"], signature.sign([b"ab", b"c"]))
    for other in ([b"a", b"bc"], [b"abc"], [b"c", b"ab"], []):
        assert not signature.is_signed(other, signature.sign([b"ab", b"c"]))


# --------------------------------------------------------------------------------------------- checkpoints of runs


class Attack:
    def __reduce__(self):
        return os.mkdir, ("it-ran",)


FORCE = (
    f'<Force forceGroup="0" function="{pickle.dumps(Attack()).hex()}" type="PythonForce" usesPeriodic="0" version="1"/>'
)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: m.update({"state.xml": FORCE.encode()}), id="XML beside the arrays"),
        pytest.param(lambda m: m.update({"positions": FORCE.encode()}), id="XML for positions"),
        pytest.param(lambda m: m.update({"positions": pickle.dumps(Attack())}), id="a pickle for positions"),
        pytest.param(lambda m: m.update({"run.json": pickle.dumps(Attack())}), id="a pickle for run.json"),
        pytest.param(lambda m: m.update({"positions": m["positions"][:-24]}), id="one position fewer"),
        pytest.param(lambda m: m.update({"positions": m["positions"] + bytes(24)}), id="one position more"),
        pytest.param(lambda m: m.update({"positions": m["positions"][:-1]}), id="a part of a number"),
        pytest.param(lambda m: m.update({"positions": bytes(66) + b"\xf8\x7f" + bytes(4)}), id="NaN"),
        pytest.param(lambda m: m.update({"velocities": b"\xff" * 72}), id="velocities of NaN"),
        pytest.param(described(frames=1e30), id="a fraction for frames"),
        pytest.param(described(frames=10**30), id="too many frames"),
        pytest.param(described(step=1e30), id="a fraction for step"),
        pytest.param(described(step=10**30), id="too many steps"),
        pytest.param(described(step=10**400, frames=2 * 10**399), id="a step that is no number"),
        pytest.param(described(frames=-1, step=-5), id="a negative frame"),
        pytest.param(described(frames=11, step=55, time_ps=0.0275), id="a frame that the trajectory has not"),
        pytest.param(described(step=49), id="a step between frames"),
        pytest.param(described(time_ps=1.0), id="another time"),
        pytest.param(described(time_ps=float("nan")), id="no time"),
        pytest.param(described(seed=2**31), id="a seed that is too large"),
        pytest.param(described(parameters={"k": "1"}), id="a text for a parameter"),
        pytest.param(described(parameters={"k": float("inf")}), id="an infinite parameter"),
        pytest.param(described(parameters={}), id="a missing parameter"),
        pytest.param(described(parameters={"k": 1000.0, "q": 1.0}), id="an unknown parameter"),
        pytest.param(described(box_nm=[[1.0, 0, 0], [0, 1.0, 0]]), id="two box vectors"),
        pytest.param(described(box_nm=[[1.0, 0, 0], [0, float("nan"), 0], [0, 0, 1.0]]), id="NaN in the box"),
        pytest.param(described(box_nm=[[1.0, 0, 0], [0.9, 1.0, 0], [0, 0, 1.0]]), id="a box that is not reduced"),
        pytest.param(described(sizes={"energies": -1, "trajectory": 1}), id="a negative size"),
        pytest.param(described(settings=[]), id="no settings"),
        pytest.param(described(settings={}), id="empty settings"),
        pytest.param(described(potential_energy=1e300), id="another energy"),
        pytest.param(lambda m: m.update({"run.json": b"[" * 500_000 + b"]" * 500_000}), id="nested JSON"),
        pytest.param(lambda m: m.update({"run.json": b" " * (300 << 20) + m["run.json"]}), id="300 MB of blanks"),
        pytest.param(lambda m: m.update({"context.bin": bytes(1 << 26)}), id="a bomb for an image"),
        pytest.param(lambda m: m.update({"RUN.JSON": m["run.json"]}), id="a name in other case"),
        pytest.param(lambda m: m.pop("velocities"), id="no velocities"),
    ],
)
def test_a_checkpoint_of_a_run_holds_numbers_only(tmp_path, monkeypatch, change):
    """Whatever else is in it, it is refused in one line (ValueError, status 2 of the program), and files stay as they are."""
    monkeypatch.chdir(tmp_path)
    files = run("run")
    edit(files.checkpoint, change)
    before = {path: path.read_bytes() for path in files.start.parent.iterdir()}
    with pytest.raises(ValueError, match=r"checkpoint\.zip: expected") as caught:
        run("run", time=0.05, resume=True, seed=None)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert {path: path.read_bytes() for path in files.start.parent.iterdir()} == before
    assert not os.path.exists("it-ran")


@pytest.mark.parametrize(
    ("member", "place", "value", "message"),
    [
        pytest.param(0, 20, 1 << 31, "a member is longer than the archive", id="memory for more than there is"),
        pytest.param(2, 32, 46 + 11 + 46 + 9, "has 3 members, and 5 are expected", id="two members in a comment"),
    ],
)
def test_a_directory_that_is_not_that_of_the_archive(tmp_path, member, place, value, message):
    """A field of a member's entry changed: its compressed size, or the length of its comment."""
    made = run(tmp_path / "run").checkpoint
    data = bytearray(made.read_bytes())
    at = [match.start() for match in re.finditer(rb"PK\x01\x02", data)][member] + place
    data[at : at + 4] = value.to_bytes(4, "little")
    made.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        runfiles.Checkpoint.read(made, 3)


# ------------------------------------------------------------------------------------------------- XML of Systems


@pytest.mark.skipif(not hasattr(openmm, "PythonForce"), reason="PythonForce needs OpenMM 8.5 or newer")
def test_xml_of_a_pythonforce_can_run_code(tmp_path, monkeypatch):
    """What the documentation warns of, which is OpenMM's way and not ours to change."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception):  # noqa: B017  OpenMM calls what was unpickled
        openmm.XmlSerializer.deserialize(FORCE)
    assert os.path.exists("it-ran")


def test_xml_of_a_torchforce_can_run_code(tmp_path):
    torchforce = pytest.importorskip("openmmtorch", reason="openmmtorch is not installed")
    other, system = tmp_path / "thesis", openmm.System()
    other.write_text("mine")
    system.addParticle(1.0)
    force = torchforce.TorchForce(torch.jit.script(AtEvaluation(str(other), "")))
    force.setOutputsForces(True)
    system.addForce(force)
    read = openmm.XmlSerializer.deserialize(openmm.XmlSerializer.serialize(system))
    platform = openmm.Platform.getPlatformByName("Reference")
    context = openmm.Context(read, openmm.VerletIntegrator(0.001), platform)
    context.setPositions([[0, 0, 0]])
    context.getState(energy=True)
    assert other.read_text() == "XXXX"


# ----------------------------------------------------------------------------------------------- one writer, no links


def test_a_second_run_in_a_folder_is_refused(tmp_path):
    made = run(tmp_path / "run")
    for options in ({"resume": True, "time": 0.05}, {"overwrite": True}):
        with files.lock(tmp_path / "run" / ".lock"):
            with pytest.raises(
                FileExistsError, match="run is in use by another run; wait until it has ended"
            ) as caught:
                run(tmp_path / "run", **options)
        assert "\n" not in str(caught.value)
    run(tmp_path / "run", resume=True, time=0.05)  # the lock was given back, also after errors
    assert [row.split(",")[0] for row in made.energies.read_text().splitlines()[1:]] == [
        str(5 * k) for k in range(1, 21)
    ]


def test_a_system_without_locks_is_said_to_have_none(tmp_path, monkeypatch):
    """Windows, which has neither fcntl nor the flags that refuse links, nor user numbers."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(files, "NO_LINKS", 0)
    monkeypatch.delattr(os, "geteuid")
    with pytest.warns(UserWarning, match=r"\.lock: cannot be locked .*; start no second run there"):
        made = run(tmp_path / "run")
    with zipfile.ZipFile(made.checkpoint) as archive:
        assert "context.bin" not in archive.namelist()
    (tmp_path / "link").symlink_to(made.energies)
    with pytest.raises(ValueError, match="received a link"):
        open_own(tmp_path / "link", "a")


def test_a_run_that_went_on_meanwhile_is_not_overwritten(tmp_path):
    made = run(tmp_path / "run")
    old = runfiles.Checkpoint.read(made.checkpoint, 3)
    run(tmp_path / "run", resume=True, time=0.05)
    with pytest.raises(FileExistsError, match="in use by another run"):
        with made.sole_writer(old, True, False):
            pytest.fail("entered")
    with pytest.raises(FileExistsError, match="already holds a run"):
        with made.sole_writer(None, False, False):
            pytest.fail("entered")


@pytest.mark.parametrize("link", ["symbolic", "hard", "to nothing"])
@pytest.mark.parametrize("name", ["energies", "trajectory"])
def test_no_output_goes_through_a_link(tmp_path, name, link):
    made = run(tmp_path / "run")
    path, mine = getattr(made, name), tmp_path / "thesis"
    content = path.read_bytes() + b"mine" * 1000
    path.unlink()
    mine.write_bytes(content)
    if link == "hard":
        path.hardlink_to(mine)
    else:
        path.symlink_to(mine if link == "symbolic" else tmp_path / "nothing")
    with pytest.raises(ValueError, match=f"{path.name}: expected a file of its own, received a link"):
        run(tmp_path / "run", resume=True, time=0.05)
    assert mine.read_bytes() == content and not (tmp_path / "nothing").exists()
    run(tmp_path / "run", overwrite=True)
    assert mine.read_bytes() == content and not path.is_symlink()


def test_a_temporary_file_is_new(tmp_path, monkeypatch):
    mine, target = tmp_path / "thesis", tmp_path / "model.pt"
    mine.write_text("mine")
    replace_file(target, b"first")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "thesis"]
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".model.pt.guessed.tmp").symlink_to(mine)
    with pytest.raises(FileExistsError):
        replace_file(target, b"second")
    assert (mine.read_text(), target.read_bytes()) == ("mine", b"first")


def test_written_files_have_the_rights_of_others(tmp_path):
    replace_file(tmp_path / "a", b"")
    (tmp_path / "b").write_bytes(b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_device_is_no_output(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: expected a file of its own"):
        open_own(tmp_path / "pipe", "r+b")


# -------------------------------------------------------------------------------------------------- exported files


class AtEvaluation(torch.nn.Module):
    """Writes to a file when it is evaluated."""

    def __init__(self, path: str, metadata: str):
        super().__init__()
        self.path, self.metadata = path, metadata

    def forward(self, x: torch.Tensor):
        return torch.from_file(self.path, True, 4, dtype=torch.uint8).fill_(88).sum() * 0.0, x * 0


class AtReading(AtEvaluation):
    """Writes to a file when it is read."""

    @torch.jit.export
    def __getstate__(self):
        return (self.path, self.metadata, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, str, bool]):
        self.path, self.metadata, self.training = state[0], state[1], state[2]
        assert torch.from_file(state[0], True, 4, dtype=torch.uint8).fill_(88).sum() > 0


@pytest.fixture(scope="module")
def exported(tmp_path_factory, model_path):
    path = tmp_path_factory.mktemp("exported") / "good.safetensors"
    export_potential(load_model(model_path("variants/zero-layers")), path, atomic_numbers=[8, 1, 1])
    return path


@pytest.mark.parametrize("ending", [".py", ".PY", ".Py"])
@pytest.mark.parametrize("kind", [AtEvaluation, AtReading])
def test_torchscript_never_runs(tmp_path, exported, kind, ending):
    """Whatever its members are called."""
    other, buffer = tmp_path / "thesis", io.BytesIO()
    other.write_text("mine")
    metadata = json.dumps(read_metadata(exported))
    torch.jit.save(torch.jit.script(kind(str(other), metadata)), buffer, _extra_files={"metadata.json": metadata})
    path = tmp_path / "bad.pt"
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(path, "w") as new:
        for name in archive.namelist():
            new.writestr(zipfile.ZipInfo(name.replace(".py", ending)), archive.read(name))
    with pytest.raises(
        ValueError, match=r"received TorchScript .*, which is a program and could do anything"
    ) as caught:
        TensorNetForce(path, atomic_numbers=[8, 1, 1])
    assert "\n" not in str(caught.value)
    assert other.read_text() == "mine"


def parts(path):
    """The header of a safetensors file, as JSON, and the rest."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def sign(path):
    """Put the checksum right, as an attacker would."""
    header, data = parts(path)
    specification = header["__metadata__"]
    content = Specification.unpack(
        with_texts(path.read_bytes(), {"specification": specification["specification"]})
    ).pack()
    header["__metadata__"]["metadata"] = json.dumps(json.loads(specification["metadata"]) | {"key": key_of(content)})
    return write(path, header, data)


def said(name, value):
    """A change of what the specification says, at a dotted path."""

    def change(header, data):
        described = json.loads(header["__metadata__"]["specification"])
        *inner, last = name.split(".")
        at = described
        for key in inner:
            at = at[int(key)] if isinstance(at, list) else at[key]
        at[int(last) if isinstance(at, list) else last] = value
        header["__metadata__"]["specification"] = json.dumps(described)
        return header, data

    return change


def placed(field, value):
    """A change of where the header says that a tensor lies."""

    def change(header, data):
        header["mean"][field] = value
        return header, data

    return change


CHANGES = {
    "a wrong bit": lambda header, data: (header, data[:100] + bytes([data[100] ^ 1]) + data[101:]),
    "truncated": lambda header, data: (header, data[:-1]),
    "longer": lambda header, data: (header, data + b"0"),
    "a weight missing": lambda header, data: ({k: v for k, v in header.items() if k != "mean"}, data),
    "offsets beyond the file": placed("data_offsets", [0, 1 << 40]),
    "negative offsets": placed("data_offsets", [-8, -4]),
    "overlapping offsets": placed("data_offsets", [0, 4]),
    "a shape of 2^62": placed("shape", [1 << 62]),
    "another dtype": placed("dtype", "I32"),
    "an unknown dtype": placed("dtype", "object"),
    "more channels": said("config.embedding_dimension", 1 << 40),
    "more layers": said("config.num_layers", 1 << 40),
    "an unknown option": said("config.hook", "os.system"),
    "another class": said("model", "Module"),
    "a huge list": said("lists.0.0.capacity", 1 << 60),
    "a list longer than all pairs": said("lists.0.0.capacity", 4),
    "a huge grid": said("lists.0.0.grid", {"cells": [1 << 20] * 3, "per_cell": 1 << 20}),
    "another finder": said("lists.0.0.finder", "os"),
    "a table of 2^40 intervals": said("intervals", 1 << 40),
    "an element beyond the network": said("atoms.numbers", [8, 1, 1000]),
    "a negative element": said("atoms.numbers", [8, 1, -1]),
    "a molecule too many": said("atoms.replicas", [0, 0, 1 << 40]),
    "units of nothing": said("units.nm_per_length", 0),
    "a text for a number": said("units.kj_per_mol_per_energy", "1e400"),
    "a prior that is none": said("priors", [["Prior", {}]]),
    "a prior of all memory": said("priors", [["Atomref", {"max_z": 1 << 40, "enable": True}]]),
    "kernels that are none": said("kernels", "__import__"),
    "deep JSON": lambda header, data: (
        {**header, "__metadata__": header["__metadata__"] | {"specification": "[" * 200_000}},
        data,
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_exported_file_is_data(tmp_path, exported, change):
    """What is damaged or says what cannot be is refused in one line."""
    path = write(tmp_path / "bad.safetensors", *change(*parts(exported)))
    if change is not CHANGES["a wrong bit"]:  # which only the checksum tells
        with pytest.raises(ValueError):
            Specification.unpack(path.read_bytes())
    with pytest.raises(ValueError, match=r"bad\.safetensors: expected an exported TensorNet file") as caught:
        load_exported(path)
    assert "\n" not in str(caught.value)


def test_an_exported_file_with_other_weights_is_what_it_says(tmp_path, exported):
    """Somebody's own weights are sound; without the checksum they are damage."""
    header, data = parts(exported)
    begin, end = header["mean"]["data_offsets"]
    path = write(tmp_path / "other.safetensors", header, data[:begin] + np.float32(1).tobytes() + data[end:])
    with pytest.raises(ValueError, match="its checksum is wrong"):
        load_exported(path)
    x = torch.tensor(WATER)
    moved = load_exported(sign(path)).module(x)[0] - load_exported(exported).module(x)[0]
    assert float(moved) == pytest.approx(96.485, rel=1e-4)  # an eV


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("kernels", ["portable", "fused"])
def test_no_sound_model_is_refused(activation, kernels, tmp_path):
    """Every activation that a model may have; the numbers are the same again."""
    config = TensorNetConfig(embedding_dimension=4, num_layers=1, num_rbf=4, max_z=10, activation=activation)
    path, x = tmp_path / "exported.safetensors", torch.tensor(WATER)
    model = TensorNet(config, [Atomref(10), ZBL(3.0, list(range(10)), 1e-10, 1.6e-19)])
    export_potential(model, path, atomic_numbers=[8, 1, 1], kernels=kernels)
    energy, forces = TensorNetForce(model, atomic_numbers=[8, 1, 1], kernels=kernels).getModule()(x)
    again = load_exported(path).module(x)
    assert torch.equal(energy, again[0]) and torch.equal(forces, again[1])
