# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace

import pytest
import torch

from linbias.cli import main
from linbias.lab.bench import race as bench_race
from linbias.lab.bench import run as bench_run
from linbias.lab.bench.race import BOTH, FORWARD, PLAIN, Contender, normal, race
from linbias.lab.bench.record import Record
from linbias.lab.bench.run import Unfit, bench, write_plot
from linbias.lab.bench.show import describe_bench, draw_bench
from linbias.lab.bench.timing import best_in_turns, in_turns
from linbias.lab.config import BenchCommand, ConfigError
from linbias.lab.progress import Interrupted
from linbias.testing import Case

TILED = Contender.of_linbias("tiled")


def record(*timings):
    return Record({"processor": "abacus"}, {"race": list(timings), "gap": [{"not_run": "a", "why": "b"}]})


def timing(implementation="linbias native", length=1024, seconds=2.0, baseline=5.0, **more):
    return {
        "implementation": implementation,
        "inputs": "normal",
        "direction": FORWARD,
        "length": length,
        "seconds": seconds,
        "baseline_seconds": baseline,
        "baseline_estimated": False,
        "ratio": None if baseline is None else baseline / seconds,
        "error": 1e-6,
        "computed": 0.5,
        **more,
    }


@pytest.fixture
def quick_run(monkeypatch, tmp_path):
    """A command of two short lengths, without checks that take seconds."""
    monkeypatch.setattr(bench_run, "_CHECKS", (Case(queries=33, keys=33, causal=True),))
    return BenchCommand(quick=True, lengths=(33, 57), backends=("tiled",), out=tmp_path / "bench")


def test_all_times_of_turns_are_kept_and_the_best_counts():
    times = iter([5.0, 50.0, 3.0, 40.0, 4.0, 60.0])
    taken = in_turns({"a": lambda: None, "b": lambda: None}, rounds=2, clock=lambda call: next(times))
    assert taken == {"a": [5.0, 3.0, 4.0], "b": [50.0, 40.0, 60.0]}
    assert 0 < best_in_turns({"sum": torch.ones(10**6).sum}, rounds=1)["sum"] < 1


def test_turns_end_when_their_time_is_over():
    turns = []
    in_turns({"a": lambda: turns.append(1)}, rounds=50, budget=0.0)
    assert len(turns) == 2


def test_a_race_tells_time_error_and_pairs():
    (found,) = race(normal(97), [TILED], FORWARD, 1, record())
    assert found["error"] < 3e-6 and 0 < found["computed"] < 2
    assert found["seconds"] > 0 and found["ratio"] == found["baseline_seconds"] / found["seconds"]


def test_both_ways_are_timed_without_an_error_of_the_output():
    (found,) = race(normal(33), [TILED], BOTH, 1, record())
    assert found["direction"] == BOTH and "error" not in found


def test_what_fails_is_told_and_what_has_no_backward_too():
    def broken(content):
        raise RuntimeError("no such kernel\nsecond line")

    def no_gradient(content):
        return lambda query, key, value: torch.zeros_like(query)

    names = [
        Contender("broken", broken, 100),
        Contender("one way", TILED.prepare, 100, backward=False),
        Contender("flat", no_gradient, 100),
        Contender("short", TILED.prepare, 32),
    ]
    *gaps, kept = race(normal(33), [*names, TILED], BOTH, 1, record())
    assert kept["implementation"] == "linbias tiled"
    told = {gap["not_run"]: gap["why"] for gap in gaps}
    assert told["broken, forward + backward at 33 tokens"] == "RuntimeError: no such kernel"
    assert told["one way, backward"] == "torch has none on CPU"
    assert "does not require grad" in told["flat, forward + backward at 33 tokens"]
    assert told["short beyond 32 tokens"].startswith("left out")


def test_beyond_the_baselines_length_its_square_growth_stands_in(monkeypatch):
    known = record(timing(length=11, baseline=2.0), timing(length=10, baseline=9.0))
    monkeypatch.setattr(bench_race, "PLAIN", replace(PLAIN, longest=11))
    _, found = race(normal(33), [TILED], FORWARD, 1, known)
    assert (found["baseline_seconds"], found["baseline_estimated"]) == (18.0, True)


def test_a_record_survives_its_file(tmp_path):
    before = record(timing(), timing(baseline=None))
    before.write(tmp_path / "results.json")
    assert Record.read(tmp_path / "results.json") == before
    rows = json.loads((tmp_path / "results.json").read_text())["found"]["race"]
    assert [row["ratio"] for row in rows] == [2.5, None]


def test_the_text_shows_ratios_goals_and_gaps():
    known = (timing(), timing("eager formula", seconds=20.0), timing(length=65536, baseline_estimated=True))
    sunk = timing(inputs="with a sink", seconds=4.0)
    told = describe_bench(record(*known, sunk), {("linbias native", FORWARD): {1024: 2.3, 65536: 25.0}})
    lines = [line.split() for line in told.splitlines()]
    assert ["linbias", "native", "2.50x", "~2.50x", "1e-06"] in lines
    assert ["goal", "of", "linbias", "native", "2.3x", "25.0x"] in lines
    assert ["pairs", "of", "linbias", "native", "50%", "50%"] in lines
    assert ["eager", "formula", "0.25x", "1e-06"] in lines
    assert ["SDPA,", "no", "bias,", "ms", "5,000.0"] in lines
    assert "not run: a: b" in told and "goal" not in describe_bench(record(*known))


def test_the_picture_is_drawn_if_there_is_something_to_draw():
    assert draw_bench(record()) is None
    known = record(timing(), timing(length=2048), timing(length=65536, baseline_estimated=True))
    drawn = draw_bench(known, {("linbias native", FORWARD): {1024: 2.3}})
    assert drawn is not None and drawn.startswith(b"\x89PNG")


def test_a_run_measures_both_ways_at_each_length_and_leaves_no_trace(quick_run):
    threads = torch.get_num_threads()
    found = bench(quick_run)
    assert torch.get_num_threads() == threads
    assert [(row["implementation"], row["direction"], row["length"]) for row in found.having("ratio")] == [
        ("linbias tiled", direction, length) for length in (33, 57) for direction in (FORWARD, BOTH)
    ]
    written = write_plot(found, quick_run.out)
    assert [path.name for path in written] == ["results.json", "plot.png"] and all(path.exists() for path in written)
    assert Record.read(written[0]) == found


def test_an_interrupted_run_goes_on_and_a_finished_one_begins_anew(quick_run, monkeypatch):
    timed = []

    def counting(content, contenders, direction, rounds, known):
        timed.append((content.length, direction))
        if len(timed) == 3:
            raise KeyboardInterrupt
        return race(content, contenders, direction, rounds, known)

    monkeypatch.setattr(bench_run, "race", counting)
    with pytest.raises(Interrupted, match="stopped after 2 of 4 measurements, saved"):
        bench(quick_run)
    (unfinished,) = quick_run.out.iterdir()
    first = Record.read(unfinished)
    assert len(first.found) == 2
    # Another command in between neither uses nor loses it.
    other = replace(quick_run, lengths=(19,), parts=("forward",))
    assert list(bench(other).found) == ["forward, 19 tokens"]
    assert timed.pop() == (19, FORWARD)
    second = bench(quick_run)
    assert [path.name for path in quick_run.out.iterdir()] == ["results.json"]
    assert timed[3:] == [(57, FORWARD), (57, BOTH)]
    assert list(second.found.items())[:2] == list(first.found.items())
    bench(quick_run)
    assert len(timed) == 5 + 4


def test_what_is_wrong_is_not_timed(quick_run, monkeypatch):
    def wrong(case, backend):
        raise AssertionError("out: error 1 > budget 0")

    monkeypatch.setattr(bench_run, "conform", wrong)
    with pytest.raises(Unfit, match=r"'tiled' gives wrong results for B2-H3-.*nothing was timed: out: error 1"):
        bench(quick_run)
    assert not quick_run.out.exists()


def test_the_command_runs_and_says_what_it_wrote(tmp_path, capsys):
    told = ["bench", "--quick", "--lengths", "33", "--parts", "forward", "--backends", "tiled", "--out", str(tmp_path)]
    assert main(told) == 0
    shown = capsys.readouterr()
    assert "linbias tiled" in shown.out and f"written: {tmp_path / 'results.json'}" in shown.out
    assert "forward, 33 tokens: linbias tiled" in shown.err


def test_a_backend_that_cannot_run_is_refused_by_name(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("linbias.backends.native.why_not", lambda problem: "has no hands")
    assert main(["bench", "--quick", "--backends", "native", "--out", str(tmp_path)]) == 1
    assert "backend 'native' cannot run this call: has no hands" in capsys.readouterr().err


def test_what_leaves_nothing_to_measure_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing is left to measure: .* 8,192 tokens"):
        bench(BenchCommand(parts=("training",), lengths=(9000,), backends=("tiled",), out=tmp_path))


def test_what_a_run_leaves_out_is_told(quick_run, monkeypatch, capsys):
    monkeypatch.setattr("linbias.backends.native.why_not", lambda problem: "has no hands")
    command = replace(quick_run, backends=None, lengths=(33, 9000), parts=("training",))
    gaps = {gap["not_run"]: gap["why"] for gap in bench(command).found["left out"]}
    assert gaps.keys() == {"linbias native", "training beyond 8,192 tokens"}
    assert "has no hands" in gaps["linbias native"] and "has no hands" in capsys.readouterr().err


@pytest.mark.parametrize("setting", [{"lengths": ()}, {"lengths": (0,)}, {"threads": 0}, {"parts": ()}])
def test_wrong_settings_are_named(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        BenchCommand(**setting)
