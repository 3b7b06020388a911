"""Compares the memory's settings with each other and with the run: what cannot work, and what has no effect.

    group_size_errors(settings, run)    ["replay_selection = 'per' with group_size = 1; expected ...", ...]
    warnings_of(settings, run)          ["replay_max_uses = 8 has no effect with ...", ...]

Names are flat and have the prefix `replay_`, as `SRLConfig` has them. The settings themselves are valid here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rllib_srl.replay.selection.rules import DATELESS, SELECTIONS
from rllib_srl.replay.settings import ReplaySettings

OF_REUSE = ("reuse_selection", "max_uses", "reuse_correction")  # settings of nothing but reuse
OF_REVISITS = ("selection",)  # settings of nothing but revisits


class Run(NamedTuple):
    """The settings of a run that the memory's depend on."""

    group_size: int
    may_revisit: bool  # by `revisit_fraction`, or by a planner that adapts it
    may_reuse: bool
    has_posterior: bool  # the baseline from history


def group_size_errors(settings: ReplaySettings, run: Run) -> Iterator[str]:
    """Yield errors for rules that need larger groups, each as "name = value; expected ..."."""
    reads_deviation = settings.selection == "per" and settings.selection_config.get("by") in (None, "abs_advantage")
    if settings.is_on and run.may_revisit and run.group_size == 1 and reads_deviation:
        yield (
            "replay_selection = 'per' with group_size = 1; expected 'uniform', or by = 'reward': one reward does "
            "not vary, so that all draws would be uniform"
        )


def warnings_of(settings: ReplaySettings, run: Run) -> Iterator[str]:
    """Yield a line for each setting that is not its default and has little or no effect."""
    if not settings.is_on:
        return
    changed = {name: value for name, value in vars(settings).items() if value != settings.default(name)}
    unused = {} if run.may_reuse else dict.fromkeys(OF_REUSE, "reuse_fraction = 0: nothing is trained on again")
    if not run.may_revisit:
        unused |= dict.fromkeys(OF_REVISITS, "revisit_fraction = 0: no prompt is drawn from the memory")
    for name in filter(changed.__contains__, unused):
        yield f"replay_{name} = {changed[name]!r} has no effect with replay_{unused[name]}"
    reads_history = run.has_posterior or (run.may_revisit and settings.selection not in SELECTIONS.own)
    if "history_half_life" in changed and not reads_history:
        yield (
            f"replay_history_half_life = {settings.history_half_life!r} changes metrics only: history is read with "
            "advantage = 'posterior' or by rules such as replay_selection = 'contrib.mopps'"
        )
    if run.may_revisit and settings.has_due_dates and settings.fill_with_not_due and settings.selection in DATELESS:
        yield (
            f"replay_spacing = {settings.spacing!r} with replay_selection = {settings.selection!r}: due dates are "
            "shown, but no draw depends on them; replay_selection = 'srl' draws what is due"
        )
