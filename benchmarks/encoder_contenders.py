# SPDX-License-Identifier: Apache-2.0
"""One contender of `benchmarks.encoders` in its process: a model, one text, and a pass for every line it reads."""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.memory import peak_mib
from linbias.hf import mlp
from linbias.hf.models import encoder, jina, mosaic
from linbias.lab.bench import timing

OURS, DENSE, SDPA, ONNX, PRODUCTS = "linbias", "dense formula", "dense, SDPA", "ONNX Runtime", "linear layers alone"
TENSORS = {DENSE: 4, SDPA: 2, ONNX: 6}
"""Tensors of heads * tokens^2 that live at once: the bias that the published code keeps, and what is made of it."""
WARM = 64


def build(shape: str, layers: int) -> Any:
    """A random model in eval mode; the same in every process."""
    torch.manual_seed(0)
    if shape == "DNABERT-2":
        return mosaic.MosaicBertModel(mosaic.MosaicBertConfig(vocab_size=4096, num_hidden_layers=layers)).eval()
    config = jina.JinaBertConfig(vocab_size=30528, num_hidden_layers=layers, feed_forward_type="geglu")
    return jina.JinaBertModel(config).eval()


def bias_of(slopes: Tensor, query: Tensor) -> Tensor:
    """(1, H, T, T): -m |i - j|."""
    # Not arange(T), which an export would make a constant.
    places = torch.ones_like(query[0, 0, :, 0]).cumsum(0)
    return (-slopes[:, None, None] * (places[:, None] - places).abs())[None]


def dense_attention(fused: bool) -> Callable[..., tuple[Tensor, None]]:
    """What the published code does: a bias that is kept from pass to pass, and torch's own operations."""
    kept: dict[int, Tensor] = {}

    def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, _: Any) -> tuple[Tensor, None]:
        tokens = query.shape[2]
        if tokens not in kept:
            kept.clear()
            kept[tokens] = bias_of(mask.slopes, query)
        if fused:
            out = nn.functional.scaled_dot_product_attention(query, key, value, kept[tokens], scale=layer.score_scale)
        else:
            scores = query @ key.transpose(-1, -2) * layer.score_scale
            out = (scores + kept[tokens]).softmax(-1) @ value
        return out.transpose(1, 2).flatten(2), None

    return attend


def make_dense(model: Any, fused: bool) -> Any:
    """`model` with the arithmetic of the published code: attention over all pairs, the MLP in one piece."""
    encoder.attend_in_layer = dense_attention(fused)
    mlp._BLOCK = 2**60  # pyright: ignore[reportPrivateUsage]
    return model


class _Exported(nn.Module):
    """Ids in, vectors out, the bias computed of the number of tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).last_hidden_state


def export(model: Any, path: Path) -> None:
    """The dense model as ONNX, for any number of tokens."""

    def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, _: Any) -> tuple[Tensor, None]:
        scores = query @ key.transpose(-1, -2) * layer.score_scale + bias_of(mask.slopes, query)
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2), None

    encoder.attend_in_layer = attend
    mlp._BLOCK = 2**60  # pyright: ignore[reportPrivateUsage]
    sample = torch.ones(1, WARM, dtype=torch.int64)
    dynamic = {"ids": {1: torch.export.Dim("tokens", min=2)}}
    with torch.no_grad():
        torch.onnx.export(
            _Exported(model),
            (sample,),
            path,
            input_names=["ids"],
            output_names=["vectors"],
            dynamic_shapes=dynamic,
            dynamo=True,
            verbose=False,
        )


def onnx_pass(model: Any, threads: int) -> Callable[[Tensor], Any]:
    """A pass of ONNX Runtime over an export of `model`, in its default optimisation."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export(model, path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda ids: session.run(None, {"ids": ids.numpy()})[0]


def products_pass(model: Any) -> Callable[[Tensor], Any]:
    """The products of the linear layers with as many rows, and nothing between them."""
    layers = [part for part in model.encoder.modules() if isinstance(part, nn.Linear)]

    def run(ids: Tensor) -> None:
        rows = {layer.in_features: torch.ones(1, ids.shape[1], layer.in_features) for layer in layers}
        for layer in layers:
            layer(rows[layer.in_features])

    return run


def pass_of(name: str, shape: str, layers: int, threads: int) -> Callable[[Tensor], Any]:
    """ids (1, T) -> vectors (1, T, width), by the contender's name."""
    model = build(shape, layers)
    if name == ONNX:
        return onnx_pass(model, threads)
    if name == PRODUCTS:
        return products_pass(model)
    if name in (DENSE, SDPA):
        model = make_dense(model, name == SDPA)
    return lambda ids: model(ids).last_hidden_state


def main() -> None:
    name, shape = sys.argv[1:3]
    layers, length, threads = map(int, sys.argv[3:])
    torch.set_num_threads(threads)
    ids = torch.randint(1, 4000, (1, length), generator=torch.Generator().manual_seed(1))
    run = pass_of(name, shape, layers, threads)
    with torch.inference_mode():
        run(ids[:, :WARM])
        for _ in sys.stdin:
            taken = timing.seconds(lambda: run(ids))
            print(json.dumps({"seconds": taken, "peak_gb": peak_mib() * 2**20 / 1e9}), flush=True)


if __name__ == "__main__":
    main()
