"""Task growth (ExIt): turns partial histories of played episodes into new prompts, to be continued or improved.

    a visited item (m, history)                     children, each with the score of its parent
        episode: y_1 y_2 ... y_T    ──children──>   history + y_1, ..., history + y_1 .. y_(T-1)      partial histories
                                                    history + y_1 .. y_T      if the environment can iterate on answers
    a drawn item ──revisited──> its prompt, cut to a random turn, or with the step "improve" or "diverge"

`Prompt.step` tells the two kinds of children apart: it is set if the history consists of answers to iterate on, and
empty if it consists of turns to continue.

The score is S = Var(r), the population variance of the group's rewards scaled to [0, 1]; it generalises p (1 - p).
Only prompts are kept, never old tokens, so no importance ratio is needed. The probability p of a revisit is
`revisit_fraction`, B_min is `min_buffer_size`, and the draw by exp(kappa S) is the selection rule "exit".

Without task growth, `self_divergence` = epsilon alone lets a revisit ask for a different answer:

    a drawn item without history, one uniform number below epsilon
        ──revisited──>  its prompt, history (one answer of its newest stored group), step "diverge"

The group is trained on. It is neither a review of the item, whose own question was not asked, nor a new item.

Choices where the paper is silent:
1. Which of the G episodes becomes the child (the pseudo-code reads as one): one is drawn uniformly with the given
   generator, among those with a turn.
2. Biased or unbiased variance: the population variance, which is p (1 - p) for rewards 0 and 1.
3. Equal histories: a prompt whose `Prompt.key` is already known is not grown again.
4. A history that would leave no room for a turn is not grown (`max_prompt_tokens`), and neither is one of more than
   `max_depth` turns; both are counted.

Source: Jiang, Lupu and Bachrach 2025, arXiv 2509.04575v1, Algorithm 1 and sections on buffer, score and divergence.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rllib_srl.types import Group, Prompt

DIVERGE = "diverge"
STEPS = ("improve", DIVERGE)


@dataclass(frozen=True)
class Visited:
    """Fields of a played group that growth reads.

    Invariant: episode g has as many texts in `turns_G` as ends in `turn_ends_G`.
    """

    prompt: Prompt
    score: float
    turns_G: tuple[tuple[str, ...], ...]  # texts of the policy, one a turn
    turn_ends_G: tuple[tuple[int, ...], ...]  # tokens of the stream up to the end of each turn
    can_iterate: bool  # the environment can start a self-iteration step from a whole answer of this group

    @classmethod
    def of(cls, group: Group, reward_range: tuple[float, float] = (0.0, 1.0)) -> Visited:
        """Read a group that was collected with `to_group(..., keep_turns=True)`.

        Raises:
            ValueError: the group kept no turns, or their number differs from its episodes; an empty reward range.
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
    """A new prompt, with its parent's score as initial score."""

    prompt: Prompt
    score: float


@dataclass(frozen=True)
class Grown:
    """The children of one visit. Invariant: their keys are distinct and new."""

    children: tuple[Child, ...] = ()
    num_known: int = 0
    num_too_deep: int = 0
    num_too_long: int = 0


def score_of(rewards_G: np.ndarray, reward_range: tuple[float, float] = (0.0, 1.0)) -> float:
    """Return S = Var(r), in [0, 0.25] for rewards in their range.

    Args:
        rewards_G: the rewards of the group's episodes.
        reward_range: the lowest and the highest reward; these become 0 and 1.

    Raises:
        ValueError: an empty reward range.
    """
    lowest, highest = reward_range
    if not lowest < highest:
        raise ValueError(f"reward_range = {reward_range}; expected the lowest reward below the highest")
    rewards_G = np.asarray(rewards_G, np.float64)
    # Equal rewards must give exactly 0, but `var` may return a rounding error (0.1 has no exact binary value).
    return float((rewards_G / (highest - lowest)).var()) if np.ptp(rewards_G) > 0 else 0.0


def depth(prompt: Prompt) -> int:
    """Return the number of policy turns in a prompt's history; 0 for a base task."""
    return len(prompt.history)


def children(
    visited: Visited,
    generator: np.random.Generator,
    *,
    max_depth: int | None = None,
    max_prompt_tokens: int | None = None,
    known: Container[str] = (),
) -> Grown:
    """Return the prompts grown from one episode of a visit, shortest history first.

    Args:
        visited: the played group.
        generator: draws the episode; always one number a call.
        max_depth: turns of the longest history, >= 0. None: no limit.
        max_prompt_tokens: most tokens up to the end of the last turn kept; leave room for the environment's tokens
            and for a turn. None: no limit.
        known: keys of existing prompts.

    Raises:
        ValueError: a negative `max_depth`.
    """
    if max_depth is not None and max_depth < 0:
        raise ValueError(f"max_depth = {max_depth}; expected at least 0")
    candidates = [g for g, turns in enumerate(visited.turns_G) if turns]
    drawn = generator.random()
    has_ended = bool(visited.prompt.step) and not visited.can_iterate  # the environment's last self-iteration step
    if has_ended or not candidates:
        return Grown()
    g = candidates[int(drawn * len(candidates))]
    turns, ends = visited.turns_G[g], visited.turn_ends_G[g]
    step = "improve" if visited.can_iterate else ""
    grown: list[Child] = []  # histories differ in length, so the children are distinct
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
    return DIVERGE if generator.random() < p_div else "improve"


def answers_of(group: Group, max_prompt_tokens: int | None = None) -> list[str]:
    """Return the answers of a group that a self-iteration step can start from: of episodes of one turn.

    Args:
        group: collected with `to_group(..., keep_turns=True)`; one without turns has no answers.
        max_prompt_tokens: most tokens of an episode, prompt and answer. None: no limit.
    """
    if not group.extra.get("can_iterate", False):
        return []
    pairs = zip(group.extra.get("turns", ()), group.lengths_G().tolist(), strict=False)
    most = np.inf if max_prompt_tokens is None else max_prompt_tokens
    return [turns[0] for turns, num_tokens in pairs if len(turns) == 1 and num_tokens <= most]


def asked_differently(prompt: Prompt, answers: Sequence[str], generator: np.random.Generator) -> Prompt:
    """Return a prompt that shows one of the answers, drawn uniformly, and asks for a different one."""
    return replace(prompt, history=(answers[int(generator.integers(len(answers)))],), step=DIVERGE)


def random_prefix(prompt: Prompt, generator: np.random.Generator) -> Prompt:
    """Cut a history to its first t- turns, uniform over 1 to its length; a prompt without history is unchanged.

    Source: Algorithm 1, "partial histories, t- <= t".
    """
    if not prompt.history:
        return prompt
    return replace(prompt, history=prompt.history[: 1 + int(generator.integers(depth(prompt)))])


def revisited(prompt: Prompt, generator: np.random.Generator, p_div: float) -> Prompt:
    """Return the prompt to play for a revisit of an item.

    A history of turns is cut at random. The history of a prompt with a step consists of answers to one request,
    tau_1^k, whose only turn prefix is itself; it is kept, and the step is drawn again. Base tasks use no randomness.
    """
    return replace(prompt, step=choose_step(generator, p_div)) if prompt.step else random_prefix(prompt, generator)


def replace_minimum(scores: Sequence[float] | np.ndarray, new_score: float) -> int | None:
    """Return the position that a new item takes in a full buffer, or None if its score is too low.

    That is the first position of the lowest score S_min, if new_score >= S_min.

    Raises:
        ValueError: no scores, or a score that is nan.
    """
    scores_N = np.asarray(scores, np.float64)
    if not len(scores_N) or np.isnan(scores_N).any() or np.isnan(new_score):
        raise ValueError(f"{len(scores_N)} scores and new_score = {new_score}; expected at least one, and numbers only")
    lowest = int(scores_N.argmin())
    return lowest if new_score >= scores_N[lowest] else None


def _turn_ends(group: Group, g: int, num_turns: int) -> tuple[int, ...]:
    """Return the end of each turn in tokens; the stream's end if turns and runs of loss tokens differ in number."""
    mask_T = group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]].astype(np.int8)
    ends = (np.flatnonzero(np.diff(mask_T, append=0) == -1) + 1).tolist()
    # Masked secrets split a turn, and an empty reply joins two; the length of the whole stream is a safe upper bound.
    return tuple(ends) if len(ends) == num_turns else (len(mask_T),) * num_turns
