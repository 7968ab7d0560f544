# SPDX-License-Identifier: Apache-2.0
"""Attention with linear biases (ALiBi), exact, at a cost that follows what the bias lets a head see."""

from . import backends as backends
from . import flash as flash
from . import interop as interop
from . import nn as nn
from .attention import Aux as Aux
from .attention import alibi_attention as alibi_attention
from .attention import alibi_attention_weights as alibi_attention_weights
from .attention import merge as merge
from .cache import KVCache as KVCache
from .errors import BackendUnavailable as BackendUnavailable
from .hf import patch as patch
from .hf import unpatch as unpatch
from .semantics.bias import alibi_bias as alibi_bias
from .semantics.bounds import KeyBounds as KeyBounds
from .semantics.bounds import key_bounds as key_bounds
from .semantics.bounds import reach as reach
from .semantics.slopes import alibi_slopes as alibi_slopes
from .semantics.tokens import grid_positions as grid_positions
from .semantics.tokens import positions_from_mask as positions_from_mask
from .varlen import alibi_attention_varlen as alibi_attention_varlen

__version__ = "0.1.0"
