# SPDX-License-Identifier: Apache-2.0
"""`linbias evaluate --model`: loss, retrieval, streaming and numerics of a transformers model on disk."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import ConfigError
from ..data import Text, load_corpus
from ..evaluate import plan_windows
from ..extras import need
from ..statistics import METHOD, Estimate, estimate
from ..storage import write_bytes, write_text
from ..tables import align, wrap
from ..train import resolve_device
from .config import ANSWER, EvaluateCommand, NumericsCommand
from .folder import FolderModel, open_folder_model, plant_tokens
from .numerics import numerics, numerics_text
from .retrieval import Answers, Question
from .retrieval_show import answer_rows, answers_table, draw_answers
from .streaming import Streaming, curves, draw_streaming, streaming_text

_LENGTHS = (256, 512, 1024)
_TOKENS_AT_ONCE = 4096


def evaluate_folder(command: EvaluateCommand) -> tuple[str, list[Path]]:
    """Do what the command asks of a folder's model; returns what to print and the files written.

    Raises: ConfigError, DataError, MissingExtra: it cannot be done.
    """
    assert command.model is not None
    if command.scheme is not None:
        raise ConfigError("scheme must not be given with model: a folder's model keeps its own positions")
    need("matplotlib")
    model = open_folder_model(command.model, resolve_device(command.device))
    text = load_corpus(command.data).split(command.split)
    lengths = command.evaluate.lengths or _LENGTHS
    parts: dict[str, Callable[[], tuple[Any, str, bytes | None]]] = {
        "loss": lambda: _loss(command, model, text, lengths),
        "retrieval": lambda: _retrieval(command, model, text, lengths),
        "streaming": lambda: _streaming(command, model, text),
        "numerics": lambda: _numerics(command, model, max(lengths)),
    }
    out = command.folder.out
    data, files, said = out / "evaluation.json", [], [wrap(f"{command.model}: {model.how}; text {text.name}")]
    found: dict[str, Any] = {"model": str(command.model), "how": model.how, "text": text.name, "interval": METHOD}
    for name in command.folder.tests:
        found[name], words, plot = parts[name]()
        said += [f"== {name}", words]
        if plot is not None:
            write_bytes(out / f"{name}.png", plot)
            files.append(out / f"{name}.png")
    write_text(data, json.dumps(found, indent=1, allow_nan=False))
    if command.json is not None:
        write_text(command.json, json.dumps(found, indent=1, allow_nan=False))
        files.append(command.json)
    return "\n\n".join(said), [*files, data]


def _loss(command: EvaluateCommand, model: FolderModel, text: Text, lengths: tuple[int, ...]) -> tuple[Any, str, None]:
    longest = max(lengths)
    tokens = model.tokens(text, command.evaluate.test_bytes + 1)
    scored = (len(tokens) - 1) // longest * longest
    if not scored:
        raise ConfigError(
            f"lengths must leave a window of {longest:,} tokens in text and test_bytes, got {len(tokens):,} tokens"
        )
    size = model.bytes_of(tokens[1 : scored + 1]) / scored
    rows: list[dict[str, Any]] = []
    for length in sorted(set(lengths)):
        nats = _score(model, tokens, scored, length, command.evaluate.stride)
        if isinstance(nats, str):
            rows.append({"length": length, "why_not": nats})
            continue
        bits = nats.double().view(scored // longest, -1).mean(dim=1).numpy() / math.log(2)
        rows.append(
            {"length": length, "bits_per_token": asdict(estimate(bits)), "bits_per_byte": asdict(estimate(bits / size))}
        )
    stride = command.evaluate.stride or "the window"
    words = f"{_loss_table(rows)}\n\n{scored:,} tokens of {size:.2f} bytes on average, stride {stride}"
    return {"scored": scored, "stride": command.evaluate.stride, "bytes_per_token": size, "cells": rows}, words, None


def _loss_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        (f"{row['length']:,}", "cannot run", row["why_not"])
        if "why_not" in row
        else (f"{row['length']:,}", *(str(Estimate(**row[each])) for each in ("bits_per_token", "bits_per_byte")))
        for row in rows
    ]
    return align(("window, tokens", "bits per token", "bits per byte"), lines)


def _score(model: FolderModel, tokens: Tensor, scored: int, length: int, stride: int | None) -> Tensor | str:
    windows = plan_windows(scored, length, stride)
    pieces: list[Tensor] = []
    batch = max(1, _TOKENS_AT_ONCE // length)
    for starts, firsts in zip(windows.starts.split(batch), windows.firsts.split(batch), strict=True):
        try:
            nats = model.nats(tokens[starts[:, None] + torch.arange(length + 1)])
        except (IndexError, RuntimeError) as error:
            # Tables of positions end where they end.
            most = getattr(model.model.config, "max_position_embeddings", None)
            if most is None or length <= most:
                raise
            return f"its positions end at {most:,} ({type(error).__name__})"
        pieces.append(nats[torch.arange(length) >= firsts[:, None]])
    return torch.cat(pieces)


def _retrieval(
    command: EvaluateCommand, model: FolderModel, text: Text, lengths: tuple[int, ...]
) -> tuple[Any, str, bytes]:
    asked = command.folder
    filler = model.tokens(text, max(lengths) * 8)
    answers: list[Answers] = []
    for length in sorted(set(lengths)):
        for index in range(asked.depths):
            question = Question(pairs=1, length=length, depth=index / (asked.depths - 1))
            random = np.random.default_rng((length, index))
            hits = sum(_finds(model, filler, question, random) for _ in range(asked.trials))
            answers.append(Answers(scheme=model.path.name, question=question, hits=(hits,), trials=asked.trials))
    rows = answer_rows(answers)
    title = "Values found, by length in tokens and depth"
    return rows, f"Values found of those asked for, at all depths\n{answers_table(rows)}", draw_answers(rows, title)


def _finds(model: FolderModel, filler: Tensor, question: Question, random: np.random.Generator) -> bool:
    """Ask once: whether greedy decoding would write the value after the key."""
    key = "".join(chr(ord("a") + letter) for letter in random.integers(26, size=2))
    value = "".join(str(digit) for digit in random.integers(10, size=ANSWER))
    asked, answer = model.encode(f"<{key}="), model.encode(value)
    needle = [*asked, *answer, *model.encode(">")]
    room = question.length + 1 - len(needle) - len(asked) - len(answer)
    if not 0 <= room <= len(filler):
        raise ConfigError(f"lengths must hold a needle and a question, got {question.length}, {-room} tokens too few")
    start = int(random.integers(len(filler) - room + 1))
    planted = plant_tokens(filler[start : start + room].tolist(), needle, asked, question.depth)
    tokens = torch.tensor([[*planted, *answer]])
    likeliest = model.logits(tokens[:, :-1])[0, -len(answer) :].argmax(-1).tolist()
    return likeliest == answer


def _streaming(command: EvaluateCommand, model: FolderModel, text: Text) -> tuple[Any, str, bytes | None]:
    asked = command.folder
    if not model.patched:
        reason = "not run: keys are dropped by linbias's cache, which needs a model that attends through linbias"
        return {"why_not": reason}, reason, None
    tokens = model.tokens(text, asked.tokens * asked.texts + 1)
    count = (len(tokens) - 1) // asked.tokens
    if not count or asked.tokens <= asked.window + asked.sinks:
        raise ConfigError(
            f"tokens must be more than window and sinks, {asked.window + asked.sinks:,}, and at most the text's "
            f"{len(tokens) - 1:,}, got {asked.tokens:,}"
        )
    texts = [tokens[n * asked.tokens : (n + 1) * asked.tokens + 1][None] for n in range(count)]
    found = Streaming(
        curves=curves(model.streaming(asked.window, asked.sinks), texts, asked.window),
        title=model.path.name,
        unit="token",
        window=asked.window,
        texts=count,
        tokens=asked.tokens,
        notes=(),
        facts={},
    )
    return asdict(found), streaming_text(found), draw_streaming(found)


def _numerics(command: EvaluateCommand, model: FolderModel, length: int) -> tuple[Any, str, None]:
    slopes = model.slopes()
    if slopes is None:
        reason = "not run: the slopes of this family are not known here"
        return {"why_not": reason}, reason, None
    asked = NumericsCommand(length=length, **slopes)
    found = numerics(asked)
    names = ("pairs", "last_row", "normalised")
    means = [{"limit": each.limit, **dict(zip(names, each.means(), strict=True))} for each in found]
    return means, numerics_text(asked, found), None
