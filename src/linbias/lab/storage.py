# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or absent, and names that change when anything behind them does."""

import hashlib
import json
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from .extras import need

_PRESENTATION = {
    "cli.py",
    "lab/exports.py",
    "lab/plots.py",
    "lab/heads.py",
    "lab/measure.py",
    "lab/doctor.py",
    "lab/tasks.py",
    "lab/progress.py",
    "lab/remarks.py",
    "lab/tables.py",
    "lab/mpt.py",
    *(f"lab/evaluations/{name}.py" for name in ("attention", "commands", "folder", "numerics", "of_folder")),
    *(f"lab/evaluations/{name}.py" for name in ("retrieval_show", "streaming")),
}
"""Source files, relative to the package, that decide how results look and not what they are."""
_BENCH = "lab/bench/"
"""Sources that measure time and change no model's results."""


class CheckpointError(ValueError):
    """A file that is not what it should be."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place in one step.

    Whatever interrupts it, `path` afterwards holds either all of the new content or all of the old.

    Raises: OSError that names `path`, whichever file the system stumbled over.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _naming(path.parent, "cannot make the folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with _naming(path, "cannot write"):
        try:
            write(temporary)
            _flush_to_disk(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path, failed: str) -> Generator[None]:
    """Errors of the system name `path` and not the temporary file, or none at all."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, f"{failed}: {error.strerror or error}", str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically, as UTF-8; what that cannot hold (names of files that are no text) is escaped."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` atomically."""
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def _flush_to_disk(path: Path) -> None:
    # Without this a crash of the machine could leave the new name with no content behind it.
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def save_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write tensors and `about` (as JSON) to a safetensors file, atomically."""
    save = need("safetensors.torch").save
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # transformers refuses a safetensors file that does not say "format": "pt".
    header = {"format": "pt", "linbias": json.dumps(about)}
    # Written by us, because safetensors' own writer gives files that nobody else may read.
    write_bytes(path, save(plain, metadata=header))


def load_tensors(path: Path, remedy: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote.

    Raises: CheckpointError, with `remedy`, if the file is missing, damaged, or was written by something else.
    """
    if not path.is_file():
        raise CheckpointError(f"checkpoint must be an existing file, got {str(path)!r}, which is not one")
    safetensors, torch_format = need("safetensors"), need("safetensors.torch")
    # Read by us, because safetensors opens no path that is not UTF-8.
    content = path.read_bytes()
    try:
        tensors = torch_format.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = json.loads(header["__metadata__"]["linbias"])
        if not isinstance(about, dict):
            raise ValueError(f"what it says of itself is a {type(about).__name__}")
        return tensors, about
    # A file is what someone made it: its JSON may nest deeper than Python reads, its tensors be of types torch lacks.
    except (safetensors.SafetensorError, LookupError, TypeError, ValueError, RecursionError, RuntimeError) as error:
        raise CheckpointError(
            f"checkpoint must be a safetensors file written by linbias, got {str(path)!r} ({error}){remedy}"
        ) from error


def digest_of_facts(**facts: object) -> str:
    """Return 12 hexadecimal digits that stand for `facts`, this code and this torch.

    Left out: the number of threads, which may change the last bits of a sum but not what was run.
    """
    everything = {**facts, "code": _code_digest(), "linbias": __version__, "torch": torch.__version__}
    text = json.dumps(everything, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"a fact must be made of numbers, text, lists and dataclasses, got {type(value).__name__}")


@cache
def _code_digest() -> str:
    """Digest of every source of the package that can change a number, and of the compiled kernels."""
    package = Path(__file__).resolve().parent.parent
    names = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    chosen = {name: path for name, path in names.items() if name not in _PRESENTATION and not name.startswith(_BENCH)}
    # An editable install keeps the kernels elsewhere than the sources.
    kernels = find_spec("linbias._native")
    if kernels is not None and kernels.origin is not None:
        chosen["_native"] = Path(kernels.origin)
    return digest_of_files(chosen)


def digest_of_files(files: Mapping[str, Path]) -> str:
    """Digest of the names and contents of files."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
