# SPDX-License-Identifier: Apache-2.0
"""The rule: one-sided for blocks of n tokens against the pairs of blocks of one, and those against literal answers."""

import math
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from linbias import alibi_bias, alibi_slopes
from linbias.semantics import blocks
from linbias.semantics.blocks import Answer, Blocks, Span, Tiles, dense, difference, in_tiles, mask_tiles
from linbias.semantics.problem import Options
from linbias.semantics.tokens import Tokens
from linbias.testing import PROBLEMS, Case, make_inputs

HALF = torch.tensor([0.5])
SIZES = (1, 2, 5, 64)


# --- blocks of n against the pairs they hold --------------------------------------------------------------------------


def both_sides(case: Case) -> tuple[Tokens, Tokens, Options]:
    problem, operands = make_inputs(case).resolve()
    return Tokens.queries_of(operands), Tokens.keys_of(operands), problem.options


def tiles_of(queries: Tokens, keys: Tokens, options: Options, rows: int = 1, columns: int = 1) -> Tiles:
    return Tiles.of(Blocks.of(queries, rows).down(), Blocks.of(keys, columns).across(), options)


def grouped(pairs: Tensor, rows: int, columns: int, fill: float | bool) -> Tensor:
    """(b, 1, T, S) as (b, 1, I, J, rows, columns); `fill` for what hangs over the end."""
    down = in_tiles(pairs.flatten(0, 1), rows, fill)  # (b, I, rows, S)
    across = in_tiles(down.flatten(0, 2).unsqueeze(-1), columns, fill).squeeze(-1)
    return across.unflatten(0, down.shape[:3]).movedim(2, 3).unsqueeze(1)


def assert_one_sided(queries: Tokens, keys: Tokens, options: Options, rows: int, columns: int) -> None:
    """What tiles say holds of every pair in them."""
    pairs, tiles = tiles_of(queries, keys, options), tiles_of(queries, keys, options, rows, columns)
    shape = torch.broadcast_shapes(pairs.visible.some.shape, pairs.distance.low.shape)
    visible = pairs.visible.some.expand(shape)
    there = torch.ones(shape, dtype=torch.bool) if keys.real is None else keys.real[:, None, None].expand(shape)

    def of_tiles(tensor: Tensor, wide: Tensor) -> Tensor:
        return tensor.expand(wide.shape[:4])

    shown = grouped(visible, rows, columns, False)
    some, every = (of_tiles(each, shown) for each in (tiles.visible.some, tiles.visible.every))
    assert not (shown.any((4, 5)) & ~some).any(), "EMPTY, yet a pair is visible"
    assert not (every & ~shown.all((4, 5))).any(), "FULL, yet a pair is hidden or hangs over the end"
    # Of pairs that do not exist nothing is said.
    exists = grouped(there, rows, columns, False)
    for name, right in (("low", torch.le), ("high", torch.ge)):
        bound = of_tiles(getattr(tiles.distance, name), shown)[..., None, None]
        true = grouped(pairs.distance.low.expand(shape), rows, columns, 0)
        assert (right(bound, true) | ~exists | true.isnan()).all(), f"distance.{name} is no bound"
    past, future = (of_tiles(side, shown)[..., None, None] for side in tiles.sides())
    free = torch.zeros(shape, dtype=torch.bool) if pairs.free is None else pairs.free.expand(shape)
    free = grouped(free, rows, columns, False)
    if pairs.offset is None:
        assert not past.any() and not future.any(), "points have no sides"
    else:
        back = grouped(pairs.offset.low.expand(shape), rows, columns, 0)
        assert (~past | ~exists | ((back > 0) & ~free)).all(), "not all of a tile's keys are past"
        assert (~future | ~exists | ((back < 0) & ~free)).all(), "not all of a tile's keys are future"
    if tiles.free is not None:
        assert not (free.any((4, 5)) & ~of_tiles(tiles.free, shown)).any(), "a token without bias is missed"


# The rule knows neither contents nor heads, so cases that differ in these ask one question.
TOKENS = list(
    {
        (case.batch, case.queries, case.keys, case.causal, case.window, case.sinks, case.prefix, case.padding,
         case.segments, case.positions, case.metric, case.unbiased): case
        for case in PROBLEMS if case.batch and case.queries and case.keys
    }.values()
)  # fmt: skip


@pytest.mark.parametrize("case", TOKENS, ids=str)
def test_blocks_are_one_sided_about_their_pairs(case: Case):
    queries, keys, options = both_sides(case)
    for size in SIZES:
        assert_one_sided(queries, keys, options, size, size)
    assert_one_sided(queries, keys, options, 5, 2)
    pairs = tiles_of(queries, keys, options)
    assert pairs.visible.exact and pairs.distance.exact, "a pair is either visible or not, and at one distance"


@pytest.mark.parametrize("case", TOKENS, ids=str)
def test_summaries_of_summaries_are_summaries(case: Case):
    for side in both_sides(case)[:2]:
        for inner, outer in ((2, 3), (5, 2), (1, 7), (8, 1), (16, 4)):
            twice, once = Blocks.of(side, inner).joined(outer), Blocks.of(side, inner * outer)
            for name in ("position", "segment", "rank", "real", "unbiased"):
                one, other = getattr(twice, name), getattr(once, name)
                assert (one is None) == (other is None), name
                for a, b in zip(_tensors(one), _tensors(other), strict=True):
                    assert a.equal(b), f"{name} of {inner} x {outer}"


def _tensors(summary: Span | Answer | None) -> list[Tensor]:
    return [] if summary is None else list(vars(summary).values())


def test_every_answer_occurs_and_tiles_are_not_all_partial():
    """One-sidedness alone would be kept by a rule that knows nothing."""
    queries, keys, options = both_sides(Case(batch=1, queries=321, keys=321, causal=True, window=(90, 0)))
    tiles = tiles_of(queries, keys, options, 16, 16)
    whole = slice(0, 20)
    some, every = tiles.visible.some[0, 0, whole, whole], tiles.visible.every[0, 0, whole, whole]
    apart = torch.arange(20)[:, None] - torch.arange(20)
    # 16 x 16 tiles: blocks 1 to 4 back are whole, the own and the sixth back are cut, 0 to 6 back are seen.
    assert some.equal((apart >= 0) & (apart <= 6)) and every.equal((apart >= 1) & (apart <= 4))
    near, far = tiles.distance.low[0, 0, whole, whole], tiles.distance.high[0, 0, whole, whole]
    assert near.equal((16 * apart.abs() - 15).clamp_min(0)) and far.equal(16 * apart.abs() + 15)
    past, future = (side[0, 0, whole, whole] for side in tiles.sides())
    assert past.equal(apart > 0) and future.equal(apart < 0)


def test_a_block_that_hangs_over_the_end_is_not_full():
    for count, size in ((7, 2), (3, 64), (10, 4), (5, 3)):
        side = Tokens(count, 0, torch.device("cpu"))
        every = tiles_of(side, side, Options(), size, size).visible.every[0, 0]
        last = every.shape[0] - 1
        assert every[:last, :last].all() and not every[last].any() and not every[:, last].any()
    exact = Tokens(8, 0, torch.device("cpu"))
    assert Blocks.of(exact, 4).real is None, "nothing hangs over, so nothing is said"


def test_padding_does_not_widen_a_block():
    far = torch.tensor([[0, 1, 2, 3, 10**9, -(10**9), 6, 7]])
    real = torch.tensor([[True, True, True, True, False, False, True, True]])
    keys = Tokens(8, 0, torch.device("cpu"), far, segment=far, real=real)
    position, segment = Blocks.of(keys, 4).position, Blocks.of(keys, 4).segment
    for span in (position, segment):
        assert span is not None and span.low.tolist() == [[0, 6]] and span.high.tolist() == [[3, 7]]
    nothing = Blocks.of(keys._replace(real=torch.zeros(1, 8, dtype=torch.bool)), 4)
    tiles = Tiles.of(Blocks.of(Tokens(8, 0, torch.device("cpu")), 4).down(), nothing.across(), Options())
    assert not tiles.visible.some.any() and not tiles.visible.every.any()


def test_coordinates_of_no_dimension_are_at_no_distance():
    side = Tokens(7, 0, torch.device("cpu"), torch.zeros(2, 7, 0))
    for metric, size in ((metric, size) for metric in ("euclidean", "manhattan") for size in SIZES):
        tiles = tiles_of(side, side, Options(metric=metric), size, size)
        assert tiles.distance.low.eq(0).all() and tiles.distance.high.eq(0).all() and tiles.visible.some.all()


# --- the pairs themselves ---------------------------------------------------------------------------------------------


def assert_pairs_are_the_definition() -> None:
    """docs/semantics.md by hand: five queries at the end of six keys."""
    device = torch.device("cpu")
    rank, segment = torch.arange(6)[None], torch.tensor([[0, 0, 1, 1, 1, 1]])
    queries, keys = Tokens(5, 1, device), Tokens(6, 0, device, rank=rank)

    def shown(options: Options, queries: Tokens = queries, keys: Tokens = keys) -> list[str]:
        visible = tiles_of(queries, keys, options).visible.some.expand(1, 1, 5, 6)[0, 0]
        return ["".join("1" if each else "0" for each in row) for row in visible.tolist()]

    causal = ["110000", "111000", "111100", "111110", "111111"]
    assert shown(Options()) == ["111111"] * 5 and shown(Options(causal=True)) == causal
    assert shown(Options(left=1, right=1)) == ["111000", "011100", "001110", "000111", "000011"]
    assert shown(Options(causal=True, left=1)) == ["110000", "011000", "001100", "000110", "000011"]
    assert shown(Options(causal=True, left=1, sinks=1)) == ["110000", "111000", "101100", "100110", "100011"]
    assert shown(Options(causal=True, prefix=4)) == ["111100", "111100", "111100", "111110", "111111"]
    assert shown(Options(right=0)) == causal
    packed = (queries._replace(segment=segment[:, 1:]), keys._replace(segment=segment))
    assert shown(Options(causal=True), *packed) == ["110000", "001000", "001100", "001110", "001111"]
    padded = keys._replace(real=torch.tensor([[False, True, True, True, True, False]]))
    assert shown(Options(), queries, padded) == ["011110"] * 5
    tiles = tiles_of(queries, keys, Options())
    assert tiles.distance.low[0, 0].tolist() == [
        [1, 0, 1, 2, 3, 4], [2, 1, 0, 1, 2, 3], [3, 2, 1, 0, 1, 2], [4, 3, 2, 1, 0, 1], [5, 4, 3, 2, 1, 0]
    ]  # fmt: skip
    past, future = tiles.sides()
    assert past[0, 0, 0].tolist() == [True] + [False] * 5 and future[0, 0, 0].tolist() == [False] * 2 + [True] * 4


def test_pairs_are_the_definition():
    assert_pairs_are_the_definition()


@hypothesis.given(
    *[st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3), st.sampled_from(
        [-(2**63), 1 - 2**63, 2**63 - 1, 2**63 - 2, 2**62, -(2**62), 2**53, 2**53 + 1]))] * 2
)  # fmt: skip
def test_differences_saturate(a: int, b: int):
    most = 2**63 - 1
    found = difference(torch.tensor(a), torch.tensor(b)).item()
    assert found == max(-most, min(most, a - b)), "and its absolute value is an int64 too"


@pytest.mark.parametrize("base", [0, 2**53 + 1, 2**63 - 40, -(2**63)])
def test_blocks_hold_positions_at_the_ends_of_int64(base: int):
    device = torch.device("cpu")
    near = torch.tensor([[base + (37 * i) % 40 for i in range(40)]])
    wide = near.clone()
    wide[0, ::3] = -(2**63)
    wide[0, 1::3] = 2**63 - 1
    for places, options in ((near, Options(causal=True, left=11)), (wide, Options(causal=True, left=2**62, right=5))):
        side = Tokens(40, 0, device, places)
        for size in SIZES:
            assert_one_sided(side, side, options, size, size)
    found = tiles_of(Tokens(40, 0, device, near), Tokens(40, 0, device, near), Options()).distance.low[0, 0]
    assert found.equal(((37 * torch.arange(40) % 40)[:, None] - 37 * torch.arange(40) % 40).abs())


@pytest.mark.parametrize("case", [case for case in PROBLEMS if case.mask or case.positions], ids=str)
def test_some_rows_and_columns_of_the_definition(case: Case):
    problem, operands = make_inputs(case).resolve()
    bias, visible = dense(operands, problem.options)
    rows, columns = slice(2, 9), torch.tensor([5, 0, 3])
    part, part_visible = dense(operands, problem.options, rows, columns)
    # Not every factor has every dimension, so sizes of 1 may differ.
    whole = (*torch.broadcast_shapes(bias.shape, visible.shape)[:2], problem.queries, problem.keys)
    for found, entire in ((part, bias), (part_visible, visible)):
        wanted = entire.expand(whole)[:, :, rows][..., columns]
        assert found.expand(wanted.shape).equal(wanted)


# --- what belongs to pairs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 7, 11), (1, 3, 1, 11), (2, 1, 7, 1), (1, 1, 1, 1), (2, 3, 8, 12)], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (4, 4), (64, 5)], ids=str)
def test_masks_in_tiles(shape: tuple[int, ...], size: tuple[int, int]):
    rows, columns = size
    mask = torch.rand(shape) < 0.8
    mask[:, :, : shape[2] // 2, 1:9] = True  # whole tiles
    found = mask_tiles(mask, rows, columns)
    for b, h in ((b, h) for b in range(shape[0]) for h in range(shape[1])):
        for i, j in ((i, j) for i in range(found.some.shape[2]) for j in range(found.some.shape[3])):
            part = mask[b, h, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            whole = all(
                size == 1 or length == block
                for size, length, block in zip(shape[2:], part.shape, (rows, columns), strict=True)
            )
            assert found.some[b, h, i, j] == part.any()
            assert found.every[b, h, i, j] == (part.all() and whole)


# --- the tests above can fail -----------------------------------------------------------------------------------------


def _offset_by(low: int, high: int, *, of_pairs: bool) -> Callable[..., Span]:
    true = blocks._offset

    def broken(rows: Blocks, keys: Blocks) -> Span:
        span = true(rows, keys)
        if span.exact:
            return Span(span.low + low, span.low + low) if of_pairs else span
        return Span(span.low + low, span.high + high)

    return broken


def _visible_by(change: Callable[[Answer], Answer], *, of_pairs: bool) -> Callable[..., Answer]:
    true = blocks._visible

    def broken(rows: Blocks, keys: Blocks, offset: Span | None, options: Options) -> Answer:
        answer = true(rows, keys, offset, options)
        return answer if answer.exact and not of_pairs else change(answer)

    return broken


def _causal_by_one(rows: Blocks, keys: Blocks, offset: Span | None, options: Options) -> Answer:
    moved = None if offset is None else Span(*(edge - 1 for edge in (offset.low, offset.high)))
    moved = moved if offset is None or not offset.exact or moved is None else Span(moved.low, moved.low)
    return _TRUE_VISIBLE(rows, keys, moved, options)


_TRUE_VISIBLE = blocks._visible
BROKEN = {
    "the nearest offset is one too large": ("_offset", _offset_by(1, 0, of_pairs=False)),
    "the farthest offset is one too small": ("_offset", _offset_by(0, -1, of_pairs=False)),
    "every offset is one too large": ("_offset", _offset_by(1, 1, of_pairs=True)),
    "PARTIAL is called FULL": ("_visible", _visible_by(lambda found: Answer(found.some, found.some), of_pairs=False)),
    "PARTIAL is called EMPTY": (
        "_visible",
        _visible_by(lambda found: Answer(found.every, found.every), of_pairs=False),
    ),
    "causal is one off": ("_visible", _causal_by_one),
}


@pytest.mark.parametrize(("name", "rule"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_found(name: str, rule: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blocks, name, rule)
    with pytest.raises(AssertionError):
        assert_pairs_are_the_definition()
        for case in (Case(causal=True, window=(5, None)), Case(window=(3, 4)), Case(positions="jumps")):
            for size in SIZES:
                assert_one_sided(*both_sides(case), size, size)


# --- the dense bias ---------------------------------------------------------------------------------------------------


def test_distance_times_slope_on_both_sides():
    found = alibi_bias(torch.tensor([0.5, 2.0]), torch.tensor([0, 3]), torch.tensor([1, 3, 7]))
    assert found.tolist() == [[[[-0.5, -1.5, -3.5], [-1.0, 0.0, -2.0]], [[-2.0, -6.0, -14.0], [-4.0, 0.0, -8.0]]]]


def test_future_slopes_rule_later_keys_alone():
    found = alibi_bias(HALF, torch.tensor([2]), torch.arange(5), future_slopes=torch.tensor([3.0]))
    assert found.tolist() == [[[[-1.0, -0.5, 0.0, -3.0, -6.0]]]]


def test_slopes_of_zero_infinity_and_below_zero():
    slopes = torch.tensor([0.0, math.inf, -1.0])
    found = alibi_bias(slopes, torch.tensor([1]), torch.arange(3))
    assert found.tolist() == [[[[0.0, 0.0, 0.0]], [[-math.inf, 0.0, -math.inf]], [[1.0, 0.0, 1.0]]]]
    assert not torch.signbit(found[0, 0]).any(), "no negative zero, which prints as -0."


def test_unbiased_tokens_neither_give_nor_receive():
    found = alibi_bias(HALF, torch.arange(3), torch.arange(4), unbiased=1)
    # Three queries on four keys stand at the last three places, so only the first column is free.
    assert found[0, 0].tolist() == [[0.0, -0.5, -1.0, -1.5], [0.0, 0.0, -0.5, -1.0], [0.0, -0.5, 0.0, -0.5]]
    square = alibi_bias(HALF, torch.arange(4), torch.arange(4), unbiased=1)
    assert square[0, 0, 0].tolist() == [0.0] * 4 and square[0, 0, :, 0].tolist() == [0.0] * 4


@pytest.mark.parametrize(("metric", "expected"), [("euclidean", -2.5), ("manhattan", -3.5)])
def test_metrics(metric: str, expected: float):
    found = alibi_bias(HALF, torch.tensor([[1, 1]]), torch.tensor([[1, 1], [4, 5]]), metric=metric)
    assert found.tolist() == [[[[0.0, expected]]]]


def test_shapes_and_dtypes():
    slopes = torch.rand(2, 3)
    assert alibi_bias(slopes, torch.zeros(5).long(), torch.zeros(7).int()).shape == (2, 3, 5, 7)
    assert alibi_bias(slopes[0], torch.zeros(2, 5).long(), torch.zeros(2, 7).long()).shape == (2, 3, 5, 7)
    assert alibi_bias(slopes[0], torch.zeros(5).long(), torch.zeros(7).long()).shape == (1, 3, 5, 7)
    assert alibi_bias(slopes[0].double(), torch.zeros(5).long(), torch.zeros(0).long()).dtype == torch.float64
    coordinates = torch.rand(2, 5, 4)
    assert alibi_bias(slopes, coordinates, coordinates[:1], metric="euclidean").shape == (2, 3, 5, 5)


def test_differentiable_by_the_slopes():
    slopes = torch.tensor([0.5], requires_grad=True)
    alibi_bias(slopes, torch.tensor([3]), torch.arange(4)).sum().backward()
    assert slopes.grad.tolist() == [-6.0]


def test_distances_are_exact_integers_however_large():
    far = 2**53
    found = alibi_bias(torch.tensor([1.0], dtype=torch.float64), torch.tensor([far]), torch.tensor([far - 3, far + 1]))
    assert found.tolist() == [[[[-3.0, -1.0]]]]
    # 2**53 + 1 and 2**53 are one float64, and 4099 and 4100 are one float16.
    near = alibi_bias(torch.tensor([0.5]), torch.tensor([4100]), torch.arange(4))
    assert near.tolist() == [[[[-2050.0, -2049.5, -2049.0, -2048.5]]]]


def test_inputs_stay_as_they_were():
    slopes, positions = alibi_slopes(3), torch.arange(5)
    alibi_bias(slopes, positions, positions, unbiased=2, future_slopes=slopes)
    assert slopes.equal(alibi_slopes(3)) and positions.equal(torch.arange(5))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"slopes": HALF.half()}, TypeError, "slopes must be float32 or float64, got torch.float16"),
        ({"slopes": torch.zeros(1, 1, 1)}, ValueError, "slopes must have shape (H,), (1, H) or (B, H)"),
        ({"slopes": [0.5]}, TypeError, "slopes must be a torch.Tensor, got list"),
        ({"future_slopes": torch.zeros(2)}, ValueError, "future_slopes must have shape (1,), (1, 1) or (B, 1)"),
        ({"query_positions": torch.zeros(3)}, TypeError, "query_positions must be integers, got torch.float32"),
        ({"key_positions": torch.zeros(3, 2, 1).long()}, ValueError, "key_positions must have shape (T,) or (B, T)"),
        ({"key_positions": range(3)}, TypeError, "key_positions must be a torch.Tensor, got range"),
        ({"metric": "cosine"}, ValueError, "metric must be None, 'euclidean' or 'manhattan', got 'cosine'"),
        ({"unbiased": -1}, ValueError, "unbiased must be an int >= 0, got -1"),
        ({"unbiased": True}, ValueError, "unbiased must be an int >= 0, got True"),
    ],
)
def test_errors(change: dict, error: type[Exception], says: str):
    arguments = {"slopes": HALF, "query_positions": torch.arange(3), "key_positions": torch.arange(3)} | change
    with pytest.raises(error) as caught:
        alibi_bias(**arguments)
    assert says in str(caught.value)


def test_a_metric_has_no_later_side():
    points = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="future_slopes must be None under metric='euclidean'"):
        alibi_bias(HALF, points, points, metric="euclidean", future_slopes=HALF)


def test_batches_that_do_not_belong_together():
    with pytest.raises(ValueError, match="one batch size"):
        alibi_bias(torch.rand(2, 3), torch.zeros(3, 5).long(), torch.zeros(7).long())
    with pytest.raises(ValueError, match="number of coordinates"):
        alibi_bias(HALF, torch.zeros(3, 2), torch.zeros(3, 1), metric="euclidean")


def test_heads_without_a_slope_have_no_bias():
    at = torch.arange(5)
    assert alibi_bias(alibi_slopes(6), at, at).shape == (1, 6, 5, 5)
    partial = alibi_bias(alibi_slopes(6, biased_heads=4), at, at)
    assert (partial[:, 4:] == 0).all()
    assert partial[:, :4].equal(alibi_bias(alibi_slopes(4), at, at))


def test_the_first_head_has_a_bias_too():
    at = torch.arange(5)
    assert (alibi_bias(alibi_slopes(4), at, at)[0, 0] != 0).sum() == 20
    with pytest.raises(TypeError):
        alibi_bias(0, at, at)


def test_dividing_product_and_bias_and_multiplying_back_is_nothing():
    query, key = torch.randn(2, 4, 64, dtype=torch.float64), torch.randn(2, 4, 64, dtype=torch.float64)
    bias = alibi_bias(HALF.double(), torch.arange(4), torch.arange(4))[0]
    product = query @ key.mT
    torch.testing.assert_close((product / 7 + bias / 7) * 7, product + bias)


def test_bias_of_float32_slopes_at_distance_4096():
    exact = [2 ** (-8 * h / 32) for h in range(1, 33)]
    bias = alibi_bias(alibi_slopes(32), torch.tensor([4095]), torch.tensor([0]))[0, :, 0, 0]
    assert (bias.double() + 4095 * torch.tensor(exact, dtype=torch.float64)).abs().max() < 1e-2


def test_a_dense_bias_is_shared_by_the_batch():
    at = torch.arange(9)
    bias = alibi_bias(alibi_slopes(4), at, at)
    assert bias.shape == (1, 4, 9, 9) and bias.expand(16, 4, 9, 9).stride(0) == 0


def test_biases_are_penalties():
    bias = alibi_bias(alibi_slopes(6), torch.arange(5), torch.arange(5))
    assert (bias <= 0).all() and (bias.diagonal(dim1=2, dim2=3) == 0).all()
