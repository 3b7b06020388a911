"""Collect the G episodes of a prompt in a `Group`, convert it back for export, and settle group-level rewards.

The tokens keep their order; the loss mask is 1 on tokens of the policy:

    episode g:   obs_0  act_0  obs_1  act_1  ...         (the observation after the last turn is empty)
    stream g:    obs_0  act_0  obs_1  act_1  ...         concatenated
    loss mask:   0 0 0  1 1 1  0 0 0  1 1 1

The conversations of an agent's episode follow one another in its stream; `Group.starts` has where each begins.

A group keeps the data for training. Texts, turn rewards and environment infos stay with the episodes; with
`keep_turns` the group also keeps the policy's texts, for `replay_on_group`. If the environment defines its own pass
reward, it is in `extra["pass_reward"]`; if it pays no reward, `extra["is_unpaid"]` is True.

Group-level rewards depend on all episodes of a group and are computed once all have ended (`settle`):

    play -> G episodes of a prompt -> env.settle_group(prompt_id, turns) -> G rewards, which replace those of the turns

`settle_group` is an optional method of an environment. `turns` holds, for each valid episode of one group, the
policy's texts in order. It returns the reward of each whole episode, which is assigned to its last turn. Evaluation
does not settle: it uses the environment's own rewards.

If `settle_group` fails or times out, the episodes of the group end as if the environment had failed during play.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsFloat

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_srl.rollout.env_calls import EnvCalls, FinishedCall
from rllib_srl.rollout.replies import BadReplyError, Constructed, attribute, construct
from rllib_srl.types import Group, Prompt, StopReason, with_starts

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
        prompt: the prompt of the episodes.
        group_id: the group id of the episodes.
        episodes: all episodes of the group, in any order; those ended by infrastructure are counted in
            `num_dropped` and omitted.
        origin: "fresh" or "revisit".
        at_least: minimum number of valid episodes; 1 in evaluation, which computes no advantages.
        keep_turns: store the policy's texts in `extra["turns"]`, a list for each valid episode, and the
            environment's `can_iterate`, if its infos have it, in `extra["can_iterate"]`.

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
                f"episode {episode.id_} has group {data['group_id']!r}, prompt {data['prompt'].prompt_id!r}; "
                f"expected group {group_id!r}, prompt {prompt.prompt_id!r}"
            )
    valid = [episode for episode in episodes if not episode.custom_data["stop_reason"].is_infrastructure]
    if len(valid) < at_least:
        return None
    ids, mask, logp = zip(*(flatten(episode) for episode in valid), strict=True)
    lengths = [len(ids_T) for ids_T in ids]
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
        extra=_extra_of(valid, keep_turns),
    )
    group.check_valid()
    return group


def _extra_of(episodes: list[SingleAgentEpisode], keep_turns: bool) -> dict[str, Any]:
    marks = {**_marks_of(episodes), **(_turns_of(episodes) if keep_turns else {})}
    starts_G = [episode.custom_data.get("starts", (0,)) for episode in episodes]
    return with_starts(marks, starts_G)


def _marks_of(episodes: list[SingleAgentEpisode]) -> dict[str, Any]:
    data = episodes[0].custom_data
    mark = {} if data.get("pass_reward") is None else {"pass_reward": data["pass_reward"]}
    return {**mark, **({"is_unpaid": True} if data.get("is_unpaid") else {})}


def _turns_of(episodes: list[SingleAgentEpisode]) -> dict[str, Any]:
    turns = [[text for role, text in episode.custom_data["text"] if role == "policy"] for episode in episodes]
    said = [episode.get_infos(0).get("can_iterate") for episode in episodes]
    is_said = all(isinstance(value, bool) for value in said)
    return {"turns": turns, **({"can_iterate": all(said)} if is_said else {})}


def answers_of(episodes: Iterable[SingleAgentEpisode]) -> tuple[str, ...]:
    """Return the policy's last turn in each valid episode of a prompt, in the order of `to_group`."""
    episodes = sorted(episodes, key=lambda episode: episode.custom_data["index"])
    valid = [episode for episode in episodes if not episode.custom_data["stop_reason"].is_infrastructure]
    return tuple(turns[-1] if turns else "" for turns in _turns_of(valid)["turns"])


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
    """Convert a group back into episodes, for export: `to_group` of them is the same group.

    Data that a group does not keep is lost: the whole reward is at the last turn, texts are
    empty, and two turns without an observation between them are one.
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
        pass_reward=group.pass_reward,
        starts=group.starts(g),
        is_unpaid=group.is_unpaid,
    )
    return episode


def _zeros(ids: np.ndarray) -> np.ndarray:
    return np.zeros(len(ids), np.float32)


def settle(
    episodes: Sequence[SingleAgentEpisode],
    *,
    worlds: Mapping[str, Callable[[], Any]],
    calls: EnvCalls,
    deadline_s: float,
) -> None:
    """Replace the rewards of every group whose environment has `settle_group`; leave the others unchanged.

    Args:
        episodes: of whole groups, all ended, in any order; changed in place.
        worlds: environment id -> a function that makes an instance.
        calls: the threads environments run in; no call may be open.
        deadline_s: seconds from now after which the remaining groups end as ENV_TIMEOUT.
    """
    end = time.monotonic() + deadline_s
    by_world: dict[str, dict[str, list[SingleAgentEpisode]]] = {}
    for episode in sorted(episodes, key=lambda episode: episode.custom_data["index"]):
        if not episode.custom_data["stop_reason"].is_infrastructure:
            env_id = episode.custom_data["prompt"].env_id
            by_world.setdefault(env_id, {}).setdefault(episode.custom_data["group_id"], []).append(episode)
    for env_id, groups in by_world.items():
        _settle_world(env_id, worlds[env_id], groups, calls, end)


def _settle_world(
    env_id: str,
    creator: Callable[[], Any],
    groups: Mapping[str, list[SingleAgentEpisode]],
    calls: EnvCalls,
    end: float,
) -> None:
    instance: Constructed | None = None
    for episodes in groups.values():
        if instance is None:
            instance = calls.pool.take(env_id, creator)
        if instance is None:
            made = _answer(calls, end, construct, creator)
            if made.error:
                _fail(episodes, made)
                continue
            instance = made.value
        assert instance is not None
        if attribute(instance.env, "settle_group", None) is None:
            break
        prompt_id = episodes[0].custom_data["prompt"].prompt_id
        texts = [_policy_texts(one) for one in episodes]
        settled = _answer(calls, end, settled_rewards, instance.env, prompt_id, texts)
        if not settled.error:
            for episode, reward in zip(episodes, settled.value, strict=True):
                _pay(episode, reward)
            continue
        _fail(episodes, settled)
        if not settled.timed_out:  # after a timeout a hung thread may still be executing in the instance
            calls.discard(instance)
        instance = None
    if instance is not None:
        calls.pool.put(env_id, instance)


def settled_rewards(env: Any, prompt_id: str, turns: Sequence[Sequence[str]]) -> list[float]:
    """Return the environment's group-level rewards, one for each episode of the group.

    Raises:
        BadReplyError: they are not one finite number per episode.
    """
    rewards = np.asarray(attribute(env, "settle_group", None)(prompt_id, [list(one) for one in turns]), np.float64)
    if rewards.shape != (len(turns),) or not np.isfinite(rewards).all():
        raise BadReplyError(
            f"settle_group returned rewards of shape {rewards.shape}; expected {len(turns)} finite numbers, one for "
            "each episode"
        )
    return [float(reward) for reward in rewards]


def _answer(calls: EnvCalls, end: float, function: Callable[..., Any], *args: Any) -> FinishedCall:
    """Run one call until it ends or until the time `end`."""
    call_id = object()
    calls.submit(call_id, function, *args)
    while (left := end - time.monotonic()) > 0:
        for finished in calls.poll(left):
            if finished.call_id is call_id:
                return finished
    calls.abandon([call_id])
    return FinishedCall(call_id, error="did not return before the runner's deadline", timed_out=True)


def _policy_texts(episode: SingleAgentEpisode) -> list[str]:
    return [text for role, text in episode.custom_data["text"] if role == "policy"]


def _pay(episode: SingleAgentEpisode, reward: float) -> None:
    num_turns = len(episode)
    if num_turns:
        episode.set_rewards(new_data=[0.0] * (num_turns - 1) + [reward], at_indices=slice(0, num_turns))


def _fail(episodes: Sequence[SingleAgentEpisode], call: FinishedCall) -> None:
    reason = StopReason.ENV_TIMEOUT if call.timed_out else StopReason.ENV_CRASHED
    for episode in episodes:
        prompt = episode.custom_data["prompt"]
        where = f"environment {prompt.env_id!r}, prompt {prompt.prompt_id!r}, settle_group"
        episode.custom_data.update(stop_reason=reason, error=f"{where}: {call.error}")
