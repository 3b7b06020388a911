"""srl upgrade on the tiny model: an upgrade, a harmful training that is undone, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from rllib_srl.cli import upgrade
from rllib_srl.cli.shared.settings import SettingsError
from rllib_srl.cli.upgrading import order as upgrade_order
from rllib_srl.engine.models import local_model
from rllib_srl.storage.checkpoints import seal

COMPARE, LOOKUP = "compare={num_shots: 0}", "lookup={num_shots: 0}"
SUMS = "chain_sum={num_shots: 0, config: {max_terms: 2, max_digits: 2}, pool_size: 8192}"
TINY = [
    *("--engine", "transformers", "--num_env_runners", "0", "--compute_dtype", "float32", "--seed", "5"),
    *("--max_turn_tokens", "8", "--max_episode_tokens", "256", "--num_prompts_per_batch", "4", "--group_size", "4"),
    *("--check_every", "1", "--seed_prompts", "8"),
]
SMALL = [  # an upgrade that a random model learns in seconds
    *("--on", "tests.small_worlds:Even={num_prompts: 80}", "--keep", "tests.small_worlds:Known={num_prompts: 80}"),
    *("--engine", "transformers", "--num_env_runners", "0", "--compute_dtype", "float32", "--seed", "1"),
    *("--max_turns", "1", "--max_turn_tokens", "3", "--max_episode_tokens", "64"),
    *("--num_prompts_per_batch", "8", "--group_size", "8", "--iterations", "6", "--check-every", "3"),
    *("--max_kl", "20", "--max_drop", "0.3", "--check_prompts", "16", "--confirm_prompts", "40"),
]


def ledger(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]


def of_kind(directory: Path, kind: str) -> list[dict]:
    return [line for line in ledger(directory) if line["kind"] == kind]


def weights_of(directory: Path) -> dict[str, str]:
    files = sorted(directory.glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Scripted:
    """Stands in for an attempt: "weights" are the script's share of right answers after each iteration, by domain."""

    script: list[dict[int, dict[str, float]]] = []  # of each attempt: iteration -> domain -> share
    made: list[Scripted] = []

    def __init__(self, config, directory: Path, checkpoints: Path, progress, verbose: bool, trust: bool) -> None:
        self.algo, self.checkpoints = self, checkpoints
        self.iteration, self.shares = 0, dict.fromkeys(("lookup", "compare"), 0.5)
        self.after = self.script[len(self.made)] if len(self.made) < len(self.script) else {}
        self.made.append(self)
        self.began_at: Path | None = None

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *what: object) -> None: ...

    def answers(self, prompts: list) -> dict[str, bool]:
        num_right = round(100 * self.shares[prompts[0].domain])  # of each hundred, the first ones
        return {prompt.key: at % 100 < num_right for at, prompt in enumerate(prompts)}

    def fill_memory(self, domains: list[str], num_prompts: int) -> int:
        return num_prompts

    def train(self, last: int, request: object) -> tuple[list[float], int, str]:
        if last not in self.after:
            raise KeyboardInterrupt
        self.iteration = last
        self.shares = self.after[last]
        return [0.1], 0, ""

    def save(self) -> Path:
        place = self.checkpoints / f"checkpoint_{self.iteration:06d}"
        place.mkdir(parents=True)
        (place / "shares.json").write_text(json.dumps(self.shares))
        seal(place)
        return place

    def back_to(self, checkpoint: Path) -> None:
        self.began_at = checkpoint
        self.shares = json.loads((checkpoint / "shares.json").read_text())
        self.iteration = int(checkpoint.name.rsplit("_", 1)[1])

    def export_to_huggingface(self, directory: Path) -> Path:
        directory.mkdir()
        (directory / "shares.json").write_text(json.dumps(self.shares))
        return directory


def scripted(monkeypatch: pytest.MonkeyPatch, out: Path, *script: dict) -> int:
    """Upgrade by a script; the last attempt is that of the last gates."""
    monkeypatch.setattr(upgrade, "start_ray", lambda verbose: None)
    monkeypatch.setattr(upgrade, "Attempt", Scripted)
    monkeypatch.setattr(Scripted, "script", list(script))
    monkeypatch.setattr(Scripted, "made", [])
    sizes = ["--iterations", "3", "--check_prompts", "200", "--confirm_prompts", "200", "--out", str(out)]
    return upgrade.main(["tiny", *TINY, "--on", LOOKUP, "--keep", COMPARE, *sizes, "--debug"])


def test_a_fall_goes_back_to_the_last_good_checkpoint_and_the_next_rung_may_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    good, fallen = {"lookup": 0.6, "compare": 0.5}, {"lookup": 0.9, "compare": 0.2}
    better = {"lookup": 0.8, "compare": 0.5}
    assert scripted(monkeypatch, out, {1: good, 2: fallen}, {2: good, 3: better}) == 0
    rungs = [(line["step"]["action"], line["step"]["rung"]) for line in of_kind(out, "check")]
    assert rungs == [("accept", ""), ("climb", "weight"), ("accept", ""), ("accept", "")]
    began_at = [made.began_at and made.began_at.name for made in Scripted.made]
    assert began_at == [None, "checkpoint_000001", "checkpoint_000003"]
    assert json.loads((out / "model" / "shares.json").read_text()) == better
    assert of_kind(out, "attempt")[1]["settings"]["replay_domain_quotas"] == {"compare": 2.0}


def test_one_bad_check_waits_and_what_was_never_good_again_is_not_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    good, slipping = {"lookup": 0.7, "compare": 0.5}, {"lookup": 0.9, "compare": 0.47}  # 6 of 200 lost, none gained
    assert scripted(monkeypatch, out, {1: good, 2: good, 3: slipping}) == 0
    assert [line["step"]["action"] for line in of_kind(out, "check")] == ["accept", "accept", "wait"]
    assert json.loads((out / "model" / "shares.json").read_text()) == good


@pytest.mark.parametrize(
    ("reached", "gate"),
    [({"lookup": 0.53, "compare": 0.5}, "gained lookup"), ({"lookup": 0.9, "compare": 0.49}, "kept compare")],
)
def test_checks_let_through_what_the_last_gates_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, reached: dict, gate: str
) -> None:
    out = tmp_path / "out"
    assert scripted(monkeypatch, out, {1: reached, 2: reached, 3: reached}) == upgrade.UNCHANGED
    assert weights_of(out / "model") == weights_of(local_model("tiny")) != {}
    (reason,) = ledger(out)[-1]["reasons"]
    assert reason.startswith(gate) and reason in capsys.readouterr().out


@pytest.mark.slow
def test_harm_is_seen_undone_and_never_delivered(ray_here, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, model = tmp_path / "out", local_model("tiny")
    flags = ["--on", LOOKUP, "--keep", COMPARE, "--lr", "0.5", "--iterations", "3", "--debug"]
    sizes = ["--check_prompts", "24", "--confirm_prompts", "24", "--out", str(out)]
    assert upgrade.main([str(model), *TINY, *flags, *sizes]) == upgrade.UNCHANGED
    assert weights_of(out / "model") == weights_of(model) != {}
    assert {path.name for path in model.iterdir()} == {path.name for path in (out / "model").iterdir()}
    checks = of_kind(out, "check")
    # One iteration of each attempt is enough to see it, and the ladder is climbed to its end.
    assert [check["step"]["rung"] for check in checks] == ["weight", "kl", "share", "halt"]
    assert [check["iteration"] for check in checks] == [1, 1, 1, 1]
    assert all("harmful" in {verdict["outcome"] for verdict in check["verdicts"]} for check in checks)
    start = str(out / "checkpoints" / "checkpoint_000000")
    attempts = of_kind(out, "attempt")
    assert [attempt["goes_on_from"] for attempt in attempts] == [None, start, start, start]
    assert [attempt["settings"]["replay_reuse_coeff"] for attempt in attempts] == [1.0, 2.0, 2.0, 2.0]
    assert [attempt["settings"]["kl_coeff"] for attempt in attempts] == [0.1, 0.1, 0.2, 0.2]
    assert ledger(out)[-1]["is_upgraded"] is False
    assert "UNCHANGED" in capsys.readouterr().out and not of_kind(out, "confirm")


@pytest.mark.slow
def test_a_better_model_is_delivered(ray_here, random_llama_dir: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert upgrade.main([str(random_llama_dir), *SMALL, "--lr", "1e-3", "--out", str(out), "--debug"]) == 0
    assert "UPGRADED" in capsys.readouterr().out
    confirmed = {verdict["gate"]: verdict for verdict in of_kind(out, "confirm")[0]["verdicts"]}
    assert [verdict["outcome"] for verdict in confirmed.values()] == ["passed"] * 3
    assert confirmed["kept"]["domain"] == "tests.small_worlds:Known"  # whose answers are paid whatever they are
    assert "+0.0 points" in confirmed["kept"]["reason"] and "on 40 prompts" in confirmed["kept"]["reason"]
    result = ledger(out)[-1]
    assert (result["is_upgraded"], result["checkpoint"]) == (True, str(out / "checkpoints" / "checkpoint_000006"))
    assert weights_of(out / "model") != weights_of(random_llama_dir)
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == ["checkpoint_000006"]
    # What was trained on: new prompts of the one world, rehearsals of the other, which filled the memory.
    assert of_kind(out, "memory")[0]["num_groups"] == 64
    numbers = [json.loads(line) for line in (out / "attempt_1" / "metrics.jsonl").read_text().splitlines()]
    assert numbers[-1]["replay/num_revisits"] == 7  # of 6 * 8 * (1 - sqrt(.7)) = 7.84, rounded down
    assert {line["replay/num_revisits_short"] for line in numbers} == {0}


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (["./nowhere", "--on", "lookup", "--keep", "compare"], ["model directory ./nowhere does not exist"]),
        (["tiny", "--on", "compare", "--keep", "lookup", "compare"], ["'compare' is in both --on and --keep"]),
        (["tiny", "--on", "compare", "--keep", "lookup", "lookup"], ["'lookup' is in --keep twice"]),
        (["tiny", "--on", "lookup", "--keep", "nowhere"], ["environment 'nowhere' is unknown"]),
        (["tiny", "--on", "lookup", "--keep"], ["--keep is empty; expected the environment of at least one"]),
        (["tiny", "--keep", "compare"], ["--on is missing"]),
        (["tiny", "--on", "compare={num_numbers: 1}", "--keep", "lookup"], ["num_numbers = 1; expected 2 to 6"]),
        (["tiny", "--on", "compare=3", "--keep", "lookup"], ["expected its settings as ENV={name: value, ...}"]),
        (
            ["tiny", "--on", "lookup", "--keep", "nowhere", "--max_drop", "1", "--patience", "1.5", "--kl_coeff", "0"],
            ["max_drop = 1; expected a number from", "patience = 1.5; expected an integer", "kl_coeff = 0", "nowhere"],
        ),
        (["tiny", "--on", "lookup", "--keep", "compare", "--group_size", "1"], ["group_size = 1; expected"]),
        (["tiny", "--on", "lookup", "--keep", "compare", "--replay_capacity", "0"], ["replay_capacity = 0; expected"]),
        (["tiny", "--on", "lookup", "--keep", "compare", "--iterations", "0"], ["iterations = 0; expected an integer"]),
        (
            ["tiny", "--on", "lookup", "--keep", "chain_sum", "--max_episode_tokens", "512"],
            ["check_prompts = 256; expected at most 11: chain_sum"],
        ),
    ],
)
def test_bad_input_is_one_message_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, flags: list[str], messages: list[str]
) -> None:
    def refuse(verbose: bool) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(upgrade, "start_ray", refuse)
    assert upgrade.main([*flags, "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said and said.count("error:") == 1
    assert all(message in said for message in messages), said
    assert not any(tmp_path.iterdir())


def test_a_directory_that_exists_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert upgrade.main(["tiny", "--on", "lookup", "--keep", "compare", "--out", str(tmp_path)]) == 1
    assert f"--out {tmp_path} exists; expected a new directory" in capsys.readouterr().err


def test_what_the_upgrade_sets_itself_cannot_be_given(tmp_path: Path) -> None:
    settings = tmp_path / "run.yaml"
    settings.write_text("replay_revisit_fraction: 0.5\nkl_reference: ema\n")
    arguments = upgrade.parse(["tiny", "--on", "lookup", "--keep", "compare", "--config", str(settings)])
    with pytest.raises(SettingsError, match="replay_revisit_fraction cannot be set here; use --prior_share"):
        upgrade_order.read_order(arguments)


def test_prompts_of_checks_and_of_the_last_gates_are_held_out_and_apart() -> None:
    limits = ["--check_prompts", "20", "--confirm_prompts", "900", "--seed", "3"]
    arguments = upgrade.parse(["tiny", "--on", "compare#large={highest: 120}", "--keep", "compare", SUMS, *limits])
    order = upgrade_order.read_order(arguments)
    config = order.config(order.model, order.rehearsal, order.out)
    found = upgrade_order.held_out(order, config)
    assert list(found) == ["large", "compare", "chain_sum"]
    for domain, prompts in found.items():
        keys = [prompt.key for prompt in (*prompts.check, *prompts.confirm)]
        assert len(keys) == len(set(keys)) and len(prompts.check) == 20
        assert {prompt.domain for prompt in (*prompts.check, *prompts.confirm)} == {domain}
    sums = found["chain_sum"]
    creator, env_config = config.world_creators()["chain_sum#chain_sum"], config.world_configs()["chain_sum#chain_sum"]
    every = set(creator(env_config).prompt_ids("heldout", 0))
    assert {p.prompt_id for p in (*sums.check, *sums.confirm)} <= every
    assert len(found["large"].confirm) == 900 and len(sums.confirm) == min(900, len(every) - 20)


def test_the_domain_that_lost_most_counts() -> None:
    asked = {"a": [None] * 10, "b": [None] * 4}
    assert upgrade.most_lost(asked, {"a": dict.fromkeys(map(str, range(8)), True), "b": {"x": True}}) == (3, 4)


@pytest.mark.slow
def test_a_checkpoint_is_upgraded_from_its_own_weights(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sizes = ["--check_prompts", "16", "--confirm_prompts", "16", "--max_drop", "0.5", "--out", str(out)]
    flags = ["--lr", "1e-9", "--iterations", "1", "--seed_prompts", "8", "--debug"]
    # Engine, lengths and seed are those of the run; so small a step teaches nothing.
    assert upgrade.main([str(trained), "--on", LOOKUP, "--keep", COMPARE, *sizes, *flags]) == upgrade.UNCHANGED
    assert weights_of(out / "start") != weights_of(local_model("tiny"))
    assert weights_of(out / "model") == weights_of(out / "start") != {}
    (begun,) = of_kind(out, "start")
    assert (begun["checkpoint"], begun["values"]["seed"]) == (str(trained / "checkpoint_000002"), 5)
    assert (begun["values"]["engine"], begun["values"]["lr"]) == ("transformers", 1e-9)
    assert [verdict["outcome"] for verdict in of_kind(out, "confirm")[0]["verdicts"]] == ["passed", "passed", "bad"]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)  # two engines start, one after the other
def test_the_tiny_model_gets_better_at_one_domain_and_keeps_the_other(ray_here, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--engine", "vllm", "--num_env_runners", "1", "--compute_dtype", "float32", "--seed", "5", "--lr", "6e-5"]
    flags += ["--max_turn_tokens", "8", "--max_episode_tokens", "128", "--engine_kv_cache_gib", "0.125"]
    flags += ["--iterations", "10", "--check_prompts", "100", "--confirm_prompts", "400", "--seed_prompts", "32"]
    limits = ["--max_drop", "0.1", "--min_gain", "0.02", "--out", str(out), "--debug"]
    assert upgrade.main(["tiny", "--on", COMPARE, "--keep", LOOKUP, *flags, *limits]) == 0
    changes = of_kind(out, "confirm")[0]["changes"]
    assert changes["compare"]["change"] > 0.02 and changes["lookup"]["low"] > -0.1
    assert {verdict["gate"] for verdict in of_kind(out, "check")[0]["verdicts"]} == {"sanity", "drift", "retention"}
    assert weights_of(out / "model") != weights_of(local_model("tiny"))
