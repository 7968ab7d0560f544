# SPDX-License-Identifier: Apache-2.0
"""What the command line does for each evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..data import printable
from ..extras import need
from ..mpt import export_mpt
from ..storage import write_text
from .attention import attention_text, look, write_attention
from .config import AttentionCommand, ExportCommand, NumericsCommand, RetrieveCommand, StreamCommand
from .numerics import numerics, numerics_json, numerics_text
from .retrieval import retrieve
from .retrieval_show import retrieval_text, write_retrieval
from .streaming import stream, streaming_text, write_streaming


def _numerics(command: NumericsCommand) -> tuple[str, list[Path]]:
    found = numerics(command)
    files = [] if command.json is None else [command.json]
    for path in files:
        write_text(path, numerics_json(command, found))
    return numerics_text(command, found), files


def _export(command: ExportCommand) -> tuple[str, list[Path]]:
    return f"exported {printable(command.checkpoint)} as MPT", export_mpt(command)


def _retrieve(command: RetrieveCommand) -> tuple[str, list[Path]]:
    # Missing packages are told before minutes of work, not after.
    for package in ("matplotlib", "safetensors", "tqdm"):
        need(package)
    found = retrieve(command)
    return retrieval_text(found), write_retrieval(found, command.out)


def _stream(command: StreamCommand) -> tuple[str, list[Path]]:
    need("matplotlib")
    found = stream(command)
    return streaming_text(found), write_streaming(found, command.out)


def _attention(command: AttentionCommand) -> tuple[str, list[Path]]:
    need("matplotlib")
    found = look(command)
    return attention_text(found), write_attention(found, command.out)


EVALUATIONS: dict[str, tuple[type, Callable[[Any], tuple[str, list[Path]]]]] = {
    "retrieve": (RetrieveCommand, _retrieve),
    "stream": (StreamCommand, _stream),
    "attention": (AttentionCommand, _attention),
    "numerics": (NumericsCommand, _numerics),
    "export": (ExportCommand, _export),
}
"""Commands by name: what they can be told, and what writes its files and returns what to print."""
