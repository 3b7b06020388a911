"""Episodes to groups and back: ids, masks, log-probs and offsets by hand, and as laws over random episodes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_srl.rollout.episodes import to_group
from rllib_srl.types import Prompt, StopReason
from tests.rollout.fakes import FakeEnv, ScriptedEngine, unplayed

PROMPT = Prompt("env", "q")


def episode_of(index: int, turns, reason=StopReason.TERMINATED, prompt=PROMPT, group_id="g", versions=(1, 2)):
    """Return an episode of `turns` = [(prompt-side ids, sampled ids, log-probs, reward), ...]."""
    episode = SingleAgentEpisode(id_=f"{group_id}/{index}")
    episode.add_env_reset(np.array(turns[0][0] if turns else [], np.int32), {})
    for (_, action, logp, reward), following in zip(turns, [*turns[1:], ([],)]):
        episode.add_env_step(
            np.array(following[0], np.int32),
            np.array(action, np.int32),
            reward,
            extra_model_outputs={"action_logp": np.array(logp, np.float32)},
        )
    episode.is_terminated = True
    episode.custom_data.update(
        prompt=prompt, group_id=group_id, index=index, stop_reason=reason, versions=versions, text=[], error=""
    )
    return episode


def test_a_group_by_hand():
    tool_user = episode_of(0, [([5, 6], [7], [-0.5], 0.25), ([8, 9], [10, 11], [-1.0, -0.25], 0.5)], versions=(3, 4))
    short = episode_of(2, [([5, 6], [1], [-2.0], 0.0)], StopReason.OUT_OF_TOKENS)
    dropped = episode_of(1, [([5, 6], [1], [-2.0], 0.0)], StopReason.ENV_TIMEOUT)
    group = to_group(PROMPT, "g", [short, dropped, tool_user], origin="revisit")
    assert group.token_ids_N.tolist() == [5, 6, 7, 8, 9, 10, 11, 5, 6, 1]
    assert group.loss_mask_N.tolist() == [False, False, True, False, False, True, True, False, False, True]
    assert group.behaviour_logp_N.tolist() == [0, 0, -0.5, 0, 0, -1.0, -0.25, 0, 0, -2.0]
    assert group.offsets.tolist() == [0, 7, 10]
    assert group.rewards_G.tolist() == [0.75, 0.0]
    assert group.versions_G2.tolist() == [[3, 4], [1, 2]]
    assert group.stop_reasons == (StopReason.TERMINATED, StopReason.OUT_OF_TOKENS)
    assert (group.num_dropped, group.origin, group.size) == (1, "revisit", 2)
    assert group.num_loss_tokens_G().tolist() == [3, 1]
    dtypes = [a.dtype for a in (group.token_ids_N, group.loss_mask_N, group.behaviour_logp_N, group.offsets)]
    assert dtypes == [np.int32, bool, np.float32, np.int64]


@pytest.mark.parametrize("reason", [reason for reason in StopReason if reason.is_infrastructure])
def test_fewer_than_two_valid_episodes_are_no_group(reason):
    valid = episode_of(0, [([5], [1], [-2.0], 1.0)])
    failed = [episode_of(i, [], reason) for i in (1, 2, 3)]
    assert to_group(PROMPT, "g", [valid, *failed]) is None
    assert to_group(PROMPT, "g", []) is None
    assert to_group(PROMPT, "g", [valid, episode_of(4, [([5], [2], [-1.0], 0.0)]), *failed]).num_dropped == 3


def test_turns_are_kept_on_request(play_with, tokenizer):
    def ids_of(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    texts = [["x one\n", "x two\n"], ["y é\n", "y\n"], ["lost\n"]]
    engine = ScriptedEngine(tokenizer, lambda name, ids: ids_of(texts[int(name.split("/")[1])][int(name[-1])]))
    for can_iterate in (None, True, False):
        kind = type("Kind", (FakeEnv,), {} if can_iterate is None else {"can_iterate": can_iterate})
        engine.submitted.clear()
        live = unplayed("q", "q", "crash-step")
        episodes = list(play_with(live, engine, {"env": lambda kind=kind: kind(num_turns=2)}))
        for episode in episodes:
            episode.custom_data["prompt"] = live[0].prompt
        group = to_group(live[0].prompt, "g", episodes, keep_turns=True)
        said = {} if can_iterate is None else {"can_iterate": can_iterate}
        assert group.extra == {"turns": texts[:2], **said}  # of the valid episodes only
        assert to_group(live[0].prompt, "g", episodes).extra == {}


ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
turn = st.tuples(ids, ids, st.integers(-8, 8))
plays = st.lists(st.tuples(st.lists(turn, min_size=1, max_size=4), st.sampled_from(StopReason)), min_size=1, max_size=5)


@settings(max_examples=100)
@given(plays)
def test_streams_masks_and_counts_agree_with_the_episodes(plays):
    episodes = [
        episode_of(i, [(obs, act, [-(t % 1000) / 512 for t in act], reward / 8) for obs, act, reward in turns], reason)
        for i, (turns, reason) in enumerate(plays)
    ]
    valid = [e for e in episodes if not e.custom_data["stop_reason"].is_infrastructure]
    group = to_group(PROMPT, "g", episodes[::-1])
    if len(valid) < 2:
        assert group is None
        return
    group.check_valid()
    assert group.num_dropped == len(episodes) - len(valid)
    for g, episode in enumerate(valid):
        pieces = [t for o, a in zip(episode.get_observations(), episode.get_actions()) for t in (*o, *a)]
        assert group.stream(g).tolist() == pieces
        mask = group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]]
        assert group.stream(g)[mask].tolist() == [t for action in episode.get_actions() for t in action]
        logp = group.behaviour_logp_N[group.offsets[g] : group.offsets[g + 1]][mask]
        assert logp.tolist() == [p for turn in episode.get_extra_model_outputs("action_logp") for p in turn]
    num_written = [sum(map(len, episode.get_actions())) for episode in valid]
    assert group.num_loss_tokens_G().tolist() == num_written
    assert group.loss_mask_N.sum() == sum(num_written)
