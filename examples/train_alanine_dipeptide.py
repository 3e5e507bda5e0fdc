"""Train a TensorNet on GFN2-xTB for alanine dipeptide, from nothing to a checkpoint, and test it.

    python train_alanine_dipeptide.py train                                    # some hours on one core
    python train_alanine_dipeptide.py heldout                                  # two hours: trajectories for testing
    python train_alanine_dipeptide.py check heldout frequencies                # minutes
    python train_alanine_dipeptide.py check free-energies gfn2-run long-runs   # hours
    python train_alanine_dipeptide.py bundle                                   # into the package

Needs the extra "train". Whatever is stopped goes on where it was when it is started again.
"""

import argparse
from pathlib import Path

import torch
from training import heldout, report, rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/train"), help="folder of everything (%(default)s)")
    parser.add_argument("--seed", type=int, default=20261130, help="(%(default)s)")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="label, fit and extend in turn")
    train.add_argument("--steps", type=int, default=30000, help="updates of the weights in all (%(default)s)")
    train.add_argument("--batch-size", type=int, default=8, help="frames of an update (%(default)s)")
    train.add_argument("--start", metavar="MODEL", help="a file or known model to begin with (default: random weights)")
    commands.add_parser("heldout", help="run GFN2-xTB itself at 300 and 500 K, for testing")
    check = commands.add_parser("check", help="test the trained model")
    check.add_argument("checks", nargs="+", choices=report.CHECKS, metavar="CHECK", help=", ".join(report.CHECKS))
    commands.add_parser("bundle", help="copy the model into the package and write its card")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = options.output / "model.ckpt"
    if options.command == "train":
        rounds.train(options.output, options.seed, options.steps, options.batch_size, options.start)
    elif options.command == "heldout":
        heldout.generate(options.output / "heldout", options.seed)
    elif options.command == "check":
        report.check(options.checks, model, options.output, options.seed)
    else:
        report.bundle(model, options.output)


if __name__ == "__main__":
    main()
