# SPDX-License-Identifier: Apache-2.0
"""`load`: a model from a folder on this machine, by what its config.json says, whole or not at all."""

import logging
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..patch import patch
from .folder import listing, open_folder, read_config, read_json, some, tensor_names
from .published import TASKS, Published, Task, families, mistakes, task_of

logger = logging.getLogger(__name__)

# Not facts of the model: who wrote the folder, with what, and whose code to run.
_ASIDE = ("model_type", "auto_map", "transformers_version", "_name_or_path", "_commit_hash")
_NATIVE = ("bloom", "mpt", "falcon")
_VOCABULARIES = ("tokenizer.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken")


def load(
    folder: str | os.PathLike[str],
    *,
    task: Task | None = None,
    dtype: Any = None,
    device_map: Any = None,
) -> Any:
    """The model that a folder holds, attending through linbias; no code of the folder is run, and nothing fetched.

    The family is told by config.json, the class by its `architectures`; every tensor of the folder must find its place
    and every place its tensor. BLOOM, MPT and Falcon are transformers' own, patched as `linbias.patch` does.

    Args:
        folder: holds config.json and model.safetensors, or several with their index, as published or as
            `save_pretrained` wrote them.
        task: another class of the family than `architectures` names. "base" leaves the weights of a head out. None:
            that class, or the base model where the folder holds only its weights.
        dtype: a torch dtype; None: that of the folder.
        device_map: as `from_pretrained` takes it; needs accelerate.

    Returns:
        A transformers `PreTrainedModel` in evaluation mode.

    Raises:
        FileNotFoundError: no such folder, no config.json, no safetensors, or not all of them.
        ValueError: a family that is not known, an option of it that cannot be honoured, a file that is not whole,
            weights that are only pickled, and tensors that are missing, unexpected or of another shape.
        ImportError: transformers is missing.
    """
    require_transformers("load")
    path = open_folder(folder)
    facts = read_config(path)
    if task is not None and task not in TASKS:
        raise ValueError(f"task must be None or one of {', '.join(TASKS)}, got {task!r}")
    family = family_of(facts, path)
    names = tensor_names(path)
    config = _config(family, facts, path)
    architecture = _architecture(family, facts, task, path)
    if task is None and _is_bare(family.classes[architecture], names, config):
        architecture = next(iter(family.classes))
    kind = family.classes[architecture]
    # Mismatched sizes become an error below, with the names that transformers would only print.
    with _without_report(path):
        model, info = kind.from_pretrained(
            path,
            config=config,
            dtype="auto" if dtype is None else dtype,
            device_map=device_map,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check_whole(family, kind, info, names, leave_head=task == "base", where=path)
    if family.name in _NATIVE:
        patch(model)
    logger.info("%s: %s, %d tensors, as %s", path, family.name, len(names), kind.__name__)
    return model


def require_transformers(door: str) -> None:
    """Raise where it is missing."""
    try:
        import transformers  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ImportError(f"linbias.hf.{door} needs transformers: pip install 'linbias[hf]'") from error


def family_of(facts: Mapping[str, Any], where: Path) -> Published:
    """The family that a folder's config.json is of; where that leaves a choice, the names of its tensors decide.

    Raises:
        ValueError: none or an option that cannot be honoured; and what `tensor_names` raises, where they are asked for.
    """
    found = [family for family in families() if _is_of(facts, family)]
    if not found and facts.get("model_type") in _NATIVE:
        found = [_native(facts["model_type"])]
    if len(found) > 1:
        names = tensor_names(where)
        found = [family for family in found if family.holds(names)]
    if len(found) != 1:
        raise ValueError(_unknown(facts, where, found))
    refusals = mistakes(found[0].config, facts) + _refused(facts)
    refusals = refusals or found[0].refusals(facts)
    if refusals:
        raise ValueError(f"cannot load the {found[0].name} model of {where}: " + "; ".join(refusals))
    return found[0]


def load_tokenizer(folder: str | os.PathLike[str]) -> Any:
    """The tokenizer of a folder, by transformers; no code of the folder is run, and nothing fetched.

    Raises:
        FileNotFoundError: no such folder, or none of the files that hold a vocabulary.
        ValueError: a file of it that is not whole; a tokenizer that is code of the folder, and no tokenizer.json: what
            to convert is said.
        ImportError: transformers is missing.
    """
    require_transformers("load_tokenizer")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = open_folder(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (path / name).is_file():
            read_json(path / name)
    if not any(found.stat().st_size for pattern in _VOCABULARIES for found in path.glob(pattern)):
        raise FileNotFoundError(
            f"{path} holds no vocabulary: none of {', '.join(_VOCABULARIES)}; it has {listing(path)}"
        )
    families()  # or transformers would warn of model types that it does not know
    try:
        found = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # some come of config.json, which transformers reads as a family of its own
        if not (path / "tokenizer.json").is_file():
            raise ValueError(
                f"the tokenizer of {path} cannot be read here ({error}). Convert it to "
                f"tokenizer.json once, where its code may run: "
                f"AutoTokenizer.from_pretrained(..., trust_remote_code=True).save_pretrained(...)"
            ) from error
        # It says all there is to say; only the class that wraps it is unknown.
        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    files = {"tokenizer.json", *found.vocab_files_names.values()}
    if not any((path / name).is_file() for name in files):
        # transformers makes a tokenizer of special tokens alone.
        raise FileNotFoundError(f"{path} holds no vocabulary: none of {', '.join(sorted(files))}")
    return found


def _refused(facts: Mapping[str, Any]) -> list[str]:
    """What no family can have."""
    found: list[str] = []
    dtype = facts.get("dtype", facts.get("torch_dtype"))
    if dtype is not None and not isinstance(getattr(torch, str(dtype).removeprefix("torch."), None), torch.dtype):
        found.append(f"dtype={dtype!r} is none of torch's")
    if facts.get("quantization_config") is not None:
        found.append("quantization_config is set, and quantised weights are not read here: load the folder that is not")
    return found


@contextmanager
def _without_report(folder: Path) -> Generator[None]:
    """Without transformers' table of tensors that found no place: faults among them are raised, by the same names."""

    def passes(record: logging.LogRecord) -> bool:
        text = str(record.msg)
        return "LOAD REPORT" not in text or str(folder) not in text

    theirs = logging.getLogger("transformers.modeling_utils")
    theirs.addFilter(passes)
    try:
        yield
    finally:
        theirs.removeFilter(passes)


def _is_of(facts: Mapping[str, Any], family: Published) -> bool:
    return facts.get("model_type") == family.config.model_type or family.claims(facts)


def _unknown(facts: Mapping[str, Any], where: Path, found: list[Published]) -> str:
    said = {name: facts[name] for name in ("model_type", "architectures", "auto_map") if name in facts}
    if found:
        return f"{where / 'config.json'} ({said}) is of several families: {', '.join(family.name for family in found)}"
    known = ", ".join([*(family.name for family in families()), *_NATIVE])
    position = facts.get("position_embedding_type")
    advice = (
        f"its position_embedding_type is {position!r}, not ALiBi: transformers.AutoModel loads it"
        if position not in (None, "alibi")
        else "a model that transformers loads itself may be patched: linbias.patch(model), linbias.hf.register"
    )
    return f"{where / 'config.json'} is of no family that linbias knows ({known}): it says {said}; {advice}"


def _native(model_type: str) -> Published:
    """A family that transformers holds, in the form of the others; what it refuses, `linbias.patch` does."""
    import transformers

    name = {"bloom": "Bloom", "mpt": "Mpt", "falcon": "Falcon"}[model_type]
    endings = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    return Published(
        name=model_type,
        claims=lambda facts: facts.get("model_type") == model_type,
        refusals=_native_refusals,
        config=getattr(transformers, f"{name}Config"),
        classes={name + ending: getattr(transformers, name + ending) for ending in endings},
    )


def _native_refusals(facts: Mapping[str, Any]) -> list[str]:
    """What need not wait for the weights to be read."""
    if facts["model_type"] == "falcon" and not facts.get("alibi", False):
        return ["alibi=False: this Falcon has rotary positions; load it with transformers"]
    return []


def _config(family: Published, facts: Mapping[str, Any], where: Path) -> Any:
    try:
        config = family.config.from_dict({name: value for name, value in facts.items() if name not in _ASIDE})
    except Exception as error:  # transformers checks its own with errors of other kinds
        raise ValueError(f"{where / 'config.json'} is not a configuration of {family.name}: {error}") from error
    config._name_or_path = str(where)
    return config


def _architecture(family: Published, facts: Mapping[str, Any], task: str | None, where: Path) -> str:
    """The name in `family.classes`."""
    offered = f"{family.name} has {', '.join(family.classes)}"
    if task is not None:
        for name in family.classes:
            if task_of(name) == task:
                return name
        raise ValueError(f"task {task!r} has no class here: {offered}")
    said = facts.get("architectures") or []
    known = [name for name in said if name in family.classes]
    if not known:
        raise ValueError(
            f"architectures of {where / 'config.json'} says {said}, and {offered}: pass task=..., one of "
            f"{', '.join(TASKS)}"
        )
    return known[0]


def _is_bare(kind: type[Any], names: frozenset[str], config: Any) -> bool:
    """Whether a folder that names this class, with a head, holds its base model's weights alone."""
    prefix = kind.base_model_prefix + "."
    tied = task_of(kind.__name__) == "causal-lm" and getattr(config, "tie_word_embeddings", False)
    return not tied and not any(name.startswith(prefix) for name in names)


def _check_whole(
    family: Published, kind: type[Any], info: Mapping[str, Any], names: frozenset[str], *, leave_head: bool, where: Path
) -> None:
    """Raise unless every tensor found its place and every place its tensor."""
    prefix = kind.base_model_prefix + "."
    headed = any(name.startswith(prefix) for name in names)
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    unexpected = [name for name in unexpected if not any(re.fullmatch(part, name) for part in family.harmless)]
    head = [name for name in unexpected if headed and not name.startswith(prefix)]
    if leave_head:
        unexpected = [name for name in unexpected if name not in head]
    problems: list[str] = []
    if missing:
        of_head = task_of(kind.__name__) != "base" and not any(name.startswith(prefix) for name in missing)
        remedy = (
            f"; that is its head: pass task='base' for the model without, {kind.__name__}.from_pretrained to train one"
        )
        problems.append(f"lack {some(missing)}{remedy if of_head else ''}")
    if unexpected:
        remedy = "; that is a head: pass the task it was trained for, or task='base' to leave it out"
        problems.append(f"have {some(unexpected)}, which it has no place for{remedy if head == unexpected else ''}")
    if info["mismatched_keys"]:
        differ = [f"{name} {tuple(came)} and {tuple(wanted)}" for name, came, wanted in sorted(info["mismatched_keys"])]
        problems.append(f"have other shapes than config.json gives it: {some(differ)}")
    if problems:
        raise ValueError(f"the {family.name} weights of {where}, read as {kind.__name__}, " + "; and ".join(problems))
