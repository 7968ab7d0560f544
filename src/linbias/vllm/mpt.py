# SPDX-License-Identifier: Apache-2.0
"""MPT with ALiBi on vLLM's layers: a model that vLLM dropped at 0.28.

What it computes is docs/models/mpt.md; published names of weights, in transformers' folders and llm-foundry's.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from ..semantics.slopes import alibi_slopes

_TYPES = ("multihead_attention", "multiquery_attention", "grouped_query_attention")
# Option -> the values with which it changes nothing here.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "qk_ln": (None, False),
    "qk_gn": (None, False),
    "prefix_lm": (None, False),
    "attn_type": (None, *_TYPES),
    "norm_type": (None, "layernorm", "low_precision_layernorm"),
    "embedding_fraction": (None, 1, 1.0),
    "logit_scale": (None,),
    "ffn_config": (None, {}, {"ffn_type": "mptmlp"}),
    "tie_word_embeddings": (None, True),
}


def options_of(config: PreTrainedConfig) -> Mapping[str, Any]:
    """The fields of a configuration and of its ``attn_config``; refuses by name what this class does not compute.

    Raises: ValueError.
    """
    given = config.to_dict()
    options = given | dict(given.get("attn_config") or {})
    if not options.get("alibi"):
        raise ValueError("attn_config.alibi must be True, got False: this MPT learned positions, which linbias has not")
    for name, plain in _PLAIN.items():
        if options.get(name) not in plain:
            raise ValueError(
                f"{name} must be one of {plain}, got {options[name]!r}: MPT in vLLM has no other; "
                f"linbias.hf.load runs such a folder in transformers"
            )
    return options


class MPTAttention(nn.Module):
    """Fused projection, attention with slopes, projection."""

    def __init__(self, options: Mapping[str, Any], vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        width, heads = options["d_model"], options["n_heads"]
        key_heads = 1 if options.get("attn_type") == _TYPES[1] else options.get("kv_n_heads") or heads
        head_dim, bias, quant = width // heads, not options.get("no_bias", True), vllm_config.quant_config
        self.clip = options.get("clip_qkv")
        self.Wqkv = QKVParallelLinear(
            width, head_dim, heads, key_heads, bias=bias, quant_config=quant, prefix=f"{prefix}.Wqkv"
        )
        self.out_proj = RowParallelLinear(width, width, bias=bias, quant_config=quant, prefix=f"{prefix}.out_proj")
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        own, own_keys = heads // ranks, max(1, key_heads // ranks)
        self.sizes = [own * head_dim, own_keys * head_dim, own_keys * head_dim]
        slopes = alibi_slopes(heads, max_bias=options.get("alibi_bias_max") or 8)
        self.attn = Attention(
            own,
            head_dim,
            options.get("softmax_scale") or head_dim**-0.5,
            num_kv_heads=own_keys,
            alibi_slopes=slopes[rank * own : (rank + 1) * own].tolist(),
            cache_config=vllm_config.cache_config,
            quant_config=quant,
            prefix=f"{prefix}.attn",
        )

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width)."""
        qkv, _ = self.Wqkv(x)
        if self.clip:
            qkv = qkv.clamp(-self.clip, self.clip)
        out, _ = self.out_proj(self.attn(*qkv.split(self.sizes, dim=-1)))
        return out


class MPTMLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, options: Mapping[str, Any], vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        width, bias, quant = options["d_model"], not options.get("no_bias", True), vllm_config.quant_config
        inner = int(width * (options.get("expansion_ratio") or 4))
        self.up_proj = ColumnParallelLinear(width, inner, bias=bias, quant_config=quant, prefix=f"{prefix}.up_proj")
        self.down_proj = RowParallelLinear(inner, width, bias=bias, quant_config=quant, prefix=f"{prefix}.down_proj")

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width)."""
        inner, _ = self.up_proj(x)
        out, _ = self.down_proj(nn.functional.gelu(inner))
        return out


def _norm(options: Mapping[str, Any]) -> nn.LayerNorm:
    eps = options.get("layer_norm_epsilon") or options.get("norm_eps") or 1e-5
    return nn.LayerNorm(options["d_model"], eps=eps, bias=not options.get("no_bias", True))


class MPTBlock(nn.Module):
    """Attention and MLP, each behind its norm and beside its input."""

    def __init__(self, options: Mapping[str, Any], vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = _norm(options), _norm(options)
        self.attn = MPTAttention(options, vllm_config, f"{prefix}.attn")
        self.ffn = MPTMLP(options, vllm_config, f"{prefix}.ffn")

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width)."""
        x = x + self.attn(self.norm_1(x))
        return x + self.ffn(self.norm_2(x))


@support_torch_compile
class MPTModel(nn.Module):
    """Embeddings, blocks, a norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        options = options_of(vllm_config.model_config.hf_config)
        self.wte = VocabParallelEmbedding(options["vocab_size"], options["d_model"])
        self.start_layer, self.end_layer, self.blocks = make_layers(
            options["n_layers"],
            lambda prefix: MPTBlock(options, vllm_config, prefix),
            prefix=f"{prefix}.blocks",
        )
        self.norm_f = _norm(options)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], options["d_model"]
        )

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """(tokens, width); positions are the cache's affair."""
        if get_pp_group().is_first_rank:
            x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        else:
            assert intermediate_tensors is not None
            x = intermediate_tensors["hidden_states"]
        for block in islice(self.blocks, self.start_layer, self.end_layer):
            x = block(x)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": x})
        return self.norm_f(x)


class MPTForCausalLM(nn.Module, SupportsPP):
    """Logits by the embeddings' own weights."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.transformer = MPTModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "transformer"))
        self.lm_head = self.transformer.wte
        self.logits_processor = LogitsProcessor(vllm_config.model_config.hf_config.vocab_size)
        self.make_empty_intermediate_tensors = self.transformer.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """(tokens, width)."""
        return self.transformer.wte(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """(tokens, width)."""
        return self.transformer(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """(tokens, vocabulary)."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """By their published names; some folders hold a copy of the embeddings, which goes unused."""
        own = ((name, weight) for name, weight in weights if name != "lm_head.weight")
        return AutoWeightsLoader(self).load_weights(own)
