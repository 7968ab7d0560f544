# SPDX-License-Identifier: Apache-2.0
"""Backend triton: what it says of itself, its lists and its ledger; triton_matrix.py runs its kernels."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from linbias import BackendUnavailable, alibi_attention, alibi_slopes
from linbias.backends import triton
from linbias.backends.triton import judge
from linbias.backends.triton.judge import Table, fitting
from linbias.prepare import prepare
from linbias.semantics.blocks import dense
from linbias.semantics.problem import Problem
from linbias.testing import PROBLEMS, Case, make_inputs

MATRIX = Path(__file__).with_name("triton_matrix.py")
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")


def problem_of(**changes) -> Problem:
    return make_inputs(Case(causal=True)).resolve()[0]._replace(**changes)


def run_matrix(environment: dict[str, str]) -> int:
    """How many tests passed, in a process of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON_INTERPRET"))}
    command = [sys.executable, "-m", "pytest", str(MATRIX), "-q", "-p", "no:cacheprovider"]
    root = MATRIX.parents[2]
    done = subprocess.run(command, cwd=root, env=kept | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return int(re.findall(r"(\d+) passed", done.stdout)[-1])


@needs_triton
@pytest.mark.slow
def test_the_kernels_in_the_interpreter():
    assert run_matrix(INTERPRETED) > 80


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_on_this_gpu():
    assert run_matrix({}) > 200


def test_it_runs_on_gpus_and_says_so_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "runs on CUDA and ROCm tensors, got 'cpu'" in (triton.why_not(problem_of()) or "")
    query = torch.ones(1, 2, 5, 16)
    with pytest.raises(BackendUnavailable, match="backend 'triton' cannot run this call: runs on CUDA"):
        alibi_attention(query, query, query, alibi_slopes(2), causal=True, backend="triton")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "supports float16, bfloat16 and float32, got torch.float64"),
        ({"head_dim": 257}, "dims up to 256, got 257 and 16"),
        ({"value_dim": 264}, "dims up to 256, got 16 and 264"),
        ({"features": frozenset({"causal", "attn_mask"})}, "does not support attn_mask"),
    ],
)
def test_what_it_cannot_is_named(changes: dict, reason: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton, "INSTALLED", True)
    gpu = torch.device("cuda")
    assert triton.why_not(problem_of(device=gpu)) is None
    assert reason in (triton.why_not(problem_of(device=gpu, **changes)) or "")


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton, "INSTALLED", False)
    assert "pip install 'linbias[triton]'" in (triton.why_not(problem_of(device=torch.device("cuda"))) or "")


def test_lists_hold_what_is_visited_whole_tiles_first():
    visited = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()[None, None]
    whole = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0]]).bool()[None, None]
    made = judge._listed(visited, whole, 1, (1, 1))
    assert made.whole.flatten().tolist() == [2, 0, 1] and made.parts.flatten().tolist() == [1, 0, 4]
    rows = made.list[0, 0].tolist()
    assert rows[0][:2] == [0, 3] and rows[0][-1:] == [2]
    assert rows[2][:1] == [3] and rows[2][:0:-1] == [0, 1, 2, 4]
    assert made.order.tolist() == [2, 0, 1]


def test_heads_of_a_group_are_scheduled_together():
    visited = torch.zeros(1, 4, 2, 3, dtype=torch.bool)
    visited[0, 0, 1], visited[0, 3, 0, :2] = True, True
    made = judge._listed(visited, torch.zeros_like(visited), 2, (1, 1))
    assert made.order.tolist() == [1, 2, 0, 3]


def test_the_ladder_takes_the_small_and_leaves_the_large():
    shares = torch.tensor([0.9, 0.2, 0.1, 1e-3, torch.nan, torch.inf, 0.0, 3.0])
    fits, total = fitting(shares[None], -1)
    assert fits[0].tolist() == [False, True, True, True, False, False, True, False]
    assert total.item() == pytest.approx(0.301)
    fits, total = fitting(torch.full((1, 100), 0.011), -1)
    assert not fits.any() and total.item() == 0.0


@pytest.mark.parametrize("case", [case for case in PROBLEMS[::7] if case.mask is None], ids=str)
def test_tiles_that_are_left_out_or_called_whole_are(case: Case):
    """Against the dense definition: nothing visible outside the table's tiles, nothing hidden in a whole one."""
    problem, operands = make_inputs(case).resolve()
    if problem.queries * problem.keys * problem.batch == 0:
        pytest.skip("no tiles")
    table = Table.of(problem, operands, (16, 8))
    bias, visible = dense(operands, problem.options)
    visible = visible.expand(problem.batch, problem.heads, *visible.shape[2:])

    def pairs(tiles: torch.Tensor) -> torch.Tensor:
        spread = tiles.expand(problem.batch, problem.heads, *tiles.shape[2:])
        return spread.repeat_interleave(table.strip, 2).repeat_interleave(table.block, 3)[
            :, :, : problem.queries, : problem.keys
        ]

    assert not (visible & ~pairs(table.some)).any()
    assert not (pairs(table.whole) & ~visible).any()
    assert bool((table.pairs(table.every()) == pairs(table.some).sum((2, 3))).all())


def test_long_tables_are_coarser():
    query = torch.ones(1, 1, 4096, 1)
    problem, operands = prepare(query, query, query, alibi_slopes(1), {"causal": True})
    table = Table.of(problem, operands, (2, 2))
    assert (table.strip, table.block) == (8, 8)
