"""Draw the figures of these pages: `python docs/figures.py`."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

# Text as text, and nothing random, so that a change of the figure is a small change of the file.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "openmm-tensornet", "font.size": 9}

# What there is at each step, its units, and what is checked on the way to it.
STEPS = (
    ("TorchMD-Net checkpoint", "a file", ""),
    (
        "reference model",
        "readable PyTorch, float64, Å and eV",
        "no code is unpickled; every option and weight is understood",
    ),
    (
        "specialised to the atoms",
        "elements, molecules, charges, box, nm and kJ/mol",
        "elements, charges, overlaps; the box against the cutoff; room for pairs",
    ),
    (
        "radial tables",
        "cubic splines of all functions of the distance",
        "refined until forces agree with the reference model",
    ),
    (
        "flat graph",
        "energy and forces, forward and backward, no autograd",
        "shapes are static, constants are computed once",
    ),
    (
        "TorchScript and metadata",
        "frozen module that describes itself",
        "agrees with the reference model; a CUDA graph can capture it",
    ),
    (
        "TensorNetForce, TensorNetPythonForce",
        "an OpenMM force; on a GPU a CUDA graph",
        "what goes wrong in a run is NaN, and diagnose() says why",
    ),
)
WIDTH, HEIGHT, GAP = 4.2, 0.62, 0.42

PACKAGE = Path(__file__).resolve().parent.parent / "openmm_tensornet"
# From what needs nothing to what needs everything.
FOLDERS = ("common", "neighbors", "models", "graph", "kernels", "static", "export", "forces", "md")


def data_flow() -> Figure:
    """From a checkpoint to a force, with the checks beside the arrows."""
    rows = len(STEPS)
    total = rows * HEIGHT + (rows - 1) * GAP
    figure = Figure(figsize=(8.4, total + 0.1))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 8.4), ylim=(0, total + 0.1))
    axes.axis("off")
    for k, (name, what, check) in enumerate(STEPS):
        top = total + 0.05 - k * (HEIGHT + GAP)
        box = Rectangle((0.05, top - HEIGHT), WIDTH, HEIGHT, facecolor="#e8eef7", edgecolor="#35507a")
        axes.add_patch(box)
        middle = 0.05 + WIDTH / 2
        axes.text(middle, top - 0.24, name, ha="center", va="center", weight="bold")
        axes.text(middle, top - 0.45, what, ha="center", va="center", color="#333333")
        if k:
            axes.annotate("", (middle, top), (middle, top + GAP), arrowprops={"arrowstyle": "-|>", "color": "#35507a"})
            axes.text(middle + 0.2, top + GAP / 2, check, va="center", style="italic", color="#7a3b35")
    return figure


def folders() -> Figure:
    """The package's folders, each above what it may import, with what its docstring says."""
    row, width = 0.62, 8.3
    figure = Figure(figsize=(width + 0.1, row * len(FOLDERS) + 0.1))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width + 0.1), ylim=(0, row * len(FOLDERS) + 0.1))
    axes.axis("off")
    for k, name in enumerate(FOLDERS):
        bottom = 0.05 + k * row
        text = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text(encoding="utf-8"))) or ""
        axes.add_patch(Rectangle((0.05, bottom), width, row - 0.08, facecolor="#e8eef7", edgecolor="#35507a"))
        axes.text(0.2, bottom + (row - 0.08) / 2, f"{name}/", va="center", weight="bold")
        axes.text(1.5, bottom + (row - 0.08) / 2, textwrap.fill(text, 100), va="center", color="#333333")
    return figure


def main(folder: Path = Path(__file__).parent) -> None:
    """Write every figure as an SVG into a folder."""
    with matplotlib.rc_context(STYLE):
        for name, figure in (("data-flow", data_flow), ("folders", folders)):
            figure().savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
