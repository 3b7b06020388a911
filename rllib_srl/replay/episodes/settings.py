"""Settings of the schedule of episode segments: names and rules of the memory, with defaults that fit off-policy RL.

A segment differs from a prompt: it is stored, not played, its test is one TD error and not a group of episodes, and a
draw costs nothing. The defaults that differ from `ReplaySettings`, and why:

    selection = "signal"              a draw is free, and segments of a task differ in what is left to learn
    spacing = "fsrs"                  due dates for the rule `srl`; `signal` ignores them
    diversity_coeff = 0.5             for `srl` and eviction: unlike observations first
    grade, min_graded, pass_reward    rewards are ranks of TD errors in [0, 1], one a visit; half of them pass
    load_control = "stretch"          every segment may be drawn, as from RLlib's buffers; intervals grow to fit
    diversity_parts = ("novelty",)    the TD error already decides grade and priority
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllib_srl.common.foreign_names import nearest
from rllib_srl.common.setting_checks import is_integer
from rllib_srl.replay.selection.literature import Proportional
from rllib_srl.replay.selection.rules import SELECTIONS
from rllib_srl.replay.settings import TABLE, ReplaySettings

GRADE_BY = ("td_error", "return")
DEFAULTS: dict[str, Any] = {
    "selection": "signal",
    "selection_config": {},
    "spacing": "fsrs",
    "spacing_config": {},
    "desired_retention": 0.9,
    "iterations_per_day": 1.0,
    "min_recall_interval": 1,
    "load_control": "stretch",
    "pass_reward": 0.5,
    "leech_failures": 0,
    "leech_share": 0.1,
    "leech_interval": 32,
    "eviction": "lowest_value",
    "reservoir_seed": 0,
    "diversity_coeff": 0.5,
    "diversity_parts": ("novelty",),
    "diversity_on": ("interval", "draw"),
    "neighbours": 8,
    "candidate_pool": 4096,
}
NAMES = tuple(DEFAULTS)
# The rest of `ReplaySettings` is fixed: a segment's result is a number, and its vector comes from its observations.
_FIXED: dict[str, Any] = {"grade": "reward", "min_graded": 1, "embedding": "policy", "history_by": "visits"}
_UNSUITED = {
    "nll_surprise": "log-probs of tokens",
    "pier": "log-probs of tokens",
    "exgrpo": "successes in a group of episodes",
    "learnability": "successes in a group of episodes",
    "rlep": "successes in a group of episodes",
}
_OF_PRIORITISED = ("alpha", "beta", "prioritized_replay_alpha", "prioritized_replay_beta")


def unknown_names(values: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    """Return one message for each setting that the buffer does not have."""
    faults = []
    for name, value in values.items():
        if name in _OF_PRIORITISED:
            own = "selection='per', selection_config={'per_alpha': 0.6, 'per_beta': 0.4}"
            faults.append(f"{name} = {value!r}; expected the parameters of a selection rule instead: {own}")
        elif name not in known:
            near = nearest(name, known)
            listed = f"did you mean {near!r}?" if near else f"expected one of {', '.join(sorted(known))}"
            faults.append(f"{name} = {value!r}; no such setting of SRLEpisodeReplayBuffer: {listed}")
    return faults


def schedule_settings(capacity: int, values: Mapping[str, Any]) -> ReplaySettings:
    """Return the settings of the schedule, not yet checked.

    Args:
        capacity: steps, and therefore the most segments.
        values: some of `NAMES`.
    """
    given = {**DEFAULTS, **values}
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    own = SELECTIONS.own.get(given["selection"]) if isinstance(given["selection"], str) else None
    # Segments are drawn as items, whose rule ReplaySettings lets read no exponent of importance weights unless the rule
    # of groups, which is not used here, reads it too.
    of_groups = given["selection"] if isinstance(own, Proportional) else "srl"
    return ReplaySettings(**given, **_FIXED, capacity=capacity, reuse_selection=of_groups)


def faults_of(capacity: Any, values: Mapping[str, Any], grade_by: Any) -> list[str]:
    """Validate the schedule's settings; return error messages, each as "name = value; expected ..."."""
    faults = [] if grade_by in GRADE_BY else [f"grade_by = {grade_by!r}; expected 'td_error' or 'return'"]
    selection = values.get("selection", DEFAULTS["selection"])
    if isinstance(selection, str) and selection in _UNSUITED:
        faults.append(f"selection = {selection!r} reads {_UNSUITED[selection]}; expected a rule that reads segments")
    config = values.get("selection_config")
    if selection == "signal" and isinstance(config, Mapping):
        unread = [name for name in ("phi", "weights") if name in config]
        faults += [f"selection_config has {name!r}; expected none of it: segments are one domain" for name in unread]
    if "episodic" in (values.get("diversity_parts") or ()):
        faults.append("diversity_parts has 'episodic'; expected measures of a segment: there are no turns of text")
    known = {name: value for name, value in values.items() if name in TABLE}
    return faults + schedule_settings(capacity if is_integer(capacity, 1) else 1, known).faults()
