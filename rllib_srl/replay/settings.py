"""Every setting of the memory, its default and its meaning; SRLConfig has them with the prefix `replay_`.

    ReplaySettings(spacing="sm2", capacity=1000).faults() -> ["name = value; expected ...", ...]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rllib_srl.replay.diversity import BONUSES, PARTS
from rllib_srl.replay.embedding import EMBEDDINGS
from rllib_srl.replay.eviction import EVICTIONS
from rllib_srl.replay.grading import GRADES, RATING_SCALES
from rllib_srl.replay.load import LOAD_CONTROLS
from rllib_srl.replay.selection import SELECTIONS, make_settings
from rllib_srl.replay.spacing import SPACINGS, make_spacing
from rllib_srl.setting_tables import setting, table_of

CORRECTIONS = ("clip", "truncate", "mask", "shape")
ON_SECRET = ("refuse", "mask", "keep")
DIVERSITY_ON = ("interval", "draw")


@dataclass(frozen=True)
class ReplaySettings:
    """Settings of the memory. Invariant: plain values only, so that they travel to any process."""

    revisit_fraction: float = setting(0.25, "share of played prompts that come from the memory, in [0, 1]")
    reuse_fraction: float = setting(0.25, "share of trained groups that are stored ones, in [0, 1)")
    capacity: int = setting(65_536, "items (prompts) kept, at most; 0 runs without a memory")
    groups_per_item: int = setting(2, "newest groups kept of each item")
    max_bytes: int = setting(2 << 30, "bytes of groups held in memory; older ones are read back from disk")
    min_buffer_size: int = setting(16, "items below which nothing is revisited or reused")
    spacing: str = setting("fsrs", "a key of `spacing.SPACINGS`: when an item is due again")
    spacing_config: Mapping[str, Any] = setting({}, "parameters of the spacing rule, by name")
    desired_retention: float = setting(0.9, "recall at which an item becomes due, in (0, 1)")
    iterations_per_day: float = setting(1.0, "iterations that count as one of the rule's days, > 0")
    domain_half_life: float = setting(0.0, "iterations in which a review's say about its domain halves; 0: no say")
    early: bool = setting(True, "slots that nothing is due for go to items due later; False: to fresh prompts")
    min_recall_interval: int = setting(1, "iterations between two visits of an item, at least")
    load_control: str = setting("intake", '"intake" (new items wait until reviews fit), "stretch" (longer) or "none"')
    grade: str = setting("pass_rate", '"pass_rate", "reward" or "rating" (people only): what grades a visit')
    grade_reuse: bool = setting(False, "a reuse grades its item, by how likely the stored success still is")
    rating_scale: str = setting("normalised", '"ordinal" (1 to 5), "binary" or "normalised" (0 to 1): of ratings')
    pass_reward: float = setting(0.9, "reward from which an episode counts as recalled")
    min_graded: int = setting(2, "valid episodes below which a visit grades nothing")
    selection: str = setting("srl", "a key of `selection.SELECTIONS`: which items are revisited")
    reuse_selection: str = setting("srl", "a key of `selection.SELECTIONS`: which groups are reused")
    selection_config: Mapping[str, Any] = setting({}, "parameters of both selection rules, by name")
    candidate_pool: int = setting(4096, "items or groups a rule chooses among; it is exact up to that many")
    domains: Any = setting("all", '"all", "last" (but one), "earlier" (than the newest), a list, "module:predicate"')
    domain_quotas: Any = setting(None, 'share of draws by domain: None, "equal" or domain -> weight')
    leech_failures: int = setting(8, "failed visits in a row that make an item a leech; 0 knows no leeches")
    leech_share: float = setting(0.1, "share of revisits that leeches may take, in [0, 1]")
    leech_interval: int = setting(32, "iterations until a leech is tested again")
    max_age: int = setting(32, "iterations after which a group is not reused")
    max_uses: int = setting(4, "times a group is reused, at most")
    reuse_coeff: float = setting(1.0, "weight of the reused groups' loss beside the played ones'")
    reuse_correction: str = setting("clip", '"clip", "shape" (both around stored log-probs), "truncate" or "mask"')
    mask_window: tuple[float, float] = setting((0.5, 2.0), 'ratios "mask" keeps; "truncate" cuts at the upper one')
    max_drift: float | None = setting(1.0, "mean |log ratio| from which a reused episode is left out; None keeps all")
    diversity_coeff: float = setting(0.5, "how much diversity shortens effective intervals and weighs in draws")
    diversity_parts: tuple[str, ...] = setting(("variance", "novelty"), "some of `diversity.PARTS`")
    diversity_on: tuple[str, ...] = setting(DIVERSITY_ON, "where diversity acts: some of interval, draw")
    diversity_bonus: str | None = setting(None, 'advantages times distance: None, "paper", "minmax" or "mean1"')
    neighbours: int = setting(8, "k of novelty: neighbours in the memory")
    exact_neighbours: int = setting(20_000, "items up to which neighbours are exact; above, an index finds them")
    index_device: str = setting("cpu", '"cpu" or "gpu": where that index searches')
    embedding: str = setting("ngram", '"ngram", "sentence" (packaged MiniLM) or "policy" (hidden states)')
    eviction: str = setting("lowest_value", "a key of `eviction.EVICTIONS`: which items go when the memory is full")
    max_episode_tokens: int | None = setting(None, "tokens of an episode above which a group is refused; None: any")
    near_duplicate: float | None = setting(None, "cosine from which a new prompt is a duplicate; None: hashes only")
    degenerate_share: float | None = setting(0.5, "share of an episode one token may take; None admits all")
    on_secret: str = setting("refuse", '"refuse", "mask" (out of the loss, redacted in exports) or "keep"')
    task_growth: bool = setting(False, "partial histories become items (ExIt)")
    growth_depth: int = setting(8, "turns of the longest history that becomes an item")
    p_div: float = setting(0.2, "probability that a revisit asks for a different answer, where a world can")
    num_shards: int = setting(1, "buffer actors; items are shared out by prompt hash")
    timeout_s: float = setting(60.0, "seconds one call to the memory may take")

    @property
    def is_on(self) -> bool:
        """Say whether there is a memory at all."""
        return self.capacity > 0

    def faults(self, prefix: str = "") -> list[str]:
        """Return every fault as "name = value; expected ...", [] if there is none."""
        return [f"{prefix}{line}" for check in (_ranges, _choices, _parts, _rules, _together) for line in check(self)]

    def checked(self) -> ReplaySettings:
        """Return these settings.

        Raises:
            ValueError: naming all faults at once.
        """
        if faults := self.faults():
            raise ValueError("ReplaySettings has faults:\n  " + "\n  ".join(faults))
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return every setting in JSON types; a function by its import path."""
        return {name: _plain(getattr(self, name)) for name in TABLE}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ReplaySettings:
        """Return the settings whose `as_dict` this is, not checked; names of another version are left out."""
        is_tuple = {name for name, (default, _) in TABLE.items() if isinstance(default, tuple)}
        known: dict[str, Any] = {n: tuple(v) if n in is_tuple else v for n, v in values.items() if n in TABLE}
        return cls(**known)


TABLE = table_of(ReplaySettings)

_AT_LEAST = {
    "capacity": 0,
    "groups_per_item": 1,
    "max_bytes": 1,
    "min_buffer_size": 0,
    "min_recall_interval": 1,
    "min_graded": 2,
    "candidate_pool": 1,
    "leech_failures": 0,
    "leech_interval": 1,
    "max_age": 1,
    "max_uses": 1,
    "neighbours": 1,
    "exact_neighbours": 256,
    "growth_depth": 1,
    "num_shards": 1,
}
_WITHIN: dict[str, tuple[float, float, str]] = {
    "revisit_fraction": (0, 1, "a number in [0, 1]"),
    "reuse_fraction": (0, 1 - 1e-9, "a number in [0, 1)"),
    "desired_retention": (1e-9, 1 - 1e-9, "a number in (0, 1)"),
    "iterations_per_day": (1e-9, math.inf, "a number above 0"),
    "domain_half_life": (0, math.inf, "a number of at least 0"),
    "pass_reward": (-math.inf, math.inf, "a number"),
    "leech_share": (0, 1, "a number in [0, 1]"),
    "reuse_coeff": (0, math.inf, "a number of at least 0"),
    "max_drift": (1e-9, math.inf, "a number above 0, or None"),
    "diversity_coeff": (0, math.inf, "a number of at least 0"),
    "near_duplicate": (1e-9, 1, "a number in (0, 1], or None"),
    "degenerate_share": (1e-9, 1, "a number in (0, 1], or None"),
    "p_div": (0, 1, "a number in [0, 1]"),
    "timeout_s": (1e-9, math.inf, "a number above 0"),
}


def _ranges(settings: ReplaySettings) -> Iterator[str]:
    for name, least in _AT_LEAST.items():
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            yield f"{name} = {value!r}; expected an integer of at least {least}"
    for name, (low, high, expected) in _WITHIN.items():
        value = getattr(settings, name)
        if value is None and expected.endswith("None"):
            continue
        if not _is_number(value) or not low <= value <= high:
            yield f"{name} = {value!r}; expected {expected}"
    longest = settings.max_episode_tokens
    if longest is not None and (not isinstance(longest, int) or isinstance(longest, bool) or longest < 1):
        yield f"max_episode_tokens = {longest!r}; expected an integer of at least 1, or None"
    window = settings.mask_window
    if not isinstance(window, tuple | list) or len(window) != 2 or not all(map(_is_number, window)):
        yield f"mask_window = {window!r}; expected two numbers"
    elif not 0 < window[0] < 1 < window[1]:
        yield f"mask_window = {window!r}; expected 0 < lower < 1 < upper"
    for name in ("task_growth", "grade_reuse", "early"):
        if not isinstance(getattr(settings, name), bool):
            yield f"{name} = {getattr(settings, name)!r}; expected True or False"


def _choices(settings: ReplaySettings) -> Iterator[str]:
    choices: dict[str, tuple] = {
        "spacing": tuple(SPACINGS),
        "load_control": tuple(LOAD_CONTROLS),
        "grade": tuple(name for name in GRADES if name != "likelihood"),
        "rating_scale": tuple(RATING_SCALES),
        "selection": tuple(SELECTIONS),
        "reuse_selection": tuple(SELECTIONS),
        "reuse_correction": CORRECTIONS,
        "diversity_bonus": (None, *BONUSES),
        "embedding": tuple(EMBEDDINGS),
        "eviction": tuple(EVICTIONS),
        "on_secret": ON_SECRET,
        "index_device": ("cpu", "gpu"),
    }
    for name, allowed in choices.items():
        if getattr(settings, name) not in allowed:
            yield f"{name} = {getattr(settings, name)!r}; expected one of {', '.join(map(repr, allowed))}"


def _parts(settings: ReplaySettings) -> Iterator[str]:
    for name, allowed in {"diversity_parts": tuple(PARTS), "diversity_on": DIVERSITY_ON}.items():
        value = getattr(settings, name)
        if not isinstance(value, tuple | list) or set(value) - set(allowed) or len(set(value)) != len(value):
            yield f"{name} = {value!r}; expected some of {', '.join(map(repr, allowed))}"
    quotas = settings.domain_quotas
    if quotas not in (None, "equal") and not _are_weights(quotas):
        yield f"domain_quotas = {quotas!r}; expected None, 'equal' or weights above 0 by domain"
    try:
        domain_filter(settings.domains)
    except ValueError as error:
        yield str(error)


def _rules(settings: ReplaySettings) -> Iterator[str]:
    configs = {name: getattr(settings, name) for name in ("selection_config", "spacing_config")}
    if bad := {name: value for name, value in configs.items() if not isinstance(value, Mapping)}:
        yield from (f"{name} = {value!r}; expected parameters by name" for name, value in bad.items())
        return
    if "desired_retention" in settings.spacing_config:
        yield f"spacing_config = {settings.spacing_config!r}; expected no desired_retention, a setting of its own"
        return
    if settings.selection in SELECTIONS and settings.reuse_selection in SELECTIONS:
        try:
            make_settings(settings.selection, dict(settings.selection_config), [settings.reuse_selection])
        except (TypeError, ValueError) as error:
            yield f"selection_config = {settings.selection_config!r}; {error}"
    if settings.spacing in SPACINGS and _is_number(settings.desired_retention) and 0 < settings.desired_retention < 1:
        try:
            make_spacing(settings.spacing, settings.desired_retention, **settings.spacing_config)
        except (TypeError, ValueError) as error:
            yield f"spacing_config = {settings.spacing_config!r}; {error}"


def _together(settings: ReplaySettings) -> Iterator[str]:
    fractions = (settings.revisit_fraction, settings.reuse_fraction)
    if settings.capacity == 0 and any(fractions):
        yield f"capacity = 0 with revisit_fraction, reuse_fraction = {fractions}; expected both 0 without a memory"
    if settings.embedding == "policy" and "episodic" in settings.diversity_parts:
        yield "diversity_parts has 'episodic' with embedding = 'policy'; expected 'ngram' or 'sentence'"
    if settings.embedding == "policy" and settings.near_duplicate is not None:
        yield (
            f"near_duplicate = {settings.near_duplicate!r} with embedding = 'policy'; expected another embedding: "
            "hidden states are known after the update, duplicates are refused before it"
        )
    if settings.embedding == "policy" and settings.diversity_bonus is not None:
        yield (
            f"diversity_bonus = {settings.diversity_bonus!r} with embedding = 'policy'; expected another embedding: "
            "hidden states are known after the update, the bonus is needed before it"
        )


def domain_filter(domains: Any) -> Any:
    """Return what `domains` asks for: None (all), "last", "earlier", a frozenset of names, or a predicate of a name.

    Raises:
        ValueError: it is none of these, or a predicate that cannot be imported.
    """
    if domains == "all":
        return None
    if domains in ("last", "earlier"):
        return domains
    if isinstance(domains, list | tuple | set | frozenset) and domains and all(isinstance(d, str) for d in domains):
        return frozenset(domains)
    if isinstance(domains, str) and ":" in domains:
        module, _, name = domains.partition(":")
        try:
            predicate = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"domains = {domains!r}; expected an importable predicate: {error}") from error
        if callable(predicate):
            return predicate
    if callable(domains):
        return domains
    raise ValueError(f"domains = {domains!r}; expected 'all', 'last', 'earlier', a list of names or 'module:function'")


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
    return isinstance(value, Mapping) and bool(value) and all(_is_number(w) and w > 0 for w in value.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
