# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch
from safetensors.torch import save_file

from linbias.lab import storage
from linbias.lab.config import ModelConfig
from linbias.lab.storage import (
    CheckpointError,
    digest_of_facts,
    load_tensors,
    save_tensors,
    write_atomically,
    write_text,
)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, error):
    path = tmp_path / "deep" / "result.txt"
    write_text(path, "old")

    def half(temporary):
        temporary.write_text("ne")
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "result.txt"
    write_text(path, "old")

    def slowly(temporary):
        with temporary.open("w") as file:
            for letter in "new":
                file.write(letter)
                file.flush()
                assert path.read_text() == "old"

    write_atomically(path, slowly)
    assert path.read_text() == "new"


def test_tensors_come_back_with_what_was_said_of_them(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.randn(3, 5).T, "b": torch.arange(4)}
    save_tensors(path, tensors, {"step": 3, "curve": [[1, 2.5]]})
    found, about = load_tensors(path)
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert about == {"step": 3, "curve": [[1, 2.5]]}


def test_files_have_the_rights_of_any_new_file(tmp_path):
    save_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(1)}, {})
    write_text(tmp_path / "y.txt", "text")
    (tmp_path / "z.txt").write_text("text")
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_files_of_others_and_damaged_files_are_refused_by_name(tmp_path):
    missing, foreign, damaged = (tmp_path / name for name in ("missing", "foreign", "damaged"))
    save_file({"a": torch.zeros(2)}, foreign)
    save_tensors(damaged, {"a": torch.zeros(100)}, {})
    damaged.write_bytes(damaged.read_bytes()[:-50])
    for path in (missing, foreign, damaged):
        with pytest.raises(CheckpointError, match=path.name):
            load_tensors(path)


def test_a_fingerprint_changes_with_every_fact_and_with_nothing_else(monkeypatch):
    facts = {"model": ModelConfig(), "length": 8, "text": ["ab", "cd"]}
    first = digest_of_facts(**facts)
    assert first == digest_of_facts(**dict(reversed(facts.items())))
    variants = [
        {**facts, "length": 9},
        {**facts, "model": ModelConfig(layers=7)},
        {**facts, "text": ["cd", "ab"]},
        {**facts, "stride": None},
    ]
    assert len({first, *(digest_of_facts(**variant) for variant in variants)}) == 5
    monkeypatch.setattr(storage, "_code_digest", lambda: "other code")
    assert digest_of_facts(**facts) != first


def test_a_fingerprint_refuses_what_it_could_not_tell_apart():
    with pytest.raises(TypeError, match="object"):
        digest_of_facts(thing=object())


def test_presentation_is_named_by_files_that_exist():
    package = storage.Path(storage.__file__).parent.parent
    assert all((package / name).is_file() for name in storage._PRESENTATION)


def test_tensors_carry_the_format_that_transformers_asks_for(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.zeros(1)}, {})
    size = int.from_bytes(path.read_bytes()[:8], "little")
    assert json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]["format"] == "pt"
