# SPDX-License-Identifier: Apache-2.0
import re
import shlex
from pathlib import Path

import pytest

from linbias import cli
from linbias.lab.evaluations.commands import EVALUATIONS
from linbias.lab.positions import SCHEMES

PAGE = Path(__file__).parents[3] / "docs" / "laboratory.md"
LINES = re.findall(r"^linbias .+$", PAGE.read_text(encoding="utf-8"), flags=re.M)


@pytest.mark.parametrize("line", LINES)
def test_every_command_of_the_page_can_be_given(line):
    pytest.importorskip("tyro", reason="tyro (extra lab) is not installed")
    cli._parse(shlex.split(line)[1:])


def test_the_page_names_every_scheme_and_command():
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in SCHEMES)
    assert all(any(line.startswith(f"linbias {name}") for line in LINES) for name in EVALUATIONS)


def test_commands_write_their_files_and_say_so(run, text_file, tmp_path, capsys):
    from linbias.lab.train import train

    checkpoint = str(train(run, tmp_path))
    data = ["--checkpoint", checkpoint, "--data", str(text_file)]
    for line, files in (
        (["numerics", "--heads", "3", "--json", str(tmp_path / "n.json")], ["n.json"]),
        (["export", "--checkpoint", checkpoint, "--out", str(tmp_path / "mpt")], ["mpt/config.json"]),
        (["stream", *data, "--tokens", "60", "--out", str(tmp_path / "s")], ["s/streaming.png", "s/streaming.csv"]),
        (["attention", *data, "--out", str(tmp_path / "a")], ["a/attention.png", "a/attention.json"]),
    ):
        assert cli.main(line) == 0
        said = capsys.readouterr().out
        for file in files:
            assert (tmp_path / file).is_file() and Path(file).name in said
