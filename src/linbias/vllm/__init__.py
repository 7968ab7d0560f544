# SPDX-License-Identifier: Apache-2.0
"""linbias in vLLM on CPUs (extra ``vllm``): ALiBi attention that reads pages where they lie, and MPT.

vLLM loads `register` by its entry point. From then on the layers with ALiBi slopes of any model attend here, with
bounds of the keys kept a page, so that a step reads what its heads can see; all other layers stay vLLM's. See
docs/how-to/vllm.md.
"""


def register() -> None:
    """Put `linbias.vllm.attention.AlibiBackend` in the place of vLLM's attention on CPUs, and announce MPT.

    vLLM calls it in each of its processes (entry point ``vllm.general_plugins``); calling it again changes nothing.
    """
    from vllm import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "linbias.vllm.attention.AlibiBackend")
    for architecture in ("MPTForCausalLM", "MptForCausalLM"):
        ModelRegistry.register_model(architecture, "linbias.vllm.mpt:MPTForCausalLM")
