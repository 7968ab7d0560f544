# SPDX-License-Identifier: Apache-2.0
"""Text as bytes, split into what a model trains on, is watched on, and is tested on."""

import hashlib
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from .config import Split

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
NOVELS: dict[Split, tuple[str, ...]] = {
    "train": ("emma", "mansfield_park", "pride_and_prejudice", "sense_and_sensibility"),
    "validation": ("persuasion",),
    "test": ("northanger_abbey",),
}
"""The embedded corpus, split by whole novel; see corpus/README.md for origin and rights."""
_BINARY_PROBE = 8192


class DataError(ValueError):
    """Text that is missing, unusable or too short for what was asked."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """One split."""

    name: str
    """Where it came from, for tables and messages."""
    content: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the content, hexadecimal."""
        return hashlib.sha256(self.content).hexdigest()

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the bytes as a uint8 tensor (N,) that owns its memory."""
        return torch.frombuffer(bytearray(self.content), dtype=torch.uint8).to(device)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Three splits of one collection of text."""

    name: str
    source: Path | None
    """The file or folder it was read from, None for the embedded novels."""
    train: Text
    validation: Text
    test: Text

    def split(self, name: Split) -> Text:
        """Return the split called `name`."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[name]


def load_corpus(source: Path | None = None) -> Corpus:
    """Read a corpus.

    Args:
        source: None for the embedded novels (four to train, persuasion to validate, northanger_abbey to test). A text
            file is cut in order, 80 % to train, 10 % to validate, 10 % to test. A folder with files named train,
            validation and test, whatever their suffix, is split that way; of any other folder all text files below it
            are joined in the order of their names and cut like one file. Hidden files and files with a zero byte near
            their start are left out. Bytes are taken as they are, in whatever encoding.

    Raises:
        DataError: the source does not exist, or a split of it would be empty.
    """
    if source is None:
        return _embedded()
    if not source.exists():
        raise DataError(f"data must be an existing text file or folder, got {str(source)!r}, which does not exist")
    if source.is_file():
        return _cut(source, source.read_bytes())
    named: dict[Split, Path | None] = {name: _named_split(source, name) for name in SPLITS}
    if all(named.values()):
        return _checked(source, {split: _read(path) for split, path in named.items() if path is not None})
    files = [path for path in sorted(source.rglob("*")) if _is_text(path, source)]
    if not files:
        raise DataError(f"data must hold text, got folder {str(source)!r} without any text file")
    return _cut(source, b"\n".join(path.read_bytes() for path in files))


def _embedded() -> Corpus:
    folder = resources.files("linbias.lab") / "corpus"

    def read(novel: str) -> bytes:
        return lzma.decompress((folder / f"{novel}.txt.xz").read_bytes())

    texts = {
        split: Text(name=" + ".join(novels), content=b"\n".join(map(read, novels))) for split, novels in NOVELS.items()
    }
    return Corpus(name="six novels by Jane Austen", source=None, **texts)


def _read(path: Path) -> Text:
    return Text(name=path.name, content=path.read_bytes())


def _named_split(folder: Path, name: Split) -> Path | None:
    found = [path for path in sorted(folder.iterdir()) if path.stem == name and _is_text(path, folder)]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(f"data must name one file for its {name} split, got {names} in {str(folder)!r}")
    return found[0] if found else None


def _is_text(path: Path, root: Path) -> bool:
    if any(part.startswith(".") for part in path.relative_to(root).parts) or not path.is_file():
        return False
    with path.open("rb") as file:
        return b"\0" not in file.read(_BINARY_PROBE)


def _cut(source: Path, content: bytes) -> Corpus:
    first, second = len(content) * 8 // 10, len(content) * 9 // 10
    cut: Callable[[str, bytes], Text] = lambda part, piece: Text(name=f"{source.name}, {part}", content=piece)  # noqa: E731
    return _checked(
        source,
        {
            "train": cut("first 80 %", content[:first]),
            "validation": cut("next 10 %", content[first:second]),
            "test": cut("last 10 %", content[second:]),
        },
    )


def _checked(source: Path, texts: dict[Split, Text]) -> Corpus:
    for split, text in texts.items():
        if not text.content:
            raise DataError(f"data must leave text for every split, got none for {split} in {str(source)!r}")
    return Corpus(name=source.name, source=source.resolve(), **texts)


def require_bytes(text: Text, needed: int, purpose: str) -> None:
    """Raise DataError unless `text` has `needed` bytes."""
    if len(text.content) < needed:
        raise DataError(
            f"data must have at least {needed:,} bytes {purpose}, got {len(text.content):,} ({text.name}); "
            "use more text or shorter lengths"
        )
