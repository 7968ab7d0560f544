# SPDX-License-Identifier: Apache-2.0
"""The tokens behind a gap that is to be closed."""

from typing import TypedDict

from torch import Tensor

from ..semantics.checks import check_count
from ..semantics.pages import gather_pages
from .layout import Layout, Storage


class Tail(TypedDict):
    """What `KVCache.append` takes; copies, since it will be written over."""

    key: Tensor
    value: Tensor
    mask: Tensor | None
    positions: Tensor | None


def tail_behind(storage: Storage, layout: Layout, start: int, stop: int) -> Tail:
    """The tokens from `stop` on, as far before their places as `start` is.

    Raises: ValueError unless ``0 <= start <= stop <=`` the slots in use.
    """
    if not check_count("start", start) <= check_count("stop", stop) <= layout.end:
        raise ValueError(f"start and stop must be 0 <= start <= stop <= {layout.end}, got {start} and {stop}")
    key, value, _, table = storage.read(layout.end, 1)
    if table is not None:
        key, value = gather_pages(key, table), gather_pages(value, table)
    places = storage.read_positions(layout.end)
    if places is not None:
        end = places[:, stop : stop + 1] - places[:, start : start + 1] if stop < layout.end else 0
        places = places[:, stop:] - end
    real = layout.real(layout.slots(key.device)[:, stop:])
    key, value = (part[:, :, stop : layout.end].clone() for part in (key, value))
    return Tail(key=key, value=value, mask=real, positions=places)
