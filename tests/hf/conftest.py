# SPDX-License-Identifier: Apache-2.0
"""These tests patch hundreds of models; the sources of transformers that a patch looks at are parsed once for all."""

import functools
from collections.abc import Iterator
from unittest import mock

import pytest

from linbias.hf import families


@pytest.fixture(autouse=True, scope="session")
def parsed_once() -> Iterator[None]:
    with mock.patch.object(families, "_definitions", functools.cache(families._definitions)):
        yield
