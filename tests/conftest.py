# SPDX-License-Identifier: Apache-2.0
"""Every test starts from the same seed, and hypothesis draws the same examples on every machine."""

import random

import hypothesis
import numpy
import pytest
import torch

# torch's first calls are slow, which is no fault of the property under test, hence no deadline.
hypothesis.settings.register_profile("linbias", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("linbias")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed what draws random numbers, so that a failure comes back when one test is run alone."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
