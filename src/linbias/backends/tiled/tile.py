# SPDX-License-Identifier: Apache-2.0
"""One piece of the work, tiles of one size: its scores, what they add to a softmax, and to the gradients.

Where the table says that every pair is visible and on one side, the distance is a difference of positions, so the bias
is a ramp over the keys, added by the matrix product, and a number a row, which the softmax takes with its shift. Both
count from the tile's nearest key, so they never cancel, at any length. Elsewhere semantics/blocks.py is asked pair by
pair.

n tiles of M rows by N keys; `bh` counts (batch item, query head) pairs. What is one number a row is kept in fp64 where
there is one: a row's largest score and lse grow with the distance of what it sees, and fp32 would drop their digits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...semantics.blocks import Blocks, Tiles, difference
from ...semantics.dropout import keep_mask
from ...semantics.problem import Gradients
from .pieces import Call, Piece, flat, kinds_of, wide
from .table import ANY, PAST


@dataclass(frozen=True)
class Pairs:
    """A piece's pairs by the rule of semantics/blocks.py, without their contents."""

    bias: Tensor
    """(n, M, N)."""
    distance: Tensor
    """(n, M, N); in this and the next two 1 for n where all tiles are alike."""
    future: Tensor | None
    """(n, M, N) bool: the key is later; None where both sides have one slope."""
    hidden: Tensor | None
    """(n, M, N) bool; None: nothing is."""

    @staticmethod
    def of(call: Call, piece: Piece) -> "Pairs":
        """Evaluate each pair; heads that look at the same tile share what they can."""
        distinct, same = _distinct(call, piece)
        queries, keys = call.tokens_of(distinct)
        tiles = Tiles.of(Blocks.of(queries).down(), Blocks.of(keys).across(), call.problem.options)

        def of_each(table: Tensor) -> Tensor:
            return table[:, 0] if len(distinct.bh) == 1 else table[same.to(table.device), 0]

        distance, later, hidden = of_each(tiles.distance.low.to(call.query.dtype)), None, None
        if call.operands.future_slopes is not None and tiles.offset is not None:
            later = of_each(tiles.offset.low < 0)
        if tiles.visible.some.dim():
            hidden = of_each(~tiles.visible.some)
        if call.operands.attn_mask is not None:
            masked = ~_mask(call, call.operands.attn_mask, piece)
            hidden = masked if hidden is None else hidden | masked
        if tiles.offset is None and hidden is not None:
            distance = distance.masked_fill(hidden, 0.0)  # a hidden point may stand at NaN
        past = call.slopes_of(piece, 0)
        bias = distance * (past if later is None else torch.where(later, call.slopes_of(piece, 1), past))
        if call.infinite:
            bias = torch.where(distance == 0, 0.0, bias)
            gone = bias == torch.inf
            hidden = gone if hidden is None else hidden | gone
        return Pairs(bias, distance, later, hidden)


def _distinct(call: Call, piece: Piece) -> tuple[Piece, Tensor]:
    """The piece with each tile once that differs to the rule, and for each of its n tiles which of these it is.

    Heads differ in their slopes alone; and where tokens are nothing but counted, only the offset tells tiles apart.
    """
    items, row, key = piece.bh // call.problem.heads, piece.row, piece.key
    if all(tokens.shared for tokens in call.tokens):
        items = torch.zeros_like(items)
    if all(tokens.plain for tokens in call.tokens):
        row, key = row - key, torch.zeros_like(key)
    one, same = kinds_of(items, row, key)
    bh = items[one] * call.problem.heads
    return Piece(bh, row[one], key[one], piece.height, piece.width, piece.side), same


def _mask(call: Call, mask: Tensor, piece: Piece) -> Tensor:
    """(n, M, N): attn_mask of these pairs."""
    full = mask.expand(call.problem.batch, call.problem.heads, call.problem.queries, call.problem.keys)
    bh, row, key = (each.to(mask.device) for each in (piece.bh, piece.row, piece.key))
    items, heads = bh // call.problem.heads, bh % call.problem.heads
    rows = row[:, None] + torch.arange(piece.height, device=mask.device)
    keys = key[:, None] + torch.arange(piece.width, device=mask.device)
    return full[items[:, None, None], heads[:, None, None], rows[:, :, None], keys[:, None, :]]


@dataclass(frozen=True)
class Scores:
    """``cap(scale * q @ k.T) - bias`` of a piece, and what it was made of."""

    relative: Tensor
    """(n, M, N): the score plus `lead`; -inf where hidden."""
    lead: Tensor | None
    """(n, M, 1), wide: what every score of a row lacks on a PAST or FUTURE side; None: nothing."""
    distance: tuple[Tensor, Tensor] | Tensor
    """Row and key distances from the tile's origin, (n, M) and (n, N), whose sum it is; or as in `Pairs`."""
    future: Tensor | None
    """As in `Pairs`; None on one side."""
    hidden: Tensor | None
    """As in `Pairs`; None on one side."""
    tanh: Tensor | None
    """(n, M, N): tanh(content / softcap) under a soft cap."""

    @staticmethod
    def of(call: Call, piece: Piece, query: Tensor, key: Tensor) -> "Scores":
        """Evaluate the piece, of whose tiles these are the queries (n, M, D) and keys (n, N, D)."""
        if piece.side != ANY:
            return _one_sided(call, piece, query, key)
        pairs = Pairs.of(call, piece)
        content, tanh = _content(call, query, key, -pairs.bias)
        if pairs.hidden is not None:
            content.masked_fill_(pairs.hidden, -torch.inf)
        return Scores(content, None, pairs.distance, pairs.future, pairs.hidden, tanh)


def _content(call: Call, query: Tensor, key: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
    """cap(q @ k.T) + bias, (n, M, N), and the tanh of the cap."""
    cap = call.problem.options.softcap
    if cap is None:
        return torch.baddbmm(bias, query, key.mT), None
    tanh = torch.bmm(query, key.mT).div_(cap).tanh_()
    return tanh * cap + bias, tanh


def _one_sided(call: Call, piece: Piece, query: Tensor, key: Tensor) -> Scores:
    rows, keys = (tokens.places() for tokens in call.tokens_of(piece))
    past = piece.side == PAST
    origin = keys.amax(1, keepdim=True) if past else keys.amin(1, keepdim=True)
    minus = torch.sub if call.tokens[0].position is None else difference
    rows, keys = (minus(places, origin).abs() for places in (rows, keys))
    slopes = call.slopes_of(piece, 0 if past else 1)
    ramp = -slopes * keys.to(slopes.dtype).unsqueeze(1)
    content, tanh = _content(call, query, key, ramp)
    lead = slopes.to(wide(slopes.device)) * rows.unsqueeze(-1)
    return Scores(content, lead, (rows, keys), None, None, tanh)


def _exp(scores: Scores, shift: Tensor) -> tuple[Tensor, Tensor]:
    """exp(score - shift) as (n, M, N), computed in place, times (n, M, 1), wide; `shift` is (n, M, 1), wide.

    The second factor is what rounding drops of the shift, which may be larger than any score. The first is 0 where
    hidden and never a subnormal number: processors take a hundred times longer over those, and far keys of a steep head
    would give millions. Its floor is about the square of eps, so that N keys at it are nothing beside the rounding of
    the row's largest weight.
    """
    total, dropped = shift, 0.0
    if scores.lead is not None:
        total = shift + scores.lead
        added = total - shift
        dropped = (shift - (total - added)) + (scores.lead - added)
    used = total.to(scores.relative.dtype)
    rest = torch.where(used.isfinite(), (used - total) - dropped, 0.0)
    # From 10^16 on whole units of it are only what rounding the largest score less its bias to `shift` has added.
    rest = rest.masked_fill((rest.abs() > 1) & (rest.abs() <= shift.abs() * torch.finfo(shift.dtype).eps), 0.0)
    floor = -600.0 if used.dtype == torch.float64 else -60.0
    weights = scores.relative.sub_(used)
    # Of a shift from 10^7 on rounding drops whole units: as a factor they would lift weights off their floor.
    units = torch.where(rest.abs() > 1, rest, 0.0).to(used.dtype)
    if used.device.type != "cpu" or bool(units.any()):
        weights, rest = weights.add_(units), (rest - units).clamp(-1, 1)
    weights, rest = weights.clamp_min_(floor).exp_(), rest.exp()
    return weights if scores.hidden is None else weights.masked_fill_(scores.hidden, 0.0), rest


def _kept(call: Call, piece: Piece) -> Tensor | None:
    """(n, M, N): 1 / (1 - p) for pairs that dropout keeps, else 0; None without dropout."""
    seed, p = call.operands.seed, call.problem.options.dropout_p
    if seed is None:
        return None
    device = seed.device
    bh, row = piece.bh.to(device)[:, None], piece.row.to(device)[:, None] + torch.arange(piece.height, device=device)
    items, heads = bh // call.problem.heads, bh % call.problem.heads
    kept = [
        keep_mask(seed, p, items[tile], heads[tile], row[tile], key, piece.width)
        for tile, key in enumerate(piece.key.tolist())
    ]
    return torch.stack(kept).to(call.query.dtype).div_(1 - p)


@dataclass(frozen=True)
class Softmax:
    """A softmax under way, relative to the largest score so far: normalised once, at the end, by the sum as it is.

    Dividing by exp(lse) instead would multiply the output by the rounding of the lse, which grows with the distance.
    """

    row_max: Tensor
    """(BH * T,), wide: the largest score; -inf before any."""
    row_sum: Tensor
    """(BH * T,), wide: sum of exp(score - row_max)."""
    out: Tensor | None
    """(BH * T, V): sum of exp(score - row_max) * value; None where only the lse is wanted."""

    @staticmethod
    def of(call: Call, *, with_value: bool = True) -> "Softmax":
        """Before any key."""
        row_max = call.query.new_full((call.rows,), -torch.inf, dtype=wide(call.query.device))
        out = call.query.new_zeros((call.rows, call.problem.value_dim)) if with_value else None
        return Softmax(row_max, torch.zeros_like(row_max), out)

    def add(self, call: Call, piece: Piece) -> None:
        """Merge a piece into the softmax of its rows."""
        rows, keys = call.rows_of(piece), call.keys_of(piece)
        scores = Scores.of(call, piece, rows.take(call.query), keys.take(call.key))
        old, row_sum = rows.take(self.row_max), rows.take(self.row_sum)
        found = scores.relative.amax(-1).to(old.dtype)
        row_max = torch.maximum(old, found if scores.lead is None else found - scores.lead.squeeze(-1))
        shift = torch.where(row_max == -torch.inf, 0.0, row_max)
        weights, rest = _exp(scores, shift.unsqueeze(-1))
        fade = (old - shift).exp()
        rows.put(self.row_max, old.copy_(row_max))
        rows.put(self.row_sum, row_sum.mul_(fade).addcmul_(weights.sum(-1).to(old.dtype), rest.squeeze(-1)))
        if self.out is None:
            return
        kept = _kept(call, piece)
        if kept is not None:
            weights.mul_(kept)
        out = rows.take(self.out).mul_(fade.to(self.out.dtype).unsqueeze(-1))
        rows.put(self.out, out.addcmul_(torch.bmm(weights, keys.take(call.value)), rest.to(out.dtype)))

    def lse(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(BH * T,) twice: the log of the sum, -inf where nothing was visible, and what rounding to `dtype` drops."""
        log_sum = self.row_sum.log()
        high = (self.row_max + log_sum).to(dtype)
        low = (self.row_max - high) + log_sum
        return high, torch.where(high.isfinite(), low, 0.0).to(dtype)

    def mean(self) -> Tensor:
        """(BH * T, V): the output; 0 where nothing was visible, or weighs anything."""
        assert self.out is not None
        mean = self.out / torch.where(self.row_sum == 0, 1.0, self.row_sum).to(self.out.dtype).unsqueeze(-1)
        return mean.masked_fill_((self.row_max == -torch.inf).unsqueeze(-1), 0.0)


@dataclass(frozen=True)
class GradientSums:
    """What a backward reads for each row, and adds up. With P the weights, K the kept ones under dropout::

    dS = P (K (grad_out @ V.T) - delta)    delta = rowsum(grad_out out) - grad_lse    S: cap(content) - bias
    grad_value = (P K).T grad_out    grad_query = scale dS' key    grad_key = scale dS'.T query
    grad_slope = - sum dS distance                                 dS' = dS (1 - tanh^2) under a soft cap
    """

    grad_out: Tensor | None
    """(BH * T, V); None: only the lse has a gradient, and values play no part."""
    lse: tuple[Tensor, Tensor]
    """(BH * T,) each, wide: its two parts; inf and 0 for rows that saw nothing."""
    delta: Tensor
    """(BH * T,)."""
    query: Tensor
    """(BH * T, D), a sum; likewise below."""
    key: Tensor
    """(K * S, D)."""
    value: Tensor
    """(K * S, V)."""
    slopes: Tensor
    """(2, BH), wide: past and future."""

    @staticmethod
    def of(
        call: Call, saved: tuple[Tensor, Tensor, Tensor], grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> "GradientSums":
        """Start from zero; `saved` are the output and both parts of the lse, and (B, H, ...) tensors come in."""
        dtype, row = call.query.dtype, wide(call.query.device)
        out, lse, lse_low = (tensor.flatten(0, 2) for tensor in saved)
        unseen = lse == -torch.inf
        wanted, delta = None, torch.zeros_like(lse)
        if grad_out is not None:
            # Nothing may come from rows that saw nothing: 0 * NaN is NaN in the products.
            wanted = flat(grad_out, dtype).masked_fill(unseen.unsqueeze(-1), 0.0)
            delta = (wanted * out.to(dtype)).sum(-1)
        high = lse.to(row) + lse_low.to(row)
        low = (lse.to(row) - high) + lse_low.to(row)
        low = torch.where(low.abs() <= 1, low, 0.0)  # more than that only rounding has added
        if grad_lse is not None:
            delta = delta - grad_lse.to(dtype).flatten(0, 2).masked_fill(unseen, 0.0)
        return GradientSums(
            grad_out=wanted,
            lse=(high.masked_fill(unseen, torch.inf), low),
            delta=delta,
            query=call.query.new_zeros(call.query.shape),
            key=call.key.new_zeros(call.key.shape),
            value=call.value.new_zeros(call.value.shape),
            slopes=torch.zeros(call.slopes.shape, dtype=row, device=lse.device),
        )

    def add(self, call: Call, piece: Piece, needs: tuple[bool, ...]) -> None:
        """One piece's part of every gradient that is needed."""
        rows, keys = call.rows_of(piece), call.keys_of(piece)
        query, key = rows.take(call.query), keys.take(call.key)
        scores, kept = Scores.of(call, piece, query, key), _kept(call, piece)
        lse, lse_low = (rows.take(part).unsqueeze(-1) for part in self.lse)
        weights, rest = _exp(scores, lse)
        # The row's share of each weight goes with what multiplies the row.
        rest = (rest * (-lse_low).exp()).to(call.query.dtype)
        delta = rows.take(self.delta).unsqueeze(-1) * rest
        if self.grad_out is None:
            grad = weights * -delta
        else:
            grad_out = rows.take(self.grad_out) * rest
            if needs[2]:
                shown = weights if kept is None else weights * kept
                keys.add(self.value, torch.bmm(shown.mT, grad_out))
            grad = torch.bmm(grad_out, keys.take(call.value).mT)
            if kept is not None:
                grad.mul_(kept)
            grad.sub_(delta).mul_(weights)
        if scores.hidden is not None:
            # A hidden key's value may be anything finite, so its product may be inf, and inf * 0 is NaN.
            grad.masked_fill_(scores.hidden, 0.0)
        if needs[3] or needs[4]:
            self._add_slopes(piece, scores, grad)
        if scores.tanh is not None:
            grad.mul_(1 - scores.tanh.square())
        if needs[0]:
            total = rows.take(self.query)
            rows.put(self.query, total.add_(torch.bmm(grad, key)))
        if needs[1]:
            keys.add(self.key, torch.bmm(grad.mT, query))

    def _add_slopes(self, piece: Piece, scores: Scores, grad: Tensor) -> None:
        if isinstance(scores.distance, tuple):
            # No term cancels another's distance: both parts count from the nearest key.
            rows, keys = (distance.to(self.slopes.dtype) for distance in scores.distance)
            total = (grad.sum(2) * rows).sum(1) + (grad.sum(1) * keys).sum(1)
            self._add_to_heads(0 if piece.side == PAST else 1, piece, total)
            return
        terms = grad * scores.distance
        if scores.future is not None:
            later = terms.masked_fill(~scores.future, 0.0).sum((1, 2))
            self._add_to_heads(1, piece, later)
            terms = terms.masked_fill_(scores.future, 0.0)
        self._add_to_heads(0, piece, terms.sum((1, 2)))

    def _add_to_heads(self, side: int, piece: Piece, totals: Tensor) -> None:
        bh, totals = piece.bh.to(totals.device), totals.to(self.slopes.dtype)
        if totals.device.type == "cpu":
            self.slopes[side].index_add_(0, bh, totals, alpha=-1)
            return
        # An addition by index is not deterministic everywhere. No product: a NaN stays in its own head.
        heads = bh == torch.arange(self.slopes.shape[1], device=bh.device)[:, None]
        self.slopes[side] -= torch.where(heads, totals, 0.0).sum(1)

    def gradients(self, call: Call, needs: tuple[bool, ...]) -> Gradients:
        """In the shapes and dtypes of the call."""
        problem, operands = call.problem, call.operands
        past, future = (each.unflatten(0, (problem.batch, problem.heads)) for each in self.slopes)
        past, of_future = (past + future, None) if operands.future_slopes is None else (past, operands.future_slopes)
        return Gradients(
            query=(self.query * problem.options.scale).to(problem.dtype).view_as(operands.query) if needs[0] else None,
            key=self.key.to(problem.dtype).view(operands.key.shape) if needs[1] else None,
            value=self.value.to(problem.dtype).view(operands.value.shape) if needs[2] else None,
            slopes=_unbroadcast(past, operands.slopes) if needs[3] else None,
            future_slopes=_unbroadcast(future, of_future) if needs[4] and of_future is not None else None,
        )


def _unbroadcast(gradient: Tensor, like: Tensor) -> Tensor:
    return (gradient if gradient.shape == like.shape else gradient.sum(0, keepdim=True)).to(like.dtype)
