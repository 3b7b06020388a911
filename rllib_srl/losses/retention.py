"""Compute the loss that trains on stored right answers: pure torch.

    loss    weight * sum over domains of  mean over its answers of L_y / T       L_y = - sum_t log q_t, nats

q is the policy in training, at the sampling temperature; T is the mean length of the domain's answers, so a domain's
part is the mean cross-entropy over the tokens of its answers. Each domain counts fully: divided by their number, the
force on each would fall as the stream grows.

    retention = Retention(weight=1.0)
    loss = retention.loss([logits_TV, ...], [tokens_T, ...], domains)     of answers drawn from the memory

Sources: On-Policy Replay (fine-tuning on own right answers), arXiv 2605.29495; Oh et al. 2018 (self-imitation), arXiv
1806.05635; Rolnick et al. 2019 (CLEAR: replay beside new experience), arXiv 1811.11682.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch


def scales(num_tokens_B: Sequence[int], domains_B: Sequence[str], weight: float) -> list[float]:
    """Return the factor of the loss at the tokens of each answer: weight / number of tokens of its domain's answers.

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
    """The retention term, for any trainer."""

    weight: float = 1.0
    temperature: float = 1.0  # sampling temperature

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: a value is out of its range.
        """
        if not (0 <= self.weight < math.inf and 0 < self.temperature < math.inf):
            raise ValueError(f"{self}; expected weight >= 0 and temperature > 0, both finite")

    def loss(
        self, logits: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor], domains: Sequence[str]
    ) -> torch.Tensor:
        """Return the loss, with gradient.

        Args:
            logits: [T, V] of each answer under the policy in training, those that predict its T written tokens.
            tokens: [T] of each answer.
            domains: its domain.

        Raises:
            ValueError: there is no answer, the numbers of answers differ, or logits do not fit tokens.
        """
        if not len(logits) == len(tokens) == len(domains) > 0:
            raise ValueError(
                f"{len(logits)} logits, {len(tokens)} tokens, {len(domains)} domains; expected one of each "
                "per answer, and at least one answer: leave the term out where none is held"
            )
        for at, (logits_TV, tokens_T) in enumerate(zip(logits, tokens, strict=True)):
            if logits_TV.ndim != 2 or logits_TV.shape[:1] != tokens_T.shape:
                raise ValueError(
                    f"answer {at}: logits {[*logits_TV.shape]}, tokens {[*tokens_T.shape]}; expected [T, V] and [T]: "
                    "the logits at the position before each written token, so none at the last token"
                )
        factors, total = scales([len(each) for each in tokens], domains, self.weight), logits[0].new_zeros(())
        for logits_TV, tokens_T, factor in zip(logits, tokens, factors, strict=True):
            logp_TV = (logits_TV.float() / self.temperature).log_softmax(-1)
            total = total - factor * logp_TV.gather(1, tokens_T[:, None]).sum()
        return total
