"""An episode from its first token to its place in a group: `LiveEpisode` while it is played, then `to_group`.

The tokens keep their order; the loss mask is 1 on tokens of the policy:

    episode g:   obs_0  act_0  obs_1  act_1  ...         (the observation after the last turn is empty)
    stream g:    obs_0  act_0  obs_1  act_1  ...         concatenated
    loss mask:   0 0 0  1 1 1  0 0 0  1 1 1

The conversations of an agent's episode follow one another in its stream; `Group.starts` has where each begins.

A group keeps the data for training. Texts, turn rewards and environment infos stay with the episodes; with
`keep_turns` the group also keeps the policy's texts, for `replay_on_group`. If the environment defines its own pass
reward, it is in `extra["pass_reward"]`; if it pays no reward, `extra["is_unpaid"]` is True.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_srl.engine.protocol import Turn
from rllib_srl.rollout.conversations import Ask, Conversations
from rllib_srl.rollout.replies import Constructed, Reply
from rllib_srl.types import Group, Prompt, StopReason, with_starts

MIN_EPISODES = 2  # below that no episode can be compared with another
METRIC_PREFIXES = ("reward/", "agent/")  # prefixes of names in an info whose means are metrics
MAX_SHOWN_ANSWERS = 3  # maximum number of answers in `unpaid_answers`
MAX_SHOWN_CHARS = 160  # the last characters of each text in it


@dataclass(eq=False, slots=True)
class LiveEpisode:
    """Episode `index` of group `group_id`: what to play, then the text and tokens so far and the environment instance.

    Invariant: `stream` is the concatenation of the episode's observations and actions, including the
    tokens of `turn`, the turn whose environment step has not returned yet. Of an agent it is the conversation of its
    present call, without `turn`.
    """

    prompt: Prompt
    group_id: str
    index: int
    episode: SingleAgentEpisode = field(init=False)
    instance: Constructed | None = None
    stream: list[int] = field(default_factory=list)
    text: list[tuple[str, str]] = field(default_factory=list)  # (role, text): "system", "environment", "policy"
    turn: Turn | None = None
    num_turns: int = 0
    pass_reward: float | None = None
    is_unpaid: bool = False
    versions: tuple[int, int] = (0, 0)  # versions of the weights; set when the episode starts or is aborted before that
    place: int = 0  # among all episodes of its player
    deadline_s: float = math.inf  # as passed to `Player.add`
    deadline: float = math.inf  # the same as a time of the monotonic clock
    doing: str = "not started"
    conversations: Conversations | None = None  # conversations of an agent; `stream` is then that of its present call
    ask: Ask | None = None  # the agent's present call
    last_reply: Reply = field(default_factory=lambda: Reply(""))  # to the agent's last call
    num_refused: int = 0  # calls that got no turn
    refused_as: StopReason | None = None  # the limit for which a call was refused, if the policy caused it

    def __post_init__(self) -> None:
        self.episode = SingleAgentEpisode(id_=f"{self.group_id}/{self.index}")

    @property
    def where(self) -> str:
        """Environment, prompt, turn and current action, for error messages."""
        prompt = self.prompt
        return f"environment {prompt.env_id!r}, prompt {prompt.prompt_id!r}, turn {self.num_turns}, {self.doing}"

    def begin(self, ids: list[int], reply: Reply) -> None:
        """Add the first observation and its tokens; those of an agent are in its conversations."""
        if self.conversations is not None:
            self.pass_reward = reply.pass_reward
            return
        self.stream += ids
        if reply.system:
            self.text.append(("system", reply.system))
        self.text.append(("environment", reply.observation))
        self.pass_reward, self.is_unpaid = reply.pass_reward, reply.is_unpaid
        self.episode.add_env_reset(np.array(ids, np.int32), reply.info)

    def add_turn(self, turn: Turn) -> None:
        """Add a turn of the policy, token for token; it stays in `turn` until `answer`."""
        first = self.versions[0] if self.num_turns else turn.first_version
        self.versions = (first, turn.last_version)
        self.num_turns += 1
        self.turn = turn
        if self.conversations is not None:
            self.conversations.add(turn)
            return
        self.stream += turn.token_ids.tolist()
        self.text.append(("policy", turn.text))

    def answer(self, ids: list[int], reply: Reply) -> None:
        """Close `turn` with the environment's reply; `ids` are the tokens of its observation."""
        assert self.turn is not None
        self.stream += ids
        if reply.observation:
            self.text.append(("environment", reply.observation))
        self.episode.add_env_step(
            np.array(ids, np.int32),
            self.turn.token_ids,
            reply.reward,
            reply.info,
            extra_model_outputs={"action_logp": self.turn.logp},
        )
        self.turn = None

    def finish(self, reason: StopReason, error: str, is_terminated: bool) -> SingleAgentEpisode:
        """End the episode in any state; set its `custom_data` and return it."""
        starts: tuple[int, ...] = (0,)
        if self.conversations is not None:
            starts, self.text = self._write_conversations(), self.conversations.text
        elif self.turn is not None:  # a turn without an environment reply is kept, with reward 0
            self.answer([], Reply(""))
        if not self.episode.is_reset:
            self.episode.add_env_reset(np.empty(0, np.int32), {})
        self.episode.is_terminated, self.episode.is_truncated = is_terminated, not is_terminated
        self.episode.custom_data.update(
            prompt=self.prompt,
            group_id=self.group_id,
            index=self.index,
            stop_reason=reason,
            versions=self.versions,
            text=self.text,
            error=error,
            pass_reward=self.pass_reward,
            starts=starts,
            is_unpaid=self.is_unpaid,
        )
        return self.episode

    def _write_conversations(self) -> tuple[int, ...]:
        conversations, reply = self.conversations, self.last_reply
        assert conversations is not None
        conversations.answered("")  # a turn is recorded only if the agent is known to have got the answer
        counts = {
            "agent/num_calls": self.num_turns,
            "agent/num_conversations": conversations.num_conversations,
            "agent/num_rewritten": conversations.num_rewritten,
            "agent/num_refused": self.num_refused,
            "agent/num_unheard": conversations.num_unheard,
        }
        return conversations.write(self.episode, reply.reward, {**reply.info, **counts})


def valid_of(episodes: Iterable[SingleAgentEpisode]) -> list[SingleAgentEpisode]:
    """Return the episodes that infrastructure did not end, in order of their index."""
    valid = [episode for episode in episodes if not episode.custom_data["stop_reason"].is_infrastructure]
    return sorted(valid, key=lambda episode: episode.custom_data["index"])


def turns_of(episode: SingleAgentEpisode) -> list[str]:
    return [text for role, text in episode.custom_data["text"] if role == "policy"]


def to_group(
    prompt: Prompt,
    group_id: str,
    episodes: Sequence[SingleAgentEpisode],
    origin: str = "fresh",
    at_least: int = MIN_EPISODES,
    keep_turns: bool = False,
) -> Group | None:
    """Collect all episodes of one prompt, in order of their index; None if fewer than `at_least` are valid.

    Those ended by infrastructure are counted in `num_dropped` and omitted. With `keep_turns` `extra["turns"]` has the
    policy's texts, a list for each valid episode, and `extra["can_iterate"]` what the infos say of it.
    """
    valid = valid_of(episodes)
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
    data = episodes[0].custom_data
    marks: dict[str, Any] = {}
    if data.get("pass_reward") is not None:
        marks["pass_reward"] = data["pass_reward"]
    if data.get("is_unpaid"):
        marks["is_unpaid"] = True
    if keep_turns:
        marks["turns"] = [turns_of(episode) for episode in episodes]
        flags = [episode.get_infos(0).get("can_iterate") for episode in episodes]
        if all(isinstance(value, bool) for value in flags):
            marks["can_iterate"] = all(flags)
    return with_starts(marks, [episode.custom_data.get("starts", (0,)) for episode in episodes])


def answers_of(episodes: Iterable[SingleAgentEpisode]) -> tuple[str, ...]:
    """Return the policy's last turn in each valid episode of a prompt, in the order of `to_group`."""
    return tuple((turns_of(episode) or [""])[-1] for episode in valid_of(episodes))


def flatten(episode: SingleAgentEpisode) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return an episode's token ids (int32), loss mask (bool) and behaviour log-probs (float32, 0 off the mask)."""
    first, *observations = episode.get_observations()
    actions = episode.get_actions()
    parts = [first, *chain.from_iterable(zip(actions, observations, strict=True))]  # every second one is an action
    mask_T = np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])
    logp_T = np.zeros(len(mask_T), np.float32)
    if actions:
        logp_T[mask_T] = np.concatenate(episode.get_extra_model_outputs("action_logp"))
    return np.concatenate(parts), mask_T, logp_T


def transcript_of(episode: SingleAgentEpisode) -> dict[str, Any]:
    """Return a readable transcript of an episode; the driver adds advantage and iteration."""
    data = episode.custom_data
    return {
        "group_id": data["group_id"],
        "index": data["index"],
        "env_id": data["prompt"].env_id,
        "prompt_id": data["prompt"].prompt_id,
        "turns": [{"role": role, "text": text} for role, text in data["text"]],
        "reward": float(episode.get_return()),
        "stop_reason": data["stop_reason"].value,
        "version": int(data["versions"][0]),
    }


def is_unparsed(episode: SingleAgentEpisode) -> bool:
    """Return whether the last turn had no readable answer: stop reason UNPARSABLE, or an empty `parsed` in the info."""
    reason = episode.custom_data["stop_reason"]
    has_info = not reason.is_infrastructure and len(episode) > 0
    return reason is StopReason.UNPARSABLE or (has_info and episode.get_infos(-1).get("parsed") == "")


def reward_sums(episodes: Sequence[SingleAgentEpisode]) -> dict[str, tuple[float, int]]:
    """Return name -> (sum, number of episodes) of the values named "reward/..." or "agent/..." in infos of last steps.

    Environments that compute a reward from several functions report each one this way; agents report counts of calls.
    """
    sums: dict[str, tuple[float, int]] = {}
    for episode in episodes:
        is_lost = episode.custom_data["stop_reason"].is_infrastructure
        for name, value in ({} if is_lost or not len(episode) else episode.get_infos(-1)).items():
            if name.startswith(METRIC_PREFIXES) and isinstance(value, int | float):
                total, number = sums.get(name, (0.0, 0))
                sums[name] = (total + value, number + 1)
    return sums


def unpaid_answers(episodes: Sequence[SingleAgentEpisode]) -> list[dict[str, str]]:
    """Return the answer, the parsed answer and the expected answer of a few episodes; [] if any reward is above 0.

    Only for environments whose info has both `parsed` and `expected`: one episode per group, at most
    MAX_SHOWN_ANSWERS, each text cut to its last MAX_SHOWN_CHARS characters, to keep the result small.
    """
    valid = [episode for episode in episodes if not episode.custom_data["stop_reason"].is_infrastructure]
    if any(episode.get_return() > 0 for episode in valid):
        return []
    shown: dict[str, dict[str, str]] = {}
    for episode in valid:
        info = episode.get_infos(-1) if len(episode) else {}
        grading = {name: info.get(name) for name in ("parsed", "expected")}
        if len(shown) < MAX_SHOWN_ANSWERS and all(isinstance(text, str) for text in grading.values()):
            texts = {"answer": (turns_of(episode) or [""])[-1], **grading}
            shown.setdefault(
                episode.custom_data["group_id"], {name: str(text)[-MAX_SHOWN_CHARS:] for name, text in texts.items()}
            )
    return list(shown.values())
