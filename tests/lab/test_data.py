# SPDX-License-Identifier: Apache-2.0
import re
from importlib import resources

import pytest

from linbias.lab.data import NOVELS, DataError, Text, load_corpus, require_bytes


def test_the_embedded_novels_are_those_their_note_describes():
    corpus = load_corpus()
    assert corpus.source is None
    assert [len(corpus.split(name).content) for name in ("validation", "test")] == [466_854, 433_411]
    assert len(corpus.train.content) == 883_028 + 883_280 + 684_768 + 673_688 + 3
    note = (resources.files("linbias.lab") / "corpus" / "README.md").read_text(encoding="utf-8")
    for split, prefix in (("validation", "80615495"), ("test", "51f91bbe")):
        assert corpus.split(split).digest.startswith(prefix)
        assert prefix in note
    assert all(f"{novel}.txt.xz" in note for novels in NOVELS.values() for novel in novels)
    assert b"Emma Woodhouse, handsome, clever, and rich" in corpus.train.content


def test_nothing_tested_on_was_trained_on():
    corpus = load_corpus()
    assert b"Catherine Morland" in corpus.test.content
    assert b"Catherine Morland" not in corpus.train.content


def test_a_file_is_cut_in_order(tmp_path):
    path = tmp_path / "digits.txt"
    path.write_bytes(bytes(range(100)))
    corpus = load_corpus(path)
    assert corpus.train.content == bytes(range(80))
    assert corpus.validation.content == bytes(range(80, 90))
    assert corpus.test.content == bytes(range(90, 100))
    assert (corpus.name, corpus.source) == ("digits.txt", path.resolve())


def test_a_folder_of_named_splits_is_taken_as_it_is(tmp_path):
    for name, content in (("train.txt", "aaa"), ("validation.md", "bb"), ("test", "c"), ("notes.txt", "ignored")):
        (tmp_path / name).write_text(content)
    corpus = load_corpus(tmp_path)
    assert [corpus.split(split).content for split in ("train", "validation", "test")] == [b"aaa", b"bb", b"c"]


def test_other_folders_are_joined_by_name_without_hidden_and_binary_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("second" * 10)
    (tmp_path / "a.txt").write_text("first" * 10)
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    corpus = load_corpus(tmp_path)
    joined = corpus.train.content + corpus.validation.content + corpus.test.content
    assert joined == b"first" * 10 + b"\n" + b"second" * 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "data must be an existing text file or folder, got '{path}', which does not exist"),
        (lambda path: path.mkdir(), "data must hold text, got folder '{path}' without any text file"),
        (
            lambda path: path.write_text("four"),
            "data must leave text for every split, got none for validation in '{path}'",
        ),
    ],
    ids=["missing", "empty folder", "four bytes"],
)
def test_errors_name_the_data(tmp_path, make, message):
    path = tmp_path / "text"
    make(path)
    with pytest.raises(DataError, match=re.escape(message.format(path=path))):
        load_corpus(path)


def test_two_files_for_one_split_are_refused(tmp_path):
    for name in ("train.txt", "train.md", "validation.txt", "test.txt"):
        (tmp_path / name).write_text("text")
    with pytest.raises(DataError, match=r"one file for its train split, got train\.md, train\.txt"):
        load_corpus(tmp_path)


def test_too_little_text_is_refused_with_both_numbers():
    text = Text(name="poem", content=b"x" * 1999)
    require_bytes(text, 1999, "to read")
    with pytest.raises(DataError, match=r"at least 2,000 bytes to read, got 1,999 \(poem\)"):
        require_bytes(text, 2000, "to read")


def test_a_tensor_of_a_text_is_its_bytes():
    text = Text(name="all", content=bytes(range(256)))
    assert text.tensor().tolist() == list(range(256))
