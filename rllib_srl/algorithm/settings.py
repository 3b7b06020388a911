"""All settings of SRL: their tables, and the settings with parameters.

    SETTINGS                name -> default and meaning of each setting that users give
    GROUPS["clip_rule"]     a setting with parameters: clip_rule={"name": "dual", "loss_cap": 2.0}
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rllib_srl.common.setting_tables import Setting, groups_of, prefixed, public
from rllib_srl.curriculum import TABLE as PLANNER_TABLE
from rllib_srl.engine.adapters import TARGETS
from rllib_srl.losses.presets import PRESET, filled
from rllib_srl.losses.settings import TABLE as LOSS_TABLE
from rllib_srl.replay.settings import TABLE as REPLAY_TABLE

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    "worlds": Setting(None, "several environments: name -> env_config; None: `env` alone"),
    "mixture": Setting(None, "name -> sampling weight of each environment among fresh prompts; None: equal weights"),
    "prompt_order": Setting(
        "mixture",
        '"mixture" (each environment in passes of its own, drawn by weight) or "epochs" (each prompt of all '
        "environments once an epoch)",
    ),
    "stream": Setting(
        None, "domains that change over training, instead of env and worlds (docs/continual.md); None: fixed"
    ),
}
ENV_RUNNERS = {
    "engine": Setting(
        "auto",
        '"vllm", "transformers" (exact but slow), or "auto": vLLM if it is installed',
        "engine.name",
        is_head=True,
    ),
    "engine_tensor_parallel_size": Setting(
        1, "GPUs over which one engine splits the model", "engine.tensor_parallel_size"
    ),
    "engine_memory_utilization": Setting(
        None,
        "vLLM on a GPU: share of the GPU's memory to reserve, in (0, 1]; None: 0.9, or 0.45 beside a learner",
        "engine.memory_utilization",
    ),
    "engine_kv_cache_gib": Setting(1.0, "vLLM on a CPU: size of the KV cache, GiB", "engine.kv_cache_gib"),
    "engine_max_num_seqs": Setting(
        256, "maximum number of turns that one engine generates at the same time", "engine.max_num_seqs"
    ),
    "engine_num_threads": Setting(
        None, "CPU threads per engine; None: OMP_NUM_THREADS if set, else its share of all cores", "engine.num_threads"
    ),
    "weight_transfer": Setting(
        "object_store", 'transport to the engines: "object_store"; on GPUs also "nccl" or "ipc"'
    ),
    "colocate": Setting(
        None,
        "engine and learner take turns on one GPU: the engine sleeps (frees its memory) during updates; None: True "
        "only where the default shares put both on one GPU and its memory does not hold both, or is unknown",
    ),
    "prompt_format": Setting("text", '"text" (observations as plain text) or "chat" (the model\'s chat template)'),
    "temperature": Setting(1.0, "sampling temperature in training, > 0; also applied to the learner's log-probs"),
    "max_turns": Setting(8, "maximum number of turns in an episode"),
    "max_turn_tokens": Setting(64, "maximum number of tokens the policy generates in a turn"),
    "max_episode_tokens": Setting(
        None, "maximum tokens in an episode with its prompt, and the engine's context; None: 1024, or the model's less"
    ),
    "env_timeout_s": Setting(10.0, "timeout of one environment reset or step, seconds"),
    "num_env_threads": Setting(8, "threads per runner for calls to environments"),
    "max_concurrent_episodes": Setting(
        None, "maximum number of episodes that a runner plays at the same time, for environments that start programs; "
        "None: all"
    ),
    "max_lag": Setting(
        0,
        "policy updates between the start of a group and its training, at most; 0: rollout and training take turns; "
        "above 0: runners play on during updates, docs/rollouts.md",
    ),
    "in_flight": Setting(
        None,
        "with max_lag: groups that are played or wait to be trained on, at most; None: (max_lag + 1) * "
        "num_prompts_per_batch",
    ),
    "slice_s": Setting(0.5, "with max_lag: seconds that a runner plays between two chances to load weights"),
    "late": Setting(
        "memory", 'with max_lag: groups with more lag are stored and not trained on ("memory"), or dropped ("drop")'
    ),
    "num_transcripts": Setting(2, "groups per runner and iteration that are written to transcripts.jsonl; 0: none"),
}
TRAINING = {
    "num_prompts_per_batch": Setting(16, "number of prompts played in each iteration (P)"),
    "group_size": Setting(8, "episodes per prompt (G), at least 2 (posterior: 1)"),
    "advantage": Setting(
        PRESET,
        "group mean_only batch leave_one_out posterior gae, docs/losses.md (group if no preset)",
        "advantage.name", is_head=True,
    ),
    **LOSS_TABLE,
    "regularisers": Setting(
        None, "terms against forgetting by name: ewc l2 lwf, with parameters, docs/losses.md; None: none"
    ),
    "compute_dtype": Setting(
        "auto", '"float32", "bfloat16", or "auto": bfloat16 if the hardware supports it, else float32'
    ),
    "micro_batch_tokens": Setting(
        4096, "maximum tokens per forward and backward pass; a longer episode gets its own pass"
    ),
    "prefix_sharing": Setting(
        True, "compute shared prompts once; disabled at start-up for models where this is not exact"
    ),
    "activation_checkpointing": Setting(
        False,
        "True: store each layer's input only and recompute the rest (less memory, slower); \"offload\": the same, with "
        "the inputs in host memory, on GPUs",
    ),
    "fsdp": Setting(
        False, "shard weights, gradients and optimiser state over the learners (FSDP2), docs/gpu.md",
        "fsdp.enabled", is_head=True,
    ),
    "fsdp_tensor_parallel": Setting(
        1, "learners over which each matrix is split, a divisor of num_learners; 1: none", "fsdp.tensor_parallel",
        ("True",),
    ),
    "fsdp_sequence_parallel": Setting(
        1, "learners over which the tokens of a pass are split, a divisor of num_learners; 1: none",
        "fsdp.sequence_parallel", ("True",),
    ),
    "fsdp_gather_dtype": Setting(
        "float32",
        "format in which a learner gathers the weights of layers from the others: \"bfloat16\" halves that traffic and "
        "its memory, with compute_dtype = \"bfloat16\"; what is stored and summed stays float32",
        "fsdp.gather_dtype", ("True",),
    ),
    "lora_rank": Setting(
        0, "rank of LoRA adapters, the only weights trained; 0: no adapters, train all weights",
        "lora.rank", is_head=True,
    ),
    "lora_alpha": Setting(None, "adapters are scaled by alpha / rank; None: by 2", "lora.alpha"),
    "lora_targets": Setting(TARGETS, "layers that get adapters, by the last part of their names", "lora.targets"),
    "lora_send": Setting(
        "adapter",
        'what engines receive: the "adapter", which they apply themselves, or "merged" weights, docs/gpu.md',
        "lora.send",
    ),
    "optimizer_name": Setting(
        "adamw",
        '"adamw", "sgd", "adamw_bf16" (half the state) or "adamw_8bit"; on GPUs also "paged_adamw" or '
        '"paged_adamw_8bit"',
    ),
    "adam_betas": Setting((0.9, 0.999), "AdamW's beta1 and beta2"),
    "weight_decay": Setting(0.0, "AdamW's decoupled weight decay; 0: none"),
    "update_timeout_s": Setting(1800.0, "timeout of one update of the learners, seconds"),
    "sync_timeout_s": Setting(300.0, "timeout of one weight transfer, seconds"),
    "start_timeout_s": Setting(600.0, "timeout of the start or restart of engines, and of learners, seconds"),
    "checkpoint_every": Setting(10, "iterations between checkpoints; 0: no checkpoints"),
    "checkpoints_kept": Setting(2, "number of newest checkpoints kept in log_directory"),
    "seal_key_file": Setting(
        None, "file with the key that signs checkpoints; None: $RLLIB_SRL_SEAL_KEY_FILE or one per user"
    ),
    "log_directory": Setting(
        None, "directory of checkpoints, transcripts and event files; None: a new one in ~/ray_results"
    ),
    "check_resources": Setting(
        True, "fail at start-up if the cluster is too small; False: for clusters that grow on demand"
    ),
}
EVALUATION = {
    "evaluation_pass_k": Setting(0, "number of sampled answers per held-out prompt for pass@k; 0: no pass@k"),
    "evaluation_iterations": Setting(
        0, "self-improvement steps per greedy answer, in environments that support it; 0: none"
    ),
}
REPLAY = prefixed(REPLAY_TABLE, "replay_")
PLANNER = prefixed(PLANNER_TABLE, "planner_")
FLAT = {**ENVIRONMENT, **ENV_RUNNERS, **TRAINING, **EVALUATION, **REPLAY, **PLANNER}  # parameters by their flat names
GROUPS = groups_of(FLAT)
SETTINGS = public(FLAT)

_warned: set[str] = set()


def warn_once(line: str) -> None:
    """Log a warning once per process: a run validates its settings several times."""
    if line not in _warned:
        _warned.add(line)
        logger.warning(line)


def place_of(name: str) -> str:
    """Return how users write a parameter, given its flat name: "kl={'coeff': ...}"; "" for other names."""
    row = FLAT.get(name)
    if row is None or not row.of or name == row.group:
        return ""
    return f"{row.group}={{...}}" if row.parameter == "*" else f"{row.group}={{{row.parameter!r}: ...}}"


def rule_of(setting: str, value: Any, loss: Any) -> Any:
    """Return the value of the head of a setting with parameters; that of the preset `loss`, if it is left to it."""
    group = GROUPS[setting]
    name, rule = group.flat[group.head], group.given(value).get(group.head, group.default(group.head))
    return filled({name: rule}, loss if isinstance(loss, str) else None)[name]


def folded(values: Mapping[str, Any], earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return settings over earlier ones; a dictionary without its head changes the earlier value.

    Args:
        values: settings by name.
        earlier: settings that `values` overrides.
    """
    result = dict(earlier or {})
    for name, value in values.items():
        is_change = name in GROUPS and isinstance(value, Mapping) and GROUPS[name].head not in value
        base = GROUPS[name].given(result[name]) if is_change and name in result else {}
        result[name] = {**base, **value} if is_change else value
    return result
