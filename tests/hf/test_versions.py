# SPDX-License-Identifier: Apache-2.0
"""Which transformers a patch takes: any with which a tiny model gives the same patched and unpatched."""

import random
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import linbias
from linbias.hf import decoder, families, parity
from tests.hf.tiny import base, every_family, make


@pytest.fixture(autouse=True)
def not_yet_agreed() -> Iterator[None]:
    with mock.patch.object(parity, "_agreed", set()):
        yield


def family_of(model: Any) -> families.Family:
    return families.families_for(model)[type(base(model))]


@every_family
def test_the_installed_one_agrees_and_is_asked_once(kind: str):
    model = make(kind, layers=1)
    family = family_of(model)
    with mock.patch.object(parity, "_difference", wraps=parity._difference) as compared:
        with linbias.patch(model):
            pass
        linbias.patch(make(kind, layers=1))
    assert compared.call_count == 1
    with parity._undisturbed():
        assert 0 < parity._difference(family) < 1e-4


@pytest.mark.parametrize("how", ["slopes", "mask", "nothing"])
@every_family
def test_another_result_is_refused(kind: str, how: str):
    """As if transformers had changed: what the original now adds to scores, sees, or returns."""
    model = make(kind, layers=1)
    home = type(base(model)).__module__
    module = sys.modules[home]
    attention = getattr(module, type(model).__name__.replace("ForCausalLM", "Attention"))
    owner, name, change = {
        "slopes": (module, f"build_{'mpt_' if kind == 'mpt' else ''}alibi_tensor", lambda found: found / 2),
        "mask": (module, "create_causal_mask", torch.zeros_like),
        "nothing": (attention, "forward", lambda found: (torch.zeros_like(found[0]), found[1])),
    }[how]
    original = getattr(owner, name)
    with mock.patch.object(owner, name, lambda *args, **kwargs: change(original(*args, **kwargs))):
        with pytest.raises(NotImplementedError, match=f"cannot patch {kind} models.*something else.*5.18 to 5.24"):
            linbias.patch(model)
    assert type(base(model)).__module__ == home
    linbias.patch(model)


def test_another_patch_is_seen_later_too():
    """A method replaced on the class after the first check."""
    model = make("bloom")
    linbias.patch(make("bloom", layers=1))
    with mock.patch.object(type(model.transformer.h[0].self_attention), "forward", lambda *args, **kwargs: None):
        with pytest.raises(NotImplementedError, match="cannot patch bloom models.*it fails with TypeError"):
            linbias.patch(model)


@every_family
def test_nothing_is_disturbed(kind: str):
    """Random numbers, default dtype and device, in whatever context a model is loaded and patched."""
    model = make(kind, layers=1).bfloat16()
    torch.manual_seed(3), random.seed(3)
    expected = torch.rand(2), random.random()
    torch.manual_seed(3), random.seed(3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            linbias.patch(model)
            assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
            assert torch.empty(1).is_meta and torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.rand(2), expected[0]) and random.random() == expected[1]


def test_empty_weights_of_accelerate():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is missing: pip install accelerate")
    with accelerate.init_empty_weights():
        assert linbias.patch(make("bloom", layers=1)).layers == 1


def test_the_extra_allows_what_the_tests_ran_with():
    oldest, newest = decoder.TESTED_VERSIONS
    (transformers_range,) = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["hf"]
    major, minor = map(int, newest.split("."))
    assert transformers_range == f"transformers>={oldest},<{major}.{minor + 1}"
