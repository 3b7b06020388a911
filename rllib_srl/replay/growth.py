"""Task growth: what the policy has written so far becomes a new prompt, to be continued or to be improved.

    a visited item (m, history)                     children, each with the score of its parent
        episode: y_1 y_2 ... y_T    ──children──>   history + y_1, ..., history + y_1 .. y_(T-1)      partial histories
                                                    history + y_1 .. y_T      where the world can iterate on an answer
    a drawn item ──revisited──> its prompt, cut to a random turn, or with the step "improve" or "diverge"

A child whose history is of answers to iterate on has a `step`, one whose history is of turns to continue has none: the
prompt itself says which it is.

The score is S = Var(r), the population variance of the group's rewards scaled to [0, 1]; it generalises p (1 - p).
Only prompts are kept, never old tokens, so nothing here needs an importance ratio. The probability p of a revisit is
`revisit_fraction`, B_min is `min_buffer_size`, and the draw by exp(kappa S) is the selection rule "exit".

What the paper leaves open, and what is done here:
1. Which of the G episodes becomes the child is not said (the pseudo-code reads as one): one is drawn uniformly from
   the given generator, among those with a turn.
2. Biased or unbiased variance is not said: the population variance, which is p (1 - p) for rewards 0 and 1.
3. Nothing is said of equal histories: a prompt that is known already, by `Prompt.key`, is not grown again.
4. A history that would leave no room for a turn is not grown (`max_prompt_tokens`), and neither is one of more than
   `max_depth` turns; both are counted.

Source: Jiang, Lupu and Bachrach 2025, arXiv 2509.04575v1, Algorithm 1 and sections on buffer, score and divergence.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rllib_srl.types import Group, Prompt

STEPS = ("improve", "diverge")


@dataclass(frozen=True)
class Visited:
    """What growth needs of a played group.

    Invariant: episode g has as many texts in `turns_G` as ends in `turn_ends_G`.
    """

    prompt: Prompt
    score: float
    turns_G: tuple[tuple[str, ...], ...]  # what the policy wrote, turn by turn
    turn_ends_G: tuple[tuple[int, ...], ...]  # tokens of the stream up to the end of each turn
    can_iterate: bool  # the world says that a whole answer of this group can start a self-iteration step

    @classmethod
    def of(cls, group: Group, reward_range: tuple[float, float] = (0.0, 1.0)) -> Visited:
        """Read a group that was collected with `to_group(..., keep_turns=True)`.

        Raises:
            ValueError: the group kept no turns, or not those of its episodes; a reward range that is empty.
        """
        turns_G = group.extra.get("turns")
        if turns_G is None or len(turns_G) != group.size:
            raise ValueError(
                f"group {group.group_id} keeps the turns of {len(turns_G or ())} episodes; expected those of its "
                f"{group.size}: collect it with keep_turns=True"
            )
        return cls(
            prompt=group.prompt,
            score=score_of(group.rewards_G, reward_range),
            turns_G=tuple(tuple(turns) for turns in turns_G),
            turn_ends_G=tuple(_turn_ends(group, g, len(turns)) for g, turns in enumerate(turns_G)),
            can_iterate=bool(group.extra.get("can_iterate", False)),
        )


@dataclass(frozen=True)
class Child:
    """A new prompt and the score it starts with, which is its parent's."""

    prompt: Prompt
    score: float


@dataclass(frozen=True)
class Grown:
    """The children of one visit. Invariant: their keys are distinct, and none was known."""

    children: tuple[Child, ...] = ()
    num_known: int = 0
    num_too_deep: int = 0
    num_too_long: int = 0


def score_of(rewards_G: np.ndarray, reward_range: tuple[float, float] = (0.0, 1.0)) -> float:
    """Return S = Var(r), in [0, 0.25] for rewards in their range.

    Args:
        rewards_G: the rewards of the group's episodes.
        reward_range: the lowest and the highest reward; these become 0 and 1.
    """
    lowest, highest = reward_range
    if not lowest < highest:
        raise ValueError(f"reward_range = {reward_range}; expected the lowest reward below the highest")
    rewards_G = np.asarray(rewards_G, np.float64)
    # Equal rewards have no variance, not the rounding error of one (0.1 is no binary number).
    return float((rewards_G / (highest - lowest)).var()) if np.ptp(rewards_G) > 0 else 0.0


def depth(prompt: Prompt) -> int:
    """Return how many of the policy's own turns a prompt builds on; 0 for a base task."""
    return len(prompt.history)


def children(
    visited: Visited,
    generator: np.random.Generator,
    *,
    max_depth: int | None = None,
    max_prompt_tokens: int | None = None,
    known: Container[str] = (),
) -> Grown:
    """Return the prompts that one episode of a visit leads to, shortest history first.

    Args:
        visited: the group that was played.
        generator: draws the episode; one number a call, however many episodes there are.
        max_depth: turns of the longest history, >= 0. None: any number.
        max_prompt_tokens: tokens up to the end of the last turn kept, at most; leave room for what the world adds and
            for a turn. None: any number.
        known: keys of prompts that exist.
    """
    if max_depth is not None and max_depth < 0:
        raise ValueError(f"max_depth = {max_depth}; expected at least 0")
    candidates = [g for g, turns in enumerate(visited.turns_G) if turns]
    drawn = generator.random()
    has_ended = bool(visited.prompt.step) and not visited.can_iterate  # the world's last self-iteration step
    if has_ended or not candidates:
        return Grown()
    g = candidates[int(drawn * len(candidates))]
    turns, ends = visited.turns_G[g], visited.turn_ends_G[g]
    step = "improve" if visited.can_iterate else ""
    grown: list[Child] = []  # no two are as long, so no two are the same
    num_known = num_too_deep = num_too_long = 0
    for t in range(1, len(turns) + int(visited.can_iterate)):
        prompt = replace(visited.prompt, history=visited.prompt.history + turns[:t], step=step)
        if max_depth is not None and depth(prompt) > max_depth:
            num_too_deep += 1
        elif max_prompt_tokens is not None and ends[t - 1] > max_prompt_tokens:
            num_too_long += 1
        elif prompt.key in known:
            num_known += 1
        else:
            grown.append(Child(prompt, visited.score))
    return Grown(tuple(grown), num_known, num_too_deep, num_too_long)


def choose_step(generator: np.random.Generator, p_div: float) -> str:
    """Return "diverge" with probability `p_div`, else "improve"."""
    if not 0 <= p_div <= 1:
        raise ValueError(f"p_div = {p_div}; expected 0 to 1")
    return "diverge" if generator.random() < p_div else "improve"


def random_prefix(prompt: Prompt, generator: np.random.Generator) -> Prompt:
    """Cut a history to its first t- turns, uniform over 1 to its length; a prompt without history stays.

    Source: Algorithm 1, "partial histories, t- <= t".
    """
    if not prompt.history:
        return prompt
    return replace(prompt, history=prompt.history[: 1 + int(generator.integers(depth(prompt)))])


def revisited(prompt: Prompt, generator: np.random.Generator, p_div: float) -> Prompt:
    """Return what to play when an item is drawn for a revisit.

    A history of turns is cut at random. A prompt with a step has a history of another kind, answers to one request:
    tau_1^k, whose only turn prefix is itself. It stays, and its step is drawn anew. Base tasks draw nothing.
    """
    return replace(prompt, step=choose_step(generator, p_div)) if prompt.step else random_prefix(prompt, generator)


def replace_minimum(scores: Sequence[float] | np.ndarray, new_score: float) -> int | None:
    """Return the position that a new item takes in a full buffer, or None if it is not good enough.

    It takes that of the lowest score S_min, the first of several, if new_score >= S_min.

    Raises:
        ValueError: no scores, or one that is not a number.
    """
    scores_N = np.asarray(scores, np.float64)
    if not len(scores_N) or np.isnan(scores_N).any() or np.isnan(new_score):
        raise ValueError(f"{len(scores_N)} scores and new_score = {new_score}; expected at least one, and numbers only")
    lowest = int(scores_N.argmin())
    return lowest if new_score >= scores_N[lowest] else None


def _turn_ends(group: Group, g: int, num_turns: int) -> tuple[int, ...]:
    """Return where each turn of an episode ends; turns with nothing between them end together, where the last does."""
    mask_T = group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]].astype(np.int8)
    ends = (np.flatnonzero(np.diff(mask_T, append=0) == -1) + 1).tolist()
    # Masked secrets cut a turn in pieces, and an empty reply joins two: then the whole stream is the safe bound.
    return tuple(ends) if len(ends) == num_turns else (len(mask_T),) * num_turns
