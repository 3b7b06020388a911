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

# Targets that are flags of the command line.
FLAGS = ("--out", "--resume", "--export", "--verbose", "--config", "--data", "--reward")

# Our settings, after ";" a note: the names of TRL, verl, OpenRLHF and earlier RLlib for them.
OURS = {
    "lr": "learning_rate optim.lr actor_learning_rate",
    "group_size": "num_generations rollout.n n_samples_per_prompt",
    "num_prompts_per_batch group_size; prompts per batch, and episodes per prompt": "generation_batch_size batch_size",
    "kl_coeff": "beta use_kl_loss kl_loss_coef kl_coef kl_ctrl.kl_coef init_kl_coef",
    "clip_low clip_high; the ratio stays within 1 - clip_low and 1 + clip_high": "epsilon",
    "clip_low": "epsilon_low clip_ratio_low",
    "clip_high": "epsilon_high clip_ratio_high",
    "clip_delta clip_rule; 'two_sided'": "delta",
    "max_turn_tokens": "max_completion_length max_response_length response_length generate_max_len",
    "max_episode_tokens; prompt and answers together": "max_prompt_length prompt_max_len",
    "max_episode_tokens": "max_length max_seq_length vllm_max_model_length max_model_len",
    "num_prompts_per_batch group_size; memory is bounded by micro_batch_tokens": "per_device_train_batch_size",
    "engine_max_num_seqs":
        "per_device_eval_batch_size rollout.max_num_seqs max_num_seqs num_envs_per_env_runner",
    "micro_batch_tokens; the whole batch is always one step": "gradient_accumulation_steps",
    "num_epochs; optimiser steps on each batch": "num_iterations",
    "iterations": "max_steps total_epochs total_training_steps num_episodes",
    "iterations; an iteration is one batch of prompts": "num_train_epochs",
    "--out": "output_dir default_local_dir save_path ckpt_path local_dir",
    "--resume": "resume_from_checkpoint resume_mode",
    "model": "model_name_or_path model.path pretrain",
    "activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "compute_dtype; 'bfloat16'": "bf16",
    "compute_dtype; 'bfloat16' or 'float32'": "fp16",
    "compute_dtype": "dtype torch_dtype",
    "loss; a preset such as 'grpo', 'dr_grpo' or 'dapo', or aggregation alone": "loss_type",
    "advantage; 'group' divides by the standard deviation, 'mean_only' does not": "scale_rewards",
    "ratio_level": "importance_sampling_level",
    "correction": "vllm_importance_sampling_correction",
    "tis_clip_max": "vllm_importance_sampling_cap",
    "engine; 'vllm' or 'transformers'": "use_vllm",
    "colocate": "vllm_mode",
    "engine_memory_utilization": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "engine_tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "overlong_penalty": "mask_truncated_completions",
    "grad_clip": "max_grad_norm",
    "optimizer_name": "optim optimizer",
    "adam_betas; both rates": "adam_beta1 adam_beta2",
    "lr; a schedule [[turns, rate], ...]": "lr_scheduler_type warmup_steps warmup_ratio",
    "checkpoint_every": "save_steps save_freq checkpoint_frequency",
    "checkpoints_kept": "save_total_limit max_actor_ckpt_to_keep",
    "evaluation_interval": "eval_steps eval_strategy test_freq",
    "num_transcripts; metrics are written every iteration": "logging_steps",
    "num_transcripts": "log_completions num_completions_to_print",
    "prompt_format": "chat_template env_to_module_connector module_to_env_connector",
    "--data; a file, a folder or a data set of the hub":
        "dataset train_dataset dataset_name data.train_files train_files prompt_data",
    "--data; a part of the rows is held out": "eval_dataset data.val_files",
    "--reward; module:function": "reward_funcs reward_fn",
    "env; the environment computes the reward": "clip_rewards",
    "env_config; num_shots=4": "num_shots",
    "seed": "data_seed",
    "lora_rank": "lora_r model.lora_rank",
    "lora_targets": "lora_target_modules target_modules",
    "num_prompts_per_batch group_size": "train_batch_size train_batch_size_per_learner",
    "num_prompts_per_batch; an iteration is one batch":
        "min_sample_timesteps_per_iteration min_train_timesteps_per_iteration",
    "num_prompts_per_batch": "data.train_batch_size rollout_batch_size",
    "evaluation_duration": "data.val_batch_size",
    "engine": "rollout.name",
    "temperature": "rollout.temperature explore",
    "weight_decay": "optim.weight_decay",
    "num_epochs": "ppo_epochs num_sgd_iter",
    "num_epochs; each epoch is one step over the whole batch": "ppo_mini_batch_size sgd_minibatch_size minibatch_size",
    "micro_batch_tokens":
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu micro_train_batch_size",
    "clip_low clip_high": "clip_ratio eps_clip eps_clip_low_high clip_param",
    "dual_clip clip_rule; 'dual'": "clip_ratio_c",
    "kl_estimator": "kl_loss_type",
    "aggregation": "loss_agg_mode",
    "loss": "loss_mode",
    "advantage": "adv_estimator advantage_estimator",
    "advantage; 'mean_only' does not divide by the standard deviation": "norm_adv_by_std_in_grpo",
    "num_gpus_per_env_runner num_gpus_per_learner": "n_gpus_per_node num_gpus",
    "num_env_runners num_learners": "nnodes",
    "max_turns": "multi_turn.max_turns max_assistant_turns",
    "num_env_runners": "vllm_num_engines num_workers num_rollout_workers",
    "prompt_format; 'chat'": "apply_chat_template",
    "env": "environment",
}
FOREIGN = {name: entry.partition(";") for entry, names in OURS.items() for name in names.split()}

# Settings of other libraries that change sampling, so that the learner's log-probs would differ from the engine's.
UNSUPPORTED = dict.fromkeys(
    ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p", "top_p", "top_k", "logit_bias"),
    "it would change the distribution that answers are drawn from, and the learner could not compute their log-probs",
)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to a misspelt one, "" if none is similar."""
    return next(iter(difflib.get_close_matches(name, sorted(known), 1)), "")


def in_place_of(name: str, known: Collection[str], prefix: str = "") -> str:
    """Return a hint for an unknown setting, "use ...", "did you mean ...?" or a reason; "" if no name is similar.

    `prefix` stands in front of a setting in the hint: "--" for flags.
    """
    parts = name.strip("+-").replace("-", "_").casefold().split(".")
    for start in range(len(parts)):
        tail = ".".join(parts[start:])
        if tail in UNSUPPORTED:
            return UNSUPPORTED[tail]
        if tail in FOREIGN:
            return _use(tail, prefix)
        if tail in known and tail != name:
            return f"use {prefix}{tail}"
    wanted = parts[-1]
    if longer := sorted((word for word in known if word.startswith(f"{wanted}_")), key=lambda word: (len(word), word)):
        return f"use {' or '.join(prefix + word for word in longer[:3])}"
    if near := nearest(wanted, known):
        return f"did you mean {prefix}{near}?"
    near = nearest(wanted, FOREIGN)
    return _use(near, prefix) if near else ""


def _use(name: str, prefix: str) -> str:
    ours, _, note = FOREIGN[name]
    settings = " and ".join(f"{'' if target in FLAGS else prefix}{target}" for target in ours.split())
    return f"use {settings}{f' ({note.strip()})' if note else ''}"
