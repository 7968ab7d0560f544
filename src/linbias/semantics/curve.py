# SPDX-License-Identifier: Apache-2.0
"""An order of points in which neighbours in the order are neighbours in space: along a Hilbert curve.

A tile of points that lie together is near few other tiles, so that a bias that grows with distance lets more of them be
skipped. The order never changes what a call means, only which tokens share a tile; no tensor value is read on the host.
"""

import torch
from torch import Tensor

from .tokens import Tokens

_BITS = 62
"""Of a code, shared among the coordinates, so that codes stay below int64's largest."""
_FINEST = 16
"""Bits a coordinate: 65,536 steps tell the neighbours of far more tokens apart than a call has."""
_LAST = 2**63 - 1


def curve_order(tokens: Tokens) -> Tensor:
    """(b, N) int64: the tokens, sorted by segment, along a curve through their coordinates.

    Those without bias, which are near everything, come first of their segment, and those that do not exist last.
    """
    points = tokens.places()
    for flags, counted in ((tokens.unbiased, False), (tokens.real, True)):
        if flags is not None:
            points = torch.where((flags == counted).unsqueeze(-1), points, torch.nan)
    code = hilbert_codes(points)
    if tokens.unbiased is not None:
        code = torch.where(tokens.unbiased, -1, code)
    if tokens.real is not None:
        code = torch.where(tokens.real, code, _LAST)
    order = code.argsort(dim=1, stable=True)
    if tokens.segment is None:
        return order
    order, segment = torch.broadcast_tensors(order, tokens.segment)
    return order.gather(1, segment.gather(1, order).argsort(dim=1, stable=True))


def hilbert_codes(points: Tensor) -> Tensor:
    """(b, N, C) floating coordinates as (b, N) int64 places along a Hilbert curve through their bounding cube.

    Coordinates beyond the 62nd are left out, and what is not finite counts as the lowest.

    Reference: Skilling, "Programming the Hilbert curve", AIP Conference Proceedings 707 (2004).
    """
    if points.shape[1] == 0 or points.shape[2] == 0:
        return points.new_zeros(points.shape[:2], dtype=torch.int64)
    axes = min(points.shape[2], _BITS)
    bits = min(_BITS // axes, _FINEST)
    x = list(_steps(points[..., :axes], bits).unbind(-1))
    # From the coarsest cube inwards: undo the reflection and the exchange of axes that the curve makes in each.
    for low in (2**bit - 1 for bit in range(bits - 1, 0, -1)):
        for i in range(axes):
            upper = (x[i] & (low + 1)) != 0
            exchanged = torch.where(upper, 0, (x[0] ^ x[i]) & low)
            x[0] = x[0] ^ torch.where(upper, low, exchanged)
            x[i] = x[i] ^ exchanged if i else x[0]
    for i in range(1, axes):
        x[i] = x[i] ^ x[i - 1]
    turned = torch.zeros_like(x[0])
    for low in (2**bit - 1 for bit in range(bits - 1, 0, -1)):
        turned = turned ^ torch.where((x[-1] & (low + 1)) != 0, low, 0)
    code = torch.zeros_like(x[0])
    for bit in range(bits - 1, -1, -1):
        for axis in x:
            code = (code << 1) | (((axis ^ turned) >> bit) & 1)
    return code


def _steps(points: Tensor, bits: int) -> Tensor:
    """Coordinates as int64 in [0, 2**bits), in steps of a power of two that is one for all axes: distances keep their
    proportions, and the cells of a grid stay whole.
    """
    finite = points.isfinite()
    above = torch.where(finite, points - torch.where(finite, points, torch.inf).amin(1, keepdim=True), 0.0)
    step = torch.exp2(bits - 1 - above.amax((1, 2), keepdim=True).log2().floor())
    steps = above * step
    return torch.where(steps.isfinite(), steps, 0.0).clamp_(0, 2**bits - 1).to(torch.int64)
