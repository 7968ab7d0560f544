# SPDX-License-Identifier: Apache-2.0
"""Backend triton on a GPU, beside its peers: python -m benchmarks.gpu [--out gpu.json]

Needs torch, triton and numpy; stops adding lengths after five minutes. First a part of the conformance problems against
float64 on this GPU: a kernel that is wrong is not timed. Then B=1, H=32, bf16, causal, normal inputs: forward, forward
and backward, and decode of one token with key bounds, beside torch's SDPA without a bias (the best of its backends),
FlexAttention compiled with an ALiBi score_mod, and flash-attn with ALiBi if it is installed. Fractions are of the bf16
matrix rate and the copy bandwidth measured here. `dense` is triton with tolerance=0, which skips nothing.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from linbias import alibi_attention, alibi_slopes, key_bounds
from linbias.backends import triton as backend
from linbias.interop import flex_score_mod
from linbias.testing import PROBLEMS, conform, make_inputs

HEADS = 32
LENGTHS = tuple(1024 * 2**n for n in range(1, 8))
BUDGET = 300.0

Call = Callable[[], Any]


def conformance() -> int:
    """Every eighth problem that the backend runs, by `linbias.testing.conform`."""
    ran = 0
    for case in PROBLEMS[::8]:
        if backend.why_not(make_inputs(case, "cuda").resolve()[0]) is None:
            conform(case, "triton", "cuda")
            ran += 1
    return ran


def milliseconds(call: Call, repeats: int = 5) -> float:
    """The median of a few runs after one that compiles."""
    call()
    times: list[float] = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]


def rates() -> dict[str, float]:
    """bf16 products a second of a large matmul, and bytes a second of a copy."""
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    return {
        "products": 2 * 8192**3 / (1e-3 * milliseconds(lambda: matrix @ matrix)),
        "bytes": 2 * 4 * source.numel() / (1e-3 * milliseconds(lambda: target.copy_(source))),
    }


def forwards(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, flex: Any) -> dict[str, Call]:
    """Each peer's forward of one causal call."""
    slopes, length = alibi_slopes(HEADS, device="cuda"), query.shape[2]
    found: dict[str, Call] = {
        "triton": lambda: alibi_attention(query, key, value, slopes, causal=True, backend="triton"),
        "dense": lambda: alibi_attention(query, key, value, slopes, causal=True, backend="triton", tolerance=0.0),
        "sdpa": lambda: scaled_dot_product_attention(query, key, value, is_causal=True),
    }
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
    score_mod = flex_score_mod(slopes)
    found["flex"] = lambda: flex(query, key, value, score_mod=score_mod, block_mask=mask)
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return found
    rows = tuple(each.transpose(1, 2) for each in (query, key, value))
    return found | {"flash": lambda: flash_attn_func(*rows, causal=True, alibi_slopes=slopes)}


def decodes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> dict[str, Call]:
    """One token after all the others."""
    slopes, bounds = alibi_slopes(HEADS, device="cuda"), key_bounds(key)
    call: Any = {"causal": True, "backend": "triton"}
    return {
        "triton": lambda: alibi_attention(query, key, value, slopes, key_bounds=bounds, **call),
        "dense": lambda: alibi_attention(query, key, value, slopes, tolerance=0.0, **call),
        "sdpa": lambda: scaled_dot_product_attention(query, key, value),
    }


def with_backward(call: Call, inputs: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> Call:
    def run() -> None:
        out = call()
        torch.autograd.grad(out, inputs, gradient if out.shape == gradient.shape else gradient.transpose(1, 2))

    return run


def timed(calls: dict[str, Call], **row: Any) -> dict[str, Any]:
    """Milliseconds by name; what fails says why and does not stop the others."""
    for name, call in calls.items():
        try:
            row[name] = round(milliseconds(call), 4)
        except (RuntimeError, torch.OutOfMemoryError) as reason:
            row[name] = None
            print(f"{name}: {str(reason).splitlines()[0]}")
    print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    return row


def rows_of(length: int, dim: int, flex: Any) -> list[dict[str, Any]]:
    """Forward, forward and backward, decode."""
    query, key, value, gradient = torch.randn(4, 1, HEADS, length, dim, device="cuda", dtype=torch.bfloat16)
    size = {"tokens": length, "dim": dim}
    made = [timed(forwards(query, key, value, flex), kind="forward", **size)]
    inputs = tuple(each.requires_grad_() for each in (query.clone(), key.clone(), value.clone()))
    calls = {name: with_backward(call, inputs, gradient) for name, call in forwards(*inputs, flex).items()}
    made.append(timed(calls, kind="backward", **size))
    return [*made, timed(decodes(query[:, :, -1:].contiguous(), key, value), kind="decode", **size)]


def table(rows: list[dict[str, Any]], measured: dict[str, float]) -> str:
    """Ratios to triton's time, and what part of the machine the dense kernels use."""
    lines = ["kind | D | tokens | triton ms | SDPA / triton | Flex / dense | flash / triton | dense, of the rate"]
    for row in rows:
        pairs = HEADS * row["tokens"] ** 2 / 2
        work = {"forward": 4 * pairs * row["dim"], "backward": 14 * pairs * row["dim"]}.get(row["kind"])
        rate = "products" if work else "bytes"
        work = work or 4 * HEADS * row["tokens"] * row["dim"]

        def ratio(above: str, below: str, row: dict[str, Any] = row) -> str:
            return f"{row[above] / row[below]:.2f}" if row.get(above) and row.get(below) else ""

        used = f"{work / measured[rate] / (1e-3 * row['dense']):.2f}" if row["dense"] else ""
        ratios = [ratio("sdpa", "triton"), ratio("flex", "dense"), ratio("flash", "triton"), used]
        lines.append(" | ".join([row["kind"], str(row["dim"]), str(row["tokens"]), str(row["triton"]), *ratios]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a GPU; without one: benchmarks.gpu_aot and benchmarks.gpu_paper")
    start = time.monotonic()
    print(f"{conformance()} problems conform")
    measured, rows = rates(), []
    flex = torch.compile(flex_attention, dynamic=False)
    for length in LENGTHS:
        for dim in (64, 128):
            if time.monotonic() - start < BUDGET:
                rows += rows_of(length, dim, flex)
    print(table(rows, measured))
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rates": measured, "rows": rows}
    out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
