"""Names of other libraries: each leads to settings that exist, wherever it is typed."""

import pytest

from rllib_srl import SRLConfig
from rllib_srl.algorithm.validation import config_errors
from rllib_srl.cli.shared.settings import all_settings
from rllib_srl.common.foreign_names import FLAGS, FOREIGN, in_place_of

TRL_AND_VERL = [
    ("learning_rate", "use lr"),
    ("beta", "use kl_coeff"),
    ("epsilon", "use clip_low and clip_high (the ratio stays within 1 - clip_low and 1 + clip_high)"),
    ("actor_rollout_ref.rollout.n", "use group_size"),
    ("actor_rollout_ref.rollout.gpu_memory_utilization", "use engine_memory_utilization"),
    ("trainer.default_local_dir", "use --out"),
    ("batch_size", "use num_prompts_per_batch and group_size (prompts per batch, and episodes per prompt)"),
    ("reward_funcs", "use --reward (module:function)"),
    ("data.train_files", "use --data (a file, a folder or a data set of the hub)"),
]


def test_every_target_is_a_setting_and_no_name_is_one():
    for name in FOREIGN:
        targets = FOREIGN[name][0].split()
        assert targets and set(targets) <= {*all_settings(), *FLAGS}
        assert name not in all_settings(), "a setting of ours needs no translation"


def test_names_of_trl_and_verl_lead_to_ours():
    for name, expected in TRL_AND_VERL:
        assert in_place_of(name, all_settings()) == expected
        assert in_place_of(name.replace("_", "-").upper(), all_settings()) == expected


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "--min-p", "sampling.top_p"])
def test_what_would_change_the_sampled_distribution_is_refused_with_the_reason(name):
    assert in_place_of(name, all_settings()).startswith("it would change the distribution that answers are drawn from")


def test_the_config_gives_the_same_advice_however_names_come():
    with pytest.raises(TypeError) as caught:
        SRLConfig().training(learning_rate=1e-5, num_generations=8, max_turns=3, lr=1e-5, num_learners=2, seed=1)
    assert str(caught.value).splitlines() == [
        "training() got unknown settings:",
        "  learning_rate; expected no setting of that name here; use lr",
        "  max_turns; expected no setting of that name here; it is a setting of env_runners()",
        "  num_generations; expected no setting of that name here; use group_size",
        "  num_learners; expected no setting of that name here; it is a setting of learners()",
        "  seed; expected no setting of that name here; it is a setting of debugging()",
    ]
    with pytest.raises(TypeError, match=r"env_runners\(\) .*\n  rollout_n; "):
        SRLConfig().env_runners(rollout_n=4)
    lines = config_errors(SRLConfig().environment("compare").update_from_dict({"learning_rate": 1e-5, "rollout.n": 8}))
    assert lines == [
        "learning_rate = 1e-05; expected no setting of that name; use lr",
        "rollout.n = 8; expected no setting of that name; use group_size",
    ]
