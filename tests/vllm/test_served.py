# SPDX-License-Identifier: Apache-2.0
"""Models in vLLM: the log-probabilities of the same model in transformers, in float64, whatever shares the batch.

`make test-vllm` runs these in an environment of their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm installs it in a place of its own")

from tests.vllm.small import answered, expected, save, texts  # isort: skip  (sets the environment first)
from vllm.config import set_current_vllm_config  # isort: skip
from vllm.distributed import cleanup_dist_env_and_memory  # isort: skip

from linbias.vllm.attention import AlibiLayer, pages_of  # isort: skip

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # vLLM's warnings are its own

FAMILIES = ("bloom", "mpt", "falcon")


class Served:
    """A model in vLLM, in chunks of 48 tokens, and the same one in transformers."""

    def __init__(self, kind: str, folder: Path, **options: Any) -> None:
        from vllm import LLM

        self.model = save(kind, folder)
        given = dict(
            dtype="float32", max_model_len=512, block_size=32, max_num_batched_tokens=48, max_num_seqs=4,
            skip_tokenizer_init=True, enforce_eager=True, enable_prefix_caching=True, gpu_memory_utilization=0.2,
        )  # fmt: skip
        self.llm = LLM(model=str(folder), **given | options)

    @classmethod
    @contextmanager
    def of(cls, *args: Any, **options: Any) -> Iterator["Served"]:
        """One at a time: vLLM's groups of ranks are the process'."""
        served = cls(*args, **options)
        try:
            yield served
        finally:
            served.llm.llm_engine.engine_core.shutdown()
            del served.llm
            cleanup_dist_env_and_memory()

    @property
    def caches(self) -> list[Any]:
        """The pages of each layer."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches

    @property
    def layers(self) -> list[Any]:
        """The attention of each layer."""
        model = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        return [part.impl for part in model.modules() if hasattr(part, "impl")]

    def assert_right(self, prompts: list[list[int]], **options: Any) -> list[list[int]]:
        """Every log-probability is that of transformers in float64; returns the texts."""
        found = answered(self.llm, prompts, **options)
        for text, got in found:
            # float32 through two layers: the spread of plain float32 against float64, a few times over.
            wanted = expected(self.model, text)[-len(got) :]
            plain = expected(self.model.float(), text)[-len(got) :]
            self.model.double()
            assert (got - wanted).abs().max() <= 8 * (plain - wanted).abs().max() + 1e-6
        return [text for text, _ in found]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served.of(request.param, tmp_path_factory.mktemp(request.param)) as served:
        yield served


def test_vllm_finds_the_plugin():
    assert {entry.value for entry in entry_points(group="vllm.general_plugins", name="linbias")} == {
        "linbias.vllm:register"
    }


def test_layers_are_ours(served: Served):
    assert [type(layer).__module__ for layer in served.layers] == ["linbias.vllm.attention"] * 2
    assert all(layer._ours and layer._measured for layer in served.layers)


def test_mixed_batches_in_chunks(served: Served):
    served.assert_right(texts(1, 37, 300, 150, 5, 222))


def test_several_samples_share_pages(served: Served):
    found = served.assert_right(texts(77, 40), n=3, temperature=1.0)
    assert len({tuple(text) for text in found}) > 2


def test_prefixes_are_found_again(served: Served):
    # Asked for the log-probabilities of a prompt, vLLM reads it afresh.
    one, two, three = texts(150, 171, 99, shared=96)
    served.assert_right([one], prompt_logprobs=None)
    written: list[int] = []
    layer = served.layers[0]
    update = layer.do_kv_cache_update
    layer.do_kv_cache_update = lambda *given: (written.append(len(given[1])), update(*given))[1]
    try:
        served.assert_right([two, three, one], prompt_logprobs=None)
    finally:
        del layer.do_kv_cache_update
    assert sum(written) < 171 + 99 + 150 - 3 * 64, "the shared pages were written once"


def test_bounds_of_pages_hold(served: Served):
    served.assert_right(texts(200, 111))
    for layer, cache in zip(served.layers, served.caches, strict=True):
        keys, _ = pages_of(cache)
        norms = torch.linalg.vector_norm(keys.double(), dim=-1).amax(-1)
        used = layer._norms[..., 0] > 0
        assert used.any() and (layer._norms[..., 0].double() >= norms)[used].all()


def test_preemption(tmp_path: Path):
    # Room for 512 tokens in pages of 32; four texts grow to 185 each, so that some must make room and start again.
    with Served.of("bloom", tmp_path, num_gpu_blocks_override=17, max_num_batched_tokens=256) as served:
        served.assert_right(texts(100, 110, 90, 105), max_tokens=80, prompt_logprobs=None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types(dtype: str, tmp_path: Path):
    half = getattr(torch, dtype)
    with Served.of("bloom", tmp_path, dtype=dtype) as served:
        for text, got in answered(served.llm, texts(40, 171)):
            wanted = expected(served.model, text)
            plain = expected(served.model.to(half), text)
            served.model.double()
            assert (got - wanted).abs().max() <= 4 * (plain - wanted).abs().max()


def test_models_without_slopes_stay_vllms_own(tmp_path: Path):
    with Served.of("gpt2", tmp_path) as served:
        assert not any(layer._ours for layer in served.layers)
        served.assert_right(texts(20, 130))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sinks": torch.zeros(6)}, "learned attention sinks"),
        ({"kv_cache_dtype": "fp8"}, "fp8 keys"),
        ({"attn_type": "encoder_only"}, "'encoder_only'"),
        ({"kv_sharing_target_layer_name": "other"}, "of another"),
        ({}, None),
    ],
    ids=str,
)
def test_what_is_left_to_vllm(served: Served, options: dict[str, Any], reason: str | None):
    given = dict(
        num_heads=6, head_size=32, scale=0.2, num_kv_heads=6, alibi_slopes=[0.5] * 6, sliding_window=None,
        kv_cache_dtype="auto",
    )  # fmt: skip
    with set_current_vllm_config(served.llm.llm_engine.vllm_config):
        layer = AlibiLayer(**given | options)
    assert layer._ours is (reason is None)
    assert reason is None or reason in str(layer._why_not())
