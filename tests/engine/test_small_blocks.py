"""Blocks of 16 tokens on a CPU: which engines have them, and what the answers of a group share."""

import pytest
import torch

from rllib_srl.engine.protocol import Sampling
from rllib_srl.engine.vllm_engine import _cpu_block

PROMPT_TOKENS = 60


@pytest.mark.engine
@pytest.mark.parametrize(("dtype", "tensor_parallel_size", "has_amx", "block"), [
    ("float32", 2, False, 32), ("bfloat16", 1, True, 32),  # processes of vLLM, and kernels for AMX
    ("float32", 1, True, 16), ("bfloat16", 1, False, 16),
])  # fmt: skip
def test_which_engines_have_blocks_of_16(monkeypatch, dtype, tensor_parallel_size, has_amx, block):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert _cpu_block(dtype, tensor_parallel_size) == block


@pytest.mark.engine
@pytest.mark.slow
def test_the_answers_of_a_group_share_whole_blocks_of_16(start_engine):
    engine = start_engine("vllm", "float32")
    config = engine._llm.vllm_config.cache_config
    assert config.block_size == 16
    prompt = [3 + index % 20 for index in range(PROMPT_TOKENS)]
    cached = []
    engine.generate([prompt], Sampling(max_tokens=2, temperature=0.0))
    step = engine._llm.step

    def stepped():
        outputs = step()
        cached.extend(one.num_cached_tokens for one in outputs if one.finished)
        return outputs

    engine._llm.step = stepped
    try:
        engine.generate([prompt] * 3, Sampling(max_tokens=2, temperature=1.0))
    finally:
        engine._llm.step = step
    assert cached == [48, 48, 48]  # three blocks; one with blocks of 32
