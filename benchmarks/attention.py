# SPDX-License-Identifier: Apache-2.0
"""Attention against its peers, in one run: ``python benchmarks/attention.py [--quick] [--threads 1] ...``.

Every figure is a ratio to torch's `scaled_dot_product_attention(is_causal=True)` *without any bias*, timed in turns
with it in the same process, because machines and their load differ more than implementations do. The others all
compute ALiBi on the same inputs: B=1, H heads of D=64, fp32, standard normal, default slopes, causal.

With one thread, time is the process's own CPU time, so that other load on the machine counts less; with more, it is
wall time. Nothing is timed that has not first solved the conformance problems below.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

import linbias
from linbias import alibi_attention, alibi_bias, alibi_slopes, backends
from linbias.testing import Case, conform

HEADS, DIM = 12, 64
DENSE_LIMIT = 4096
"""Longest input for peers whose memory grows with its square."""
CHECKS = (
    Case(batch=1, heads=12, kv_heads=12, queries=333, keys=333, head_dim=64, value_dim=64, causal=True),
    Case(batch=1, heads=3, kv_heads=3, queries=1025, keys=1025, head_dim=64, value_dim=64, causal=True),
    Case(batch=2, heads=6, kv_heads=2, queries=257, keys=300, head_dim=64, value_dim=64, causal=True),
)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Figure:
    """One implementation at one length."""

    name: str
    length: int
    direction: str
    seconds: float
    baseline_seconds: float
    error: float | None = None
    """Largest difference of the output from float64, on the rows and lengths where that was affordable."""

    @property
    def ratio(self) -> float:
        """Time of causal SDPA without bias over this one's: above 1 is faster."""
        return self.baseline_seconds / self.seconds


@dataclass
class Report:
    """Everything one run found."""

    machine: dict[str, str | float | int]
    figures: list[Figure] = field(default_factory=list)
    visited: dict[int, float] = field(default_factory=dict)
    """Share of the causal pairs that `tiled` computes, by length."""
    memory_kib: dict[str, dict[int, int]] = field(default_factory=dict)
    """Growth of the peak resident size over a call, in a fresh process, by implementation and length."""
    not_run: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """As JSON; a reader sees the old file or the new one, never half of it."""
        made = asdict(self)
        for row, figure in zip(made["figures"], self.figures, strict=True):
            row["ratio"] = figure.ratio
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(made, indent=2) + "\n")
        part.replace(path)


# --- the implementations ---------------------------------------------------------------------------------------------


def plain_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """No bias at all: the baseline."""
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def of_linbias(backend: str, slopes: Tensor) -> Attention:
    return lambda query, key, value: alibi_attention(query, key, value, slopes, causal=True, backend=backend)


def dense_bias(length: int, slopes: Tensor) -> Tensor:
    """(1, H, N, N): ALiBi with the causal mask folded in."""
    places = torch.arange(length)
    return alibi_bias(slopes, places, places).masked_fill(places[:, None] < places, -torch.inf)


def dense_mask(length: int, slopes: Tensor) -> Attention:
    """SDPA with a ready-made mask; making it is not timed."""
    bias = dense_bias(length, slopes)
    return lambda query, key, value: scaled_dot_product_attention(query, key, value, attn_mask=bias)


def eager(length: int, slopes: Tensor) -> Attention:
    """The formula as most models write it, with a ready-made bias."""
    bias = dense_bias(length, slopes)
    return lambda query, key, value: torch.softmax(query @ key.mT / DIM**0.5 + bias, -1) @ value


def extra_channel(length: int, slopes: Tensor) -> Attention:
    """The bias as one more channel of query and key: fast, but far positions lose the digits of their scores."""
    ramp = slopes[:, None, None] * torch.arange(length, dtype=torch.float32)[:, None] * DIM**0.5

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        wide_query = pad(query, (0, 1), value=1.0)
        wide_key = torch.cat([key, ramp.expand(*key.shape[:3], 1)], -1)
        out = scaled_dot_product_attention(wide_query, wide_key, pad(value, (0, 1)), is_causal=True, scale=DIM**-0.5)
        return out[..., :DIM]

    return attend


def flex(length: int, slopes: Tensor) -> Attention:
    """Compiled FlexAttention with a causal block mask and ALiBi as its score_mod."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def score_mod(score: Tensor, _b: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score - slopes[head] * (row - column)

    mask = create_block_mask(lambda _b, _h, row, column: row >= column, 1, 1, length, length, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda query, key, value: compiled(query, key, value, score_mod=score_mod, block_mask=mask)  # pyright: ignore


PEERS: dict[str, Callable[[int, Tensor], Attention]] = {
    "SDPA, dense ALiBi mask": dense_mask,
    "FlexAttention, compiled": flex,
    "eager formula": eager,
    "extra channel": extra_channel,
}
_QUADRATIC = ("SDPA, dense ALiBi mask", "eager formula")
_FORWARD_ONLY = ("FlexAttention, compiled",)


# --- measuring -------------------------------------------------------------------------------------------------------


def seconds(function: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    function()
    return clock() - start


def in_turns(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The best time of each, taken in turns, so that all meet the same load."""
    best = dict.fromkeys(functions, float("inf"))
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            best[name] = min(best[name], seconds(function))
    return best


def both_ways(attend: Attention, inputs: tuple[Tensor, Tensor, Tensor], grad: Tensor) -> Callable[[], object]:
    leaves = tuple(tensor.clone().requires_grad_() for tensor in inputs)
    return lambda: torch.autograd.grad(attend(*leaves), leaves, grad)


def error_of(attend: Attention, inputs: tuple[Tensor, Tensor, Tensor], slopes: Tensor) -> float:
    """Against float64 on the last 64 rows, which see the most keys."""
    query, key, value = (tensor.double() for tensor in inputs)
    rows = min(64, query.shape[2])
    exact = alibi_attention(query[:, :, -rows:], key, value, slopes.double(), causal=True, backend="reference")
    return float((attend(*inputs)[:, :, -rows:].double() - exact).abs().max())


def sgemm_rate() -> float:
    """GFLOP/s of a 1024^3 product through torch."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / in_turns({"product": lambda: left @ right}, 10)["product"] / 1e9


def read_bandwidth() -> float:
    """GB/s of torch.sum over 256 MiB."""
    data = torch.ones(2**26)
    return data.numel() * 4 / in_turns({"sum": data.sum}, 5)["sum"] / 1e9


def contenders(length: int, slopes: Tensor, names: list[str], report: Report) -> dict[str, Attention]:
    """The backends asked for and every peer that can run at this length, each run once."""
    found = {f"linbias {name}": of_linbias(name, slopes) for name in names}
    probe = torch.randn(1, HEADS, length, DIM)
    for name, make in PEERS.items():
        if name in _QUADRATIC and length > DENSE_LIMIT:
            report.not_run[f"{name} at {length}"] = f"needs memory for N x N; beyond N = {DENSE_LIMIT} it is left out"
            continue
        try:
            attend = make(length, slopes)
            attend(probe, probe, probe)
        except Exception as reason:  # a peer may fail in any way; the report says how
            report.not_run[f"{name} at {length}"] = f"{type(reason).__name__}: {str(reason).splitlines()[0][:200]}"
            continue
        found[name] = attend
    return found


def measure(length: int, names: list[str], rounds: int, report: Report) -> None:
    """All figures of one length."""
    torch.manual_seed(length)
    slopes = alibi_slopes(HEADS)
    inputs = tuple(torch.randn(1, HEADS, length, DIM) for _ in range(3))
    grad = torch.randn_like(inputs[0])
    attends = contenders(length, slopes, names, report)
    with torch.no_grad():
        calls: dict[str, Callable[[], object]] = {"": lambda: plain_causal(*inputs)}
        calls |= {name: lambda attend=attend: attend(*inputs) for name, attend in attends.items()}
        times = in_turns(calls, rounds)
        errors = {name: error_of(attend, inputs, slopes) for name, attend in attends.items()}
    for name in attends:
        report.figures.append(Figure(name, length, "forward", times[name], times[""], errors[name]))
    trained = {name: attend for name, attend in attends.items() if name not in _FORWARD_ONLY}
    calls = {name: both_ways(attend, inputs, grad) for name, attend in (("", plain_causal), *trained.items())}
    times = in_turns(calls, max(1, rounds // 2))
    for name in trained:
        report.figures.append(Figure(name, length, "forward + backward", times[name], times[""]))
    if "tiled" in names:
        aux = alibi_attention(*inputs, slopes, causal=True, backend="tiled", return_aux=True)[1]
        report.visited[length] = float(aux.computed.sum()) / (HEADS * length * (length + 1) / 2)


MEMORY = """
import resource, sys, torch
torch.set_num_threads(1)
from torch.nn.functional import scaled_dot_product_attention
from linbias import alibi_attention, alibi_slopes
name, heads, length, dim = sys.argv[1], *map(int, sys.argv[2:])
def call(length):
    query, key, value = (torch.ones(1, heads, length, dim) for _ in range(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if name == "SDPA":
        scaled_dot_product_attention(query, key, value, is_causal=True)
    else:
        alibi_attention(query, key, value, alibi_slopes(heads), causal=True, backend=name)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
call(64)
print(call(length))
"""


def memory(name: str, length: int) -> int:
    """KiB by which one forward raises the peak resident size of a fresh process, its output included."""
    arguments = [sys.executable, "-c", MEMORY, name, str(HEADS), str(length), str(DIM)]
    return int(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)


# --- the run ---------------------------------------------------------------------------------------------------------


def show(report: Report) -> None:
    """The table: one row an implementation, one column a length."""
    lengths = sorted({figure.length for figure in report.figures})
    for direction in ("forward", "forward + backward"):
        chosen = [figure for figure in report.figures if figure.direction == direction]
        print(f"\n{direction}: time of causal SDPA without bias over ours (above 1 is faster)")
        print(f"{'':28}" + "".join(f"{length:>9}" for length in lengths) + "   error")
        for name in dict.fromkeys(figure.name for figure in chosen):
            row = {figure.length: figure for figure in chosen if figure.name == name}
            cells = "".join(f"{row[length].ratio:9.2f}" if length in row else f"{'-':>9}" for length in lengths)
            errors = [figure.error for figure in row.values() if figure.error is not None]
            print(f"{name:28}{cells}" + (f"   {max(errors):.1e}" if errors else ""))
        times = {figure.length: figure.baseline_seconds for figure in chosen}
        print(f"{'SDPA, no bias (ms)':28}" + "".join(f"{times[length] * 1e3:9.1f}" for length in lengths))
    if report.visited:
        print("\ntiled computes, of the causal pairs: " + ", ".join(f"{n}: {s:.3f}" for n, s in report.visited.items()))
    for name, sizes in report.memory_kib.items():
        grown = ", ".join(f"{length}: {size / 1024:.0f} MiB" for length, size in sizes.items())
        print(f"peak memory of one forward, {name}: {grown}")
    print(f"\n{report.machine}")
    for what, why in report.not_run.items():
        print(f"not run: {what}: {why}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short lengths, few rounds")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens; default 512 to 8192")
    parser.add_argument("--backends", nargs="+", help="default: tiled, and native where it can run")
    parser.add_argument("--rounds", type=int, help="times each is measured; default 7, 3 with --quick")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/attention.json"))
    return parser.parse_args()


def able(names: list[str] | None, report: Report) -> list[str]:
    """The backends to time: those that were asked for, or all fast ones that can; each checked first."""
    probe = torch.zeros(1, HEADS, 8, DIM)
    chosen: list[str] = []
    for name in names or [name for name in backends.available() if name != "reference"]:
        try:
            alibi_attention(probe, probe, probe, alibi_slopes(HEADS), causal=True, backend=name)
        except linbias.BackendUnavailable as reason:
            if names:
                raise
            report.not_run[f"linbias {name}"] = str(reason)
            continue
        for case in CHECKS:
            conform(case, name)
        chosen.append(name)
    return chosen


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    lengths = options.lengths or ([512, 1024] if options.quick else [512, 1024, 2048, 4096, 8192])
    rounds = options.rounds or (3 if options.quick else 7)
    report = Report(
        machine={
            "processor": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "linbias": linbias.__version__,
            "threads": options.threads,
            "sgemm_gflops": round(sgemm_rate(), 1),
            "read_gb_per_second": round(read_bandwidth(), 1),
        }
    )
    names = able(options.backends, report)
    for length in lengths:
        measure(length, names, rounds if length <= 4096 else max(1, rounds // 2), report)
        report.write(options.output)
    for name in (*names, "SDPA"):
        report.memory_kib[name] = {length: memory(name, length) for length in lengths}
    report.write(options.output)
    show(report)


if __name__ == "__main__":
    main()
