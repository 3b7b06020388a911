"""On-policy distillation: the KL of policy and frozen teachers at the tokens that the policy wrote.

    reverse    KL(policy || teacher)    seeks a mode of the teacher
    forward    KL(teacher || policy)    covers the teacher
    top_k = 0  reverse, from the sampled token alone: log policy - log teacher, squared (`losses/kl.py`, k3_k2)

The sums are over the teacher's `top_k` likeliest tokens, and all others as one class (`losses/kl.py`, `top_kl`).
All played groups are trained on, also those of zero variance; with `advantage="none"` rewards do not count.

Sources: Agarwal et al. 2023 (GKD), arXiv 2306.13649; Gu et al. 2023 (MiniLLM), arXiv 2306.08543.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from rllib_srl.batch.layout import MicroBatch
from rllib_srl.common.setting_model import is_integer
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import ModelError, described_model
from rllib_srl.learner.reference import START, FrozenPolicy, checkpoint_error, is_checkpoint
from rllib_srl.learner.regularisers.rule import COEFF, Range, Regulariser, Term, Training, bounded
from rllib_srl.losses.kl import KL_LOSSES, top_kl
from rllib_srl.types import Group

REVERSE, FORWARD = MODES = ("reverse", "forward")


def _is_teacher(value: Any) -> bool:
    named = value.values() if isinstance(value, Mapping) else [value]
    return bool(named) and all(isinstance(source, str) and source for source in named)


@dataclass
class Distillation(Regulariser):
    """KL to frozen teachers on played answers. Invariant: no teacher's weights change."""

    coeff: float = bounded(1.0, COEFF)
    teacher: str | dict[str, str] = bounded(  # noqa: RUF009
        START, Range(_is_teacher, "'start', a model, a checkpoint, or a mapping from domains to these")
    )
    mode: str = bounded(REVERSE, Range(lambda x: x in MODES, f"one of {', '.join(map(repr, MODES))}"))
    top_k: int = bounded(16, Range(lambda x: is_integer(x, 0), "an integer of at least 0"))

    trains_all: ClassVar[bool] = True

    @property
    def _sources(self) -> dict[str | None, str]:
        """Return teacher by domain; None stands for all domains."""
        return {None: self.teacher} if isinstance(self.teacher, str) else dict(self.teacher.items())

    @property
    def frozen_sources(self) -> Collection[str]:
        return dict.fromkeys(self._sources.values())

    def errors(self, name: str, config: Any) -> Iterator[str]:
        """Yield errors: a teacher that cannot be loaded or has other tokens, and settings that do not fit."""
        model = config.model_config.get("model")
        for source in self.frozen_sources:
            if error := _error_of(source, model):
                yield f"{name}.teacher = {source!r}; {error}"
        if self.mode == FORWARD and not self.top_k:
            yield f"{name}.top_k = 0 with mode = 'forward'; expected at least 1: no token is sampled from the teacher"

    def errors_of_model(self, name: str, num_tokens: int) -> Iterator[str]:
        """Yield an error if the model has fewer tokens than `top_k`."""
        if self.top_k > num_tokens:
            yield f"{name}.top_k = {self.top_k}; expected at most {num_tokens}, the vocabulary of the model"

    def start(self, training: Training) -> None:
        """Load the teachers.

        Raises:
            ValueError: a teacher has other tokens than the policy, or a checkpoint is of another model.
        """
        super().start(training)
        model, sources = training.policy.model_config["model"], list(self.frozen_sources)
        for source in sources:
            if error := _error_of(source, model):
                raise ValueError(f"teacher = {source!r}; {error}")
        self._teachers: list[FrozenPolicy] = [training.frozen(source) for source in sources]
        self._number = {domain: sources.index(source) for domain, source in self._sources.items()}
        self._teacher_B = np.zeros(0, np.int64)

    def begin(self, groups: Sequence[Group], origins: Sequence[str]) -> None:
        """Note the teacher of each episode; -1 if its domain has none."""
        every = self._number.get(None, -1)
        numbers = [self._number.get(group.prompt.domain, every) for group in groups]
        self._teacher_B = np.repeat(np.array(numbers, np.int64), [group.size for group in groups])

    def prepare(self, batch: MicroBatch[torch.Tensor], is_reused: bool) -> None:
        """Add the teachers' log-probs to a played micro-batch, and their likeliest tokens.

        Every teacher scores every micro-batch, so that sharded learners run equally many passes.
        """
        if is_reused:
            return
        number_N = torch.from_numpy(self._teacher_B).to(self.training.device)[batch["episode"]]
        batch["has_teacher"] = number_N >= 0
        for number, out in enumerate(self._scores(batch)):
            here_N = number_N == number
            outputs = {"teacher_logp": out["logp"]}
            if self.top_k:
                outputs |= {"given_tokens": out["top_tokens"], "teacher_top": out["top_logp"]}
            for key, value in outputs.items():
                here = here_N.view(-1, *[1] * (value.dim() - 1))
                batch[key] = torch.where(here, value, batch[key]) if number else value  # type: ignore[literal-required]

    def idle(self, batch: MicroBatch[torch.Tensor]) -> None:
        self._scores(batch)

    def _scores(self, batch: MicroBatch[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        wanted = batch.copy()
        if self.top_k:
            wanted["num_top"] = self.top_k
        return [teacher.scores(wanted) for teacher in self._teachers]

    def loss(self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]) -> Term | None:
        """Return coeff times the sum of scale * KL over the tokens of episodes that have a teacher."""
        if "has_teacher" not in batch:
            return None
        kl_N = torch.where(batch["has_teacher"], self._kl(batch, fwd_out), 0.0)
        return Term(self.coeff * (batch["scale"] * kl_N).sum(), kl_N.detach().sum(), batch["has_teacher"].sum())

    def _kl(self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if not self.top_k:
            return KL_LOSSES["k3_k2"](fwd_out["logp"], batch["teacher_logp"])
        teacher_Nk, logp_Nk = batch["teacher_top"], fwd_out["given_logp"]
        pair = (teacher_Nk, logp_Nk) if self.mode == FORWARD else (logp_Nk, teacher_Nk)
        return top_kl(*pair)


@lru_cache(maxsize=64)
def _error_of(source: str, model: str) -> str:
    """Return why a model cannot teach the policy's model, "" if it can or its files are not unpacked yet."""
    if source == START:
        return ""
    if is_checkpoint(source):
        return checkpoint_error(Path(source))
    try:
        places = described_model(source), described_model(model)
    except ModelError as error:
        return str(error)
    if None in places or places[0] == places[1]:
        return ""
    theirs, ours = (load_tokenizer(place).get_vocab() for place in places if place is not None)
    if theirs == ours:
        return ""
    other = sum(ours.get(token) != number for token, number in theirs.items())
    return (
        f"expected a model with the tokenizer of {model!r}: {other} of the teacher's {len(theirs)} tokens have another "
        "id there, or none"
    )
