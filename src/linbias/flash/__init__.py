# SPDX-License-Identifier: Apache-2.0
"""flash-attn's functions under flash-attn's names: its arguments, order, defaults, layouts and meanings, on any device.

Written to the signatures of flash-attn 2.8 (https://github.com/Dao-AILab/flash-attention, flash_attn_interface.py):
tokens before heads, ends aligned, -1 for an unlimited side of the window, ``softcap=0.0`` for none. What flash-attn
refuses here works too: any head dim, float32 and float64, pages of any size, dropout with a soft cap.

``softmax_lse`` also means what flash-attn's kernels make of it. Where nothing but causality hides keys (``causal``
without a left window, or ``window_size=(-1, 0)``) they add ``+slope * column`` to the scores instead of
``-slope * (row - column)``: the same softmax, but a log-sum-exp that is larger by ``slope * row``, with row counted
from the sequence's first key. Everywhere else it is the sum of the scores as documented. A row that sees no key has
+inf, which `linbias.merge` does not know: `merge_states` puts results of this page together.
``linbias.alibi_attention(..., return_aux=True)`` gives the relative form always, and -inf.
"""

from .functions import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, merge_states
from .packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "merge_states",
]
