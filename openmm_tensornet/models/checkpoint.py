"""TorchMD-Net checkpoints; the only module that knows their format.

A checkpoint is a Lightning file with `hyper_parameters` and `state_dict`. It is read with ``weights_only=True``: nothing in it
needs code to be unpickled, and a file that does is refused.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import zipfile
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..common.checks import flag
from ..common.files import check_file, open_archive, replace_file, rewrite_archive
from ..common.units import ModelUnits
from .priors import D2, ZBL, Atomref, Prior
from .registry import find_model, known_elements
from .tensornet import TensorNet, TensorNetConfig
from .tensornet2 import TensorNet2, TensorNet2Config

LARGEST_LENGTH = 1e6  # in any unit; its third power is a number still
# Our parameter names, and what TorchMD-Net calls them (without its leading "model.").
_NAMES = (
    (r"^rbf\.", "representation_model.distance_expansion."),
    (r"^embedding\.species\.", "representation_model.tensor_embedding.emb."),
    (r"^embedding\.species_pair\.", "representation_model.tensor_embedding.emb2."),
    (r"^embedding\.radial\.0\.", "representation_model.tensor_embedding.distance_proj1."),
    (r"^embedding\.radial\.1\.", "representation_model.tensor_embedding.distance_proj2."),
    (r"^embedding\.radial\.2\.", "representation_model.tensor_embedding.distance_proj3."),
    (r"^embedding\.norm\.", "representation_model.tensor_embedding.init_norm."),
    (r"^embedding\.scalar\.", "representation_model.tensor_embedding.linears_scalar."),
    (r"^embedding\.tensor\.", "representation_model.tensor_embedding.linears_tensor."),
    (r"^layers\.(\d+)\.radial\.", r"representation_model.layers.\1.linears_scalar."),
    (r"^layers\.(\d+)\.tensor\.", r"representation_model.layers.\1.linears_tensor."),
    (r"^charges\.0\.norm\.", "representation_model.charge_predict_0.q_norm."),
    (r"^charges\.0\.mlp\.(\d+)\.", lambda m: f"representation_model.charge_predict_0.q_mlp.layers.{2 * int(m[1])}."),
    (r"^charges\.(\d+)\.norm\.", lambda m: f"representation_model.charge_predicts.{int(m[1]) - 1}.q_norm."),
    (
        r"^charges\.(\d+)\.mlp\.(\d+)\.",
        lambda m: f"representation_model.charge_predicts.{int(m[1]) - 1}.q_mlp.layers.{2 * int(m[2])}.",
    ),
    (r"^charge_weights$", "output_model.qweights"),
    (r"^out_norm\.", "representation_model.out_norm."),
    (r"^out\.", "representation_model.linear."),
    (r"^head\.(\d+)\.", lambda m: f"output_model.output_network.layers.{2 * int(m[1])}."),
    (r"^priors\.", "prior_model."),
)

_TENSORNET2 = ("tensornet2", "tensornetv2_alt", "tensornet-nqe")  # one architecture, renamed during its development
_COULOMB = "ScalarPlusWeightedCoulomb"

# Options of TorchMD-Net's training program that do not change the energy of a finished TensorNet
# (or, like those of other architectures and heads, are not read for one).
_NO_EFFECT = set(
    """aggr attn_activation batch_size check_errors checkpoint_monitor conf coord_files
    coulomb_max_num_neighbors coulomb_neighbor_strategy dataset dataset_arg dataset_preload_limit dataset_root derivative
    distance_influence early_stopping_monitor early_stopping_patience ema_alpha_neg_dy ema_alpha_y embed_files energy_files
    force_files gradient_clipping inference_batch_size job_id load_model load_weights log_dir lr lr_factor lr_metric lr_min
    lr_patience lr_warmup_steps max_num_neighbors neg_dy_weight neighbor_embedding ngpus num_epochs num_heads num_nodes
    num_workers output_mlp_num_layers q_weights redirect reset_trainer save_interval seed spin splits standardize
    static_shapes tensorboard_use test_interval test_size train_loss train_loss_arg train_size val_size vector_cutoff
    wandb_name wandb_project wandb_resume_from_id wandb_use weight_decay y_weight""".split()
)
_READ = set(
    """model embedding_dimension num_layers num_rbf rbf_type trainable_rbf activation cutoff_lower cutoff_upper max_z
    equivariance_invariance_group precision reduce_op prior_model prior_args output_model remove_ref_energy charge box_vecs
    atom_filter repulsion q_dim coulomb_cutoff""".split()
)
_DTYPES = {32: torch.float32, 64: torch.float64, "32": torch.float32, "64": torch.float64}
# Where a file written here says what it is.
_ABOUT = "openmm_tensornet"
# What torch's restricted unpickler says of objects that are no plain data.
_WANTS_CODE = r"[Uu]nsupported (global|GLOBAL|class)|Trying to (call|instantiate)|Can only (build|create)"
_LEGACY_HEAD = re.compile(r"^output_model\.output_network\.(\d+)\.")
_BOX = re.compile(r"(^|\.)distance\.box$|^prior_model\.\d+\.distances?\.box$")


def load_model(
    path: str | os.PathLike,
    *,
    length_unit: Any = None,
    energy_unit: Any = None,
    remove_ref_energy: bool | None = None,
    ignore_options: Collection[str] = (),
) -> TensorNet:
    """Read a TorchMD-Net checkpoint of a TensorNet or a TensorNet2.

    Parameters
    ----------
    path : path or str
        A ``.ckpt`` file of TorchMD-Net, of any version, or the name of a known model (:data:`~openmm_tensornet.models.registry.MODELS`).
    length_unit, energy_unit : openmm.unit.Unit, optional
        Units in which the model was trained; angstrom and eV by default. Checkpoints do not carry them.
    remove_ref_energy : bool, optional
        True leaves out the atomic reference energies (Atomref prior), False adds them; by default as the file says.
    ignore_options : collection of str
        Names of options in the file that this package does not know, and that are known to do nothing to the energy.

    Returns
    -------
    TensorNet
        In the precision of the file, in evaluation mode; a :class:`~openmm_tensornet.models.tensornet2.TensorNet2` if the file holds one.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is no checkpoint, is damaged or larger than 2 GB, wants code to be run, is of another architecture, has an option that
        would change the energy and cannot be honoured, or has missing, surplus, misshapen or non-finite weights.
    """
    units = ModelUnits.from_openmm(length_unit, energy_unit)
    if remove_ref_energy is not None:
        remove_ref_energy = flag("remove_ref_energy", remove_ref_energy)
    content, digest = _read(path)
    options, state = content["hyper_parameters"], content["state_dict"]
    unknown = {key for key in options if key not in _READ and key not in _NO_EFFECT}
    for key in [ignore_options] if isinstance(ignore_options, str) else ignore_options:
        if key not in unknown:
            raise ValueError(
                f"ignore_options: expected names of options that are not known ({', '.join(sorted(map(str, unknown))) or 'none here'}), "
                f"received {key!r}"
            )
        del options[key]
    try:
        model = _build(options, state, units)
        _load_weights(model, options, state)
        _choose_reference(model, options, remove_ref_energy)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None
    model.source_hash = digest
    model.about = _about(path, content)
    model.elements = known_elements(digest) or tuple(model.about.get("elements", ())) or None
    return model.eval()


def save_model(model: TensorNet, path: str | os.PathLike) -> None:
    """Write a checkpoint that TorchMD-Net, and :func:`load_model`, read to the same numbers.

    Parameters
    ----------
    model : TensorNet
        Without priors. Its `about` goes with it; TorchMD-Net does not read that.
    path : path
        Replaced whole or not at all.

    Raises
    ------
    ValueError
        If the model has priors.
    """
    if len(model.priors):
        raise ValueError(
            f"model: expected one without priors, received {', '.join(type(p).__name__ for p in model.priors)}"
        )
    config = model.config
    precision = next(bits for bits, dtype in _DTYPES.items() if dtype == model.mean.dtype)
    options = {
        "model": "tensornet",
        **{name: value for name, value in asdict(config).items() if name in _READ},
        "equivariance_invariance_group": config.group,
        "reduce_op": "add" if config.reduce_op == "sum" else config.reduce_op,
        "precision": precision,
        "output_model": "Scalar",
        "output_mlp_num_layers": config.head_hidden_layers,
        "prior_model": None,
        "prior_args": None,
        "remove_ref_energy": False,
        "atom_filter": -1,
        "box_vecs": None,
        # Read by TorchMD-Net when it builds the network.
        "derivative": True,
        "max_num_neighbors": 64,
        "static_shapes": False,
        "vector_cutoff": False,
    }
    state = {f"model.{_torchmdnet_name(name)}": value.detach().cpu() for name, value in model.state_dict().items()}
    buffer = io.BytesIO()
    torch.save({"hyper_parameters": options, "state_dict": state, _ABOUT: model.about}, buffer)
    replace_file(path, buffer.getvalue())


def _read(path: str | os.PathLike) -> tuple[dict, str]:
    """Content and SHA-256 of a checkpoint file."""
    if isinstance(path, (list, tuple)):
        raise ValueError("model: expected one checkpoint, received a list; ensembles are not supported, name one file")
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"model: expected a path or the name of a model, received {type(path).__name__}")
    name, found = os.fspath(path), find_model(path)
    check_file(found, "a checkpoint file")
    with open(found, "rb") as file:
        data = file.read()
    try:
        readable = data
        if data.startswith(b"PK"):
            with open_archive(io.BytesIO(data)) as archive:
                _check_kind(archive.infolist())
                readable = rewrite_archive(archive)
        elif data[8:9] == b"{":
            raise _NotOne("expected a TorchMD-Net checkpoint, received an exported file; give it to TensorNetForce")
        elif not data.startswith(b"\x80"):  # older versions of torch write pickles
            raise ValueError("neither an archive nor a pickle")
        content = torch.load(io.BytesIO(readable), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises almost anything on damaged bytes
        if isinstance(error, _NotOne):
            raise ValueError(f"{name}: {error}") from None
        detail = re.search(r"WeightsUnpickler error: *(.+)", str(error))
        reason = "it is no checkpoint, or truncated or damaged"
        if isinstance(error, pickle.UnpicklingError) and re.search(_WANTS_CODE, str(error)):
            reason = (
                "it wants code to be run, which is refused; save it again with plain numbers, strings and tensors only"
            )
        text = _first_line(detail[1] if detail else error)
        raise ValueError(f"{name}: cannot be read as a checkpoint: {reason} ({text})") from None
    for key in ("hyper_parameters", "state_dict"):
        if not isinstance(content, dict) or not isinstance(content.get(key), dict):
            raise ValueError(f"{name}: expected a TorchMD-Net checkpoint with a dictionary {key!r}, which is missing")
    return content, hashlib.sha256(data).hexdigest()


def _about(path: str | os.PathLike, content: dict) -> dict:
    """What a file written by :func:`save_model` says of the model."""
    about = content.get(_ABOUT, {})
    if not isinstance(about, dict):
        raise ValueError(f"{os.fspath(path)}: {_ABOUT}: expected a dictionary, received {type(about).__name__}")
    return about


class _NotOne(ValueError):
    """An archive that is something else than one checkpoint."""


def _check_kind(members: list[zipfile.ZipInfo]) -> None:
    names = [member.filename for member in members]
    if any(n.endswith(".ckpt") for n in names):
        raise _NotOne("expected one checkpoint, received a zip of several (an ensemble); unpack one of them")
    if any(n.endswith("/constants.pkl") for n in names):
        raise _NotOne(
            "expected a TorchMD-Net checkpoint, received TorchScript, which is a program; give it to openmmtorch.TorchForce if you trust it"
        )
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise _NotOne("expected a checkpoint as torch writes it, received a compressed archive")


def _first_line(error: object) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


@torch.random.fork_rng(devices=[])  # modules are made with random weights first; the user's random numbers stay
def _build(options: dict, state: dict, units: ModelUnits) -> TensorNet:
    architecture = options.get("model")
    if architecture not in ("tensornet", *_TENSORNET2):
        raise ValueError(
            f"model: expected the architecture 'tensornet' or 'tensornet2', received {architecture!r}, which is not supported"
        )
    has_charges = architecture != "tensornet"
    for key, value in options.items():
        if key not in _READ and key not in _NO_EFFECT and value is not None and value is not False:
            raise ValueError(
                f"option {key}={_first_line(repr(value))} is not known and might change the energy; "
                f"if it does not, pass load_model(..., ignore_options=[{key!r}])"
            )
        if key not in _NO_EFFECT and any(isinstance(v, Tensor) for v in tree_leaves(value)):
            raise ValueError(f"{key}: expected numbers, texts, or lists of them, received a tensor")
    outputs = ("Scalar", _COULOMB) if has_charges else ("Scalar",)
    if options.get("output_model") not in outputs:
        raise ValueError(
            f"output_model: expected {' or '.join(map(repr, outputs))} with the architecture {architecture!r}, "
            f"received {options.get('output_model')!r}, which is not supported"
        )
    if options.get("atom_filter", -1) not in (-1, None):
        raise ValueError(f"atom_filter: expected -1, received {options['atom_filter']!r}, which cannot be honoured")
    if options.get("repulsion") not in (None, False):
        raise ValueError(f"repulsion: expected False, received {options['repulsion']!r}, which cannot be honoured")
    if options.get("box_vecs") is not None:
        raise ValueError("box_vecs: expected None, received a box; here the box comes from the topology or box_vectors")
    precision = options.get("precision", 32)
    if not isinstance(precision, (int, str)) or precision not in _DTYPES:
        raise ValueError(f"precision: expected 32 or 64, received {precision!r}")
    reduce_op = options.get("reduce_op", "sum")
    heads = [int(m[1]) for key in state if (m := re.search(r"output_network\.(?:layers\.)?(\d+)\.weight$", str(key)))]
    try:
        shape: dict[str, Any] = dict(
            embedding_dimension=options["embedding_dimension"],
            num_layers=options["num_layers"],
            num_rbf=options["num_rbf"],
            rbf_type=options["rbf_type"],
            trainable_rbf=flag("trainable_rbf", options["trainable_rbf"]),
            activation=options["activation"],
            cutoff_lower=_length(options, "cutoff_lower"),
            cutoff_upper=_length(options, "cutoff_upper"),
            max_z=options["max_z"],
            group=options.get("equivariance_invariance_group", "O(3)"),
            reduce_op="sum" if reduce_op == "add" else reduce_op,
            head_hidden_layers=max(heads, default=2) // 2 - 1,
            charge=options.get("charge") is not None and flag("charge", options["charge"]),
        )
        if has_charges:
            coulomb = options["output_model"] == _COULOMB
            limited = coulomb and options.get("coulomb_cutoff") is not None
            cutoff = _length(options, "coulomb_cutoff") if limited else None
            shape |= {"q_dim": options["q_dim"], "coulomb": coulomb, "coulomb_cutoff": cutoff}
        config = TensorNet2Config(**shape) if has_charges else TensorNetConfig(**shape)
    except KeyError as error:
        raise ValueError(f"option {error.args[0]} is missing") from None
    check_weights(config, state)
    priors = _priors(options, config.max_z)
    if isinstance(config, TensorNet2Config):
        return TensorNet2(config, priors, units).to(_DTYPES[precision])
    return TensorNet(config, priors, units).to(_DTYPES[precision])


def check_weights(config: TensorNetConfig, weights: dict) -> None:
    """ValueError for a network far larger than the weights in the file, so that a few wrong bytes do not ask for all memory."""
    f = config.embedding_dimension
    charge_channels = config.q_dim if isinstance(config, TensorNet2Config) else 0
    # A lower bound of the numbers that the network holds.
    least = f * (f * (16 + 14 * config.num_layers) + config.max_z + config.num_rbf + charge_channels)
    present = sum(v.numel() for v in weights.values() if isinstance(v, Tensor))
    if least > 10 * present or config.head_hidden_layers > len(weights):
        raise ValueError(
            "the options describe a network far larger than the weights in the file: "
            f"expected at least {least} numbers, received {present}"
        )


def _length(options: dict, name: str) -> float:
    value = options[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}: expected a number, received {value!r}")
    if abs(value) > LARGEST_LENGTH:
        raise ValueError(f"{name}: expected a length of at most {LARGEST_LENGTH:g}, received {value:g}")
    return float(value)


def _priors(options: dict, max_z: int) -> list[Prior]:
    """Priors from the three ways in which TorchMD-Net writes them down."""
    given = options.get("prior_model") or []
    named: list[tuple[str, dict]] = []
    for item in given if isinstance(given, (list, tuple)) else [given]:
        named += [(k, v or {}) for k, v in item.items()] if isinstance(item, dict) else [(item, {})]
    arguments = options.get("prior_args")
    if arguments is not None and named:
        arguments = list(arguments) if isinstance(arguments, (list, tuple)) else [arguments]
        if len(arguments) != len(named):
            raise ValueError(
                f"prior_args: expected {len(named)} entries, one for each prior, received {len(arguments)}"
            )
        named = [(name, argument or {}) for (name, _), argument in zip(named, arguments, strict=True)]
    priors: list[Prior] = []
    for name, argument in named:
        if name not in ("Atomref", "LearnableAtomref", "ZBL", "D2"):
            raise ValueError(
                f"prior_model: expected Atomref, LearnableAtomref, ZBL or D2, received {name!r}, "
                "which cannot be honoured"
            )
        if not isinstance(argument, dict):
            raise ValueError(f"prior_args of {name}: expected a dictionary, received {argument!r}")
        argument = {k: v for k, v in argument.items() if k != "max_num_neighbors"}
        try:
            if name in ("ZBL", "D2"):
                priors.append({"ZBL": ZBL, "D2": D2}[name](**argument))
            else:
                for switch in {"trainable", "enable"} & set(argument):
                    flag(switch, argument[switch])
                priors.append(Atomref(**({"max_z": max_z, "trainable": name == "LearnableAtomref"} | argument)))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"prior_args of {name} are not understood: {_first_line(error)}") from None
    return priors


def _torchmdnet_name(name: str) -> str:
    for pattern, replacement in _NAMES:
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            return renamed
    return name


def _load_weights(model: TensorNet, options: dict, state: dict) -> None:
    """Fill `model` from the file's `state_dict`, which is not changed."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        name = _LEGACY_HEAD.sub(r"output_model.output_network.layers.\1.", re.sub(r"^model\.", "", str(key)))
        if not isinstance(value, Tensor):
            raise ValueError(f"weight {key}: expected a tensor, received {type(value).__name__}")
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            kind = "quantized" if value.is_quantized else f"{value.layout} on {value.device}"
            raise ValueError(f"weight {key}: expected a dense tensor, received {kind}; save it with plain tensors only")
        if _BOX.search(name):
            if bool(value.any()):
                raise ValueError(
                    f"weight {key}: expected an empty box, received {value.tolist()}, which cannot be honoured"
                )
        elif not name.endswith(".initial_atomref"):  # the start of training; the weights are what counts
            if name in found:
                raise ValueError(f"weight {key}: expected one of each name, received a second under another name")
            found[name] = value
    # Versions that wrote the option `check_errors` ordered the rows of these linears [F, 3].
    permuted = (
        r"embedding\.scalar\.1\."
        if isinstance(model, TensorNet2)
        else r"(embedding\.scalar\.1|layers\.\d+\.radial\.2)\."
    )
    old_layout = "check_errors" in options
    own = model.state_dict()
    values = {}
    for name, target in own.items():
        foreign = _torchmdnet_name(name)
        if foreign not in found:
            raise ValueError(f"weight model.{foreign} is missing")
        value = found.pop(foreign)
        if value.shape != target.shape:
            raise ValueError(
                f"weight model.{foreign}: expected shape {tuple(target.shape)}, received {tuple(value.shape)}"
            )
        if value.is_floating_point() != target.is_floating_point() or value.is_complex():
            raise ValueError(f"weight model.{foreign}: expected a tensor like {target.dtype}, received {value.dtype}")
        if not bool(torch.isfinite(value).all()) and not name.endswith((".C_6", ".R_r")):
            raise ValueError(f"weight model.{foreign}: expected finite numbers, received NaN or infinity")
        if name == "charge_weights" and value.sum() == 0:
            raise ValueError(f"weight model.{foreign}: expected a sum other than zero, received {float(value.sum())}")
        if old_layout and re.match(permuted, name):
            value = value.unflatten(0, (-1, 3)).transpose(0, 1).flatten(0, 1)  # rows [F,3] -> [3,F]
        values[name] = value
    if found:
        raise ValueError(f"weight model.{sorted(found)[0]} is not known ({len(found)} surplus weights in all)")
    model.load_state_dict(values)


def _choose_reference(model: TensorNet, options: dict, remove: bool | None) -> None:
    """Turn the Atomref priors on or off."""
    if remove is None:
        return
    references = [prior for prior in model.priors if isinstance(prior, Atomref)]
    if not references:
        raise ValueError(
            f"remove_ref_energy={remove}: expected a model with an Atomref prior, received one without; leave it out"
        )
    for prior in references:
        prior.enable = not remove
