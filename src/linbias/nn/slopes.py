# SPDX-License-Identifier: Apache-2.0
"""`Slopes`: a module that keeps a rule instead of a tensor."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..semantics.checks import check_count, unwatched
from ..semantics.slopes import SlopeRule, alibi_slopes


class Slopes(nn.Module):
    """``forward(device)`` gives the slopes of `linbias.alibi_slopes`, derived from the rule whenever they are wanted.

    Fixed slopes are neither parameter nor buffer: nothing is in ``parameters()`` or ``state_dict()``, so ``.half()``,
    ``.to()``, autocast, FSDP's buffer casting, meta-device initialisation and ``deepcopy`` have nothing to spoil, and
    checkpoints of models without this module load strictly.

    Learned slopes are ``2 ** log2_slopes``, so they stay above 0 whatever the optimizer does; a head that the rule
    leaves without a bias has no parameter and keeps slope 0. ``log2_slopes`` starts at the rule, is float32, and
    ``.half()``, ``.bfloat16()`` and ``.to(dtype)`` leave it so: in bfloat16 a slope near 2**-7 would be wrong by up to
    1 %. ``.double()`` makes it float64. FSDP's mixed precision casts parameters past the module: leave this module out
    of it (``ignored_modules`` or a policy of its own), or the forward says so.
    `weight_decay_groups` keeps weight decay, which pulls every slope towards 1, away from them.

    Args:
        num_heads: the *global* number of query heads.
        rule, max_bias, biased_heads: as for `linbias.alibi_slopes`.
        learned: make the slopes parameters.
        rank, world: tensor parallelism: give rank's slice of the global slopes, num_heads / world of them.
        device: where learned slopes are made.

    Raises:
        ValueError: an argument outside its range, or heads that do not divide among ``world`` ranks.

    >>> Slopes(8, rank=1, world=2)().tolist() == [2**-5, 2**-6, 2**-7, 2**-8]
    True
    >>> Slopes(4, biased_heads=2)
    Slopes(num_heads=4, rule='press', max_bias=8.0, biased_heads=2, learned=False, rank=0, world=1)
    """

    log2_slopes: nn.Parameter | None
    """(local heads with a bias,): the parameter of learned slopes; None for fixed ones."""

    def __init__(
        self,
        num_heads: int,
        *,
        rule: SlopeRule = "press",
        max_bias: float = 8.0,
        biased_heads: int | None = None,
        learned: bool = False,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if check_count("world", world) < 1 or check_count("rank", rank) >= world:
            raise ValueError(f"rank must be below world, got rank={rank}, world={world}")
        if check_count("num_heads", num_heads) % world:
            raise ValueError(f"num_heads must divide among world={world} ranks, got {num_heads}; slice alibi_slopes")
        self._rule: dict[str, Any] = {
            "num_heads": num_heads,
            "rule": rule,
            "max_bias": max_bias,
            "biased_heads": biased_heads,
        }
        self._rest = {"learned": learned, "rank": rank, "world": world}
        self._ready: dict[torch.device, Tensor] = {}
        self.local_heads = num_heads // world
        """How many slopes this rank gives."""
        self._derive(torch.device("cpu"))  # a rule that makes no sense fails here, not in the first forward
        # The rule puts the heads without a bias last, so this rank's share of the others comes first.
        biased = num_heads if biased_heads is None else biased_heads
        self._biased = min(max(biased - rank * self.local_heads, 0), self.local_heads)
        empty = torch.empty(self._biased, dtype=torch.float32, device=device)
        self.register_parameter("log2_slopes", nn.Parameter(empty) if learned else None)
        self.reset_parameters()

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments, plain numbers and strings: ``Slopes(**slopes.config)`` is its equal."""
        return {**self._rule, **self._rest}

    @property
    def uses_alibi(self) -> bool:
        """Whether any head of this rank has a bias."""
        return self._biased > 0

    def reset_parameters(self) -> None:
        """Put learned slopes back at the rule; after ``to_empty`` this fills them. Fixed slopes need nothing."""
        if self.log2_slopes is not None:
            start = self._derive(torch.device("cpu")).narrow(0, 0, self._biased)
            with torch.no_grad():
                self.log2_slopes.copy_(start.double().log2())

    def forward(self, device: torch.device | str | None = None) -> Tensor:
        """The slopes of this rank's heads.

        Args:
            device: where fixed slopes are wanted, usually ``query.device``; None: torch's default device. Learned
                slopes are where the module is, and None means there.

        Returns:
            (num_heads / world,) float32; learned slopes in the dtype of their parameter.

        Raises:
            ValueError: learned slopes wanted on another device than the module's.
            TypeError: learned slopes that something has cast to half precision.
        """
        if self.log2_slopes is None:
            return self._fixed(torch.get_default_device() if device is None else torch.device(device))
        home = self.log2_slopes.device
        wanted = home if device is None else torch.device(device)
        if wanted.type != home.type or wanted.index not in (None, home.index):
            raise ValueError(f"device must be the learned slopes' {home}, got {wanted}; move the module with .to()")
        if self.log2_slopes.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"log2_slopes must be float32 or float64, got {self.log2_slopes.dtype}: mixed precision or an assigned "
                f"checkpoint cast it and its digits are lost; leave this module out of the cast"
            )
        slopes = torch.exp2(self.log2_slopes)
        return F.pad(slopes, (0, self.local_heads - self._biased))

    def extra_repr(self) -> str:
        """The constructor's arguments, so that the repr rebuilds the module."""
        return ", ".join(f"{name}={value!r}" for name, value in self.config.items())

    def _derive(self, device: torch.device) -> Tensor:
        return alibi_slopes(**self._rule, device=device).narrow(
            0, self._rest["rank"] * self.local_heads, self.local_heads
        )

    def _fixed(self, device: torch.device) -> Tensor:
        """Derived once a device: copying them there anew would make every call wait for a GPU."""
        if not unwatched():
            return self._derive(device)
        if device.index is None and device.type != "cpu":  # pyright: ignore[reportUnnecessaryComparison]
            device = torch.empty(0, device=device).device  # "cuda" alone means another device tomorrow
        if device not in self._ready:
            self._ready[device] = self._derive(device)
        # A copy: whoever changes it in place changes nobody else's slopes.
        return self._ready[device].clone()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_digits(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            lost = moved.dtype.itemsize < 4 <= tensor.dtype.itemsize
            return tensor.to(moved.device) if lost else moved

        return super()._apply(keep_digits, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": {}}


def weight_decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups in which learned slopes have no weight decay, which would pull every slope towards 1.

    Args:
        module: the model.
        weight_decay: for all other parameters.

    Returns:
        Two groups, each with "params" and "weight_decay"; every parameter of the model is in exactly one.

    >>> model = torch.nn.ModuleList([torch.nn.Linear(3, 5), Slopes(4, learned=True)])
    >>> optimizer = torch.optim.AdamW(weight_decay_groups(model, 0.1), lr=1e-3)
    >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
    [(2, 0.1), (1, 0.0)]
    """
    slopes = {id(part.log2_slopes) for part in module.modules() if isinstance(part, Slopes)}
    parameters = list(module.parameters())
    return [
        {"params": [tensor for tensor in parameters if id(tensor) not in slopes], "weight_decay": weight_decay},
        {"params": [tensor for tensor in parameters if id(tensor) in slopes], "weight_decay": 0.0},
    ]
