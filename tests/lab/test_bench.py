# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace

import pytest
import torch

from linbias import alibi_slopes
from linbias.cli import main
from linbias.lab.bench import Unfit, bench, describe, write_report
from linbias.lab.bench import memory as bench_memory
from linbias.lab.bench import run as bench_run
from linbias.lab.bench.inputs import Content, normal, trained
from linbias.lab.bench.memory import in_fresh_process
from linbias.lab.bench.peers import PEERS, PLAIN, Contender
from linbias.lab.bench.plot import draw_bench
from linbias.lab.bench.races import race
from linbias.lab.bench.record import BOTH, FORWARD, Figure, Found, Record, Timing
from linbias.lab.bench.timing import in_turns
from linbias.lab.config import BenchCommand, ConfigError, ModelConfig
from linbias.lab.monitor import Interrupted
from linbias.testing import Case

EAGER = [peer for peer in PEERS if peer.name == "eager formula"]
CHANNEL = [peer for peer in PEERS if peer.name == "bias as extra channel"]


def record(*timings, figures=(), threads=1):
    found = Found(timings=list(timings), figures=list(figures), memory_mib={"abacus at 64": 3.0}, not_run={"a": "b"})
    return Record(settings="s", machine={"processor": "abacus", "threads used": threads}, found={"job": found})


def timing(implementation="linbias native", length=1024, seconds=2.0, baseline=5.0, **more):
    base = {"inputs": "normal", "direction": FORWARD, "baseline_seconds": baseline}
    return Timing(implementation=implementation, length=length, seconds=seconds, **{**base, **more})


@pytest.fixture
def quick_run(monkeypatch, tmp_path):
    """A command of two short lengths, without what takes seconds: a peer's compilation, long checks, the rates."""
    monkeypatch.setattr(bench_run, "PEERS", tuple(EAGER))
    monkeypatch.setattr(bench_run, "_CHECKS", (Case(queries=33, keys=33, causal=True),))
    monkeypatch.setattr(bench_run, "sgemm_rate", lambda: 60.0)
    monkeypatch.setattr(bench_run, "read_bandwidth", lambda: 12.0)
    return BenchCommand(
        quick=True, lengths=(33, 57), parts=("forward", "training"), backends=("tiled",), out=tmp_path / "bench"
    )


def test_the_best_time_of_turns_counts():
    times = iter([5.0, 50.0, 3.0, 40.0, 4.0, 60.0])
    best = in_turns({"a": lambda: None, "b": lambda: None}, rounds=2, clock=lambda call: next(times))
    assert best == {"a": 3.0, "b": 40.0}


def test_turns_end_when_their_time_is_over():
    turns = []
    in_turns({"a": lambda: turns.append(1)}, rounds=50, budget=0.0)
    assert len(turns) == 2


@pytest.mark.parametrize(
    ("relation", "reached", "met"),
    [(">=", 3.0, True), (">=", 2.9, False), ("<=", 3.0, True), ("<=", 3.1, False), ("<", 3.0, False), ("<", 2.9, True)],
)
def test_a_goal_is_met_or_missed(relation, reached, met):
    assert Figure(name="n", reached=reached, relation=relation, goal=3.0).met is met


def test_every_contender_computes_alibi():
    found = race(normal(97), [Contender.of_linbias("tiled"), *EAGER, *CHANNEL], FORWARD, 1, record())
    errors = {each.implementation: each.error for each in found.timings}
    assert errors.keys() == {"linbias tiled", "eager formula", "bias as extra channel"}
    # Digits lost by the extra channel: its ramp reaches 97 * slope * 8, of which fp32 keeps 7 digits.
    assert errors["linbias tiled"] < 3e-6 and errors["eager formula"] < 3e-6 and errors["bias as extra channel"] < 3e-4
    assert all(each.seconds > 0 and each.baseline_seconds for each in found.timings)


def test_both_ways_are_timed_without_an_error_of_the_output():
    found = race(normal(33), EAGER, BOTH, 1, record())
    assert [(each.direction, each.error) for each in found.timings] == [(BOTH, None)]


def test_what_fails_is_told_and_what_has_no_backward_too():
    def broken(content):
        raise RuntimeError("no such kernel\nsecond line")

    names = [Contender("broken", broken, 100), Contender("one way", EAGER[0].make, 100, backward=False)]
    found = race(normal(33), names, BOTH, 1, record())
    assert found.timings == []
    assert found.not_run["broken, forward + backward at 33 tokens"] == "RuntimeError: no such kernel"
    assert found.not_run["one way, backward"] == "torch has none on CPU"


def test_what_fails_only_in_its_backward_is_told_too():
    def no_gradient(content):
        return lambda query, key, value: torch.zeros_like(query)

    found = race(normal(33), [Contender("flat", no_gradient, 100), *EAGER], BOTH, 1, record())
    assert [each.implementation for each in found.timings] == ["eager formula"]
    assert "does not require grad" in found.not_run["flat, forward + backward at 33 tokens"]


def test_what_dies_in_its_own_process_is_told(monkeypatch):
    monkeypatch.setattr(bench_memory, "_LENGTHS", (64,))
    monkeypatch.setattr(bench_memory, "PLAIN", Contender("no such contender", EAGER[0].make, 100))
    found = bench_memory.compare([])
    assert found.memory_mib == {} and "ValueError" in found.not_run["memory, no such contender at 64"]


def test_beyond_the_baselines_length_its_square_growth_stands_in(monkeypatch):
    known = record(timing(length=11, baseline=2.0), timing(length=10, baseline=9.0))
    short = Contender(PLAIN.name, PLAIN.make, 11)
    monkeypatch.setattr("linbias.lab.bench.races.PLAIN", short)
    (found,) = race(normal(33), EAGER, FORWARD, 1, known).timings
    assert (found.baseline_seconds, found.baseline_estimated) == (18.0, True)


def test_a_sink_is_one_long_key():
    plain, sink = normal(33), normal(33, sink=30.0)
    assert torch.equal(sink.key[:, :, 0], 30 * plain.key[:, :, 0])
    assert torch.equal(sink.key[:, :, 1:], plain.key[:, :, 1:]) and torch.equal(sink.query, plain.query)


def test_a_trained_models_attention_is_what_its_layers_see():
    model = ModelConfig(layers=2, width=24, heads=3)
    first, second = trained(model, steps=2, length=19)
    assert first.query.shape == second.value.shape == (1, 3, 19, 8)
    assert torch.equal(first.slopes, alibi_slopes(3))
    assert not torch.equal(first.key, second.key)


def test_a_record_survives_its_file(tmp_path):
    before = record(timing(), timing(baseline=None), figures=[Figure(name="n", reached=1.5, relation="<", goal=2.0)])
    before.write(tmp_path / "results.json")
    assert Record.read(tmp_path / "results.json") == before
    rows = json.loads((tmp_path / "results.json").read_text())["found"]["job"]["timings"]
    assert [row["ratio"] for row in rows] == [2.5, None]


def test_the_text_shows_ratios_goals_and_gaps():
    known = (timing(), timing("eager formula", seconds=20.0), timing(length=65536, baseline_estimated=True))
    sunk = timing(inputs="with a sink", seconds=4.0)
    figures = [Figure(name="rate", reached=0.5, relation=">=", goal=0.9)]
    lines = describe(record(*known, sunk, figures=figures)).splitlines()
    assert ["linbias", "native", "2.50x", "~2.50x"] in [line.split() for line in lines]
    assert ["goal", "2.3x", "25.0x"] in [line.split() for line in lines]
    assert ["eager", "formula", "0.25x", "-"] in [line.split() for line in lines]
    assert ["linbias", "native", "2.50x", "1.25x"] in [line.split() for line in lines]
    assert ["rate", "0.50", ">=", "0.9", "missed"] in [line.split() for line in lines]
    assert ["abacus", "at", "64", "3"] in [line.split() for line in lines]
    assert "not run: a: b" in lines


def test_the_picture_is_drawn_if_there_is_something_to_draw():
    assert draw_bench(record()) is None
    drawn = draw_bench(record(timing(), timing(length=2048), timing(length=65536, baseline_estimated=True)))
    assert drawn is not None and drawn.startswith(b"\x89PNG")


def test_a_run_measures_both_ways_at_each_length_and_leaves_no_trace(quick_run):
    threads = torch.get_num_threads()
    found = bench(quick_run)
    assert torch.get_num_threads() == threads
    assert [(t.implementation, t.direction, t.length) for t in found.timings] == [
        (name, direction, length)
        for length in (33, 57)
        for direction in (FORWARD, BOTH)
        for name in ("linbias tiled", "eager formula")
    ]
    written = write_report(found, quick_run.out)
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


def test_the_command_runs_and_says_what_it_wrote(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_run, "PEERS", tuple(EAGER))
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
    for parts, lengths in ((("figures",), None), (("training",), (9000,))):
        with pytest.raises(ConfigError, match="nothing is left to measure: .*native.*8,192 tokens"):
            bench(BenchCommand(parts=parts, lengths=lengths, backends=("tiled",), out=tmp_path))


def test_what_a_run_leaves_out_is_told(quick_run, monkeypatch, capsys):
    monkeypatch.setattr("linbias.backends.native.why_not", lambda problem: "has no hands")
    command = replace(quick_run, backends=None, lengths=(33, 9000), parts=("training", "figures"))
    gaps = bench(command).found["left out"].not_run
    assert gaps.keys() == {"linbias native", "figures", "training beyond 8,192 tokens"}
    assert "has no hands" in gaps["linbias native"] and gaps["figures"].endswith("timed: tiled")
    assert "has no hands" in capsys.readouterr().err


def test_goals_are_for_one_thread():
    assert "goal" in describe(record(timing())) and "goal" not in describe(record(timing(), threads=2))


def test_the_forecast_counts_only_what_will_run(tmp_path):
    jobs = bench_run._plan(BenchCommand(out=tmp_path), ["native", "tiled"], record())
    assert 5 < sum(job.cost for job in jobs) / 60 < 40


@pytest.mark.parametrize("setting", [{"lengths": ()}, {"lengths": (0,)}, {"threads": 0}, {"parts": ()}])
def test_wrong_settings_are_named(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        BenchCommand(**setting)


@pytest.mark.slow
def test_peak_memory_counts_what_a_call_needs_and_returns():
    # The output of 12 heads of 64 at 2,048 tokens is 6 MiB; a dense mask is 192 MiB, and making it takes more.
    plain = in_fresh_process(PLAIN.name, 2048, 1, 12)
    dense = in_fresh_process("SDPA, dense ALiBi mask", 2048, 1, 12)
    assert 5 < plain < 30 < 190 < dense


@pytest.mark.slow
def test_the_compiled_peer_agrees():
    flex = [peer for peer in PEERS if peer.name.startswith("Flex")]
    content = Content("normal", *(tensor[:, :, :128] for tensor in normal(256).qkv), alibi_slopes(12))
    (found,) = race(content, flex, FORWARD, 1, record()).timings
    assert found.error is not None and found.error < 3e-6
