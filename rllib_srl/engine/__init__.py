"""Text-generation engines and the verified transfer of weights from the learner to them.

Usage, from start to the first weight update:

    engine = make_engine("vllm", model_dir, context_length=1024)
    engine.generate(prompts, Sampling(max_tokens=64))
    engine.load_weights(pack(model.named_parameters(), version=1, dtype="float32"))
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllib_srl.engine.protocol import Engine

ENGINE_KINDS = ("vllm", "transformers")


def import_engine(kind: str, dtype: str = "float32", num_threads: int | None = None, **_: Any) -> None:
    """Import what an engine needs, which takes seconds for vLLM, before its model is available.

    Raises:
        EngineError: vLLM is not installed.
    """
    if kind == "vllm":
        from rllib_srl.engine.vllm_engine import import_vllm

        import_vllm(dtype, num_threads)


def make_engine(kind: str, model_dir: str | Path, **settings: Any) -> Engine:
    """Build an engine.

    Args:
        kind: "vllm" or "transformers".
        model_dir: a local Hugging Face directory with weights and tokenizer.
        settings: `context_length`, `dtype`, `seed`, `max_num_seqs`, and other keyword arguments of the engine class.

    Raises:
        ValueError: if `kind`, the directory or a setting is invalid.
        EngineError: if vLLM is not installed or cannot start.
    """
    if kind == "vllm":
        from rllib_srl.engine.vllm_engine import VLLMEngine

        return VLLMEngine(model_dir, **settings)
    if kind == "transformers":
        from rllib_srl.engine.transformers_engine import TransformersEngine

        return TransformersEngine(model_dir, **settings)
    raise ValueError(f"engine = {kind!r}; expected one of {', '.join(ENGINE_KINDS)}")
