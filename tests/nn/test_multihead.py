# SPDX-License-Identifier: Apache-2.0
"""`nn.MultiheadAttention` against torch's own and against the formula."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from linbias import alibi_attention, alibi_slopes
from linbias.nn import MultiheadAttention, Slopes
from linbias.testing import assert_within_budget
from tests.nn.small import BATCH, HEADS, TOKENS, WIDTH, attention, by_hand, close, inputs, padding

PROJECTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bias": False},
    {"kdim": 5, "vdim": 9},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True},
)


def test_it_is_the_formula():
    module, tokens = attention(), inputs()
    close(module(tokens, tokens, tokens)[0], by_hand(module, tokens))


@pytest.mark.parametrize("options", PROJECTIONS, ids=str)
def test_without_slopes_it_is_torchs(options: dict[str, Any]):
    """Every mask form and shape against torch's own module, where the bias is 0."""
    ours = attention(slopes=Slopes(HEADS, biased_heads=0), **options)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
    theirs.load_state_dict(ours.state_dict())
    query, key, value = inputs(), inputs(BATCH, 5, ours.kdim), inputs(BATCH, 5, ours.vdim)
    per_head = torch.rand(BATCH * HEADS, TOKENS, 5) > 0.7
    per_head[..., 0] = False  # torch's output is NaN where a row sees nothing
    hidden = padding((5, 3, 1), 5)
    for mask in (None, per_head[0], per_head):
        for average in (True, False):
            call = {"key_padding_mask": hidden, "attn_mask": mask, "average_attn_weights": average}
            (out, weights), (expected, expected_weights) = (
                module(query, key, value, **call) for module in (ours, theirs)
            )
            close(out, expected)
            close(weights, expected_weights)
        one = mask if mask is None or mask.dim() == 2 else mask[:HEADS]
        (out, weights), (expected, expected_weights) = (
            module(query[0], key[0], value[0], attn_mask=one) for module in (ours, theirs)
        )
        close(out, expected)
        close(weights, expected_weights)


def test_without_slopes_its_gradients_are_torchs():
    ours = attention(slopes=Slopes(HEADS, biased_heads=0), add_bias_kv=True)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=True)
    theirs.load_state_dict(ours.state_dict())
    tokens, probe = inputs(), inputs()
    for module in (ours, theirs):
        (module(tokens, tokens, tokens, key_padding_mask=padding())[0] * probe).sum().backward()
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("options", PROJECTIONS, ids=str)
def test_state_dicts_load_strictly_both_ways(options: dict[str, Any]):
    ours, theirs = MultiheadAttention(WIDTH, HEADS, **options), nn.MultiheadAttention(WIDTH, HEADS, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_initial_values_are_torchs():
    torch.manual_seed(5)
    ours = MultiheadAttention(WIDTH, HEADS)
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(WIDTH, HEADS)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    ours._reset_parameters()


def test_fixed_alibi_adds_no_parameters():
    def count(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    assert count(MultiheadAttention(WIDTH, HEADS)) == count(nn.MultiheadAttention(WIDTH, HEADS))
    learned = MultiheadAttention(WIDTH, HEADS, slopes=Slopes(HEADS, learned=True))
    assert count(learned) == count(nn.MultiheadAttention(WIDTH, HEADS)) + HEADS


def test_batch_first_only_moves_axes():
    first, second = attention(), attention(batch_first=False)
    second.load_state_dict(first.state_dict())
    query, key = inputs(), inputs(BATCH, 5, WIDTH)
    out, weights = first(query, key, key, key_padding_mask=padding((5, 3, 1), 5))
    moved = [tensor.transpose(0, 1) for tensor in (query, key, key)]
    out_2, weights_2 = second(*moved, key_padding_mask=padding((5, 3, 1), 5))
    close(out_2.transpose(0, 1), out)
    close(weights_2, weights)


def test_unbatched_is_one_item():
    module, tokens = attention(), inputs()
    out, weights = module(tokens[0], tokens[0], tokens[0], key_padding_mask=padding()[1], average_attn_weights=False)
    batched, batched_weights = module(
        tokens[:1], tokens[:1], tokens[:1], key_padding_mask=padding()[1:2], average_attn_weights=False
    )
    close(out, batched[0])
    close(weights, batched_weights[0])


def test_constructor_arguments_that_cannot_be_honoured_are_refused():
    with pytest.raises(ValueError, match="dropout"):
        MultiheadAttention(WIDTH, HEADS, dropout=1.0)
    with pytest.raises(TypeError, match="slopes must be a module such as Slopes"):
        MultiheadAttention(WIDTH, HEADS, slopes=alibi_slopes(HEADS))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"future_slopes must give num_heads=4 slopes, got Slopes\(num_heads=8"):
        MultiheadAttention(WIDTH, HEADS, future_slopes=Slopes(8))
    assert MultiheadAttention(WIDTH, HEADS, slopes=Slopes(8, rank=1, world=2)).slopes() is not None
    with pytest.raises(ValueError, match="window"):
        MultiheadAttention(WIDTH, HEADS, window=5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="unbiased"):
        MultiheadAttention(WIDTH, HEADS, unbiased=-1)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("dropout", "a", "dropout must be a Python number, got str"),
        ("dropout", None, "dropout must be a Python number, got NoneType"),
        ("tolerance", 2.0, r"tolerance must be in \[0, 1\)"),
        ("tolerance", torch.nan, r"tolerance must be in \[0, 1\)"),
        ("tolerance", "a", "tolerance must be a Python number"),
        ("backend", "cuda", "backend must be 'auto' or one of"),
        ("causal", "yes", "causal must be True or False, got 'yes'"),
        ("num_heads", "a", "num_heads must be an int >= 0, got 'a'"),
    ],
)
def test_constructor_arguments_are_checked_before_the_first_call(name: str, value: Any, words: str):
    with pytest.raises((TypeError, ValueError), match=words):
        MultiheadAttention(**({"embed_dim": WIDTH, "num_heads": HEADS} | {name: value}))


def test_what_is_no_tensor_is_named():
    tokens = inputs()
    for name in ("query", "key", "value"):
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
            attention()(**({"query": tokens, "key": tokens, "value": tokens} | {name: [1.0]}))


def test_from_torch_takes_torchs_modules_alone():
    """One of ours has options that taking over the parameters would lose."""
    with pytest.raises(TypeError, match="module has a bias already"):
        MultiheadAttention.from_torch(MultiheadAttention(WIDTH, HEADS, causal=True))
    with pytest.raises(TypeError, match=r"module must be a torch.nn.MultiheadAttention, got Linear"):
        MultiheadAttention.from_torch(nn.Linear(3, 3))  # pyright: ignore[reportArgumentType]


def test_asking_for_weights_changes_no_bit_and_rows_sum_to_one():
    for options in ({}, {"add_bias_kv": True, "add_zero_attn": True}, {"causal": True, "window": (2, 0)}):
        module, tokens = attention(**options), inputs()
        out, weights = module(tokens, tokens, tokens, key_padding_mask=padding(), average_attn_weights=False)
        assert torch.equal(out, module(tokens, tokens, tokens, key_padding_mask=padding(), need_weights=False)[0])
        assert module(tokens, tokens, tokens, need_weights=False)[1] is None
        expected = torch.ones(BATCH, HEADS, TOKENS)
        if options.get("window"):
            expected[2, :, 4:] = 0.0  # two real tokens, out of a window of three
        close(weights.sum(-1), expected)


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}], ids=str)
def test_dropout_happens_in_training_only(options: dict[str, Any]):
    module, tokens = attention(dropout=0.5, **options), inputs(1, TOKENS, WIDTH)
    plain = attention(**options)
    plain.load_state_dict(module.state_dict())
    draws = 1000
    many = tokens.expand(draws, -1, -1)
    expected = plain(tokens, tokens, tokens)[0][0]
    close(module.eval()(many, many, many)[0], expected.expand(draws, -1, -1))
    dropped = module.train()(many, many, many, need_weights=False)[0]
    # The mean of independent draws lies within 6 of its own standard errors.
    assert ((dropped.mean(0) - expected).abs() <= 6 * dropped.std(0) / draws**0.5 + 1e-5).all()
    assert dropped.std(0).max() > 1e-2


def test_the_default_is_symmetric_and_future_slopes_are_not():
    tokens = inputs()
    flipped = tokens.flip(1)
    symmetric = attention()
    close(symmetric(flipped, flipped, flipped)[0].flip(1), symmetric(tokens, tokens, tokens)[0])
    sided = attention(future_slopes=Slopes(HEADS, max_bias=16.0))
    out = sided(tokens, tokens, tokens)[0]
    assert (sided(flipped, flipped, flipped)[0].flip(1) - out).abs().max() > 1e-2
    _, weights = sided(tokens, tokens, tokens, average_attn_weights=False)
    assert not torch.allclose(weights, weights.flip(-1, -2))


def test_one_module_takes_any_shapes_in_any_order():
    module, other = attention(), MultiheadAttention(WIDTH, 6, batch_first=True)
    fresh = copy.deepcopy(module)
    for queries, keys in ((5, 5), (5, 6), (3, 3), (1, 9), (8, 8)):
        query, key = inputs(2, queries, WIDTH), inputs(2, keys, WIDTH)
        other(query, key, key)
        assert torch.equal(module(query, key, key)[0], copy.deepcopy(fresh)(query, key, key)[0])


def test_the_batch_may_change():
    module, tokens = attention(), inputs(4, 5, WIDTH)
    close(module(tokens[:3], tokens[:3], tokens[:3])[0], module(tokens, tokens, tokens)[0][:3])


def test_no_length_is_built_in():
    module = attention(causal=True)
    short, long = inputs(1, 3, WIDTH), inputs(1, 257, WIDTH)
    module(short, short, short)
    above = torch.ones(257, 257, dtype=torch.bool).triu(1)
    close(module(long, long, long, need_weights=False)[0], by_hand(module, long, above))


def test_symmetric_known_answer():
    """T=4, query 1, slope .25, flat."""
    module = MultiheadAttention(2, 1, batch_first=True, slopes=Slopes(1, max_bias=2.0))
    with torch.no_grad():
        module.in_proj_weight.zero_()
    tokens = torch.ones(1, 4, 2)
    assert module(tokens, tokens, tokens)[1][0, 1].tolist() == pytest.approx([0.2461, 0.3160, 0.2461, 0.1917], abs=5e-5)


def test_the_module_says_whether_it_uses_alibi():
    assert MultiheadAttention(WIDTH, HEADS).uses_alibi
    none = Slopes(HEADS, biased_heads=0)
    assert not MultiheadAttention(WIDTH, HEADS, slopes=none).uses_alibi
    assert MultiheadAttention(WIDTH, HEADS, slopes=none, future_slopes=Slopes(HEADS)).uses_alibi
    assert not hasattr(nn.MultiheadAttention(WIDTH, HEADS), "uses_alibi")


def test_the_bias_is_there():
    tokens = inputs()
    module = attention(causal=True)
    without = attention(causal=True, slopes=Slopes(HEADS, biased_heads=0))
    without.load_state_dict(module.state_dict())
    assert (module(tokens, tokens, tokens)[0] - without(tokens, tokens, tokens)[0]).abs().max() > 1e-2


def test_unbiased_tokens_and_window():
    module, tokens = attention(unbiased=1, window=(2, 2)), inputs()
    weights = module(tokens, tokens, tokens, average_attn_weights=False)[1]
    assert weights[..., 0, 3:].eq(0).all() and weights[..., 6, :4].eq(0).all()
    plain = attention(slopes=Slopes(HEADS, biased_heads=0), window=(2, 2))
    plain.load_state_dict(module.state_dict())
    close(module(tokens, tokens, tokens)[0][:, 0], plain(tokens, tokens, tokens)[0][:, 0])


def test_learned_slopes_on_both_sides_get_gradients():
    module = attention(slopes=Slopes(HEADS, learned=True), future_slopes=Slopes(HEADS, learned=True))
    tokens = inputs()
    module(tokens, tokens, tokens)[0].square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_the_gradient_of_a_learned_slope():
    """T=3 flat, slope .5, loss = weight of key 0 in the last row: dL/dm = -.2459765."""
    slopes = Slopes(1, max_bias=1.0, learned=True)
    module = MultiheadAttention(2, 1, batch_first=True, slopes=slopes, causal=True)
    with torch.no_grad():
        module.in_proj_weight.zero_()
    tokens = torch.ones(1, 3, 2)
    module(tokens, tokens, tokens)[1][0, 2, 0].backward()
    # d slope / d log2 slope = slope * ln 2
    assert slopes.log2_slopes.grad.item() == pytest.approx(-0.2459765 * 0.5 * 0.6931472, rel=1e-5)


def test_half_precision_modules_keep_float32_slopes():
    for dtype in (torch.float16, torch.bfloat16):
        module, tokens = attention(), inputs(2, 33, WIDTH)
        exact = by_hand(module.to(dtype), tokens.to(dtype)).detach()
        out = module(*3 * (tokens.to(dtype),), need_weights=False)[0].detach()
        # The plain module of torch rounds in the same places: projections, output, out_proj.
        plain = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=dtype)
        plain.load_state_dict(module.state_dict())
        place = torch.arange(33)
        bias = (-alibi_slopes(HEADS)[:, None, None] * (place[:, None] - place).abs()).repeat(2, 1, 1)
        eager = plain(*3 * (tokens.to(dtype),), attn_mask=bias.to(dtype))[0].detach()
        assert_within_budget(out, exact, eager, str(dtype))


def test_a_long_half_precision_row_keeps_its_bias():
    """Flat scores, T=4096, 32 heads: the weights of the last row show the bias to float32's digits."""
    module = MultiheadAttention(32, 32, batch_first=True, causal=True).bfloat16()
    slopes = module.slopes("cpu")
    query, key, value = torch.zeros(3, 1, 32, 1, 1, dtype=torch.bfloat16)
    positions = torch.arange(4096)
    key = key.expand(-1, -1, 4096, -1)
    _, aux = alibi_attention(query, key, key, slopes, causal=True, return_aux=True)
    exact = torch.logsumexp(-alibi_slopes(32).double()[:, None] * positions.flip(0), dim=-1)
    assert slopes.dtype == torch.float32 and value.dtype == torch.bfloat16
    torch.testing.assert_close(aux.lse[0, :, 0].double(), exact, rtol=1e-5, atol=1e-5)


def test_autocast_rounds_projections_and_nothing_of_the_bias():
    module, tokens = attention(), inputs(1, 300, WIDTH)
    with torch.no_grad():
        module.in_proj_weight[: 2 * WIDTH] = 0.0  # flat: only the bias is left in the scores
        module.in_proj_bias[: 2 * WIDTH] = 0.0
    expected = module(tokens, tokens, tokens, average_attn_weights=False)[1]
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = module(tokens, tokens, tokens, average_attn_weights=False)
    assert out.dtype == torch.bfloat16
    # One rounding of the finished weight to bfloat16; a rounded bias would be off by up to 0.5 in the exponent.
    torch.testing.assert_close(weights.float(), expected, rtol=2**-8, atol=0.0)


def test_meta_and_default_device():
    module = MultiheadAttention(WIDTH, HEADS, device="meta", batch_first=True)
    tokens = inputs().to("meta")
    out, weights = module(tokens, tokens, tokens, key_padding_mask=padding().to("meta"))
    assert out.device.type == "meta" and out.shape == (BATCH, TOKENS, WIDTH) and weights.shape[1:] == (7, 7)
    floats = torch.zeros(TOKENS, TOKENS, device="meta")
    assert module(tokens, tokens, tokens, attn_mask=floats)[0].shape == out.shape
    source = attention()
    module.to_empty(device="cpu").load_state_dict(source.state_dict())
    real = inputs()
    assert torch.equal(module(real, real, real)[0], source(real, real, real)[0])
    with torch.device("meta"):
        assert torch.equal(source(real, real, real)[0], module(real, real, real)[0])


def test_copies_are_independent_and_equal():
    module, tokens = attention(slopes=Slopes(HEADS, learned=True)), inputs()
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(tokens, tokens, tokens)[0], module(tokens, tokens, tokens)[0])
        with torch.no_grad():
            copied.slopes.log2_slopes.add_(1.0)
        assert not torch.equal(copied(tokens, tokens, tokens)[0], module(tokens, tokens, tokens)[0])


@pytest.mark.parametrize("options", PROJECTIONS, ids=str)
def test_from_torch_shares_the_parameters(options: dict[str, Any]):
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dropout=0.25, **options).eval()
    ours = MultiheadAttention.from_torch(theirs, slopes=Slopes(HEADS, biased_heads=0))
    assert [id(x) for x in ours.parameters()] == [id(x) for x in theirs.parameters()]
    assert not ours.training and ours.dropout == 0.25
    query, key, value = inputs(), inputs(BATCH, 5, ours.kdim), inputs(BATCH, 5, ours.vdim)
    close(ours(query, key, value)[0], theirs(query, key, value)[0])


def test_vmap_and_functional_call():
    module, tokens = attention(slopes=Slopes(HEADS, learned=True)), inputs()
    parameters = dict(module.named_parameters())
    several = {name: torch.stack([tensor, 1.5 * tensor, -tensor]) for name, tensor in parameters.items()}

    def call(parameters: dict[str, Tensor], tokens: Tensor, hidden: Tensor) -> Tensor:
        return functional_call(module, parameters, (tokens, tokens, tokens), {"key_padding_mask": hidden})[0]

    hidden = torch.stack([padding(), padding((1, 2, 3)), padding((7, 7, 7))])
    floats = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    expected = torch.stack([call({k: v[i] for k, v in several.items()}, tokens, hidden[i]) for i in range(3)])
    close(vmap(call, (0, None, 0))(several, tokens, hidden), expected)
    close(vmap(call, (0, None, 0))(several, tokens, floats), expected)
    with pytest.raises(ValueError, match="key_padding_mask must hold nothing but 0 and -inf"):
        vmap(call, (0, None, 0))(several, tokens, floats - 1)


def test_gradients_per_example():
    module, tokens = attention(slopes=Slopes(HEADS, learned=True)), inputs()
    parameters = {name: tensor.detach() for name, tensor in module.named_parameters()}

    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(module, parameters, (one, one, one))[0].square().sum()

    found = vmap(grad(loss), (None, 0))(parameters, tokens)
    for i in range(BATCH):
        module.zero_grad()
        module(tokens[i], tokens[i], tokens[i])[0].square().sum().backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(found[name][i], parameter.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow, id="aot_eager")])
def test_it_compiles_whole_for_any_length(compiler: str):
    torch.compiler.reset()
    module = attention(slopes=Slopes(HEADS, learned=True), future_slopes=Slopes(HEADS))
    compiled = torch.compile(module, fullgraph=True, backend=compiler, dynamic=True)
    for tokens in (inputs(), inputs(2, 11, WIDTH)):
        floats = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        expected = module(tokens, tokens, tokens, attn_mask=floats)[0]
        out = compiled(tokens, tokens, tokens, attn_mask=floats)[0]
        close(out, expected)
        out.sum().backward()
    with pytest.raises(RuntimeError, match="attn_mask must hold nothing but 0 and -inf"):
        compiled(tokens, tokens, tokens, attn_mask=floats - 1)
