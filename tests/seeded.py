"""Checkpoints whose weights come from a seed: small TensorNet2 models, and stand-ins of AceFF's shapes and options.

The generator's numbers are the same everywhere, so that only the energies and forces need to be kept. They are those of
torchmd-net, and this writes them:

    make oracle
    .venv-peers/bin/python tests/seeded.py
"""

from __future__ import annotations

import json
import tempfile
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
COMMON = {
    "embedding_dimension": 12, "num_rbf": 6, "rbf_type": "expnorm", "trainable_rbf": False, "activation": "silu",
    "cutoff_lower": 0.0, "cutoff_upper": 4.0, "max_z": 10, "max_num_neighbors": 32, "precision": 64,
    "equivariance_invariance_group": "O(3)", "reduce_op": "add", "output_mlp_num_layers": 0, "derivative": True,
    "atom_filter": -1, "prior_model": None, "prior_args": None, "charge": True, "remove_ref_energy": False,
    "coulomb_cutoff": None, "coulomb_max_num_neighbors": 32,
}  # fmt: skip
COULOMB = "ScalarPlusWeightedCoulomb"
# Options, mean and std of one for each corner of the format of TensorNet2.
SMALL: dict[str, tuple[dict, float, float]] = {
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
# What decides the energy in the published files, "check_errors" with the older layout included.
ACEFF = {
    "embedding_dimension": 128, "num_rbf": 32, "cutoff_upper": 5.0, "max_z": 128, "precision": 32, "check_errors": True,
    "max_num_neighbors": 128, "coulomb_max_num_neighbors": 128,
}  # fmt: skip
STAND_INS: dict[str, tuple[dict, float, float]] = {
    "aceff-1.1": (ACEFF | {"model": "tensornet", "num_layers": 1, "output_model": "Scalar"}, 0.0, 1.0),
    "aceff-2.0": (
        ACEFF | {"model": "tensornet2", "num_layers": 2, "output_model": COULOMB, "output_mlp_num_layers": 1, "q_dim": 16,
                 "q_weights": [0.1, 0.2, 1.0]},
        0.0, 1.0,
    ),
}  # fmt: skip
CASES = SMALL | STAND_INS


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
    f, rbf, layers = (options[k] for k in ("embedding_dimension", "num_rbf", "num_layers"))
    q = options.get("q_dim", 0)
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
    for part in ("charge_predict_0", *(f"charge_predicts.{k}" for k in range(layers))) if q else ():
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
        # As in trained models, which keeps charges and forces those of a molecule.
        if name in STAND_INS:
            state[key] *= 0.5 if "norm." in key else 0.05 if "q_mlp.layers.4." in key else 1.0
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
    dtype = {32: np.float32, 64: np.float64}[options["precision"]]
    state = {f"model.{key}": value.astype(np.float32).astype(dtype) for key, value in state.items()}
    return {"hyper_parameters": options, "state_dict": state}


def write(name: str, path: Path) -> None:
    """Write the checkpoint of a case."""
    import torch

    content = checkpoint(name)
    content["state_dict"] = {key: torch.tensor(value) for key, value in content["state_dict"].items()}
    torch.save(content, path)


def read(name: str) -> dict:
    """What stands in a JSON file of the data."""
    return json.loads((DATA / name).read_text())


def oracle(path: Path, system: dict, replicas: list[int], charges: list[float], **options: float) -> dict:
    """Energies (M,), eV, and forces (N, 3), eV/Å, of torchmd-net in float64."""
    import torch
    from torchmdnet.models.model import load_model

    model = load_model(str(path), **options).double()
    x = torch.tensor(system["positions_angstrom"], dtype=torch.float64)
    box = system.get("box_angstrom")
    energy, forces = model(
        torch.tensor(system["atomic_numbers"]),
        x,
        torch.tensor(replicas),
        box=None if box is None else torch.tensor(box, dtype=torch.float64),
        q=torch.tensor(charges, dtype=torch.float64),
    )
    return {
        "energy": energy.detach().flatten().tolist(),
        "forces": [[round(v, 11) for v in row] for row in forces.detach().tolist()],
    }


def main() -> None:
    """Write the references of all cases, and of the bundled model's self-test; runs where torchmd-net is installed."""
    made_with = "torchmd-net 3.1.0, float64, CPU; eV, angstrom"
    replicas = next(iter(read("variant_references.json")["cases"].values()))
    systems = read("aceff_references.json")["systems"]
    small: dict[str, dict] = {}
    stand_ins: dict[str, dict] = {name: {} for name in STAND_INS}
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            path = Path(folder) / f"{name}.ckpt"
            write(name, path)
            if name in SMALL:
                small[name] = oracle(path, replicas, replicas["molecule_index"], TOTAL_CHARGE)
                continue
            for key, system in systems.items():
                cutoff = system["reference"][name].get("coulomb_cutoff_angstrom")
                options = {} if cutoff is None else {"coulomb_cutoff": cutoff}
                one = [0] * len(system["atomic_numbers"])
                stand_ins[name][key] = oracle(path, system, one, [system["total_charge"]], **options)
    for file, cases in (("charge_references.json", small), ("stand_in_references.json", stand_ins)):
        (DATA / file).write_text(json.dumps({"generated_with": made_with, "cases": cases}) + "\n")
    bundled = DATA.parents[1] / "openmm_tensornet" / "models" / "alanine-dipeptide-gfn2.ckpt"
    system = {key: systems["alanine-dipeptide"][key] for key in ("atomic_numbers", "positions_angstrom")}
    found = oracle(bundled, system, [0] * len(system["atomic_numbers"]), [0])
    text = json.dumps({"generated_with": made_with} | system | found | {"energy": found["energy"][0]})
    bundled.with_suffix(".json").write_text(text + "\n")


if __name__ == "__main__":
    main()
