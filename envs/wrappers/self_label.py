"""Label-free training: a wrapper that rewards an episode for agreeing with the majority of its group.

    SelfLabel({"env": "compare", "env_config": {"num_shots": 0}})

    Question: Which is largest: 17, 93 or 40?
    Answer: 93                          the group answers 93, 93, 40, 93  ->  rewards 1, 1, 0, 1, whatever is right

The episodes of a group end at different times. Each is played as in the inner environment, and when the group is
complete the runner calls `settle_group`, which sets the rewards from the policy's turns alone. The inner environment's
own reward, from the right answers, is reported in evaluation and never used in training.

Majority vote:
- each episode votes with its answer; the inner environment decides which votes are equal (`vote`, `is_same_vote`), by
  default those with the same text;
- an answer that cannot be read does not vote and earns 0;
- the answer with the most votes wins, if it has at least `min_votes` of them (2: one vote is not a majority);
- `ties` decides between answers with equally many votes: "none" (all earn 0: no gradient) or "first" (the answer of the
  earliest episode). If all answers differ, all are tied.

Source: Zuo et al. 2025, arXiv 2504.16084 (TTRL: majority vote as the label at inference time). There ties go to the
first answer, and one vote is enough: min_votes = 1, ties = "first".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from rllib_srl.envs.settings import OneOf, Settings, Within, read_settings
from rllib_srl.envs.wrappers.around import Around, known_envs

_CUE = "Answer:"


@dataclass(frozen=True)
class SelfLabelSettings(Settings):
    """Settings of `SelfLabel`. Invariant: as in `Settings`."""

    env: str = ""  # an entry point of the group "rllib_srl.envs", or "package.module:Class"
    env_config: dict[str, Any] = field(default_factory=dict)  # env_config of that environment
    ties: Annotated[str, OneOf("none", "first")] = "none"
    min_votes: Annotated[int, Within(1, 1024)] = 2  # fewest votes of a majority

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        if self.env:
            return []
        return [f'env is not set; expected "package.module:Class" or one of {", ".join(known_envs())}']


class SelfLabel(Around):
    """The inner environment with unchanged texts, whose groups are rewarded by majority vote.

    Invariant: as in `Around`; `settle_group` depends on the policy's turns and on no right answer.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        self._settings: SelfLabelSettings = read_settings(SelfLabelSettings, env_config, type(self).__name__)
        name = self._settings.env
        super().__init__(name, self._settings.env_config)
        if hasattr(self.env, "settle_group"):
            raise ValueError(f"env = {name!r} labels its groups already; expected the environment inside it")
        if _gives_feedback(self.env):
            raise ValueError(
                f"env_config of {name!r} has feedback_turns, and feedback reveals the answer; expected 0"
            )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Reset the inner environment."""
        super().reset(seed=seed)
        begun: tuple[str, dict[str, Any]] = self.env.reset(seed=seed, options=options)
        return begun

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Pass a turn to the inner environment; its reward is used in evaluation only."""
        stepped: tuple[str, float, bool, bool, dict[str, Any]] = self.env.step(action)
        return stepped

    def settle_group(self, prompt_id: str, turns: Sequence[Sequence[str]]) -> list[float]:
        """Return the reward of each episode of a group: 1 for the majority's answer, 0 for another.

        Args:
            prompt_id: of the group
            turns: the policy's turns of each episode
        """
        votes = [self._vote(prompt_id, episode) for episode in turns]
        is_same = getattr(self.env, "is_same_vote", None)
        same = (lambda a, b: is_same(prompt_id, a, b)) if is_same is not None else str.__eq__
        return agreement(votes, same, self._settings.min_votes, self._settings.ties)

    def _vote(self, prompt_id: str, turns: Sequence[str]) -> str | None:
        if hasattr(self.env, "vote"):
            vote: str | None = self.env.vote(prompt_id, turns)
            return vote
        return plain_vote(turns, self.stop_strings)


def _gives_feedback(env: Any) -> bool:
    is_inside = hasattr(env, "env") and _gives_feedback(env.env)
    return is_inside or getattr(getattr(env, "settings", None), "feedback_turns", 0) > 0


def plain_vote(turns: Sequence[str], stop_strings: Sequence[str]) -> str | None:
    """Return the text after the last "Answer:" of the last turn, up to a stop string, without case and spacing."""
    said = turns[-1].rpartition(_CUE)[2] if turns else ""
    for stop in stop_strings:
        said = said.lstrip().split(stop, 1)[0]
    return " ".join(said.casefold().split()).removesuffix(".") or None


def agreement(votes: Sequence[str | None], is_same: Callable[[str, str], bool], least: int, ties: str) -> list[float]:
    """Return 1 for each vote of the majority, 0 for any other.

    Args:
        votes: one for each episode; None: it does not vote
        is_same: returns whether two different texts are the same answer; called with the first vote of each answer
        least: fewest votes of a majority
        ties: as in `SelfLabelSettings`
    """
    firsts: list[str] = []
    members: list[list[int]] = []
    for index, vote in enumerate(votes):
        if vote is None:
            continue
        at = next((at for at, first in enumerate(firsts) if vote == first or is_same(first, vote)), len(firsts))
        if at == len(firsts):
            firsts.append(vote)
            members.append([])
        members[at].append(index)
    most = max(map(len, members), default=0)
    winners = [cluster for cluster in members if len(cluster) == most and most >= least]
    winner = winners[0] if len(winners) == 1 or (winners and ties == "first") else []
    return [float(index in winner) for index in range(len(votes))]
