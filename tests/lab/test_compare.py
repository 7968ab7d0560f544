# SPDX-License-Identifier: Apache-2.0
import csv
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from linbias.lab import compare as compare_module
from linbias.lab import tasks
from linbias.lab.compare import Comparison, compare
from linbias.lab.config import USUAL_SCHEMES, USUAL_TESTS, CompareCommand, ConfigError, EvaluateConfig
from linbias.lab.data import DataError
from linbias.lab.exports import results_text, write_exports
from linbias.lab.progress import Interrupted
from linbias.lab.remarks import remarks
from linbias.lab.train import Trainer
from tests.lab.small import MODEL, TRAIN


@pytest.fixture
def command(text_file, tmp_path):
    return CompareCommand(
        data=text_file,
        out=tmp_path / "out",
        workers=1,
        model=MODEL,
        train=TRAIN,
        evaluate=EvaluateConfig(lengths=(8, 16, 40), test_bytes=160),
    )


def numbers(results):
    """What must not depend on how often a comparison was interrupted."""
    return [(row.scheme, row.parameters, list(map(tuple, row.curve)), row.cells) for row in results.rows]


def test_every_scheme_is_tested_at_every_length_it_can(command):
    found = compare(command)
    assert (found.scored, found.segments, found.lengths) == (160, 4, (8, 16, 40))
    assert [row.scheme for row in found.rows] == [
        *("alibi", "alibi-window", "sinusoidal", "learned", "rope", *USUAL_TESTS, "none")
    ]
    ran = {row.scheme: [cell.length for cell in row.cells if cell.bits] for row in found.rows}
    whole = {scheme: [8, 16, 40] for scheme in (*USUAL_SCHEMES, *USUAL_TESTS)}
    assert ran == whole | {"learned": [8], "alibi-window": [40]}
    assert "alibi-window" not in [row.scheme for row in found.table_rows()]
    assert found.row("rope-yarn").cells[0] == found.row("rope").cells[0]
    assert found.row("rope-yarn").cells[2].bits != found.row("rope").cells[2].bits
    (said,) = [remark for remark in remarks(found) if remark.startswith("RoPE, YaRN: not trained")]
    assert "the weights of RoPE, and beyond 8 bytes slow angles interpolated" in said
    refusals = [cell.why_not for cell in found.row("learned").cells]
    assert refusals == [None, *["its table ends at the training length, 8"] * 2]
    assert all(3 < cell.bits.mean < 9 for row in found.rows for cell in row.cells if cell.bits)


def test_a_second_run_reuses_everything(command, monkeypatch):
    first = compare(command)
    before = {path: path.stat().st_mtime_ns for path in command.out.rglob("*.safetensors")}
    monkeypatch.setattr(Trainer, "update", None)
    monkeypatch.setattr("linbias.lab.evaluate._score_windows", None)
    assert numbers(compare(command)) == numbers(first)
    assert {path: path.stat().st_mtime_ns for path in command.out.rglob("*.safetensors")} == before


def test_only_what_changed_is_done_again(command, monkeypatch):
    compare(replace(command, schemes=("alibi",)))
    trained = []
    original = Trainer.update
    monkeypatch.setattr(Trainer, "update", lambda self: (trained.append(self.run.scheme), original(self))[1])
    compare(replace(command, schemes=("alibi", "rope"), evaluate=replace(command.evaluate, test_bytes=80)))
    assert set(trained) == {"rope"}


@pytest.mark.parametrize("every", [2, 5, 13])
def test_interrupts_leave_no_trace(command, tmp_path, monkeypatch, every):
    """Each run is stopped at the n-th time it asks; the last one is not."""
    command = replace(command, schemes=("alibi", "none"))
    whole = compare(replace(command, out=tmp_path / "whole"))
    questions = itertools.count(1)
    stop = property(lambda self: next(questions) % every == 0, lambda self, value: None)
    monkeypatch.setattr(tasks.StopFlag, "raised", stop, raising=False)
    found, interrupts = None, 0
    while found is None:
        try:
            found = compare(command)
        except Interrupted:
            interrupts += 1
    assert interrupts >= 20 // every
    assert numbers(found) == numbers(whole)


def test_impossible_plans_fail_before_anything_runs(command):
    long = replace(command, evaluate=EvaluateConfig(lengths=(8, 5000), test_bytes=10_000))
    with pytest.raises(DataError, match=r"at least 5,001 bytes to score a window of 5,000, got \d+ \(story.txt, last"):
        compare(long)
    with pytest.raises(DataError, match="to train on passages of 9,000"):
        compare(replace(command, train=replace(TRAIN, length=9000)))
    with pytest.raises(ConfigError, match="test_bytes must be at least the longest length, 40, got 39"):
        compare(replace(command, evaluate=EvaluateConfig(lengths=(8, 40), test_bytes=39)))
    with pytest.raises(ConfigError, match="stride must not exceed the shortest length, 8, got 9"):
        compare(replace(command, evaluate=EvaluateConfig(stride=9)))
    assert not command.out.exists()


def test_a_scheme_that_diverges_stops_alone_and_is_not_tried_again(command, monkeypatch, capsys):
    command = replace(command, schemes=("none", "rope", "alibi"), test_schemes=())
    healthy = compare(replace(command, out=command.out / "healthy"))
    original, updates = Trainer.update, []

    def update(self):
        updates.append(self.run.scheme)
        if self.run.scheme == "rope" and self.step == 3:
            next(self.decoder.parameters()).data.fill_(torch.nan)
        return original(self)

    monkeypatch.setattr(Trainer, "update", update)
    found = compare(command)
    assert updates.count("rope") == 4
    assert re.search(r"rope: training diverged at update 4 of 7: the loss is nan, \d", capsys.readouterr().err)
    assert [row for row in numbers(found) if row[0] != "rope"] == [row for row in numbers(healthy) if row[0] != "rope"]
    rope = found.row("rope")
    assert rope.diverged.startswith("training diverged at update 4 of 7")
    assert {cell.why_not for cell in rope.cells} == {rope.diverged}
    json.dumps(found.as_dict(), allow_nan=False)
    write_exports(found, command.out)
    assert "RoPE: training diverged at update 4 of 7" in (command.out / "report.html").read_text()
    assert results_text(found).count("diverged") == 2 * 3 + 1
    assert numbers(compare(command)) == numbers(found)
    assert updates.count("rope") == 4


def test_each_seed_is_a_training_and_intervals_over_seeds_stand_apart(command):
    command = replace(command, schemes=("alibi", "rope"), test_schemes=("rope-ntk",), seeds=(1, 5, 6))
    found = compare(command)
    alone = [compare(replace(command, seeds=(seed,))) for seed in (1, 5, 6)]
    for row in found.rows:
        assert row.seeds == (1, 5, 6)
        for cell in row.cells:
            single = [one.row(row.scheme).cell(cell.length) for one in alone]
            means = [each.bits.mean for each in single]
            assert cell.bits.mean == pytest.approx(sum(means) / 3, abs=1e-6)
            # Student's t of two degrees of freedom, on three means.
            half = 4.303 * np.std(means, ddof=1) / 3**0.5
            assert cell.seeds.high - cell.seeds.mean == pytest.approx(half, rel=1e-4)
            assert all(each.seeds is None for each in single)
    assert "means over 3 seeds" in found.method and "trained once" in alone[0].method
    assert any("each of the seeds 1, 5, 6" in remark for remark in remarks(found))
    assert "± over seeds" in results_text(found) and "± over seeds" not in results_text(alone[0])
    page, _, table, _ = write_exports(found, command.out / "report")
    assert "over seeds" in page.read_text(encoding="utf-8")
    lines = list(csv.DictReader(table.read_text().splitlines()))
    assert float(lines[0]["seeds_low"]) == found.rows[0].cells[0].seeds.low


def test_a_seed_that_diverges_is_left_out_and_named(command, monkeypatch):
    command = replace(command, schemes=("alibi",), test_schemes=(), seeds=(1, 5))
    original = Trainer.update

    def update(self):
        if self.run.train.seed == 5 and self.step == 3:
            next(self.decoder.parameters()).data.fill_(torch.nan)
        return original(self)

    monkeypatch.setattr(Trainer, "update", update)
    found = compare(command)
    assert found.row("alibi").seeds == (1,) and found.row("alibi").diverged is None
    assert any(remark.startswith("ALiBi, seed 5, left out: training diverged") for remark in remarks(found))


def test_data_that_changes_during_a_comparison_ends_it(command, text_file):
    (task,) = Comparison(replace(command, schemes=("none",))).tasks()[:1]
    text_file.write_text("another text " * 500)
    compare_module._corpus.cache_clear()
    with pytest.raises(DataError, match=r"data must not change during a comparison, as '.*story\.txt' did"):
        task.work(lambda fraction, note: None)


def test_processes_are_as_many_as_cores_and_schemes_allow(command, monkeypatch):
    monkeypatch.setattr("linbias.lab.compare.usable_cores", lambda: 3)
    monkeypatch.setattr("linbias.lab.compare.resolve_device", lambda name: "cpu" if name == "auto" else name)
    assert Comparison(replace(command, workers=None)).workers == 3
    assert Comparison(replace(command, workers=None, schemes=("alibi", "rope"))).workers == 2
    assert Comparison(replace(command, workers=None, device="cuda")).workers == 1
    assert Comparison(replace(command, workers=7)).workers == 7


def test_training_comes_first_and_the_longest_tests_soonest(command):
    names = [
        task.name
        for task in Comparison(replace(command, schemes=("rope", "learned"), test_schemes=("rope-yarn",))).tasks()
    ]
    assert names == [
        "train rope",
        "train learned",
        "test rope-yarn at 40",
        "test rope-yarn at 16",
        "test rope at 40",
        "test rope at 16",
        "test rope at 8",
        "test learned at 8",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("send", "signum", "status"), [(os.kill, signal.SIGINT, 130), (os.killpg, signal.SIGTERM, 143)], ids=["one", "job"]
)
def test_a_signal_in_the_middle_of_a_real_run_is_no_loss(text_file, tmp_path, send, signum, status):
    out = tmp_path / "out"
    arguments = [sys.executable, "-m", "linbias.cli", "compare", "--data", str(text_file), "--schemes", "alibi", "rope"]
    arguments += ["--layers", "1", "--width", "16", "--heads", "2", "--length", "8", "--steps", "100000"]
    arguments += ["--lengths", "8", "--test-bytes", "80", "--workers", "2", "--out", str(out)]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while len(list(out.glob("checkpoints/*.partial.safetensors"))) < 2 and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
        send(process.pid, signum)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == status
    assert "the same command goes on from here" in errors
    assert "Traceback" not in errors
    assert len(list(out.glob("checkpoints/*.partial.safetensors"))) == 2
