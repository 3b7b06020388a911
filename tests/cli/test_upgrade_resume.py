"""srl upgrade --resume: an upgrade that was stopped or killed goes on, and ends as if it had not been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rllib_srl.cli import upgrade
from tests.cli.killing import killed_when
from tests.cli.test_script_upgrade import COMPARE, LOOKUP, TINY, Scripted, ledger, of_kind, scripted, weights_of

PATIENCE_S = 300  # for the first good checkpoint, on two busy cores
GOOD, BETTER = {"lookup": 0.6, "compare": 0.5}, {"lookup": 0.8, "compare": 0.5}
FALLEN = {"lookup": 0.9, "compare": 0.2}
SLIPPING = {"lookup": 0.9, "compare": 0.47}  # 6 of 200 lost, none gained: bad, not harmful


def resumed(monkeypatch: pytest.MonkeyPatch, out: Path, *script: dict) -> int:
    """Go on by a script, whose first attempt is the first of this process."""
    monkeypatch.setattr(Scripted, "script", list(script))
    monkeypatch.setattr(Scripted, "made", [])
    return upgrade.main(["--resume", str(out), "--debug"])


def test_a_stopped_upgrade_goes_on_from_its_last_good_checkpoint_on_its_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    assert scripted(monkeypatch, out, {1: GOOD, 2: FALLEN}, {}) == 130  # it is stopped in the second attempt
    assert f"--resume {out}" in capsys.readouterr().err
    with (out / "ledger.jsonl").open("a") as file:
        file.write('{"kind": "che')  # what a kill leaves of a line
    assert resumed(monkeypatch, out, {2: GOOD, 3: BETTER}) == 0
    began_at = [made.began_at and made.began_at.name for made in Scripted.made]
    assert began_at == ["checkpoint_000001", "checkpoint_000003"]
    attempts = of_kind(out, "attempt")
    assert [attempt["number"] for attempt in attempts] == [1, 2, 3]
    assert [attempt["settings"]["replay_reuse_coeff"] for attempt in attempts] == [1.0, 2.0, 2.0]
    assert len(of_kind(out, "before")) == 2  # of two domains, measured once
    assert json.loads((out / "model" / "shares.json").read_text()) == BETTER
    changes = of_kind(out, "confirm")[0]["changes"]
    assert (changes["lookup"]["before"], changes["lookup"]["change"]) == (0.5, pytest.approx(0.3))


def test_bad_checks_are_counted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert scripted(monkeypatch, out, {1: GOOD, 2: SLIPPING}) == 130  # one bad check of the two that climb
    assert resumed(monkeypatch, out, {2: SLIPPING, 3: BETTER}) == 0
    assert [line["step"]["action"] for line in of_kind(out, "check")] == ["accept", "wait", "wait", "accept"]


def test_what_was_stopped_before_its_first_checkpoint_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def stop(self: Scripted, domains: list[str], num_prompts: int) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Scripted, "fill_memory", stop)
        assert scripted(patched, out, {}) == 130
    monkeypatch.setattr(upgrade, "start_ray", lambda verbose: None)
    monkeypatch.setattr(upgrade, "Attempt", Scripted)
    assert resumed(monkeypatch, out, {1: GOOD, 2: GOOD, 3: BETTER}) == 0
    assert [attempt["goes_on_from"] for attempt in of_kind(out, "attempt")] == [None, None]


def test_a_halted_upgrade_only_delivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked = tmp_path / "out", []

    def stop(self: Scripted, directory: Path) -> Path:
        raise KeyboardInterrupt

    falls = [{1: BETTER, 2: FALLEN}, *[{2: FALLEN}] * 3]
    with monkeypatch.context() as patched:
        patched.setattr(Scripted, "export_to_huggingface", stop)
        assert scripted(patched, out, *falls) == 130
    monkeypatch.setattr(upgrade, "start_ray", asked.append)
    monkeypatch.setattr(upgrade, "Attempt", Scripted)
    assert resumed(monkeypatch, out) == 0
    assert len(of_kind(out, "attempt")) == 4 and len(Scripted.made) == 1  # that of the last gates
    assert json.loads((out / "model" / "shares.json").read_text()) == BETTER


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no ledger.jsonl; expected the directory of an upgrade"),
        ("", "is damaged (ValueError: it is empty)"),
        ("{\n", "is damaged (JSONDecodeError"),
        ('{"kind": "check"}\n', "is damaged (ValueError: its first line is 'check')"),
        ('{"kind": "start", "checkpoint": null}\n', "is damaged (KeyError: 'new')"),
    ],
)
def test_a_directory_that_holds_no_upgrade_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "ledger.jsonl").write_text(content)
    assert upgrade.main(["--resume", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


def test_a_finished_upgrade_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    out = tmp_path / "out"
    assert scripted(monkeypatch, out, {1: GOOD, 2: GOOD, 3: BETTER}) == 0
    num_lines = len(ledger(out))
    assert upgrade.main(["--resume", str(out)]) == 1
    assert f"--resume {out} is finished: {out / 'model'} is its model" in capsys.readouterr().err
    assert len(ledger(out)) == num_lines


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "expected a model, a checkpoint or a run's directory, or --resume DIR"),
        (["tiny", "--resume", "x", "--lr", "1e-4"], "expected no others, not what, lr"),
        (["--resume", "x", "--max_drop", "0.1"], "expected no others, not max_drop"),
    ],
)
def test_nothing_goes_beside_resume(capsys: pytest.CaptureFixture, flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        upgrade.main(flags)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_upgrade_delivers_the_model_that_an_unkilled_one_does(ray_here, tmp_path: Path) -> None:
    flags = ["tiny", *TINY, "--on", COMPARE, "--keep", LOOKUP, "--lr", "1e-5", "--iterations", "8", "--max_drop", "0.9"]
    flags += ["--min_gain", "0", "--confidence", "0.5", "--check_prompts", "64", "--confirm_prompts", "64"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended = upgrade.main([*flags, "--out", str(whole), "--debug"])
    command = ["-m", "rllib_srl.cli", "upgrade", *flags, "--out", str(killed)]
    killed_when(command, lambda: (killed / "ledger.jsonl").exists() and bool(of_kind(killed, "check")), PATIENCE_S)
    num_checks = len(of_kind(killed, "check"))
    assert 1 <= num_checks < 8 and not of_kind(killed, "ended")
    assert upgrade.main(["--resume", str(killed), "--debug"]) == ended
    at = [line["iteration"] for line in of_kind(killed, "check")]
    assert at[num_checks:] == list(range(at[num_checks - 1] + 1, 9)), at  # no iteration with a good check is repeated
    assert of_kind(whole, "confirm")[0]["changes"] == of_kind(killed, "confirm")[0]["changes"]
    assert weights_of(whole / "model") == weights_of(killed / "model") != {}
