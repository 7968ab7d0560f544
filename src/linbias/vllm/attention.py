# SPDX-License-Identifier: Apache-2.0
"""Attention of vLLM's layers with ALiBi slopes, on its own paged cache.

A step brings queries of several sequences, one after the other, each the newest tokens of its sequence; their keys
were just written to pages. Neighbours with equally many queries are one call, so decoding is one call and a chunk of a
prompt one of its own. Beside the pages each layer keeps the largest norm of their keys: what no head can see is not
read.
"""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata

from ..attention import output as attend
from ..prepare import AttentionOptions, resolve
from ..semantics.bounds import KeyBounds, upper_norms
from ..semantics.tokens import Tokens
from .cores import use_cores_of_openmp

_log = init_logger(__name__)


class AlibiBackend(CPUAttentionBackend):
    """vLLM's backend for CPUs, whose layers with slopes attend here."""

    @staticmethod
    def get_impl_cls() -> type["AlibiLayer"]:
        """The layer's class."""
        return AlibiLayer


class AlibiLayer(CPUAttentionBackendImpl):
    """One layer's attention; vLLM's own where there are no slopes, or where something is asked that linbias has not."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._norms = torch.empty(0)
        self._pages = (0, torch.Size())
        self._measured = get_current_vllm_config().kv_transfer_config is None  # a connector fills pages by itself
        self._ours = self.alibi_slopes is not None
        if self._ours and (reason := self._why_not()) is not None:
            self._ours = False
            _log.warning_once("linbias leaves layers with ALiBi to vLLM's own attention: %s", reason)
        if self._ours:
            use_cores_of_openmp()

    def _why_not(self) -> str | None:
        if self.is_fp8_kv_cache:
            return "it reads no fp8 keys; use kv_cache_dtype='auto'"
        if self.sinks is not None:
            return "it has no learned attention sinks"
        if self.attn_type != AttentionType.DECODER:
            return f"it serves decoders, not layers of type {self.attn_type!r}"
        if self.kv_sharing_target_layer_name is not None:
            return "a layer that reads the keys of another keeps no bounds of them"
        return None

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write (tokens, G, D) keys and values to their slots, and account for their norms."""
        if not self._ours:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        keys, values = pages_of(kv_cache)
        slots = slot_mapping[: key.shape[0]]
        if slots.numel() and int(slots.amin()) < 0:  # padding of the batch has no slot
            real = slots >= 0
            slots, key, value = slots[real], key[: len(real)][real], value[: len(real)][real]
        page, place = slots // keys.shape[2], slots % keys.shape[2]
        keys[page, :, place], values[page, :, place] = key[: len(slots)], value[: len(slots)]
        if self._measured:
            self._measure(keys, page, place, upper_norms(key[: len(slots)]))

    def _measure(self, keys: Tensor, page: Tensor, place: Tensor, fresh: Tensor) -> None:
        """Raise the bounds of the pages written to; a page that starts anew starts from 0."""
        if self._pages != (pages := (keys.data_ptr(), keys.shape)):
            self._norms, self._pages = fresh.new_zeros(*keys.shape[:2], 1), pages
        self._norms[page[place == 0]] = 0.0
        self._norms.scatter_reduce_(0, page[:, None, None].expand(-1, keys.shape[1], 1), fresh[..., None], "amax")

    def forward(  # noqa: PLR0913, PLR0917  (vLLM's)
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Fill (tokens, H * D) `output` with the attention of (tokens, H, D) queries to the keys in pages."""
        plan = attn_metadata
        if not self._ours or plan is None or output_scale is not None or output_block_scale is not None:
            given = (layer, query, key, value, kv_cache, plan, output, output_scale, output_block_scale)
            return super().forward(*given)
        if not plan.causal or plan.dynamic_causal is not None:
            raise NotImplementedError("linbias attends causally in vLLM; start it with VLLM_PLUGINS='' for this model")
        out, start = output.view(-1, self.num_heads, self.head_size), 0
        counts = plan.query_start_loc.diff().tolist()
        first = 0
        for count, members in groupby(counts):
            batch = len(list(members))
            stop, rows = start + batch * count, slice(first, first + batch)
            if count:
                part = query[start:stop].view(batch, count, self.num_heads, self.head_size).transpose(1, 2)
                found = self._attend(part, kv_cache, plan.seq_lens[rows].long(), plan.block_table[rows])
                out[start:stop] = found.transpose(1, 2).flatten(0, 1)
            start, first = stop, first + batch
        return output

    def _attend(self, query: Tensor, kv_cache: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        """(B, H, T, D): the newest T tokens of B sequences to all they have."""
        keys, values = pages_of(kv_cache)
        length, queries, page = int(lengths.amax()), query.shape[2], keys.shape[2]
        options: AttentionOptions = {"causal": True, "scale": self.scale}
        if self.sliding_window > 0:
            options["window"] = (self.sliding_window - 1, 0)
        if self.logits_soft_cap:
            options["softcap"] = self.logits_soft_cap
        sides = Tokens(queries, length - queries, query.device), Tokens(length, 0, query.device)
        problem, operands = resolve(
            (query, keys, values),
            self.alibi_slopes,
            options,
            sides,
            bounds=KeyBounds(self._norms, page) if self._measured else None,
            lengths=lengths,
            table=table[:, : -(-length // page)].long(),
        )
        return attend(problem, operands, "auto")


def pages_of(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (P, G, page, D) of vLLM's (P, G, page, 2 * D), where a head's keys lie before its values."""
    blocks, heads, page, _ = kv_cache.shape
    keys, values = kv_cache.view(blocks, heads, 2 * page, -1).chunk(2, dim=2)
    return keys, values
