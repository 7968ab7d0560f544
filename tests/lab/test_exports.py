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
import torch

from linbias.lab.config import InspectCommand
from linbias.lab.exports import PAPER, csv_table, render_page, results_text, set_aside, write_exports
from linbias.lab.heads import inspect_heads
from linbias.lab.plots import DARK, draw_comparison, draw_heads, draw_panels
from linbias.lab.remarks import early_token_effect, headline, remarks
from linbias.lab.results import make_cells

PNG = b"\x89PNG\r\n\x1a\n"
PLOTS = dict.fromkeys(PAPER, (PNG, PNG))
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


def test_headline_gives_figures_first_and_orders_schemes_by_them(results):
    assert headline(results) == (
        "Bits per byte, the lowest first. At 16 bytes, as trained: RoPE 2.752, ALiBi 2.896, learned 2.896. "
        "At 64 bytes, with the change: ALiBi 2.795 (-0.101), RoPE 4.339 (+1.587)."
    )
    assert headline(replace(results, rows=results.rows[2:3])).endswith(
        "learned 2.896. At 64 bytes, with the change: none could run."
    )
    assert headline(replace(results, lengths=(16,))).endswith(
        "At 16 bytes, as trained: RoPE 2.752, ALiBi 2.896, learned 2.896."
    )
    assert headline(replace(results, rows=())) == "No scheme could be tested."


def test_one_rate_for_all_is_remarked_on_where_schemes_are_compared(results):
    told = remarks(results)[1]
    assert "the same learning rate (0.01) and seed (1); neither was tuned for any of them" in told
    assert not any("tuned" in remark for remark in remarks(replace(results, rows=results.rows[:1])))


def test_a_model_that_learned_nothing_is_remarked_on(results):
    lost = replace(results.rows[1], curve=[(7, 9.5, 8.25)])
    told = [remark for remark in remarks(replace(results, rows=(results.rows[0], lost))) if "learned nothing" in remark]
    assert told == [
        "RoPE: its validation loss ended at 8.250 bits per byte, above the 8 that even guessing costs: it learned "
        "nothing, and a lower learning rate may help."
    ]


def test_what_is_odd_about_the_text_is_remarked_on(results):
    odd = replace(results, corpus={**results.corpus, "remark": "this is noise"})
    assert "this is noise" in results_text(odd)
    assert "this is noise" in render_page(odd, PLOTS, WHEN)


def test_refusals_are_grouped_by_reason(results):
    assert remarks(results)[2:4] == [
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
    plots = {name: draw_panels(results, theme) for name, theme in PAPER.items()}
    page = render_page(results, plots, WHEN)
    outline = Outline(page)
    prefix = "data:image/png;base64,"
    assert all(reference.startswith(prefix) for reference in outline.references)
    shown = [base64.b64decode(reference.removeprefix(prefix)) for reference in outline.references]
    assert shown == [plots["dark"][0], plots["light"][0], plots["dark"][1], plots["light"][1]]
    assert len(set(shown)) == 4
    assert not {"script", "link", "iframe", "object"} & set(outline.tags)
    assert not re.search(r"url\(|@import|https?://", page)


def test_plots_of_the_page_are_narrow_enough_for_a_phone(results):
    for image in draw_panels(results, DARK):
        width, height = size_of(image)
        # The smallest letters, 8 points, at 358 of the 390 pixels of a phone: 8 / 72 inches of `width / 160`.
        assert 358 * (8 / 72) / (width / 160) > 8
        assert height < width


def test_a_change_is_tinted_where_its_whole_interval_says_so(results):
    page = render_page(results, PLOTS, WHEN)
    alibi, rope = results.row("alibi"), results.row("rope")
    assert [cell.change.high < 0 for cell in alibi.cells[1:]] == [True, True]
    assert [cell.change.low > 0 for cell in rope.cells[1:]] == [True, True]
    assert (page.count('<td class="better"'), page.count('<td class="worse"')) == (2, 2)
    single = tuple(
        replace(row, cells=make_cells({16: torch.ones(64), 64: 2 * torch.ones(64)}, 1, None))
        for row in results.rows[:1]
    )
    plain = render_page(replace(results, rows=single), PLOTS, WHEN)
    assert '<td class="worse"' not in plain
    for cell in (*alibi.cells[1:], *rope.cells[1:]):
        assert f"{cell.change.low:.3f} to {cell.change.high:.3f}" in page


def test_page_says_how_to_run_it_again(results):
    page = render_page(results, PLOTS, WHEN)
    text = "".join(Outline(page).text)
    assert results.command in text
    assert results.corpus["source"] in text
    assert "ab" * 32 in text
    assert "<i>way" not in page
    assert "0.00390625" in text
    assert "prefers-color-scheme: dark" in page


def test_page_shows_every_figure_and_escapes_names(results):
    page = render_page(results, PLOTS, WHEN)
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
    page = render_page(replace(results, stride=4), PLOTS, WHEN)
    assert "Windows move on by 4 bytes" in page
    assert "Windows do not overlap" not in page


@pytest.mark.parametrize("count", [1, 2, 4])
def test_plot_is_a_png_for_any_number_of_schemes(results, count):
    width, height = size_of(draw_comparison(replace(results, rows=results.rows[:count])))
    assert width > 2 * height > 1000


def test_head_plot_is_a_png_even_for_extreme_bounds_and_many_heads():
    commands = (InspectCommand(), InspectCommand(heads=40, length=1), InspectCommand(heads=1, content=900.0))
    for command in (*commands, InspectCommand(heads=300)):
        assert size_of(draw_heads(inspect_heads(command), command.length or 8192))[0] > 1000


def test_a_plot_is_of_the_kind_that_is_asked_for():
    facts = inspect_heads(InspectCommand(heads=2))
    assert draw_heads(facts, 100, "png").startswith(PNG)
    assert draw_heads(facts, 100, "pdf").startswith(b"%PDF")
    assert b"<svg" in draw_heads(facts, 100, "svg")


def test_report_writes_four_files_and_no_others(results, tmp_path):
    files = write_exports(results, tmp_path / "out")
    assert sorted(path.name for path in files) == ["plot.png", "report.html", "results.csv", "results.json"]
    assert sorted((tmp_path / "out").iterdir()) == sorted(files)
    assert json.loads((tmp_path / "out" / "results.json").read_text())["scored"] == 256


def test_a_narrower_run_never_replaces_a_larger_report(results, tmp_path, monkeypatch):
    monkeypatch.setattr("linbias.lab.exports.draw_comparison", lambda results: PNG)
    monkeypatch.setattr("linbias.lab.exports.draw_panels", lambda results, theme: (PNG, PNG))
    write_exports(results, tmp_path)
    whole = (tmp_path / "report.html").read_text()
    narrower = [
        replace(results, rows=results.rows[:1]),
        replace(results, rows=tuple(replace(row, cells=row.cells[:2]) for row in results.rows)),
        replace(results, scored=128),
        replace(results, settings={**results.settings, "train": {"steps": 8}}),
        replace(results, corpus={**results.corpus, "splits": {"test": {"sha256": "cd" * 32}}}),
    ]
    for number, found in enumerate(narrower, start=1):
        assert set_aside(found, tmp_path) == tmp_path / f"earlier-{number}"
        assert (tmp_path / f"earlier-{number}" / "report.html").read_text() == whole
        write_exports(results, tmp_path)
        whole = (tmp_path / "report.html").read_text()
    assert set_aside(results, tmp_path) is None
    write_exports(narrower[0], tmp_path)
    assert set_aside(results, tmp_path) is None


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"rows": 3}'])
def test_results_that_are_none_of_ours_are_set_aside_too(results, tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    kept = set_aside(results, tmp_path)
    assert [path.name for path in kept.iterdir()] == ["results.json"]
