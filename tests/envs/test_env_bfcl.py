"""BFCL's multi-turn categories: replays of the ground truth, checks by hand, and that no call leaves its episode."""

import importlib.util
import sys
import time

import pytest

from rllib_srl.envs.tools.calls import CallError, ToolCall

if importlib.util.find_spec("bfcl_eval") is None:
    pytest.skip("bfcl-eval is not installed: pip install --no-deps bfcl-eval==2026.3.23", allow_module_level=True)

from rllib_srl.envs.functions.bfcl import Bfcl
from rllib_srl.envs.functions.simulators import CATEGORIES, Library, Simulation, tasks

FILES = "multi_turn_base_0"
MOST_TURNS = 200


def played(env, prompt_id, turns):
    """Return the reward of an episode of `turns`, of empty turns to its end for None."""
    env.reset(options={"prompt_id": prompt_id})
    for turn in turns if turns is not None else [""] * MOST_TURNS:
        _, reward, terminated, truncated, _ = env.step(turn)
        if terminated or truncated:
            return reward
    return 0.0


def first(env, count=12):
    return list(env._tasks)[:count]


def started(**env_config):
    env = Bfcl(env_config)
    prompt = env.reset(options={"prompt_id": FILES.replace("base", env.settings.category)})[0]
    return env, prompt


@pytest.mark.parametrize("num_tasks", [12, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("category", CATEGORIES)
def test_the_ground_truth_passes_and_an_empty_policy_does_not(category, num_tasks):
    env = Bfcl({"category": category})
    ids = first(env, num_tasks)
    assert len(ids) == num_tasks
    for prompt_id in ids:
        assert played(env, prompt_id, env.gold_turns(prompt_id)) == 1.0, prompt_id
        assert played(env, prompt_id, None) == 0.0, prompt_id


def test_an_episode_by_hand():
    env, prompt = started()
    assert prompt.endswith("User: Move 'final_report.pdf' within document directory to 'temp' directory in document. "
                           "Make sure to create the directory\n")  # fmt: skip
    assert "\nmv(source: str, destination: str) - " in prompt
    moved = "[cd(folder='document'), mkdir(dir_name='temp'), mv(source='final_report.pdf', destination='temp')]\n"
    observation, reward, *_ = env.step(moved)
    assert (observation, reward) == (
        'Result: {"current_working_directory": "document"}\nResult: None\n'
        "Result: {\"result\": \"'final_report.pdf' moved to 'temp/final_report.pdf'\"}\n", 0.0,
    )  # fmt: skip
    assert "No such file or directory" in env.step("[cd(folder='nowhere')]\n")[0]
    assert env.step("Answer: moved\n")[0].startswith("User: Perform a detailed search using grep")


def test_state_and_results_count_and_missing_functions_are_waited_for():
    env, _ = started(reward="turns")
    gold = env.gold_turns(FILES)  # calls, done, calls, done, calls, done, calls, done
    assert len(gold) == 8
    assert played(env, FILES, gold) == 1.0
    # Without the calls of the second user turn its results are missing; later turns then work on another directory.
    no_search = [gold[0], gold[1], gold[3], *gold[4:]]
    assert played(env, FILES, no_search) == 0.25
    # A file more than there should be: the state differs in every user turn.
    touched = ["[touch(file_name='extra')]\n", *gold]
    assert played(env, FILES, touched) == 0.0
    # Looking around changes no state, and results may come in any order and with others between.
    assert played(env, FILES, ["[ls()]\n", *gold]) == 1.0
    env, prompt = started(category="miss_func")
    prompt_id = "multi_turn_miss_func_0"
    assert "\nsort(" not in prompt
    observations = []
    for turn in env.gold_turns(prompt_id):
        observation, reward, *_ = env.step(turn)
        observations.append(observation)
    assert reward == 1.0
    (told,) = (one for one in observations if "These tools are new. What about now?" in one)
    assert "\nsort(file_name: str) - " in told


@pytest.mark.parametrize("category", CATEGORIES)
def test_variants_of_a_task_are_in_one_split(category):
    base, other = Bfcl({}), Bfcl({"category": category})
    for number in range(200):
        assert base.split_of(f"multi_turn_base_{number}") == other.split_of(f"multi_turn_{category}_{number}")
    assert len(list(other.prompt_ids("heldout", 0))) > 15


def test_text_of_the_policy_is_looked_up_and_never_run():
    env, _ = started()
    for turn in (
        "[_load_scenario(scenario={})]", "[__init__()]", "[root.clear()]", "[GorillaFileSystem()]", "[ls.__func__()]",
        "[eval('1')]",
    ):  # fmt: skip
        assert "Error: there is no function" in env.step(turn + "\n")[0], turn
    before = set(sys.modules)
    env.step("[ls(a=__import__('antigravity'))]\n")
    assert "antigravity" not in set(sys.modules) - before


def test_a_simulator_keeps_to_its_bounds_and_its_globals_to_itself():
    task = next(task for task in tasks("base").values() if "MathAPI" in task.classes)
    simulation, start = Simulation(Library(), task), time.thread_time()
    for call in (
        ToolCall("power", (), {"base": 10, "exponent": 10**9}), ToolCall("power", (10.0, 1e300)),
        ToolCall("round_number", (5, -(10**9))), ToolCall("logarithm", (2, 10, 10**9)),
        ToolCall("square_root", (), {"number": 2, "precision": 10**9}),
    ):  # fmt: skip
        with pytest.raises(CallError, match="beyond 1000"):
            simulation.run(call)
    assert time.thread_time() - start < 10
    assert simulation.run(ToolCall("power", (2, 3))) == '{"result": 8}'
    import mpmath

    one, other = Library(), Library()
    assert one.simulator("VehicleControlAPI") is not other.simulator("VehicleControlAPI")

    before = mpmath.mp.dps
    maths = next(task for task in tasks("base").values() if "MathAPI" in task.classes)
    Simulation(one, maths).run(ToolCall("logarithm", (2, 10, 77)))
    assert mpmath.mp.dps == before
