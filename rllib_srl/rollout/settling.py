"""Rewards that are known only when a group is complete: the world is asked once all its episodes have ended.

    play -> G episodes of a prompt -> world.settle_group(prompt_id, turns) -> G rewards, in place of the turns' own

`settle_group` is an optional method of a world. `turns` holds, for each valid episode of one group, the texts that the
policy wrote, in order; what it returns is the reward of each whole episode, and stands at its last turn. Evaluation
does not settle: there a world's own rewards count.

A world that fails here, or is late, ends the episodes of that group as if it had crashed while it was played.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_srl.rollout.calls import EnvCalls, FinishedCall
from rllib_srl.rollout.replies import BadReplyError, Constructed, attribute, construct
from rllib_srl.types import StopReason


def settle(
    episodes: Sequence[SingleAgentEpisode],
    *,
    worlds: Mapping[str, Callable[[], Any]],
    calls: EnvCalls,
    deadline_s: float,
) -> None:
    """Give the episodes of every complete group the rewards that its world settles; other worlds are left alone.

    Args:
        episodes: of whole groups, all ended, in any order; changed in place.
        worlds: environment id -> a function that makes an instance.
        calls: the threads environments run in; no call may be open.
        deadline_s: seconds from now after which the groups that are left end as ENV_TIMEOUT.
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
        settled = _answer(calls, end, settled_rewards, instance.env, prompt_id, [_turns_of(one) for one in episodes])
        if not settled.error:
            for episode, reward in zip(episodes, settled.value, strict=True):
                _pay(episode, reward)
            continue
        _fail(episodes, settled)
        if not settled.timed_out:  # a hung thread may be inside its instance for ever
            calls.discard(instance)
        instance = None
    if instance is not None:
        calls.pool.put(env_id, instance)


def settled_rewards(env: Any, prompt_id: str, turns: Sequence[Sequence[str]]) -> list[float]:
    """Return a world's rewards for the episodes of one group.

    Raises:
        BadReplyError: they are not one finite number for each episode.
    """
    rewards = np.asarray(attribute(env, "settle_group", None)(prompt_id, [list(one) for one in turns]), np.float64)
    if rewards.shape != (len(turns),) or not np.isfinite(rewards).all():
        raise BadReplyError(
            f"settle_group returned rewards of shape {rewards.shape}; expected {len(turns)} finite numbers, one for "
            "each episode"
        )
    return rewards.tolist()


def _answer(calls: EnvCalls, end: float, function: Callable[..., Any], *args: Any) -> FinishedCall:
    """Run one call to its end, or until `end`."""
    call_id = object()
    calls.submit(call_id, function, *args)
    while (left := end - time.monotonic()) > 0:
        for finished in calls.poll(left):
            if finished.call_id is call_id:
                return finished
    calls.abandon([call_id])
    return FinishedCall(call_id, error="the runner's time was up before it returned", timed_out=True)


def _turns_of(episode: SingleAgentEpisode) -> list[str]:
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
