"""GPUs of each process: the shares chosen, where Ray puts them, and the combinations that are refused."""

import json
import os
import subprocess
import sys

import pytest

from rllib_srl import SRL, SRLConfig
from rllib_srl.algorithm import config as config_module
from rllib_srl.algorithm import resources
from rllib_srl.algorithm.gpu_memory import GIB, fit_awake
from rllib_srl.algorithm.model_shape import SHAPES
from rllib_srl.algorithm.resources import GpuShares, gpu_shares
from rllib_srl.algorithm.validation import config_errors
from rllib_srl.rollout.env_runner import LLMEnvRunner

COLOCATED = GpuShares(0.6, 0.4, is_colocated=True)


@pytest.mark.parametrize(("num_gpus", "runners", "learners", "expected"), [
    (0, 4, 2, GpuShares(0, 0)), (1, 1, 0, COLOCATED), (1, 0, 0, COLOCATED), (2, 1, 1, GpuShares(1, 1)),
    (2, 2, 2, COLOCATED), (3, 2, 1, GpuShares(1, 1)), (8, 4, 4, GpuShares(1, 1)), (4, 4, 2, COLOCATED),
])  # fmt: skip
def test_cards_are_split_or_shared_in_pairs(num_gpus, runners, learners, expected):
    assert gpu_shares(num_gpus, runners, learners) == expected


def test_given_shares_stay_and_the_other_side_gets_what_is_left():
    assert gpu_shares(2, 1, 1, given=(1, None)) == GpuShares(1, 1)
    assert gpu_shares(1, 1, 1, given=(1, None)) == GpuShares(1, 0)
    assert gpu_shares(4, 1, 2, 2, given=(None, 1)) == GpuShares(2, 1)
    assert gpu_shares(8, 1, 1, given=(0.3, 0)) == GpuShares(0.3, 0)
    assert gpu_shares(4, 1, 2, tensor_parallel_size=2) == GpuShares(2, 1)


def test_a_search_that_cannot_run_on_a_card_is_refused(config):
    config.env_runners(num_env_runners=0).replay(diversity_coeff=0.5, diversity_device="gpu")
    assert "expected 'cpu': the memory needs its own process" in "\n".join(config_errors(config))


def settled(config, monkeypatch, num_gpus, gib=None):
    """Validate as on a machine with cards and packages for them; `gib`: of each, None: they are on other machines."""
    monkeypatch.setattr(config_module, "num_gpus_here", lambda: float(num_gpus))
    monkeypatch.setattr(config_module, "card_bytes_here", lambda: gib and gib * GIB)
    monkeypatch.setattr(config_module.torch.cuda, "device_count", lambda: int(gib is not None))
    config.validate()
    return config


@pytest.mark.parametrize(("num_gpus", "shares", "num_learners", "colocate", "utilization"), [
    (0, (0, 0), 0, False, None),
    (1, (0.6, 0.4), 1, True, 0.45),  # a learner of its own: Ray gives the main process no card
    (2, (1, 1), 1, False, 0.9),
])  # fmt: skip
def test_cards_are_used_as_they_are_there(config, monkeypatch, num_gpus, shares, num_learners, colocate, utilization):
    """This machine does not know the memory of a GPU on another one, so that one card is colocated."""
    settled(config, monkeypatch, num_gpus)
    assert (config.num_gpus_per_env_runner, config.num_gpus_per_learner, config.num_learners) == (*shares, num_learners)
    assert bool(config.colocate) is colocate and utilization in (None, config.engine_memory_utilization)
    assert num_gpus != 1 or config.compute_dtype == "bfloat16"


@pytest.mark.parametrize(("gib", "takes_turns"), [(24, True), (40, True), (80, False)])
def test_the_engine_stays_awake_where_both_fit(config, monkeypatch, gib, takes_turns):
    """Of 1.5B parameters a learner needs 30 GiB, and the engine .45 of the card."""
    monkeypatch.setattr(config_module.ModelShape, "of", staticmethod(lambda _: SHAPES["1.5B"]))
    config.training(activation_checkpointing=True)
    settled(config, monkeypatch, 1, gib)
    assert (config.num_gpus_per_env_runner, config.num_gpus_per_learner) == (0.6, 0.4)
    assert config.colocate is takes_turns and config.engine_memory_utilization == 0.45
    settled(config, monkeypatch, 1, gib)
    assert config.colocate is takes_turns  # settled once


def test_turns_are_taken_where_other_nodes_may_have_smaller_cards(config, monkeypatch):
    config.env_runners(num_env_runners=2).learners(num_learners=2)
    assert settled(config, monkeypatch, 2, gib=80).colocate is True  # one of the two is here


def test_a_learner_leaves_room_for_what_torch_keeps(random_llama_dir):
    """135M, 16,640 tokens a pass: 18.9 GiB and half of 14.7 GiB of activations, beside .45 of the card."""
    config = SRLConfig().training(micro_batch_tokens=16640, compute_dtype="bfloat16")
    config.num_gpus_per_env_runner, config.num_gpus_per_learner = 0.6, 0.4
    fits = [fit_awake(SHAPES["0.1B"], config, gib * GIB) for gib in (40, 48, 52)]
    assert fits == [False, False, True]  # 18.9 + 7.3 GiB in .52 of the card


def test_settings_that_were_refused_are_open_again(config, monkeypatch):
    """What a call chose does not count as given in the next one."""
    config.training(lr=-1.0)
    with pytest.raises(ValueError, match="lr = -1"):
        settled(config, monkeypatch, 1, gib=80)
    config.training(lr=1e-5)
    assert settled(config, monkeypatch, 1, gib=80).colocate is False
    assert (config.num_gpus_per_env_runner, config.num_gpus_per_learner, config.num_learners) == (0.6, 0.4, 1)


@pytest.mark.parametrize("given", [True, False])
def test_turns_that_were_asked_for_are_taken_whatever_fits(config, monkeypatch, given):
    config.env_runners(colocate=given)
    assert settled(config, monkeypatch, 1, gib=141).colocate is given


@pytest.mark.parametrize("is_fsdp", [True, False])
def test_what_rules_out_turns_on_one_card_is_named(config, monkeypatch, is_fsdp):
    if is_fsdp:
        config.env_runners(num_env_runners=2).learners(num_learners=2).training(fsdp=True)
        num_gpus, expected = 2, "fsdp = True with num_env_runners = 2 and num_learners = 2 on 2 GPUs; "
    else:
        config.env_runners(max_lag=1)
        num_gpus, expected = 1, "max_lag = 1 with num_env_runners = 1 and num_learners = 0 on 1 GPUs; "
    with pytest.raises(ValueError) as caught:
        settled(config, monkeypatch, num_gpus)
    assert str(caught.value) == (
        f"SRLConfig is invalid:\n  {expected}expected a GPU for each process, or colocate = False: "
        "both then use the same GPU at the same time"
    )
    config.env_runners(colocate=False)
    config.num_gpus_per_env_runner = config.num_gpus_per_learner = None
    assert settled(config, monkeypatch, num_gpus).colocate is False


def test_the_number_format_is_that_of_the_devices(config, monkeypatch):
    monkeypatch.setattr(config_module, "best_dtype", lambda num: "bfloat16" if num else "float32")
    config.env_runners(num_gpus_per_env_runner=1).learners(num_gpus_per_learner=0)
    assert settled(config, monkeypatch, 2).compute_dtype == "float32"  # the learner is on the CPU


@pytest.mark.parametrize(("flags", "dtype"), [("avx2 avx512_bf16", "float32"), ("avx2 amx_bf16", "bfloat16")])
def test_a_processor_computes_in_bfloat16_only_with_amx(flags, dtype, monkeypatch):
    monkeypatch.setattr(resources, "cpu_flags", lambda: frozenset(flags.split()))
    assert resources.best_dtype(0) == dtype
    assert resources.best_dtype(0.5) == "bfloat16"


def test_too_many_processes_are_one_error_among_others(config, monkeypatch):
    config.env_runners(num_env_runners=5).training(group_size=1)
    with pytest.raises(ValueError, match="group_size = 1") as caught:
        settled(config, monkeypatch, 2)
    assert (
        "num_env_runners = 5, num_learners = 0 with 2 GPUs; expected at most one of each per GPU "
        "(engine_tensor_parallel_size = 1), or set num_gpus_per_env_runner and num_gpus_per_learner"
    ) in str(caught.value)


REFUSED = [
    ({"colocate": True, "num_env_runners": 2, "num_learners": 2, "num_gpus": (0.5, 0.5)},
     "expected one of the two above 0.5, such as 0.6 + 0.4: Ray would place two engines, or two learners, on one GPU"),
    ({"num_gpus": (1, 2)}, "num_gpus_per_learner = 2; expected at most 1: raise num_learners, with fsdp = True"),
    ({"num_gpus": (1.5, 1)}, "num_gpus_per_env_runner = 1.5; expected a share below 1, a whole number, or None"),
    ({"num_gpus": (1, "one")}, "num_gpus_per_learner = 'one'; expected a share below 1"),
]  # fmt: skip
ACCEPTED = [
    {"colocate": True, "num_env_runners": 2, "num_learners": 2, "num_gpus": (0.6, 0.4)},
    {"colocate": True, "num_env_runners": 1, "num_learners": 1, "num_gpus": (0.5, 0.5)},
]


def with_gpus(config, settings):
    runner, learner = settings["num_gpus"]
    rest = {name: value for name, value in settings.items() if name != "num_gpus"}
    return config.update_from_dict({**rest, "num_gpus_per_env_runner": runner, "num_gpus_per_learner": learner})


@pytest.mark.parametrize(("settings", "expected"), REFUSED)
def test_what_would_hang_or_fail_on_gpus_is_refused_before(config, settings, expected):
    assert any(expected in line for line in config_errors(with_gpus(config, settings)))


@pytest.mark.parametrize("settings", ACCEPTED)
def test_what_works_on_gpus_is_accepted(config, settings):
    assert config_errors(with_gpus(config, settings)) == []


def test_vllm_built_for_gpus_needs_one(config, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    config.env_runners(engine="vllm")
    with pytest.raises(ValueError, match="num_gpus_per_env_runner = 0 with engine = 'vllm' built for GPUs; expected"):
        settled(config, monkeypatch, 0)


def test_a_runner_without_a_card_does_not_see_one(config, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    seen = []
    monkeypatch.setattr(
        "rllib_srl.algorithm.config.local_model", lambda name: seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    )
    for shares, index in (((0, 0), 1), ((0.6, 0.4), 1), ((0, 0), 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        own = with_gpus(config.copy(copy_frozen=False), {"num_gpus": shares})
        LLMEnvRunner(config=own, worker_index=index)
    assert seen == ["", "0,1", "0,1"]  # the main process may hold a learner on a GPU


# In a process of its own: other tests share this process's Ray, which has no GPUs.
PLACES = """
import json, ray
ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)

@ray.remote(num_cpus=0)
class Actor:
    def card(self):
        return ray.get_gpu_ids()[0]

actors = [Actor.options(num_gpus=share).remote() for share in (0.6, 0.6, 0.4, 0.4)]
print(json.dumps(ray.get([actor.card.remote() for actor in actors], timeout=60)))
"""


@pytest.mark.slow
def test_ray_places_an_engine_and_a_learner_on_each_card():
    run = subprocess.run([sys.executable, "-c", PLACES], capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    engine_1, engine_2, learner_1, learner_2 = json.loads(run.stdout.splitlines()[-1])
    assert {engine_1, engine_2} == {learner_1, learner_2} == {0, 1}


@pytest.mark.parametrize(("num", "expected"), [((1, 0), [0, 1, 1]), ((2, 2), [0, 0.6, 0.6, 0.4, 0.4])])
def test_the_cluster_reserves_every_card_that_a_run_takes(config, monkeypatch, num, expected):
    """The learner has a bundle of its own: a learner in the main process would use a card that Ray gives to others."""
    monkeypatch.setattr(config_module, "num_gpus_here", lambda: 2.0)
    config.env_runners(num_env_runners=num[0]).learners(num_learners=num[1]).training(check_resources=False)
    assert [bundle.get("GPU", 0) for bundle in SRL.default_resource_request(config).bundles] == expected
