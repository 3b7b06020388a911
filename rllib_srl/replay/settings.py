"""Settings of the memory; SRLConfig has them with the prefix `replay_`.

    ReplaySettings.errors({"spacing": "sm3"})     ["spacing = 'sm3'; expected one of ..."]

The tables of rules are imported when a value is checked, so that `srl train --help` does not load them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rllib_srl.common.rules import Rules
from rllib_srl.common.setting_model import Settings, by, clashes, setting, unread, where


@cache
def rules() -> dict[str, Rules[Any]]:
    from rllib_srl.replay.admission import ADMISSIONS
    from rllib_srl.replay.diversity.embedders import EMBEDDINGS
    from rllib_srl.replay.intake import ON_GROUP
    from rllib_srl.replay.schedule.spacing import SPACINGS
    from rllib_srl.replay.selection.rules import EVICTIONS, SELECTIONS

    return {
        "spacing": SPACINGS,
        "selection": SELECTIONS,
        "reuse_selection": SELECTIONS,
        "embedding": EMBEDDINGS,
        "eviction": EVICTIONS,
        "admit": ADMISSIONS,
        "on_group": ON_GROUP,
    }


def _rule_of(name: str, or_none: bool = False) -> Any:
    def error(value: Any) -> str:
        text = "" if or_none and value is None else rules()[name].error(value)
        return text and text + (", or None" if or_none else "")

    return by(error)


def _error_of_domains(value: Any) -> str:
    is_list = isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(name, str) for name in value)
    is_right = is_list or value in ("all", "last", "earlier")
    return "" if is_right else "expected 'all', 'last', 'earlier' or a list of names"


def _error_of_hooks(value: Any) -> str:
    from rllib_srl.replay.admission import names_of

    errors = (error for name in names_of(value) if (error := rules()["admit"].error(name)))
    return next((f"{error}, a list of these, or None" for error in errors), "")


_BY_NAME = "parameters by name"


class ReplaySettings(Settings):
    """Settings of the memory. Invariant: plain values only, so that they can be sent to any process."""

    prefix = "replay_"

    revisit_fraction: float = setting(0.1, "share of played prompts drawn from the memory, in [0, 1]", ge=0, le=1)
    reuse_fraction: float = setting(0.0, "share of trained groups drawn from the memory, in [0, 1)", ge=0, lt=1)
    retain: float = setting(
        1.0, "weight of the loss on stored right answers of domains that are not learned now; 0: nothing is held", ge=0
    )
    retain_answers: int = setting(16, "stored right answers that an update trains on", needs="retain", ge=1)
    retain_window: int = setting(
        5, "iterations without fresh prompts of a domain after which its answers are held", needs="retain", ge=1
    )
    capacity: int = setting(65_536, "maximum number of items (prompts); 0: no memory", ge=0)
    groups_per_item: int = setting(2, "number of newest groups kept per item", ge=1)
    min_buffer_size: int = setting(
        16, "number of items below which nothing is revisited or reused, at most the capacity", ge=0
    )
    spacing: Annotated[str, _rule_of("spacing")] = setting(
        "fsrs", 'when items are due: none (always) fsrs fixed, docs/memory.md, or "module:rule"'
    )
    spacing_config: dict[str, Any] = setting({}, "parameters of the spacing rule: interval (fixed)", _BY_NAME)
    desired_retention: float = setting(
        0.9, "predicted recall at which an item becomes due", needs="spacing", gt=0, lt=1
    )
    iterations_per_day: float = setting(1.0, "training iterations per day of the spacing rule", needs="spacing", gt=0)
    min_recall_interval: int = setting(1, "minimum iterations between two visits of an item", ge=1)
    pass_reward: float = setting(0.9, "least reward of a success, unless the environment has a `pass_reward`")
    history_half_life: float = setting(
        11.0, "updates of the policy after which the history of a prompt counts half", gt=0
    )
    selection: Annotated[str, _rule_of("selection")] = setting(
        "srl", 'rule that selects items to revisit (docs/memory.md), or "module:rule"'
    )
    reuse_selection: Annotated[str, _rule_of("reuse_selection")] = setting(
        "uniform", 'rule that selects groups to reuse (docs/memory.md), or "module:rule"'
    )
    selection_config: dict[str, Any] = setting(
        {}, "parameters of the rule for revisits: temperature (srl), alpha and by (per)", _BY_NAME
    )
    reuse_selection_config: dict[str, Any] = setting(
        {}, "parameters of the rule for reuse: temperature (srl), alpha and by (per)", _BY_NAME
    )
    domains: Annotated[Any, by(_error_of_domains)] = setting(
        "all", 'domains drawn from: "all", "last" (second newest), "earlier" (all but the newest; reuse: all), or names'
    )
    max_age: int = setting(6, "maximum age of a reused group, iterations", ge=1)
    max_uses: int = setting(4, "maximum number of times a group is reused", ge=1)
    max_logp_gap: float | None = setting(
        1.0, "maximum mean |log ratio| of a reused episode, nats per token; None: no maximum", gt=0
    )
    diversity_coeff: float = setting(
        0.5, "strength of diversity in intervals of spacing and draws by srl; 0: no effect", ge=0
    )
    diversity_device: Literal["cpu", "gpu"] = setting(
        "cpu", 'where neighbours are searched: "cpu", or "gpu" (the extra faiss-gpu), docs/gpu.md'
    )
    embedding: Annotated[str | None, _rule_of("embedding", or_none=True)] = setting(
        None,
        '"ngram", "contrib.sentence" (MiniLM) or "module:class"; None: "ngram" where diversity '
        "or least_diverse needs one, else none",
    )
    eviction: Annotated[str, _rule_of("eviction")] = setting(
        "fifo", "what evicts items from a full memory: fifo largest_domain mastered_first least_diverse, or module:rule"
    )
    max_episode_tokens: int | None = setting(
        None, "maximum tokens of a stored episode, prompt included; None: any", ge=1
    )
    degenerate_share: float | None = setting(
        0.5, "maximum share of one token or loop in an episode; None: no check", gt=0, le=1
    )
    admit: Annotated[Any, by(_error_of_hooks)] = setting(
        "secrets",
        'what keeps episodes out of memory and loss: "secrets", "credentials" (no personal data), "module:function", '
        "or a list of these (docs/memory.md); None: nothing",
    )
    on_group: Annotated[str | None, _rule_of("on_group", or_none=True)] = setting(
        None, 'function that makes new items of each stored group: "contrib.growth" or "module:function"; None: none'
    )
    local_directory: Annotated[str | None, where(lambda path: path is None or Path(path).is_absolute())] = setting(
        None,
        "directory on a local disk for the memory, with results on a network file system; None: in the run's own",
        "an absolute path as text, or None",
    )
    # fixed, for users of SRLConfig
    min_graded: int = Field(default=2, ge=1, description="least valid episodes for a visit to be graded")
    timeout_s: float = setting(60.0, "timeout of one call to the memory, seconds", gt=0)

    @property
    def embedding_used(self) -> str | None:
        is_needed = (self.diversity_coeff and not self._draws_by_other_facts) or self.eviction == "least_diverse"
        return (self.embedding or ("ngram" if is_needed else None)) if self.is_on else None

    @property
    def searches_on_gpu(self) -> bool:
        return self.embedding_used is not None and self.diversity_device == "gpu"

    @property
    def has_due_dates(self) -> bool:
        return self.spacing != "none"

    @property
    def reads_recall(self) -> bool:
        """Return whether something needs reviews: spacing, or a rule that may read recall."""
        is_plain = self._draws_by_other_facts and self.eviction in ("fifo", "least_diverse")
        return self.has_due_dates or not is_plain

    @property
    def _draws_by_other_facts(self) -> bool:
        """Return whether no draw reads due dates, recall or diversity."""
        from rllib_srl.replay.selection.rules import DATELESS

        return {self.selection, self.reuse_selection} <= {*DATELESS}

    @property
    def is_on(self) -> bool:
        return self.capacity > 0

    def contradictions(self) -> Iterator[str]:
        yield from _rules_with_parameters(self)
        off = {"revisit_fraction": 0, "reuse_fraction": 0, "retain": 0, "local_directory": None}
        rows = [
            (getattr(self, name) and not self.is_on, f"{name} capacity", f"{value} without a memory (replay none)")
            for name, value in off.items()
        ]
        yield from clashes([*rows, *unread(type(self), self, self)], self)

    def as_dict(self) -> dict[str, Any]:
        """Return every setting in JSON types; a function by its import path."""
        return self.model_dump(mode="json", warnings=False, fallback=_plain)


def _plain(value: Any) -> Any:
    return f"{value.__module__}:{value.__qualname__}" if callable(value) else value.tolist()


def _rules_with_parameters(settings: ReplaySettings) -> Iterator[str]:
    from rllib_srl.replay.schedule.spacing import make_spacing
    from rllib_srl.replay.selection.rules import SELECTIONS

    for name in ("selection", "reuse_selection", "spacing"):
        rule, config = getattr(settings, name), getattr(settings, f"{name}_config")
        try:
            if name != "spacing":
                SELECTIONS.make(rule, config)
            elif "desired_retention" in config:
                raise ValueError("expected desired_retention as a separate setting")
            else:
                make_spacing(rule, settings.desired_retention, **config)
        except (TypeError, ValueError) as error:
            yield f"{name}_config = {config!r}; {error}"


def check_importable(settings: ReplaySettings) -> None:
    """Raise a ValueError if a rule is registered only in this process, where the buffer's cannot find it."""
    from rllib_srl.replay.admission import names_of

    for name, table in rules().items():
        for rule in names_of(getattr(settings, name)):
            if table.is_users(rule):
                raise ValueError(
                    f"replay_{name} = {rule!r} is registered in this process, and the memory is in another; expected "
                    "an import path, 'module:rule'"
                )
