"""A whole GRPO run in one file, to read from top to bottom. No RLlib, no Ray, no vLLM, no replay.

    python docs/examples/minimal_grpo.py                  about half a minute on a CPU
    python docs/examples/minimal_grpo.py --iterations 5

Each iteration does what `SRL.training_step` does:

    plan      draw P new prompts
    rollout   sample G answers to each prompt, keep the ids and the log-prob of each sampled token
    batch     advantage of an answer = (its reward - mean of its group) / standard deviation of its group
    learn     one step on the clipped surrogate, averaged over all answer tokens of the batch

The package adds the rest: many turns, tools, a fast engine, several learners, checkpoints, and the memory.

Source: GRPO, arXiv 2402.03300 section 4.1; the token mean and the higher upper clip are DAPO's, arXiv 2503.14476.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import islice

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllib_srl.engine.models import local_model
from rllib_srl.envs.math.compare import Compare

NUM_PROMPTS = 16  # P, prompts of one iteration
GROUP_SIZE = 8  # G, answers to each prompt
MAX_NEW_TOKENS = 12
LEARNING_RATE = 3e-4
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # the ratio is clipped to [1 - low, 1 + high]
GRAD_CLIP = 1.0
NUM_HELD_OUT = 128


@dataclass(frozen=True)
class Rollout:
    """Sampled answers, one row each. Rows g = 0 .. G - 1 belong to prompt 0, the next G to prompt 1, and so on."""

    ids_BT: torch.Tensor  # prompt (padded on the left) and answer (padded on the right)
    attention_BT: torch.Tensor  # 1 on real tokens
    loss_mask_BT: torch.Tensor  # 1 on tokens that the policy wrote
    behaviour_logp_BT: torch.Tensor  # log-prob of each written token when it was sampled, in nats; 0 elsewhere
    rewards_B: torch.Tensor


def token_logps(model, ids_BT: torch.Tensor, attention_BT: torch.Tensor) -> torch.Tensor:
    """Return log p(token t | tokens before t), with 0 for the first token."""
    positions_BT = (attention_BT.cumsum(1) - 1).clamp(min=0)  # so that padding on the left shifts nothing
    logits = model(input_ids=ids_BT, attention_mask=attention_BT, position_ids=positions_BT).logits[:, :-1].float()
    logp_BT = torch.log_softmax(logits, -1).gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(logp_BT, (1, 0))


@torch.no_grad()
def play(model, tokenizer, env: Compare, prompt_ids: list[str], group_size: int, greedy: bool = False) -> Rollout:
    """Answer every prompt `group_size` times and grade the answers.

    Args:
        env: a gymnasium environment with text in and text out; its reward lies in [0, 1].
        prompt_ids: which tasks to play; `reset` takes one of them.
        greedy: take the most likely token instead of sampling.
    """
    prompts = [env.reset(options={"prompt_id": prompt_id})[0] for prompt_id in prompt_ids for _ in range(group_size)]
    given = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    ids_BT, attention_BT = given.input_ids, given.attention_mask
    start = ids_BT.shape[1]
    is_done_B = torch.zeros(len(prompts), dtype=torch.bool)
    (newline,) = tokenizer.encode("\n", add_special_tokens=False)
    for _ in range(MAX_NEW_TOKENS):
        positions_BT = (attention_BT.cumsum(1) - 1).clamp(min=0)
        logits_BV = model(input_ids=ids_BT, attention_mask=attention_BT, position_ids=positions_BT).logits[:, -1]
        next_B = logits_BV.argmax(-1) if greedy else torch.multinomial(logits_BV.float().softmax(-1), 1).squeeze(-1)
        next_B = next_B.where(~is_done_B, tokenizer.pad_token_id)
        ids_BT = torch.cat([ids_BT, next_B[:, None]], 1)
        attention_BT = torch.cat([attention_BT, (~is_done_B).long()[:, None]], 1)
        is_done_B |= (next_B == newline) | (next_B == tokenizer.eos_token_id)  # a turn of this environment is one line
        if is_done_B.all():
            break
    loss_mask_BT = attention_BT.clone()
    loss_mask_BT[:, :start] = 0
    rewards = []
    for index, row in enumerate(ids_BT.tolist()):
        answer = tokenizer.decode(row[start : int(attention_BT[index, start:].sum()) + start])
        env.reset(options={"prompt_id": prompt_ids[index // group_size]})
        rewards.append(env.step(answer)[1])
    logp_BT = token_logps(model, ids_BT, attention_BT) * loss_mask_BT
    return Rollout(ids_BT, attention_BT, loss_mask_BT, logp_BT, torch.tensor(rewards, dtype=torch.float32))


def advantages(rewards_B: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return (reward - mean of the group) / (standard deviation of the group + 1e-4); 0 in groups that agree."""
    rewards_PG = rewards_B.view(-1, group_size)
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    return (centred_PG / (rewards_PG.std(1, keepdim=True) + 1e-4)).flatten()


def grpo_loss(logp_BT: torch.Tensor, rollout: Rollout, advantage_B: torch.Tensor) -> torch.Tensor:
    """Return -mean over written tokens of min(r A, clip(r) A), with r = exp(logp - behaviour_logp)."""
    mask_BT = rollout.loss_mask_BT * (advantage_B != 0)[:, None]  # groups that agree count in no denominator
    ratio_BT = torch.exp((logp_BT - rollout.behaviour_logp_BT) * mask_BT)
    advantage_BT = advantage_B[:, None]
    clipped_BT = ratio_BT.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    surrogate_BT = torch.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)
    return -(surrogate_BT * mask_BT).sum() / mask_BT.sum().clamp(min=1)


def learn(model, optimizer: torch.optim.Optimizer, rollout: Rollout, group_size: int) -> float:
    """Make one optimiser step; return the norm of the gradient before clipping."""
    advantage_B = advantages(rollout.rewards_B, group_size)
    logp_BT = token_logps(model, rollout.ids_BT, rollout.attention_BT)
    optimizer.zero_grad()
    grpo_loss(logp_BT, rollout, advantage_B).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
    optimizer.step()
    return float(norm)


def main(argv: list[str] | None = None) -> None:
    """Train, and print the mean reward of each iteration."""
    parser = argparse.ArgumentParser(description="GRPO on one page.")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    torch.manual_seed(arguments.seed)

    # "tiny" comes with the package: 1M parameters, taught to answer half of such questions.
    directory = local_model("tiny")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    env = Compare({"num_shots": 0})  # "Which is largest: 17, 93 or 40?"
    fresh = iter(env.prompt_ids("train", seed=arguments.seed))
    heldout = list(islice(env.prompt_ids("heldout", seed=0), NUM_HELD_OUT))
    before = play(model, tokenizer, env, heldout, 1, greedy=True).rewards_B.mean()
    for iteration in range(1, arguments.iterations + 1):
        rollout = play(model, tokenizer, env, list(islice(fresh, NUM_PROMPTS)), GROUP_SIZE)
        norm = learn(model, optimizer, rollout, GROUP_SIZE)
        print(f"iteration {iteration:2}  reward {rollout.rewards_B.mean():.3f}  gradient norm {norm:.2f}", flush=True)
    after = play(model, tokenizer, env, heldout, 1, greedy=True).rewards_B.mean()
    print(f"held-out accuracy: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
