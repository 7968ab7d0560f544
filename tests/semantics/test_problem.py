# SPDX-License-Identifier: Apache-2.0
"""Features are derived, so that a field nobody remembered cannot be run by a backend that does not know it."""

import pytest
import torch

from linbias import backends
from linbias.semantics.problem import FEATURES, OPERAND_NAMES, OPTION_NAMES, TRANSFORMED, Operands, Options, Problem

TENSOR = torch.zeros(1, 1, 1, 1)
PLAIN = Operands(TENSOR, TENSOR, TENSOR, torch.zeros(1, 1))
REQUIRED = ("query", "key", "value", "slopes")
# For each option a value that is not neutral.
USED = {
    "causal": True,
    "left": 0,
    "right": 0,
    "sinks": 1,
    "prefix": 1,
    "metric": "euclidean",
    "scale": 0.0,
    "softcap": 1.0,
    "dropout_p": 0.5,
    "tolerance": 0.5,
    "bounds_block": 64,
    "paged_keys": 7,
}


def test_a_plain_call_uses_nothing():
    assert Problem.of(PLAIN, Options()).features == frozenset()


@pytest.mark.parametrize("name", [name for name in OPERAND_NAMES if name not in REQUIRED])
def test_every_optional_operand_is_a_feature(name: str):
    # That it is given is what counts; values are not read.
    operands = PLAIN._replace(**{name: torch.zeros(1, 1)})
    assert Problem.of(operands, Options()).features == {name}


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_every_option_is_a_feature(name: str):
    assert Problem.of(PLAIN, Options(**{name: USED[name]})).features == {name}


def test_transforms_are_a_feature_and_nothing_else_is():
    assert Problem.of(PLAIN, Options(), transformed=True).features == {TRANSFORMED}
    assert FEATURES == {*OPERAND_NAMES, *OPTION_NAMES, TRANSFORMED} - {*REQUIRED}


@pytest.mark.parametrize("name", backends.available())
def test_what_a_backend_supports_are_features(name: str):
    supports = getattr(backends, name).SUPPORTS
    assert supports <= FEATURES, f"not features: {sorted(supports - FEATURES)}"


@pytest.mark.parametrize("feature", sorted(FEATURES))
@pytest.mark.parametrize("name", backends.available())
def test_a_feature_that_is_not_supported_is_a_reason(name: str, feature: str, monkeypatch: pytest.MonkeyPatch):
    backend = getattr(backends, name)
    plain = Problem.of(PLAIN, Options())
    if (reason := backend.why_not(plain)) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(backend, "SUPPORTS", FEATURES - {feature})
    reason = backend.why_not(plain._replace(features=frozenset({feature})))
    assert reason is not None and feature in reason
    assert backend.why_not(plain) is None
