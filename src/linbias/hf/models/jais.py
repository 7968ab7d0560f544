# SPDX-License-Identifier: Apache-2.0
"""JAIS: GPT-2's blocks with SwiGLU, slopes of the authors' code, and the scales of muP.

Embeddings times one constant, logits times another, scores over D instead of sqrt(D). `alibi_scaling` divides the
slopes, always or beyond the length of training; see docs/models/jais.md. BTLM is the same model under another name.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from ...semantics.checks import readable
from ...semantics.slopes import alibi_slopes
from ..mask import numbers_of
from ..mlp import RowBlocks
from .decoder import Block, CausalModel, DecoderModel, SelfAttention, refuse, split_heads
from .published import Published, is_number, misfits

# bfloat16 keeps eight bits.
_SLOPES_ROUNDED = 2**-8


class JAISConfig(PreTrainedConfig):
    """The published fields; the first JAIS models' names of the muP scales are read too."""

    model_type = "jais"
    keys_to_ignore_at_inference = ("past_key_values", "cache")
    attribute_map = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: int = 50257
    n_positions: int = 1024
    """Of training; nothing is limited to it."""
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    """None: four times the width."""
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    """Without effect: scores are float32 in any case."""
    position_embedding_type: str = "learned"
    """Must be "alibi"; the default is the published one."""
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    mup_width_scale: float = 1.0
    mup_embeddings_scale: float = 1.0
    mup_output_alpha: float = 1.0
    mup_scale_qk_dot_by_d: bool = False
    alibi_scaling: dict[str, Any] | None = None
    """{"type": "linear"} with "factor", above 1, or with "train_seq_len"."""

    def __post_init__(self, **kwargs: Any) -> None:
        if "width_scale" in kwargs:
            self.mup_width_scale, self.mup_output_alpha = kwargs.pop("width_scale"), 1.0
        self.mup_embeddings_scale = kwargs.pop("embeddings_scale", self.mup_embeddings_scale)
        self.mup_scale_qk_dot_by_d = kwargs.pop("scale_qk_dot_by_d", self.mup_scale_qk_dot_by_d)
        super().__post_init__(**kwargs)


class _MLP(nn.Module):
    def __init__(self, config: JAISConfig) -> None:
        super().__init__()
        width = config.n_embd
        inner = 4 * width if config.n_inner is None else config.n_inner
        gated = config.activation_function == "swiglu"
        self.c_fc = Conv1D(inner, width)
        self.c_fc2 = Conv1D(inner, width) if gated else None
        self.c_proj = Conv1D(width, inner)
        self.act = nn.SiLU() if gated else ACT2FN[config.activation_function]

    def forward(self, x: Tensor) -> Tensor:
        if self.c_fc2 is None:
            return self.c_proj(self.act(self.c_fc(x)))
        return self.c_proj(self.c_fc(x) * self.act(self.c_fc2(x)))


class JAISMLP(RowBlocks, _MLP):  # pyright: ignore[reportIncompatibleMethodOverride]
    """proj(fc(x) * silu(fc2(x))), or proj(act(fc(x))); a long text in blocks."""


class JAISAttention(SelfAttention):
    """GPT-2's projections; the scale is 1 / D under muP."""

    def __init__(self, config: JAISConfig, layer: int) -> None:
        size = config.n_embd // config.n_head
        scale = size ** (-1.0 if config.mup_scale_qk_dot_by_d else -0.5) if config.scale_attn_weights else 1.0
        scale /= layer + 1 if config.scale_attn_by_inverse_layer_idx else 1
        super().__init__(layer, scale, config.attn_pdrop)
        self.num_heads = config.n_head
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All queries, then all keys, then all values."""
        return split_heads(self.c_attn(hidden), self.num_heads, self.num_heads)

    def project(self, context: Tensor, residual: Any) -> Tensor:
        """The residual is added by the block."""
        return self.c_proj(context)


class JAISBlock(Block):
    """A block under GPT-2's names."""

    def __init__(self, config: JAISConfig, layer: int) -> None:
        first, second = (nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon) for _ in range(2))
        super().__init__((first, JAISAttention(config, layer), second, JAISMLP(config)), config.resid_pdrop)


class RelativeSlopes(nn.Module):
    """The slopes (H, 1) as checkpoints hold them: kept for whoever reads the file, and not computed with.

    Attention takes them from the rule, because a cast to half precision rounds whatever a module stores.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.slopes = nn.Parameter(alibi_slopes(heads, device="cpu")[:, None], requires_grad=False)


class JAISModel(DecoderModel):
    """Embeddings times `mup_embeddings_scale`, the blocks, and the norm behind them."""

    config_class = JAISConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["JAISBlock"]
    # The causal mask, which the published layers store; and what the rule says as well.
    _keys_to_ignore_on_load_unexpected = [r"attn\.(masked_)?bias$"]
    _keys_to_ignore_on_load_missing = [r"relative_pe\.slopes$"]

    def __init__(self, config: JAISConfig) -> None:
        refuse(config.model_type.upper(), refusals(config.to_dict()))
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList(JAISBlock(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.relative_pe = RelativeSlopes(config.n_head)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own; a checkpoint whose slopes are not the rule's is an error."""
        return with_checked_slopes(super().from_pretrained(*args, **kwargs))

    def alibi_slopes(self) -> Tensor:
        """The authors' slopes."""
        return alibi_slopes(self.config.n_head, device="cpu")

    def slopes_of_pass(self, mask: Tensor | None, cache: Any, tokens: int) -> Tensor:
        """(H,), or (B, H) where rows of different lengths have different scales."""
        slopes, scaling = self.alibi_slopes().double(), self.config.alibi_scaling
        if scaling is None:
            return slopes
        if scaling.get("factor") is not None:
            return slopes / scaling["factor"]
        trained = scaling["train_seq_len"]
        if mask is not None and mask.dim() == 2:  # noqa: PLR2004
            longest = _longest(mask, trained).double()
            return slopes.to(mask.device) / (longest / trained).clamp_min(1.0)
        length = tokens + (0 if cache is None else cache.get_seq_length())
        if isinstance(length, Tensor):
            return slopes.to(length.device) / (length.double() / trained).clamp_min(1.0)
        return slopes / max(length / trained, 1.0)

    def embed(self, inputs_embeds: Tensor) -> Tensor:
        """Scaled, and dropped out."""
        return F.dropout(inputs_embeds * self.config.mup_embeddings_scale, self.config.embd_pdrop, self.training)

    def _init_weights(self, module: nn.Module) -> None:
        init_jais(self, super()._init_weights, module)


def _longest(mask: Tensor, trained: int) -> Tensor:
    """(B, 1): tokens of the longest document of each row.

    Raises:
        ValueError: a row's documents need different slopes, if that can be read without waiting for a device.
    """
    numbers = numbers_of(mask).long()
    latest = numbers.cummax(-1).values
    document = F.pad(latest[:, 1:] != latest[:, :-1], (1, 0)).long().cumsum(-1)
    lengths = torch.zeros_like(numbers).scatter_add(1, document, (numbers > 0).long())
    longest = lengths.amax(-1, keepdim=True)
    apart = (lengths > 0) & (lengths.clamp_min(trained) != longest.clamp_min(trained))
    if readable(mask) and bool(apart.any()):
        found = [length for length in lengths[apart.any(-1)][0].tolist() if length]
        raise ValueError(
            f"documents packed into one row need slopes of their own where one is longer than alibi_scaling's "
            f"train_seq_len={trained}, got lengths {found}: give each a row, padded"
        )
    return longest


class JAISLMHeadModel(CausalModel):
    """`JAISModel` with logits times `mup_output_alpha` * `mup_width_scale`."""

    config_class = JAISConfig
    base_model_prefix = "transformer"
    base_class: type[JAISModel] = JAISModel
    _no_split_modules = ["JAISBlock"]
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    _keys_to_ignore_on_load_unexpected = JAISModel._keys_to_ignore_on_load_unexpected
    _keys_to_ignore_on_load_missing = JAISModel._keys_to_ignore_on_load_missing

    def __init__(self, config: JAISConfig) -> None:
        super().__init__(config)
        self.transformer = self.base_class(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own; a checkpoint whose slopes are not the rule's is an error."""
        return with_checked_slopes(super().from_pretrained(*args, **kwargs))

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Scaled."""
        return self.lm_head(hidden) * (self.config.mup_output_alpha * self.config.mup_width_scale)

    def _init_weights(self, module: nn.Module) -> None:
        init_jais(self, super()._init_weights, module)


def init_jais(model: Any, otherwise: Any, module: nn.Module) -> None:
    """Start values of one module."""
    if isinstance(module, Conv1D):
        init.normal_(module.weight, mean=0.0, std=model.config.initializer_range)
        init.zeros_(module.bias)
    elif isinstance(module, RelativeSlopes):
        init.copy_(module.slopes, alibi_slopes(len(module.slopes), device="cpu")[:, None])
    else:
        otherwise(module)


def with_checked_slopes(loaded: Any) -> Any:
    """What `from_pretrained` returned, if its slopes are the rule's to bfloat16.

    Raises:
        ValueError: they are not.
    """
    for module in (loaded[0] if isinstance(loaded, tuple) else loaded).modules():
        if isinstance(module, RelativeSlopes) and not module.slopes.is_meta:
            held, rule = module.slopes.detach().cpu().double().flatten(), alibi_slopes(len(module.slopes), device="cpu")
            wrong = ~((held.abs() - rule).abs() <= _SLOPES_ROUNDED * rule)
            if bool(wrong.any()):
                head = int(wrong.nonzero()[0])
                raise ValueError(
                    f"relative_pe.slopes of the checkpoint has {float(held[head])} for head {head}, and the rule of "
                    f"{len(rule)} heads {float(rule[head])}: these models compute with the rule, so this one, trained "
                    f"with other slopes, would give wrong results"
                )
    return loaded


def refusals(config: Mapping[str, Any]) -> list[str]:
    """What a JAIS or BTLM configuration cannot have."""
    found = misfits(config, "n_embd", "n_head", "activation_function", "swiglu")
    scales = ("width_scale", "embeddings_scale")
    found += [f"{name}={config[name]!r} must be a number" for name in scales if not is_number(config.get(name, 1))]
    kind = config.get("position_embedding_type", "learned")
    if kind != "alibi":
        found.append(
            f"position_embedding_type={kind!r} (published default: 'learned') is not ALiBi, and linbias has no "
            f"positions to add; pass position_embedding_type='alibi' if the model was trained with it"
        )
    if config.get("add_cross_attention"):
        found.append("add_cross_attention=True: there is no encoder here to attend to; leave it out")
    scaling = config.get("alibi_scaling")
    if scaling is not None and not _is_scaling(scaling):
        found.append(
            f"alibi_scaling must be None or {{'type': 'linear'}} with either 'factor', a number above 1, or "
            f"'train_seq_len', a whole number above 1, got {scaling!r}"
        )
    return found


def _is_scaling(scaling: Any) -> bool:
    if not isinstance(scaling, Mapping) or scaling.get("type") != "linear":
        return False
    given = {name: value for name, value in scaling.items() if name != "type" and value is not None}
    kinds = {"factor": (int, float), "train_seq_len": int}
    return len(given) == 1 and all(
        name in kinds and isinstance(value, kinds[name]) and not isinstance(value, bool) and value > 1
        for name, value in given.items()
    )


PUBLISHED = Published(
    name="JAIS",
    claims=lambda config: config.get("model_type") == "jais",
    refusals=refusals,
    config=JAISConfig,
    classes={"JAISModel": JAISModel, "JAISLMHeadModel": JAISLMHeadModel},
)
