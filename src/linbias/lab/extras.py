# SPDX-License-Identifier: Apache-2.0
"""Packages that only the workbench needs, imported where they are used."""

import importlib
from typing import Any


class MissingExtra(ImportError):
    """A package of the `lab` extra is not installed."""


def need(module: str) -> Any:
    """Return the imported `module`.

    Raises: MissingExtra, with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            raise
        raise MissingExtra(
            f"this command needs the package {package!r}, which is not installed; run: pip install 'linbias[lab]'",
            name=package,
        ) from error
