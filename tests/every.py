# SPDX-License-Identifier: Apache-2.0
"""Parametrise a test over backends. One that cannot run here is skipped, saying why, unless it is required.

LINBIAS_REQUIRED_BACKENDS names backends, separated by spaces, for which "cannot run this" is a failure and not a skip.
"""

import os

import pytest

from linbias import BackendUnavailable, backends
from linbias.testing import Case, Inputs, make_inputs

REQUIRED = tuple(os.environ.get("LINBIAS_REQUIRED_BACKENDS", "").split())


def why_not(backend: str, inputs: Inputs) -> str | None:
    """The backend's reason not to run this call; None if it has none, or if it must run it."""
    problem, _ = inputs.resolve()
    try:
        backends.select(backend, problem)
    except BackendUnavailable as reason:
        return None if backend in REQUIRED else str(reason)
    return None


def skip_unless_it_can(backend: str, inputs: Inputs) -> None:
    reason = why_not(backend, inputs)
    if reason is not None:
        pytest.skip(reason)


def _parameter(backend: str):
    reason = why_not(backend, make_inputs(Case()))
    return pytest.param(backend, marks=[pytest.mark.skip(reason=reason)] if reason else [])


_PARAMETERS = {backend: _parameter(backend) for backend in backends.available()}
every_backend = pytest.mark.parametrize("backend", list(_PARAMETERS.values()))
every_kernel = pytest.mark.parametrize(
    "backend", [given for name, given in _PARAMETERS.items() if not getattr(backends, name).COMPOSITE]
)
"""The backends behind the torch operators, which autograd does not see through."""
