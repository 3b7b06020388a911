"""The loss again, slowly: episode by episode and token by token, from the formulas, for tests of the learner."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rllib_srl.losses.policy import TAUS
from rllib_srl.losses.settings import LossSettings
from rllib_srl.types import Group


@dataclass
class Told:
    """One episode as Hugging Face's own forward tells it; lists over the tokens the policy wrote."""

    logp: list[torch.Tensor]
    entropy: list[torch.Tensor]
    hidden: list[torch.Tensor]
    behaviour: list[float]
    advantage: float
    is_reused: bool
    reference: list[float] = field(default_factory=list)

    @property
    def num(self) -> int:
        """Return the number of tokens."""
        return len(self.logp)


def told(
    model: torch.nn.Module, reference: torch.nn.Module | None, group: Group, g: int, advantage: float, is_reused: bool
) -> Told:
    """Run one episode alone, without padding or sharing."""
    cut = slice(group.offsets[g], group.offsets[g + 1])
    ids, mask = torch.tensor(group.token_ids_N[cut].astype(np.int64)), group.loss_mask_N[cut]
    at = np.flatnonzero(mask)
    out = model(ids[None], output_hidden_states=True)
    logits = out.logits[0].log_softmax(-1)
    one = Told(
        logp=[logits[t - 1, ids[t]] for t in at],
        entropy=[-(logits[t - 1].exp() * logits[t - 1]).sum() for t in at],
        hidden=[out.hidden_states[-1][0, t - 1].detach() for t in at],
        behaviour=[float(x) for x in group.behaviour_logp_N[cut][mask]],
        advantage=advantage,
        is_reused=is_reused,
    )
    if reference is not None:
        with torch.no_grad():
            ref = reference(ids[None]).logits[0].log_softmax(-1)
        one.reference = [float(ref[t - 1, ids[t]]) for t in at]
    return one


def surrogate(settings: LossSettings, r: torch.Tensor, a: float, logp: torch.Tensor) -> torch.Tensor:
    """Return the loss of one token from its ratio."""
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    rule = settings.clip_rule
    if rule == "none":
        return -r * a
    if rule == "cispo":
        least, most = settings.cispo_bounds
        return -min(max(r.item(), least), most) * a * logp
    if rule == "sapo":
        tau = TAUS[0] if a > 0 else TAUS[1]
        return -a * 4 / tau / (1 + torch.exp(-tau * (r - 1)))
    if rule == "symmetric":
        high = 1 + settings.clip_low
    if rule == "two_sided" and r.item() > settings.clip_delta:
        r = torch.tensor(settings.clip_delta)
    free, held = r * a, r.detach().clamp(low, high) * a
    loss = -free if free.item() <= held.item() else -held
    if rule == "dual" and a < 0 and loss.item() > -settings.dual_clip * a:
        return torch.tensor(-settings.dual_clip * a)
    return loss


def played_weights(settings: LossSettings, prox: Sequence[float], behaviour: Sequence[float]) -> list[float]:
    """Return the correction of each token of a played episode."""
    rho = [math.exp(p - b) for p, b in zip(prox, behaviour, strict=True)]
    product = math.prod(rho)
    geometric = product ** (1 / len(rho))
    most = math.inf if settings.tis_clip_max is None else settings.tis_clip_max
    (low, high), (least, last) = settings.correction_window, settings.sequence_window
    return {
        "none": [1.0 for _ in rho],
        "tis": [min(x, most) for x in rho],
        "sequence_tis": [min(product, most) for _ in rho],
        "mis": [x if low <= x <= high else 0.0 for x in rho],
        "sequence_mask": [product if low <= product <= high else 0.0 for _ in rho],
        "geometric_mask": [min(x, most) if least <= geometric <= last else 0.0 for x in rho],
        "mis_po": [1.0 if low <= x <= high and least <= geometric <= last else 0.0 for x in rho],
    }[settings.correction]


def episode_loss(settings: LossSettings, one: Told, scale: float) -> torch.Tensor:
    """Return the scaled loss of one episode in the first epoch of an update."""
    prox = [x.item() for x in one.logp]
    anchor = list(one.behaviour) if settings.ratio_anchor == "bypass" else prox
    weights = played_weights(settings, prox, one.behaviour)
    if one.is_reused:
        anchor, weights = list(one.behaviour), [1.0] * one.num
        drift = float(np.mean([abs(p - b) for p, b in zip(prox, one.behaviour, strict=True)]))
        if settings.max_logp_gap is not None and drift > settings.max_logp_gap:
            return torch.zeros(())
    gaps = [x - y for x, y in zip(one.logp, anchor, strict=True)]
    total = torch.zeros(())
    for t, gap in enumerate(gaps):
        ratio = {
            "token": gap,
            "geometric": torch.stack(gaps).mean(),
            # once an episode: the gradient of the product is that of all its tokens together
            "sequence": torch.stack(gaps).sum().detach() + gap - gap.detach(),
        }[settings.ratio_level].exp()
        loss = weights[t] * surrogate(settings, ratio, one.advantage, one.logp[t])
        if settings.kl_coeff and (not one.is_reused or settings.kl_on_reused == "weighted"):
            weight = math.exp(prox[t] - one.behaviour[t]) if one.is_reused else 1.0
            loss = loss + settings.kl_coeff * weight * kl(settings.kl_estimator, one.logp[t] - one.reference[t])
        if not one.is_reused:
            loss = loss - settings.entropy_coeff * one.entropy[t]
        total = total + scale * loss
    return total


def kl(estimator: str, d: torch.Tensor) -> torch.Tensor:
    """Return the KL loss of one token; for k3_k2 the gradient is that of k2, all this is compared by."""
    return {"k1": 0 * d, "k2": d * d / 2, "k3": torch.exp(-d) + d - 1, "k3_k2": d * d / 2}[estimator]


def scales(settings: LossSettings, episodes: Sequence[Told]) -> list[float]:
    """Return the scale of each episode's tokens."""
    found = []
    for one in episodes:
        side = [other for other in episodes if other.is_reused == one.is_reused]
        of = {
            "token_mean": 1 / sum(other.num for other in side),
            "sequence_mean": 1 / len(side) / one.num,
            "constant": 1 / len(side) / settings.longest_answer,
        }
        found.append(of[settings.aggregation])
    return found


def gradient(model: torch.nn.Module, settings: LossSettings, episodes: Sequence[Told]) -> dict[str, np.ndarray]:
    """Return the gradient of the loss of all episodes by parameter name."""
    pairs = zip(episodes, scales(settings, episodes), strict=True)
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(sum(episode_loss(settings, *pair) for pair in pairs), list(parameters.values()))
    return {name: of.numpy() for name, of in zip(parameters, found, strict=True)}
