"""Rules by name: those of `contrib` are found by file, and what goes wrong names the rule, or the files there are."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rllib_srl import contrib
from rllib_srl.batch.advantages import ADVANTAGES, group_relative
from rllib_srl.common.rules import RuleError, Rules, contrib_files
from rllib_srl.learner.objective import surrogate_of
from rllib_srl.losses.policy import CLIP_RULES, CORRECTIONS, correction_of
from rllib_srl.losses.settings import LossSettings


def test_a_method_of_contrib_is_loaded_when_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doubling.py").write_text("def doubling(x):\n    return 2 * x\n\ndef tripling(x):\n    return 3 * x\n")
    monkeypatch.setattr(contrib, "__path__", [*contrib.__path__, str(tmp_path)])
    monkeypatch.setattr(contrib.__spec__, "submodule_search_locations", contrib.__path__)
    rules = Rules("kind", {"single": lambda x: x})
    assert "contrib.doubling" in contrib_files()
    assert "rllib_srl.contrib.doubling" not in sys.modules
    assert rules.named("contrib.doubling")(4) == 8
    assert rules.named("contrib.doubling:tripling")(4) == 12
    assert rules.error("doubling") == "expected one of 'single', 'module:rule'; did you mean 'contrib.doubling'?"
    listed = ", ".join(map(repr, contrib_files()))
    assert rules.error("contrib.dubling") == f"expected one of {listed}; did you mean 'contrib.doubling'?"
    assert "has no 'other'; it has doubling, tripling" in rules.error("contrib.doubling:other")
    sys.modules.pop("rllib_srl.contrib.doubling")


def test_an_exception_of_a_users_rule_names_the_rule_and_its_inputs() -> None:
    def wrong(tokens: object) -> float:
        return tokens.ratios  # type: ignore[attr-defined]

    def full(tokens: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    rules = Rules("kind", {"own": lambda tokens: tokens.ratios}, inputs="Tokens has a, b")
    rules["wrong"], rules["full"] = wrong, full
    with pytest.raises(RuleError) as caught:
        rules.call("wrong", 1)
    assert str(caught.value) == (
        "kind = 'wrong' raised AttributeError: 'int' object has no attribute 'ratios'; Tokens has a, b"
    )
    with pytest.raises(torch.OutOfMemoryError):  # the learner reacts to it
        rules.call("full", 1)
    with pytest.raises(AttributeError):
        rules.call("own", 1)


def test_the_fields_of_clip_rules_and_the_name_of_an_advantage_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CLIP_RULES.inputs == "Tokens has ratio_N, advantage_N, logp_N"
    monkeypatch.setitem(ADVANTAGES, "wrong", lambda rewards_G: rewards_G["mean"])
    with pytest.raises(RuleError, match="^advantage = 'wrong' raised IndexError: only integers"):
        group_relative([np.array([0.0, 1.0])], "wrong")


def test_a_result_of_another_shape_is_refused_with_the_name_of_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    logp_N, episode_N = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    batch = {"advantage": torch.ones(3), "episode": episode_N}
    wanted = r"expected \(loss_N, weight_N\), two tensors of shape \(3,\)$"
    for name, found, what in (
        ("mean", (torch.tensor(0.0), logp_N), r"\(Tensor of shape \(\), Tensor of shape \(3,\)\)"),
        ("one", logp_N, r"Tensor of shape \(3,\)"),
        ("nothing", None, "NoneType"),
    ):
        monkeypatch.setitem(CLIP_RULES, name, lambda *_, found=found: found)
        with pytest.raises(RuleError, match=f"^clip_rule = '{name}' returned {what}; {wanted}"):
            surrogate_of(batch, logp_N, logp_N, LossSettings(clip_rule=name))  # type: ignore[arg-type]
    monkeypatch.setitem(CORRECTIONS, "sum", lambda rho, _: rho("token").sum())
    with pytest.raises(RuleError, match=r"correction = 'sum' returned Tensor of shape \(\); expected a tensor of"):
        correction_of(LossSettings(correction="sum"), logp_N, logp_N, episode_N)
    monkeypatch.setitem(ADVANTAGES, "mean", lambda rewards_G: rewards_G.mean())
    with pytest.raises(RuleError, match="^advantage = 'mean' returned float64.*; expected 2 numbers, one a reward$"):
        group_relative([np.array([0.0, 1.0])], "mean")
