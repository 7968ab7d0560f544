# SPDX-License-Identifier: Apache-2.0
import io

import pytest

from linbias.lab import display
from linbias.lab.display import Bars, Lines


def test_lines_say_part_and_time_left(monkeypatch):
    now = 100.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    stream = io.StringIO()
    lines = Lines("compare", 10.0, stream)
    lines.resume("a", 6.0, 0.0)
    now = 105.0
    lines.advance("a", 6.0, 0.1, "2.5 bits")
    assert stream.getvalue() == ""
    now = 160.0
    lines.advance("a", 6.0, 0.5, "2.4 bits")
    assert stream.getvalue() == "compare: 30%, 2:20 left (a 50%)\n"


def test_what_an_earlier_run_did_is_not_counted(monkeypatch):
    now = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    stream = io.StringIO()
    lines = Lines("compare", 10.0, stream)
    lines.resume("a", 6.0, 1.0)
    lines.finish("a", 6.0)
    lines.resume("b", 4.0, 0.5)
    now = 20.0
    lines.advance("b", 4.0, 0.75, "")
    assert stream.getvalue().splitlines() == [
        "  a: 100% done before, reused",
        "  b: 50% done before, reused",
        "compare: 50%, 0:20 left (b 75%)",
    ]


def test_bars_end_where_the_work_ends(capsys):
    bars = Bars("compare", 10.0)
    bars.resume("done", 2.0, 1.0)
    bars.finish("done", 2.0)
    bars.resume("a", 6.0, 0.0)
    bars.resume("b", 2.0, 0.5)
    bars.advance("b", 2.0, 0.75, "fast")
    bars.advance("a", 6.0, 0.5, "2.4 bits")
    assert bars._whole.total == pytest.approx(7.0)
    assert bars._whole.n == pytest.approx(3.5)
    assert (bars._bars["a"].postfix, bars._bars["b"].n) == ("2.4 bits", 0.75)
    bars.finish("b", 2.0)
    bars.resume("c", 0.5, 0.0)
    bars.finish("a", 6.0)
    assert bars._whole.n == pytest.approx(7.0)
    bars.say("a line that stays")
    bars.close()
    assert "a line that stays" in capsys.readouterr().err
