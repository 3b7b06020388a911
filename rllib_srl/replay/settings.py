"""Defines and validates the settings of the memory; SRLConfig has them with the prefix `replay_`.

    ReplaySettings(spacing="sm2", capacity=1000).faults() -> ["name = value; expected ...", ...]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_srl.common.rules import CONTRIB, Rules
from rllib_srl.common.setting_checks import is_number, of_choices, of_integers, of_ranges, of_switches
from rllib_srl.common.setting_tables import Setting, setting, table_of
from rllib_srl.replay.admission.admission import SHARED, AdmissionSettings
from rllib_srl.replay.admission.hooks import ADMISSIONS, names_of
from rllib_srl.replay.diversity.embedders import EMBEDDINGS
from rllib_srl.replay.history import HALF_LIVES
from rllib_srl.replay.on_group import ON_GROUP
from rllib_srl.replay.schedule.grading import GRADES, RATING_SCALES
from rllib_srl.replay.schedule.spacing import SPACINGS, NoSpacing, make_spacing
from rllib_srl.replay.selection.eviction import EVICTIONS
from rllib_srl.replay.selection.predicates import PREDICATES, domain_filter
from rllib_srl.replay.selection.rules import DATELESS, SELECTIONS

AUTO = "auto"  # revisit_fraction: adapted (`curriculum/filling.py`)
AUTO_START = 0.25  # revisit fraction with which "auto" starts
CORRECTIONS = ("clip", "truncate", "mask")
DIVERSITY_ON = ("interval", "draw")


@dataclass(frozen=True)
class ReplaySettings:
    """Settings of the memory. Invariant: plain values only, so that they can be sent to any process."""

    revisit_fraction: float | str = setting(
        0.25,
        'share of played prompts drawn from the memory, in [0, 1]; "auto": adapted to what revisits teach',
    )
    reuse_fraction: float = setting(0.0, "share of trained groups drawn from the memory, in [0, 1)")
    retain: float = setting(
        0.0,
        "weight of the KL that holds stored right answers at the policy that gave them; 0: nothing is held",
        of="retain.weight", is_head=True,
    )
    retain_answers: int = setting(16, "stored answers that an update holds", of="retain.answers")
    retain_top_k: int = setting(
        16, "likeliest tokens stored at each token of an answer; 0: the sampled one alone", of="retain.top_k"
    )
    retain_window: int = setting(
        5, "a domain is held unless it was among the fresh prompts of so many last iterations", of="retain.window"
    )
    capacity: int = setting(65_536, "maximum number of items (prompts); 0: no memory")
    groups_per_item: int = setting(2, "number of newest groups kept per item")
    max_bytes: int = setting(2 << 30, "bytes of groups held in RAM; older ones are read back from disk")
    min_buffer_size: int = setting(16, "number of items below which nothing is revisited or reused")
    spacing: str = setting(
        "none",
        'when items are due: none (always) fsrs sm2 leitner fixed expanding or "module:rule"',
        of="spacing.name", is_head=True,
    )
    spacing_config: Mapping[str, Any] = setting({}, "parameters of the spacing rule, by name", of="spacing.*")
    desired_retention: float = setting(
        0.9, "predicted recall at which an item becomes due, in (0, 1)", of="spacing.desired_retention"
    )
    iterations_per_day: float = setting(
        1.0, "training iterations per day of the spacing rule, > 0", of="spacing.iterations_per_day"
    )
    fill_with_not_due: bool = setting(
        True, "if too few items are due, revisit items before they are; False: play fresh prompts"
    )
    min_recall_interval: int = setting(1, "minimum iterations between two visits of an item")
    grade: str = setting(
        "pass_rate",
        'source of grades: "pass_rate", "reward", "rating" (human only) or "module:rule"',
        of="grade.name", is_head=True,
    )
    grade_reuse: bool = setting(
        False, "also grade an item on reuse, by the change in likelihood of stored successes", of="grade.on_reuse"
    )
    rating_scale: str = setting(
        "normalised",
        'scale of human ratings: "ordinal" (1 to 5), "binary" (0 or 1) or "normalised" (0 to 1)',
        of="grade.rating_scale",
    )
    pass_reward: float = setting(0.9, "least reward of a success, unless the environment has a `pass_reward`")
    min_graded: int = setting(
        2, "minimum number of valid episodes for a visit to be graded, at most group_size", of="grade.min_episodes"
    )
    history_by: str = setting(
        "versions",
        'what discounts the history of a prompt: "versions" (updates), "visits" or "kl" (of the policy, nats)',
        of="history.by", is_head=True,
    )
    history_half_life: float | None = setting(
        None, "after so many of these a prompt's history counts half; None: 11 versions, 1 visit or 0.06 nats",
        of="history.half_life",
    )
    selection: str = setting(
        "uniform",
        'rule that selects items to revisit (docs/memory.md), or "module:rule"',
        of="selection.name", is_head=True,
    )
    reuse_selection: str = setting(
        "uniform",
        'rule that selects groups to reuse (docs/memory.md), or "module:rule"',
        of="reuse_selection.name", is_head=True,
    )
    selection_config: Mapping[str, Any] = setting({}, "parameters of the rule for revisits", of="selection.*")
    reuse_selection_config: Mapping[str, Any] = setting({}, "parameters of the rule for reuse", of="reuse_selection.*")
    domains: Any = setting(
        "all", 'domains replayed: "all", "last" (second newest), "earlier" (all but the newest), a list or a predicate'
    )
    domain_quotas: Any = setting(None, 'share of draws by domain: "equal" or domain -> weight; None: no quotas')
    max_age: int = setting(6, "maximum age of a reused group, iterations")
    max_uses: int = setting(4, "maximum number of times a group is reused")
    reuse_coeff: float = setting(
        1.0, "weight of the loss of reused groups; that of played groups is 1"
    )
    reuse_correction: str = setting(
        "clip",
        'off-policy correction of reused groups: "clip", "truncate" or "mask" (docs/losses.md)',
        of="reuse_correction.name", is_head=True,
    )
    mask_window: tuple[float, float] = setting(
        (0.5, 2.0),
        'range of ratios that are kept; "truncate": the upper end caps the ratio',
        of="reuse_correction.window", rules="mask truncate",
    )
    max_logp_gap: float | None = setting(
        1.0, "maximum mean |log ratio| of a reused episode, nats per token; None: no maximum"
    )
    diversity_coeff: float = setting(
        0.0,
        "strength of diversity in intervals of spacing and draws by srl; 0: no effect",
        of="diversity.coeff", is_head=True,
    )
    diversity_on: tuple[str, ...] = setting(
        DIVERSITY_ON, "effects of diversity: interval (shorter intervals), draw (drawn more often)", of="diversity.on"
    )
    diversity_device: str = setting(
        "cpu", 'where neighbours are searched: "cpu", or "gpu" (the extra faiss-gpu), docs/gpu.md',
        of="diversity.device",
    )
    embedding: str | None = setting(
        None,
        '"ngram", "sentence" (MiniLM), "policy" (hidden states) or "module:class"; None: "ngram" where diversity, '
        "near_duplicate or least_diverse need one, else none",
    )
    eviction: str = setting(
        "fifo",
        'rule that evicts items from a full memory: fifo mastered_first least_diverse or "module:rule"',
    )
    max_episode_tokens: int | None = setting(None, "maximum tokens of a stored episode, prompt included; None: any")
    near_duplicate: float | None = setting(
        None, "cosine similarity from which a new prompt is refused as a duplicate; None: no check"
    )
    degenerate_share: float | None = setting(0.5, "maximum share of one token or loop in an episode; None: no check")
    admit: Any = setting(
        "secrets",
        'what keeps episodes out of memory and loss: "secrets", "credentials" (no personal data), "module:function", '
        "or a list of these (docs/memory.md); None: nothing",
    )
    on_group: str | None = setting(
        None, 'function that makes new items of each stored group: "contrib.growth" or "module:function"; None: none'
    )
    local_directory: str | None = setting(
        None, "directory on a local disk for the journal, with results on a network file system; None: in the run's own"
    )
    timeout_s: float = setting(60.0, "timeout of one call to the memory, seconds")

    @property
    def first_revisit_fraction(self) -> float:
        """Return the revisit fraction of the first iteration, a number also for "auto"."""
        return AUTO_START if isinstance(self.revisit_fraction, str) else self.revisit_fraction

    @property
    def embedding_used(self) -> str | None:
        """Return the embedding of the items; None if nothing needs one."""
        is_needed = self.diversity_coeff or self.near_duplicate is not None or self.eviction == "least_diverse"
        return (self.embedding or ("ngram" if is_needed else None)) if self.is_on else None

    @property
    def searches_on_gpu(self) -> bool:
        """Return whether neighbours are searched on a GPU."""
        return self.embedding_used is not None and self.diversity_device == "gpu"

    @property
    def has_due_dates(self) -> bool:
        """Return whether a spacing rule sets due dates and predicts recall."""
        return self.spacing != NoSpacing.name

    @property
    def reads_recall(self) -> bool:
        """Return whether something needs reviews: spacing, a chosen grade, or a rule that may read recall."""
        is_plain = {self.selection, self.reuse_selection} <= {*DATELESS} and self.eviction in ("fifo", "least_diverse")
        is_graded = self.grade_reuse or self.grade != TABLE["grade"].default
        return self.has_due_dates or is_graded or not is_plain

    @property
    def is_on(self) -> bool:
        """Return whether the memory is on: capacity above 0."""
        return self.capacity > 0

    def faults(self, prefix: str = "") -> list[str]:
        """Return all validation errors, each as "name = value; expected ..."; [] if there are none."""
        lines = [line for check in (_ranges, _choices, _parts, _rules, _place, _together) for line in check(self)]
        named = {line.partition(" ")[0] for line in lines}
        lines += [line for line in _without_effect(self) if line.partition(" ")[0] not in named]
        return [f"{prefix}{line}" for line in lines]

    def checked(self) -> ReplaySettings:
        """Return these settings.

        Raises:
            ValueError: settings are invalid; the message lists all errors.
        """
        if faults := self.faults():
            raise ValueError("ReplaySettings has faults:\n  " + "\n  ".join(faults))
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return every setting in JSON types; a function by its import path."""
        return {name: _plain(getattr(self, name)) for name in TABLE}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ReplaySettings:
        """Return the settings whose `as_dict` this is, without validation."""
        is_tuple = {name for name, row in TABLE.items() if isinstance(row.default, tuple)}
        known: dict[str, Any] = {n: tuple(v) if n in is_tuple else v for n, v in values.items()}
        return cls(**known)


TABLE = table_of(ReplaySettings)
RULES: dict[str, Rules[Any]] = {
    "spacing": SPACINGS,
    "grade": GRADES,
    "selection": SELECTIONS,
    "reuse_selection": SELECTIONS,
    "domains": PREDICATES,
    "embedding": EMBEDDINGS,
    "eviction": EVICTIONS,
    "admit": ADMISSIONS,
    "on_group": ON_GROUP,
}
# By `domain_filter`, by the settings of admission, and where it is chosen.
CHECKED_APART = ("domains", "admit", "on_group")


def parameters_of(setting_name: str, rule: Any) -> dict[str, Setting] | None:
    """Return the parameters of the rule that a setting chooses, beside those of every rule; None: they are unknown.

    Args:
        setting_name: "spacing", "selection" or "reuse_selection".
        rule: its name. The parameters of a user's own rule are unknown.
    """
    if not isinstance(rule, str) or rule not in RULES[setting_name].own or RULES[setting_name].is_users(rule):
        return None
    if setting_name == "spacing":
        return {name: row for name, row in table_of(SPACINGS.own[rule]).items() if name != "desired_retention"}
    own = SELECTIONS.own[rule]
    return table_of(own) if isinstance(own, type) else {}


NOT_CHOSEN = {"grade": ("likelihood",)}  # grades reused groups (`grade_reuse`), not visits

_AT_LEAST = {
    "retain_answers": 1,
    "retain_top_k": 0,
    "retain_window": 1,
    "capacity": 0,
    "groups_per_item": 1,
    "max_bytes": 1,
    "min_buffer_size": 0,
    "min_recall_interval": 1,
    "min_graded": 1,
    "max_age": 1,
    "max_uses": 1,
}
_WITHIN: dict[str, tuple[float, float, str]] = {
    "revisit_fraction": (0, 1, "a number in [0, 1], or 'auto'"),
    "reuse_fraction": (0, 1 - 1e-9, "a number in [0, 1)"),
    "retain": (0, math.inf, "a number of at least 0"),
    "desired_retention": (1e-9, 1 - 1e-9, "a number in (0, 1)"),
    "iterations_per_day": (1e-9, math.inf, "a number above 0"),
    "pass_reward": (-math.inf, math.inf, "a number"),
    "reuse_coeff": (0, math.inf, "a number of at least 0"),
    "max_logp_gap": (1e-9, math.inf, "a number above 0, or None"),
    "diversity_coeff": (0, math.inf, "a number of at least 0"),
    "timeout_s": (1e-9, math.inf, "a number above 0"),
}


def _ranges(settings: ReplaySettings) -> Iterator[str]:
    yield from of_integers(settings, _AT_LEAST)
    not_numbers = ("revisit_fraction",) if settings.revisit_fraction == AUTO else ()
    yield from of_ranges(settings, {name: row for name, row in _WITHIN.items() if name not in not_numbers})
    admission = {name: getattr(settings, name) for name in SHARED}
    yield from AdmissionSettings(**admission).faults()
    window = settings.mask_window
    if not isinstance(window, tuple | list) or len(window) != 2 or not all(map(is_number, window)):
        yield f"mask_window = {window!r}; expected two numbers"
    elif not 0 < window[0] < 1 < window[1]:
        yield f"mask_window = {window!r}; expected 0 < lower < 1 < upper"
    half_life = settings.history_half_life
    if half_life is not None and (not is_number(half_life) or half_life <= 0):
        yield f"history_half_life = {half_life!r}; expected a number above 0, or None"
    yield from of_switches(settings, ("grade_reuse", "fill_with_not_due"))


def _choices(settings: ReplaySettings) -> Iterator[str]:
    choices: dict[str, tuple[Any, ...]] = {
        "history_by": tuple(HALF_LIVES),
        "rating_scale": tuple(RATING_SCALES),
        "reuse_correction": CORRECTIONS,
        "diversity_device": ("cpu", "gpu"),
    }
    yield from of_choices(settings, choices)
    for name, rules in RULES.items():
        if name == "embedding" and settings.embedding is None:
            continue
        if name not in CHECKED_APART and (fault := rules.fault(getattr(settings, name), NOT_CHOSEN.get(name, ()))):
            yield f"{name} = {getattr(settings, name)!r}; {fault}"
    if settings.on_group is not None and (fault := ON_GROUP.fault(settings.on_group)):
        yield f"on_group = {settings.on_group!r}; {fault}, or None"


def _parts(settings: ReplaySettings) -> Iterator[str]:
    value = settings.diversity_on
    if not isinstance(value, tuple | list) or set(value) - set(DIVERSITY_ON) or len(set(value)) != len(value):
        yield f"diversity_on = {value!r}; expected some of {', '.join(map(repr, DIVERSITY_ON))}"
    quotas = settings.domain_quotas
    if quotas not in (None, "equal") and not _are_weights(quotas):
        yield f"domain_quotas = {quotas!r}; expected None, 'equal' or weights above 0 by domain"
    try:
        domain_filter(settings.domains)
    except ValueError as error:
        yield str(error)


def _rules(settings: ReplaySettings) -> Iterator[str]:
    names = ("selection_config", "reuse_selection_config", "spacing_config")
    configs = {name: getattr(settings, name) for name in names}
    if bad := {name: value for name, value in configs.items() if not isinstance(value, Mapping)}:
        yield from (f"{name} = {value!r}; expected parameters by name" for name, value in bad.items())
        return
    if "desired_retention" in settings.spacing_config:
        yield f"spacing_config = {settings.spacing_config!r}; expected no desired_retention, a setting of its own"
        return
    for name in ("selection", "reuse_selection"):
        rule, config = getattr(settings, name), configs[f"{name}_config"]
        if not SELECTIONS.fault(rule):
            try:
                SELECTIONS.make(rule, config)
            except (TypeError, ValueError) as error:
                yield f"{name}_config = {config!r}; {error}"
    retention = settings.desired_retention
    if not SPACINGS.fault(settings.spacing) and is_number(retention) and 0 < retention < 1:
        try:
            make_spacing(settings.spacing, retention, **settings.spacing_config)
        except (TypeError, ValueError) as error:
            yield f"spacing_config = {settings.spacing_config!r}; {error}"


def _place(settings: ReplaySettings) -> Iterator[str]:
    place = settings.local_directory
    if place is None:
        return
    if not isinstance(place, str) or not Path(place).is_absolute():
        yield f"local_directory = {place!r}; expected an absolute path as text, or None"
    elif settings.capacity == 0:
        yield f"local_directory = {place!r} with capacity = 0; expected None without a memory"


def _together(settings: ReplaySettings) -> Iterator[str]:
    fractions = (settings.revisit_fraction, settings.reuse_fraction)
    if settings.capacity == 0 and settings.retain:
        yield f"retain = {settings.retain!r} with capacity = 0; expected 0 without a memory, which stores the answers"
    if settings.capacity == 0 and any(fractions):
        yield f"capacity = 0 with revisit_fraction, reuse_fraction = {fractions}; expected both 0 without a memory"
    if settings.embedding == "policy" and settings.near_duplicate is not None:
        yield (
            f"near_duplicate = {settings.near_duplicate!r} with embedding = 'policy'; expected another embedding: "
            "hidden states are known after the update, duplicates are refused before it"
        )


def _without_effect(settings: ReplaySettings) -> Iterator[str]:
    """Yield errors for parameters of a part that is off."""
    if settings.retain == 0:
        for name in ("retain_answers", "retain_top_k", "retain_window"):
            if (value := getattr(settings, name)) != TABLE[name].default:
                yield f"{name} = {value!r}; expected it only with retain above 0"
    if not settings.has_due_dates:
        for name in ("desired_retention", "iterations_per_day"):
            if (value := getattr(settings, name)) != TABLE[name].default:
                yield f"{name} = {value!r}; expected it only with a rule of spacing: items are always due without one"
    if not settings.diversity_coeff and tuple(settings.diversity_on) != DIVERSITY_ON:
        yield f"diversity_on = {settings.diversity_on!r}; expected it only with diversity_coeff above 0"


def check_trusted(settings: ReplaySettings, names: Iterable[str] = ()) -> None:
    """Refuse settings from a file whose rules are import paths, because loading them runs arbitrary code.

    Args:
        settings: as read from the file.
        names: settings whose rules will be called; empty: all of them.

    Raises:
        ValueError: naming these rules.
    """
    chosen = [(name, rule) for name in names or RULES for rule in _chosen(settings, name)]
    named = [(name, rule) for name, rule in chosen if isinstance(rule, str) and ":" in rule and rule not in RULES[name]]
    named = [(name, rule) for name, rule in named if not rule.startswith(CONTRIB)]
    if named:
        listed = ", ".join(f"{name} = {rule!r}" for name, rule in named)
        raise ValueError(f"the memory has rules of somebody's own: {listed}; expected --trust-rules, to run their code")


def users_rules(settings: ReplaySettings) -> dict[str, Any]:
    """Return setting -> rule for the chosen rules registered in this process only; of hooks "admit/<name>"."""
    chosen = [(name, rule) for name in RULES for rule in _chosen(settings, name) if RULES[name].is_users(rule)]
    return {f"admit/{rule}" if name == "admit" else name: RULES[name][rule] for name, rule in chosen}


def register_rules(settings: ReplaySettings, rules: Mapping[str, Any]) -> None:
    """Register the rules that `users_rules` returned in another process."""
    for key, rule in rules.items():
        name, _, of_hook = key.partition("/")
        RULES[name][of_hook or getattr(settings, name)] = rule


def _chosen(settings: ReplaySettings, name: str) -> tuple[Any, ...]:
    """Return the rules that a setting names."""
    value = getattr(settings, name)
    return names_of(value) if name == "admit" else (value,)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if callable(value):
        return f"{value.__module__}:{value.__qualname__}"
    return value.tolist() if hasattr(value, "tolist") else value


def _are_weights(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(is_number(w) and w > 0 for w in value.values())

