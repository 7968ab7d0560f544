# SPDX-License-Identifier: Apache-2.0
"""Several documents packed into one row, however a caller says so: `number_documents` makes a mask of their numbers.

transformers' collators without padding say it by `position_ids` that restart, by `cu_seq_lens_q` and `cu_seq_lens_k`,
or by `seq_idx`. A model's head takes them in and hands none of them on, so that they are read before it: see
`decoder.before_head`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..semantics.checks import readable, unwatched
from .mask import check_cache, numbers_of

PACKING = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def number_documents(
    mask: Tensor | None, shape: tuple[int, int], given: Mapping[str, Any], cache: Any
) -> tuple[Tensor | None, bool]:
    """The mask with documents numbered from 1, and whether there are known to be several.

    Args:
        mask: as it came.
        shape: (B, T) of the new tokens.
        given: the model's other arguments, those of `PACKING` among them.
        cache: a transformers cache, or None.

    Raises:
        TypeError, ValueError: several documents, and a cache, which keeps one text a row; or boundaries that do not
            fit; or a cache that patched layers cannot attend over.
    """
    if cache is not None:
        check_cache(cache)
    if mask is not None and mask.dim() != 2:
        return mask, False
    numbers = None if mask is None else numbers_of(mask)
    if numbers is not None and numbers.shape[1] < shape[1]:
        return mask, False  # which read_mask refuses
    several = numbers is not None and numbers.dtype != torch.bool and readable(numbers) and bool((numbers > 1).any())
    packing = {name: given[name] for name in PACKING if given.get(name) is not None}
    # In a compiled step on a cache positions go on; only reading them could tell.
    if packing and shape[1] > 1 and (unwatched() or cache is None):
        starts = _starts(packing, numbers, shape)
        if not unwatched() or bool(starts.any()):
            several = several or unwatched()
            if cache is None:
                numbered = starts.cumsum(-1).expand(shape) + 1
                mask = numbered if numbers is None else torch.where(numbers.to(starts.device) > 0, numbered, 0)
    if several and cache is not None:
        raise ValueError(
            f"attention_mask or {', '.join(PACKING)} pack several documents into a row, and a cache keeps one text a "
            f"row: pass use_cache=False and no cache, or one document a row, padded"
        )
    return mask, several


def _starts(packing: Mapping[str, Any], numbers: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """(b, T) bool: where another document starts than at the place before."""
    device = next((part.device for part in packing.values() if isinstance(part, Tensor)), torch.device("cpu"))
    places = torch.arange(shape[1], device=device)
    # Without a mask every token is of one number.
    own = torch.ones_like(places)[None] if numbers is None else numbers[:, -shape[1] :].to(device).long()
    real = own > 0
    # The last real token before each place; -1: none.
    latest = torch.where(real, places, -1).cummax(1).values
    before = torch.nn.functional.pad(latest[:, :-1], (1, 0), value=-1)
    goes_on = own == own.gather(1, before.clamp_min(0))
    for name, part in packing.items():
        values = _rows(name, part, shape, places)
        previous = values.gather(1, before.clamp_min(0).expand_as(values))
        if name == "position_ids":
            # Across padding positions may have gone on counting; otherwise what does not follow is another document.
            goes_on = goes_on & (values > previous) & ((values == previous + 1) | (places - before > 1))
        else:
            goes_on = goes_on & (values == previous)
    return real & (before >= 0) & ~goes_on


def _rows(name: str, part: Any, shape: tuple[int, int], places: Tensor) -> Tensor:
    """(B, T) positions, or numbers of documents."""
    batch, tokens = shape
    values = torch.as_tensor(part, device=places.device)
    if name.startswith("cu_"):
        ends = values.flatten().to(torch.int64)
        fits = batch == 1 and len(ends) > 1
        if fits and unwatched():
            fits = int(ends[0]) == 0 and int(ends[-1]) == tokens and bool((ends.diff() >= 0).all())
        if not fits:
            raise ValueError(f"{name} must rise from 0 to the number of tokens, {tokens}, of a batch of 1, got {part}")
        return torch.searchsorted(ends, places, right=True)[None]
    values = values[None] if values.dim() == 1 else values
    if values.dim() != 2 or values.shape[0] not in (1, batch) or values.shape[1] != tokens:
        raise ValueError(f"{name} must have shape ({tokens},) or ({batch}, {tokens}), got {tuple(values.shape)}")
    return values.expand(batch, tokens)
