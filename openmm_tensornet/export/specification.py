"""What a force is made of, as data: a model, atoms and what was chosen for them.

The bytes are a safetensors file: the weights, and one text of JSON among its metadata. Programs are made of them anew in every process
(:mod:`.programs`), so nothing that is stored can run code or name places in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import safetensors
import safetensors.torch
import torch

from ..common.atoms import Atoms
from ..common.checks import integer, one_of
from ..common.units import ModelUnits
from ..models.checkpoint import check_weights
from ..models.priors import D2, ZBL, Atomref
from ..models.tensornet import TensorNet, TensorNetConfig
from ..models.tensornet2 import TensorNet2, TensorNet2Config
from ..neighbors.plan import Grid
from ..static.potential import FINDERS, TABLE_SIZES, Options, Plan, StaticPotential
from ..static.program import ListPlan

LARGEST_LIST = 1 << 28  # pairs, or places in the cells of a grid
_PRIORS: dict[str, Any] = {kind.__name__: kind for kind in (Atomref, ZBL, D2)}
_KINDS: dict[str, tuple[Any, Any]] = {
    "TensorNet": (TensorNet, TensorNetConfig),
    "TensorNet2": (TensorNet2, TensorNet2Config),
}
_ENTRY = "specification"


@dataclass(frozen=True)
class Specification:
    """All that a static potential is made of.

    Attributes
    ----------
    model : TensorNet
    atoms : Atoms
    options : Options
    plan : Plan
    """

    model: TensorNet
    atoms: Atoms
    options: Options
    plan: Plan

    @property
    def has_charges(self) -> bool:
        """Whether the model has partial charges."""
        return isinstance(self.model, TensorNet2)

    def potential(self) -> StaticPotential:
        """The potential, without repeating the checks made at its creation."""
        return StaticPotential.make(self.model, self.atoms, self.options, plan=self.plan)

    def pack(self) -> bytes:
        """The bytes; the same for the same specification."""
        model = self.model
        described = {
            "model": type(model).__name__,
            "dtype": str(model.mean.dtype).removeprefix("torch."),
            "config": asdict(model.config),
            "units": asdict(model.units),
            "elements": model.elements,
            "source_hash": model.source_hash,
            "about": model.about,
            "priors": [[type(prior).__name__, prior.arguments] for prior in model.priors],
            "atoms": asdict(self.atoms),
            "periodic": self.options.periodic,
            "precision": self.options.precision,
            "kernels": self.options.kernels,
            "intervals": self.plan.intervals,
            "lists": [
                [_describe(plan) for plan in list_plans]
                for list_plans in (self.plan.list_plans, self.plan.gpu_list_plans)
            ],
        }
        weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
        return safetensors.torch.save(weights, {_ENTRY: json.dumps(described)})

    @classmethod
    def unpack(cls, content: bytes) -> Specification:
        """Read what :meth:`pack` wrote.

        Raises
        ------
        ValueError
            If the bytes are damaged, or describe what cannot be made.
        """
        try:
            weights = safetensors.torch.load(content)
            return _build(json.loads(read_texts(content)[_ENTRY]), weights)
        except (KeyError, TypeError, AttributeError, RuntimeError, RecursionError, OverflowError) as error:
            raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None
        except safetensors.SafetensorError as error:
            raise ValueError(f"{error}") from None


def key_of(content: bytes) -> str:
    """A name for the bytes of a specification: their SHA-256."""
    return hashlib.sha256(content).hexdigest()


def read_texts(content: bytes) -> dict[str, str]:
    """The metadata of a safetensors file: the texts that stand beside its tensors."""
    length = int.from_bytes(content[:8], "little")
    texts = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("expected texts among the metadata")
    return texts


def with_texts(content: bytes, texts: Mapping[str, str]) -> bytes:
    """A safetensors file with other metadata."""
    return safetensors.torch.save(safetensors.torch.load(content), dict(texts))


def _describe(list_plan: ListPlan | None) -> dict | None:
    return (
        None
        if list_plan is None
        else list_plan._asdict() | {"grid": None if list_plan.grid is None else list_plan.grid._asdict()}
    )


def _build(described: Mapping[str, Any], weights: dict[str, torch.Tensor]) -> Specification:
    network, configuration = _KINDS[described["model"]]
    config = configuration(**described["config"])
    check_weights(config, weights)
    for name, arguments in described["priors"]:
        if arguments.get("max_z", 0) > len(weights["embedding.species.weight"]):
            raise ValueError(
                f"{name}: expected at most as many elements as the network has, received {arguments['max_z']}"
            )
    priors = [_PRIORS[name](**arguments) for name, arguments in described["priors"]]
    units = ModelUnits(**described["units"])
    for name in ("nm_per_length", "kj_per_mol_per_energy"):
        if not 0 < float(getattr(units, name)) < float("inf"):
            raise ValueError(f"{name}: expected a positive number, received {getattr(units, name)!r}")
    with torch.random.fork_rng(devices=[]):  # modules are made with random weights first
        one_of("dtype", described["dtype"], ("float32", "float64"))
        model = network(config, priors, units).to(getattr(torch, described["dtype"])).eval()
    own = model.state_dict()
    for name, value in weights.items():
        if name in own and (value.dtype != own[name].dtype or value.shape != own[name].shape):
            raise ValueError(
                f"weight {name}: expected {tuple(own[name].shape)} of {own[name].dtype}, received {tuple(value.shape)} of {value.dtype}"
            )
    model.load_state_dict(weights)
    model.elements = None if described["elements"] is None else tuple(described["elements"])
    model.source_hash, model.about = described["source_hash"], described["about"]
    atoms = Atoms.make(*(described["atoms"][name] for name in ("numbers", "replicas", "charges")))
    if max(atoms.numbers) >= config.max_z:
        raise ValueError(f"atomic_numbers: expected numbers below {config.max_z}, received {max(atoms.numbers)}")
    intervals = described["intervals"]
    if intervals not in (None, *TABLE_SIZES):
        raise ValueError(
            f"intervals: expected one of {', '.join(map(str, TABLE_SIZES))}, or null, received {intervals!r}"
        )
    count = len(atoms.numbers)
    list_plans = [
        (_list_plan(pairs, count), None if coulomb is None else _list_plan(coulomb, count))
        for pairs, coulomb in described["lists"]
    ]
    options = Options(
        described["periodic"], described["precision"], intervals is not None, None, kernels=described["kernels"]
    )
    return Specification(model, atoms, options, Plan(intervals, *list_plans))


def _list_plan(described: dict, count: int) -> ListPlan:
    """A list no longer than `count` atoms can need."""
    capacity, grid = described["capacity"], described["grid"]
    one_of("finder", described["finder"], tuple(FINDERS.values()))
    if capacity is not None:
        capacity = integer("capacity", capacity, 1, min(LARGEST_LIST, max(1, count * (count - 1) // 2)))
    if grid is not None:
        cells = [integer("cells", number, 3, LARGEST_LIST) for number in grid["cells"]]
        per_cell = integer("per_cell", grid["per_cell"], 1, 2 * count)
        if len(cells) != 3 or cells[0] * cells[1] * cells[2] * per_cell > LARGEST_LIST:
            raise ValueError(f"grid: expected three numbers of cells with few places in all, received {grid}")
        grid = Grid((cells[0], cells[1], cells[2]), per_cell)
    return ListPlan(capacity, grid, described["finder"])
