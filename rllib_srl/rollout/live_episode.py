"""An episode while it is played: what to play, the text and tokens so far, and the environment's instance."""

from __future__ import annotations

import math

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_srl.engine.protocol import Turn
from rllib_srl.rollout.conversations import Ask, Conversations
from rllib_srl.rollout.replies import Constructed, Reply
from rllib_srl.types import Prompt, StopReason

NOT_STARTED = "not started"


class LiveEpisode:
    """Episode `index` of group `group_id`: what to play, then the text and tokens so far and the environment instance.

    Invariant: `stream` is the concatenation of the episode's observations and actions, including the
    tokens of `turn`, the turn whose environment step has not returned yet. Of an agent it is the conversation of its
    present call, without `turn`.
    """

    __slots__ = (
        "ask",
        "conversations",
        "deadline",
        "deadline_s",
        "doing",
        "episode",
        "group_id",
        "index",
        "instance",
        "is_unpaid",
        "last_reply",
        "num_refused",
        "num_turns",
        "pass_reward",
        "place",
        "prompt",
        "refused_as",
        "stream",
        "text",
        "turn",
        "versions",
    )

    def __init__(self, prompt: Prompt, group_id: str, index: int) -> None:
        self.prompt = prompt
        self.group_id = group_id
        self.index = index
        self.episode = SingleAgentEpisode(id_=f"{group_id}/{index}")
        self.instance: Constructed | None = None
        self.stream: list[int] = []
        self.text: list[tuple[str, str]] = []  # (role, text); roles: "system", "environment", "policy"
        self.turn: Turn | None = None
        self.num_turns = 0
        self.pass_reward: float | None = None
        self.is_unpaid = False
        self.versions = (0, 0)  # of the engine's weights; set when the episode starts or is aborted before that
        self.place = 0  # among all episodes of its player
        self.deadline_s = self.deadline = math.inf  # given, and as a time of the monotonic clock
        self.doing = NOT_STARTED
        self.conversations: Conversations | None = None  # of an agent; `stream` is then that of its present call
        self.ask: Ask | None = None  # the agent's present call
        self.last_reply = Reply("")  # to the agent's last call
        self.num_refused = 0  # calls that got no turn
        self.refused_as: StopReason | None = None  # the limit for which a call was refused, if the policy caused it

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
        said, reply = self.conversations, self.last_reply
        assert said is not None
        said.answered("")  # a turn whose answer the agent is not known to have got is not recorded
        counts = {
            "agent/num_calls": self.num_turns,
            "agent/num_conversations": said.num_conversations,
            "agent/num_rewritten": said.num_rewritten,
            "agent/num_refused": self.num_refused,
            "agent/num_unheard": said.num_unheard,
        }
        return said.write(self.episode, reply.reward, {**reply.info, **counts})
