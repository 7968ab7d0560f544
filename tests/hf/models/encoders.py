# SPDX-License-Identifier: Apache-2.0
"""What the tests of the published encoders share: random models, and in numpy the parts of their formulas.

The formulas share no code with the models.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("safetensors", reason="safetensors is missing: pip install 'linbias[hf]'")


def randomised(model: Any) -> Any:
    """In eval mode, with weights large enough that content, bias and norms all matter."""
    model.eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            norm = parameter.dim() == 1 and label.endswith("weight")
            parameter.normal_(0, 0.2 if parameter.dim() == 1 else 1.5 / math.sqrt(parameter.shape[-1]))
            parameter.add_(1.0 if norm else 0.0)
    return model


def lengths_mask(*lengths: int, side: str) -> Tensor:
    """(B, T) mask of texts of these lengths, padded to the longest on the left or right."""
    longest = max(lengths)
    rows = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
    return rows if side == "left" else rows.flip(1)


def weights_of(model: Any) -> dict[str, np.ndarray]:
    """float64."""
    return {name: part.detach().double().numpy() for name, part in model.state_dict().items()}


def linear(weights: dict[str, np.ndarray], name: str, hidden: np.ndarray) -> np.ndarray:
    return hidden @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(weights: dict[str, np.ndarray], name: str, hidden: np.ndarray, eps: float = 1e-12) -> np.ndarray:
    centred = hidden - hidden.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


# The authors' slopes, by hand: 2^(-8h/c) for the power of two below, then every other one of the next block.
SLOPES = {
    2: [2**-4, 2**-8],
    3: [2**-4, 2**-8, 2**-2],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
}


def attend(query: np.ndarray, key: np.ndarray, value: np.ndarray, heads: int) -> np.ndarray:
    """softmax(q k / sqrt(d) - m |i - j|) v, heads side by side: (T, width)."""
    size = query.shape[1] // heads
    distance = np.abs(np.arange(len(query))[:, None] - np.arange(len(key))[None])
    outs = []
    for head, slope in enumerate(SLOPES[heads]):
        part = slice(head * size, (head + 1) * size)
        scores = query[:, part] @ key[:, part].T / math.sqrt(size) - slope * distance
        shares = np.exp(scores - scores.max(1, keepdims=True))
        outs.append(shares / shares.sum(1, keepdims=True) @ value[:, part])
    return np.concatenate(outs, 1)


def jina(
    weights: dict[str, np.ndarray], ids: np.ndarray, types: np.ndarray, *, heads: int, code: bool, kind: str
) -> np.ndarray:
    """JinaBERT's vectors of one text without padding, (T,) -> (T, width); `code`: base-code's layout."""
    hidden = _embedded(weights, ids, types)
    for name in _layers(weights):
        query, key, value = (
            linear(weights, f"{name}.attention.self.{part}", hidden) for part in ("query", "key", "value")
        )
        if code:
            query = layer_norm(weights, f"{name}.attention.self.layer_norm_q", query)
            key = layer_norm(weights, f"{name}.attention.self.layer_norm_k", key)
        projected = linear(weights, f"{name}.attention.output.dense", attend(query, key, value, heads))
        attended = layer_norm(weights, f"{name}.attention.output.LayerNorm", projected + hidden)
        act = (lambda x: np.maximum(x, 0)) if kind == "reglu" else gelu
        fed = _code_fed if code else _jina_fed
        hidden = fed(weights, name, hidden, attended, act, kind == "original")
    return hidden


def mosaic(weights: dict[str, np.ndarray], ids: np.ndarray, types: np.ndarray, *, heads: int) -> np.ndarray:
    """The MosaicBERT line's vectors of one text without padding, (T,) -> (T, width)."""
    hidden = _embedded(weights, ids, types)
    for name in _layers(weights):
        query, key, value = np.split(linear(weights, f"{name}.attention.self.Wqkv", hidden), 3, axis=1)
        projected = linear(weights, f"{name}.attention.output.dense", attend(query, key, value, heads))
        attended = layer_norm(weights, f"{name}.attention.output.LayerNorm", projected + hidden)
        hidden = _jina_fed(weights, name, hidden, attended, gelu, False)
    return hidden


def _layers(weights: dict[str, np.ndarray]) -> list[str]:
    return sorted({name[: name.index(".", 14)] for name in weights if name.startswith("encoder.layer.")})


def _embedded(weights: dict[str, np.ndarray], ids: np.ndarray, types: np.ndarray) -> np.ndarray:
    words, kinds = (weights[f"embeddings.{part}_embeddings.weight"] for part in ("word", "token_type"))
    return layer_norm(weights, "embeddings.LayerNorm", words[ids] + kinds[types])


def _jina_fed(
    weights: dict[str, np.ndarray], name: str, _: np.ndarray, attended: np.ndarray, act: Any, plain: bool
) -> np.ndarray:
    if plain:
        middle = act(linear(weights, f"{name}.intermediate.dense", attended))
        out = linear(weights, f"{name}.output.dense", middle)
        return layer_norm(weights, f"{name}.output.LayerNorm", out + attended)
    gate, up = np.split(attended @ weights[f"{name}.mlp.gated_layers.weight"].T, 2, axis=1)
    return layer_norm(weights, f"{name}.mlp.layernorm", linear(weights, f"{name}.mlp.wo", act(gate) * up) + attended)


def _code_fed(
    weights: dict[str, np.ndarray], name: str, hidden: np.ndarray, attended: np.ndarray, act: Any, plain: bool
) -> np.ndarray:
    attended = layer_norm(weights, f"{name}.layer_norm_1", hidden + attended)
    if plain:
        middle = act(attended @ weights[f"{name}.mlp.up_layer.weight"].T)
    else:
        up, gate = np.split(attended @ weights[f"{name}.mlp.up_gated_layer.weight"].T, 2, axis=1)
        middle = up * act(gate)
    return layer_norm(weights, f"{name}.layer_norm_2", attended + linear(weights, f"{name}.mlp.down_layer", middle))


def assert_close(found: Tensor, expected: np.ndarray) -> None:
    """Of a model in float64: two ways to sum some tens of terms, in two layers, part by far less than 2**12 eps."""
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=2**-40 * np.abs(expected).max())


def check_round_trip(model: Any, folder: Path, names: set[str]) -> None:
    """Saved under exactly these names, and read back to the bit with nothing missing and nothing left."""
    from safetensors import safe_open

    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as stored:
        assert set(stored.keys()) == names
    again, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    for name, part in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], part), name
