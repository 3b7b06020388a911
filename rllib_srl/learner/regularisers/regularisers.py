"""The regularisers of a learner, as its update sees them.

    begin        groups of the batch          which episodes the KL to the stage's policy acts on
    prepare      each micro-batch             log-probs of the frozen policy, stored logits; once per update
    keep         first pass of played ones    logits to store
    loss         each pass                    terms of the loss
    backward     each optimiser step          gradient on general texts
    add_to       gradient of the batch        pulls on the weights, after the sum over learners, before the clip
    end_stages   end of a stage               importance of weights, frozen policy
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rllib_srl.batch.layout import Episode, MicroBatch
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model
from rllib_srl.learner.regularisers.anchor_texts import AnchorTexts
from rllib_srl.learner.regularisers.stage_policy import StagePolicy
from rllib_srl.learner.regularisers.stored_logits import StoredLogits
from rllib_srl.learner.regularisers.weights import ElasticPull, L2Pull
from rllib_srl.learner.rl_module import CausalLMModule
from rllib_srl.learner.scoring import Scorer
from rllib_srl.losses.regulariser_settings import RegulariserSettings, size_faults
from rllib_srl.types import Group

LWF, LWF_TOKENS, GERE = "regularisers/lwf", "regularisers/lwf_tokens", "regularisers/gere"
ESR, ESR_TOKENS = "regularisers/esr", "regularisers/esr_tokens"


class Regularisers:
    """All regularisers of one learner. Invariant: without any, no method changes, computes or logs anything."""

    def __init__(
        self,
        settings: RegulariserSettings,
        policy: CausalLMModule,
        scorer: Scorer,
        device: torch.device,
        num_shards: int,
        is_sharded: bool,
    ) -> None:
        """Start from the weights of the model's files; call it before a checkpoint is loaded.

        Args:
            settings: which act, and their parameters.
            policy: module in training.
            scorer: of the policy.
            device: of the policy.
            num_shards: number of shards whose gradients are summed, at least 1; one per learner without `fsdp`.
            is_sharded: whether FSDP2 shards the weights.

        Raises:
            ValueError: the model has fewer layers or tokens than the settings ask for, or a text is too short.
        """
        num_layers = len(policy.model.base_model.layers) if settings.gere else None
        num_tokens = policy.model.config.get_text_config().vocab_size if settings.esr else None
        if faults := list(size_faults(settings, num_layers, num_tokens)):
            raise ValueError("; ".join(faults))
        self._parameters = dict(policy.saved_parameters())
        self._scorer, self._device, self._is_sharded = scorer, device, is_sharded
        self._l2 = L2Pull(settings.l2.coeff, self._parameters) if settings.l2 else None
        ewc, lwf, esr = settings.ewc, settings.lwf, settings.esr
        self._ewc = ElasticPull(ewc.coeff, ewc.decay, num_shards) if ewc else None
        self._stage_policy = StagePolicy(lwf.coeff, lwf.estimator) if lwf else None
        self._stored_logits = StoredLogits(esr.coeff, esr.top_k, esr.episodes) if esr else None
        self._anchor_texts = None
        if settings.gere:
            tokenizer = load_tokenizer(local_model(policy.model_config["model"]))
            self._anchor_texts = AnchorTexts(settings.gere, policy.model, scorer, tokenizer, num_shards, is_sharded)
            if is_sharded:
                policy.reshard()  # FSDP2 keeps gathered weights until a backward pass
        self._is_old_B = np.zeros(0, bool)
        # Names of sums over micro-batches and learners.
        self.sums = ((LWF, LWF_TOKENS) if lwf else ()) + ((ESR, ESR_TOKENS) if esr else ())
        self.sums += (GERE,) if settings.gere else ()

    def begin(self, groups: Sequence[Group], origins: Sequence[str]) -> None:
        """Note the groups of the next update; episodes are numbered as `episodes_of` does."""
        if self._stage_policy is not None:
            self._is_old_B = self._stage_policy.acts_on(groups, origins)
        if self._stored_logits is not None:
            self._stored_logits.begin(groups)

    def prepare(self, batch: MicroBatch[torch.Tensor], is_reused: bool) -> None:
        """Add what stays fixed during the update to a micro-batch.

        A played one gets `is_old` and `stage_logp` [N], a reused one `stored_tokens` and `stored_top` [N, K] and
        `is_stored` [N].
        """
        if self._stored_logits is not None:
            self._stored_logits.prepare(batch, is_reused)
        if self._stage_policy is None or is_reused:
            return
        is_old_N = torch.from_numpy(self._is_old_B).to(self._device)[batch["episode"]]
        if bool(is_old_N.any()):
            batch["is_old"] = is_old_N
            batch["stage_logp"] = self._stage_policy.logp(self._parameters, self._scorer, batch)

    def keep(self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]) -> None:
        """Store logits of a micro-batch after its first pass, if `prepare` has asked for them."""
        if self._stored_logits is not None and "num_top" in batch:
            self._stored_logits.keep(batch, fwd_out)

    def loss(
        self, batch: MicroBatch[torch.Tensor], loss: torch.Tensor, fwd_out: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the loss of a micro-batch with the terms of regularisers; their sums go to `batch["stats"]`.

        Args:
            batch: after `prepare`.
            loss: its loss so far.
            fwd_out: log-probs under the policy in training, nats, with gradient.
        """
        if self._stage_policy is not None and "stage_logp" in batch:
            more, batch["stats"][LWF], batch["stats"][LWF_TOKENS] = self._stage_policy.loss(batch, fwd_out["logp"])
            loss = loss + more
        if self._stored_logits is not None and "stored_tokens" in batch:
            more, batch["stats"][ESR], batch["stats"][ESR_TOKENS] = self._stored_logits.loss(
                batch, fwd_out["stored_logp"]
            )
            loss = loss + more
        return loss

    def backward(self, sums: dict[str, Any]) -> None:
        """Add this learner's share of the gradient on general texts to the parameters, and of its value to the sums."""
        if self._anchor_texts is not None:
            sums[GERE] += self._anchor_texts.backward()

    def add_to(self, gradients: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Return the gradients, summed over learners, with the pulls added, and each penalty for the metrics."""
        result, penalties = list(gradients), {}
        for name, one in (("l2", self._l2), ("ewc", self._ewc)):
            if one is not None:
                result, penalties[f"regularisers/{name}"] = one.add_to(self._parameters, result)
        if self._is_sharded and penalties:  # each learner has the penalty of its part
            totals = torch.tensor(list(penalties.values()), dtype=torch.float64, device=self._device)
            torch.distributed.all_reduce(totals)
            penalties = dict(zip(penalties, totals.tolist(), strict=True))
        return result, penalties

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the values of the terms of the loss, given the sums of `self.sums` over all learners."""
        means = {name: sums[name] for name in self.sums}
        for kl, tokens in ((LWF, LWF_TOKENS), (ESR, ESR_TOKENS)):
            if kl in means:
                means[kl] /= max(1.0, means[tokens])
        return means

    def end_stages(
        self, domains: Collection[str], episodes: Sequence[Episode], temperature: float, shares: bool
    ) -> int:
        """Take over what the policy has learned by the end of a stage; a collective.

        Args:
            domains: those whose stage ended.
            episodes: this learner's part of the episodes of these domains.
            temperature: at which they were sampled.
            shares: whether micro-batches are tries.

        Returns:
            The number of episodes of all learners that count for EWC; 0 without it.
        """
        if self._stage_policy is not None:
            self._stage_policy.end_stage(self._parameters, domains)
        if self._ewc is None:
            return 0
        return self._ewc.end_stage(self._parameters, self._scorer, episodes, temperature, shares)

    def get_state(self) -> dict[str, Any]:
        """Return what must outlive the process, by the names of regularisers; {} if none of them keeps any."""
        kept = {"ewc": self._ewc, "lwf": self._stage_policy, "esr": self._stored_logits, "gere": self._anchor_texts}
        return {name: one.get_state() for name, one in kept.items() if one is not None}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load what `get_state` returned; a regulariser that the state lacks stays as it is."""
        if self._ewc is not None and "ewc" in state:
            self._ewc.set_state(state["ewc"], self._device)
        if self._stage_policy is not None and "lwf" in state:
            self._stage_policy.set_state(state["lwf"], self._device)
        if self._stored_logits is not None and "esr" in state:
            self._stored_logits.set_state(state["esr"])
        if self._anchor_texts is not None and "gere" in state:
            self._anchor_texts.set_state(state["gere"])
