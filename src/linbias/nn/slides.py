# SPDX-License-Identifier: Apache-2.0
"""Attention on a plane, as CROMA, TITAN and MOOZY have it, under the names of their published parameters.

Each biases a score by minus a slope times the Euclidean distance of two tiles. Published, the bias is a tensor of
heads x tiles x tiles; here it is points. `use_in_croma`, `use_in_titan` and `use_in_moozy` put these modules into a
model.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import alibi_attention
from ..semantics.checks import check_count
from ..semantics.slopes import alibi_slopes
from ..semantics.tokens import grid_positions


class _Shared(nn.Module):
    """A module with a published one's children, so that parameters and their names stay what they are."""

    num_heads: int

    @classmethod
    def of(cls, published: nn.Module, **facts: Any) -> Self:
        """With the parameters of ``published``, shared and not copied."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        for name, child in published.named_children():
            made.add_module(name, child)
        for name, fact in facts.items():
            setattr(made, name, fact)
        return made.train(published.training)

    def _split(self, tokens: Tensor) -> Tensor:
        """(B, N, H * D) as (B, H, N, D)."""
        return tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _joined(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _on_a_plane(
    qkv: tuple[Tensor, Tensor, Tensor], slopes: Tensor, positions: Tensor, *, real: Tensor | None = None, **options: Any
) -> Tensor:
    """Attention by Euclidean distance. Tokens that are not real see themselves alone and nobody sees them."""
    if real is not None:
        alone = torch.arange(1, real.shape[1] + 1, device=real.device)
        options["query_segments"] = options["key_segments"] = torch.where(real, 0, alone)
    return alibi_attention(*qkv, slopes, causal=False, metric="euclidean", key_positions=positions, **options)


class CromaAttention(_Shared):
    """CROMA's attention: softmax(q k / sqrt(D) - 2**(-8 h / H) |place of q - place of k|) v, tokens normed first.

    Args:
        dim, num_heads: width, and heads that divide it.
        dropout: of attention weights, while training.
        cross: queries from ``x``, keys and values from a context of its own.
    """

    def __init__(self, dim: int, num_heads: int = 8, dropout: float = 0.0, *, cross: bool = False) -> None:
        super().__init__()
        _check_width(dim, num_heads)
        self.num_heads = num_heads
        if cross:
            self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        else:
            self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self.input_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *places: Tensor, relative_position_bias: Tensor | None = None) -> Tensor:
        """``(x, positions)``, or ``(x, context, positions)`` where keys come from a context.

        Args:
            x, context: (B, N, dim), on the same grid.
            positions: (N, 2) or (B, N, 2), such as `linbias.grid_positions`; may be given as
                ``relative_position_bias``, which is where the published model passes its bias.

        Raises:
            TypeError: another number of tensors.
        """
        own = hasattr(self, "to_qkv")
        given = (x, *places) if relative_position_bias is None else (x, *places, relative_position_bias)
        if len(given) != (2 if own else 3):
            wanted = "x and positions" if own else "x, context and positions"
            raise TypeError(f"this attention takes {wanted}, got {len(given)} tensors")
        positions = given[-1]
        x = self.input_norm(x)
        if own:
            qkv = self.to_qkv(x).chunk(3, dim=-1)
        else:
            other = self.input_norm(given[1])
            qkv = (self.to_q(x), self.to_k(other), self.to_v(other))
        query, key, value = map(self._split, qkv)
        slopes = alibi_slopes(self.num_heads, rule="geometric", device=x.device)
        dropout = self.dropout.p if self.training else 0.0
        return self.to_out(_joined(_on_a_plane((query, key, value), slopes, positions, dropout_p=dropout)))


class TitanAttention(_Shared):
    """TITAN's attention: softmax(q k / sqrt(D) - slope_h |tile of q - tile of k|) v; the CLS token, first, has no bias.

    Slopes are `linbias.alibi_slopes`. Tiles that ``bg_mask`` calls background see themselves alone and are not seen.

    Args:
        dim, num_heads: width, and heads that divide it.
        qkv_bias: biases of queries, keys and values.
        attn_drop: dropout of attention weights, while training.
    """

    def __init__(self, dim: int, num_heads: int = 12, *, qkv_bias: bool = True, attn_drop: float = 0.0) -> None:
        super().__init__()
        _check_width(dim, num_heads)
        self.num_heads, self.attn_drop_prob = num_heads, attn_drop
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Identity()

    def forward(self, x: Tensor, attn_bias: "TilePoints", bg_mask: Tensor | None = None) -> Tensor:
        """(B, 1 + N, dim) to the same; ``attn_bias`` is where the tiles are, `tile_points`.

        Args:
            bg_mask: bool, (B, ...) with N tiles an item, True = tissue. It counts where B > 1: of one slide, the model
                has already left the background out.

        Raises:
            TypeError: a dense bias, or a mask that is not bool.
        """
        if not isinstance(attn_bias, TilePoints):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"attn_bias must be tile_points(width, height), got {type(attn_bias).__name__}")
        _check_tissue(bg_mask)
        query, key, value = map(self._split, self.qkv(x).chunk(3, dim=-1))
        real = None
        if bg_mask is not None and len(x) > 1:
            real = F.pad(bg_mask.reshape(len(x), -1), (1, 0), value=True)
        qkv = (self.q_norm(query), self.k_norm(key), value)
        slopes = alibi_slopes(self.num_heads, device=x.device)
        dropout = self.attn_drop_prob if self.training else 0.0
        places = attn_bias.points.to(x.device)
        return self.proj_drop(
            self.proj(_joined(_on_a_plane(qkv, slopes, places, real=real, unbiased=1, dropout_p=dropout)))
        )


class TilePoints:
    """Where a CLS token and N tiles are, (1 + N, 2) int64, in the place of a bias that TITAN repeats, casts and moves.

    None of these may reach the points: float16 has no odd numbers above 2,048.
    """

    def __init__(self, points: Tensor) -> None:
        self.points = points

    def _itself(self, *_: Any) -> Self:
        return self

    repeat = type = to = _itself


def tile_points(width: int, height: int, bg_mask: Tensor | None = None) -> TilePoints:
    """The points of a grid's tiles, or of those that ``bg_mask``, bool (1, width, height), calls tissue."""
    _check_tissue(bg_mask)
    device = None if bg_mask is None else bg_mask.device
    points = grid_positions(int(width), int(height), device=device)
    if bg_mask is not None:
        points = points[bg_mask.reshape(-1)]
    return TilePoints(F.pad(points, (0, 0, 1, 0)))


class MoozyBlock(_Shared):
    """MOOZY's block, whose slopes are learned: score - slope_h distance / patch size, CLS and registers without bias.

    Made by `use_in_moozy`, or `of` a published block. What is learned is minus the slopes, (heads, 1), ``slopes`` of
    ``pos_bias``, which all blocks share; a slope that training has made negative rewards distance, as published.
    """

    attn_drop_prob: float
    norm1: nn.Module
    norm2: nn.Module
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    pos_bias: Any
    fc1: nn.Module
    fc2: nn.Module
    activation: nn.Module
    mlp_dropout: nn.Module
    ls_attn: nn.Module
    ls_mlp: nn.Module
    drop_path: nn.Module

    def forward(
        self, x: Tensor, positions: Tensor, attn_mask: Tensor | None, patch_sizes: Tensor, num_registers: int
    ) -> Tensor:
        """The published block's arguments: (B, N, d), places (B, N, 2), a mask (B, 1, N, N) or None, sizes (B,)."""
        normed = self.norm1(x)
        query, key, value = (self._split(project(normed)) for project in (self.q_proj, self.k_proj, self.v_proj))
        learned = self.pos_bias.slopes
        learned = learned.to(torch.promote_types(learned.dtype, torch.float32))
        slopes = -learned.view(1, -1) / patch_sizes.view(-1, 1).clamp(min=1e-6)
        # The CLS token, always real, sees who is real.
        real = None if attn_mask is None else attn_mask[:, 0, 0] == 0
        attended = _on_a_plane(
            (self.q_norm(query), self.k_norm(key), value), slopes, positions, real=real,
            unbiased=1 + num_registers, dropout_p=self.attn_drop_prob if self.training else 0.0,
        )  # fmt: skip
        x = x + self.drop_path(self.ls_attn(self.out_proj(_joined(attended))))
        inner = self.fc2(self.mlp_dropout(self.activation(self.fc1(self.norm2(x)))))
        return x + self.drop_path(self.ls_mlp(self.mlp_dropout(inner)))


def use_in_croma(model: nn.Module, *, side: int | None = None) -> nn.Module:
    """Put `CromaAttention` into a CROMA model, in place. Load its weights before.

    ``attn_bias``, published as a buffer of heads x N x N, becomes the points of a grid, so an image may be larger than
    the one the model was built for.

    Args:
        model: torchgeo's CROMA, or one built like it.
        side: patches along a side of the images to come; None: as the model was built.

    Raises:
        ValueError: a model without ``attn_bias`` or without attention of CROMA's.
    """
    bias = getattr(model, "attn_bias", None)
    found = _published(model, {"to_out", "input_norm", "dropout"}, CromaAttention)
    if not isinstance(bias, Tensor) or not found:
        raise ValueError(f"model must have attn_bias and attention as CROMA has, got {type(model).__name__}")
    side = round(bias.shape[-1] ** 0.5) if side is None else check_count("side", side)
    for name, module in found:
        model.set_submodule(name, CromaAttention.of(module, num_heads=module.num_heads))
    del model.attn_bias
    model.register_buffer("attn_bias", grid_positions(side, side, device=bias.device), persistent=False)
    return model


def use_in_titan(model: nn.Module) -> nn.Module:
    """Put `TitanAttention` into TITAN's vision encoder, in place: no bias is built, for one slide or for a batch.

    Args:
        model: the vision encoder, or what holds it as ``vision_encoder``.

    Raises:
        ValueError: an encoder that is not built as TITAN's, or whose ``pos_encode_type`` is not "alibi".
    """
    encoder: Any = getattr(model, "vision_encoder", model)
    found = _published(encoder, {"qkv", "q_norm", "k_norm", "proj", "proj_drop"}, TitanAttention)
    if not found or not hasattr(encoder, "get_alibi") or getattr(encoder, "pos_encode_type", None) != "alibi":
        raise ValueError(
            f"model must be TITAN's vision encoder with pos_encode_type 'alibi', got {type(encoder).__name__} "
            f"with {getattr(encoder, 'pos_encode_type', None)!r}"
        )
    for name, module in found:
        facts = {"num_heads": module.num_heads, "attn_drop_prob": module.attn_drop_prob}
        encoder.set_submodule(name, TitanAttention.of(module, **facts))
    encoder.get_alibi = tile_points
    encoder.local_alibi, encoder.global_alibi = tile_points(6, 6), tile_points(14, 14)
    return model


def use_in_moozy(model: nn.Module) -> nn.Module:
    """Put `MoozyBlock` into MOOZY's slide encoder, in place.

    The encoder still makes a mask of all pairs for a batch, or with ``mask``; for one slide without it makes none.

    Raises:
        ValueError: a model without MOOZY's blocks.
    """
    found = _published(model, {"q_proj", "k_proj", "v_proj", "out_proj", "pos_bias", "fc1", "fc2"}, MoozyBlock)
    if not found:
        raise ValueError(f"model must have blocks as MOOZY's slide encoder has, got {type(model).__name__}")
    for name, block in found:
        facts = {"num_heads": block.n_heads, "attn_drop_prob": block.attn_drop_prob}
        model.set_submodule(name, MoozyBlock.of(block, **facts))
    return model


def _published(model: nn.Module, children: set[str], ours: type[nn.Module]) -> list[tuple[str, Any]]:
    """The modules with these children.

    Raises:
        ValueError: they are ours already.
    """
    if any(isinstance(module, ours) for module in model.modules()):
        raise ValueError(f"model has {ours.__name__} already: {type(model).__name__} was changed before")
    return [
        (name, module) for name, module in model.named_modules() if children <= dict(module.named_children()).keys()
    ]


def _check_tissue(mask: Tensor | None) -> None:
    # Numbers would pick the tiles of these numbers.
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"bg_mask must be bool, True = tissue, got {mask.dtype}: pass bg_mask.bool()")


def _check_width(dim: int, num_heads: int) -> None:
    if check_count("dim", dim) < 1 or check_count("num_heads", num_heads) < 1 or dim % num_heads:
        raise ValueError(f"dim must be a multiple of num_heads, got {dim} and {num_heads}")
