# SPDX-License-Identifier: Apache-2.0
"""What is installed, what this machine offers, and which backends can run here."""

from typing import Any

import torch

import linbias

from .environment import accelerators, machine, versions

_EXTRAS = {
    "tyro": "lab",
    "tqdm": "lab",
    "matplotlib": "lab",
    "jinja2": "lab",
    "safetensors": "lab",
    "transformers": "hf",
}


def examine() -> dict[str, Any]:
    """Return everything `linbias doctor` knows."""
    return {
        "versions": versions(),
        "machine": machine(),
        "accelerators": accelerators(),
        "backends": {device: _backends(device) for device in _devices()},
    }


def _devices() -> list[str]:
    return ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def _backends(device: str) -> dict[str, str]:
    """What each backend says of an ordinary causal call on `device`."""
    query = torch.zeros(1, 8, 128, 64, device=device)
    told = linbias.backends.explain(query, query, query, linbias.alibi_slopes(8, device=device), causal=True)
    lines = (line.split(maxsplit=1) for line in told.splitlines())
    return {name: verdict for name, verdict in lines}


def describe(found: dict[str, Any]) -> str:
    """Return the text that `linbias doctor` prints."""
    sections = [
        ("versions", [(name, version or _absent(name)) for name, version in found["versions"].items()]),
        ("machine", list(found["machine"].items())),
        ("devices", [("cpu", "always"), *found["accelerators"].items()]),
        *((f"backends, {device}", list(told.items())) for device, told in found["backends"].items()),
    ]
    width = max(len(name) for _, pairs in sections for name, _ in pairs)
    blocks = [
        "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in pairs)]) for title, pairs in sections
    ]
    return "\n\n".join(blocks)


def _absent(name: str) -> str:
    extra = _EXTRAS.get(name)
    return "not installed" + (f"; pip install 'linbias[{extra}]'" if extra else "")
