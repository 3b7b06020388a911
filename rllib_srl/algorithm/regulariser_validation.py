"""Validates the setting `regularisers`; returns error messages "name = value; expected ..."."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rllib_srl.common.setting_checks import is_integer
from rllib_srl.learner.regularisers.anchor_texts import read_texts
from rllib_srl.losses.regulariser_settings import RegulariserSettings, parameter_faults


def faults_of_regularisers(config: Any) -> Iterator[str]:
    """Yield all errors; contradictions with other settings only if the parameters alone are valid."""
    faults = list(parameter_faults(config.regularisers))
    yield from faults
    if faults:
        return
    settings = RegulariserSettings.of(config.regularisers)
    for name in settings.names:
        if name in ("ewc", "lwf"):
            yield from _at_stages(name, config)
    if settings.ewc and is_integer(config.max_lag, 1):
        yield (
            f"regularisers.ewc with max_lag = {config.max_lag}; expected max_lag = 0: it measures importance on "
            "episodes that are one update old"
        )
    if settings.lwf and not config.may_draw("revisit"):
        yield (
            "regularisers.lwf with replay_revisit_fraction = 0; expected above 0: it acts on prompts that the memory "
            "brings back"
        )
    if settings.esr:
        yield from _of_stored_logits(config)
    if settings.gere:
        try:
            read_texts(settings.gere.path, settings.gere.num_texts)
        except ValueError as error:
            yield f"regularisers.gere.path = {settings.gere.path!r}; {error}"
        if is_integer(config.max_episode_tokens, 8) and settings.gere.max_tokens > config.max_episode_tokens:
            yield (
                f"regularisers.gere.max_tokens = {settings.gere.max_tokens}; expected at most max_episode_tokens = "
                f"{config.max_episode_tokens}"
            )


def _at_stages(name: str, config: Any) -> Iterator[str]:
    if not isinstance(config.stream, list | tuple) or len(config.stream) < 2:
        found = "None" if config.stream is None else "one without stages that end"
        yield (
            f"regularisers.{name} with stream = {found}; expected a list of at least two stages: it acts from the end "
            "of the first"
        )
    if config.fsdp:
        why = "gradients of single episodes" if name == "ewc" else "a second set of whole weights"
        yield f"regularisers.{name} with fsdp = True; expected fsdp = False, or regularisers.l2: it needs {why}"


def _of_stored_logits(config: Any) -> Iterator[str]:
    if not config.may_draw("reuse"):
        yield "regularisers.esr with replay_reuse_fraction = 0; expected above 0: it acts on groups that are reused"
    if config.fsdp:
        yield "regularisers.esr with fsdp = True; expected fsdp = False: it reads the whole head"
    if is_integer(config.num_learners, 2):
        yield (
            f"regularisers.esr with num_learners = {config.num_learners}; expected 0 or 1: a group may be reused on "
            "another learner than the one that has its logits"
        )
