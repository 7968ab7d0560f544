# SPDX-License-Identifier: Apache-2.0
"""What a model's folder holds: config.json, and safetensors that are whole. Nothing is unpickled, nothing fetched."""

import json
import os
from pathlib import Path
from typing import Any

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CONVERT = (
    "Convert them once, where you trust their source: "
    "from torch import load; from safetensors.torch import save_file; "
    "save_file({name: part.clone() for name, part in load('pytorch_model.bin', weights_only=True).items()}, "
    "'model.safetensors', metadata={'format': 'pt'})"
)


def open_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder, if it is one on this machine.

    Raises:
        FileNotFoundError: it is not there.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        what = "is a file" if path.is_file() else "is not there"
        raise FileNotFoundError(
            f"folder must be a folder on this machine that holds config.json and safetensors, and {str(folder)!r} "
            f"{what}; linbias downloads nothing: huggingface_hub.snapshot_download(...) returns such a folder"
        )
    return path


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is not JSON.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} holds no {path.name}; it has {listing(path.parent)}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); copy or download it again") from error


def read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that is an object.

    Raises:
        FileNotFoundError, ValueError: as `read_json`; it is something else.
    """
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object, got {type(found).__name__}")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands there."""
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds an adapter (adapter_config.json), not a whole model: load the model it was trained on, "
            f"then peft.PeftModel.from_pretrained(model, {str(folder)!r})"
        )
    return read_object(folder / "config.json")


def tensor_names(folder: Path) -> frozenset[str]:
    """The tensors of the folder's safetensors, every file of which was checked to be whole.

    Raises:
        FileNotFoundError: no safetensors, or not all of them.
        ValueError: only pickled weights, a file cut short or damaged, or an index that says something else.
    """
    if (folder / _SINGLE).is_file():
        return frozenset(_names_in(folder / _SINGLE))
    if not (folder / _INDEX).is_file():
        raise _without_weights(folder)
    index = read_json(folder / _INDEX)
    shard_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise ValueError(f"{folder / _INDEX} must hold a weight_map of tensors to files; download it again")
    shards = sorted(set(shard_of.values()))
    strange = [shard for shard in shards if Path(shard).name != shard or not shard.endswith(".safetensors")]
    if strange:
        raise ValueError(f"{folder / _INDEX} must name safetensors of its own folder, got {', '.join(strange)}")
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{folder} lacks {len(absent)} of the {len(shards)} files that {_INDEX} names: {', '.join(absent)}"
        )
    found = {name: shard for shard in shards for name in _names_in(folder / shard)}
    if found != shard_of:
        differ = sorted(name for name in found.keys() | shard_of.keys() if found.get(name) != shard_of.get(name))
        raise ValueError(
            f"{folder / _INDEX} and the files it names disagree on {some(differ)}: they are of different downloads"
        )
    return frozenset(found)


def refuse_pickles(folder: Path) -> None:
    """Raise where a part of a model has weights, and only pickled ones."""
    if not any(folder.glob("*.safetensors")) and any(path.suffix in _PICKLES for path in folder.iterdir()):
        raise _without_weights(folder)


def some(names: list[str]) -> str:
    """The first few of them."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _names_in(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        with path.open("rb") as file:
            pointer = file.read(7) == b"version"
        remedy = "it is a pointer of Git LFS: git lfs pull" if pointer else "copy or download it again"
        raise ValueError(
            f"{path} is not a whole safetensors file of {path.stat().st_size} bytes ({error}); {remedy}"
        ) from error


def _without_weights(folder: Path) -> Exception:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickled:
        return ValueError(
            f"{folder} has its weights pickled only ({some(pickled)}), and linbias never unpickles: a pickle can run "
            f"any code. {_CONVERT}"
        )
    return FileNotFoundError(f"{folder} holds no weights: neither {_SINGLE} nor {_INDEX}; it has {listing(folder)}")


def listing(folder: Path) -> str:
    """The first few files of a folder."""
    return some(sorted(path.name for path in folder.iterdir())) or "nothing"
