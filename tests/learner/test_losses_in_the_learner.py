"""Each name of the loss acts in the real learner: its gradient is that of the slow loss, and not that without it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rllib_srl.algorithm.loss_validation import WITHOUT_CLIP_BOUNDS
from rllib_srl.algorithm.validation import config_errors
from rllib_srl.losses.policy import CLIP_RULES
from rllib_srl.losses.settings import PRESETS
from tests.losses import slow_loss
from tests.small_envs import small_config
from tests.small_learner import GROUPS, Recording, advantages_of, learner_group, make_group, relative_gap, update

STORED = [make_group(11, 5, [6, 2]), make_group(12, 9, [3, 1, 12])]


@pytest.fixture(scope="module")
def learners(random_llama_dir, tmp_path_factory, ray_here):
    """Return a learner whose weights have left the reference and never move."""
    config = small_config(random_llama_dir, tmp_path_factory.mktemp("names"))
    config.learners(learner_class=Recording).env_runners(max_episode_tokens=128, max_turns=2, max_turn_tokens=9)
    config.training(optimizer_name="sgd", lr=0.0, grad_clip=None, micro_batch_tokens=60, kl_coeff=1.0)
    config.replay(max_logp_gap=None, capacity=100)
    group = learner_group(config)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in group._learner.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    yield group
    group.shutdown()


@pytest.fixture
def gradient(learners):
    """Return a function: settings -> the learner's gradient, its statistics, and a function that gives the slow one."""
    learner = learners._learner
    kept = learner.config

    def run(played=GROUPS, stored=(), **given):
        replay = {name.removeprefix("replay_"): given.pop(name) for name in list(given) if name.startswith("replay_")}
        off = {"kl_coeff": 0.0}
        if given.get("clip_rule") in WITHOUT_CLIP_BOUNDS:
            given |= dict.fromkeys(("clip_low", "clip_high"), "preset")
        learner.config = kept.copy(copy_frozen=False).training(**{**off, **given})
        learner.config.replay(**replay)
        assert config_errors(learner.config) == []
        settings = learner.config.loss_settings()
        arguments = (settings.aggregation, settings.longest_answer)
        names = dict(zip(("aggregation", "longest"), arguments, strict=True))
        (got,), stats = update(learners, played, stored, **names)
        return got, stats, lambda: slowly(learner, settings, played, stored)

    yield run
    learner.config, learner.settings = kept, kept.loss_settings()


def slowly(learner, settings, played, stored):
    groups = [(g, False) for g in played] + [(g, True) for g in stored]
    reference = learner.reference.model if settings.kl_coeff else None
    episodes = [
        slow_loss.told(learner.model, reference, group, g, float(advantages_of(group)[g]), is_reused)
        for group, is_reused in groups
        for g in range(group.size)
    ]
    return slow_loss.gradient(learner.model, settings, episodes)


# The behaviour policy of these groups is off by 0.3 nats a token: narrow clips bite in the first epoch already.
BYPASS = {"ratio_anchor": "bypass", "correction": "none", "clip_low": 0.2, "clip_high": 0.25}
BARE = {"correction": "none"}
PLAYED = [  # what no preset below sets
    ("clip_rule dual", BYPASS, {"clip_rule": "dual", "dual_clip": 1.1}),
    ("clip_rule two_sided", BYPASS, {"clip_rule": "two_sided", "clip_delta": 1.3}),
    ("clip_rule sapo", BYPASS, {"clip_rule": "sapo"}),
    ("clip_low", BYPASS, {"clip_low": 0.05}),
    ("clip_high", BYPASS, {"clip_high": 0.05}),
    ("ratio_anchor bypass", BARE, {"ratio_anchor": "bypass"}),
    ("ratio_level sequence", BYPASS, {"ratio_level": "sequence"}),
    ("longest_answer", {**BARE, "aggregation": "constant"}, {"longest_answer": 5}),
    ("correction tis", BARE, {"correction": "tis", "tis_clip_max": 1.1}),
    ("correction sequence_tis", BARE, {"correction": "sequence_tis", "tis_clip_max": 1.1}),
    ("correction mis", BARE, {"correction": "mis", "correction_window": (0.8, 1.2)}),
    ("correction sequence_mask", BARE, {"correction": "sequence_mask", "correction_window": (0.5, 3.0)}),
    ("correction geometric_mask", BARE, {"correction": "geometric_mask", "sequence_window": (0.4, 0.85)}),
    ("entropy_coeff", BARE, {"entropy_coeff": 1.0}),
    ("kl_estimator k2", BARE, {"kl_coeff": 1.0, "kl_estimator": "k2"}),
    ("kl_estimator k3", BARE, {"kl_coeff": 1.0, "kl_estimator": "k3"}),
    ("kl_estimator k3_k2", {**BARE, "kl_coeff": 1.0, "kl_estimator": "k3"}, {"kl_estimator": "k3_k2"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("without", "change"), [row[1:] for row in PLAYED], ids=[row[0] for row in PLAYED])
def test_a_name_acts_on_played_tokens(gradient, without, change):
    before, *_ = gradient(**without)
    after, _, slow = gradient(**{**without, **change})
    assert relative_gap(after, slow()) < 1e-5
    assert relative_gap(after, before) > 1e-3


REUSED = [
    ("kl_on_reused", {"kl_coeff": 1.0}, {"kl_on_reused": "weighted"}),
    ("aggregation sequence_mean", {}, {"aggregation": "sequence_mean"}),
    ("ratio_level geometric", {"clip_low": 0.1}, {"ratio_level": "geometric"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("without", "change"), [row[1:] for row in REUSED], ids=[row[0] for row in REUSED])
def test_a_name_acts_on_reused_tokens(gradient, without, change):
    both = {"played": GROUPS[:1], "stored": STORED, "correction": "none", "clip_high": 0.1}
    before, *_ = gradient(**{**both, **without})
    after, _, slow = gradient(**{**both, **without, **change})
    assert relative_gap(after, slow()) < 1e-5
    assert relative_gap(after, before) > 1e-3


def doubled(tokens, settings):
    loss_N, weight_N = CLIP_RULES["none"](tokens, settings)
    return 2 * loss_N, 2 * weight_N


def halved(rho, settings):
    return torch.full_like(rho("token"), 0.5)


def test_rules_by_import_path_reach_the_gradient(gradient, monkeypatch):
    """A loss of twice "none" has twice its gradient, by import path and by a registered name; a weight of .5 half."""
    plain, *_ = gradient(**BARE, clip_rule="none")
    twice = {name: 2 * one for name, one in plain.items()}
    assert relative_gap(gradient(**BARE, clip_rule=f"{__name__}:doubled")[0], twice) < 1e-6
    monkeypatch.setitem(CLIP_RULES, "twice", doubled)
    assert relative_gap(gradient(**BARE, clip_rule="twice")[0], twice) < 1e-6
    both = gradient(clip_rule=f"{__name__}:doubled", correction=f"{__name__}:halved")[0]
    assert relative_gap(both, plain) < 1e-6


@pytest.mark.parametrize("loss", list(PRESETS))
def test_a_preset_has_the_gradient_of_its_row(gradient, loss):
    off = {"ratio_anchor": "bypass"} | ({} if loss in ("gspo", "mis_po") else {"correction": "none"})
    window = {"correction": "mis_po", "sequence_window": (0.4, 0.85)} if loss == "mis_po" else {}
    kl = {"kl_coeff": "preset"}
    for given in ({**kl, **window}, {**kl, **window, **off}):
        got, _, slow = gradient(loss=loss, **given)
        assert relative_gap(got, slow()) < 1e-5


def test_a_kl_in_the_reward_is_measured_and_not_in_the_loss(gradient):
    bare, *_ = gradient(**BARE)
    for estimator in ("k2", "k3"):
        kl = {"kl_coeff": 1.0, "kl_estimator": estimator}
        rewarded, stats, _ = gradient(**BARE, **kl, kl_in_reward=True)
        lost, lost_stats, _ = gradient(**BARE, **kl)
        assert relative_gap(rewarded, bare) == 0 and relative_gap(lost, bare) > 1e-2
        assert stats["kl"] == lost_stats["kl"] > 0


@pytest.mark.parametrize("given", [{}, {"correction": "mis_po"}, {"correction": "mis"}])
@pytest.mark.parametrize("side", ["played", "stored"])
def test_a_log_prob_that_is_not_finite_skips_the_step_and_is_counted(gradient, given, side):
    bad = GROUPS[0].behaviour_logp_N.copy()
    bad[np.flatnonzero(GROUPS[0].loss_mask_N)[1]] = -np.inf
    groups = {"played": GROUPS[1:], side: [replace(GROUPS[0], behaviour_logp_N=bad)]}
    got, stats, _ = gradient(**groups, **given)
    assert (stats["num_nonfinite_logps"], stats["num_nonfinite_gradients"]) == (1, 1)
    assert all(np.isnan(array).any() for array in got.values())


def test_masked_tokens_are_reported(gradient):
    _, stats, _ = gradient(correction="mis", correction_window=(0.999, 1.001))
    assert 0.9 < stats["masked"] <= 1
    assert (stats["num_nonfinite_logps"], stats["num_nonfinite_gradients"]) == (0, 0)
