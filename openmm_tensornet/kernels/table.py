"""The table of the package's own operators: what each takes and gives, and how many kernels it launches on a GPU.

Everything else about an operator follows from its row: the schema that PyTorch knows and the derivative (:mod:`.operators`), and the
dispatch of the interpreter on a CPU (:mod:`.cpu.program`). :mod:`.definitions` says what each computes.

An array is written as its kind, its rank and its name. Kinds are `i` (int64), `d` (float64) and `r` (what the network computes with).
The row `name_backward` is the derivative of `name`: arguments `g_…` are gradients of what `name` gives, the others are found by their
names, and results `g_…` are gradients of its arguments. Where the derivative takes a gradient of an argument, calling `name` gives that
argument back too, and gradients of later uses of it are added inside the kernel rather than by another one.

Shapes: P pairs, A atoms, F channels, K intervals. Tensors of the network are (9, A, F), components in the orthonormal
basis of :mod:`openmm_tensornet.models.tensors`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {"i": torch.int64, "d": torch.float64, "r": None}
Shapes = Callable[[Any], tuple[tuple[int, ...], ...]]


class Value(NamedTuple):
    """An argument or a result: an array of a kind and rank, or something else of a type ("float", "int", "bool", "Tensor[]")."""

    name: str
    type: str

    @property
    def is_array(self) -> bool:
        return self.type[0] in DTYPES and self.type[1:].isdigit()

    @property
    def rank(self) -> int:
        return int(self.type[1:])

    @property
    def is_gradient(self) -> bool:
        return self.name.startswith("g_")


class Operator(NamedTuple):
    """A row of the table.

    Attributes
    ----------
    name : str
    arguments, results : tuple of Value
    shapes : callable or None
        From the arguments, by name, to the shapes of the results. None: a gradient has the shape of its argument.
    launches : int
        Kernels on a GPU.
    on_cpu : bool
        Whether there is a kernel for CPUs. Programs for GPUs alone have operators without one; there, the definition is run.
    """

    name: str
    arguments: tuple[Value, ...]
    results: tuple[Value, ...]
    shapes: Shapes | None
    launches: int
    on_cpu: bool

    @property
    def schema(self) -> str:
        """As PyTorch writes it."""
        arguments = ", ".join(f"{'Tensor' if a.is_array else a.type} {a.name}" for a in self.arguments)
        results = ", ".join("Tensor" for _ in self.results)
        return f"{self.name}({arguments}) -> {results if len(self.results) == 1 else f'({results})'}"

    def allocate(self, *args: Any) -> tuple[Tensor, ...]:
        """Empty results for these arguments."""
        given = SimpleNamespace(**{a.name: value for a, value in zip(self.arguments, args, strict=True)})
        real = [v.dtype for a, v in zip(self.arguments, args, strict=True) if a.type[0] == "r"]
        dtypes = DTYPES | {
            "r": real[0] if real else torch.float32 if getattr(given, "single", False) else torch.float64
        }
        shapes = (
            tuple(getattr(given, r.name.removeprefix("g_")).shape for r in self.results)
            if self.shapes is None
            else self.shapes(given)
        )
        return tuple(
            args[0].new_empty(shape, dtype=dtypes[r.type[0]]) for r, shape in zip(self.results, shapes, strict=True)
        )


def row(text: str, shapes: Shapes | None = None, launches: int = 1, on_cpu: bool = True) -> Operator:
    """A row from `name(arguments) -> results`."""
    match = re.fullmatch(r"(\w+)\((.*)\) -> (.*)", text)
    assert match is not None, text
    arguments, results = (
        tuple(Value(name, kind) for kind, name in (part.split(" ") for part in listed.split(", ")))
        for listed in match.groups()[1:]
    )
    return Operator(match[1], arguments, results, shapes, launches, on_cpu)


_LIST = "r1 distance, i2 pairs, i1 by_atom"
_TABLE = "r3 table, float cutoff"
_SPECIES = "r2 receiver, r2 sender"
_INTERACT = f"{_LIST}, r2 own, {_TABLE}, r3 y"
_PERCEPTRON = "r1 panels1, r1 bias1, r1 panels2, r1 bias2"
_CHARGES = "r2 q, r1 weights, float per_nm, float cutoff"

_ROWS = (
    # Pairs.
    row(
        "near_pairs(d2 positions, d2 box, i1 replicas, float cutoff, int capacity) -> i2 pairs, i1 found",
        lambda a: ((2, a.capacity), (1,)),
        launches=6,
    ),
    row("by_atom(i2 pairs, int atoms) -> i1 entries", lambda a: ((a.atoms + 1 + a.pairs.numel(),),), launches=9),
    row(
        "geometry(d2 positions, d2 box, i2 pairs, i1 by_atom, float far, bool single) -> r1 distance, r2 unit",
        lambda a: ((a.pairs.shape[1],), (a.pairs.shape[1], 3)),
    ),
    row(
        "geometry_backward(r1 g_distance, r2 g_unit, r1 distance, r2 unit, i2 pairs, i1 by_atom) -> d2 g_positions",
        lambda a: ((len(a.by_atom) - 1 - a.pairs.numel(), 3),),
    ),
    # Sums over the neighbors of each atom.
    row(
        f"embed(r1 distance, r2 unit, i2 pairs, i1 by_atom, {_SPECIES}, r2 own, {_TABLE}) -> r3 x",
        lambda a: ((9, *a.own.shape),),
    ),
    row(
        f"embed_backward(r3 g_x, r1 g_distance, r1 distance, r2 unit, i2 pairs, {_SPECIES}, {_TABLE}) -> r1 g_distance, r2 g_unit",
    ),
    row(f"interact({_INTERACT}, r1 factor, bool both) -> r3 out, r3 m", lambda a: (a.y.shape, a.y.shape)),
    row(
        f"interact_backward(r3 g_out, {_INTERACT}, r3 m, r1 factor, bool both) -> r1 g_distance, r3 g_y",
        launches=2,
    ),
    row("block_message(r4 weight, r2 scale, r3 y) -> r3 m", lambda a: (a.y.shape,)),
    row("block_message_backward(r3 g_m, r4 weight, r2 scale, r3 y) -> r4 g_weight, r2 g_scale, r3 g_y"),
    row(
        f"charge_message(r1 distance, i2 pairs, {_TABLE}, r1 own, r2 terms, {_PERCEPTRON}, r3 y) -> r3 m, r2 h0, r2 h1, r2 h2",
        lambda a: (
            a.y.shape,
            *((len(a.terms) + 2 * len(a.distance), n) for n in (len(a.own) - 1, len(a.bias1), len(a.bias2))),
        ),
    ),
    # `back` are the transposes of `panels`.
    row(
        f"charge_message_backward(r3 g_m, r1 distance, i2 pairs, {_TABLE}, r1 own, r3 y, r2 h0, r2 h1, r2 h2, r1 back2, r1 back1) "
        "-> r1 g_distance, r2 g_terms, r3 g_y",
        lambda a: (a.distance.shape, (a.y.shape[1], 2 * a.y.shape[2]), a.y.shape),
    ),
    # What concerns an atom alone, or the atoms of a replica.
    row("norm_features(r3 x, r1 weight, r1 bias) -> r2 out", lambda a: (a.x.shape[1:],)),
    row("norm_features_backward(r3 g_x, r2 g_out, r3 x, r1 weight) -> r3 g_x"),
    row(
        "part_features(r3 x, float scalar, bool square, r1 weight, r1 bias) -> r2 out",
        lambda a: ((a.x.shape[1], len(a.weight)),),
    ),
    row("part_features_backward(r2 g_out, r3 x, float scalar, bool square, r1 weight) -> r3 g_x"),
    row("normalize(r3 x) -> r3 out", lambda a: (a.x.shape,)),
    row("normalize_backward(r3 g_out, r3 x) -> r3 g_x"),
    row("gate(r3 x, r2 gates, bool silu, bool normalize) -> r3 out", lambda a: (a.x.shape,)),
    row("gate_backward(r3 g_out, r3 x, r2 gates, bool silu, bool normalize) -> r3 g_x, r2 g_gates"),
    row("product(r3 y, r3 m, r1 factor, bool both) -> r3 out", lambda a: (a.y.shape,)),
    row("product_backward(r3 g_out, r3 y, r3 m, r1 factor, bool both) -> r3 g_y, r3 g_m"),
    row("plus_square(r3 x, r3 d, r1 factor, bool normalize) -> r3 out", lambda a: (a.x.shape,)),
    row("plus_square_backward(r3 g_out, r3 x, r3 d, r1 factor, bool normalize) -> r3 g_x, r3 g_d"),
    row("head(r2 h, r2 weight, r1 bias, bool silu) -> r1 out", lambda a: ((len(a.h),),)),
    row("head_backward(r1 g_out, r2 h, r2 weight, bool silu) -> r2 g_h"),
    row("equilibrate(r2 h, i1 replica, r1 charge) -> r2 q", lambda a: ((len(a.h), a.h.shape[1] // 2),)),
    row("equilibrate_backward(r2 g_q, r2 h, i1 replica, r1 charge) -> r2 g_h"),
    # Of programs for GPUs alone.
    row(
        f"pair_terms({_LIST}, {_TABLE}, r1 own, r2 terms) -> r2 z, r2 h",
        lambda a: ((len(a.terms) + 2 * len(a.distance), a.terms.shape[1] // 2),) * 2,
        on_cpu=False,
    ),
    row(
        f"pair_terms_backward(r2 g_h, r1 g_distance, {_LIST}, {_TABLE}, r2 z) -> r1 g_distance, r2 g_terms",
        lambda a: (a.distance.shape, (len(a.z) - 2 * len(a.distance), 2 * a.z.shape[1])),
        on_cpu=False,
    ),
    row(f"directed_message({_LIST}, {_TABLE}, r1 own, r2 z, r3 y) -> r3 m", lambda a: (a.y.shape,), on_cpu=False),
    row(
        f"directed_message_backward(r3 g_m, {_LIST}, {_TABLE}, r1 own, r2 z, r3 y) -> r1 g_distance, r2 g_z, r3 g_y",
        on_cpu=False,
    ),
    row(
        "perceptron(r2 h, Tensor[] affine) -> r2 out, r2 hidden",
        lambda a: tuple((len(a.h), n) for n in (len(a.affine[-1]), sum(len(bias) for bias in a.affine[1:-2:2]))),
        on_cpu=False,
    ),
    row(
        "perceptron_backward(r2 g_out, r2 hidden, Tensor[] affine) -> r2 g_h",
        lambda a: ((len(a.g_out), len(a.affine[0])),),
        on_cpu=False,
    ),
    row(f"coulomb({_LIST}, {_CHARGES}) -> r1 energy", lambda a: ((len(a.q),),), on_cpu=False),
    row(f"coulomb_backward(r1 g_energy, {_LIST}, {_CHARGES}) -> r1 g_distance, r2 g_q", on_cpu=False),
)
OPERATORS = {operator.name: operator for operator in _ROWS}
