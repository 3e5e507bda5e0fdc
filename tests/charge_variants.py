"""Small TensorNet2 checkpoints, one for each corner of the format, and the oracle's numbers for them.

The weights come from a generator whose numbers are the same everywhere, so that only the energies and forces need to be kept:

    make oracle
    .venv-peers/bin/python tests/charge_variants.py tests/data/variant_references.json tests/data/charge_references.json
"""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np

COMMON = {
    "embedding_dimension": 12, "num_rbf": 6, "rbf_type": "expnorm", "trainable_rbf": False, "activation": "silu",
    "cutoff_lower": 0.0, "cutoff_upper": 4.0, "max_z": 10, "max_num_neighbors": 32, "precision": 64,
    "equivariance_invariance_group": "O(3)", "reduce_op": "add", "output_mlp_num_layers": 0, "derivative": True,
    "atom_filter": -1, "prior_model": None, "prior_args": None, "charge": True, "remove_ref_energy": False,
    "coulomb_cutoff": None, "coulomb_max_num_neighbors": 32,
}  # fmt: skip
COULOMB = "ScalarPlusWeightedCoulomb"
# Options, mean and std of each.
CASES: dict[str, tuple[dict, float, float]] = {
    "so3": (
        {"model": "tensornet2", "num_layers": 2, "q_dim": 4, "output_model": COULOMB, "q_weights": [0.5, 1.0, 2.0],
         "equivariance_invariance_group": "SO(3)"},
        0.0, 1.0,
    ),
    "scalar-gauss": (
        {"model": "tensornet-nqe", "num_layers": 1, "q_dim": 3, "output_model": "Scalar", "rbf_type": "gauss",
         "output_mlp_num_layers": 2},
        0.0, 1.0,
    ),
    "reaction-field-deep-old-layout": (
        {"model": "tensornetv2_alt", "num_layers": 1, "q_dim": 1, "output_model": COULOMB, "q_weights": [1.0, 0.3],
         "coulomb_cutoff": 3.0, "output_mlp_num_layers": 2, "check_errors": False, "activation": "ssp"},
        0.7, 1.9,
    ),
    "lower-cutoff-mean": (
        {"model": "tensornet2", "num_layers": 1, "q_dim": 2, "output_model": COULOMB, "q_weights": [0.0, 1.0],
         "cutoff_lower": 0.4, "reduce_op": "mean"},
        0.3, 2.0,
    ),
    "no-layers": (
        {"model": "tensornet2", "num_layers": 0, "q_dim": 5, "output_model": COULOMB, "q_weights": [0.1]}, 0.0, 1.0,
    ),
}  # fmt: skip
TOTAL_CHARGE = [1.0, -1.0, 0.0]


def options_of(name: str) -> dict:
    """Hyperparameters of a case."""
    return COMMON | CASES[name][0]


def linears(prefix: str, sizes: list[int], step: int = 1, bias: bool = True) -> dict[str, tuple[int, ...]]:
    """Shapes of linear layers named prefix.0, prefix.step, ..."""
    shapes: dict[str, tuple[int, ...]] = {}
    for k, (a, b) in enumerate(pairwise(sizes)):
        shapes[f"{prefix}.{k * step}.weight"] = (b, a)
        if bias:
            shapes[f"{prefix}.{k * step}.bias"] = (b,)
    return shapes


def shapes_of(options: dict) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights, by the names in the file without the leading "model."."""
    f, rbf, q, layers = (options[k] for k in ("embedding_dimension", "num_rbf", "q_dim", "num_layers"))
    network = "representation_model"
    embedding = f"{network}.tensor_embedding"
    shapes: dict[str, tuple[int, ...]] = {
        f"{embedding}.emb.weight": (options["max_z"], f),
        f"{embedding}.emb2.weight": (f, 2 * f),
        f"{embedding}.emb2.bias": (f,),
    }
    for k in (1, 2, 3):
        shapes |= {f"{embedding}.distance_proj{k}.weight": (f, rbf), f"{embedding}.distance_proj{k}.bias": (f,)}
    for k in range(3):
        shapes[f"{embedding}.linears_tensor.{k}.weight"] = (f, f)
    shapes |= linears(f"{embedding}.linears_scalar", [f, 2 * f, 3 * f])
    norms = {f"{embedding}.init_norm": f, f"{network}.out_norm": 3 * f}
    for part in ("charge_predict_0", *(f"charge_predicts.{k}" for k in range(layers))):
        norms[f"{network}.{part}.q_norm"] = 3 * f
        shapes |= linears(f"{network}.{part}.q_mlp.layers", [3 * f, f, f, 2 * q], step=2)
    for k in range(layers):
        shapes |= linears(f"{network}.layers.{k}.linears_scalar", [rbf + 2 * q, f, 2 * f, 3 * f])
        shapes |= linears(f"{network}.layers.{k}.linears_tensor", [f] * 7, bias=False)
    shapes |= {f"{network}.linear.weight": (f, 3 * f), f"{network}.linear.bias": (f,)}
    for norm, size in norms.items():
        shapes |= {f"{norm}.weight": (size,), f"{norm}.bias": (size,)}
    depth = options["output_mlp_num_layers"] if options["output_model"] == COULOMB else 0
    shapes |= linears("output_model.output_network.layers", [f] + [f // 2] * (1 + depth) + [1], step=2)
    return shapes


def checkpoint(name: str) -> dict:
    """Content of a checkpoint file, weights as numpy arrays of numbers that float32 holds."""
    options, (_, mean, std) = options_of(name), CASES[name]
    state = {}
    for key, shape in shapes_of(options).items():
        random = np.random.RandomState(zlib.crc32(f"{name} {key}".encode())).standard_normal(shape)
        state[key] = random / np.sqrt(shape[-1]) if len(shape) == 2 else 0.3 * random
        if "norm." in key and key.endswith("weight"):
            state[key] += 1.0
    lower, upper, count = options["cutoff_lower"], options["cutoff_upper"], options["num_rbf"]
    basis = "representation_model.distance_expansion"
    if options["rbf_type"] == "gauss":
        offset = np.linspace(lower, upper, count)
        state |= {f"{basis}.offset": offset, f"{basis}.coeff": np.array(-0.5 / (offset[1] - offset[0]) ** 2)}
    else:
        start = np.exp(lower - upper)
        state[f"{basis}.means"] = np.linspace(start, 1, count)
        state[f"{basis}.betas"] = np.full(count, (2 / count * (1 - start)) ** -2)
    if options["output_model"] == COULOMB:
        state["output_model.qweights"] = np.repeat(options["q_weights"], options["q_dim"])
    state |= {"mean": np.array(mean), "std": np.array(std)}
    state = {f"model.{key}": value.astype(np.float32).astype(np.float64) for key, value in state.items()}
    return {"hyper_parameters": options, "state_dict": state}


def main(data: str, output: str) -> None:
    """Write the oracle's numbers for the molecules in `data`; runs where torchmd-net is installed."""
    import json
    import tempfile
    from pathlib import Path

    import torch
    from torchmdnet.models.model import load_model

    system = next(iter(json.loads(Path(data).read_text())["cases"].values()))
    z, molecules = torch.tensor(system["atomic_numbers"]), torch.tensor(system["molecule_index"])
    x = torch.tensor(system["positions_angstrom"], dtype=torch.float64)
    found = {}
    for name in CASES:
        content = checkpoint(name)
        content["state_dict"] = {k: torch.tensor(v) for k, v in content["state_dict"].items()}
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.ckpt")
            torch.save(content, path)
            model = load_model(path).double()
        charge = torch.tensor(TOTAL_CHARGE, dtype=torch.float64)
        energy, forces = model(z, x, molecules, q=charge)
        found[name] = {
            "energy": energy.detach().flatten().tolist(),
            "forces": [[round(v, 11) for v in row] for row in forces.detach().tolist()],
        }
    text = json.dumps({"generated_with": "torchmd-net 3.1.0, float64, CPU; eV, angstrom", "cases": found})
    Path(output).write_text(text + "\n")


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
