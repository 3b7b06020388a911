"""What a runner is asked to play, and what it returns: metadata of groups, counts, and a few texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Required, TypedDict

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_srl.types import GroupMeta, Prompt, StopReason

METRIC_PREFIXES = ("reward/", "agent/")  # of names in an info whose means are metrics
MAX_SHOWN_ANSWERS = 3  # maximum number of answers in `unpaid_answers`
MAX_SHOWN_CHARS = 160  # the last characters of each text in it


class PlayOptions(TypedDict, total=False):
    """How prompts are played: arguments of `LLMEnvRunner.play_groups` that a caller of `SRL.play` may choose."""

    group_size: int
    temperature: float
    num_transcripts: int
    as_groups: bool
    with_answers: bool
    min_episodes: int


class PlayArguments(PlayOptions, total=False):
    """The arguments of one call of `LLMEnvRunner.play_groups`."""

    prompts: Required[Mapping[str, Prompt]]
    seed: Required[int | None]
    revisits: Collection[str]


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
    num_unparsed: int = 0  # episodes without a readable answer in their last turn; see `is_unparsed`
    reward_sums: dict[str, tuple[float, int]] = field(default_factory=dict)  # see `reward_sums`
    unpaid: list[dict[str, str]] = field(default_factory=list)  # a few answers; see `unpaid_answers`


@dataclass(frozen=True)
class Slice:
    """The result of one `advance` call.

    Invariant: each batch is that of one group, with none in it if it was dropped; a group is in one slice only.
    """

    batches: dict[str, RunnerBatch]  # by group id
    seconds: dict[str, float]  # slice_s, and its parts engine_s and environment_s
    num_unfinished: int  # groups


@dataclass(frozen=True)
class Loaded:
    """The result of loading weights: the engine's log-probs of the canary, and get_s, load_s, engine_canary_s."""

    logps: list[np.ndarray]
    seconds: dict[str, float]


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
    if episode.custom_data["stop_reason"] is StopReason.UNPARSABLE:
        return True
    is_lost = episode.custom_data["stop_reason"].is_infrastructure
    return not is_lost and len(episode) > 0 and episode.get_infos(-1).get("parsed") == ""


def reward_sums(episodes: Sequence[SingleAgentEpisode]) -> dict[str, tuple[float, int]]:
    """Return name -> (sum, number of episodes) of the values named "reward/..." or "agent/..." in infos of last steps.

    Environments that compute a reward from several functions report each one by this; of agents calls are counted.
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
        told = {name: info.get(name) for name in ("parsed", "expected")}
        if len(shown) < MAX_SHOWN_ANSWERS and all(isinstance(text, str) for text in told.values()):
            said = [text for role, text in episode.custom_data["text"] if role == "policy"]
            texts = {"answer": said[-1] if said else "", **told}
            shown.setdefault(
                episode.custom_data["group_id"], {name: str(text)[-MAX_SHOWN_CHARS:] for name, text in texts.items()}
            )
    return list(shown.values())
