# SPDX-License-Identifier: Apache-2.0
"""The project's own measurements of attention: peers compute the same, figures and records say what they hold."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install 'linbias[lab]'")

from benchmarks import attention, harness, memory
from benchmarks.harness import figure, figures_table, markdown, open_record, ratio_figure
from benchmarks.inputs import rounded, trained, with_sink
from benchmarks.memory import in_fresh_process
from benchmarks.pairs import ratio_of_pairs
from benchmarks.peers import PEERS
from linbias import alibi_slopes
from linbias.lab.bench.race import FORWARD, PLAIN, Contender, Content, normal, race
from linbias.lab.bench.record import Record
from linbias.lab.config import ModelConfig

ROOT = Path(__file__).parents[2]


def peers(*names):
    return [peer for peer in PEERS if peer.name in names]


@pytest.mark.parametrize(("count", "low", "high"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (9, 2, 8), (15, 4, 12)])
def test_the_interval_of_pairs_is_that_of_the_sign_test(count, low, high):
    found = ratio_of_pairs([2.0 * k for k in range(count, 0, -1)], [2.0] * count)
    assert (found.median, found.low, found.high) == ((count + 1) / 2, low, high)


def test_load_that_both_of_a_pair_meet_does_not_count():
    assert str(ratio_of_pairs([3.0, 30.0, 6.0], [2.0, 20.0, 4.0])) == "1.500x (1.500 to 1.500)"


def test_every_peer_computes_alibi():
    wanted = peers("SDPA, dense ALiBi mask", "eager formula", "bias as extra channel")
    errors = {row["implementation"]: row["error"] for row in race(normal(97), wanted, FORWARD, 1, Record({}))}
    # Digits lost by the extra channel: its ramp reaches 97 * slope * 8, of which fp32 keeps 7 digits.
    assert errors.pop("bias as extra channel") < 3e-4
    assert len(errors) == 2 and max(errors.values()) < 3e-6


@pytest.mark.slow
def test_the_compiled_peer_agrees():
    content = Content("normal", *(tensor[:, :, :128] for tensor in normal(256).qkv), alibi_slopes(12))
    (found,) = race(content, peers("FlexAttention, compiled"), FORWARD, 1, Record({}))
    assert found["error"] < 3e-6


def test_a_sink_is_one_long_key_and_slopes_keep_their_digits():
    plain, sink = normal(33), with_sink(33)
    assert torch.equal(sink.key[:, :, 0], 30 * plain.key[:, :, 0])
    assert torch.equal(sink.key[:, :, 1:], plain.key[:, :, 1:]) and torch.equal(sink.query, plain.query)
    half = rounded(plain, torch.bfloat16)
    assert (half.key.dtype, half.slopes.dtype) == (torch.bfloat16, torch.float32)


def test_a_trained_models_attention_is_what_its_layers_see():
    first, second = trained(ModelConfig(layers=2, width=24, heads=3), steps=2, length=19)
    assert first.query.shape == second.value.shape == (1, 3, 19, 8)
    assert torch.equal(first.slopes, alibi_slopes(3))
    assert not torch.equal(first.key, second.key)


def test_a_figure_is_the_ratio_of_the_best_with_the_interval_of_later_pairs():
    found = ratio_figure("rate", [9.0, 4.0, 6.0], [1.0, 2.0, 2.0], ">=", 3.0, factor=0.5)
    assert (found["reached"], found["interval"]) == (2.0, [1.0, 1.5])


@pytest.mark.parametrize(
    ("relation", "reached", "met"),
    [(">=", 3.0, True), (">=", 2.9, False), ("<=", 3.0, True), ("<=", 3.1, False), ("<", 3.0, False), ("<", 2.9, True)],
)
def test_a_goal_is_met_or_missed(relation, reached, met):
    told = figures_table(Record({}, {"a": [figure("rate", reached, relation, 3.0)]}))
    assert told.endswith("missed") is not met


def test_tables_name_rows_and_columns():
    assert markdown({("a", 4096): "1", ("b", 512): "2"}).splitlines() == [
        "| | 512 | 4,096 |",
        "|---|---|---|",
        "| a |  | 1 |",
        "| b | 2 |  |",
    ]


def test_goals_are_for_one_thread():
    row = {"implementation": "linbias native", "inputs": "normal", "direction": FORWARD, "length": 512, "seconds": 1.0}
    row |= {"baseline_seconds": 2.0, "baseline_estimated": False, "ratio": 2.0, "error": 1e-6, "computed": None}
    found = {"race": [row, row | {"inputs": "with a sink"}], "memory": [{"memory": "eager", "length": 512, "mib": 7.4}]}
    one, two = (attention.show(Record({"threads": threads}, found)) for threads in (1, 2))
    assert "goal of linbias native" in one and "goal" not in two
    assert "by what is attended" in one and "eager    7" in one


def test_a_record_is_gone_on_with_unless_its_settings_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "rates", dict)
    options = argparse.Namespace(output=tmp_path / "record.json", again=False, threads=1, quick=True)
    record = open_record(options)
    record.found = {"kept": [{"a": 1}, {"not_run": "b", "why": "c"}], "tried again": [{"not_run": "d", "why": "e"}]}
    record.write(options.output)
    assert list(open_record(options).found) == ["kept"]
    options.threads = 2
    with pytest.raises(SystemExit, match="made with another threads: --again replaces it"):
        open_record(options)
    options.again = True
    assert open_record(options).found == {}


def test_what_dies_in_its_own_process_is_told(monkeypatch):
    monkeypatch.setattr(memory, "_LENGTHS", (64,))
    monkeypatch.setattr(memory, "PLAIN", Contender("no such contender", PLAIN.prepare, 100))
    (found,) = memory.peaks([])
    assert found["not_run"] == "memory, no such contender at 64" and "ValueError" in found["why"]


@pytest.mark.slow
def test_peak_memory_counts_what_a_call_needs_and_returns():
    # The output of 12 heads of 64 at 2,048 tokens is 6 MiB; a dense mask is 192 MiB, and making it takes more.
    plain = in_fresh_process(PLAIN.name, 2048, 1, 12)
    dense = in_fresh_process("SDPA, dense ALiBi mask", 2048, 1, 12)
    assert 5 < plain < 30 < 190 < dense


@pytest.mark.slow
def test_a_run_writes_record_table_and_picture(tmp_path):
    output = tmp_path / "found.json"
    options = ["--quick", "--lengths", "33", "--parts", "forward", "--backends", "tiled", "--output", str(output)]
    subprocess.run([sys.executable, "-m", "benchmarks.attention", *options], check=True, cwd=ROOT, capture_output=True)
    assert list(json.loads(output.read_text())["found"]) == ["forward, 33 tokens"]
    assert {path.name for path in tmp_path.iterdir()} == {"found.json", "found.txt", "found.png"}


@pytest.mark.slow
def test_two_installs_are_compared_in_turns():
    command = [sys.executable, "benchmarks/ab.py", sys.executable, sys.executable, "--rounds", "2", "--rows", "small"]
    told = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    assert told[-1].startswith("small call, T = S = 16") and " to " in told[-1] and len(told) == 6
