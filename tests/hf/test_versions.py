# SPDX-License-Identifier: Apache-2.0
"""Which transformers a patch takes: those it was tested with, told by version and by source."""

import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import linbias
from linbias.hf import decoder, families
from tests.hf.tiny import base, every_family, make


@pytest.mark.parametrize("version", ["4.57.6", "5.18.0rc1", "5.25.0.dev0", "6.0.0"])
@every_family
def test_unknown_ones_are_refused(kind: str, version: str):
    model = make(kind)
    with mock.patch("transformers.__version__", version):
        with pytest.raises(NotImplementedError, match=f"transformers {version} is not among the tested versions"):
            linbias.patch(model)


def test_changed_source_is_refused():
    with mock.patch.object(families, "fingerprint", lambda sources: "0123456789abcdef"):
        with pytest.raises(NotImplementedError, match="source of its classes has changed.*0123456789abcdef"):
            linbias.patch(make("bloom"))


def test_unreadable_source_is_refused():
    model = make("bloom")
    with mock.patch.object(families, "_definitions", return_value={}), mock.patch("inspect.findsource", _no_source):
        with pytest.raises(NotImplementedError, match="unreadable"):
            linbias.patch(model)


def test_another_patch_is_seen():
    """A method replaced on the class leaves its source file as it was."""
    model = make("bloom")
    attention = type(model.transformer.h[0].self_attention)
    with mock.patch.object(attention, "forward", lambda *args, **kwargs: None):
        with pytest.raises(NotImplementedError, match="another patch has replaced BloomAttention.forward"):
            linbias.patch(model)


def test_the_extra_allows_what_the_patch_allows():
    oldest, newest = decoder.TESTED_VERSIONS
    (transformers_range,) = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["hf"]
    major, minor = map(int, newest.split("."))
    assert transformers_range == f"transformers>={oldest},<{major}.{minor + 1}"


@pytest.mark.parametrize("version", ["5.18.0", "5.24.1", "5.24.17.dev0"])
@every_family
def test_patch_releases_are_told_apart_by_their_source(kind: str, version: str):
    with mock.patch("transformers.__version__", version):
        assert linbias.patch(make(kind, layers=1)).layers == 1
        with mock.patch.object(families, "fingerprint", lambda sources: "0123456789abcdef"):
            with pytest.raises(NotImplementedError, match="source of its classes has changed"):
                linbias.patch(make(kind, layers=1))


@every_family
def test_the_installed_one_is_known(kind: str):
    family = families.families_for(make(kind))[type(base(make(kind)))]
    assert family.why_not() is None
    assert families.fingerprint(family.sources) in family.known_sources


def _no_source(*_: Any) -> None:
    raise OSError("no source")
