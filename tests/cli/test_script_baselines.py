"""Majority answer and chance, against counts made by hand."""

import gymnasium

from rllib_srl import SRLConfig
from rllib_srl.cli.shared.baselines import baselines, majority_turns, rows_of
from rllib_srl.envs.math.compare import Compare
from rllib_srl.types import Prompt

# 2 of 3, 3 of 4, ...: of the numbers 1 to 4, in pairs, 4 is the larger one in half of all pairs.
SMALL = {"num_numbers": 2, "lowest": 1, "highest": 4, "num_shots": 0}


class Silent(gymnasium.Env):
    """An environment that knows neither gold turns nor prompt ids."""


def test_the_majority_answer_is_played_on_the_held_out_prompts() -> None:
    config = SRLConfig().environment("compare", env_config=SMALL)
    prompts = [Prompt("compare", prompt_id, "compare") for prompt_id in ("1, 4", "4, 2", "2, 3", "4, 3")]
    found = baselines(config, prompts, seed=0)
    env = Compare(SMALL)
    train = [env.question(prompt_id).answer for prompt_id in env.prompt_ids("train", 0)]
    most = max(sorted(set(train)), key=train.count)
    assert found.majority_answers == {"compare": most}
    assert found.majority == sum(env.question(p.prompt_id).answer == most for p in prompts) / 4
    assert found.chance == 0.5
    assert dict(rows_of(found)) == {f"majority answer ('{most}')": f"{found.majority:.3f}", "chance": "0.500"}


def test_envs_without_an_answer_have_no_baseline() -> None:
    assert majority_turns(Silent(), seed=0) is None
    config = SRLConfig().environment("compare", env_config=SMALL)
    found = baselines(config, [], seed=0)
    assert (found.majority, found.chance) == (None, None)
