# SPDX-License-Identifier: Apache-2.0
"""Keys in pages and sequences of different lengths, as operands: the same call as with keys side by side."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from linbias import BackendUnavailable, alibi_attention, backends, key_bounds, ops
from linbias.semantics.problem import Operands, Options, Problem, Result
from linbias.testing import Case, assert_within_budget, make_inputs
from tests.every import every_backend, every_kernel, skip_unless_it_can
from tests.paging import in_pages

CASES = (
    Case(batch=2, heads=6, kv_heads=3, queries=1, keys=413, head_dim=16, value_dim=7, causal=True),
    Case(batch=3, heads=4, kv_heads=2, queries=5, keys=201, head_dim=7, causal=True, window=(90, 0), sinks=3),
    Case(batch=2, heads=3, queries=70, keys=290, head_dim=16, causal=True, padding="left", unbiased=2),
    Case(batch=2, heads=2, queries=13, keys=150, head_dim=9, softcap=2.0, mask="full", future="items", dropout_p=0.3),
    Case(batch=1, heads=3, queries=3, keys=131, head_dim=64, positions="jumps", segments="mixed", dtype=torch.bfloat16),
)
cases = pytest.mark.parametrize("case", CASES, ids=str)
pages = pytest.mark.parametrize("page", [1, 8, 11, 64, 70])
FEW_ROWS = 12
"""So many rows of a key head read keys where they lie, and sum values page by page (csrc/shared.h)."""
# torch's own forward-mode rules still call torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")


def run(operands: Operands, options: Options, backend: str) -> Result:
    return ops.attention(
        Problem.of(operands, options), operands, backends.select(backend, Problem.of(operands, options))
    )


def resolved(case: Case, page: int = 0) -> tuple[Operands, Options]:
    """The call of a case, with bounds of blocks of `page` keys."""
    problem, operands = make_inputs(case).resolve()
    if not page:
        return operands, problem.options
    bounds = key_bounds(operands.key, page)
    return operands._replace(bound_norms=bounds.norms), problem.options._replace(bounds_block=page)


@every_backend
@pages
@cases
def test_pages_are_keys_side_by_side(case: Case, page: int, backend: str):
    """Bit for bit, but for the sums over values that end with a page where few rows read them in place."""
    skip_unless_it_can(backend, make_inputs(case))
    operands, options = resolved(case, page)
    wanted, found = run(operands, options, backend), run(*in_pages(operands, options, page), backend)
    for name in ("lse", "lse_low", "skipped", "computed"):
        assert getattr(found, name).equal(getattr(wanted, name)), name
    in_place = backends.select(backend, Problem.of(operands, options)).READS_PAGES
    if in_place and page % 64 and case.queries * case.heads // (case.kv_heads or case.heads) <= FEW_ROWS:
        wide = operands._replace(**{n: getattr(operands, n).double() for n in ("query", "key", "value", "slopes")})
        wide = wide._replace(bound_norms=None)
        exact = run(wide, options._replace(bounds_block=0), "reference").out
        assert_within_budget(
            found.out, exact, wanted.out, "out", allowance=options.tolerance * 4 * float(exact.abs().amax())
        )
    else:
        assert found.out.equal(wanted.out)


@every_backend
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_sequences_of_different_lengths(rows: int, paged: bool, backend: str):
    """Each as it is alone, its queries at its end; what lies behind is never read, nor are entries of no page."""
    case, lengths = (
        Case(batch=4, heads=4, kv_heads=2, queries=rows, keys=150, head_dim=7, causal=True),
        [150, 41, 64, 0],
    )
    inputs = make_inputs(case)
    skip_unless_it_can(backend, inputs)
    operands, options = resolved(case, 9 if paged else 0)
    if paged:
        operands, options = in_pages(operands, options, 9, lengths)
    else:
        behind = (torch.arange(150) >= torch.tensor(lengths)[:, None])[:, None, :, None]
        hidden = (each.masked_fill(behind, torch.nan) for each in (operands.key, operands.value))
        operands = operands._replace(**dict(zip(("key", "value"), hidden, strict=True)))
        operands = operands._replace(key_lengths=torch.tensor(lengths))
    found = run(operands, options, backend)
    for n, length in enumerate(lengths):
        q, k, v = inputs.query[n : n + 1], inputs.key[n : n + 1, :, :length], inputs.value[n : n + 1, :, :length]
        call = {"causal": True, "backend": "reference"}
        plain = alibi_attention(q, k, v, inputs.slopes, **call)
        exact = alibi_attention(q.double(), k.double(), v.double(), inputs.slopes, **call)
        most = float(v.abs().amax()) if length else 0.0
        assert_within_budget(found.out[n : n + 1], exact, plain, "out", allowance=2 * options.tolerance * most)
        assert (found.skipped[n] <= options.tolerance).all()


@every_backend
@pytest.mark.parametrize("page", [8, 64])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_gradients_of_queries_and_slopes(case: Case, page: int, backend: str):
    """As with keys side by side; bit for bit, but for the sums over keys that end with a page."""
    inputs = make_inputs(case)
    skip_unless_it_can(backend, inputs)
    operands, options = resolved(case)
    found = []
    for given, numbers in ((operands, options), in_pages(operands, options, page)):
        leaves = [given.query.detach().requires_grad_(), given.slopes.detach().requires_grad_()]
        result = run(given._replace(query=leaves[0], slopes=leaves[1]), numbers, backend)
        # Of lse alone: of `out` the gradient reads `out`, which may be rounded otherwise.
        found.append(torch.autograd.grad((result.lse,), leaves, (inputs.grad_lse,)))
    for one, other in zip(*found, strict=True):
        same = page == 64 or case.queries > FEW_ROWS
        assert one.equal(other) if same else torch.testing.assert_close(one, other) is None


@every_backend
def test_a_gradient_of_pages_is_that_of_their_keys(backend: str):
    """`ops.attention` lays them side by side; the operator itself has none, and says so."""
    case = CASES[1]
    inputs = make_inputs(case)
    skip_unless_it_can(backend, inputs)
    operands, options = resolved(case)
    paged, numbers = in_pages(operands, options, 8)
    pool, key = paged.value.nan_to_num().requires_grad_(), operands.value.detach().requires_grad_()
    wanted = run(operands._replace(value=key), options, backend).out
    found = run(paged._replace(value=pool), numbers, backend).out
    wanted, found = (torch.autograd.grad(out, leaf, inputs.grad_out)[0] for out, leaf in ((wanted, key), (found, pool)))
    for n in range(case.batch):
        for j in range(case.keys):
            assert found[paged.block_table[n, j // 8], :, j % 8].equal(wanted[n, :, j])


@every_kernel
def test_the_operator(backend: str):
    """Schema, shapes for tracing and the gradient of what has one."""
    case = Case(batch=2, heads=4, kv_heads=2, queries=3, keys=19, head_dim=8, causal=True)
    skip_unless_it_can(backend, make_inputs(case))
    operands, options = in_pages(*resolved(case, 8), 8, [19, 12])
    query, slopes = operands.query.requires_grad_(), operands.slopes.clone().requires_grad_()
    opcheck(torch.ops.linbias.attention.default, (*operands._replace(query=query, slopes=slopes), *options, backend))
    pool = operands.key.detach().requires_grad_()
    out = torch.ops.linbias.attention(*operands._replace(key=pool), *options, backend)[0]
    with pytest.raises(BackendUnavailable, match="no gradient flows to key and value in pages"):
        out.sum().backward()


@every_kernel
@pytest.mark.parametrize("own", [False, True], ids=["one pool", "a pool each"])
def test_vmap(own: bool, backend: str):
    """Examples share a pool and have tables and lengths of their own, or pools too."""
    case = Case(batch=2, heads=4, kv_heads=2, queries=3, keys=19, head_dim=8, causal=True)
    skip_unless_it_can(backend, make_inputs(case))
    operands, options = in_pages(*resolved(case, 8), 8, [19, 12])
    axes: dict[str, Tensor] = {
        "query": torch.randn(3, *operands.query.shape),
        "block_table": torch.stack([operands.block_table, operands.block_table.flip(0), operands.block_table]),
        "key_lengths": torch.tensor([[19, 12], [12, 19], [7, 3]]),
    }
    if own:
        axes |= {name: torch.stack([getattr(operands, name) * n for n in (1, 2, 3)]) for name in ("key", "bound_norms")}

    def attention(**given: Tensor) -> Tensor:
        return run(operands._replace(**given), options, backend).out

    found = torch.vmap(lambda given: attention(**given))(axes)
    for n in range(3):
        torch.testing.assert_close(found[n], attention(**{name: tensor[n] for name, tensor in axes.items()}))


@every_kernel
def test_compiled_without_a_break(backend: str):
    """The step of a cache in pages, whose table and length change from call to call."""
    case = Case(batch=2, heads=4, kv_heads=2, queries=1, keys=19, head_dim=8, causal=True)
    skip_unless_it_can(backend, make_inputs(case))
    operands, options = in_pages(*resolved(case), 8, [19, 12])

    def attention(query: Tensor, lengths: Tensor) -> Tensor:
        return run(operands._replace(query=query, key_lengths=lengths), options, backend).out

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for lengths in ([19, 12], [3, 5]):
        given = operands.query, torch.tensor(lengths)
        torch.testing.assert_close(compiled(*given), attention(*given))


def test_slopes_of_pages_reach_the_kernels():
    """A guard against pages of zeros: what the bias does to one-hot values can be written down."""
    eye = torch.eye(4)[None, None]
    operands = Operands(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 4, 2), eye, torch.tensor([[0.5]]))
    found = run(*in_pages(operands, Options(causal=True), 3), "auto").out
    torch.testing.assert_close(found[0, 0, 0], torch.tensor([0.1015, 0.1674, 0.2760, 0.4551]), atol=5e-5, rtol=0)
