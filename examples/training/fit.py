"""Fitting: labelled frames to weights, in epochs that a stopped run continues from."""

from __future__ import annotations

import copy
import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from openmm_tensornet.common.files import replace_file
from openmm_tensornet.models.checkpoint import load_model, save_model
from openmm_tensornet.models.tensornet import TensorNet, TensorNetConfig

from .batches import MoleculeBatch
from .gfn2 import KCAL, read_arrays
from .sampling import Z

CONFIG = TensorNetConfig(
    embedding_dimension=64, num_layers=1, num_rbf=32, cutoff_upper=5.0, max_z=int(Z.max()) + 1, charge=False
)
LARGEST_FORCE = 15.0  # eV/Å; frames beyond teach nothing that a run meets
LARGEST_ENERGY = 4.0  # eV above the lowest
VALIDATION = 0.05
COLUMNS = ("step", "samples", "lr", "frames", "train_loss", "energy_mae_kcal", "force_mae_kcal")


@dataclass
class Frames:
    """Labelled frames: positions (m, n, 3), Å; energies (m,), eV, less `MEAN`; forces (m, n, 3), eV/Å; float32."""

    positions: Tensor
    energies: Tensor
    forces: Tensor

    def __len__(self) -> int:
        return len(self.energies)

    def __getitem__(self, index: Tensor) -> Frames:
        return Frames(self.positions[index], self.energies[index], self.forces[index])


def load_frames(folder: Path, seed: int, mean: float, number: int) -> tuple[Frames, Frames]:
    """Training and validation frames of the files of labels that round `number` has; a frame's share never changes."""
    shares: tuple[list, list] = ([], [])
    paths = sorted(folder.glob("[0-9]-*.npz")) + [folder / f"round-{k}.npz" for k in range(1, number)]
    for path in paths:
        data = read_arrays(path)
        validation = np.random.default_rng([seed, *path.name.encode()]).random(len(data["energies"])) < VALIDATION
        calm = np.abs(data["forces"]).max((1, 2)) < LARGEST_FORCE
        calm &= data["energies"] - mean < LARGEST_ENERGY
        for share, chosen in zip(shares, (calm & ~validation, calm & validation), strict=True):
            share.append((data["positions"][chosen], data["energies"][chosen] - mean, data["forces"][chosen]))
    training, validation = (
        Frames(*(torch.tensor(np.concatenate(column), dtype=torch.float32) for column in zip(*share, strict=True)))
        for share in shares
    )
    return training, validation


def predict(batch: MoleculeBatch, positions, chunk: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Energies less `mean` (eV), shape (m,), and forces (eV/Å) at positions (m, n, 3), Å; of a batch in evaluation mode."""
    parts = torch.as_tensor(positions, dtype=torch.float32).split(chunk)
    energies, forces = zip(*(batch.energy_and_forces(part) for part in parts), strict=True)
    return torch.cat(energies).numpy(), torch.cat(forces).numpy()


def new_model(seed: int, mean: float) -> TensorNet:
    """An untrained model whose `mean` is the mean energy of the labels (eV)."""
    torch.manual_seed(seed)
    model = TensorNet(CONFIG)
    model.mean.fill_(mean)
    return model


class Fit:
    """A model, the running average of its weights, and its optimiser.

    Parameters
    ----------
    folder : Path
        Where the state, the log and the checkpoint are kept.
    seed : int
    mean : float
        eV.
    start : path or str, optional
        A model whose weights it begins with, where `folder` holds no state yet; random ones by default.
    """

    def __init__(self, folder: Path, seed: int, mean: float, start: str | None = None):
        self.folder, self.seed = folder, seed
        self.model = new_model(seed, mean)
        if start is not None:
            self.model.load_state_dict(load_model(start).state_dict())
        self.average = copy.deepcopy(self.model)
        self.batch = MoleculeBatch(self.model, torch.tensor(Z)).train()
        self.average_batch = MoleculeBatch(self.average, torch.tensor(Z)).eval()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-6)
        self.step, self.samples = 0, 0
        self.log: list[dict] = []
        if self.state_file.exists():
            state = torch.load(self.state_file, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.average.load_state_dict(state["average"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.samples, self.log = state["step"], state["samples"], state["log"]

    @property
    def state_file(self) -> Path:
        return self.folder / "state.pt"

    def save(self) -> None:
        """Write the state, the log and its picture, and the checkpoint of the averaged weights."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "samples": self.samples,
            "log": self.log,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        replace_file(self.state_file, buffer.getvalue())
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.log)
        replace_file(self.folder / "log.csv", text.getvalue().encode())
        buffer = io.BytesIO()
        plot_learning(self.log).savefig(buffer, format="png", dpi=120)
        replace_file(self.folder / "learning.png", buffer.getvalue())
        save_model(self.average, self.folder / "model.ckpt")

    def run(self, until: int, total: int, training: Frames, validation: Frames, batch_size: int) -> None:
        """Train up to step `until` of a schedule of `total` steps."""
        with tqdm(total=until, initial=self.step, unit="step", desc="training") as bar:
            while self.step < until:
                loss = self._epoch(until, total, training, batch_size, bar)
                energy, force = predict(self.average_batch, validation.positions)
                energy_error = np.abs(energy - validation.energies.numpy()).mean() * KCAL
                force_error = np.abs(force - validation.forces.numpy()).mean() * KCAL
                row = {
                    "step": self.step,
                    "samples": self.samples,
                    "lr": self.optimizer.param_groups[0]["lr"],
                    "frames": len(training),
                    "train_loss": loss,
                    "energy_mae_kcal": float(energy_error),
                    "force_mae_kcal": float(force_error),
                }
                self.log.append(row)
                self.save()
                bar.set_postfix_str(f"{row['energy_mae_kcal']:.3f} kcal/mol, {row['force_mae_kcal']:.3f} kcal/mol/Å")

    def _epoch(self, until: int, total: int, training: Frames, batch_size: int, bar: tqdm) -> float:
        generator = torch.Generator().manual_seed(self.seed + self.step)
        losses = []
        for index in torch.randperm(len(training), generator=generator).split(batch_size):
            if self.step == until:
                break
            if len(index) < batch_size:
                continue
            lr, energy_weight = schedule(self.step / total)
            for group in self.optimizer.param_groups:
                group["lr"] = lr * min(1.0, (self.step + 1) / 200)
            losses.append(self._update(training[index], energy_weight))
            self.step += 1
            self.samples += len(index)
            bar.update()
        return float(np.mean(losses))

    def _update(self, frames: Frames, energy_weight: float) -> float:
        energy, forces = self.batch.energy_and_forces(frames.positions)
        # Vectors of forces are compared by their distance, not its square: a few strained frames must not rule.
        loss = torch.linalg.vector_norm(forces - frames.forces, dim=-1).mean()
        loss = loss + energy_weight * (energy - frames.energies).abs().mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.optimizer.step()
        # The average must forget the first steps as fast as it has made others.
        keep = min(0.999, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for average, own in zip(self.average.parameters(), self.model.parameters(), strict=True):
                average.lerp_(own, 1 - keep)
        return float(loss.detach())


def plot_learning(log: list[dict]) -> Figure:
    """Errors on the validation frames over the updates."""
    figure = Figure((6, 4), layout="constrained")
    panel = figure.subplots()
    steps = [row["step"] for row in log]
    for name, label in (
        ("force_mae_kcal", "force MAE (kcal/mol/Å)"),
        ("energy_mae_kcal", "energy MAE (kcal/mol)"),
    ):
        panel.semilogy(steps, [row[name] for row in log], marker=".", label=label)
    panel.set(xlabel="updates", ylabel="validation error")
    panel.grid(which="both", alpha=0.3)
    panel.legend()
    return figure


def schedule(progress: float) -> tuple[float, float]:
    """Learning rate and weight of the energy (1/Å) after a share of all steps: energies count for more at the end."""
    lr = 1e-5 + (1e-3 - 1e-5) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return lr, 0.1 + 0.9 * min(progress, 1.0)
