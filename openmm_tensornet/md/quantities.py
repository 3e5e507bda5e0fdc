"""Quantities with units on the command line."""

from __future__ import annotations

import argparse
import string
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


# Units that a value on the command line may have: what follows the number, and its name in openmm.unit.
UNITS = {
    "fs": "femtosecond",
    "ps": "picosecond",
    "ns": "nanosecond",
    "us": "microsecond",
    "nm": "nanometer",
    "A": "angstrom",
    "K": "kelvin",
    "amu": "dalton",
    "Da": "dalton",
}


def add_quantity(parser: argparse.ArgumentParser, flag: str, unit: str, default: float | None, what: str) -> None:
    """Add an option that takes a number in `unit`, or a number with a unit of the same dimension."""
    note = "" if default is None else f" (default: {default:g} {unit})"
    parser.add_argument(
        flag,
        type=_quantity_in(unit),
        default=default,
        help=f"{what}, in {unit} unless the unit is given{note}",
    )


def _quantity_in(default_unit: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        from openmm import unit

        number = text.strip().rstrip(string.ascii_letters + " ")
        symbol = text.strip().removeprefix(number).strip()
        try:
            given = getattr(unit, UNITS[symbol or default_unit])
            if not given.is_compatible(getattr(unit, UNITS[default_unit])):
                raise ValueError
            return float(number) * given
        except (KeyError, ValueError):
            raise argparse.ArgumentTypeError(
                f"expected a number, with or without a unit, such as '2 {default_unit}', received '{text}'"
            ) from None

    return parse
