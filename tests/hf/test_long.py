# SPDX-License-Identifier: Apache-2.0
"""A document of 16,384 tokens under a limit of memory that the unpatched model does not keep."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is missing: pip install 'linbias[hf]'")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to its address space")
def test_a_document_of_16384_tokens_in_3_gigabytes():
    """Patched it goes through, unpatched it does not."""
    command = [sys.executable, "-m", "benchmarks.long_document", "--width", "256"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    patched, unpatched = done.stdout.splitlines()[1:]
    assert patched.startswith("patched    read in") and unpatched.startswith("unpatched  failed")
