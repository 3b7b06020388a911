"""One episode while it is played: what was said so far, as text, as tokens and as RLlib's episode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_srl.engine.protocol import Turn
from rllib_srl.rollout.replies import Constructed, Reply
from rllib_srl.types import Prompt, StopReason


@dataclass(frozen=True)
class PlayRequest:
    """One episode to play: episode `index` of group `group_id`."""

    prompt: Prompt
    group_id: str
    index: int


class LiveEpisode:
    """An episode under way, and the environment instance it holds.

    Invariant: `stream` is the concatenation of the episode's observations and actions, with that
    of `turn`, the turn which the environment has not answered yet.
    """

    __slots__ = ("doing", "episode", "instance", "num_turns", "request", "stream", "text", "turn", "versions")

    def __init__(self, request: PlayRequest, version: int) -> None:
        self.request = request
        self.episode = SingleAgentEpisode(id_=f"{request.group_id}/{request.index}")
        self.instance: Constructed | None = None
        self.stream: list[int] = []
        self.text: list[tuple[str, str]] = []  # (role, what was said); the roles are "environment" and "policy"
        self.turn: Turn | None = None
        self.num_turns = 0
        self.versions = (version, version)
        self.doing = "not started"

    @property
    def where(self) -> str:
        """Say what the episode was doing, for error messages."""
        prompt = self.request.prompt
        return f"environment {prompt.env_id!r}, prompt {prompt.prompt_id!r}, turn {self.num_turns}, {self.doing}"

    def begin(self, ids: list[int], reply: Reply) -> None:
        """Take the first observation and its tokens."""
        self.stream += ids
        self.text.append(("environment", reply.observation))
        self.episode.add_env_reset(np.array(ids, np.int32), reply.info)

    def add_turn(self, turn: Turn) -> None:
        """Take what the policy wrote, token for token; it waits for the environment's answer."""
        first = self.versions[0] if self.num_turns else turn.first_version
        self.versions = (first, turn.last_version)
        self.num_turns += 1
        self.stream += turn.token_ids.tolist()
        self.text.append(("policy", turn.text))
        self.turn = turn

    def answer(self, ids: list[int], reply: Reply) -> None:
        """Close the waiting turn with the environment's answer, of which `ids` are the tokens that join the stream."""
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
        """Return the episode, done and described, whatever state it is in."""
        if self.turn is not None:  # written but never answered: kept, without a reward
            self.answer([], Reply(""))
        if not self.episode.is_reset:
            self.episode.add_env_reset(np.empty(0, np.int32), {})
        self.episode.is_terminated, self.episode.is_truncated = is_terminated, not is_terminated
        self.episode.custom_data.update(
            prompt=self.request.prompt,
            group_id=self.request.group_id,
            index=self.request.index,
            stop_reason=reason,
            versions=self.versions,
            text=self.text,
            error=error,
        )
        return self.episode


def fault_of(turn: Turn) -> str:
    """Return what makes a turn unusable, or nothing."""
    if turn.reason == "aborted":
        return "was aborted by the engine"
    if not 0 < len(turn.token_ids) == len(turn.logp):
        return f"has {len(turn.token_ids)} tokens and {len(turn.logp)} log-probs; expected as many of each, at least 1"
    if not (np.isfinite(turn.logp).all() and (turn.logp <= 1e-4).all()):
        return "has a log-prob that is not finite and <= 0"
    return ""
