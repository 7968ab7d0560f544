# SPDX-License-Identifier: Apache-2.0
"""`AlibiCache`: `linbias.KVCache` as a transformers cache, for patched models.

With a window it keeps its size however long a text goes on, with pages beams share what they have in common, and it
can be cropped and reordered in place. Without these a patched model is as fast on a DynamicCache; see growing.py.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..cache import KVCache
from ..semantics.checks import readable
from ..semantics.tokens import Tokens
from .mask import AttentionMask, has_holes, pair_mask, token_mask

_ONLY_PATCHED = (
    "an AlibiCache hands no keys out: only models patched by linbias.patch can use it; give other models a DynamicCache"
)


class AlibiLayer(CacheLayerMixin):
    """One layer's `KVCache`, with the bookkeeping transformers asks of a cache layer.

    transformers counts columns of its batch, padding included; `KVCache` keeps real tokens only.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, store: KVCache) -> None:
        super().__init__()
        self.store = store
        self.columns = 0
        """Tokens so far, padding included."""
        self.real: Tensor | None = None
        """(B, columns) bool, once there was a mask: which of them are tokens and which padding."""

    def append(self, key: Tensor, value: Tensor, mask: AttentionMask) -> None:
        """Take in the new tokens of one pass."""
        real = mask.keys.real
        self.store.append(key, value, mask=real, positions=mask.keys.position)
        tokens = key.shape[2]
        if real is not None or self.real is not None:
            before = key.new_ones(key.shape[0], self.columns, dtype=torch.bool) if self.real is None else self.real
            now = key.new_ones(key.shape[0], tokens, dtype=torch.bool) if real is None else real
            self.real = _compact(torch.cat([before, now], 1))
        self.columns += tokens
        self.is_initialized = True

    def attend(self, query: Tensor, mask: AttentionMask, *, scale: float, dropout_p: float) -> Tensor:
        """(B, H, T, V): from the tokens just appended to all that is kept."""
        options: dict[str, Any] = {"causal": mask.causal, "attn_mask": mask.attn_mask}
        out = self.store.attend(query, mask.slopes, scale=scale, dropout_p=dropout_p, **options)
        assert isinstance(out, Tensor)  # a tuple comes with return_aux only
        return out

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The first append does it."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: what an unpatched layer would do with the keys is not what the cache holds them for."""
        raise TypeError(_ONLY_PATCHED)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As if nothing had been evicted."""
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Columns so far, evicted ones included: `generate` finds the new tokens by it."""
        return self.columns

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def reset(self) -> None:
        """Forget all tokens."""
        self.store.reset()
        self.columns, self.real = 0, None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last ``-tokens_to_remove`` tokens back, as assisted generation does with rejected ones.

        Raises:
            ValueError: a positive number, or padding among those tokens, or a window that has moved on too far.
        """
        count = -tokens_to_remove
        if count < 0:
            raise ValueError(f"tokens_to_remove must be negative, minus the number of tokens, got {tokens_to_remove}")
        unpadded = self.columns if self.real is None else int(self.real.all(0).flip(0).cumprod(0).sum())
        if unpadded < count < self.columns:
            raise ValueError(f"cannot take back {count} tokens: only the last {unpadded} are free of padding")
        if count and self.columns:
            # Padding is among the columns and not in the store, which drops no more than it has had.
            self.store.crop(0) if count >= self.columns else self.store.drop(count)
            self.columns -= min(count, self.columns)
            self.real = None if self.real is None else _compact(self.real[:, : self.columns])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence n becomes the one at beam_idx[n]."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence, `repeats` times."""
        if self.columns:
            batch = self.store.lengths.shape[0]
            self.batch_select_indices(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences at `indices`."""
        if self.columns:
            self.store.select(indices)
            self.real = None if self.real is None else _compact(self.real[indices.to(self.real.device)])

    def offload(self) -> None:
        """Refused: blocks of keys are read where they lie."""
        raise TypeError("an AlibiCache cannot be offloaded; give it a window to bound its memory")

    def prefetch(self) -> None:
        """Refused, as `offload`."""
        self.offload()


class AlibiCache(Cache):
    """A transformers cache that keeps keys as `linbias.KVCache` does; for patched models in "exact" fidelity.

    Pass it to ``generate`` or to the model as ``cache=`` (``past_key_values=`` before transformers 5.24), with
    ``use_cache=True`` where the configuration has it off, as MPT's does. With a window and sinks, generation can go on
    without end at constant memory and speed.

    Args:
        window: (left, right): a token sees `left` tokens back; older ones are dropped. None: all are kept.
        sinks: the first tokens of each sequence that are kept and seen all the same.
        distance: "text": a sink's distance goes on growing with the text, as in training. "cache": it stops at the
            cache's size (StreamingLLM's form). See `linbias.KVCache`.
        page_size: keep keys in pages that repeated sequences share (beams); None: one stretch a sequence.

    Raises:
        ValueError: as `linbias.KVCache`.

    >>> AlibiCache(window=(1023, 0), sinks=4).get_seq_length()
    0
    """

    def __init__(
        self,
        *,
        window: tuple[int | None, int | None] | None = None,
        sinks: int = 0,
        distance: Literal["text", "cache"] = "text",
        page_size: int | None = None,
    ) -> None:
        super().__init__(layers=[])
        self._options: dict[str, Any] = {"sinks": sinks, "distance": distance, "page_size": page_size}
        self._options["window"] = window
        KVCache(**self._options)  # wrong options are told now, not at the first token

    @property
    def padded(self) -> bool:
        """Whether padding was among the tokens so far."""
        return self._real is not None and not bool(self._real.all())

    @property
    def _real(self) -> Tensor | None:
        """As the first layer has it, which knows as much of the text as the others."""
        return self.layer(0).real

    @property
    def windowed(self) -> bool:
        """Whether old tokens are dropped."""
        return self._options["window"] is not None

    def layer(self, index: int) -> AlibiLayer:
        """The layer's own cache, made when first asked for."""
        while len(self.layers) <= index:
            self.layers.append(AlibiLayer(KVCache(**self._options)))
        return self.layers[index]  # pyright: ignore[reportReturnType]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Refused; see `AlibiLayer.update`."""
        raise TypeError(_ONLY_PATCHED)

    def read_mask(
        self, mask: Tensor | None, hidden: Tensor, slopes: Tensor, *, causal: bool, counted: bool, layers: int
    ) -> AttentionMask:
        """How the layers of a pass over `hidden` (B, T, width) attend; keys are the *new* tokens.

        Args:
            mask: as for `linbias.hf.mask.read_mask`.
            hidden: the embedded new tokens.
            slopes, causal: as there.
            counted: positions count real tokens, as `KVCache` does by itself.
            layers: how many the model has.

        Raises:
            ValueError: a mask whose meaning the cache cannot keep, or layers that do not hold the same text.
        """
        batch, queries = hidden.shape[:2]
        past = self.get_seq_length()
        keys = past + queries
        held = [self.layer(index).columns for index in range(len(self.layers))]
        if any(held) and held != [past] * layers:
            raise ValueError(
                f"the layers of this cache hold {held} tokens, and the model has {layers} layers: a pass failed "
                f"midway, or another model filled it; call cache.reset() and pass the whole text again"
            )
        if (mask is None or mask.dim() == 4) and self.padded:
            raise ValueError(
                f"this cache holds a padded text, of which it keeps the real tokens only, so "
                f"{'no attention_mask' if mask is None else 'a 4-D attention_mask'} would not mean the same as without "
                f"a cache: pass attention_mask of shape ({batch}, {keys}), over cached and new tokens"
            )
        new = Tokens(queries, 0, hidden.device)
        if mask is not None and mask.dim() == 4:
            if self.windowed:
                raise ValueError(
                    "a 4-D attention_mask names every key, and this cache drops some: leave the window out, or pass a "
                    "(batch, tokens) mask"
                )
            pairs = pair_mask(mask.to(hidden.device), queries, keys)
            return AttentionMask(slopes, new, new, causal=False, attn_mask=pairs)
        if mask is not None:
            real, documents = token_mask(mask.to(hidden.device), batch, keys, keys)
            # Once a text, a device may be waited for.
            if documents is not None and not past and bool((documents > 1).any()):
                raise ValueError("attention_mask numbers several documents a row, and a cache keeps one text a row")
            new = self._new_tokens(new, real, past, counted=counted)
        return AttentionMask(slopes, new, new, causal=causal)

    def _new_tokens(self, new: Tokens, real: Tensor, past: int, *, counted: bool) -> Tokens:
        """With what (B, past + T) says of them."""
        if readable(real):
            if past:
                self._check_unchanged(real[:, :past])
            if bool(real.all()):
                return new
        if not counted and self.windowed and readable(real) and has_holes(real):
            raise ValueError(
                "attention_mask has holes, which count as distance in this model but not in a cache with a window; "
                "leave the window out, or the holes"
            )
        kept = real[:, past:]
        if not counted and not self.windowed:
            return new._replace(real=kept, position=torch.arange(past, real.shape[1], device=real.device)[None])
        return new if readable(kept) and bool(kept.all()) else new._replace(real=kept)

    def _check_unchanged(self, mask: Tensor) -> None:
        """Raise where (B, past) calls other cached tokens real than those taken in as such."""
        differs = ~mask if self._real is None else mask != self._real
        if not bool(differs.any()):
            return
        text, token = differs.nonzero()[0].tolist()
        now, then = ("a token", "padding") if mask[text, token] else ("padding", "a token")
        raise ValueError(
            f"attention_mask[{text}, {token}] calls {now} what this cache has taken in as {then}: it drops padding "
            f"when it takes tokens in, so what was real must stay so. Where generate made the mask, from pad_token_id, "
            f"pass attention_mask yourself; to change it between passes use a DynamicCache"
        )


def _compact(real: Tensor) -> Tensor | None:
    """None where all is real, if that can be told without waiting for a device."""
    return None if readable(real) and bool(real.all()) else real
