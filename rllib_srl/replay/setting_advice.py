"""Compares the memory's settings with each other and with the run: what cannot work, and what has no effect.

    group_size_faults(settings, run)    ["replay_selection = 'per' with group_size = 1; expected ...", ...]
    warnings_of(settings, run)          ["replay_max_uses = 8 has no effect with ...", ...]

Names are flat and have the prefix `replay_`, as `SRLConfig` has them. The settings themselves are valid here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rllib_srl.replay.selection.rules import DATELESS, SELECTIONS
from rllib_srl.replay.settings import ReplaySettings

OF_REUSE = ("reuse_selection", "max_uses", "reuse_coeff", "reuse_correction")  # settings of nothing but reuse
OF_REVISITS = ("selection",)  # settings of nothing but revisits
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
    is_by_spread = settings.selection_config.get("by", "abs_advantage") == "abs_advantage"
    if run.group_size == 1 and run.may_revisit and settings.selection == "per" and is_by_spread:
        yield (
            f"replay_selection = 'per' {with_size}; expected 'uniform', or by = 'reward': one episode has no "
            "spread, so that all draws would be uniform"
        )


def warnings_of(settings: ReplaySettings, run: Run) -> list[str]:
    """Return a line for each setting that is not its default and has little or no effect; [] if there is none."""
    if not settings.is_on:
        return []
    parts = (_of_fractions, _of_history, _of_due_dates)
    return [line for part in parts for line in part(settings, run)]


def _changed(settings: ReplaySettings, names: tuple[str, ...]) -> dict[str, Any]:
    """Return name -> value of those settings that are not their default."""
    values = {name: getattr(settings, name) for name in names}
    return {name: value for name, value in values.items() if value != settings.default(name)}


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
    if run.has_posterior or (run.may_revisit and settings.selection not in SELECTIONS.own):
        return
    for name, value in _changed(settings, ("history_by", "history_half_life")).items():
        cost = ", at the cost of a forward pass in each iteration" if value == "kl" else ""
        yield (
            f"replay_{name} = {value!r} changes metrics only{cost}: history is read with advantage = 'posterior' or "
            "by rules such as replay_selection = 'contrib.mopps'"
        )


def _of_due_dates(settings: ReplaySettings, run: Run) -> Iterator[str]:
    """Yield what sets due dates, where no draw reads them."""
    rule = settings.selection
    if run.may_revisit and settings.has_due_dates and settings.fill_with_not_due and rule in DATELESS:
        yield (
            f"replay_spacing = {settings.spacing!r} with replay_selection = {rule!r}: due dates are shown, "
            "but no draw depends on them; replay_selection = 'srl' draws what is due"
        )
