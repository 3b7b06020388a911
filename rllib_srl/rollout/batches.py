"""What a runner is asked to play, and what it returns: metadata of groups, counts, and a few texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Required, TypedDict

import numpy as np

from rllib_srl.types import GroupMeta, Prompt


class PlayOptions(TypedDict, total=False):
    """How prompts are played: arguments of `LLMEnvRunner.play_groups` that a caller of `SRL.play` may choose."""

    group_size: int  # G
    temperature: float  # as any other field of `Sampling`
    num_transcripts: int  # groups that are also returned as text
    as_groups: bool  # False for evaluation: one valid episode is enough, no rewards are settled, no group is returned
    with_answers: bool  # return the policy's last turns as text
    min_episodes: int  # minimum number of valid episodes of a group; one with fewer is dropped


class PlayArguments(PlayOptions, total=False):
    """The arguments of one call of `LLMEnvRunner.play_groups`."""

    prompts: Required[Mapping[str, Prompt]]  # by group id
    seed: Required[int | None]  # reseeds the engine's sampling generator; None leaves it unchanged
    revisits: Collection[str]  # ids of the groups whose prompts come from the memory


@dataclass(frozen=True)
class RunnerBatch:
    """The result of one `play_groups` call.

    Invariant: every prompt is either in `groups` or counted in `num_dropped_groups`.
    """

    version: int
    groups: list[GroupMeta]
    num_dropped_groups: int
    stop_reasons: dict[str, int]  # over all episodes, lost ones included
    num_turns: int
    transcripts: list[dict[str, Any]]
    errors: list[str]  # one line for each episode that infrastructure ended
    seconds: dict[str, float] = field(default_factory=dict)  # play_s, and its parts engine_s and environment_s
    metrics: Any = None
    answers: dict[str, tuple[str, ...]] = field(default_factory=dict)  # group id -> last turns, with `with_answers`
    num_unparsed: int = 0  # episodes without a readable answer in their last turn; see `episodes.is_unparsed`
    reward_sums: dict[str, tuple[float, int]] = field(default_factory=dict)  # see `episodes.reward_sums`
    unpaid: list[dict[str, str]] = field(default_factory=list)  # a few answers; see `episodes.unpaid_answers`


@dataclass(frozen=True)
class Slice:
    """The result of one `advance` call.

    Invariant: each batch has one group, or none if it was dropped; a group is in one slice only.
    """

    batches: dict[str, RunnerBatch]  # by group id
    seconds: dict[str, float]  # engine_s and environment_s
    num_unfinished: int  # groups


@dataclass(frozen=True)
class Loaded:
    """The result of loading weights: the engine's log-probs of the canary, and get_s, load_s, engine_canary_s."""

    logps: list[np.ndarray]
    seconds: dict[str, float]
