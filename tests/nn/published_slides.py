# SPDX-License-Identifier: Apache-2.0
"""CROMA, TITAN and MOOZY, small and dense, from their formulas, with children and arguments as published."""

from typing import Any

import torch
from torch import Tensor, nn

PRESS = {3: [2**-4, 2**-8, 2**-2], 4: [2**-2, 2**-4, 2**-6, 2**-8]}
GEOMETRIC = {4: PRESS[4], 6: [2 ** (-8 * h / 6) for h in range(1, 7)]}


def distances(points: Tensor) -> Tensor:
    """(..., N, 2) as (..., N, N): Euclidean, by the definition."""
    return (points.unsqueeze(-2) - points.unsqueeze(-3)).double().square().sum(-1).sqrt()


def grid(height: int, width: int) -> Tensor:
    return torch.tensor([[row, column] for row in range(height) for column in range(width)])


def bias_of(slopes: list[float], points: Tensor, unbiased: int = 0) -> Tensor:
    """(1, H, n + N, n + N) float64, 0 for the first n; the slopes are float32, as published."""
    bias = -torch.tensor(slopes).double().view(1, -1, 1, 1) * distances(points)
    return nn.functional.pad(bias, (unbiased, 0, unbiased, 0))


def dense(query: Tensor, key: Tensor, value: Tensor, heads: int, bias: Tensor, norms: Any = None) -> Tensor:
    """(B, N, H * D) projections attended with a bias (B or 1, H, N, N)."""
    query, key, value = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (query, key, value))
    if norms is not None:
        query, key = norms[0](query), norms[1](key)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5 + bias.to(query.dtype)
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class CromaSelf(nn.Module):
    def __init__(self, dim: int, heads: int, cross: bool = False) -> None:
        super().__init__()
        self.num_heads = heads
        for name in ("to_q", "to_k", "to_v") if cross else ("to_qkv",):
            self.add_module(name, nn.Linear(dim, dim if cross else 3 * dim, bias=False))
        self.to_out, self.input_norm, self.dropout = nn.Linear(dim, dim), nn.LayerNorm(dim), nn.Dropout(0.0)

    def forward(self, x: Tensor, *rest: Tensor, relative_position_bias: Tensor | None = None) -> Tensor:
        *context, bias = rest if relative_position_bias is None else (*rest, relative_position_bias)
        x = self.input_norm(x)
        if context:
            other = self.input_norm(context[0])
            qkv = self.to_q(x), self.to_k(other), self.to_v(other)  # pyright: ignore
        else:
            qkv = self.to_qkv(x).chunk(3, -1)  # pyright: ignore
        return self.to_out(dense(*qkv, self.num_heads, bias))


class Croma(nn.Module):
    attn_bias: Tensor

    def __init__(self, side: int = 5, dim: int = 24, heads: int = 6) -> None:
        super().__init__()
        self.register_buffer("attn_bias", bias_of(GEOMETRIC[heads], grid(side, side)))
        self.own, self.cross = CromaSelf(dim, heads), CromaSelf(dim, heads, cross=True)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = self.own(x, relative_position_bias=self.attn_bias) + x
        return self.cross(x, context, self.attn_bias) + x


class TitanAttend(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.attn_drop_prob = heads, 0.0
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm, self.proj_drop = nn.LayerNorm(dim // heads), nn.Identity(), nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_bias: Tensor, bg_mask: Tensor | None = None) -> Tensor:
        if bg_mask is not None and len(x) > 1:
            real = nn.functional.pad(bg_mask.flatten(1), (1, 0), value=True)
            pairs = real[:, :, None] & real[:, None] | torch.eye(x.shape[1], dtype=torch.bool)
            attn_bias = attn_bias.masked_fill(~pairs[:, None], -torch.inf)
        norms = self.q_norm, self.k_norm
        return self.proj_drop(self.proj(dense(*self.qkv(x).chunk(3, -1), self.num_heads, attn_bias, norms)))


class Titan(nn.Module):
    def __init__(self, dim: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.pos_encode_type, self.heads = "alibi", heads
        self.blocks = nn.ModuleList([TitanAttend(dim, heads) for _ in range(2)])
        self.local_alibi: Any = self.get_alibi(6, 6)
        self.global_alibi: Any = None

    def get_alibi(self, w: int, h: int, bg_mask: Tensor | None = None) -> Tensor:
        points = grid(w, h)
        return bias_of(PRESS[self.heads], points if bg_mask is None else points[bg_mask.flatten()], 1)

    def forward(self, cls: Tensor, x: Tensor, bg_mask: Tensor | None = None) -> Tensor:
        """cls (dim,), x (B, w, h, dim)."""
        count, w, h, _ = x.shape
        alone = count == 1 and bg_mask is not None
        if w * h == 36 and count > 1:
            bias = self.local_alibi
        else:
            bias = self.get_alibi(w, h, bg_mask) if alone else self.get_alibi(w, h)
        bias = bias.repeat(count, 1, 1, 1).type(x.dtype).to(x.device)
        x = x[bg_mask][None] if alone else x.flatten(1, 2)  # pyright: ignore
        x = torch.cat([cls.expand(count, 1, -1), x], 1)
        for block in self.blocks:
            x = x + block(x, attn_bias=bias, bg_mask=bg_mask)
        return x


class MoozyBias(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.slopes = nn.Parameter(-torch.tensor(PRESS[heads])[:, None])


class MoozyLayer(nn.Module):
    def __init__(self, dim: int, heads: int, pos_bias: MoozyBias) -> None:
        super().__init__()
        self.n_heads, self.attn_drop_prob = heads, 0.0
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q_norm, self.k_norm = nn.LayerNorm(dim // heads), nn.LayerNorm(dim // heads)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.mlp_dropout, self.activation = nn.Dropout(0.0), nn.GELU()
        self.drop_path, self.ls_attn, self.ls_mlp = nn.Identity(), nn.Identity(), nn.Identity()
        self.pos_bias = pos_bias

    def forward(
        self, x: Tensor, positions: Tensor, attn_mask: Tensor | None, patch_sizes: Tensor, num_registers: int
    ) -> Tensor:
        normed, first = self.norm1(x), 1 + num_registers
        apart = distances(positions[:, first:]) / patch_sizes.clamp(min=1e-6)[:, None, None]
        bias = nn.functional.pad(self.pos_bias.slopes.view(1, -1, 1, 1) * apart[:, None], (first, 0, first, 0))
        bias = bias if attn_mask is None else bias + attn_mask
        qkv = self.q_proj(normed), self.k_proj(normed), self.v_proj(normed)
        x = x + self.out_proj(dense(*qkv, self.n_heads, bias, (self.q_norm, self.k_norm)))
        return x + self.fc2(self.activation(self.fc1(self.norm2(x))))


class Moozy(nn.Module):
    def __init__(self, dim: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.pos_bias = MoozyBias(heads)
        self.blocks = nn.ModuleList([MoozyLayer(dim, heads, self.pos_bias) for _ in range(2)])

    def forward(self, x: Tensor, positions: Tensor, patch_sizes: Tensor, valid: Tensor | None = None) -> Tensor:
        """x (B, 3 + N, dim), of which two registers; positions (B, N, 2); valid (B, 3 + N)."""
        mask = None
        if valid is not None:
            pairs = valid[:, :, None] & valid[:, None] | torch.eye(x.shape[1], dtype=torch.bool)
            mask = (~pairs[:, None]).to(x.dtype) * torch.finfo(x.dtype).min
        for block in self.blocks:
            x = block(x, nn.functional.pad(positions, (0, 0, 3, 0)), mask, patch_sizes, 2)
        return x
