"""Train a TensorNet on GFN2-xTB for alanine dipeptide, from nothing to a checkpoint.

    python train_alanine_dipeptide.py

Needs the extra "train" (tblite). One core is enough, for some hours. Stopped, it continues where the last epoch ended.
"""

import argparse
from pathlib import Path

import torch
from training import rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/train"), help="folder of everything (%(default)s)")
    parser.add_argument("--seed", type=int, default=20261130, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=30000, help="updates of the weights in all (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="frames of an update (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds.train(options.output, options.seed, options.steps, options.batch_size)


if __name__ == "__main__":
    main()
