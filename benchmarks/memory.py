# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one call, each in a process of its own: ``python -m benchmarks.memory IMPLEMENTATION N B H``.

What the process held before the call does not count, nor, with ``--training``, what the call must return.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.harness import figure
from benchmarks.peers import PEERS
from linbias import alibi_slopes
from linbias.lab.bench.race import DIM, HEADS, PLAIN, Contender, Content
from linbias.lab.bench.record import Finding

_LENGTHS = (4096, 8192)
_WARM = 64


def in_fresh_process(implementation: str, length: int, batch: int, heads: int, *, training: bool = False) -> float:
    """Return MiB by which one call raises the peak resident size of a fresh process.

    Forward, output included; with `training` forward and backward, beyond output, lse and gradients.
    """
    command = [sys.executable, "-m", "benchmarks.memory", implementation, str(length), str(batch), str(heads)]
    command += ["--training"] if training else []
    root = Path(__file__).parents[1]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout)


def peaks(contenders: list[Contender]) -> list[Finding]:
    """Growth of the peak over one forward, output and any bias matrix included, by implementation and length."""
    found: list[Finding] = []
    for contender in (PLAIN, *contenders):
        for length in _LENGTHS:
            if length > contender.longest:
                continue
            try:
                grown = in_fresh_process(contender.name, length, 1, HEADS)
                found.append({"memory": contender.name, "length": length, "mib": grown})
            except subprocess.CalledProcessError as died:
                lines = str(died.stderr).strip().splitlines() or [f"ended with {died.returncode}"]
                found.append({"not_run": f"memory, {contender.name} at {length:,}", "why": lines[-1][:200]})
    return found


def beyond_results() -> list[Finding]:
    """Training memory of the native kernels beyond what they must return, for one text and for two."""
    what = "MiB beyond inputs, outputs and gradients, forward + backward, H=32, N=8,192"
    return [
        figure(f"{what}, B={batch}", in_fresh_process("linbias native", 8192, batch, 32, training=True), "<", 64)
        for batch in (1, 2)
    ]


def peak_mib() -> float:
    """Return MiB of memory that this process has held at most."""
    status = Path("/proc/self/status")
    if status.is_file():
        # Linux hands ru_maxrss on from the parent's memory through exec; VmHWM is this program's alone.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    import resource  # which Windows lacks

    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _grown(contender: Contender, length: int, batch: int, heads: int, training: bool) -> float:
    query, key, value = qkv = tuple(torch.ones(batch, heads, length, DIM, requires_grad=training) for _ in range(3))
    grad = torch.ones(batch, heads, length, DIM)
    content = Content("ones", query, key, value, alibi_slopes(heads))
    before = peak_mib()
    out = contender.prepare(content)(*qkv)
    if not training:
        return peak_mib() - before
    kept = torch.autograd.grad(out, qkv, grad)
    # lse and the bound of what was skipped are saved for the backward: one number each a row.
    returned = out.nbytes + sum(gradient.nbytes for gradient in kept) + 2 * out.nbytes // DIM
    return peak_mib() - before - returned / 2**20


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("implementation")
    parser.add_argument("sizes", type=int, nargs=3)
    parser.add_argument("--training", action="store_true")
    told = parser.parse_args()
    torch.set_num_threads(1)
    ours = [Contender.of_linbias(name) for name in ("native", "tiled", "reference")]
    (contender,) = (each for each in (PLAIN, *ours, *PEERS) if each.name == told.implementation)
    length, batch, heads = told.sizes
    # Once small, so that libraries are loaded and pools are made.
    _grown(contender, _WARM, batch, heads, told.training)
    print(_grown(contender, length, batch, heads, told.training))


if __name__ == "__main__":
    _main()
