# SPDX-License-Identifier: Apache-2.0
import re
import time

import pytest
from tqdm import tqdm

from linbias.lab import progress
from linbias.lab.progress import Progress


@pytest.fixture
def seconds(monkeypatch):
    """A clock to be set, read by progress and by tqdm."""
    clock = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    return clock


def test_lines_say_part_and_time_left(seconds, capsys):
    with Progress("compare", {"a": 8.0, "b": 8.0}) as shown:
        shown.advance("a", 0.0)
        seconds[0] = 105.0
        shown.advance("a", 0.125, "2.5 bits")
        assert capsys.readouterr().err == ""
        seconds[0] = 164.0
        shown.advance("a", 0.5, "2.4 bits")
        assert capsys.readouterr().err == "compare: 25 %, 01:04 gone, 03:12 left, a 50%\n"


def test_what_an_earlier_run_did_says_nothing_about_speed(seconds, capsys):
    with Progress("compare", {"a": 4.0, "b": 4.0}) as shown:
        shown.advance("a", 1.0)
        shown.finish("a")
        shown.advance("b", 0.5)
        seconds[0] = 120.0
        shown.advance("b", 0.75)
        assert capsys.readouterr().err.splitlines() == [
            "  a: 100% done before, reused",
            "  b: 50% done before, reused",
            "compare: 88 %, 00:20 gone, 00:20 left, b 75%",
        ]


def test_news_that_come_after_the_end_are_ignored(capsys):
    with Progress("compare", {"a": 1.0}) as shown:
        shown.finish("a")
        shown.advance("a", 0.5, "late")
    assert "reused" not in capsys.readouterr().err


def test_bars_on_a_terminal_end_where_the_work_ends(monkeypatch, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress.sys.stderr, "fileno", lambda: 2)
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda descriptor: progress.os.terminal_size((100, 24)))
    with Progress("compare", {"done": 2.0, "a": 6.0, "b": 2.0}) as shown:
        shown.advance("done", 1.0)
        shown.finish("done")
        shown.advance("a", 0.0)
        shown.advance("b", 0.5)
        shown.advance("b", 0.75, "fast")
        shown.advance("a", 0.5, "2.4 bits")
        assert (shown._whole.total, shown._whole.n, shown._whole.initial) == pytest.approx((10.0, 6.5, 3.0))
        assert (shown._bars["a"].postfix, shown._bars["b"].n) == ("2.4 bits", 0.75)
        shown.finish("b")
        shown.finish("a")
        assert shown._whole.n == pytest.approx(10.0)
        shown.say("a line that stays")
    told = capsys.readouterr().err
    assert "a line that stays" in told
    assert re.search(r"compare +\d+ % \|.*\| 00:0\d gone, .* left", told)


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_time_left_is_on_every_line_of_a_terminal(monkeypatch, capsys, columns):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress.sys.stderr, "fileno", lambda: 2)
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda _: progress.os.terminal_size((columns, 24)))
    with Progress("compare", {"test alibi-window at 2,048": 2.0, "train sinusoidal": 6.0}) as shown:
        shown.advance("test alibi-window at 2,048", 0.0)
        shown.advance("train sinusoidal", 0.0)
        time.sleep(0.15)
        shown.advance("test alibi-window at 2,048", 0.25)
        shown.advance("train sinusoidal", 0.5, "12.34 bits")
        for bar in (shown._whole, *shown._bars.values()):
            bar.refresh()
            line = str(bar)
            assert len(line) <= columns
            assert re.search(r"\| 00:0\d gone, \d\d:\d\d left", line)
        assert "12.34 bits" in str(shown._bars["train sinusoidal"])
