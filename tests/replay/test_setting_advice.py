"""Settings of the memory that cannot work with groups of one, and those without effect: both are true of the buffer."""

from __future__ import annotations

from contextlib import closing
from functools import cache

import numpy as np
import pytest

from rllib_srl.replay.selection import literature, rules
from rllib_srl.replay.selection.candidates import SelectionSettings
from rllib_srl.replay.selection.pool import Surprise
from rllib_srl.replay.setting_advice import OF_SPREAD, Run, group_size_faults, warnings_of, warnings_of_pool
from rllib_srl.replay.settings import ReplaySettings
from tests.replay.groups import a_buffer, a_group, a_prompt

EIGHT = Run(group_size=8, may_revisit=True, may_reuse=False, has_posterior=False)
ONE = Run(group_size=1, may_revisit=True, may_reuse=True, has_posterior=True)


def said(run: Run = EIGHT, **settings) -> list[str]:
    return warnings_of(ReplaySettings(**settings), run)


def faults(run: Run = ONE, **settings) -> list[str]:
    return list(group_size_faults(ReplaySettings(**settings), run))


# --- what has no effect ---------------------------------------------------------------------------


def test_defaults_and_settings_that_act_are_not_warned_of():
    for run in (EIGHT, ONE, ONE._replace(may_revisit=False, may_reuse=False), EIGHT._replace(has_posterior=True)):
        assert said(run) == []
    assert said(spacing="fsrs", selection="srl", load_control="throttle_new", leech_failures=8) == []
    assert said(spacing="fsrs", fill_with_not_due=False, load_control="stretch") == []
    assert said(history_by="kl", selection="spo") == said(EIGHT._replace(has_posterior=True), history_by="kl") == []
    off = {"capacity": 0, "revisit_fraction": 0, "reuse_fraction": 0}
    assert said(EIGHT._replace(may_revisit=False), selection="signal", **off) == []


def test_due_dates_that_no_draw_reads():
    (line,) = said(spacing="fsrs")
    assert line.startswith("replay_spacing = 'fsrs' with replay_selection = 'uniform': ")
    (line,) = said(load_control="throttle_new")
    assert line.startswith("replay_load_control = 'throttle_new' with replay_spacing = 'none': ")
    (line,) = said(load_control="stretch")
    assert line.startswith("replay_load_control = 'stretch' has no effect on draws with replay_selection = 'uniform'")


def test_settings_of_reuse_without_reuse_and_of_revisits_without_revisits():
    assert said(EIGHT._replace(may_reuse=True), max_uses=9) == []
    assert said(max_uses=9) == [
        "replay_max_uses = 9 has no effect with replay_reuse_fraction = 0: nothing is trained on again"
    ]
    none = EIGHT._replace(may_revisit=False)
    given = {"selection": "mopps", "leech_failures": 3, "load_control": "throttle_new"}
    assert said(none, **given) == [
        f"replay_{name} = {value!r} has no effect with replay_revisit_fraction = 0: no prompt is drawn from the memory"
        for name, value in given.items()
    ]
    assert said(none, reuse_selection="uniform") == []


@pytest.mark.parametrize("selection", ["uniform", "signal", "greso"])  # the last two read silence, not rewards
def test_how_history_is_discounted_where_nothing_reads_it(selection):
    reads = "history is read with advantage = 'posterior' or by revisits with replay_selection = 'mopps' or 'spo'"
    assert said(history_by="kl", selection=selection) == [
        f"replay_history_by = 'kl' changes metrics only, at the cost of a forward pass in each iteration: {reads}"
    ]
    assert said(history_half_life=2.0, selection=selection) == [
        f"replay_history_half_life = 2.0 changes metrics only: {reads}"
    ]
    none = EIGHT._replace(may_revisit=False)
    assert any("changes metrics only" in line for line in said(none, history_by="visits", selection="mopps"))


def test_what_restricts_draws_from_all_items():
    assert said(selection="signal", leech_failures=2, load_control="throttle_new", candidate_pool=3) == [
        "replay_leech_failures = 2 has no effect on draws with replay_selection = 'signal': it draws from all items, "
        "leeches too",
        "replay_load_control = 'throttle_new' has no effect on draws with replay_selection = 'signal': it draws from "
        "all items, waiting ones too",
        "replay_candidate_pool = 3 with replay_selection = 'signal': it draws from all items, so that only evictions "
        "use this number",
    ]
    assert said(EIGHT._replace(may_reuse=True), selection="signal", candidate_pool=3) == []


def test_what_restricts_draws_from_a_finite_pool():
    given = {"leech_failures": 2, "load_control": "throttle_new", "fill_with_not_due": False, "spacing": "fsrs"}
    rest = "on draws from a finite pool with replay_revisit_fraction = 'auto': replay_selection = "
    for selection in ("uniform", "fifo", "balanced"):
        assert warnings_of_pool(ReplaySettings(selection=selection, **given)) == [
            f"replay_{name} = {given[name]!r} has no effect {rest}{selection!r} draws from all prompts of the pool, "
            "due or not"
            for name in ("leech_failures", "load_control", "fill_with_not_due")
        ]
    own = "tests.replay.user_rules:oldest"
    lines = warnings_of_pool(ReplaySettings(selection=own, **given))
    assert lines[3:] == [
        f"replay_spacing = 'fsrs' has no effect {rest}{own!r} draws from all prompts of the pool, due or not"
    ]
    assert warnings_of_pool(ReplaySettings()) == warnings_of_pool(ReplaySettings(selection="uniform")) == []
    assert warnings_of_pool(ReplaySettings(selection="signal", leech_failures=2)) == []  # of `warnings_of`


@cache
def drawn(is_pool: bool = False, **settings) -> list[list[str]]:
    """Return what seven iterations revisit; a third of the prompts always fails, another one always succeeds."""
    given = {"capacity": 64, "spacing": "fixed", "load_control": "none", "leech_failures": 0, **settings}
    pattern = {0: [0.0, 0.0], 1: [1.0, 1.0], 2: [1.0, 0.0]}
    seen = []
    with closing(a_buffer(**given)) as buffer:
        buffer.add([a_group(i, 1, i, rewards=pattern[i % 3]) for i in range(24)], 1)
        for now in range(2, 9):
            prompts = buffer.from_pool(5, now)[0] if is_pool else buffer.due(5, now, slots=1.0)
            seen.append([prompt.prompt_id for prompt in prompts])
            rewards = [pattern[int(prompt.prompt_id[1:]) % 3] for prompt in prompts]
            groups = [a_group(prompt, now, i, rewards=each) for i, (prompt, each) in enumerate(zip(prompts, rewards))]
            buffer.add(groups, now)
    return seen


RESTRICTING = [{"leech_failures": 1}, {"load_control": "throttle_new"}, {"candidate_pool": 1}]


@pytest.mark.parametrize("given", RESTRICTING)
@pytest.mark.parametrize("selection", rules.WHOLE_POOL)
def test_they_change_no_draw_of_such_a_rule(selection, given):
    assert drawn(selection=selection, **given) == drawn(selection=selection)


@pytest.mark.parametrize("given", RESTRICTING[:2])
def test_they_change_draws_of_others(given):
    assert drawn(selection="srl", **given) != drawn(selection="srl")


@pytest.mark.parametrize("given", [*RESTRICTING[:2], {"fill_with_not_due": False}, {"spacing": "fsrs"}])
@pytest.mark.parametrize("selection", ["uniform", "fifo", "balanced"])
def test_they_change_no_draw_from_a_finite_pool(selection, given):
    assert drawn(True, selection=selection, **given) == drawn(True, selection=selection)


@pytest.mark.parametrize("given", [{"history_by": "visits"}, {"history_half_life": 0.5}])
def test_the_discount_changes_draws_only_of_rules_that_read_history(given):
    for selection in ("srl", "signal", "greso"):
        assert drawn(selection=selection, **given) == drawn(selection=selection)
    for selection in rules.READ_HISTORY:
        assert drawn(selection=selection, **given) != drawn(selection=selection)


# --- groups of one --------------------------------------------------------------------------------


def test_rules_that_need_a_group_are_refused_with_groups_of_one():
    for name, by_rule in OF_SPREAD.items():
        for rule in by_rule:
            (line,) = faults(**{name: rule})
            assert line.startswith(f"replay_{name} = {rule!r} with group_size = 1; expected ")
            assert faults(ONE._replace(group_size=2), **{name: rule}) == []
    assert faults(selection="greso") == [
        "replay_selection = 'greso' with group_size = 1; expected 'signal', 'mopps' or 'spo', which read the history "
        "of each prompt, or 'uniform': one episode is always silent, so that draws would go by the number of visits"
    ]
    unused = ONE._replace(may_revisit=False, may_reuse=False)
    assert faults(unused, selection="greso", reuse_selection="exit") == []
    expected = {"signal", "mopps", "spo", "uniform", "srl", "fifo", "hardest", "nll_surprise", "difficulty_pool"}
    assert [rule for rule in expected if faults(selection=rule)] == []
    assert faults(selection="signal", reuse_selection="per") == []  # by the surprise under today's baseline


def test_more_successes_than_a_group_can_have_are_refused():
    (line,) = faults(selection="rlep")
    assert line == (
        "replay_selection = 'rlep' with group_size = 1; expected rlep_min_success of at most 1, not 2: no group has "
        "more successes, so that all draws would be uniform"
    )
    assert faults(selection="rlep", selection_config={"rlep_min_success": 1}) == []
    (line,) = faults(reuse_selection="rlep")
    assert line.startswith("replay_reuse_selection = 'rlep' with group_size = 1; expected rlep_min_success of at most")
    own = {"reuse_selection": "rlep", "reuse_selection_config": {"rlep_min_success": 5}}
    assert "at most 4, not 5" in faults(ONE._replace(group_size=4), **own)[0]
    assert faults(ONE._replace(group_size=5), **own) == []


def test_strategies_and_measures_of_spread_are_refused_with_groups_of_one():
    (line,) = faults(selection="repo", selection_config={"repo_strategy": "max_variance"})
    assert line.startswith("replay_selection = 'repo' with group_size = 1 and repo_strategy = 'max_variance'; ")
    assert faults(selection="repo") == []
    (line,) = faults(diversity_bonus="mean1")
    assert line.startswith("replay_diversity_bonus = 'mean1' with group_size = 1; expected None: ")
    for acts in ({"diversity_coeff": 0.5}, {"eviction": "least_diverse"}):
        (line,) = faults(diversity_parts=("variance",), **acts)
        assert line.startswith("replay_diversity_parts = ('variance',) with group_size = 1; expected other parts, such")
        assert said(ONE, diversity_parts=("novelty", "variance"), **acts) == [
            "replay_diversity_parts has 'variance' with group_size = 1: the rewards of one episode have none, so that "
            "this part is the same for all items; expected ('novelty',)"
        ]
        assert said(ONE, diversity_parts=("variance",), **acts) == []  # an error, not a warning too
        assert faults(diversity_parts=("variance", "novelty"), **acts) == []
        assert said(diversity_parts=("variance",), **acts) == []
    assert faults(diversity_parts=("variance",)) == said(ONE, diversity_parts=("variance", "novelty")) == []


def test_with_groups_of_one_these_rules_tell_no_item_from_another():
    """Items that earned 0, 1 and both in turn have equal weights, and `greso` counts their visits only."""
    with closing(a_buffer(min_graded=1, selection="greso", surprise=Surprise(1, 1.0))) as buffer:
        for now in range(1, 7):
            rewards = {0: 0.0, 1: 1.0, 2: float(now % 2)}
            buffer.add([a_group(a_prompt(i), now, i, rewards=[rewards[i % 3]]) for i in range(9)], now)
        slots = buffer.store.slots()
        items, settings = buffer.draws.item_candidates(slots, 8), SelectionSettings()
        assert len({*items.reward.tolist()}) > 1
        for log_weight in (literature.exit_log_weight, literature.per_log_weight, rules.learnability.log_weight):
            assert np.ptp(np.nan_to_num(log_weight(items, settings), neginf=-1.0)) == 0
        assert not ((items.num_success > 0) & (items.num_success < items.group_size)).any()  # exgrpo: all retired
        assert not np.isfinite(literature.rlep_log_weight(items, settings)).any()  # none has two successes
        assert np.ptp(buffer.draws.all_candidates(slots, 8).num_silent) == pytest.approx(0, abs=1e-6)
