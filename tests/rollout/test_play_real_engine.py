"""The same rollout on a real model: its log-probs are those of the stream the episodes hold."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.engine.protocol import Sampling
from rllib_srl.rollout import ChatTranscript, LiveEpisode, to_group
from rllib_srl.types import Prompt, StopReason
from tests.rollout.fakes import CHATML, World, make_tokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Return a random Llama of two layers with a byte-level chat tokeniser."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("llama")
    tokenizer = make_tokenizer(chat_template=CHATML, with_bos=False)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.1, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("format", ["text", "chat"])
def test_groups_on_a_real_model(play_with, model_dir, format):
    from rllib_srl.engine.transformers_engine import TransformersEngine

    tokenizer = make_tokenizer(chat_template=CHATML, with_bos=False)
    engine = TransformersEngine(model_dir, context_length=400, seed=3)
    prompts = [Prompt("world", f"q{p}") for p in range(3)]

    def play_all():
        engine.reseed(3)
        changes = {"transcript": ChatTranscript(tokenizer)} if format == "chat" else {}
        return list(
            play_with(
                [LiveEpisode(prompt, f"g{p}", i) for p, prompt in enumerate(prompts) for i in range(4)], engine,
                {"world": lambda: World(num_turns=3)}, {"max_turn_tokens": 12, "max_episode_tokens": 300},
                sampling=Sampling(max_tokens=1, temperature=1.0), **changes,
            )
        )  # fmt: skip

    episodes = play_all()
    assert len(episodes) == 12
    assert {e.custom_data["stop_reason"] for e in episodes} <= {StopReason.TERMINATED, StopReason.OUT_OF_TOKENS}
    groups = [
        to_group(prompt, f"g{p}", [e for e in episodes if e.custom_data["group_id"] == f"g{p}"])
        for p, prompt in enumerate(prompts)
    ]
    for group in groups:
        assert group.size == 4
        for g, logp in enumerate(engine.score([group.stream(g).tolist() for g in range(4)])):
            span = slice(group.offsets[g], group.offsets[g + 1])
            mask = group.loss_mask_N[span][1:]
            np.testing.assert_allclose(group.behaviour_logp_N[span][1:][mask], logp[mask], atol=1e-4)
    again = {e.id_: e for e in play_all()}
    for episode in episodes:  # each request draws from its own generator: the order of completion does not matter
        assert [a.tolist() for a in again[episode.id_].get_actions()] == [a.tolist() for a in episode.get_actions()]
