"""srl compare: the paired difference and the flipped prompts, by hand and on a real run."""

import json
from pathlib import Path

import numpy as np
import pytest

from rllib_srl.cli import compare
from rllib_srl.cli.compare import Answer, Answers, Comparison, as_json, lines_of, refuse_different, sides_of
from rllib_srl.cli.shared.settings import SettingsError
from rllib_srl.people.gates import paired_interval
from rllib_srl.studies.seeds import bootstrap_interval


def played(is_right: dict[str, bool], text: str = "7") -> Answers:
    """Return answers to prompts named "a1": domain "a", prompt 1."""
    found = {}
    for name, right in is_right.items():
        turns = [{"role": "environment", "text": f"Question {name}\nAnswer:"}, {"role": "policy", "text": f" {text}\n"}]
        turns.append({"role": "environment", "text": "Thank you."})
        found[name] = Answer("env", name, name[0], right, float(right), turns)
    return found


def both() -> Comparison:
    first = {"a1": True, "a2": True, "a3": False, "a4": True, "b1": False, "b2": False, "b3": True}
    second = {"a1": False, "a2": True, "a3": False, "a4": False, "b1": True, "b2": False, "b4": True}
    return Comparison(played(first, "old"), played(second, "new\x1b[31m"), 9)


def test_only_prompts_that_both_answered_count() -> None:
    found = both()
    assert [a.prompt_id for a, _ in found.pairs] == ["a1", "a2", "a3", "a4", "b1", "b2"]
    assert found.num_failed == 3  # of 9: b3, b4 and one that nobody answered
    total = found.change()
    assert (total.num, total.num_lost, total.num_gained, total.before, total.after) == (6, 2, 1, 3 / 6, 2 / 6)
    assert total.change == pytest.approx(-1 / 6) and (total.low, total.high) == paired_interval(6, 2, 1, 0.95)
    assert {domain: found.change(domain).change for domain in found.domains} == {"a": -0.5, "b": 0.5}
    flipped = {(domain, right): found.flipped(domain, right) for domain in "ab" for right in "AB"}
    names = {where: [a.prompt_id for a, _ in pairs] for where, pairs in flipped.items()}
    assert names == {("a", "A"): ["a1", "a4"], ("a", "B"): [], ("b", "A"): [], ("b", "B"): ["b1"]}


def test_the_text_has_the_table_the_verdict_and_a_few_flipped_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "NUM_SHOWN", 1)
    text = "\n".join(lines_of(both()))
    assert "3 prompts failed on one side or both, not counted" in text
    assert "no difference is shown: the interval contains 0" in text
    assert "a: only A is right (2)\n  Question a1 Answer:\n    A  old\n    B  new\\x1b[31m\nb: only B" in text
    names = [f"a{at}" for at in range(40)]
    wrong, right = (played(dict.fromkeys(names, is_right)) for is_right in (False, True))
    assert "B is better: the interval excludes 0" in list(lines_of(Comparison(wrong, right, 40)))
    assert "A is better: the interval excludes 0" in list(lines_of(Comparison(right, wrong, 40)))
    with pytest.raises(ValueError, match="none of 12 held-out prompts was answered by both sides"):
        Comparison(played({"a1": True}), played({"a2": True}), 12)


def test_partial_credit_is_compared_by_mean_reward() -> None:
    """Differences of .5, .25, 0 and .25, all of them below what passes: accuracy shows nothing."""
    sides = []
    for rewards in ((0.0, 0.25, 0.5, 0.0), (0.5, 0.5, 0.5, 0.25)):
        names = [f"a{at}" for at in range(len(rewards))]
        plain = played(dict.fromkeys(names, False))
        sides.append({name: plain[name]._replace(reward=reward) for name, reward in zip(names, rewards, strict=True)})
    found = Comparison(*sides, 4)
    low, high = bootstrap_interval(np.array([0.5, 0.25, 0.0, 0.25]), 0.95)
    line = f"mean reward: A 0.188, B 0.438, B - A +0.250  [{low:+.3f}, {high:+.3f}]"
    assert list(lines_of(found))[1:] == ["no difference is shown: the interval contains 0", line]
    assert as_json(found)["mean_rewards"] == {"a": 0.1875, "b": 0.4375}
    assert both().rewards is None and as_json(both())["mean_rewards"] is None


def test_settings_of_the_prompts_must_be_equal_or_given() -> None:
    own = [{"env": "compare", "lr": 1.0, "max_turns": 4}, {"env": "lookup", "lr": 2.0}]
    with pytest.raises(SettingsError) as caught:
        refuse_different(own, {})
    lines = str(caught.value).splitlines()
    assert lines[1:] == ["  env = 'compare' in A, 'lookup' in B", "  max_turns = 4 in A, 8 in B"]
    refuse_different(own, {"env": "compare", "max_turns": 8})


def test_two_models_share_a_seed_and_need_an_environment() -> None:
    given = {"env": "compare", "engine": "transformers", "num_env_runners": 0, "max_episode_tokens": 256}
    first, second = sides_of(("tiny", "tiny"), given | {"max_turn_tokens": 8}, trust=False)
    assert first.values == second.values and first.values["seed"] == compare.SEED
    with pytest.raises(SettingsError, match="env"):
        sides_of(("tiny", "tiny"), {}, trust=False)


@pytest.mark.slow
def test_a_run_is_compared_with_its_start(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    report = tmp_path / "compared.json"
    flags = ["--evaluation_duration", "24", "--json", str(report), "--debug"]
    assert compare.main(["tiny", str(trained), *flags]) == 0
    shown, figures = capsys.readouterr().out, json.loads(report.read_text())
    assert "B - A, 95 % interval" in shown and f"B  {trained / 'checkpoint_000002'}" in shown
    total = figures["total"]
    assert (total["num"], figures["num_failed"]) == (24, 0)
    assert len(figures["flipped"]) == total["num_lost"] + total["num_gained"]
    assert total["low"] <= total["change"] <= total["high"]
