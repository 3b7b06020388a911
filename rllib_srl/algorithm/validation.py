"""Validates an SRLConfig: plain functions that take the settings and return error messages.

Each message has the form "name = value; expected ...". Nothing here starts a process or loads a model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_srl.algorithm.flat import FlatSettings, values_of
from rllib_srl.algorithm.loss_validation import faults_of_loss
from rllib_srl.algorithm.rollout_validation import faults_of_rollout
from rllib_srl.algorithm.settings import FLAT, GROUPS, PARTS
from rllib_srl.common.foreign_names import in_place_of, nearest
from rllib_srl.common.setting_checks import is_number
from rllib_srl.common.setting_model import PRESET, Settings, names_any
from rllib_srl.curriculum.settings import PlannerSettings
from rllib_srl.curriculum.streams import stream_faults
from rllib_srl.engine.adapters import MAX_RANK, TABLES
from rllib_srl.engine.models import check_model_name
from rllib_srl.learner.model_setup import TORCH, fault_of
from rllib_srl.learner.regularisers.regularisers import made, parameter_faults
from rllib_srl.replay.setting_advice import Run, group_size_errors
from rllib_srl.replay.setting_advice import warnings_of as memory_warnings
from rllib_srl.replay.settings import AUTO, parameters_of

# RLlib's settings that SRL uses. Any other would have no effect, so a value other than its default is refused.
USED = frozenset(
    """
    env env_config num_env_runners create_local_env_runner env_runner_cls
    num_cpus_per_env_runner num_gpus_per_env_runner custom_resources_per_env_runner sample_timeout_s
    num_learners num_cpus_per_learner num_gpus_per_learner custom_resources_per_learner local_gpu_idx
    max_requests_in_flight_per_learner lr grad_clip grad_clip_by num_epochs learner_config_dict log_gradients
    evaluation_interval evaluation_duration in_evaluation seed log_level log_sys_usage
    placement_strategy num_cpus_for_main_process custom_resources_for_main_process
    extra_python_environs_for_driver extra_python_environs_for_worker
    restart_failed_env_runners max_num_env_runner_restarts delay_between_env_runner_restarts_s
    env_runner_health_probe_timeout_s env_runner_restore_timeout_s
    algo_class stats_cls_lookup keep_per_episode_custom_metrics metrics_num_episodes_for_smoothing
    metrics_episode_collection_timeout_s disable_env_checking simple_optimizer
    """.split()  # noqa: SIM905
)
# Replacements for the most used of the settings that are refused.
INSTEAD = {
    "train_batch_size": "num_prompts_per_batch and group_size",
    "_train_batch_size_per_learner": "num_prompts_per_batch and group_size",
    "minibatch_size": "num_epochs: each epoch is one step over the whole batch",
    "shuffle_batch_per_epoch": "nothing: gradients are summed over the whole batch",
    "gamma": "nothing: rewards of an episode are summed",
    "rollout_fragment_length": "nothing: episodes are played to their end",
    "batch_mode": "nothing: episodes are played to their end",
    "num_envs_per_env_runner": "num_env_threads and engine_max_num_seqs",
    "evaluation_num_env_runners": "nothing: evaluation plays on the training engines",
    "evaluation_parallel_to_training": "nothing: evaluation plays on the training engines",
    "evaluation_duration_unit": "nothing: evaluation_duration counts held-out prompts",
    "evaluation_sample_timeout_s": "sample_timeout_s",
    "evaluation_config": "evaluation_pass_k and the settings of training",
    "custom_evaluation_function": "a subclass of SRL with its own evaluate()",
    "num_aggregator_actors_per_learner": "nothing: learners fetch groups themselves",
    "min_time_s_per_iteration": "nothing: an iteration is one batch",
    "min_sample_timesteps_per_iteration": "num_prompts_per_batch: an iteration is one batch",
    "min_train_timesteps_per_iteration": "num_prompts_per_batch: an iteration is one batch",
    "torch_skip_nan_gradients": "nothing: non-finite gradients are always skipped and counted",
    "compress_observations": "nothing: observations are token ids",
    "clip_rewards": "the environment's own rewards in [0, 1]",
    "explore": "temperature",
    "model": "model_config={'model': ...}",
    "optimizer": "optimizer_name",
    "num_gpus": "num_gpus_per_learner",
    "framework_str": "nothing: SRL is written in torch",
    "_env_to_module_connector": "prompt_format",
    "_module_to_env_connector": "prompt_format",
    "_learner_connector": "a subclass of GRPOTorchLearner",
}


def faults_of(config: Any) -> list[str]:
    """Return all error messages of the settings, [] if they are valid.

    What goes together is checked with the initial values of settings that are wrong alone, and not reported of these.
    """
    in_form = dict(_parameters(config))
    lines = [line for check in (_unknown, _unused) for line in check(config)] + list(in_form.values())
    wrong, together, given = {*in_form}, [], config.names_given()
    for part in PARTS:
        found, others = part.model.found(_values(config, part.model, in_form))
        wrong |= {part.model.prefix + name for name in found}
        lines += [_as_given(part.model.prefix + line, given) for line in found.values()]
        together += [part.model.prefix + line for line in others]
    flat = FlatSettings(config, {name: FLAT[name].initial for name in wrong if name in FLAT})
    together += [line for check in CHECKS for line in check(flat)]
    return lines + [_as_given(line, given) for line in together if not names_any(line, wrong)]


def _values(config: Any, model: type[Settings], but: Collection[str]) -> dict[str, Any]:
    """Return the values of a part that are checked: those that the user has not left to a preset."""
    rows = {name.removeprefix(model.prefix): row for name, row in model.table().items() if name not in but}
    values = {name: value for name, value in values_of(config, model).items() if name in rows}
    is_left = {n: rows[n].is_preset and isinstance(value, str) and value == PRESET for n, value in values.items()}
    return {name: value for name, value in values.items() if not is_left[name]}


def warnings_of(config: Any) -> list[str]:
    """Return a line for each setting of the memory that has little or no effect; the settings are valid."""
    flat, given = config.flat(), config.names_given()
    lines = memory_warnings(flat.replay_settings(), _beside_memory(flat))
    return [_as_given(line, given) for line in lines]


def _parameters(config: Any) -> Iterator[tuple[str, str]]:
    """Yield (flat name, error message) for parameters that do not exist, or that the chosen rule does not read."""
    for name, group in GROUPS.items():
        rule = config.rule_of(name)
        others = parameters_of(name.removeprefix("replay_"), rule) if group.rest else {}
        for key, value in group.given(getattr(config, name)).items():
            shown = f"{name}.{key} = {value!r}"
            if key in group.flat:
                if (readers := group.readers(key)) and str(rule) not in readers:
                    listed = " or ".join(map(repr, readers))
                    yield group.flat[key], f"{shown}; expected it only with {name} = {listed}, not {rule!r}"
            elif others is not None and key not in others:
                known = [each for each in group.flat if rule in (group.readers(each) or [rule]) and each != "name"]
                known += others
                hint = f"; did you mean {near}?" if (near := nearest(str(key), known)) else ""
                yield group.rest or f"{name}.{key}", f"{shown}; expected some of {', '.join(known)}{hint}"


def _first_name(line: str) -> str:
    return re.match(r"\w*", line)[0]  # type: ignore[index]  # it matches any text


def _as_given(line: str, given: Mapping[str, str]) -> str:
    """Return an error message with the names that the user gave in place of flat names."""
    first = _first_name(line)
    rest = line[len(first) :]
    for flat, name in given.items():
        end = r"\b" if "_" in flat and flat not in GROUPS else r"(?= = )"
        rest = re.sub(rf"(?<![\w.'\"]){flat}{end}", name, rest)
    return given.get(first, first) + rest


def _unknown(config: Any) -> Iterator[str]:
    known = set(vars(type(config)()))
    for name in sorted(set(vars(config)) - known - {"class"}):  # RLlib's from_state leaves "class" behind
        if not name.startswith("_"):
            hint = in_place_of(name, {word for word in known if not word.startswith("_")})
            yield f"{name} = {getattr(config, name)!r}; expected no setting of that name{f'; {hint}' if hint else ''}"


def _unused(config: Any) -> Iterator[str]:
    inherited = set(vars(AlgorithmConfig())) - USED
    defaults = vars(type(config)())
    for name in sorted(inherited):
        is_watched = name in INSTEAD or not name.startswith(("_", "callbacks_", "policies", "policy_"))
        value, default = getattr(config, name), defaults[name]
        if is_watched and value != default:
            use = f"; use {INSTEAD[name]}" if name in INSTEAD else ""
            yield f"{name.lstrip('_')} = {value!r}; expected {default!r}: SRL does not use it{use}"
    if config.is_multi_agent:
        yield "policies = several; expected one: SRL trains a single policy"


def _group_size(config: Any) -> Iterator[str]:
    if config.group_size == 1 and config.rule_of("advantage") not in ("posterior", "none"):
        yield "group_size = 1; expected an integer of at least 2, or advantage = 'posterior' or 'none'"


def _pairs(config: Any) -> Iterator[str]:
    turn, episode = config.max_turn_tokens, config.max_episode_tokens
    if turn >= episode:
        yield f"max_turn_tokens = {turn}; expected less than max_episode_tokens = {episode}, which includes the prompt"
    if config.optimizer_name == "sgd" and config.weight_decay:
        yield f"weight_decay = {config.weight_decay}; expected 0 with optimizer_name = 'sgd'"


def _fitting(config: Any) -> Iterator[str]:
    if fault := fault_of(config.optimizer_name, config.num_gpus_per_learner or 0):
        yield fault
    if config.activation_checkpointing == "offload" and not config.num_gpus_per_learner:
        yield (
            "activation_checkpointing = 'offload'; expected num_gpus_per_learner above 0: on a CPU they are in host "
            "memory already"
        )
    if config.lora_rank and find_spec("peft") is None:
        yield f"lora_rank = {config.lora_rank}; expected the package peft: pip install 'rllib_srl[lora]'"
    if config.lora_rank and config.lora_send == "adapter":
        yield from _adapters_in_vllm(config)
    for name in ("lora_rank", "fsdp"):
        value = getattr(config, name)
        if value and config.weight_transfer != "object_store":
            yield f"{name} = {value!r} with weight_transfer = {config.weight_transfer!r}; expected 'object_store'"
        if value and config.kl_coeff and config.loss_settings().kl_reference != "base":
            yield (
                f"{name} = {value!r} with kl_reference = {config.loss_settings().kl_reference!r}; expected 'base': "
                "updating a reference copies whole weights"
            )
    if config.fsdp is True:
        yield from _sharded(config)


def _adapters_in_vllm(config: Any) -> Iterator[str]:
    """Yield why vLLM cannot apply the adapters itself; its engine checks the layers of the model when it starts."""
    if config.engine == "transformers" or (config.engine == "auto" and find_spec("vllm") is None):
        return
    remedy = "lora = {'rank': ..., 'send': 'merged'}"
    if config.lora_rank > MAX_RANK:
        yield f"lora_rank = {config.lora_rank}; expected at most {MAX_RANK}, the highest that vLLM applies, or {remedy}"
    if tables := sorted({*config.lora_targets} & TABLES):
        yield f"lora_targets has {tables}; expected layers inside the decoder with vLLM, or {remedy}"
    if config.num_gpus_per_env_runner and config.compute_dtype == "float32":
        yield (
            "lora_send = 'adapter' with compute_dtype = 'float32' on a GPU; expected 'bfloat16', the format of vLLM's "
            f"kernels for adapters, or {remedy}"
        )


def _sharded(config: Any) -> Iterator[str]:
    """Yield what does not go together with `fsdp`."""
    for name in ("fsdp_tensor_parallel", "fsdp_sequence_parallel"):
        if config.num_learners > 1 and config.num_learners % getattr(config, name):
            yield f"{name} = {getattr(config, name)}; expected a divisor of num_learners = {config.num_learners}"
    if config.fsdp_tensor_parallel > 1 and config.fsdp_sequence_parallel > 1:
        yield (
            f"fsdp_sequence_parallel = {config.fsdp_sequence_parallel} with fsdp_tensor_parallel = "
            f"{config.fsdp_tensor_parallel}; expected 1 of one of the two"
        )
    for name in ("fsdp_tensor_parallel", "fsdp_sequence_parallel"):
        if config.replay_retain and getattr(config, name) > 1:
            yield (
                f"replay_retain = {config.replay_retain!r} with {name} = {getattr(config, name)}; expected 1: the "
                "likeliest tokens are found in a whole head, for whole answers"
            )
    if config.fsdp_gather_dtype == "bfloat16" and config.compute_dtype != "bfloat16":
        yield (
            f"fsdp_gather_dtype = 'bfloat16' with compute_dtype = {config.compute_dtype!r}; expected compute_dtype = "
            "'bfloat16': products in float32 need weights in float32"
        )
    if config.fsdp_sequence_parallel > 1:
        yield from _splitting_tokens(config)
    if config.replay_history_by == "kl":
        yield "fsdp = True with replay_history_by = 'kl'; expected 'versions' or 'visits'"
    if config.lora_rank:
        yield "fsdp = True with lora_rank; expected one of the two: adapters are too small to shard"
    if config.num_learners < 2:
        yield f"fsdp = True with num_learners = {config.num_learners}; expected at least 2"
    if config.colocate:
        yield "fsdp = True with colocate = True; expected one of the two: shards cannot be moved off the GPU"
    if config.grad_clip_by != "global_norm":
        yield f"fsdp = True with grad_clip_by = {config.grad_clip_by!r}; expected 'global_norm'"
    if config.optimizer_name not in TORCH:
        yield f"fsdp = True with optimizer_name = {config.optimizer_name!r}; expected one of {', '.join(TORCH)}"
    if config.loss_settings().needs_batch_statistics:
        yield "fsdp = True with a loss that needs statistics of the whole batch (bapo); expected another loss"


def _splitting_tokens(config: Any) -> Iterator[str]:
    """Yield what does not go together with sequence parallelism."""
    shown = f"fsdp_sequence_parallel = {config.fsdp_sequence_parallel}"
    if config.prefix_sharing is False:
        yield f"{shown} with prefix_sharing = False; expected True: only the tokens of tries are split"
    if config.loss_settings().use_critic:
        yield f"{shown} with use_critic = True; expected False: no learner has the hidden states of all tokens"


def _placement(config: Any) -> Iterator[str]:
    num_gpus, learner_gpus = (config.num_gpus_per_env_runner or 0, config.num_gpus_per_learner or 0)
    has_engine_gpu = num_gpus > 0
    if config.num_env_runners == 0 and config.num_learners != 0:
        yield f"num_env_runners = 0 (all in one process); expected num_learners = 0, not {config.num_learners}"
    yield from _transfer(config, num_gpus, learner_gpus)
    if config.replay_diversity_device == "gpu" and config.num_env_runners == 0:
        yield (
            "replay_diversity_device = 'gpu' with num_env_runners = 0 (all in one process); expected 'cpu': the memory "
            "needs a process of its own, with its own CUDA runtime"
        )
    if learner_gpus > 1:
        yield f"num_gpus_per_learner = {learner_gpus:g}; expected at most 1: raise num_learners, with fsdp = True"
    if num_gpus >= 1 and config.engine_tensor_parallel_size != num_gpus:
        yield (
            f"engine_tensor_parallel_size = {config.engine_tensor_parallel_size}; expected "
            f"num_gpus_per_env_runner = {num_gpus:g}"
        )
    if config.colocate and has_engine_gpu and num_gpus + learner_gpus > 1:
        yield f"colocate = True with {num_gpus:g} + {learner_gpus:g} GPUs; expected fractions that sum to at most 1"
    is_several = config.num_env_runners > 1 or config.num_learners > 1
    if config.colocate and has_engine_gpu and is_several and max(num_gpus, learner_gpus) <= 0.5:
        yield (
            f"colocate = True with {num_gpus:g} + {learner_gpus:g} GPUs; expected one of the two above 0.5, such as "
            "0.6 + 0.4: Ray would place two engines, or two learners, on one GPU"
        )


def _transfer(config: Any, num_gpus: float, learner_gpus: float) -> Iterator[str]:
    """Yield what the transport between GPUs cannot do; checked here, because it would hang or fail in a run."""
    kind = config.weight_transfer
    if kind == "object_store":
        return
    shown = f"weight_transfer = {kind!r}"
    if not (num_gpus > 0 and learner_gpus > 0):
        yield f"{shown}; expected 'object_store' without GPUs on both sides"
    if config.engine == "transformers":
        yield f"{shown}; expected 'object_store' with engine = {config.engine!r}"
    if config.num_env_runners == 0:
        yield f"{shown} with num_env_runners = 0; expected 'object_store': engine and learner share one process"
    shares_card = bool(config.colocate) or 0 < num_gpus < 1 or 0 < learner_gpus < 1
    if kind == "nccl" and shares_card:
        yield (
            f"{shown} with num_gpus_per_env_runner = {num_gpus:g}, num_gpus_per_learner = {learner_gpus:g}; expected "
            "whole GPUs, or 'ipc': NCCL refuses two processes on one GPU"
        )
    if kind != "ipc":
        return
    if config.num_learners > 1:
        yield f"{shown} with num_learners = {config.num_learners}; expected 1, or 'object_store' or 'nccl'"
    if num_gpus > 0 and learner_gpus > 0 and (not shares_card or config.num_env_runners > 1):
        yield (
            f"{shown} with num_env_runners = {config.num_env_runners} and {num_gpus:g} + {learner_gpus:g} GPUs; "
            "expected one engine and one learner on one GPU, such as 0.6 + 0.4: memory of another GPU cannot be mapped"
        )


def _model(config: Any) -> Iterator[str]:
    if not isinstance(config._model_config, Mapping):
        yield f"model_config = {config._model_config!r}; expected {{'model': ...}}"
        return
    try:
        name = config.model_config["model"]
        check_model_name(name)
    except ValueError as error:
        yield f"model_config['model'] = {name!r}; {error}"
    extra = sorted(set(config.model_config) - {"model"})
    if extra:
        yield f"model_config has {extra}; expected only 'model'"


def _worlds(config: Any) -> Iterator[str]:
    if config.stream is not None:
        yield from _stream(config)
        return
    if config.env is None and not config.worlds:
        yield (
            "env = None; expected an environment: .environment('compare'), .data('my.jsonl') or "
            ".environment(worlds={...})"
        )
        return
    if config.env is not None and config.worlds:
        yield f"env = {config.env!r} and worlds = {sorted(config.worlds)}; expected one of the two"
        return
    if config.env is not None and not isinstance(config.env, str | type):
        yield f"env = {config.env!r}; expected a name, 'package.module:Class' or a class"
        return
    for name in ("worlds", "mixture"):
        value = getattr(config, name)
        if value is not None and (not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value)):
            yield f"{name} = {value!r}; expected a mapping from the names of environments"
            return
    for name, env_config in {**(config.worlds or {}), "env": config.env_config}.items():
        if not isinstance(env_config or {}, Mapping):
            yield f"env_config of {name} = {env_config!r}; expected a mapping"
            return
    try:
        config.world_creators()
    except ValueError as error:
        yield f"env: {error}" if not config.worlds else f"worlds: {error}"
        return
    weights = config.mixture or {}
    if config.mixture is not None and (set(weights) - set(config.world_configs()) or not weights):
        yield f"mixture = {weights!r}; expected weights of some of {sorted(config.world_configs())}"
    elif any(not is_number(weight) or weight <= 0 for weight in weights.values()):
        yield f"mixture = {weights!r}; expected weights above 0"


def _prompt_order(config: Any) -> Iterator[str]:
    """Yield errors for settings that draw environments, where every prompt is played once an epoch."""
    if config.prompt_order != "epochs":
        return
    if config.stream is not None:
        yield "prompt_order = 'epochs' with a stream; expected 'mixture': a stream changes the weights of its domains"
    if config.mixture and len(set(config.mixture.values())) > 1:
        yield f"prompt_order = 'epochs' with mixture = {config.mixture!r}; expected equal weights, or 'mixture'"


def _stream(config: Any) -> Iterator[str]:
    for name in ("env", "env_config", "worlds", "mixture"):
        if getattr(config, name):
            yield f"{name} = {getattr(config, name)!r}; expected nothing beside stream, whose entries set it"
    if faults := stream_faults(config.stream):
        yield from faults
        return
    try:
        config.world_creators()
    except ValueError as error:
        yield f"stream: {error}"


def _replay(config: Any) -> Iterator[str]:
    if not any(_group_size(config)):
        yield from group_size_errors(config.replay_settings(), _beside_memory(config))


def _beside_memory(config: Any) -> Run:
    """Return the settings of the run that the memory's depend on."""
    return Run(
        group_size=config.group_size,
        may_revisit=config.may_draw("revisit"),
        may_reuse=config.may_draw("reuse"),
        has_posterior=config.rule_of("advantage") == "posterior",
    )


def _fractions(config: Any, settings: PlannerSettings) -> Iterator[str]:
    low, high = settings.fraction_bounds
    for name in settings.adapted:
        fraction = getattr(config, f"replay_{name}_fraction")
        if isinstance(fraction, int | float) and not low <= fraction <= high:
            yield (
                f"replay_{name}_fraction = {fraction!r}; expected {low} to {high}, the planner_fraction_bounds within "
                f"which planner_adapt = {settings.adapt!r} moves it"
            )


def _planner(config: Any) -> Iterator[str]:
    settings = config.planner_settings()
    yield from _fractions(config, settings)
    if config.replay_revisit_fraction == AUTO and "revisit" in settings.adapted:
        yield (
            f"replay_revisit_fraction = 'auto' with planner_adapt = {settings.adapt!r}; expected a number, or 'reuse' "
            "or 'none': only one of them can move the fraction"
        )
    if settings.adapt != "none" and config.replay_capacity == 0:
        yield f"planner_adapt = {settings.adapt!r} with replay_capacity = 0; expected 'none' without a memory"


def _regularisers(config: Any) -> Iterator[str]:
    """Yield all errors; contradictions with other settings only if the parameters alone are valid."""
    faults = list(parameter_faults(config.regularisers))
    yield from faults
    for name, one in made(config.regularisers).items() if not faults else ():
        yield from one.faults(f"regularisers.{name}", config)


CHECKS = (
    *(_group_size, _pairs, _fitting, _placement, _model, _worlds, _prompt_order, _replay, _planner),
    *(faults_of_loss, _regularisers, faults_of_rollout),
)
