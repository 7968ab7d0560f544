# SPDX-License-Identifier: Apache-2.0
"""torch's `MultiheadAttention` with a bias.

In suffixes and shapes: B batch, H heads, T queries, S keys, E embedding, D head dim.
"""

# torch annotates parameters that may be None as if they never were.
# pyright: reportUnnecessaryComparison=false

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import alibi_attention, alibi_attention_weights, merge
from ..backends import check_name
from ..semantics.checks import (
    check_count,
    check_flag,
    check_metric,
    check_share,
    check_tensor,
    check_tolerance,
    check_window,
)
from ..varlen import alibi_attention_varlen
from .inputs import Ragged, is_lower_triangle, visible_pairs
from .slopes import Slopes


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose scores carry the ALiBi bias ``-slope_h * |p_i - r_j|``.

    The positional arguments, parameters, initial values, ``forward`` and (unless slopes are learned) ``state_dict`` are
    torch's, both ways. The bias is symmetric, the encoder's form, unless ``causal`` or ``future_slopes`` say otherwise.
    Keys stand at 0..S-1 and queries at S-T..S-1: where lengths differ, ends are aligned, as a cache needs. Other
    places, on a line or a plane, are given to `forward`, or by `at` where torch's encoder hands none on.

    What differs from torch, on purpose:

    * A row that sees no key gives ``out_proj`` of 0, not NaN.
    * Float masks hold only 0 and -inf (what `torch.nn.TransformerEncoder` makes of boolean ones); see `forward`.
    * ``is_causal`` needs no ``attn_mask``, aligns ends, and never replaces a mask that says more.
    * Weights are those before dropout, so rows sum to 1; asking for them changes no bit of the output.
    * ``add_bias_kv`` and ``add_zero_attn`` append keys that have no position: every query sees them, without a bias,
      whatever the masks.
    * ``_qkv_same_embed_dim`` is False, so that the fused inference path of `torch.nn.TransformerEncoderLayer`, which
      would leave the bias out, is not taken. Nested tensors are accepted for self- and cross-attention without masks.

    Args:
        embed_dim, num_heads, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as torch's.
        dropout: in [0, 1), in training only.
        slopes: a module whose ``forward(device)`` gives (num_heads,) float32; default ``Slopes(num_heads)``.
        future_slopes: likewise, for keys later than the query; default: as ``slopes`` (symmetric).
        causal: hide later keys in every call.
        window: (left, right), inclusive, None = unlimited.
        unbiased: the first n tokens (CLS, registers) neither give nor receive bias.
        metric: "euclidean" or "manhattan": positions are coordinates, and every call needs them; see
            `linbias.alibi_attention`.
        tolerance, backend: as for `linbias.alibi_attention`.

    Raises:
        TypeError, ValueError: naming the argument, the rule, what came and what to do.

    Reference:
        Press et al., https://arxiv.org/abs/2108.12409, section 3.

    >>> attention = MultiheadAttention(embed_dim=12, num_heads=3, batch_first=True)
    >>> tokens = torch.ones(2, 5, 12)
    >>> out, weights = attention(tokens, tokens, tokens)
    >>> out.shape, weights.shape
    (torch.Size([2, 5, 12]), torch.Size([2, 5, 5]))
    """

    def __init__(  # noqa: PLR0913, PLR0917  (torch's signature and the options of the bias)
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        slopes: nn.Module | None = None,
        future_slopes: nn.Module | None = None,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        unbiased: int = 0,
        metric: str | None = None,
        tolerance: float | None = None,
        backend: str = "auto",
    ) -> None:
        for name, count in (("embed_dim", embed_dim), ("num_heads", num_heads), ("unbiased", unbiased)):
            check_count(name, count)
        check_share("dropout", dropout)
        for name, module in (("slopes", slopes), ("future_slopes", future_slopes)):
            if module is not None and not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{name} must be a module such as Slopes({num_heads}), got {type(module).__name__}")
            if isinstance(module, Slopes) and module.local_heads != num_heads:
                raise ValueError(f"{name} must give num_heads={num_heads} slopes, got {module!r}")
        check_window(window)
        check_tolerance(tolerance, 0.0)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self._qkv_same_embed_dim = False
        self.slopes = Slopes(num_heads) if slopes is None else slopes
        self.future_slopes = future_slopes
        self.causal = check_flag("causal", causal)
        self.window = window
        self.unbiased = unbiased
        self.metric = check_metric(metric)
        self._places: tuple[Tensor | None, Tensor | None] = (None, None)
        self.tolerance = tolerance
        self.backend = check_name(backend)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> Self:
        """A module with the bias that takes over the parameters of a torch one: shared, not copied.

        Args:
            module: what it replaces. One with a bias of its own is refused: its causal, window or slopes would be lost.
            options: the keyword-only arguments of the constructor.

        Raises:
            TypeError: not torch's `MultiheadAttention`, or this class already.

        >>> layer = torch.nn.TransformerEncoderLayer(d_model=12, nhead=3, batch_first=True)
        >>> layer.self_attn = MultiheadAttention.from_torch(layer.self_attn)
        """
        if isinstance(module, MultiheadAttention):
            raise TypeError("module has a bias already, got linbias.nn.MultiheadAttention; use it, or copy.deepcopy it")
        if not isinstance(module, nn.MultiheadAttention):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"module must be a torch.nn.MultiheadAttention, got {type(module).__name__}")
        new = cls(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            bias=module.in_proj_bias is not None,
            add_bias_kv=module.bias_k is not None,
            add_zero_attn=module.add_zero_attn,
            kdim=module.kdim,
            vdim=module.vdim,
            batch_first=module.batch_first,
            device="meta",
            **options,
        )
        new._parameters.update(module._parameters)
        new.out_proj = module.out_proj
        return new.train(module.training)

    @contextmanager
    def at(self, query_positions: Tensor, key_positions: Tensor | None = None) -> Generator[None]:
        """Let tokens stand elsewhere while this lasts, for callers that hand no positions on.

        It holds for this module in every thread; `linbias.nn.at` is the same for all within a model.

        Args:
            query_positions, key_positions: as `forward` takes them, whose own go first.
        """
        check_tensor("query_positions", query_positions)
        before, self._places = self._places, (query_positions, key_positions)
        try:
            yield
        finally:
            self._places = before

    @property
    def uses_alibi(self) -> bool:
        """Whether any head has a bias."""
        parts = [part for part in (self.slopes, self.future_slopes) if part is not None]
        return any(getattr(part, "uses_alibi", True) for part in parts)

    def forward(  # noqa: PLR0913  (torch's, and places)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention with the bias; shapes and masks are torch's.

        Args:
            query: (T, B, E), (B, T, E) with batch_first, or (T, E). Or nested tensors, without masks or weights.
            key: likewise with S and kdim.
            value: likewise with S and vdim.
            key_padding_mask: (B, S), or (S,) without batch: bool, True = hidden; or floating, exactly 0 or -inf. Other
                floats have no meaning here: a CPU call raises ValueError; elsewhere, and in compiled code, where
                reading values would wait for the device, an asynchronous assertion fails.
            need_weights: also return the weights, at the cost of a dense matrix.
            attn_mask: (T, S) or (B * H, T, S), of the same kinds.
            average_attn_weights: weights averaged over heads, (B, T, S), or not, (B, H, T, S).
            is_causal: hide later keys as well. Beside an attn_mask of other than square shape it is torch's promise
                that the mask is causal, and the mask alone decides.
            query_positions: (T,) or (B, T) integers, or coordinates (T, C) or (B, T, C) with a metric; default: `at`'s.
            key_positions: likewise with S; default: the query's, where key is query.

        Returns:
            (out, weights): out shaped like query, with E features; weights None unless needed.

        Raises:
            TypeError, ValueError: naming the argument, the rule, what came and what to do.
        """
        given = {"query": query, "key": key, "value": value}
        if any(isinstance(tensor, Tensor) and tensor.is_nested for tensor in given.values()):  # pyright: ignore
            placed = query_positions is not None or key_positions is not None or self._places != (None, None)
            self._refuse_beside_nested(key_padding_mask, attn_mask, need_weights, placed)
            return self._attend_nested(query, key, value, is_causal), None
        for name, tensor in given.items():
            check_tensor(name, tensor)
        self._check_inputs(query, key, value)
        heads = [
            part.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for part in map(self._batch_first, self._project(query, key, value))
        ]
        options = self._options(query.device, is_causal)
        options |= self._placed(query_positions, key_positions, shared=query is key) | {"metric": self.metric}
        batch, queries, keys = heads[0].shape[0], heads[0].shape[2], heads[1].shape[2]
        if key_padding_mask is not None:
            expected = ((batch, keys),) if query.dim() == 3 else ((keys,),)
            options["key_mask"] = visible_pairs("key_padding_mask", key_padding_mask, expected, query)
        if attn_mask is not None:
            expected = ((queries, keys), (batch * self.num_heads, queries, keys))
            visible = visible_pairs("attn_mask", attn_mask, expected, query)
            # The hint is about the mask, which alone knows how its rows align with other numbers of keys.
            options["causal"] = self.causal or (is_causal and queries == keys)
            if not (options["causal"] and is_lower_triangle(visible)):
                options["attn_mask"] = visible if visible.dim() == 2 else visible.unflatten(0, (batch, -1))
        out, weights = self._attend(heads[0], heads[1], heads[2], options, need_weights)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if query.dim() == 3 else weights.squeeze(0)
        tokens = self._like_input(out.transpose(1, 2), query)
        return self.out_proj(tokens.flatten(-2)), weights

    def extra_repr(self) -> str:
        """What torch's module does not show."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, causal={self.causal}, window={self.window}"

    def _reset_parameters(self) -> None:
        # torch asks the flag which projections exist; ours answers another question.
        flag, self._qkv_same_embed_dim = self._qkv_same_embed_dim, self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = flag

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        wanted = {"query": (query, self.embed_dim), "key": (key, self.kdim), "value": (value, self.vdim)}
        layout = "batch, tokens" if self.batch_first else "tokens, batch"
        for name, (tensor, features) in wanted.items():
            if tensor.dim() not in (2, 3) or tensor.dim() != query.dim() or tensor.shape[-1] != features:
                raise ValueError(
                    f"{name} must have shape ({layout}, {features}), or without batch (tokens, {features}) as query, "
                    f"key and value alike, got {tuple(tensor.shape)}"
                )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None and query is key and key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is None
            else self.in_proj_weight.chunk(3)
        )
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(map(F.linear, (query, key, value), weights, biases))

    def _batch_first(self, tokens: Tensor) -> Tensor:
        if tokens.dim() == 2:
            return tokens.unsqueeze(0)
        return tokens if self.batch_first else tokens.transpose(0, 1)

    def _like_input(self, tokens: Tensor, query: Tensor) -> Tensor:
        if query.dim() == 2:
            return tokens.squeeze(0)
        return tokens if self.batch_first else tokens.transpose(0, 1)

    def _options(self, device: torch.device, is_causal: bool) -> dict[str, Any]:
        return {
            "slopes": self.slopes(device),
            "future_slopes": None if self.future_slopes is None else self.future_slopes(device),
            "causal": self.causal or is_causal,
            "window": self.window,
            "unbiased": self.unbiased,
            "dropout_p": self.dropout if self.training else 0.0,
            "tolerance": self.tolerance,
            "backend": self.backend,
        }

    def _placed(self, query: Tensor | None, key: Tensor | None, *, shared: bool) -> dict[str, Any]:
        """Where both sides stand; nothing where nobody said."""
        query, key = (self._places[0] if query is None else query), (self._places[1] if key is None else key)
        return {"query_positions": query, "key_positions": query if key is None and shared else key}

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(B, H, T, D), and the weights (B, H, T, S + appended keys) if needed."""
        out, aux = alibi_attention(query, key, value, **options, return_aux=True)
        shown = {name: options[name] for name in options.keys() - {"dropout_p", "tolerance", "backend"}}
        weights = alibi_attention_weights(query, key, **shown) if need_weights else None
        appended = self._appended(query)
        if appended is None:
            return out, weights
        # Keys without a position attend on their own, unbiased, and the two softmaxes merge exactly.
        free: dict[str, Any] = {"slopes": torch.zeros_like(options["slopes"]), "causal": False}
        rest = {name: options[name] for name in ("dropout_p", "tolerance", "backend")}
        extra_out, extra = alibi_attention(query, *appended, **free, **rest, return_aux=True)
        out, lse = merge(out, aux.lse, extra_out, extra.lse)
        if weights is not None:
            extra_weights = alibi_attention_weights(query, appended[0], **free)
            shares = [(part - lse).exp().unsqueeze(-1) for part in (aux.lse, extra.lse)]
            weights = torch.cat([weights * shares[0], extra_weights * shares[1]], dim=-1).to(weights.dtype)
        return out, weights

    def _appended(self, query: Tensor) -> tuple[Tensor, Tensor] | None:
        """The keys and values (B, H, 1 or 2, D) of add_bias_kv and add_zero_attn."""
        zeros = query.new_zeros((query.shape[0], self.num_heads, int(self.add_zero_attn), self.head_dim))
        if self.bias_k is None or self.bias_v is None:
            return (zeros, zeros) if self.add_zero_attn else None
        key, value = (
            torch.cat([bias.view(1, self.num_heads, 1, self.head_dim).expand(query.shape[0], -1, -1, -1), zeros], dim=2)
            for bias in (self.bias_k, self.bias_v)
        )
        return key, value

    def _refuse_beside_nested(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, need_weights: bool, placed: bool
    ) -> None:
        given = {
            "positions": placed,
            "metric": self.metric is not None,
            "key_padding_mask": key_padding_mask is not None,
            "attn_mask": attn_mask is not None,
            "need_weights": need_weights,
            "add_bias_kv": self.bias_k is not None,
            "add_zero_attn": self.add_zero_attn,
        }
        wrong = [name for name, used in given.items() if used]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} must be off beside nested tensors; pass a padded batch instead")

    def _attend_nested(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        """Ragged sequences are a varlen call: nothing is padded."""
        shared = query is key and key is value
        ragged = [Ragged(tensor) for tensor in ((query,) if shared else (query, key, value))] * (3 if shared else 1)
        if ragged[1].lengths != ragged[2].lengths:
            raise ValueError(f"value must have the key's lengths, got {ragged[2].lengths} and {ragged[1].lengths}")
        heads = [
            part.unflatten(-1, (self.num_heads, self.head_dim))
            for part in self._project(*(part.tokens for part in ragged))
        ]
        out = alibi_attention_varlen(
            *heads,
            cu_seqlens_q=ragged[0].bounds,
            cu_seqlens_k=ragged[1].bounds,
            max_seqlen_q=heads[0].shape[0],  # upper bounds suffice
            max_seqlen_k=heads[1].shape[0],
            **self._options(query.device, is_causal),
        )
        return ragged[0].restore(self.out_proj(cast(Tensor, out).flatten(-2)))


@contextmanager
def at(module: nn.Module, query_positions: Tensor, key_positions: Tensor | None = None) -> Generator[None]:
    """`MultiheadAttention.at` for every `MultiheadAttention` of this library within a model.

    Raises:
        ValueError: there is none in it.

    >>> from linbias import grid_positions
    >>> layer = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True)
    >>> layer.self_attn = MultiheadAttention.from_torch(layer.self_attn, metric="euclidean")
    >>> encoder = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    >>> with at(encoder, grid_positions(2, 3)):
    ...     encoder(torch.ones(1, 6, 12)).shape
    torch.Size([1, 6, 12])
    """
    layers = [part for part in module.modules() if isinstance(part, MultiheadAttention)]
    if not layers:
        raise ValueError(
            f"module must hold a linbias.nn.MultiheadAttention, got a {type(module).__name__} without one; "
            f"MultiheadAttention.from_torch makes one of torch's"
        )
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.at(query_positions, key_positions))
        yield
