"""Maps setting names of TRL, verl, OpenRLHF and RLlib to the settings of SRL, for error messages.

    in_place_of("learning_rate", known)                -> "use lr"
    in_place_of("actor_rollout_ref.rollout.n", known)  -> "use group_size"
    in_place_of("group_sise", known)                   -> "did you mean group_size?"

A dotted name is looked up in full, then without its first part, and so on. Names as of TRL 0.24 (GRPOConfig), verl 0.6
(ppo_trainer.yaml), OpenRLHF 0.8.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

FLAGS = ("--out", "--resume", "--export", "--verbose", "--config")  # targets that are command-line flags

# foreign name: our settings; after ";" a note.
FOREIGN = {
    # TRL: GRPOConfig and the TrainingArguments under it
    "learning_rate": "lr",
    "num_generations": "group_size",
    "generation_batch_size": "num_prompts_per_batch group_size; prompts per batch, and episodes per prompt",
    "beta": "kl",
    "epsilon": "clip_low clip_high; the ratio stays within 1 - clip_low and 1 + clip_high",
    "epsilon_low": "clip_low",
    "epsilon_high": "clip_high",
    "delta": "clip_rule; {'name': 'two_sided', 'ratio_cap': ...}",
    "max_completion_length": "max_turn_tokens",
    "max_prompt_length": "max_episode_tokens; prompt and answers together",
    "max_length": "max_episode_tokens",
    "max_seq_length": "max_episode_tokens",
    "per_device_train_batch_size": "num_prompts_per_batch group_size; memory is bounded by micro_batch_tokens",
    "per_device_eval_batch_size": "engine; {'max_num_seqs': ...}",
    "gradient_accumulation_steps": "micro_batch_tokens; the whole batch is always one step",
    "num_iterations": "num_epochs; optimiser steps on each batch",
    "max_steps": "iterations",
    "num_train_epochs": "iterations; an iteration is one batch of prompts",
    "output_dir": "--out",
    "resume_from_checkpoint": "--resume",
    "model_name_or_path": "model",
    "gradient_checkpointing": "activation_checkpointing",
    "bf16": "compute_dtype; 'bfloat16'",
    "fp16": "compute_dtype; 'bfloat16' or 'float32'",
    "dtype": "compute_dtype",
    "torch_dtype": "compute_dtype",
    "loss_type": "loss; a preset such as 'grpo', 'dr_grpo' or 'dapo', or aggregation alone",
    "scale_rewards": "advantage; 'group' divides by the standard deviation, 'mean_only' does not",
    "importance_sampling_level": "ratio_level",
    "vllm_importance_sampling_correction": "rollout_is_correction",
    "vllm_importance_sampling_cap": "rollout_is_correction; {'tis_clip_max': ...}",
    "use_vllm": "engine; 'vllm' or 'transformers'",
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": "engine; {'memory_utilization': ...}",
    "vllm_tensor_parallel_size": "engine; {'tensor_parallel_size': ...}",
    "vllm_max_model_length": "max_episode_tokens",
    "mask_truncated_completions": "overlong_penalty",
    "sync_ref_model": "kl; {'reference': ...}",
    "ref_model_sync_steps": "kl; {'reference_every': ...}",
    "ref_model_mixup_alpha": "kl; {'reference_rate': ...}",
    "max_grad_norm": "grad_clip",
    "optim": "optimizer_name",
    "adam_beta1": "adam_betas; both rates",
    "adam_beta2": "adam_betas; both rates",
    "lr_scheduler_type": "lr; a schedule [[turns, rate], ...]",
    "warmup_steps": "lr; a schedule [[turns, rate], ...]",
    "warmup_ratio": "lr; a schedule [[turns, rate], ...]",
    "save_steps": "checkpoint_every",
    "save_total_limit": "checkpoints_kept",
    "eval_steps": "evaluation_interval",
    "eval_strategy": "evaluation_interval",
    "logging_steps": "num_transcripts; metrics are written every iteration",
    "log_completions": "num_transcripts",
    "num_completions_to_print": "num_transcripts",
    "chat_template": "prompt_format",
    "dataset": "env env_config; env = 'question_file' with env_config path=FILE",
    "dataset_name": "env env_config; env = 'question_file' with env_config hub_id and path",
    "train_dataset": "env env_config; env = 'question_file' with env_config path=FILE",
    "eval_dataset": "env env_config; env = 'question_file' has held-out questions",
    "reward_funcs": "env; the environment computes the reward",
    "data_seed": "seed",
    "lora_r": "lora",
    "lora_target_modules": "lora; {'targets': ...}",
    "target_modules": "lora; {'targets': ...}",
    # verl
    "data.train_batch_size": "num_prompts_per_batch",
    "data.val_batch_size": "evaluation_duration",
    "data.train_files": "env env_config; env = 'question_file' with env_config path=FILE",
    "data.val_files": "env env_config; env = 'question_file' has held-out questions",
    "train_files": "env env_config; env = 'question_file' with env_config path=FILE",
    "max_response_length": "max_turn_tokens",
    "response_length": "max_turn_tokens",
    "model.path": "model",
    "model.lora_rank": "lora",
    "enable_gradient_checkpointing": "activation_checkpointing",
    "rollout.n": "group_size",
    "rollout.name": "engine",
    "rollout.temperature": "temperature",
    "rollout.max_num_seqs": "engine; {'max_num_seqs': ...}",
    "max_num_seqs": "engine; {'max_num_seqs': ...}",
    "gpu_memory_utilization": "engine; {'memory_utilization': ...}",
    "tensor_model_parallel_size": "engine; {'tensor_parallel_size': ...}",
    "max_model_len": "max_episode_tokens",
    "optim.lr": "lr",
    "optim.weight_decay": "weight_decay",
    "ppo_epochs": "num_epochs",
    "ppo_mini_batch_size": "num_epochs; each epoch is one step over the whole batch",
    "ppo_micro_batch_size": "micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "micro_batch_tokens",
    "clip_ratio": "clip_low clip_high",
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "clip_ratio_c": "clip_rule; {'name': 'dual', 'loss_cap': ...}",
    "use_kl_loss": "kl",
    "kl_loss_coef": "kl",
    "kl_loss_type": "kl; {'estimator': ...}",
    "kl_coef": "kl",
    "kl_ctrl.kl_coef": "kl",
    "loss_agg_mode": "aggregation",
    "loss_mode": "loss",
    "adv_estimator": "advantage",
    "norm_adv_by_std_in_grpo": "advantage; 'mean_only' does not divide by the standard deviation",
    "lam": "advantage; {'name': 'gae', 'gae_lambda': ...}",
    "total_epochs": "iterations",
    "total_training_steps": "iterations",
    "save_freq": "checkpoint_every",
    "test_freq": "evaluation_interval",
    "default_local_dir": "--out",
    "resume_mode": "--resume",
    "max_actor_ckpt_to_keep": "checkpoints_kept",
    "n_gpus_per_node": "num_gpus_per_env_runner num_gpus_per_learner",
    "nnodes": "num_env_runners num_learners",
    "multi_turn.max_turns": "max_turns",
    "max_assistant_turns": "max_turns",
    # OpenRLHF
    "pretrain": "model",
    "actor_learning_rate": "lr",
    "n_samples_per_prompt": "group_size",
    "rollout_batch_size": "num_prompts_per_batch",
    "micro_train_batch_size": "micro_batch_tokens",
    "generate_max_len": "max_turn_tokens",
    "prompt_max_len": "max_episode_tokens; prompt and answers together",
    "init_kl_coef": "kl",
    "eps_clip": "clip_low clip_high",
    "eps_clip_low_high": "clip_low clip_high",
    "advantage_estimator": "advantage",
    "num_episodes": "iterations",
    "save_path": "--out",
    "ckpt_path": "--out",
    "prompt_data": "env env_config; env = 'question_file' with env_config path=FILE",
    "vllm_num_engines": "num_env_runners",
    "apply_chat_template": "prompt_format; 'chat'",
    # RLlib and Tune: names that AlgorithmConfig no longer has
    "lambda": "advantage; {'name': 'gae', 'gae_lambda': ...}",
    "clip_param": "clip_low clip_high",
    "num_workers": "num_env_runners",
    "num_rollout_workers": "num_env_runners",
    "num_sgd_iter": "num_epochs",
    "sgd_minibatch_size": "num_epochs; each epoch is one step over the whole batch",
    "environment": "env",
    "checkpoint_frequency": "checkpoint_every",
    "local_dir": "--out",
}


# Settings of other libraries that change what is sampled so that the learner's log-probs would be others.
UNSUPPORTED = dict.fromkeys(
    ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p", "top_p", "top_k", "logit_bias"),
    "it would change the distribution that answers are drawn from, and the learner could not compute their log-probs",
)


def targets_of(entry: str) -> list[str]:
    """Return the settings that an entry of `FOREIGN` names."""
    return entry.partition(";")[0].split()


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to a misspelt one, "" if none is similar."""
    return next(iter(difflib.get_close_matches(name, sorted(known), 1)), "")


def in_place_of(name: str, known: Collection[str], prefix: str = "") -> str:
    """Return a hint for an unknown setting, "use ...", "did you mean ...?" or a reason; "" if no name is similar.

    Args:
        name: the name as typed by the user.
        known: names of the settings to choose from.
        prefix: prefix of a setting in the hint, "--" for flags.
    """
    parts = name.strip("+-").replace("-", "_").casefold().split(".")
    for start in range(len(parts)):
        rest = ".".join(parts[start:])
        if rest in UNSUPPORTED:
            return UNSUPPORTED[rest]
        if rest in FOREIGN:
            return _use(rest, prefix)
        if rest in known and rest != name:
            return f"use {prefix}{rest}"
    wanted = parts[-1]
    if near := nearest(wanted, known):
        return f"did you mean {prefix}{near}?"
    near = nearest(wanted, FOREIGN)
    return _use(near, prefix) if near else ""


def _use(name: str, prefix: str) -> str:
    settings = " and ".join(f"{'' if target in FLAGS else prefix}{target}" for target in targets_of(FOREIGN[name]))
    note = FOREIGN[name].partition(";")[2].strip()
    return f"use {settings}{f' ({note})' if note else ''}"
