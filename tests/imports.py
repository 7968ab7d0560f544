# SPDX-License-Identifier: Apache-2.0
"""Which file of the package imports which, read from the sources."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "linbias"
EXTENSION = "linbias._native"


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imports_of(name: str) -> frozenset[str]:
    """The linbias modules that a file imports, at its top or anywhere inside."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            inside = [f"{source}.{alias.name}" for alias in node.names]
            found.update(name if name in MODULES or name == EXTENSION else source for name in inside)
    return frozenset(target for target in found if target.partition(".")[0] == "linbias")


def room_of(name: str) -> str:
    """The module or package directly below linbias in which a module lies."""
    return (name.split(".") + ["__init__"])[1]
