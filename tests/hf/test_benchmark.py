# SPDX-License-Identifier: Apache-2.0
"""benchmarks/models.py completes a row of every sort, small: a row that fails there is only reported, not raised."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is missing: pip install 'linbias[hf]'")

from benchmarks import models

ROWS = [
    (work, family, kind) for family in models.UNPATCHED for work in models.WORK for kind in models.rows_of(work, family)
]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("work, family, kind", ROWS, ids=str)
def test_rows(work: str, family: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "READ_TOKENS", 16)  # a context of 40 repeats its keys
    found = models.WORK[work](family, kind, 40)
    if work == "stream":
        assert found["tokens"] == 16 + 40 and len(found["tokens_per_second"]) == 10
    else:
        assert found["tokens_per_second" if work == "decode" else "seconds"] > 0


@LINUX
@pytest.mark.slow
def test_processes_of_their_own(tmp_path: Path):
    output, sizes = tmp_path / "models.json", ["--lengths", "32", "--contexts", "--train", "--stream", "40"]
    options = ["--families", "mpt", "--kinds", models.PATCHED, models.OURS, *sizes, "--output", str(output)]
    command = [sys.executable, "benchmarks/models.py", *options]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], capture_output=True)
    prefill, stream = json.loads(output.read_text())["figures"]
    assert prefill["gigabytes"] > 0.1 and prefill["difference"] < 1e-4
    assert len(stream["tokens_per_second"]) == 10
