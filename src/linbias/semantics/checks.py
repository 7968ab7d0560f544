# SPDX-License-Identifier: Apache-2.0
"""Bring what the user passed into the shapes of `Operands`, or say what is wrong with it.

Only shapes, dtypes and devices are read, never values: a check that reads values would wait for the GPU, break
compiled graphs and cost more than the small calls it guards. The few that need one ask `readable` first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

METRICS = ("euclidean", "manhattan")
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
"""Types of which a tensor is what it seems; a subclass may mean anything."""
_LARGEST = torch.finfo(torch.float32).max
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tensor(name: str, value: object, like: Tensor | None = None) -> Tensor:
    """`value` as a dense tensor on the device of `like`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        remedy = "alibi_attention_varlen takes sequences laid end to end" if value.is_nested else "pass .to_dense()"
        kind = "a nested tensor" if value.layout is torch.strided else value.layout
        raise TypeError(f"{name} must be dense, of layout torch.strided, got {kind}; {remedy}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} must be on the query's device {like.device}, got {value.device}; move it with .to()")
    return value


def unwatched() -> bool:
    """No tracer, transform or mode is active, so tensors are what they seem and may be kept."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None  # pyright: ignore
        or torch._C._len_torch_dispatch_stack()  # pyright: ignore
        or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
    )


def autocast_enabled(kind: str) -> bool:
    """Whether torch's autocast is on for this type of device."""
    available = kind == "cpu" or (kind != "meta" and torch.amp.is_autocast_available(kind))
    return available and torch.is_autocast_enabled(kind)


def readable(tensor: Tensor) -> bool:
    """Whether reading a value waits for no device and breaks no trace."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and unwatched()


def check_flag(name: str, value: object) -> bool:
    """True or False, nothing that only counts as one of them."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_number(name: str, value: object) -> float:
    """A Python number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name} must be a Python number, got {type(value).__name__}; a tensor's value is not read")
    return float(value) if isinstance(value, int) else value  # pyright: ignore[reportReturnType]  (symbols stand for numbers)


def check_share(name: str, value: object, meaning: str = "") -> float:
    """A number in [0, 1)."""
    if not 0 <= (share := check_number(name, value)) < 1:
        raise ValueError(f"{name} must be in [0, 1){meaning and ', ' + meaning}, got {value}")
    return share


def check_tolerance(value: object, default: float) -> float:
    """A share of a row's weight; None: the default."""
    return default if value is None else check_share("tolerance", value, "a share of a row's softmax weight")


def check_scale(name: str, value: object, default: float) -> float:
    """What multiplies the dot product; None: the default."""
    if value is None:
        return default
    if not -_LARGEST <= (scale := check_number(name, value)) <= _LARGEST:
        raise ValueError(f"{name} must be finite in float32, or None for 1 / sqrt(head dim), got {value}")
    return scale


def check_softcap(value: object) -> float | None:
    """A positive number; None: none."""
    if value is None:
        return None
    if not 0 < (softcap := check_number("softcap", value)) <= _LARGEST:
        raise ValueError(f"softcap must be positive and finite in float32, or None for none, got {value}")
    return softcap


def check_count(name: str, value: object) -> int:
    """A non-negative int."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < 0:
        raise ValueError(f"{name} must be an int >= 0, got {value!r}")
    if value >= 2**63:
        raise ValueError(f"{name} must be an int >= 0 and below 2**63, got {value!r}")
    return value  # pyright: ignore[reportReturnType]  (a SymInt stands for an int under torch.export)


def slope_rows(
    name: str, slopes: Tensor, batch: int | None, heads: int | None, dtype: torch.dtype, like: Tensor | None = None
) -> Tensor:
    """(H,), (1, H) or (B, H) slopes as (1, H) or (B, H) in the accumulating dtype; None: any size."""
    check_tensor(name, slopes, like)
    if slopes.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{name} must be float32 or float64, got {slopes.dtype}: in half precision or integers their digits are "
            f"already lost; compute them with alibi_slopes and keep them out of .half()"
        )
    rows = slopes.unsqueeze(0) if slopes.dim() == 1 else slopes
    if (
        rows.dim() != 2
        or (heads is not None and rows.shape[1] != heads)
        or (batch is not None and rows.shape[0] != 1 and rows.shape[0] != batch)
    ):
        size, count = ("H" if heads is None else heads), ("B" if batch is None else batch)
        raise ValueError(
            f"{name} must have shape ({size},), (1, {size}) or ({count}, {size}), one per query head, "
            f"got {tuple(slopes.shape)}; see alibi_slopes({size})"
        )
    return rows if rows.dtype == dtype else rows.to(dtype)


def position_rows(
    name: str, positions: Tensor, batch: int | None, tokens: int | None, metric: str | None, dtype: torch.dtype
) -> Tensor:
    """(T,) or (B, T) integers as (b, T) int64; under a metric (T, C) or (B, T, C) coordinates in `dtype`."""
    coordinates = 0 if metric is None else 1
    if metric is None and positions.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be integers, got {positions.dtype}; for real coordinates pass metric='euclidean'")
    if metric is not None and positions.dtype not in (*_INTEGERS, torch.float32, torch.float64):
        raise TypeError(f"{name} must be integers, float32 or float64 under a metric, got {positions.dtype}")
    if positions.requires_grad:
        raise ValueError(f"{name} gets no gradient, yet requires_grad is set; pass {name}.detach()")
    rows = positions.unsqueeze(0) if positions.dim() == 1 + coordinates else positions
    if (
        rows.dim() != 2 + coordinates
        or (tokens is not None and rows.shape[1] != tokens)
        or (batch is not None and rows.shape[0] != 1 and rows.shape[0] != batch)
    ):
        size, count = ("T" if tokens is None else tokens), ("B" if batch is None else batch)
        tail = ", C" if coordinates else ""
        raise ValueError(
            f"{name} must have shape ({size}{tail or ','}) or ({count}, {size}{tail}), got {tuple(positions.shape)}"
            + ("" if coordinates else "; coordinates need metric='euclidean' or 'manhattan'")
        )
    return rows.to(torch.int64 if metric is None else dtype)


def token_rows(
    name: str, tokens: Tensor, batch: int, count: int, dtypes: Sequence[torch.dtype], like: Tensor
) -> Tensor:
    """A per-token tensor (T,) or (B, T) as (b, T)."""
    check_tensor(name, tokens, like)
    if tokens.dtype not in dtypes:
        wanted = "bool, True = real" if torch.bool in dtypes else "integers"
        raise TypeError(f"{name} must be {wanted}, got {tokens.dtype}")
    rows = tokens.unsqueeze(0) if tokens.dim() == 1 else tokens
    if rows.dim() != 2 or rows.shape[1] != count or (rows.shape[0] != 1 and rows.shape[0] != batch):
        raise ValueError(f"{name} must have shape ({count},) or ({batch}, {count}), got {tuple(tokens.shape)}")
    return rows


def segment_rows(name: str, segments: Tensor, batch: int, count: int, like: Tensor) -> Tensor:
    """Segment numbers (T,) or (B, T), any integers, as (b, T) int64."""
    return token_rows(name, segments, batch, count, _INTEGERS, like).to(torch.int64)


def check_metric(metric: str | None) -> str | None:
    """None, "euclidean" or "manhattan"."""
    if metric is not None and metric not in METRICS:
        raise ValueError(f"metric must be None, 'euclidean' or 'manhattan', got {metric!r}")
    return metric


def check_window(window: object) -> tuple[int | None, int | None]:
    """(left, right), each a non-negative int or None."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(
            f"window must be None or (left, right), got {window!r}; a bare int is ambiguous: "
            f"write (n, 0) or (n, n), inclusive, None for an unlimited side"
        )
    left, right = window  # pyright: ignore[reportUnknownVariableType]
    return (
        None if left is None else check_count("window[0]", left),
        None if right is None else check_count("window[1]", right),
    )
