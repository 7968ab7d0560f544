# SPDX-License-Identifier: Apache-2.0
"""For tests, benchmarks and whoever writes a backend: problems, their inputs, and the budget for an answer's error."""

from .cases import PROBLEMS as PROBLEMS
from .cases import Case as Case
from .inputs import Inputs as Inputs
from .inputs import make_inputs as make_inputs
from .inputs import make_qkv as make_qkv
from .judge import Judge as Judge
from .judge import assert_within_budget as assert_within_budget
from .judge import conform as conform
from .judge import evaluate as evaluate
from .judge import largest_error as largest_error
