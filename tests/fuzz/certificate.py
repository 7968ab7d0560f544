# SPDX-License-Identifier: Apache-2.0
"""What is skipped, weighed in float64: no row loses more than it is told, whatever the keys."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from linbias import key_bounds
from linbias.backends import native, reference, tiled
from linbias.prepare import prepare
from linbias.semantics.problem import Operands, Problem
from tests.fuzz.loop import Fuzzer, runners, running
from tests.ledger_calls import CONTENTS, MASKS, SLOPES, contents, exact_weights, exactly, options_of, slope_values
from tests.paging import in_pages

BACKENDS = {"reference": reference, "tiled": tiled, "native": native}


@dataclass(frozen=True, kw_only=True)
class Keys:
    """A call whose bounds are hard to get right."""

    seed: int = 0
    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    queries: int = 40
    keys: int = 130
    head_dim: int = 8
    content: str = "normal"
    slopes: str = "press"
    mask: str = "causal"
    scale: float | None = None
    tolerance: float | None = 1e-3
    norms: float = 1.0
    """All keys are that much longer."""
    odd: str | None = None
    """A few keys are "long", "huge" (whose norms overflow when squared), "tiny" or "subnormal"."""
    exact: bool = True
    """In float64, where lse shows the skipped weight itself; else in float32."""
    threads: int = 1
    page: int = 0
    """Tokens a page, which has a bound of its own; 0: keys lie side by side. For backends that read pages."""


def draw(given: random.Random) -> Keys:
    """Any such call; a coarse tolerance makes a ledger spend what a bound too low would overdraw visibly."""
    pick = given.choice
    batch, kv_heads, group = pick(((1, 1, 1), (2, 2, 3), (1, 3, 2)))
    keys = given.randint(1, 330) if given.random() < 0.9 else given.randint(331, 1400)
    return Keys(
        seed=given.randrange(10**6), batch=batch, kv_heads=kv_heads, group=group, queries=given.randint(1, keys),
        keys=keys, head_dim=pick((1, 3, 8, 17, 64)), content=pick(CONTENTS), slopes=pick(SLOPES), mask=pick(MASKS),
        scale=pick((None, None, -0.5, 0.0, 3.0)), tolerance=pick((None, 1e-3, 1e-2, 0.05, 0.4)),
        norms=pick((1.0, 1.0, 1.0, 30.0, 1e-3)), odd=pick((None, None, "long", "huge", "tiny", "subnormal")),
        exact=given.random() < 0.7, threads=pick((1, 1, 1, 3)),
        page=pick((0, 0, 1, 9, 64, 100)),
    )  # fmt: skip


def resolved(given: Keys) -> tuple[Problem, Operands]:
    """What a backend gets."""
    torch.manual_seed(given.seed)
    heads = given.kv_heads * given.group
    query, key = contents(given.content, given.batch, heads, given.kv_heads, given.queries, given.keys, given.head_dim)
    key = _odd(given.norms * key, given.odd)
    options = options_of(given.mask, given.batch, heads, given.queries, given.keys, key)
    options |= {"scale": given.scale, "tolerance": given.tolerance}
    slopes = slope_values(given.slopes, given.batch, heads)
    call = prepare(query, key, torch.randn(*key.shape[:3], 5), slopes, options)
    return exactly(*call) if given.exact else call


def _odd(key: Tensor, odd: str | None) -> Tensor:
    if odd is None:
        return key
    few = torch.rand(*key.shape[:3], 1) < 0.05
    factor = {"long": 40.0, "huge": 1e19, "tiny": 1e-25, "subnormal": 1e-41}[odd]
    return torch.where(few, key * factor, key)


def check(given: Keys) -> list[str]:
    """Raise where more weight is missing than `skipped` says, or that says more than the tolerance."""
    problem, operands = resolved(given)
    exact = reference.forward(*exactly(problem, operands)).lse
    call = paged = problem, operands
    if given.page:
        bounded = operands._replace(bound_norms=key_bounds(operands.key, given.page).norms)
        pool, options = in_pages(bounded, problem.options, given.page)
        paged = Problem.of(pool, options), pool
    rounding, tau = _rounding(problem, operands, exact), problem.options.tolerance
    names: list[str] = []
    for runner in runners():
        with running(runner, threads=given.threads) as backend:
            found = BACKENDS[backend].forward(*(paged if BACKENDS[backend].READS_PAGES else call))
            seen = exact.isfinite()
            assert (found.lse[exact == -torch.inf] == -torch.inf).all(), "a row that sees nothing weighs something"
            assert (found.skipped >= 0).all() and (found.skipped <= tau).all(), "skipped beyond the tolerance"
            missing = -torch.expm1(found.lse.double() - exact)
            excess = (missing - found.skipped.double() - rounding)[seen]
            assert (excess <= 0).all(), f"{float(excess.max()):.3g} more is missing than is said"
            names.append(runner.name + (" skipping" if bool((found.skipped > 0).any()) else ""))
    return names


def _rounding(problem: Problem, operands: Operands, lse: Tensor) -> Tensor:
    """(B, H, T): of the lse, as large as it is itself and as the products of the keys that weigh something."""
    query, key = (each.double().norm(dim=-1) for each in (operands.query, operands.key))
    products = query[..., None] * key.repeat_interleave(problem.group, 1)[:, :, None]
    shares = exact_weights(problem, operands)
    sizes = torch.where(shares > 0, shares * products, 0.0).sum(-1)
    eps = torch.finfo(operands.slopes.dtype).eps
    return 16 * eps * (4 + problem.head_dim * abs(problem.options.scale) * sizes + lse.abs().nan_to_num(0.0, 0.0, 0.0))


FUZZER = Fuzzer(draw, check)
