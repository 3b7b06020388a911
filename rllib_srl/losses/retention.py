"""Compute the KL that holds stored right answers at the policy that gave them: pure torch.

    KL_t    sum_k p_k (log p_k - log q_k) + p_rest (log p_rest - log q_rest)      k >= 1 stored tokens
            exp(d) - d - 1,  d = log q - log p of the sampled token               k = 0
    loss    weight * sum over domains of  mean over its answers of KL_y / T       KL_y = sum_t KL_t, nats per answer

p is the stored policy, q the policy in training, both at the sampling temperature; T is the mean length of the domain's
answers, so a domain's part is the mean KL over the tokens of its answers. Each domain counts fully: divided by their
number, the force on each would fall as the stream grows.

    retention = Retention(weight=1.0)
    target = retention.target(logits_TV, tokens_T)                    when a right answer is first trained on
    loss = retention.loss([logits_TV, ...], [target, ...], domains)   at every later update

Sources: Rolnick et al. 2019 (CLEAR), arXiv 1811.11682 (policy cloning: KL of stored and current policy on replay);
Buzzega et al. 2020 (DER), arXiv 2004.07211; 2503.16870 (the k likeliest tokens and the rest as one class).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rllib_srl.losses.kl import k3
from rllib_srl.types import Target

LEAST_REST = 1e-6  # probability of all other tokens below which they are ignored: the limit of fp32
LEAST_STORED_REST = 5e-4  # the same for the stored policy, whose log-probs are rounded to fp16


def top_kl(stored_Nk: torch.Tensor, logp_Nk: torch.Tensor, least: float = LEAST_STORED_REST) -> torch.Tensor:
    """Return sum_k p_k (log p_k - log q_k) + p_rest (log p_rest - log q_rest) [N], nats.

    p_rest and q_rest are the probabilities of all other tokens together. So this is the KL between the two
    distributions after all other tokens were merged into one, at most the KL over the whole vocabulary.

    Args:
        stored_Nk: log-probs log p_k of the k likeliest tokens of the stored distribution.
        logp_Nk: log-probs log q_k of the same tokens under the policy in training, with gradient.
        least: value of p_rest up to which it counts as 0.
    """
    p_rest, q_rest = (1 - each.exp().sum(-1) for each in (stored_Nk, logp_Nk))
    log_p, log_q = (rest.clamp(min=LEAST_REST).log() for rest in (p_rest, q_rest))
    over_top = (stored_Nk.exp() * (stored_Nk - logp_Nk)).sum(-1)
    return over_top + torch.where(p_rest > least, p_rest, 0.0) * (log_p - log_q)


def token_kl(
    stored_Nk: torch.Tensor, logp_Nk: torch.Tensor, stored_N: torch.Tensor, logp_N: torch.Tensor
) -> torch.Tensor:
    """Return KL_t of each token [N], nats.

    Args:
        stored_Nk: as in `top_kl`; with k = 0 the sampled tokens decide.
        logp_Nk: as in `top_kl`.
        stored_N: stored log-probs of the sampled tokens.
        logp_N: those under the policy in training, with gradient.
    """
    return top_kl(stored_Nk, logp_Nk) if stored_Nk.shape[1] else k3(stored_N, logp_N)


def scales(num_tokens_B: Sequence[int], domains_B: Sequence[str], weight: float) -> list[float]:
    """Return the factor of KL_t at the tokens of each answer: weight / number of tokens of its domain's answers.

    Args:
        num_tokens_B: policy-written tokens of each answer of the whole batch.
        domains_B: their domains.
        weight: weight of the term.
    """
    num: Counter[str] = Counter()
    for num_tokens, domain in zip(num_tokens_B, domains_B, strict=True):
        num[domain] += int(num_tokens)
    return [weight / max(1, num[domain]) for domain in domains_B]


@dataclass(frozen=True)
class Retention:
    """The retention term, for any trainer. Invariant: at its targets the loss and its gradient are 0 up to fp16."""

    weight: float = 1.0
    top_k: int = 16  # tokens stored at each written token; 0: the sampled one alone
    temperature: float = 1.0  # sampling temperature

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: a value is out of its range.
        """
        if self.weight < 0 or self.top_k < 0 or self.temperature <= 0:
            raise ValueError(f"{self}; expected weight >= 0, top_k >= 0 and temperature > 0")

    def target(
        self, logits_TV: torch.Tensor, tokens_T: torch.Tensor, group_id: str = "", episode: int = 0
    ) -> Target:
        """Return the target to store for an answer.

        Args:
            logits_TV: logits that predict its T written tokens.
            tokens_T: these tokens.
            group_id: id of its group.
            episode: its number in the group.

        Raises:
            ValueError: `top_k` is above the vocabulary.
        """
        if self.top_k > logits_TV.shape[1]:
            raise ValueError(f"top_k = {self.top_k}; expected at most {logits_TV.shape[1]}, the vocabulary")
        logp_TV = (logits_TV.detach().float() / self.temperature).log_softmax(-1)
        top = logp_TV.topk(self.top_k)
        sampled_T = logp_TV.gather(1, tokens_T[:, None])[:, 0]
        return make_target(group_id, episode, top.indices, top.values, sampled_T)

    def loss(
        self, logits: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor], targets: Sequence[Target],
        domains: Sequence[str],
    ) -> torch.Tensor:
        """Return the loss, with gradient; at least one answer.

        Args:
            logits: [T, V] of each answer under the policy in training.
            tokens: [T] of each answer.
            targets: what `target` returned for it.
            domains: its domain.
        """
        factors, total = scales([len(each) for each in tokens], domains, self.weight), logits[0].new_zeros(())
        for logits_TV, tokens_T, target, factor in zip(logits, tokens, targets, factors, strict=True):
            logp_TV = (logits_TV.float() / self.temperature).log_softmax(-1)
            ids_Tk, stored_Tk, stored_T = tensors_of(target, logits_TV.device)
            kl_T = token_kl(stored_Tk, logp_TV.gather(1, ids_Tk), stored_T, logp_TV.gather(1, tokens_T[:, None])[:, 0])
            total = total + factor * kl_T.sum()
        return total


def make_target(
    group_id: str, episode: int, ids_Tk: torch.Tensor, logp_Tk: torch.Tensor, sampled_logp_T: torch.Tensor
) -> Target:
    """Return a target with the values in host memory, rounded to fp16."""
    logp, sampled = (values.to(torch.float16).cpu().numpy() for values in (logp_Tk, sampled_logp_T))
    return Target(group_id, episode, ids_Tk.cpu().numpy().astype(np.int32), logp, sampled)


def tensors_of(target: Target, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a target's tokens, int64 [T, k], their log-probs and those of the sampled tokens, fp32, on a device."""
    arrays = (target.ids_Tk.astype(np.int64), *(x.astype(np.float32) for x in (target.logp_Tk, target.sampled_logp_T)))
    ids_Tk, logp_Tk, sampled_T = (torch.from_numpy(array).to(device) for array in arrays)
    return ids_Tk, logp_Tk, sampled_T
