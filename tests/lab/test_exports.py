# SPDX-License-Identifier: Apache-2.0
import base64
import csv
import io
import json
import re
import struct
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from linbias.lab.config import InspectCommand
from linbias.lab.exports import csv_table, results_text, write_exports
from linbias.lab.heads import inspect_heads
from linbias.lab.page import render_page
from linbias.lab.plots import draw_comparison, draw_heads
from linbias.lab.remarks import early_token_effect, headline, remarks

PNG = b"\x89PNG\r\n\x1a\n"
WHEN = datetime(2001, 2, 3, 4, 5, tzinfo=UTC)


class Outline(HTMLParser):
    """Collects what a page refers to, its tags, and its visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in {"src", "href", "srcset", "data", "action"}]

    def handle_data(self, data):
        self.text.append(data)


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(PNG)
    return struct.unpack(">II", png[16:24])


def test_results_text_shows_every_figure_and_refusal(results):
    text = results_text(results)
    rows = {line.split("  ")[0]: line for line in text.split("Perplexity")[0].splitlines()}
    for row in results.table_rows():
        for cell in row.cells:
            assert (str(cell.bits) if cell.bits else "cannot run") in rows[row.label]
    assert "ALiBi, training window" not in rows
    assert "tested on 256 bytes of a <b>bold</b>" in " ".join(text.split())


def test_headline_orders_schemes_by_change(results):
    assert headline(results) == "From 16 to 64 bytes, bits per byte change by: ALiBi -0.10, RoPE +1.59."
    assert headline(replace(results, rows=results.rows[2:3])) == "All schemes were tested at 16 bytes only."


def test_refusals_are_grouped_by_reason(results):
    assert remarks(results)[1:3] == [
        "learned: cannot run at 32 bytes, because its table ends at the training length, 16.",
        "learned: cannot run at 64 bytes, because the same.",
    ]


def test_case_k2_the_early_token_effect_is_told_apart(results):
    told = early_token_effect(results)
    # In bits: -0.07 / ln 2 in all, of which -0.01 / ln 2 from looking farther back.
    assert "Looking farther back than in training thus changes the loss by -0.014" in told
    assert "the other -0.087 of the change since 16 come without it" in told
    assert early_token_effect(replace(results, rows=results.rows[:3])) is None


def test_csv_has_a_line_for_each_scheme_and_length(results):
    lines = list(csv.DictReader(io.StringIO(csv_table(results))))
    assert [(line["scheme"], line["length"]) for line in lines] == [
        (row.scheme, str(cell.length)) for row in results.rows for cell in row.cells
    ]
    assert float(lines[2]["bits_per_byte"]) == results.rows[0].cells[2].bits.mean
    assert float(lines[2]["change_low"]) == results.rows[0].cells[2].change.low
    refused = next(line for line in lines if line["scheme"] == "learned" and line["length"] == "32")
    assert (refused["bits_per_byte"], refused["why_not"]) == ("", "its table ends at the training length, 16")


def test_page_needs_nothing_but_itself(results):
    plot = draw_comparison(results)
    page = render_page(results, plot, WHEN)
    outline = Outline(page)
    assert len(outline.references) == 1
    prefix = "data:image/png;base64,"
    assert outline.references[0].startswith(prefix)
    assert base64.b64decode(outline.references[0].removeprefix(prefix)) == plot
    assert not {"script", "link", "iframe", "object"} & set(outline.tags)
    assert not re.search(r"url\(|@import|https?://", page)


def test_page_shows_every_figure_and_escapes_names(results):
    page = render_page(results, PNG, WHEN)
    outline = Outline(page)
    text = " ".join("".join(outline.text).split())
    for row in results.table_rows():
        for cell in row.cells:
            assert cell.bits is None or f"{cell.bits.mean:.3f}" in text
    assert text.count("cannot run") == 2 + 2  # the cells and the remarks
    assert "a <b>bold</b> & nameless text" in text
    assert "<b>bold</b>" not in page
    assert "1,234,567" in text
    assert "2001-02-03 04:05 UTC" in text
    assert "undefined" not in text.lower()


def test_page_of_a_stride_says_so(results):
    page = render_page(replace(results, stride=4), PNG, WHEN)
    assert "Windows move on by 4 bytes" in page
    assert "Windows do not overlap" not in page


@pytest.mark.parametrize("count", [1, 2, 4])
def test_plot_is_a_png_for_any_number_of_schemes(results, count):
    width, height = size_of(draw_comparison(replace(results, rows=results.rows[:count])))
    assert width > 2 * height > 1000


def test_head_plot_is_a_png_even_for_extreme_bounds():
    for command in (InspectCommand(), InspectCommand(heads=40, length=1), InspectCommand(heads=1, content=900.0)):
        assert size_of(draw_heads(command, inspect_heads(command)))[0] > 1000


def test_report_writes_four_files_and_no_others(results, tmp_path):
    files = write_exports(results, tmp_path / "out")
    assert sorted(path.name for path in files) == ["plot.png", "report.html", "results.csv", "results.json"]
    assert sorted((tmp_path / "out").iterdir()) == sorted(files)
    assert json.loads((tmp_path / "out" / "results.json").read_text())["scored"] == 256
