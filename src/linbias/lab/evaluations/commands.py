# SPDX-License-Identifier: Apache-2.0
"""What the command line does for each evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..mpt import export_mpt
from ..storage import write_text
from .config import ExportCommand, NumericsCommand
from .numerics import numerics, numerics_json, numerics_text


def _numerics(command: NumericsCommand) -> None:
    found = numerics(command)
    print(numerics_text(command, found))
    if command.json is not None:
        write_text(command.json, numerics_json(command, found))
        _written([command.json])


def _export(command: ExportCommand) -> None:
    _written(export_mpt(command))


def _written(files: list[Path]) -> None:
    print("\nwritten: " + ", ".join(map(str, files)))


EVALUATIONS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "numerics": (NumericsCommand, _numerics),
    "export": (ExportCommand, _export),
}
"""Commands by name: what they can be told, and what they do."""
