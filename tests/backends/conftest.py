# SPDX-License-Identifier: Apache-2.0
"""How many threads and which instructions a test of the kernels runs with."""

import pytest
import torch

from linbias.backends import native


@pytest.fixture
def threads():
    """Sets torch's thread count, which the kernels follow, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One build of the kernels after the other, where the processor runs it."""
    from linbias import _native

    if not _native.has_variant(request.param):
        pytest.skip(f"this processor lacks the instructions of {request.param}")
    monkeypatch.setattr(native, "_variant", request.param)
    return request.param
