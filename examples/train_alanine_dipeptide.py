"""Train a TensorNet on GFN2-xTB for alanine dipeptide, from nothing to a checkpoint, and test it.

    python train_alanine_dipeptide.py train
    python train_alanine_dipeptide.py heldout

Needs the extra "train" (tblite). One core is enough, for some hours. Whatever is stopped continues where it was when it
is started again.
"""

import argparse
from pathlib import Path

import torch
from training import heldout, rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/train"), help="folder of everything (%(default)s)")
    parser.add_argument("--seed", type=int, default=20261130, help="(%(default)s)")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="label, fit and extend in turn")
    train.add_argument("--steps", type=int, default=30000, help="updates of the weights in all (%(default)s)")
    train.add_argument("--batch-size", type=int, default=8, help="frames of an update (%(default)s)")
    commands.add_parser("heldout", help="run GFN2-xTB itself at 300 and 500 K, for testing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "train":
        rounds.train(options.output, options.seed, options.steps, options.batch_size)
    else:
        heldout.generate(options.output / "heldout", options.seed)


if __name__ == "__main__":
    main()
