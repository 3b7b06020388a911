"""Checks before anything starts: what settings name is looked at, quickly, once, and all errors come together."""

import json
import shutil
import time

import gymnasium
import pytest

from rllib_srl import SRLConfig
from rllib_srl.algorithm import checks
from rllib_srl.algorithm.checks import early_errors
from rllib_srl.algorithm.resources import PlacementError, check_machine_holds
from rllib_srl.rollout.replies import Reply
from tests.rollout.fakes import CHATML, make_tokenizer
from tests.small_envs import Even, small_config

HERE = "tests.algorithm.test_checks"


class Unmakeable(gymnasium.Env):
    def __init__(self, env_config=None):
        raise RuntimeError("no licence\nfound")


class Stuck(gymnasium.Env):
    def __init__(self, env_config=None):
        time.sleep(60)


class Counted(Even):
    seen: list[str] = []

    def __init__(self, env_config=None):
        super().__init__(env_config)
        self.seen.append("made")

    def close(self):
        self.seen.append("closed")


class Numbers(Even):
    def reset(self, *, seed=None, options=None):
        return 7, {}


class TrainOnly(Even):
    def prompt_ids(self, split, seed):
        return super().prompt_ids(split, seed) if split == "train" else iter(())


@pytest.fixture
def config(random_llama_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "_passed", set())
    return small_config(random_llama_dir, tmp_path / "log")


def lines_of(config) -> list[str]:
    """Return the errors with which `validate` refuses a config, each one line."""
    with pytest.raises(ValueError, match="SRLConfig is invalid:") as caught:
        config.validate()
    return [line.removeprefix("  ") for line in str(caught.value).splitlines()[1:]]


def rows(path, *lines) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(("env", "env_config", "expected"), [
    ("question_file", {"path": "/no/such.jsonl"}, "data = '/no/such.jsonl' does not exist"),
    (f"{HERE}:Unmakeable", {}, "it cannot be created: RuntimeError: no licence found"),
    (f"{HERE}:Numbers", {}, "; its prompt 'even "),
    ("tests.small_envs:Even", {"num_prompts": 0}, "has no training prompts; expected some from prompt_ids("),
])  # fmt: skip
def test_an_environment_that_cannot_be_played_is_one_line(config, env, env_config, expected):
    (line,) = lines_of(config.environment(env, env_config=env_config))
    assert line.startswith((f"env = '{env}'; ", "data = ")) and expected in line


ASKED = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(40)]


def test_prompts_that_are_too_long_are_counted_and_named(config, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("rllib_srl.algorithm.settings._warned", set())
    long = [{"question": f"{n} {'x' * (60 + n)}?", "answer": "1"} for n in range(5)]
    path = rows(tmp_path / "rows.jsonl", *map(json.dumps, [*long, *ASKED]))
    config.environment("question_file", env_config={"path": path, "num_shots": 0}).validate()
    (line,) = [one for one in caplog.messages if "will be left out" in one]
    assert line.count(" xxxxx") == 3  # the first ones by their questions
    assert line.startswith("environment 'question_file': 5 of the 45 prompts checked have max_episode_tokens = 48")
    # 18 characters of the template and "4 ", 64 x, "?" are 85 bytes, each a token of this model
    assert "; the longest has 85. Shorten them, or set max_episode_tokens to " in line
    monkeypatch.setattr(checks, "_passed", set())
    path = rows(tmp_path / "long.jsonl", *map(json.dumps, long))
    (error,) = lines_of(config.environment("question_file", env_config={"path": path, "num_shots": 0}))
    assert "tokens; expected fewer than max_episode_tokens = 48, which includes the answer" in error


def test_a_prompt_of_a_chat_is_counted_with_its_template_and_history(tmp_path):
    make_tokenizer(chat_template=CHATML, with_bos=False).save_pretrained(tmp_path)
    count = checks._counter("chat", tmp_path, False)
    # <|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n: 3 control tokens, 5 + 2 + 1 + 10 bytes
    assert count(Reply("ab")) == 21
    said = tuple({"role": role, "content": "ab"} for role in ("user", "assistant", "user"))
    assert count(Reply("ab", messages=said)) == 21 + 10 + (2 + 10 + 2 + 1)  # 2 more messages: 10 and 15 tokens


def test_a_missing_extra_is_named(config, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mcp", None)
    tasks = [{"question": "1 + 1?", "answer": "2"}]
    (line,) = lines_of(config.environment("mcp", env_config={"command": ["server"], "tasks": tasks}))
    assert line.startswith("env = 'mcp'; ") and "environment 'mcp' needs mcp (" in line
    assert line.endswith("pip install 'rllib_srl[mcp]'")


def test_a_missing_package_of_an_engine_is_named_and_the_default_memory_needs_none(config, monkeypatch):
    found = checks.find_spec
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name in ("vllm", "faiss") else found(name))
    (engine,) = lines_of(config.env_runners(engine="vllm").replay("srl"))
    assert engine.startswith("engine = 'vllm'; expected the package vllm")


def test_regularisers_beyond_the_models_size_are_refused(config, random_llama_dir):
    most = json.loads((random_llama_dir / "config.json").read_text())["vocab_size"]
    config.training(regularisers={"distill": {"top_k": most + 1}})
    (line,) = lines_of(config)
    assert line.startswith(f"regularisers.distill.top_k = {most + 1}; expected at most {most}, the vocabulary of the")
    config.training(regularisers={"distill": {"top_k": most}}).validate()


def test_an_episode_longer_than_the_context_of_the_model_is_refused(config, random_llama_dir, tmp_path):
    short = shutil.copytree(random_llama_dir, tmp_path / "short")
    described = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 300}
    (short / "config.json").write_text(json.dumps(described))
    plain = SRLConfig().environment("compare").rl_module(model_config={"model": str(short)})
    plain.validate()
    assert plain.max_episode_tokens == 300
    longer = plain.copy(copy_frozen=False).env_runners(max_episode_tokens=301)
    assert lines_of(longer) == [f"max_episode_tokens = 301; expected at most 300, the context of the model '{short}'"]


def test_a_hub_that_does_not_answer_is_given_up(config, monkeypatch):
    monkeypatch.setattr(checks, "HUB_DEADLINE_S", 0.2)
    monkeypatch.setattr(checks, "described_model", lambda name, root: time.sleep(60))
    (line,) = lines_of(config.rl_module(model_config={"model": "some/silent-model"}))
    assert "could not be looked up: the hub did not answer within 0.2 s" in line


def test_only_config_and_tokenizer_of_a_hub_model_are_fetched(config, random_llama_dir, monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def download(hub_id, **arguments):
        asked.append(arguments)
        if arguments.get("local_files_only"):
            raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
        for name in ("config.json", "tokenizer.json"):
            (tmp_path / name).write_bytes((random_llama_dir / name).read_bytes())
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config.rl_module(model_config={"model": "some/large-model"}).env_runners(max_episode_tokens=2000)
    (line,) = lines_of(config)
    assert line.startswith("max_episode_tokens = 2000; expected at most 1024")
    assert not any("safetensors" in pattern for pattern in asked[-1]["allow_patterns"])


COUNTING = CHATML.replace("+ m['role']", "+ (messages | length | string)")


def test_a_template_that_does_not_fit_is_refused_with_the_models_name(config, random_llama_dir, tmp_path):
    place = tmp_path / "some-model"
    shutil.copytree(random_llama_dir, place)
    (place / "chat_template.jinja").write_text(COUNTING)
    config.rl_module(model_config={"model": str(place)}).env_runners(prompt_format="chat", max_episode_tokens=100)
    config.env_runners(max_turns=1).validate()
    (line,) = lines_of(config.env_runners(max_turns=8))
    assert line.startswith(f"prompt_format = 'chat' with the model {str(place)!r}; the chat template of")
    assert "changes earlier tokens when a turn is added" in line


def test_an_environment_that_hangs_is_given_up(config):
    config.environment(f"{HERE}:Stuck").env_runners(env_timeout_s=0.2)
    (line,) = lines_of(config)
    assert line.startswith("env = 'tests.algorithm.test_checks:Stuck'; did not return within 0.2 s")


def test_an_environment_without_heldout_prompts_is_refused_where_they_are_played(config):
    config.environment(f"{HERE}:TrainOnly").validate()
    (line,) = lines_of(config.evaluation(evaluation_interval=2))
    assert line.endswith("it has no held-out prompts; expected at least one, or evaluation_interval = None")


def test_every_error_of_every_part_comes_in_one_round(config):
    config.environment(None, envs={"compare": {"num_numbers": 99}, f"{HERE}:Unmakeable": {}, "lookup": {}})
    config.env = None
    config.rl_module(model_config={"model": "nobody/nothing"}).training(group_size=1)
    group, model, first, second = lines_of(config)
    assert group.startswith("group_size = 1; ") and model.startswith("model = 'nobody/nothing'; ")
    assert first.startswith("envs: environment 'compare'; env_config of Compare: num_numbers = 99")
    assert second.startswith("envs: environment 'tests.algorithm.test_checks:Unmakeable'; it cannot be created")


def test_an_environment_is_made_and_closed_once_for_the_same_settings(config):
    Counted.seen.clear()
    config.environment(Counted)
    for _ in range(3):
        config.validate()
        config.copy(copy_frozen=False).validate()
    assert Counted.seen == ["made", "closed"]
    config.environment(env_config={"num_prompts": 8}).validate()
    assert Counted.seen == ["made", "closed"] * 2
    config.environment(env_config={"num_prompts": 0})
    for _ in range(2):  # what failed is looked at again
        assert lines_of(config)
    assert Counted.seen == ["made", "closed"] * 4


def test_wrong_settings_of_an_environment_are_not_tried(config):
    config.environment(f"{HERE}:Stuck").env_runners(env_timeout_s=-1)
    assert lines_of(config) == ["env_timeout_s = -1; expected a number above 0"]
    assert early_errors(config, ["env_timeout_s = -1; expected a number above 0"]) == []


def test_gpus_that_this_machine_lacks_are_refused_before_ray(config, monkeypatch):
    from rllib_srl import SRL

    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # tests before this one may have left it running
    config.env_runners(num_env_runners=1, num_gpus_per_env_runner=1, custom_resources_per_env_runner={"big": 1})
    with pytest.raises(PlacementError, match=r"one run needs 1 GPU \(this machine has 0\), .*num_env_runners = 1"):
        check_machine_holds(SRL.default_resource_request(config), config)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_machine_holds(SRL.default_resource_request(config), config)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    config.training(check_resources=False)
    check_machine_holds(SRL.default_resource_request(config), config)
