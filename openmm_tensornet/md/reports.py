"""What a run writes and shows on its way."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.files import replace_file

if TYPE_CHECKING:
    import openmm
    from openmm.app import Simulation
from .sentinels import temperature_of

CSV_COLUMNS = (
    "step",
    "time_ps",
    "potential_energy_kJ_per_mol",
    "kinetic_energy_kJ_per_mol",
    "total_energy_kJ_per_mol",
    "temperature_K",
)


def csv_row(step: int, state: openmm.State, dof: int, periodic: bool) -> list[str]:
    from openmm import unit

    potential = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    kinetic = state.getKineticEnergy().value_in_unit(unit.kilojoule_per_mole)
    temperature = temperature_of(state, dof)
    row = [
        str(step),
        f"{state.getTime().value_in_unit(unit.picosecond):.6f}",
        f"{potential:.6f}",
        f"{kinetic:.6f}",
        f"{potential + kinetic:.6f}",
        f"{temperature:.3f}",
    ]
    if periodic:
        row.append(f"{state.getPeriodicBoxVolume().value_in_unit(unit.nanometer**3):.6f}")
    return row


class ProgressBar:
    """tqdm on stderr if it is installed and stderr is a terminal, else nothing."""

    def __init__(self, total: int, quiet: bool, initial: int = 0, name: str = "") -> None:
        self._bar: Any = None
        if quiet:
            return
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._bar = tqdm(total=total, initial=initial, unit="step", desc=name, disable=None, dynamic_ncols=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, steps: int, text: str = "") -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(steps)


def write_pdb(path: Path, simulation: Simulation) -> None:
    from openmm.app import PDBFile

    periodic = simulation.system.usesPeriodicBoundaryConditions()
    state = simulation.context.getState(positions=True, enforcePeriodicBox=periodic)
    topology = copy.copy(simulation.topology)
    if periodic:
        topology.setPeriodicBoxVectors(state.getPeriodicBoxVectors())
    text = io.StringIO()
    PDBFile.writeFile(topology, state.getPositions(), text, keepIds=True)
    replace_file(path, text.getvalue().encode())
