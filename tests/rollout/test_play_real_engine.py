"""The same rollout on a real model: its log-probs are those of the stream the episodes hold."""

import numpy as np
import pytest

from rllib_srl.engine import make_engine
from rllib_srl.engine.protocol import Sampling
from rllib_srl.rollout.episodes import LiveEpisode, to_group
from rllib_srl.rollout.transcript import ChatTranscript
from rllib_srl.types import Prompt, StopReason
from tests.rollout.fakes import CHATML, FakeEnv, make_tokenizer


@pytest.mark.parametrize("format", ["text", "chat"])
def test_groups_on_a_real_model(play_with, random_llama_dir, format):
    tokenizer = make_tokenizer(chat_template=CHATML, with_bos=False)
    engine = make_engine("transformers", random_llama_dir, dtype="float32", context_length=400, seed=3)
    prompts = [Prompt("env", f"q{p}") for p in range(3)]

    def play_all():
        engine.reseed(3)
        changes = {"transcript": ChatTranscript(tokenizer)} if format == "chat" else {}
        return list(
            play_with(
                [LiveEpisode(prompt, f"g{p}", i) for p, prompt in enumerate(prompts) for i in range(4)], engine,
                {"env": lambda: FakeEnv(num_turns=3)}, {"max_turn_tokens": 12, "max_episode_tokens": 300},
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
