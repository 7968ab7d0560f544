# SPDX-License-Identifier: Apache-2.0
"""The fuzzers, each for a while from a fresh seed, and whether they would find anything."""

import math
import secrets
from typing import Any

import pytest
import torch

from linbias.backends import tiled
from tests.fuzz import caches, calls, certificate
from tests.fuzz.__main__ import FUZZERS
from tests.fuzz.loop import Fuzzer, fuzz


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZERS)
def test_nothing_is_found_from_a_fresh_seed(name: str):
    seed = secrets.randbelow(2**31)
    print(f"{name}: seed {seed}")
    counts, findings = fuzz(FUZZERS[name], seed, seconds=20)
    print(counts)
    assert not findings, "\n".join(map(str, findings))
    assert counts["cases"] > 10


@pytest.mark.parametrize("fuzzer", [calls.FUZZER, caches.FUZZER, certificate.FUZZER], ids=list(FUZZERS))
def test_a_fault_is_found_and_made_smaller(fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch):
    """Calls of more than three keys lose a thousandth of their output and of their weight."""
    forward, output = tiled.forward, tiled.output

    def share(problem: Any) -> float:
        return 0.999 if problem.keys > 3 else 1.0

    monkeypatch.setattr(tiled, "forward", lambda problem, operands: _scaled(forward(problem, operands), share(problem)))
    monkeypatch.setattr(tiled, "output", lambda problem, operands: output(problem, operands) * share(problem))
    found: list[Any] = []
    seed = 1
    while not found:
        _, found = fuzz(fuzzer, seed, cases=1)
        seed += 1
        assert seed < 60, "sixty cases and nothing found"
    assert "tiled" in found[0].reason and found[0].seed == seed - 1


def _scaled(result: Any, share: float) -> Any:
    out = (result.out.to(torch.float64) * share).to(result.out.dtype)
    return result._replace(out=out, lse=result.lse + math.log(share))
