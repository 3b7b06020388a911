"""Validates an SRLConfig: plain functions that take the settings and return error messages.

Each message has the form "name = value; expected ...". Nothing here starts a process or loads a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from importlib.util import find_spec
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_srl.algorithm.loss_validation import errors_of_loss
from rllib_srl.algorithm.named import named_settings
from rllib_srl.algorithm.settings import NO_ATTRIBUTES, SETTINGS, errors_of
from rllib_srl.common.foreign_names import FOREIGN, in_place_of
from rllib_srl.common.setting_model import Clash, clashes, names_any
from rllib_srl.curriculum.streams import stream_errors
from rllib_srl.engine.adapters import MAX_RANK, TABLES
from rllib_srl.engine.models import check_model_name
from rllib_srl.learner.model_setup import TORCH, error_of
from rllib_srl.learner.regularisers.regularisers import made, parameter_errors
from rllib_srl.replay.selection.rules import DATELESS, SELECTIONS
from rllib_srl.replay.settings import ReplaySettings

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
OFF = (0, "none", "uniform")  # values that ask for nothing special, so it does not matter that nothing reads them
NO_REUSE = "has no effect with replay_reuse_fraction = 0: nothing is trained on again"
NO_REVISIT = "has no effect with replay_revisit_fraction = 0: no prompt is drawn again"


def config_errors(config: Any) -> list[str]:
    """Return all error messages of the settings, [] if they are valid.

    Combinations are checked with the defaults of settings that are invalid alone; errors that name these are dropped.
    """
    lines = [*_unknown(config), *_unused(config)]
    wrong, together = errors_of({name: getattr(config, name) for name in SETTINGS if name not in NO_ATTRIBUTES})
    if wrong:
        config = copy(config)
        vars(config).update({name: SETTINGS[name].initial for name in wrong})
    together += clashes((row for check in PAIRS for row in check(config)), config.loss_settings(), config)
    together += [line for check in CHECKS for line in check(config)]
    return lines + [*wrong.values(), *(line for line in together if not names_any(line, wrong))]


def warnings_of(config: Any) -> list[str]:
    """Return a line for each setting that has little or no effect; the settings are valid."""
    memory, loss = config.replay_settings(), config.loss_settings()
    may_revisit, may_reuse = config.may_draw("revisit"), config.may_draw("reuse")
    used = [rule for rule, may in ((memory.selection, may_revisit), (memory.reuse_selection, may_reuse)) if may]
    reads_history = loss.advantage == "posterior" or (may_revisit and memory.selection not in SELECTIONS.own)
    history = "history is read with advantage = 'posterior' or by rules such as replay_selection = 'contrib.mopps'"
    dates = "due dates are shown, but no draw depends on them; replay_selection = 'srl' draws what is due"
    of_reuse = ("reuse_selection", "max_uses", "max_age", "max_logp_gap")
    rows = [
        *((not may_reuse, name, NO_REUSE) for name in ("kl_on_reused", *(f"replay_{name}" for name in of_reuse))),
        *((not may_revisit, f"replay_{name}", NO_REVISIT) for name in ("selection", "min_recall_interval")),
        (not used, "replay_domains", "has no effect with both shares 0: no prompt or group is drawn"),
        *(
            (not config.may_hold(), f"replay_{name}", "has no effect without a stream or a callback that plans")
            for name in ("retain", "retain_answers", "retain_window")
        ),
        (set(used) <= {*DATELESS}, "replay_diversity_coeff", "has no effect: no draw is by 'srl' or your own rule"),
        (not reads_history, "replay_history_half_life", f"changes metrics only: {history}"),
        (
            may_revisit and memory.selection in DATELESS,
            "replay_spacing",
            f"with replay_selection = {memory.selection!r}: {dates}",
        ),
        (
            loss.aggregation != "constant" and not loss.overlong_penalty,
            "longest_answer",
            "has no effect: it is read with aggregation = 'constant' or overlong_penalty above 0",
        ),
    ]
    idle = [(name, getattr(config, name), text) for is_idle, name, text in rows if is_idle]
    kept = [row for row in idle if memory.is_on or not row[0].startswith(ReplaySettings.prefix)]
    named = named_settings(config._names)
    given = [
        (name, value, text)
        for name, value, text in kept
        if value not in OFF and (value != SETTINGS[name].initial or value != named.get(name, value))
    ]
    return [f"{name} = {value!r} {text}" for name, value, text in given]


def _unknown(config: Any) -> Iterator[str]:
    known = set(vars(type(config)()))
    for name in sorted(set(vars(config)) - known - {"class"}):  # RLlib's from_state leaves "class" behind
        if not name.startswith("_"):
            hint = in_place_of(name, {word for word in known if not word.startswith("_")})
            yield f"{name} = {getattr(config, name)!r}; expected no setting of that name{f'; {hint}' if hint else ''}"


def _unused(config: Any) -> Iterator[str]:
    inherited, defaults = set(vars(AlgorithmConfig())) - USED, vars(type(config)())
    for name in sorted(inherited):
        plain, is_private = name.lstrip("_"), name.startswith(("_", "callbacks_", "policies", "policy_"))
        is_watched = not is_private or plain in FOREIGN or name.endswith("_connector")
        if is_watched and getattr(config, name) != defaults[name]:
            use = f"; {in_place_of(plain, ())}" if plain in FOREIGN else ""
            yield f"{plain} = {getattr(config, name)!r}; expected {defaults[name]!r}: SRL does not use it{use}"
    if config.is_multi_agent:
        yield "policies = several; expected one: SRL trains a single policy"


def _group_size(config: Any) -> Iterator[Clash]:
    is_alone = config.group_size == 1 and config.loss_settings().advantage not in ("posterior", "none")
    yield is_alone, "group_size", "an integer of at least 2, or advantage = 'posterior' or 'none'"


def _pairs(config: Any) -> Iterator[Clash]:
    episode = config.longest_episode
    is_long = config.max_turn_tokens >= episode
    yield is_long, "max_turn_tokens", f"less than max_episode_tokens = {episode}, which includes the prompt"
    is_sgd, betas = config.optimizer_name == "sgd", SETTINGS["adam_betas"].default
    yield is_sgd and config.weight_decay, "weight_decay optimizer_name", "0, or another optimizer"
    has_betas = tuple(config.adam_betas) != betas
    yield is_sgd and has_betas, "adam_betas optimizer_name", f"{betas!r}, the default, or another optimizer"


def _ahead(config: Any) -> Iterator[Clash]:
    """Yield conflicts of playing prompts ahead of training."""
    if not config.max_lag:
        return
    num, loss = config.num_prompts_per_batch, config.loss_settings()
    is_small = config.in_flight is not None and config.in_flight <= num
    yield is_small, "in_flight", f"an integer above num_prompts_per_batch = {num}, or None"
    here = "at least 1: a runner plays while this process trains"
    yield config.num_env_runners == 0, "num_env_runners max_lag", here
    yield config.colocate, "colocate max_lag", "False: engine and learner would use the GPU at the same time"
    late = "0: the run would have to wait for further prompts"
    yield loss.dynamic_sampling_tries, "dynamic_sampling_tries max_lag", late
    yield loss.correction == "none", "correction max_lag", "a correction for tokens of older weights"
    yield loss.kl_coeff and loss.kl_in_reward, "kl_coeff max_lag", "0, or a KL in the loss"
    is_forgotten = config.late == "memory" and not config.replay_capacity
    yield is_forgotten, "replay_capacity max_lag", "a memory, or late = 'drop'"


def _fitting(config: Any) -> Iterator[Clash]:
    is_offloaded = config.activation_checkpointing == "offload" and not config.num_gpus_per_learner
    place = "num_gpus_per_learner above 0: on a CPU they are in host memory already"
    yield is_offloaded, "activation_checkpointing", place
    is_missing = config.lora_rank and find_spec("peft") is None
    yield is_missing, "lora_rank", "the package peft: pip install 'rllib_srl[lora]'"


def _optimizer(config: Any) -> Iterator[str]:
    if error := error_of(config.optimizer_name, config.num_gpus_per_learner or 0):
        yield error


def _adapters_in_vllm(config: Any) -> Iterator[Clash]:
    """Yield why vLLM cannot apply the adapters itself; its engine checks the layers of the model when it starts."""
    is_vllm = config.engine == "vllm" or (config.engine == "auto" and find_spec("vllm") is not None)
    if not config.lora_rank or config.lora_send != "adapter" or not is_vllm:
        return
    remedy = "lora_send = 'merged'"
    is_high, tables = config.lora_rank > MAX_RANK, sorted({*config.lora_targets} & TABLES)
    yield is_high, "lora_rank", f"at most {MAX_RANK}, the highest that vLLM applies, or {remedy}"
    yield tables, "lora_targets", f"layers inside the decoder with vLLM, not {tables}, or {remedy}"
    is_wide = config.num_gpus_per_env_runner and config.compute_dtype == "float32"
    kernels = f"'bfloat16' on a GPU, the format of vLLM's kernels for adapters, or {remedy}"
    yield is_wide, "lora_send compute_dtype", kernels


def _sharded(config: Any) -> Iterator[Clash]:
    """Yield conflicts with `fsdp`."""
    if config.fsdp is not True:
        return
    num = config.num_learners
    is_narrow = config.fsdp_gather_dtype == "bfloat16" and config.compute_dtype != "bfloat16"
    products = "compute_dtype = 'bfloat16': products in float32 need weights in float32"
    yield is_narrow, "fsdp_gather_dtype compute_dtype", products
    yield config.lora_rank, "fsdp lora_rank", "one of the two: adapters are too small to shard"
    yield num < 2, "fsdp num_learners", "at least 2"
    yield config.colocate, "fsdp colocate", "one of the two: shards cannot be moved off the GPU"
    yield config.grad_clip_by != "global_norm", "fsdp grad_clip_by", "'global_norm'"
    yield config.optimizer_name not in TORCH, "fsdp optimizer_name", f"one of {', '.join(TORCH)}"


def _placement(config: Any) -> Iterator[Clash]:
    engine, learner = config.num_gpus_per_env_runner or 0, config.num_gpus_per_learner or 0
    is_one = config.num_env_runners == 0
    expected_learners = "num_learners = 0: without env runners there is one process"
    yield is_one and config.num_learners, "num_env_runners num_learners", expected_learners
    expected_device = "'cpu': the memory needs its own process, with its own CUDA runtime"
    yield is_one and config.replay_diversity_device == "gpu", "replay_diversity_device num_env_runners", expected_device
    yield learner > 1, "num_gpus_per_learner", "at most 1: raise num_learners, with fsdp = True"
    is_split = engine >= 1 and config.engine_tensor_parallel_size != engine
    yield is_split, "engine_tensor_parallel_size", f"num_gpus_per_env_runner = {engine:g}"
    both = "colocate num_gpus_per_env_runner num_gpus_per_learner"
    shares_card = config.colocate and engine > 0
    yield shares_card and engine + learner > 1, both, "fractions that sum to at most 1"
    is_several = config.num_env_runners > 1 or config.num_learners > 1
    above = (
        "one of the two above 0.5, such as 0.6 + 0.4: Ray would place two engines, or two learners, on one GPU"
    )
    yield shares_card and is_several and max(engine, learner) <= 0.5, both, above


def _model(config: Any) -> Iterator[str]:
    if not isinstance(config._model_config, Mapping):
        yield f"model_config = {config._model_config!r}; expected {{'model': ...}}"
        return
    try:
        name = config.model_config["model"]
        check_model_name(name)
    except ValueError as error:
        yield f"model = {name!r}; {error}"
    extra = sorted(set(config.model_config) - {"model"})
    if extra:
        yield f"model_config has {extra}; expected only 'model'"


def _envs(config: Any) -> Iterator[str]:
    if config.stream is not None:
        yield from _stream(config)
        return
    if config.env is None and not config.envs:
        yield "env = None; expected an environment such as 'compare', or data = 'my.jsonl', or several as envs"
        return
    if config.env is not None and config.envs:
        yield f"env = {config.env!r} and envs = {sorted(config.envs)}; expected one of the two"
        return
    if config.env is not None and not isinstance(config.env, str | type):
        yield f"env = {config.env!r}; expected a name, 'package.module:Class' or a class"
        return
    try:
        config.env_creators()
    except ValueError as error:
        yield f"env: {error}" if not config.envs else f"envs: {error}"
        return
    weights = config.mixture or {}
    if config.mixture is not None and (set(weights) - set(config.env_configs()) or not weights):
        yield f"mixture = {weights!r}; expected weights of some of {sorted(config.env_configs())}"


def _prompt_order(config: Any) -> Iterator[Clash]:
    """Yield settings that draw environments, in conflict with playing every prompt once an epoch."""
    if config.prompt_order == "epochs":
        whole = "'mixture': a stream changes the weights of its domains"
        yield config.stream is not None, "prompt_order stream", whole
        is_unequal = config.mixture and len(set(config.mixture.values())) > 1
        yield is_unequal, "prompt_order mixture", "equal weights, or 'mixture'"


def _stream(config: Any) -> Iterator[str]:
    for name in ("env", "env_config", "envs", "mixture"):
        if getattr(config, name):
            yield f"{name} = {getattr(config, name)!r}; expected it unset with stream, whose entries set it"
    if errors := stream_errors(config.stream):
        yield from errors
        return
    try:
        config.env_creators()
    except ValueError as error:
        yield f"stream: {error}"


def _replay(config: Any) -> Iterator[Clash]:
    settings = config.replay_settings()
    is_alone = config.group_size == 1 and not any(is_wrong for is_wrong, *_ in _group_size(config))
    uniform = "'uniform', or by = 'reward': one reward does not vary, so that all draws would be uniform"
    for kind, name in (("revisit", "selection"), ("reuse", "reuse_selection")):
        by = getattr(settings, f"{name}_config").get("by")
        reads_deviation = getattr(settings, name) == "per" and by in (None, "abs_advantage")
        is_even = settings.is_on and reads_deviation and is_alone and config.may_draw(kind)
        yield is_even, f"replay_{name} group_size", uniform


def _regularisers(config: Any) -> Iterator[str]:
    """Yield all errors; contradictions with other settings only if the parameters alone are valid."""
    errors = list(parameter_errors(config.regularisers))
    yield from errors
    for name, regulariser in made(config.regularisers).items() if not errors else ():
        yield from regulariser.errors(f"regularisers.{name}", config)


PAIRS = (
    *(_group_size, _pairs, _ahead, _fitting, _adapters_in_vllm, _sharded, _placement, _prompt_order),
    _replay,
)
CHECKS = (_optimizer, _model, _envs, errors_of_loss, _regularisers)
