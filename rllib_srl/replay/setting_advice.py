"""Compares the memory's settings with each other and with the run: what cannot work, and what has no effect.

    group_size_faults(settings, run)    ["replay_selection = 'greso' with group_size = 1; expected ...", ...]
    warnings_of(settings, run)          ["replay_leech_failures = 8 has no effect with ...", ...]
    warnings_of_pool(settings)          more of them, of a run that draws from a finite pool of prompts

Names are flat and have the prefix `replay_`, as `SRLConfig` has them. The settings themselves are valid here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rllib_srl.replay.selection.candidates import SelectionSettings
from rllib_srl.replay.selection.rules import BY_DUE, DATELESS, READ_HISTORY, WHOLE_POOL
from rllib_srl.replay.settings import TABLE, ReplaySettings

OF_REUSE = ("reuse_selection", "max_uses", "reuse_coeff", "reuse_correction")  # settings of nothing but reuse
OF_REVISITS = ("selection", "leech_failures", "load_control")  # settings of nothing but revisits
# Rules that compare the episodes of a group, and what they would do with groups of one.
_EQUAL = "one episode has no spread, so that all draws would be uniform"
OF_SPREAD = {
    "selection": {
        "greso": "one episode is always silent, so that draws would go by the number of visits",
        **dict.fromkeys(("learnability", "exit", "per", "exgrpo"), _EQUAL),
    },
    "reuse_selection": dict.fromkeys(("learnability", "exit", "exgrpo"), _EQUAL),
}
INSTEAD = {
    "selection": "'signal', 'mopps' or 'spo', which read the history of each prompt, or 'uniform'",
    "reuse_selection": "'srl' or 'per', which go by the surprise, or 'uniform'",
}


class Run(NamedTuple):
    """The settings of a run that the memory's depend on."""

    group_size: int
    may_revisit: bool  # by `revisit_fraction`, or by a planner that adapts it
    may_reuse: bool
    has_posterior: bool  # the baseline from history


def group_size_faults(settings: ReplaySettings, run: Run) -> Iterator[str]:
    """Yield errors for rules that need larger groups, each as "name = value; expected ..."."""
    if not settings.is_on:
        return
    with_size = f"with group_size = {run.group_size}"
    chosen = [("selection", run.may_revisit), ("reuse_selection", run.may_reuse)]
    for name in (name for name, is_used in chosen if is_used):
        rule = getattr(settings, name)
        given = f"replay_{name} = {rule!r} {with_size}"
        if run.group_size == 1 and rule in OF_SPREAD[name]:
            yield f"{given}; expected {INSTEAD[name]}: {OF_SPREAD[name][rule]}"
        config = settings.selection_config
        if name == "reuse_selection" and settings.reuse_selection_config is not None:
            config = settings.reuse_selection_config
        least = config.get("rlep_min_success", SelectionSettings.rlep_min_success)
        if rule == "rlep" and least > run.group_size:
            yield (
                f"{given}; expected rlep_min_success of at most {run.group_size}, not {least}: no group has more "
                "successes, so that all draws would be uniform"
            )
        strategy = config.get("repo_strategy", SelectionSettings.repo_strategy)
        if run.group_size == 1 and (name, rule, strategy) == ("selection", "repo", "max_variance"):
            yield f"{given} and repo_strategy = 'max_variance'; expected another strategy: {_EQUAL}"
    if run.group_size > 1:
        return
    if settings.diversity_bonus is not None:
        yield (
            f"replay_diversity_bonus = {settings.diversity_bonus!r} {with_size}; expected None: it compares the "
            "episodes of a group, and is always 1 for one episode"
        )
    if _reads_diversity(settings) and tuple(settings.diversity_parts) == ("variance",):
        yield (
            f"replay_diversity_parts = {settings.diversity_parts!r} {with_size}; expected other parts, such as "
            "('novelty',): the rewards of one episode have no variance"
        )


def warnings_of(settings: ReplaySettings, run: Run) -> list[str]:
    """Return a line for each setting that is not its default and has little or no effect; [] if there is none."""
    if not settings.is_on:
        return []
    parts = (_of_fractions, _of_history, _of_whole_pool, _of_due_dates, _of_diversity)
    return [line for part in parts for line in part(settings, run)]


def warnings_of_pool(settings: ReplaySettings) -> list[str]:
    """Return a line for each setting without effect where all prompts of a finite pool compete by the rule.

    `warnings_of` has reported those of the rules that draw from all items in every run.
    """
    if settings.selection in WHOLE_POOL:
        return []
    names = ("leech_failures", "load_control", "fill_with_not_due")
    values = _changed(settings, names if settings.selection in DATELESS else (*names, "spacing"))
    return [
        f"replay_{name} = {value!r} has no effect on draws from a finite pool with replay_revisit_fraction = 'auto': "
        f"replay_selection = {settings.selection!r} draws from all prompts of the pool, due or not"
        for name, value in values.items()
    ]


def _changed(settings: ReplaySettings, names: tuple[str, ...]) -> dict[str, Any]:
    """Return name -> value of those settings that are not their default."""
    values = {name: getattr(settings, name) for name in names}
    return {name: value for name, value in values.items() if value != TABLE[name].default}


def _of_fractions(settings: ReplaySettings, run: Run) -> Iterator[str]:
    """Yield what belongs to revisits or reuse, where there are none."""
    kinds = [
        (run.may_reuse, OF_REUSE, "reuse", "nothing is trained on again"),
        (run.may_revisit, OF_REVISITS, "revisit", "no prompt is drawn from the memory"),
    ]
    for is_used, names, kind, why in kinds:
        given = {} if is_used else _changed(settings, names)
        for name, value in given.items():
            yield f"replay_{name} = {value!r} has no effect with replay_{kind}_fraction = 0: {why}"


def _of_history(settings: ReplaySettings, run: Run) -> Iterator[str]:
    """Yield how history is discounted, where neither the baseline nor the draws read it."""
    if run.has_posterior or (run.may_revisit and settings.selection in READ_HISTORY):
        return
    rules = " or ".join(map(repr, READ_HISTORY))
    for name, value in _changed(settings, ("history_by", "history_half_life")).items():
        cost = ", at the cost of a forward pass in each iteration" if value == "kl" else ""
        yield (
            f"replay_{name} = {value!r} changes metrics only{cost}: history is read with advantage = 'posterior' or "
            f"by revisits with replay_selection = {rules}"
        )


def _of_whole_pool(settings: ReplaySettings, run: Run) -> Iterator[str]:
    """Yield what restricts draws, where the rule draws from all items."""
    if not run.may_revisit or settings.selection not in WHOLE_POOL:
        return
    shown = f"with replay_selection = {settings.selection!r}"
    for name, value in _changed(settings, ("leech_failures", "load_control")).items():
        kind = "leeches" if name == "leech_failures" else "waiting ones"
        yield f"replay_{name} = {value!r} has no effect on draws {shown}: it draws from all items, {kind} too"
    if not run.may_reuse:  # it also bounds the groups that a rule of reuse chooses from
        for name, value in _changed(settings, ("candidate_pool",)).items():
            yield f"replay_{name} = {value!r} {shown}: it draws from all items, so that only evictions use this number"


def _of_due_dates(settings: ReplaySettings, run: Run) -> Iterator[str]:
    """Yield what sets due dates, where no draw reads them."""
    rule, control = settings.selection, settings.load_control
    is_dateless = settings.fill_with_not_due and rule in DATELESS
    if not run.may_revisit:
        return  # reported above
    if settings.has_due_dates and is_dateless:
        yield (
            f"replay_spacing = {settings.spacing!r} with replay_selection = {rule!r}: due dates are shown, "
            "but no draw depends on them; replay_selection = 'srl' draws what is due"
        )
    if rule in WHOLE_POOL:
        return  # reported above
    if control == "throttle_new" and not settings.has_due_dates:
        yield (
            "replay_load_control = 'throttle_new' with replay_spacing = 'none': each item counts as one revisit "
            "an iteration, so hardly more items come back than there are slots; expected a rule of spacing"
        )
    if control == "stretch" and is_dateless and rule not in BY_DUE:
        yield (
            f"replay_load_control = 'stretch' has no effect on draws with replay_selection = {rule!r}, which does not "
            "read due dates; replay_selection = 'srl' draws what is due"
        )


def _of_diversity(settings: ReplaySettings, run: Run) -> Iterator[str]:
    """Yield that one of several measures is constant; `group_size_faults` refuses it alone."""
    others = tuple(part for part in settings.diversity_parts if part != "variance")
    has_variance = 0 < len(others) < len(settings.diversity_parts)
    if run.group_size == 1 and _reads_diversity(settings) and has_variance:
        yield (
            "replay_diversity_parts has 'variance' with group_size = 1: the rewards of one episode have none, so that "
            f"this part is the same for all items; expected {others!r}"
        )


def _reads_diversity(settings: ReplaySettings) -> bool:
    return settings.diversity_coeff > 0 or settings.eviction == "least_diverse"
