# SPDX-License-Identifier: Apache-2.0
"""Whether the installed transformers computes what a patch replaces: tried on a tiny random model, once a process."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BackendUnavailable
from .families import Family

FIDELITIES = ("exact", "checkpoint")
# Of hidden states of about 1, through two layers in float32.
_TOLERANCE = 1e-3

_agreed: set[tuple[Any, ...]] = set()


def check_parity(family: Family) -> None:
    """Raise if a tiny random decoder gives something else patched than unpatched.

    Raises:
        NotImplementedError: it does, or fails; with the versions that were tested.
    """
    # Another library may replace a method later on.
    key = (family.decoder, *(kind.forward for kind in family.all_swaps("exact")))
    if family.example is None or key in _agreed:
        return
    try:
        with _undisturbed():
            difference = _difference(family)
    except BackendUnavailable:
        raise  # an install of linbias to be mended, which has nothing to do with transformers
    except Exception as error:
        raise NotImplementedError(f"{_advice(family)}: it fails with {error!r}") from error
    if not difference <= _TOLERANCE:
        raise NotImplementedError(f"{_advice(family)}: hidden states differ by {difference:.1e}")
    _agreed.add(key)


def tiny_decoder(kind: type[nn.Module], config: Any) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A decoder of random weights for `Family.example`, and a padded batch through it, in two steps on a cache."""
    from transformers.cache_utils import DynamicCache

    from .decoder import CACHE

    # Not on the meta device, where somebody's context may have put the parameters.
    model, noise = kind(config).eval().to_empty(device="cpu"), torch.Generator("cpu").manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=noise) / parameter.shape[-1] ** 0.5
    ids, mask = torch.arange(14).view(2, 7), torch.tensor([[1] * 7, [0] * 3 + [1] * 4])

    def run(model: nn.Module) -> Tensor:
        cache = DynamicCache()
        steps = [
            model(ids[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **{CACHE: cache})
            for start, stop in ((0, 5), (5, 7))
        ]
        return torch.cat([step.last_hidden_state for step in steps], 1)[mask.bool()]

    return model, run


def _difference(family: Family) -> float:
    """The largest between the example's outputs, unpatched and patched."""
    assert family.example is not None
    model, run = family.example()
    expected, worst = run(model), 0.0
    for fidelity in FIDELITIES:
        swaps, changed = family.all_swaps(fidelity), [(part, type(part)) for part in model.modules()]
        for part, kind in changed:
            part.__class__ = swaps.get(kind, kind)
        vars(model)["linbias_fidelity"] = fidelity
        # A sum keeps a NaN, which the larger of two may drop.
        worst += float((run(model) - expected).abs().max())
        for part, kind in changed:
            part.__class__ = kind
    return worst


@contextmanager
def _undisturbed() -> Generator[None]:
    """Float32 on the CPU whatever the defaults, and nobody's random numbers drawn."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        for context in (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
        ):
            stack.enter_context(context)
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        yield


def _advice(family: Family) -> str:
    import transformers

    from .decoder import TESTED_VERSIONS

    return (
        f"cannot patch {family.name} models: with transformers {transformers.__version__} a tiny one gives something "
        f"else patched than unpatched. Install one of the tested versions, {' to '.join(TESTED_VERSIONS)}, or a newer "
        f"linbias, or find out who else has replaced parts of transformers"
    )
