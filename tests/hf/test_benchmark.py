# SPDX-License-Identifier: Apache-2.0
"""benchmarks/models.py completes a row of every sort, small: a row that fails there is only reported, not raised."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is missing: pip install 'linbias[hf]'")

pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install 'linbias[lab]'")

from benchmarks import models, models_page

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
        assert found["text_tokens"] == 16 + 40 and len(found["tokens_per_second"]) == 10
    else:
        assert found["tokens_per_second" if work == "decode" else "seconds"] > 0


@LINUX
@pytest.mark.slow
def test_processes_of_their_own(tmp_path: Path):
    output, sizes = tmp_path / "models.json", ["--prefill", "32", "--decode", "--train", "--stream", "40"]
    options = ["--families", "mpt", "--kinds", models.PATCHED, models.OURS, *sizes, "--output", str(output)]
    command = [sys.executable, "-m", "benchmarks.models", *options]
    root = Path(__file__).parents[2]
    subprocess.run(command, check=True, cwd=root, capture_output=True)
    first = output.read_text()
    (prefill,), (stream,) = json.loads(first)["found"].values()
    assert prefill["gigabytes"] > 0.1 and prefill["difference"] < 1e-4
    assert len(stream["tokens_per_second"]) == 10
    # The same command finds everything done; another number of threads is another report.
    subprocess.run(command, check=True, cwd=root, capture_output=True)
    assert output.read_text() == first
    other = subprocess.run([*command, "--threads", "2"], check=False, cwd=root, capture_output=True, text=True)
    assert other.returncode == 1 and "made with another threads" in other.stderr


def test_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    report, picture = tmp_path / "models.json", tmp_path / "models.png"
    row = {"family": "mpt", "kind": models.PATCHED}
    figures = [
        {**row, "work": "prefill", "tokens": 1024, "seconds": 1.234, "gigabytes": 0.5, "linear_seconds": 1.0},
        {**row, "work": "prefill", "tokens": 4096, "seconds": 4.0, "gigabytes": 0.75},
        {**row, "work": "prefill", "kind": "eager", "tokens": 4096, "not_run": "this row", "why": "needs 72 GB"},
        {**row, "work": "decode", "tokens": 1024, "tokens_per_second": 51.26},
        {**row, "work": "train", "tokens": 2048, "seconds": 7.5, "gigabytes": 1.5},
    ]
    report.write_text(json.dumps({"facts": {}, "found": {"all": figures}}))
    monkeypatch.setattr(sys, "argv", ["models_page", str(report), "--picture", str(picture)])
    models_page.main()
    prefill, decode, train = capsys.readouterr().out.split("\n\n")
    assert prefill.splitlines() == [
        "| | 1,024 | 4,096 |",
        "|---|---|---|",
        "| MPT, patched | 1.23 (1.00) s, 0.50 GB | 4.00 s, 0.75 GB |",
        "| MPT, eager |  |  |",
    ]
    assert "| MPT, patched | 51.3 |" in decode and "| MPT, patched | 7.50 s, 1.50 GB |" in train
    assert picture.read_bytes().startswith(b"\x89PNG")
