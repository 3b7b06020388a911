"""The G episodes of a prompt become one `Group`, and for export back again.

The tokens keep their order, and the mask says who wrote them:

    episode g:   obs_0  act_0  obs_1  act_1  ...         (the observation after the last turn is empty)
    stream g:    obs_0  act_0  obs_1  act_1  ...         laid end to end
    loss mask:   0 0 0  1 1 1  0 0 0  1 1 1

A group keeps what training needs: texts, turn rewards and environment infos stay with the episodes, unless
`keep_turns` asks for the policy's texts, from which new prompts may grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsFloat

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_srl.types import Group, Prompt, StopReason

_MIN_EPISODES = 2  # below that no episode can be compared with another
_TERMINAL = {StopReason.TERMINATED, StopReason.UNPARSABLE, StopReason.TOOL_TIMEOUT}


def to_group(
    prompt: Prompt,
    group_id: str,
    episodes: Iterable[SingleAgentEpisode],
    origin: str = "fresh",
    at_least: int = _MIN_EPISODES,
    keep_turns: bool = False,
) -> Group | None:
    """Collect the episodes of one prompt, in order of their index.

    Args:
        prompt: what they are episodes of.
        group_id: the id they were played under.
        episodes: all of them, in any order, those included that infrastructure ended; these are counted in
            `num_dropped` and left out.
        origin: "fresh" or "revisit".
        at_least: valid episodes that make a group; 1 in evaluation, where nothing is compared.
        keep_turns: put what the policy wrote into `extra["turns"]`, a list of texts for each valid episode, and
            whether the world can iterate on it into `extra["can_iterate"]` where the world says so.

    Returns:
        The group, or None if fewer than `at_least` valid episodes remain.

    Raises:
        ValueError: if an episode is of another group or prompt.
    """
    episodes = sorted(episodes, key=lambda episode: episode.custom_data["index"])
    for episode in episodes:
        data = episode.custom_data
        if data["group_id"] != group_id or data["prompt"] != prompt:
            raise ValueError(
                f"episode {episode.id_} is of group {data['group_id']!r}, prompt {data['prompt'].prompt_id!r}; "
                f"expected group {group_id!r}, prompt {prompt.prompt_id!r}"
            )
    valid = [episode for episode in episodes if not episode.custom_data["stop_reason"].is_infrastructure]
    if len(valid) < at_least:
        return None
    ids, mask, logp, lengths = [], [], [], []
    for episode in valid:
        ids_T, mask_T, logp_T = flatten(episode)
        ids.append(ids_T)
        mask.append(mask_T)
        logp.append(logp_T)
        lengths.append(len(ids_T))
    group = Group(
        group_id=group_id,
        prompt=prompt,
        token_ids_N=np.concatenate(ids),
        loss_mask_N=np.concatenate(mask),
        behaviour_logp_N=np.concatenate(logp),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        rewards_G=np.array([episode.get_return() for episode in valid], np.float32),
        versions_G2=np.array([episode.custom_data["versions"] for episode in valid], np.int64),
        stop_reasons=tuple(episode.custom_data["stop_reason"] for episode in valid),
        num_dropped=len(episodes) - len(valid),
        origin=origin,
        extra=_turns_of(valid) if keep_turns else {},
    )
    group.check_valid()
    return group


def _turns_of(episodes: list[SingleAgentEpisode]) -> dict[str, Any]:
    turns = [[text for role, text in episode.custom_data["text"] if role == "policy"] for episode in episodes]
    said = [episode.get_infos(0).get("can_iterate") for episode in episodes]
    is_said = all(isinstance(value, bool) for value in said)
    return {"turns": turns, **({"can_iterate": all(said)} if is_said else {})}


def flatten(episode: SingleAgentEpisode) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return an episode's token ids (int32), loss mask (bool) and behaviour log-probs (float32, 0 off the mask)."""
    observations, actions = episode.get_observations(), episode.get_actions()
    logps = episode.get_extra_model_outputs("action_logp") if actions else []
    ids, mask, logp = [observations[0]], [np.zeros(len(observations[0]), bool)], [_zeros(observations[0])]
    for action, action_logp, observation in zip(actions, logps, observations[1:], strict=True):
        ids += [action, observation]
        mask += [np.ones(len(action), bool), np.zeros(len(observation), bool)]
        logp += [action_logp, _zeros(observation)]
    return np.concatenate(ids), np.concatenate(mask), np.concatenate(logp)


def to_episodes(group: Group) -> list[SingleAgentEpisode]:
    """Turn a group back into episodes, for export: `to_group` of them is the same group.

    What a group does not keep cannot come back: the reward stands at the last turn, texts are
    empty, and two turns with nothing between them are one.
    """
    return [_to_episode(group, g) for g in range(group.size)]


def _to_episode(group: Group, g: int) -> SingleAgentEpisode:
    span = slice(group.offsets[g], group.offsets[g + 1])
    mask_T = group.loss_mask_N[span]
    cuts = np.flatnonzero(np.diff(mask_T)) + 1  # every stream begins off the mask, so pieces alternate
    ids = np.split(group.token_ids_N[span], cuts)
    observations, actions = ids[0::2], ids[1::2]
    if len(observations) == len(actions):
        observations.append(np.empty(0, np.int32))
    rewards: list[SupportsFloat] = [0.0] * len(actions)
    if rewards:
        rewards[-1] = float(group.rewards_G[g])
    is_terminated = group.stop_reasons[g] in _TERMINAL
    episode = SingleAgentEpisode(
        id_=f"{group.group_id}/{g}",
        observations=observations,
        actions=actions,
        rewards=rewards,
        extra_model_outputs={"action_logp": np.split(group.behaviour_logp_N[span], cuts)[1::2]},
        terminated=is_terminated,
        truncated=not is_terminated,
        len_lookback_buffer=0,
    )
    episode.custom_data.update(
        prompt=group.prompt,
        group_id=group.group_id,
        index=g,
        stop_reason=group.stop_reasons[g],
        versions=tuple(int(version) for version in group.versions_G2[g]),
        text=[],
        error="",
    )
    return episode


def _zeros(ids: np.ndarray) -> np.ndarray:
    return np.zeros(len(ids), np.float32)
