"""`srl doctor`: the machine, what fits, the table of docs/gpu.md, settings, how environments grade."""

import pytest

from rllib_srl import SRLConfig
from rllib_srl.algorithm.gpu_memory import table
from rllib_srl.cli import doctor
from rllib_srl.cli.shared.diagnosis import FAILURE, OK, WARNING, of_environments, of_gpus, of_machine
from rllib_srl.cli.shared.settings import SettingsError
from tests.conftest import ROOT
from tests.small_envs import Even


def test_a_machine_without_a_gpu_says_so(capsys):
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "ok       GPU          none: runs compute on the CPU" in out and "/dev/shm" in out and "0 failures" in out


def test_little_shared_memory_is_a_warning(monkeypatch):
    """A container has 64 MB by default; weights on their way to the engines lie there."""
    found = type("Found", (), {"f_blocks": 64 * 2**20, "f_frsize": 1})
    monkeypatch.setattr("rllib_srl.cli.shared.diagnosis.os.statvfs", lambda path: found)
    (line,) = [line for line in of_machine() if line.topic == "/dev/shm"]
    assert line.status == WARNING and "--shm-size=4g" in line.text


def test_ways_to_train_a_model_on_other_gpus(random_llama_dir, capsys):
    assert doctor.main(["--model", str(random_llama_dir), "--gpus", "4x80"]) == 0
    out = capsys.readouterr().out
    for line in ("on 4 x 80 GiB", "full (2 GPUs, one for the engine): fits", "fsdp over 3 (4 GPUs"):
        assert line in out
    assert doctor.main(["--model", str(random_llama_dir), "--gpus", "1x1"]) == 1
    out = capsys.readouterr().out
    assert "full (engine and learner share it): does not fit; " in out and "training does not fit; expected" in out


def planned(**given) -> str:
    return "\n".join(line.text for line in of_gpus({"model": "smollm2-135m", **given}, 1, 24, places_all=True))


def test_the_plan_has_the_settings_that_were_given():
    """AdamW's state is 8 bytes for each of 134.5 million parameters, AdamW's in bfloat16 4, SGD's none."""
    assert "optimiser 1.0" in planned() and "lora_rank = 16 (engine" in planned()
    assert "optimiser 0.3" in planned(optimizer_name="adamw_8bit")
    out = planned(optimizer_name="sgd", lora_rank=64)
    assert "optimiser" not in out and "lora_rank = 64 (engine" in out
    assert "frozen 0." in planned(kl_coeff=0.1) and "frozen" not in planned()
    assert "without activation checkpointing" in planned(activation_checkpointing=False)
    with pytest.raises(SettingsError, match="num_learners = 2 with --gpus; expected none"):
        planned(num_learners=2)


def test_the_page_has_the_computed_table():
    config = SRLConfig()
    config.activation_checkpointing = True
    assert "\n".join(table(config)) in (ROOT / "docs/gpu.md").read_text(encoding="utf-8")


class Asked(Even):
    """Pays 1 for "yes"; its settings say what is right, what an empty answer earns, and which prompts there are."""

    def __init__(self, env_config):
        super().__init__()
        usual = {"gold": "yes", "empty": 0.0, "is_for_training": True}
        self.gold, self.empty, self.is_for_training = {**usual, **env_config}.values()

    def gold_turns(self, prompt_id: str) -> list[str]:
        return [self.gold]

    def prompt_ids(self, split: str, seed: int):
        return super().prompt_ids(split, seed) if self.is_for_training or split == "heldout" else iter(())

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return "", float(action == "yes") if action else float(self.empty), True, False, {}


def said(lines) -> list[tuple[str, str]]:
    return [(line.status, line.text) for line in lines]


@pytest.mark.parametrize(("env", "settings", "expected"), [
    (Asked, {}, [(OK, "grades right answers to 3 prompts as right"), (OK, "pays 0 for an empty answer")]),
    (Asked, {"gold": "no"}, [(FAILURE, "pays 0 for the right answer 'no' of"), (OK, "pays 0 for an empty answer")]),
    (Asked, {"empty": 1}, [(OK, "grades right"), (FAILURE, "pays 1 for an empty answer; expected 0")]),
    (Asked, {"empty": "no grader"}, [(FAILURE, "no grader")]),  # it raises
    (Asked, {"is_for_training": False}, [(FAILURE, "has no training prompts: prompt_ids('train', 0) is empty")]),
    (Even, {}, [(WARNING, "has no gold_turns for prompt"), (OK, "pays 0 for an empty answer")]),
])  # fmt: skip
def test_environments(env, settings, expected):
    config = SRLConfig().environment(f"{env.__module__}:{env.__name__}", env_config=settings)
    config.rl_module(model_config={"model": "tiny"}).env_runners(max_episode_tokens=256)
    found = said(of_environments(config))
    assert [status for status, _ in found] == [status for status, _ in expected]
    assert all(part in text for (_, text), (_, part) in zip(found, expected, strict=True)), found


def test_a_run_is_checked_before_it_starts(capsys):
    words = ["--env", "compare", "--model", "tiny", "--max_episode_tokens", "256", "--engine", "transformers"]
    assert doctor.main(words) == 0
    out = capsys.readouterr().out
    assert "ok       settings     valid" in out and "compare grades right answers to 3 prompts as right" in out
    assert doctor.main([*words, "--optimizer_name", "sgd", "--weight_decay", "0.1"]) == 1
    out = capsys.readouterr().out
    assert "failure  settings     weight_decay = 0.1" in out and "1 failure," in out and "environment" not in out
