"""What only many tries find: damaged and hostile files, runs that are killed, random models and molecules.

    python tests/soak.py                          # half an hour on two cores; prints what was tried
    python tests/soak.py --files 300 --runs 300 --kills 4 --pairs 4 --minutes 1 --seed 7

Each part is also a function, a few tries of which are tests (tests/test_soak.py). A try is made again by its seed.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import hashlib
import io
import json
import os
import pickle
import pickletools
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import soak_properties
import soak_runs
import torch

from openmm_tensornet.common.atoms import Atoms
from openmm_tensornet.export.compiled import model_hash
from openmm_tensornet.export.exported import export_potential, load_exported
from openmm_tensornet.export.specification import Specification, key_of, read_texts, with_texts
from openmm_tensornet.models.accuracy import reference_energy_and_forces
from openmm_tensornet.models.checkpoint import load_model
from openmm_tensornet.static.potential import copy_double

# ------------------------------------------------------------------------------------------- mutated files

SECONDS = 20  # for one file, which takes some ms
MEMORY = 1 << 29  # bytes beyond what a process has that has read sound ones
CANARY = "it-ran"  # a folder that nothing but code from a file makes
# What no file may bring about (https://docs.python.org/3/library/audit_events.html).
FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.startfile", "os.mkdir", "os.remove", "os.rename",
    "os.rmdir", "os.chmod", "os.symlink", "os.putenv", "shutil.", "subprocess.", "socket.", "urllib.", "ctypes.dlopen",
    "pickle.find_class", "exec", "compile", "code.__new__", "webbrowser.", "tempfile.", "open",
)  # fmt: skip


class Damage:
    """Random changes of the bytes of a file, as disks and networks make them."""

    def __init__(self, random: np.random.Generator):
        self.random = random

    def __call__(self, data: bytes) -> bytes:
        kinds = (self.flip, self.flip_structure, self.zeros, self.truncate, self.insert, self.delete, self.swap)
        return kinds[self.random.integers(len(kinds))](data)

    def place(self, data: bytes, room: int = 1) -> int:
        return int(self.random.integers(max(1, len(data) - room)))

    def flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.random.integers(1, 9)):
            changed[self.place(data)] ^= 1 << int(self.random.integers(8))
        return bytes(changed)

    def flip_structure(self, data: bytes) -> bytes:
        """In a header of the zip."""
        changed = bytearray(data)
        headers = [k for mark in (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7") for k in _all(data, mark)]
        at = headers[self.random.integers(len(headers))] if headers else 0
        for _ in range(self.random.integers(1, 4)):
            changed[min(at + int(self.random.integers(60)), len(data) - 1)] = int(self.random.integers(256))
        return bytes(changed)

    def zeros(self, data: bytes) -> bytes:
        at, length = self.place(data), int(self.random.integers(1, 4097))
        return data[:at] + bytes(len(data[at : at + length])) + data[at + length :]

    def truncate(self, data: bytes) -> bytes:
        return data[: self.place(data)]

    def insert(self, data: bytes) -> bytes:
        at = self.place(data)
        return data[:at] + self.random.bytes(int(self.random.integers(1, 65))) + data[at:]

    def delete(self, data: bytes) -> bytes:
        at = self.place(data)
        return data[:at] + data[at + int(self.random.integers(1, 65)) :]

    def swap(self, data: bytes) -> bytes:
        a, b = sorted((self.place(data), self.place(data)))
        length = min(int(self.random.integers(1, 4097)), b - a)
        return data[:a] + data[b : b + length] + data[a + length : b] + data[a : a + length] + data[b + length :]


def _all(data: bytes, mark: bytes) -> Iterator[int]:
    at = data.find(mark)
    while at >= 0:
        yield at
        at = data.find(mark, at + 1)


class Edit(Damage):
    """Random changes of what a checkpoint says, with the checksums put right, as an attacker makes them."""

    def __call__(self, data: bytes) -> bytes:
        kinds = (self.pickle_bytes, self.pickle_opcodes, self.option, self.weight, self.members, self.pickle_bytes)
        return kinds[self.random.integers(len(kinds))](data)

    def archive(self, data: bytes, change: Callable[[str, bytes], bytes | None]) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
            for name in old.namelist():
                content = change(name, old.read(name))
                if content is not None:
                    new.writestr(name, content)
        return buffer.getvalue()

    def pickled(self, data: bytes, change: Callable[[bytes], bytes]) -> bytes:
        return self.archive(data, lambda name, content: change(content) if name.endswith("/data.pkl") else content)

    def pickle_bytes(self, data: bytes) -> bytes:
        return self.pickled(data, Damage(self.random))

    def pickle_opcodes(self, data: bytes) -> bytes:
        """Opcodes left out, repeated, moved, replaced, or some that call things."""

        def change(content: bytes) -> bytes:
            starts = [at for _, _, at in pickletools.genops(content)] + [len(content)]
            parts = [content[a:b] for a, b in pairwise(starts)]
            for _ in range(self.random.integers(1, 4)):
                at = int(self.random.integers(len(parts)))
                kind = self.random.integers(5)
                if kind == 0:
                    del parts[at]
                elif kind == 1:
                    parts.insert(at, parts[self.random.integers(len(parts))])
                elif kind == 2:
                    other = int(self.random.integers(len(parts)))
                    parts[at], parts[other] = parts[other], parts[at]
                elif kind == 3:
                    codes = [code.code.encode("latin-1") for code in pickletools.opcodes]
                    parts[at] = codes[self.random.integers(len(codes))] + parts[at][1:]
                else:
                    calls = (
                        b"cos\nsystem\nX\4\0\0\0true\x85R", b"cbuiltins\neval\nX\3\0\0\0" b"1+1\x85R",
                        b"ctorch\nload\nX\1\0\0\0x\x85R", b"cbuiltins\ngetattr\n)R", b"ctorch._utils\n_rebuild_tensor_v2\n)R",
                        b"ctorch\nempty\nJ\xff\xff\xff\x7f\x85R", b"csubprocess\nPopen\nX\4\0\0\0true\x85R",
                        b"ccollections\nOrderedDict\n)R", b"ctorch._utils\n_rebuild_sparse_tensor\n)R",
                    )  # fmt: skip
                    parts.insert(at, calls[self.random.integers(len(calls))])
            return b"".join(parts)

        return self.pickled(data, change)

    def content(self, data: bytes, change: Callable[[dict, dict], None]) -> bytes:
        content = torch.load(io.BytesIO(data), weights_only=True)
        change(content["hyper_parameters"], content["state_dict"])
        buffer = io.BytesIO()
        torch.save(content, buffer)
        return buffer.getvalue()

    def option(self, data: bytes) -> bytes:
        values = (
            None, True, False, 0, 1, -1, 2, 10**6, 10**20, 0.5, -1.0, 1e300, float("nan"), float("inf"), "", "no", "tensornet",
            "tensornet2", "sum", "mean", "gauss", "Atomref", "ZBL", [], [1], {}, {"ZBL": {}}, [{"D2": None}], (1,), torch.ones(2), 32, 64,
        )  # fmt: skip

        def change(options: dict, _: dict) -> None:
            for _ in range(self.random.integers(1, 4)):
                name = sorted(options)[self.random.integers(len(options))]
                if self.random.random() < 0.2:
                    del options[name]
                else:
                    options[name] = values[self.random.integers(len(values))]

        return self.content(data, change)

    def weight(self, data: bytes) -> bytes:
        def change(_: dict, state: dict) -> None:
            name = sorted(state)[self.random.integers(len(state))]
            value = state[name]
            ways: tuple[Callable[[], Any], ...] = (
                lambda: value.double(), lambda: value.half(), lambda: value.long(), lambda: value.flatten(), lambda: value.unsqueeze(0),
                lambda: value * float("nan"), lambda: value * 1e38 * 1e38, lambda: value.flatten()[:1], lambda: None, lambda: 3.0,
                lambda: value.to(torch.bfloat16), lambda: value.to(torch.complex64), lambda: value.to_sparse() if value.dim() else value,
                lambda: torch.empty(0), lambda: value.expand(1, *value.shape), lambda: torch.zeros(()).expand(value.shape),
            )  # fmt: skip
            choice = self.random.integers(len(ways) + 2)
            if choice == len(ways):
                del state[name]
            elif choice > len(ways):
                state[f"{name}x"] = state.pop(name)
            else:
                state[name] = ways[choice]()

        return self.content(data, change)

    def members(self, data: bytes) -> bytes:
        """Members of the archive left out, shortened, lengthened."""
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            chosen = archive.namelist()[self.random.integers(len(archive.namelist()))]

        def change(name: str, content: bytes) -> bytes | None:
            if name != chosen:
                return content
            kind = self.random.integers(4)
            return (
                None if kind == 0 else content[: len(content) // 2] if kind == 1 else content * 2 if kind == 2 else b""
            )

        return self.archive(data, change)


class EditExported(Damage):
    """Changes a value of an exported file, and states the checksum that belongs to it now."""

    VALUES = (
        None, True, 0, 1, -1, 3, 2**31, 10**20, 0.5, -1.0, 1e300, float("nan"), float("inf"), "", "no", "TensorNet", "TensorNet2", "fused",
        "portable", "nnpops", "double", "torch", [], [1], {}, {"cells": [3, 3, 3], "per_cell": 1}, [["ZBL", {"max_z": 10**6}]], 768, 8192,
    )  # fmt: skip

    def __call__(self, data: bytes) -> bytes:
        weights, texts = safetensors.torch.load(data), read_texts(data)
        if self.random.random() < 0.4:
            self.weight(weights)
        else:
            name = self.choose(sorted(texts))
            described = json.loads(texts[name])
            for _ in range(self.random.integers(1, 3)):
                self.entry(described)
            texts[name] = json.dumps(described)
        data = safetensors.torch.save(weights, texts)
        try:
            key = key_of(Specification.unpack(data).pack())
            return with_texts(data, texts | {"metadata": json.dumps(json.loads(texts["metadata"]) | {"key": key})})
        except (ValueError, TypeError):
            return data

    def choose(self, values: Sequence[Any]) -> Any:
        return values[self.random.integers(len(values))]

    def entry(self, described: Any) -> None:
        """Change a value somewhere inside, or leave it out."""
        while True:
            place = self.choose(sorted(described) if isinstance(described, dict) else range(len(described)))
            inner = described[place]
            if not isinstance(inner, (dict, list)) or not inner or self.random.random() < 0.1:
                break
            described = inner
        if self.random.random() < 0.1:
            del described[place]
        else:
            described[place] = copy.deepcopy(self.choose(self.VALUES))

    def weight(self, weights: dict[str, torch.Tensor]) -> None:
        name = self.choose(sorted(weights))
        value = weights[name]
        ways: tuple[Callable[[], torch.Tensor], ...] = (
            lambda: value.double(), lambda: value.half(), lambda: value.long(), lambda: value.flatten(), lambda: value.unsqueeze(0),
            lambda: value * float("nan"), lambda: value * 1e38 * 1e38, lambda: value.flatten()[:1], lambda: torch.empty(0),
            lambda: value * 1.5, lambda: value.to(torch.complex64),
        )  # fmt: skip
        choice = self.random.integers(len(ways) + 2)
        if choice == len(ways):
            del weights[name]
        elif choice > len(ways):
            weights[f"{name}x"] = weights.pop(name)
        else:
            weights[name] = ways[choice]().contiguous()


class Attack:
    """What a pickle that is read leaves behind."""

    def __reduce__(self) -> tuple:
        return os.mkdir, (CANARY,)


XML = (
    '<?xml version="1.0"?><!DOCTYPE s [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]><s>&b;</s>',
    '<?xml version="1.0"?><!DOCTYPE s [<!ENTITY a SYSTEM "file:///etc/passwd">]><s>&a;</s>',
    '<?openmm <State/> ?><State openmmVersion="8.4" type="State" version="1"><Positions/></State>',
    '<State type="State" version="1"><!-- <Positions> --><Positions><![CDATA[<Position x="0"/>]]></Positions></State>',
    f'<Force forceGroup="0" function="{pickle.dumps(Attack()).hex()}" type="PythonForce" usesPeriodic="0" version="1"/>',
)


BOMB = [bytes(1 << 20)] * 600  # what a member without content is, more than there is memory for


class EditRun(Damage):
    """Random changes of what the checkpoint of a run says, with the checksums put right."""

    def __call__(self, data: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            self.parts: list[tuple[str, Any]] = [(name, archive.read(name)) for name in archive.namelist()]
        kinds = (self.array, self.array, self.entry, self.entry, self.text, self.foreign, self.members, self.fields)
        return kinds[self.random.integers(len(kinds))]()

    def choose(self, values: Sequence[Any]) -> Any:
        return values[self.random.integers(len(values))]

    def archive(self, method: int = zipfile.ZIP_DEFLATED) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as new, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a name that is there twice
            for name, content in self.parts:
                member = zipfile.ZipInfo(name)  # without the date, so that a seed makes the same file
                member.compress_type = method
                with new.open(member, "w") as file:
                    for piece in (content,) if content is not None else BOMB:
                        file.write(piece)
        return buffer.getvalue()

    def replace(self, chosen: str, change: Callable[[bytes], bytes]) -> bytes:
        self.parts = [(name, change(content) if name == chosen else content) for name, content in self.parts]
        return self.archive()

    def array(self) -> bytes:
        """Other numbers, another number of them, other types, and other formats."""

        def change(content: bytes) -> bytes:
            numbers = np.frombuffer(content[: len(content) // 8 * 8])
            special = numbers.copy()
            values = (np.nan, np.inf, -np.inf, 1e308, -1e308, 5e-324, 1e5, 1.0000001e5, -1e5, 2.0**63, -0.0, 1e-3)
            for _ in range(self.random.integers(1, 4)):
                if len(special):
                    special[self.place(special)] = self.choose(values)
            types = (np.float32, ">f8", np.float16, np.int64, np.complex128, np.uint8, np.longdouble)
            with np.errstate(all="ignore"):
                other = numbers.astype(self.choose(types))
            file = io.BytesIO()
            npy = self.choose((numbers, numbers.reshape(1, -1), numbers[:0], other, np.array([Attack()])))
            (np.save if self.random.random() < 0.5 else np.savez)(file, npy)
            ways = (
                special.tobytes(), special.tobytes(), self.random.permutation(numbers).tobytes(), (1e3 * numbers).tobytes(),
                other.tobytes(), content[: self.place(content)], content + self.random.bytes(int(self.random.integers(1, 100))), b"",
                2 * content, Damage.flip(self, content or b"0"), self.random.bytes(len(content)), file.getvalue(), pickle.dumps(numbers),
            )  # fmt: skip
            return self.choose(ways)

        return self.replace(self.choose(("positions", "velocities", "positions", "context.bin", "signature")), change)

    def entry(self) -> bytes:
        """Entries of the description at any depth: other values, left out, renamed, more of them."""
        values = (
            None, True, False, 0, 1, -1, 2, 5, 10**6, 2**31, 2**63, 10**20, 10**400, 0.5, -1.0, 1e300, 5e-324, float("nan"), float("inf"),
            "", "no", "a\nb", "\0", "\ud800", "ü", "../..", "x" * 10_000, [], [1], [[]], {}, {"a": 1}, [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
            [1e5] * 3,
        )  # fmt: skip

        def change(content: bytes) -> bytes:
            run = json.loads(content)
            for _ in range(self.random.integers(1, 3)):
                at: Any = run
                while isinstance(inner := at[self.choose(sorted(at))], dict) and inner and self.random.random() < 0.7:
                    at = inner
                name = self.choose(sorted(at))
                kind = self.random.integers(8)
                if kind == 0:
                    del at[name]
                elif kind == 1:
                    at[self.choose((name.upper(), f"{name} ", "other", ""))] = at.pop(name)
                elif kind == 2:
                    at[self.choose(("other", "force", "__class__", "a\nb"))] = self.choose(values)
                elif kind == 3 and type(at[name]) in (int, float):
                    at[name] += self.choose((1, -1, 5, 1e-9, 0.5, 10**18))
                else:
                    at[name] = self.choose(values)
                if not run:
                    break
            return json.dumps(run).encode()

        return self.replace("run.json", change)

    def text(self) -> bytes:
        """The same description written in other ways, and what is none."""

        def change(content: bytes) -> bytes:
            said = content.decode()
            number = self.choose(
                ("1e999", "-1e999", "NaN", "Infinity", "1" * 5000, "0x10", "1_000", "٣", "1" + "0" * 400 + ".0")
            )
            ways = (
                said.encode("utf-16"), said.encode("utf-32-be"), said.encode("utf-8-sig"), b"\xff" + content, content + b"{}",
                content + b"\0", said.replace("0", number, 1).encode(), said.replace(": 5", f": {number}").encode(),
                (said[:-1] + "," + said[1:]).encode(), b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
                b" " * 300_000 + content, content[: self.place(content)], self.flip(content), b"", b"null", b"[]", b'"' + content,
                (said[:-1] + ', "format": 1}').encode(), said.replace("format", "Format").encode(),
            )  # fmt: skip
            return self.choose(ways)

        return self.replace("run.json", change)

    def foreign(self) -> bytes:
        """Pickles, XML that OpenMM or a parser could act on, and archives, in the place of a member or beside them."""
        encoding = self.choose(("utf-8", "utf-8", "utf-16", "utf-7", "utf-32"))
        content = self.choose((pickle.dumps(Attack()), self.archive(), *(xml.encode(encoding) for xml in XML)))
        if self.random.random() < 0.5:
            return self.replace(self.choose([name for name, _ in self.parts]), lambda _: content)
        self.parts.append(
            (self.choose(("state.xml", "system.xml", "data.pkl", "__init__.py", "positions.npy")), content)
        )
        return self.archive()

    def members(self) -> bytes:
        """Left out, there twice, under other names, in another order, and bombs."""
        at = int(self.random.integers(len(self.parts)))
        name, content = self.parts[at]
        names = (
            name.upper(), name.replace("o", "\u043e"), f"../{name}", f"/{name}", f"./{name}", f"{name}/", f"{name}\0", f"a/{name}",
            name + " ", "C:\\" + name, "x" * 60_000,
        )  # fmt: skip
        kind = self.random.integers(40)
        if kind < 5:
            del self.parts[at]
        elif kind < 10:
            self.parts.append((name, self.choose((content, b"", 2 * content))))
        elif kind < 20:
            self.parts[at] = (self.choose(names), content)
        elif kind < 25:
            self.parts.append((self.choose(names), content))
        elif kind < 30:
            self.random.shuffle(self.parts)
        elif kind < 35:
            return self.archive(self.choose((zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)))
        elif kind < 37:
            self.parts += [(str(k), b"") for k in range(70_000)]
        else:
            self.parts[at] = (name, None)
        return self.archive()

    def fields(self) -> bytes:
        """A field of a member's two headers, and where one of them is there or both: sizes, method, flags, checksum, places."""
        data = bytearray(self.archive())
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
        at = int(self.random.integers(len(members)))
        central = list(_all(bytes(data), b"PK\1\2"))[at]
        for offset, length in self.choose(
            ([(6, 2)], [(8, 2)], [(10, 2)], [(16, 4)], [(20, 4)], [(24, 4)], [(28, 2)], [(30, 2)], [(32, 2)], [(42, 4)])
        ):
            largest = (1 << 8 * length) - 1
            value = self.choose(
                (0, 1, 8, 9, 12, 99, largest, largest - 1, largest // 2, int(self.random.integers(largest)))
            )
            new = value.to_bytes(length, "little")
            places = [central + offset]
            if offset < 32 and self.random.random() < 0.7:  # the local header has the same fields, two bytes earlier
                places.append(members[at].header_offset + offset - 2)
            for place in places:
                data[place : place + length] = new
        return bytes(data)


def read_checkpoint(path: Path) -> str:
    """What a checkpoint gives: a hash of its weights, options and the numbers of a molecule."""
    model = load_model(path)
    numbers = [z % model.config.max_z or 1 for z in (8, 1, 1)]
    x = torch.tensor([[0.0, 0, 0], [0.096, 0, 0], [-0.024, 0.093, 0]], dtype=torch.float64)
    energy, forces = reference_energy_and_forces(copy_double(model), Atoms.make(numbers), x)
    described = {k: v for k, v in model.metadata.items() if k != "source_hash"}
    return hashlib.sha256(repr((model_hash(model), described, energy.tolist(), forces.tolist())).encode()).hexdigest()


def read_exported(path: Path) -> str:
    """The same of an exported file."""
    exported = load_exported(path)
    atoms, particles = exported.metadata["atomic_numbers"], exported.metadata["particles"]
    x = torch.from_numpy(np.random.default_rng(1).uniform(0, 0.3, (1 + max(particles or range(len(atoms))), 3)))
    box = [4 * torch.eye(3, dtype=torch.float64)] if exported.metadata["periodic"] else []
    return repr((exported.metadata, [v.tolist() for v in exported.module(x, *box)]))


def read_run(path: Path) -> str:
    """What a run writes that the program resumes from a checkpoint, in a directory beside it."""
    return soak_runs.resume(path, path.with_name(f"{path.name}.run"))


READERS: dict[str, Callable[[Path], str]] = {
    "checkpoint": read_checkpoint, "exported file": read_exported, "run": read_run,
}  # fmt: skip
EDITS: dict[str, Callable[[np.random.Generator], Damage]] = {
    "checkpoint": Edit, "exported file": EditExported, "run": EditRun,
}  # fmt: skip


def originals(folder: Path, models: list[Path]) -> list[tuple[str, Path]]:
    """Files to mutate, each with its kind: checkpoints of several shapes and an exported file, or else the checkpoint of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    if not models:
        return [("run", soak_runs.original(folder))]
    exported = folder / "exported.safetensors"
    export_potential(load_model(models[0]), exported, atomic_numbers=[8, 1, 1])
    return [*(("checkpoint", path) for path in models), ("exported file", exported)]


def mutate(seed: int, files: list[tuple[str, Path]]) -> tuple[str, str, bytes]:
    """Kind of file, way and bytes of a mutated file."""
    random = np.random.default_rng(seed)
    kind, path = files[random.integers(len(files))]
    edited = kind in EDITS and random.random() < 0.5
    return kind, "edited" if edited else "damaged", (EDITS[kind] if edited else Damage)(random)(path.read_bytes())


def try_file(seed: int, files: list[tuple[str, Path]], expected: dict[str, set[str]], path: Path) -> str:
    """Outcome of one mutated file; text that does not begin with "ok" is a defect."""
    kind, way, data = mutate(seed, files)
    path.write_bytes(data)
    outcome = _outcome(kind, way, path, expected[kind])
    if os.path.exists(CANARY):
        os.rmdir(CANARY)
        return f"executed: {outcome}"
    return outcome


def _outcome(kind: str, way: str, path: Path, expected: set[str]) -> str:
    try:
        with forbidden(f"{path}.run"):
            found = READERS[kind](path)
    except ValueError as error:
        if "\n" in str(error) or str(path) not in str(error):
            return f"a message without the file or of several lines: {error}"
        return f"ok {kind} {way}: refused"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    if found in expected:
        return f"ok {kind} {way}: the same"
    if way == "damaged":
        return f"{kind}: other numbers from a damaged file"
    return f"ok {kind} {way}: read as what it says now"


class Executed(BaseException):
    """A file brought about something that no file may."""


_watching: str | None = None


@contextmanager
def forbidden(directory: str) -> Iterator[None]:
    """Turn the events of :data:`FORBIDDEN`, except for those of files in a directory, into :class:`Executed`."""
    global _watching
    _watching = directory
    try:
        yield
    finally:
        _watching = None


def _audit(event: str, arguments: tuple) -> None:
    global _watching
    if _watching is None or not event.startswith(FORBIDDEN):
        return
    if event in ("open", "os.mkdir", "os.rename", "os.remove") and os.fsdecode(arguments[0]).startswith(_watching):
        return
    if event == "open" and "w" not in str(arguments[1]) and not int(arguments[2] or 0) & os.O_CREAT:
        return
    # Importing a module when it is first needed is no harm, nor is what torch.fx writes of the package's own programs.
    if event in ("exec", "compile"):
        source = str(getattr(arguments[0], "co_filename", arguments[-1]))
        if os.path.isfile(source) or source.startswith("<eval_with_key>"):
            return
        # torch.jit parses the source of modules; to run it would be "exec".
        if event == "compile" and source == "<unknown>":
            return
    _watching = None
    raise Executed(f"{event} {arguments!r}"[:300])


def mutated_files(count: int, first_seed: int, models: list[Path], folder: Path) -> Counter[str]:
    """Try so many mutated files, or without `models` checkpoints of runs, in processes that may crash; counts of outcomes.

    A process that dies or takes longer than :data:`SECONDS` counts as a defect of the file that it was at.
    """
    repr(
        (torch.ones(2), torch.ones(2).to_sparse())
    )  # for a message; torch imports, and evaluates annotations, when it is first asked
    files = originals(folder, models)
    expected: dict[str, set[str]] = {}
    for kind, path in files:
        expected.setdefault(kind, set()).add(READERS[kind](path))
    outcomes: Counter[str] = Counter()
    next_seed, end = first_seed, first_seed + count
    while next_seed < end:
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(read)
            _worker(range(next_seed, end), files, expected, folder, write)
        os.close(write)
        with os.fdopen(read, "rb", buffering=0) as results:
            while next_seed < end:
                outcome = _line(results, SECONDS)
                if outcome is None:
                    os.kill(process, signal.SIGKILL)
                    outcome = "no answer: crashed or hung"
                if not outcome.startswith("ok"):
                    print(f"seed {next_seed}: {outcome}", flush=True)
                    outcome = f"DEFECT {outcome.split(':')[0]}"
                outcomes[outcome.removeprefix("ok ")] += 1
                next_seed += 1
                if outcome.startswith("DEFECT no answer"):
                    break
        os.waitpid(process, 0)
    return outcomes


def _line(stream: Any, seconds: float) -> str | None:
    """A line from a pipe within some time; None if none came."""
    text = b""
    while not text.endswith(b"\n"):
        if not select.select([stream], [], [], seconds)[0]:
            return None
        byte = stream.read(1)
        if not byte:
            return None
        text += byte
    return text.decode().rstrip("\n")


def _worker(seeds: range, files: list, expected: dict, folder: Path, write: int) -> None:
    size = (
        int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        if sys.platform == "linux"
        else None
    )
    if size is not None:
        most = size + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.chdir(folder)
    sys.dont_write_bytecode = True
    warnings.simplefilter("ignore")
    faulthandler.disable()  # a crash is counted, and its trace would be taken for one of the tests'
    path = folder / f"mutated-{os.getpid()}"
    sys.addaudithook(_audit)
    try:
        for seed in seeds:
            outcome = try_file(seed, files, expected, path)
            os.write(write, (" ".join(outcome.split())[:1000] + "\n").encode())
    finally:
        path.unlink(missing_ok=True)
        os._exit(0)


# --------------------------------------------------------------------------------------------------- program


def exported_models(folder: Path) -> list[Path]:
    """One model without and one with charges, exported for a water."""
    from conftest import CHARGE_VARIANTS, VARIANTS

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, case in (("plain", VARIANTS["zero-layers"]), ("charges", CHARGE_VARIANTS["no-layers"])):
        paths.append(folder / f"{name}.safetensors")
        export_potential(load_model(case.checkpoint), paths[-1], atomic_numbers=[8, 1, 1])
    return paths


def checkpoints() -> list[Path]:
    """Small checkpoints, one for each corner of the format."""
    from conftest import CHARGE_VARIANTS, VARIANTS

    return [case.checkpoint for case in (*VARIANTS.values(), *CHARGE_VARIANTS.values())]


def main() -> int:
    """Run the parts, those that fork beside the properties."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=10_000, help="mutated files (default: 10000)")
    parser.add_argument("--runs", type=int, default=10_000, help="mutated checkpoints of runs (default: 10000)")
    parser.add_argument("--kills", type=int, default=60, help="kills (default: 60)")
    parser.add_argument("--pairs", type=int, default=50, help="times that two runs share a directory (default: 50)")
    parser.add_argument("--minutes", type=float, default=25, help="for the properties (default: 25)")
    parser.add_argument("--seed", type=int, default=None, help="first seed (default: from the clock, and printed)")
    parser.add_argument("--part", choices=("faults", "properties"), help="one of the two alone")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    if options.part is None:
        print(f"first seed {seed}", flush=True)
        names = ("files", "runs", "kills", "pairs", "minutes")
        common = [f"--{name}={getattr(options, name)}" for name in names]
        parts = [
            subprocess.Popen([sys.executable, __file__, "--part", part, "--seed", str(seed), *common])
            for part in ("faults", "properties")
        ]
        return max(part.wait() for part in parts)
    torch.set_num_threads(1)
    started = time.monotonic()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.part == "properties":
            counts += soak_properties.properties(options.minutes, seed)
        else:
            counts += mutated_files(options.files, seed, checkpoints(), folder / "files")
            counts += mutated_files(options.runs, seed, [], folder / "runs")
            models = exported_models(folder / "models")
            counts += soak_runs.killed_runs(options.kills, seed, models, folder)
            counts += soak_runs.pairs_of_runs(options.pairs, seed, models[0], folder)
    print(f"\n{options.part}, {(time.monotonic() - started) / 60:.1f} minutes:")
    for outcome, count in sorted(counts.items()):
        print(f"{count:8,}  {outcome}")
    return int(any(outcome.startswith("DEFECT") for outcome in counts))


if __name__ == "__main__":
    sys.exit(main())
