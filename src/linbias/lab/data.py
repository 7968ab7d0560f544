# SPDX-License-Identifier: Apache-2.0
"""Text as bytes, split into what a model trains on, is watched on, and is tested on."""

import hashlib
import lzma
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

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
_SPLIT_WORDS: dict[str, Split] = {
    **dict.fromkeys(("train", "training", "trainset", "trn"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "development", "devset", "validset", "valset"), "validation"),
    **dict.fromkeys(("test", "testing", "testset", "tst", "heldout"), "test"),
}
"""What a file or folder name may call a split, as a word of its own: wiki.valid.raw, en-dev.txt, Test01."""
_BINARY_PROBE = 8192
_NO_TEXT = 7.5
"""Bits per byte, each byte for itself, from which data looks like noise: prose has 4 to 5, mixed scripts up to 7."""


class DataError(ValueError):
    """Text that is missing, unusable or too short for what was asked."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """One split."""

    name: str
    """Where it came from, for tables and messages."""
    content: bytes

    @cached_property
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

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all three splits, hexadecimal."""
        return hashlib.sha256("".join(self.split(name).digest for name in SPLITS).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return its name, its source and the name, size and SHA-256 of each split, in types that JSON knows."""
        texts = ((name, self.split(name)) for name in SPLITS)
        return {
            "name": self.name,
            "source": None if self.source is None else str(self.source),
            "splits": {
                name: {"text": text.name, "bytes": len(text.content), "sha256": text.digest} for name, text in texts
            },
        }

    def remark(self) -> str | None:
        """Return what is odd about the text: None, or that its bytes are spread as evenly as those of noise."""
        sample = self.train.tensor()[: 2**20]
        shares = torch.bincount(sample.int(), minlength=256).double() / len(sample)
        bits = torch.special.entr(shares).sum().item() / math.log(2)
        if bits < _NO_TEXT:
            return None
        return (
            f"{self.train.name} does not look like text: its bytes are spread almost evenly ({bits:.2f} of 8 bits), as "
            "in compressed, encrypted or random data, and there is little that any model could learn from them."
        )


def load_corpus(source: Path | None = None) -> Corpus:
    """Read a corpus.

    Args:
        source: None for the embedded novels (four to train, persuasion to validate, northanger_abbey to test). A text
            file is cut in order, 80 % to train, 10 % to validate, 10 % to test. A folder in which names of files or
            folders hold the splits as words (train; valid, val, dev, validation; test: wiki.valid.raw, dev/a.txt) is
            split that way, and what names no split is left out; a split in several files is joined where they lie in
            one folder named for it or differ in a number only. Of any other folder all text files below it are joined
            in the order of their names and cut like one file. Hidden files and files with a zero byte near their start
            are left out. Bytes are taken as they are, in whatever encoding.

    Raises:
        DataError: the source does not exist, a folder names some splits and not all, or a split of it would be empty.
    """
    if source is None:
        return _embedded()
    if not source.exists():
        raise DataError(f"data must be an existing text file or folder, got {str(source)!r}, which does not exist")
    if source.is_file():
        return _cut(source, source.read_bytes())
    if not source.is_dir():
        raise DataError(f"data must be a text file or folder, got {str(source)!r}, which is neither")
    files = [path for path in sorted(source.rglob("*")) if _is_text(path, source)]
    if not files:
        raise DataError(f"data must hold text, got folder {str(source)!r} without any text file")
    named = _named_splits(source, files)
    if not named:
        return _cut(source, _joined(files))
    texts: dict[Split, Text] = {}
    for split, paths in named.items():
        texts[split] = Text(name=_name_of(source, paths), content=_joined(paths))
    if texts["test"].content == texts["train"].content:
        same = f"{texts['train'].name} and {texts['test'].name}"
        raise DataError(f"data must be tested on other text than trained on, got the same bytes in {same}")
    return _checked(source, texts)


def printable(path: Path | str) -> str:
    r"""Return a file name as text that every encoding of Unicode can hold: what is no UTF-8 becomes \\xff."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _joined(files: Iterable[Path]) -> bytes:
    return b"\n".join(path.read_bytes() for path in files)


def _name_of(folder: Path, files: list[Path]) -> str:
    first = printable(files[0].relative_to(folder))
    return first if len(files) == 1 else f"{first} and {len(files) - 1:,} more"


def _named_splits(folder: Path, files: list[Path]) -> dict[Split, list[Path]]:
    """The files of each split, empty if no name below `folder` names one.

    Raises: DataError if only some are named, one in several places, or a name names two.
    """
    places: dict[Split, dict[str, list[Path]]] = {}
    for path in files:
        found = _split_of(path.relative_to(folder))
        if found is not None:
            split, place = found
            places.setdefault(split, {}).setdefault(place, []).append(path)
    if not places:
        return {}
    where = f"in {printable(folder)!r}"
    for split, found in places.items():
        if len(found) > 1:
            names = ", ".join(printable(paths[0].relative_to(folder)) for paths in found.values())
            raise DataError(
                f"data must have its {split} split in one place, got {names} {where}; leave one of them, or put them "
                f"into a folder named {split}"
            )
    missing = [split for split in SPLITS if split not in places]
    if missing:
        names = ", ".join(
            printable(paths[0].relative_to(folder)) for found in places.values() for paths in found.values()
        )
        raise DataError(
            f"data must name all of its splits (train, validation, test) or none, got {names} but no text for "
            f"{' and '.join(missing)} {where}; add it, or join the files into one, which is cut 80 / 10 / 10 in order"
        )
    return {split: next(iter(places[split].values())) for split in SPLITS}


def _split_of(path: Path) -> tuple[Split, str] | None:
    """The split that a path names, by its outermost part that names one, and the place: files of one are joined."""
    for depth, part in enumerate(path.parts, start=1):
        spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", part).lower()
        words = [word.rstrip("0123456789") for word in re.split(r"[\W_]+", spaced)]
        splits: set[Split] = {_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS}
        if len(splits) > 1:
            raise DataError(f"data must name one split a file, got {printable(path)!r}, which names {len(splits)}")
        if splits:
            # Parts of a text are numbered: train-00000-of-00002.txt.
            place = path.parts[:depth] if depth < len(path.parts) else (*path.parts[:-1], re.sub(r"\d+", "#", part))
            return splits.pop(), "/".join(place)
    return None


def _embedded() -> Corpus:
    folder = resources.files("linbias.lab") / "corpus"

    def read(novel: str) -> bytes:
        return lzma.decompress((folder / f"{novel}.txt.xz").read_bytes())

    texts = {
        split: Text(name=" + ".join(novels), content=b"\n".join(map(read, novels))) for split, novels in NOVELS.items()
    }
    return Corpus(name="six novels by Jane Austen", source=None, **texts)


def _is_text(path: Path, root: Path) -> bool:
    if any(part.startswith(".") for part in path.relative_to(root).parts) or not path.is_file():
        return False
    with path.open("rb") as file:
        return b"\0" not in file.read(_BINARY_PROBE)


def _cut(source: Path, content: bytes) -> Corpus:
    first, second = len(content) * 8 // 10, len(content) * 9 // 10
    pieces: dict[Split, tuple[str, bytes]] = {
        "train": ("first 80 %", content[:first]),
        "validation": ("next 10 %", content[first:second]),
        "test": ("last 10 %", content[second:]),
    }
    name = printable(source.name)
    texts: dict[Split, Text] = {
        split: Text(name=f"{name}, {part}", content=piece) for split, (part, piece) in pieces.items()
    }
    return _checked(source, texts)


def _checked(source: Path, texts: Mapping[Split, Text]) -> Corpus:
    for split, text in texts.items():
        if not text.content:
            raise DataError(f"data must leave text for every split, got none for {split} in {str(source)!r}")
    return Corpus(name=printable(source.name), source=source.resolve(), **texts)


def require_bytes(text: Text, needed: int, purpose: str) -> None:
    """Raise DataError unless `text` has `needed` bytes."""
    if len(text.content) < needed:
        raise DataError(
            f"data must have at least {needed:,} bytes {purpose}, got {len(text.content):,} ({text.name}); "
            "use more text or shorter lengths"
        )
