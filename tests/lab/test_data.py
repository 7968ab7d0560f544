# SPDX-License-Identifier: Apache-2.0
import os
import random
import re
from importlib import resources
from pathlib import Path

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


def fill(folder: Path, names: dict[str, str]) -> Path:
    for name, content in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("train", "validation", "test"),
    [
        ("train.txt", "validation.md", "test"),
        ("train.txt", "valid.txt", "test.txt"),
        ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw"),
        ("wiki.train.tokens", "wiki.val.tokens", "wiki.test.tokens"),
        ("en-de_train.en", "en-de_dev.en", "en-de_test.en"),
        ("TRAIN.TXT", "Dev.TXT", "Test.TXT"),
        ("NewsTrain01.txt", "NewsDev01.txt", "NewsTest01.txt"),
        ("z train.txt", "m valid.txt", "a test.txt"),
        ("train/essays.txt", "val/essays.txt", "test/essays.txt"),
        ("wikitext-2/wiki.train.raw", "wikitext-2/wiki.valid.raw", "wikitext-2/wiki.test.raw"),
        ("training/the_test_of_time.txt", "development/a.txt", "testing/b.txt"),
    ],
)
def test_splits_are_known_by_the_words_in_their_names(tmp_path, train, validation, test):
    corpus = load_corpus(fill(tmp_path, {train: "aaa", validation: "bb", test: "c", "about.txt": "left out"}))
    assert [corpus.split(split).content for split in ("train", "validation", "test")] == [b"aaa", b"bb", b"c"]
    assert [corpus.split(split).name for split in ("train", "validation", "test")] == [train, validation, test]


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (("train.txt", "test.txt"), "validation"),
        (("train.txt", "valid.txt"), "test"),
        (("wiki.test.raw", "b.txt", "c.txt"), "train and validation"),
        (("train/a.txt", "dev.txt"), "test"),
        (("deep/down/test.txt", "emma.txt"), "train and validation"),
    ],
    ids=str,
)
def test_a_folder_that_names_some_splits_only_is_refused(tmp_path, names, missing):
    fill(tmp_path, dict.fromkeys(names, "text " * 20))
    with pytest.raises(DataError, match=rf"all of its splits .* but no text for {missing} in .*; add it, or join"):
        load_corpus(tmp_path)


def test_a_split_that_is_no_text_counts_as_missing(tmp_path):
    fill(tmp_path, {"train.txt": "a", "valid.txt": "b"})
    (tmp_path / "test.txt").write_bytes(b"\0\1")
    with pytest.raises(DataError, match="no text for test"):
        load_corpus(tmp_path)


def test_words_that_only_hold_a_split_in_the_middle_name_none(tmp_path):
    corpus = load_corpus(
        fill(tmp_path, dict.fromkeys(("contest.txt", "medieval.txt", "trainer.txt", "latest"), "x" * 20))
    )
    assert len(corpus.train.content) == (4 * 20 + 3) * 8 // 10


def test_numbered_parts_and_files_of_a_splits_folder_are_joined(tmp_path):
    parts = {"train-00000-of-00002.txt": "one", "train-00001-of-00002.txt": "two"}
    corpus = load_corpus(fill(tmp_path, {**parts, "dev/b.txt": "4", "dev/sub/a.txt": "3", "test.txt": "5"}))
    assert (corpus.train.content, corpus.validation.content) == (b"one\ntwo", b"4\n3")
    assert corpus.train.name == "train-00000-of-00002.txt and 1 more"


def test_the_same_bytes_are_not_trained_and_tested_on(tmp_path):
    fill(tmp_path, {"train.txt": "same", "valid.txt": "other", "test.txt": "same"})
    with pytest.raises(DataError, match=r"got the same bytes in train\.txt and test\.txt"):
        load_corpus(tmp_path)


def test_a_name_that_names_two_splits_is_refused(tmp_path):
    fill(tmp_path, {"train+dev.txt": "a", "test.txt": "b"})
    with pytest.raises(DataError, match=r"one split a file, got 'train\+dev\.txt', which names 2"):
        load_corpus(tmp_path)


def test_names_that_are_no_utf8_are_told_escaped(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/no\xff.txt"))
    path.write_bytes(b"some text " * 9)
    corpus = load_corpus(path)
    assert (corpus.name, corpus.test.name) == (r"no\xff.txt", r"no\xff.txt, last 10 %")
    assert Path(corpus.describe()["source"]).read_bytes() == path.read_bytes()


def test_what_looks_like_noise_is_remarked_on(tmp_path):
    noise, prose = tmp_path / "noise", tmp_path / "prose"
    noise.write_bytes(random.Random(5).randbytes(20_000))
    prose.write_text("Übung macht den Meister; 継続は力なり; повторение — мать учения. " * 200)
    assert "noise, first 80 % does not look like text" in load_corpus(noise).remark()
    assert load_corpus(prose).remark() is None
    assert load_corpus().remark() is None


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
    with pytest.raises(DataError, match=r"train split in one place, got train\.md, train\.txt"):
        load_corpus(tmp_path)


def test_too_little_text_is_refused_with_both_numbers():
    text = Text(name="poem", content=b"x" * 1999)
    require_bytes(text, 1999, "to read")
    with pytest.raises(DataError, match=r"at least 2,000 bytes to read, got 1,999 \(poem\)"):
        require_bytes(text, 2000, "to read")


def test_a_tensor_of_a_text_is_its_bytes():
    text = Text(name="all", content=bytes(range(256)))
    assert text.tensor().tolist() == list(range(256))
