"""Two tasks in turn in plain torch: with a memory of right answers the first one is kept. No Ray, no RLlib.

    python docs/examples/torch_memory.py        about ten seconds

Is a digit 5 or more? Is it odd? Both have one answer in two and share all weights, so the second undoes the first.
"""

import numpy as np
import torch

from rllib_srl.memory import Retention, SRLReplayBuffer
from rllib_srl.types import Group, Prompt, StopReason

DIGITS = torch.arange(10)
TASKS = {"large": (DIGITS >= 5).long(), "odd": DIGITS % 2}  # the right answer to each digit
GROUP_SIZE, ITERATIONS = 16, 60
ASKED = {task: torch.stack([DIGITS, torch.full_like(DIGITS, 10 + i)], 1) for i, task in enumerate(TASKS)}


def group_of(name, task, digit, answers_G, logp_G, rewards_G) -> Group:
    tokens_GT = np.column_stack([np.tile(ASKED[task][digit], (GROUP_SIZE, 1)), answers_G]).astype(np.int32)
    return Group(
        group_id=name, prompt=Prompt("digits", f"{task} {digit}", domain=task), token_ids_N=tokens_GT.ravel(),
        loss_mask_N=np.tile([False, False, True], GROUP_SIZE), offsets=3 * np.arange(GROUP_SIZE + 1),
        behaviour_logp_N=np.column_stack([np.zeros((GROUP_SIZE, 2), np.float32), logp_G]).ravel(), rewards_G=rewards_G,
        versions_G2=np.zeros((GROUP_SIZE, 2), np.int64), stop_reasons=(StopReason.TERMINATED,) * GROUP_SIZE,
    )  # fmt: skip


def run(weight: float) -> dict[str, float]:
    torch.manual_seed(1)
    policy = torch.nn.Sequential(torch.nn.EmbeddingBag(12, 32, mode="sum"), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.003)
    buffer, retention = SRLReplayBuffer(capacity=1_000, admit=None), Retention(weight)
    for now in range(1, 1 + len(TASKS) * ITERATIONS):
        task = list(TASKS)[(now - 1) // ITERATIONS]
        likely = torch.distributions.Categorical(logits=policy(ASKED[task]))
        answers_GD = likely.sample((GROUP_SIZE,))
        logp_GD, rewards_GD = likely.log_prob(answers_GD), (answers_GD == TASKS[task]).float()
        loss = -((rewards_GD - rewards_GD.mean(0)) * logp_GD).mean()
        if held := buffer.draw_answers(16, now, without_domains=[task]):  # answers to what is not learned now
            tokens = torch.tensor(np.array([one.token_ids_N for one in held])).long()
            domains = [one.prompt.domain for one in held]
            loss = loss + retention.loss(policy(tokens[:, :2]).split(1), tokens[:, 2:].unbind(), domains)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        played = [one.detach().T.numpy() for one in (answers_GD, logp_GD, rewards_GD)]
        buffer.add([group_of(f"{now}.{d}", task, d, *(one[d] for one in played)) for d in range(10)], now)
    return {task: policy(ASKED[task]).softmax(1)[DIGITS, TASKS[task]].mean().item() for task in TASKS}


if __name__ == "__main__":
    for name, weight in (("without", 0.0), ("with   ", 1.0)):
        print(name, "retention ", "  ".join(f"{task} {accuracy:.2f}" for task, accuracy in run(weight).items()))
