# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels compile to, without a GPU: python -m benchmarks.gpu_aot [--out aot.json]

Calls are made on CPU tensors with the launch replaced by `triton.compile` for sm_80, sm_90 and gfx942. Recorded of each
kernel: registers, bytes spilled, shared memory, and how many matrix instructions its text holds. Fails if a kernel does
not compile, or uses more shared memory than the device has.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from linbias import alibi_slopes
from linbias.backends import triton as backend
from linbias.prepare import prepare

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def _calls() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, sizes and options of each configuration."""
    for dim in (64, 128):
        yield f"causal D={dim} bf16", {"dim": dim}, {"causal": True}
    yield "causal D=256 bf16", {"dim": 256}, {"causal": True}
    yield "causal D=80 fp16", {"dim": 80, "dtype": torch.float16}, {"causal": True}
    yield "causal D=64 fp32", {"dim": 64, "dtype": torch.float32}, {"causal": True}
    yield "decode D=128 bf16", {"dim": 128, "queries": 1}, {"causal": True}
    everything: dict[str, Any] = {
        "causal": True,
        "window": (99, 0),
        "sinks": 3,
        "prefix": 5,
        "key_mask": torch.ones(2, 256, dtype=torch.bool),
        "query_segments": torch.zeros(256, dtype=torch.int64),
        "key_segments": torch.zeros(256, dtype=torch.int64),
        "key_positions": torch.arange(256),
        "future_slopes": alibi_slopes(4),
        "unbiased": 2,
        "softcap": 20.0,
        "dropout_p": 0.1,
    }
    yield "every option D=64 bf16", {"dim": 64}, everything
    points = torch.rand(256, 2)
    yield "euclidean D=64 bf16", {"dim": 64}, {"causal": False, "metric": "euclidean", "key_positions": points}


def _record(
    sizes: dict[str, Any], options: dict[str, Any], arch: int = 90
) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The launches of one forward and backward."""
    made: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    dim, dtype = sizes["dim"], sizes.get("dtype", torch.bfloat16)
    query = torch.zeros(2, 4, sizes.get("queries", 256), dim, dtype=dtype)
    key = torch.zeros(2, 2, 256, dim, dtype=dtype)
    problem, operands = prepare(query, key, key, alibi_slopes(4), options)  # pyright: ignore

    def keep(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], own: dict[str, Any]) -> None:
        made.append((kernel, args, own))

    with mock.patch.multiple(backend.launch, run=keep, capability=lambda device: divmod(arch, 10)):
        result = backend.forward(problem, operands)
        if problem.queries > 1:
            grads = (torch.zeros_like(result.out), torch.zeros_like(result.lse))
            needs = (True, True, True, True, operands.future_slopes is not None)
            backend.backward(problem, operands, *result[:3], *grads, needs)
    return made


def _described(value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    """An argument's type as Triton's launcher would find it, with what it would be specialised on."""
    if isinstance(value, tuple):
        parts = [_described(part, (*path, i), constants, attributes) for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if value is None or (isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, torch.Tensor) or value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compiled(kernel: Any, args: tuple[Any, ...], own: dict[str, Any], target: GPUTarget) -> Any:
    """What one launch compiles to for a target."""
    options = {name: own[name] for name in ("num_warps", "num_stages") if name in own}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    signature: dict[str, Any] = {}
    for i, name in enumerate(kernel.arg_names):
        if i < len(args):
            signature[name] = _described(args[i], (i,), constants, attributes)
        else:
            signature[name], constants[(i,)] = "constexpr", own[name]
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)


def figures(binary: Any, target: GPUTarget) -> dict[str, int]:
    """Registers, spilled bytes, shared memory and matrix instructions."""
    if target.backend == "hip":
        text = binary.asm["amdgcn"]
        registers, spills = (
            int(re.search(rf"\.{name}: +(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")
        )
        return {
            "registers": registers,
            "spilled": 4 * spills,
            "shared": binary.metadata.shared,
            "matrix": len(re.findall(r"\bv_mfma_", text)),
        }
    text, arch = binary.asm["ptx"], f"sm_{target.arch}" + ("a" if target.arch >= 90 else "")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(text)
        command = [
            get_ptxas(target.arch).path,
            "-v",
            f"--gpu-name={arch}",
            str(source),
            "-o",
            str(Path(folder) / "kernel.cubin"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = done.stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", told)[1]),
        "spilled": int(re.search(r"(\d+) bytes spill stores", told)[1]),
        "shared": binary.metadata.shared,
        "matrix": len(re.findall(r"\bwgmma\.mma_async|\bmma\.sync", text)),
    }


def report(only: str = "") -> list[dict[str, Any]]:
    """A record for every kernel of every configuration and target."""
    records: list[dict[str, Any]] = []
    for name, sizes, options in _calls():
        if only not in name:
            continue
        for place, (target, room) in TARGETS.items():
            seen: set[tuple[str, Any]] = set()
            for kernel, args, own in _record(sizes, options, target.arch if target.backend == "cuda" else 0):
                what = kernel.__name__.removesuffix("_kernel") + ("" if own.get("VALUES", True) else " (mass)")
                if (what, own.get("SPLITS")) in seen or "BN" not in own:
                    continue
                seen.add((what, own.get("SPLITS")))
                found = figures(compiled(kernel, args, own, target), target)
                assert found["shared"] <= room, f"{what} of {name} on {place}: {found['shared']} bytes of {room} shared"
                tile = f"{own['BM']}x{own['BN']}x{own['num_warps']}x{own['num_stages']}"
                records.append({"call": name, "kernel": what, "target": place, "tile": tile, **found})
                print("  ".join(map(str, records[-1].values())), flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="part of a configuration's name")
    chosen = parser.parse_args()
    records = report(chosen.only)
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
