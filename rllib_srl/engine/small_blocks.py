"""vLLM's CPU attention with blocks of 16 tokens instead of 32.

The requests of a group share whole blocks of their prompt, and read the rest of it again: of 125 tokens 29 with
blocks of 32, 13 with blocks of 16. At the quick-start's lengths a rollout takes 1/1.6 of the time, and long turns or
long prompts take as long as before (docs/LOG.md). vLLM has the kernels (`vec16`, and its platform accepts the
size), but its backend lists multiples of 32 only. Kernels for AMX need blocks of 32 and are left alone: without them
the quick-start's lengths gain less (1.34 times as fast) and long prompts and turns lose (.77 to .91 times).

Importing this file imports vLLM.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

BLOCK = 16


@register_backend(AttentionBackendEnum.CPU_ATTN)
class SmallBlocks(CPUAttentionBackend):
    """The same backend with one more size of blocks."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return which sizes the kernels take."""
        return [MultipleOf(BLOCK)]
