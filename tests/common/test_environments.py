"""Environments by name, path, class and registry; what is said when that fails; prompts of foreign environments."""

import sys
from importlib.metadata import EntryPoint
from itertools import islice

import gymnasium
import pytest

from rllib_srl.common import environments as envs
from rllib_srl.common.environments import EnvError, check_environment, grading_digest, resolve
from rllib_srl.curriculum.prompts import SPLITS, prompts_of
from rllib_srl.envs.math.compare import Compare


class Foreign(gymnasium.Env):
    """A text environment that knows nothing of rllib_srl."""

    def __init__(self, env_config=None):
        self.env_config = env_config

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"guess {self.np_random.integers(1000)}", {}

    def step(self, action):
        return "", 0.0, True, False, {}


@pytest.fixture
def installed(monkeypatch):
    """Pretend that these entry points are installed, whatever is."""
    points = [
        EntryPoint("compare", "rllib_srl.envs.math.compare:Compare", envs.ENTRY_POINT_GROUP),
        EntryPoint("stale", "envs.gone:Gone", envs.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(envs, "entry_points", lambda group: points if group == envs.ENTRY_POINT_GROUP else [])
    envs._installed.cache_clear()
    yield
    envs._installed.cache_clear()


def test_a_name_is_an_entry_point(installed):
    assert resolve("compare") is Compare
    assert envs.known_envs() == ["compare", "stale"]


def test_a_class_and_a_callable_stand_for_themselves():
    def make(env_config):
        return Foreign(env_config)

    assert resolve(Foreign) is Foreign
    assert resolve(make)({"a": 1}).env_config == {"a": 1}


def test_the_registry_is_asked_last(installed):
    asked = []

    def registry(name):
        asked.append(name)
        return Foreign if name == "mine" else None

    assert resolve("compare", registry) is Compare
    assert asked == []
    assert resolve("mine", registry) is Foreign
    with pytest.raises(EnvError, match="'other' is unknown"):
        resolve("other", registry)


@pytest.mark.parametrize(("spec", "message"), [
    ("chian_sum", r"'chian_sum' is unknown; expected one of compare, stale, or \"package.module:Class\", a class"),
    ("stale", r"'stale' cannot be imported \(there is no module 'envs.gone', neither in"),
    ("no_such.module:Env", r"cannot be imported \(there is no module 'no_such.module', neither in"),
    ("rllib_srl.envs.math.compare:Contrast", r"imported \(rllib_srl.envs.math.compare has no 'Contrast'; it has"),
    ("rllib_srl.envs.math.compare:_PROMPT_ID", r"is a Pattern; expected a class or a callable"),
    (":Compare", r"is not an import path"),
    ("rllib_srl.envs.math.compare:", r"is not an import path"),
    (7, r"environment 7 is of type int; expected"),
])  # fmt: skip
def test_what_cannot_be_resolved_is_one_clear_line(installed, spec, message):
    with pytest.raises(EnvError, match=message) as caught:
        resolve(spec)
    assert "\n" not in str(caught.value)


def test_an_env_and_a_foreign_environment_keep_the_contract():
    check_environment(Compare(), "compare")
    check_environment(Foreign(), "foreign")
    check_environment(gymnasium.wrappers.OrderEnforcing(Foreign()), "wrapped")


class NumbersOut(Foreign):
    stop_strings = "\n"

    def reset(self, *, seed=None, options=None):
        return 7, None


class NoOptions(Foreign):
    def prompt_ids(self, split, seed):
        return iter(())

    def reset(self, *, seed=None):
        return "text", {}


class Raises(Foreign):
    def reset(self, *, seed=None, options=None):
        raise KeyError("the database")


@pytest.mark.parametrize(("env", "messages"), [
    (object(), ["is a object; expected a gymnasium.Env", "no method reset", "no method step"]),
    (NumbersOut(), ["observation is a int; expected text", "info is a NoneType", r"stop_strings = '\n'; expected"]),
    (NoOptions(), ["has prompt_ids, but its reset takes no options"]),
    (Raises(), ["reset(seed=0) raised KeyError: 'the database'"]),
])  # fmt: skip
def test_everything_wrong_with_an_env_is_said_at_once(env, messages):
    with pytest.raises(EnvError, match="environment 'mine' cannot be played: ") as caught:
        check_environment(env, "mine")
    for message in messages:
        assert message in str(caught.value)


def test_prompts_of_a_foreign_environment_are_seeds():
    env = gymnasium.wrappers.OrderEnforcing(Foreign())
    train = list(islice(prompts_of(env, "train", 0), 500))
    assert train == list(islice(prompts_of(env, "train", 0), 500))
    assert train != list(islice(prompts_of(env, "train", 1), 500))
    seeds = {
        split: {int(p.removeprefix("seed:")) for s in (0, 1, 2) for p in islice(prompts_of(env, split, s), 2000)}
        for split in SPLITS
    }
    assert len(seeds["train"]) > 5990  # a repetition among 2**30 seeds is rare
    assert not seeds["train"] & seeds["heldout"]
    assert max(seeds["train"] | seeds["heldout"]) < 2**31  # what any library takes as a seed
    env.reset(seed=int(train[0].removeprefix("seed:")))


def test_a_split_and_a_seed_are_checked():
    with pytest.raises(EnvError, match="split = 'test'; expected one of train, heldout"):
        next(prompts_of(Foreign(), "test", 0))


class Plain(gymnasium.Env):
    """An environment without settings, as gymnasium's own are."""

    def reset(self, *, seed=None, options=None):
        return "say a:", {}

    def step(self, action):
        return "", 1.0, True, False, {}


@pytest.mark.slow
def test_an_environment_without_settings_is_made_without_them():
    creator = resolve(Plain)
    assert isinstance(creator({}), Plain)
    with pytest.raises(EnvError, match="'Plain' takes no settings; expected an empty env_config, not .'a': 1"):
        creator({"a": 1})


@pytest.mark.parametrize("changed", ["own.py", "helpers.py", "env_config", "number"])
def test_the_digest_of_what_grades_changes_with_config_and_code(tmp_path, monkeypatch, changed):
    """The class imports its grader from another module of its package; `number` is a file that neither imports."""
    names = ["graded_env.own", "graded_env.helpers"]

    def digest() -> str:
        for name in ("graded_env", *names):
            sys.modules.pop(name, None)
        env = resolve("graded_env.own:Own")(config)
        return grading_digest(gymnasium.wrappers.TransformReward(env, lambda reward: reward), config)

    package, config = tmp_path / "graded_env", {"level": 1, "judge": len}
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helpers.py").write_text("def right(answer):\n    return answer == '4'\n")
    (package / "own.py").write_text(
        "import gymnasium\nfrom graded_env.helpers import right\n\n\nclass Own(gymnasium.Env):\n"
        "    def __init__(self, env_config):\n        self.grade = right\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = digest()
    assert digest() == before
    if changed == "env_config":
        config["level"] = 2
    else:
        path = package / changed
        path.write_text((path.read_text() if path.exists() else "") + "# another line\n")
    assert (digest() == before) == (changed == "number")
