# SPDX-License-Identifier: Apache-2.0
import pytest

from linbias.lab.exports import results_text
from linbias.lab.tables import align, wrap


def test_the_first_column_is_flush_left_and_the_others_right():
    assert align(("a", "bb"), [("ccc", "1"), ("d", "234")]).splitlines() == [
        "a     bb",
        "--------",
        "ccc    1",
        "d    234",
    ]


@pytest.mark.parametrize("columns", [1, 2, 5, 9, 23])
@pytest.mark.parametrize("width", [40, 80])
def test_a_wide_table_is_cut_into_even_parts_that_fit(columns, width):
    header = ("scheme", *(f"{2**n:,}" for n in range(columns)))
    body = [(name, *(f"{name[0]}{n}.123 ±.045" for n in range(columns))) for name in ("alibi", "no positions")]
    parts = align(header, body, width).split("\n\n")
    lines = [part.splitlines() for part in parts]
    assert max(len(line) for part in lines for line in part) <= width
    assert sum(line[0].count(",") + line[0].count("  ") > 0 for line in lines) == len(parts)
    shown = [cell for part in lines for cell in part[2].split("  ")[1:] if cell]
    assert [cell.strip() for cell in shown] == list(body[0][1:])
    counts = [part[2].count("±") for part in lines]
    assert max(counts) - min(counts) <= 1
    assert all(part[3].startswith("no positions") for part in lines)


def test_five_lengths_fit_80_columns(results):
    assert max(map(len, results_text(results).splitlines())) <= 80
    body = [("no positions", *["2.412 ±.034"] * 5)]
    assert len(align(("scheme", *["2,048"] * 5), body).splitlines()) == 3


def test_a_cell_wider_than_the_line_stands_alone():
    assert align(("", "one", "two"), [("a", "x" * 30, "y")], 20).count("-" * 20) == 1


def test_paragraphs_are_broken_between_words():
    assert wrap("word " * 40, indent=3).splitlines()[1].startswith("   word")
    assert max(map(len, wrap("word " * 40).splitlines())) <= 80
