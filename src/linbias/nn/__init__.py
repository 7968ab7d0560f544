# SPDX-License-Identifier: Apache-2.0
"""ALiBi as modules: slopes that nothing can round, and torch's multi-head attention with the bias."""

from .multihead import MultiheadAttention as MultiheadAttention
from .multihead import at as at
from .slopes import Slopes as Slopes
from .slopes import weight_decay_groups as weight_decay_groups
