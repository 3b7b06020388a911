"""A small random Llama with a byte-level tokenizer, and a learner on it."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rllib_srl.engine.canary import canary_sequences
from rllib_srl.engine.sync import WeightBundle, pack

CONTEXT_LENGTH = 128


@cache
def make_byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")


def save_random_llama(path: Path, *, seed: int = 0, tied: bool = True) -> Path:
    """Save a Llama of two layers, head size 32 and 2 key-value heads for 4, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_byte_tokenizer()
    config = LlamaConfig(
        vocab_size=288, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
        initializer_range=0.12,  # so that the policy is far from uniform, and every tensor matters
        tie_word_embeddings=tied, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def byte_ids(text: str) -> list[int]:
    return make_byte_tokenizer().encode(text)


def text_of(token: int) -> str:
    return make_byte_tokenizer().decode([token])


def moved(named: Iterable[tuple[str, torch.Tensor]], scale: float) -> dict[str, torch.Tensor]:
    """Return each tensor changed by +-`scale` of its entries at random, and a zero by `scale` * .02."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, tensor in named:
        sign = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        found[name] = torch.where(tensor == 0, sign * scale * 0.02, tensor.detach() * (1 + sign * scale))
    return found


class Learner:
    """What a learner does for the transfer: fp32 master weights, scored in the engine's dtype, packed."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        """Load the weights the engine starts with."""
        from transformers import AutoModelForCausalLM

        self.dtype = dtype
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).requires_grad_(False)
        self.sequences = canary_sequences(make_byte_tokenizer(), CONTEXT_LENGTH)

    def score(self, scale: float = 0.0, sequences: list[list[int]] | None = None) -> list[np.ndarray]:
        """Return log-probs of `sequences`, the canary's if None, one plain forward pass each."""
        weights = moved(self.model.named_parameters(), scale) if scale else {}
        scores = []
        for sequence in sequences or self.sequences:
            ids_1T = torch.tensor([sequence])
            with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bfloat16"):
                logits_TV = torch.func.functional_call(self.model, weights, (ids_1T,)).logits[0].float()
            scores.append(logits_TV[:-1].log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0].numpy())
        return scores

    def pack(self, version: int, scale: float = 0.0) -> WeightBundle:
        named = self.model.named_parameters()
        return pack(moved(named, scale).items() if scale else named, version, self.dtype)
