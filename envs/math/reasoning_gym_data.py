"""Build a reasoning-gym dataset from its name and curriculum level, and read questions and answers from its entries.

    dataset = make_dataset("chain_sum", {"max_terms": 2}, level=None)
    question_of(dataset[7]), answer_of(dataset[7], "chain_sum")         "State the final answer to ...: 4 + 3 =", "7"

Three datasets keep the answer in the metadata of an entry, where `answer_of` reads it.

Source: Stojanovski et al., 2025, arXiv 2505.24760, and the package reasoning-gym.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

SIZE = 20_000  # of every dataset: in some the entries depend on the size; word_ladder allows no more
ANSWER_IN_METADATA = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
REFUSED = {
    "boxnet": "it has no reference answers to check its grader with",
    "rush_hour": "it has no reference answers to check its grader with",
    "composite": "its settings are not JSON; expected one environment for each dataset, mixed by `mixture`",
}

_SEED = 0  # of every dataset: only the index varies


def make_dataset(
    name: str, config: Mapping[str, Any], level: int | None, levels: Mapping[str, int] | None = None
) -> Any:
    """Return a dataset of reasoning-gym.

    Args:
        name: of the dataset in reasoning-gym
        config: of the dataset, with reasoning-gym's parameter names
        level: of all attributes of its curriculum; None leaves the dataset's own defaults
        levels: of single attributes of its curriculum

    Raises:
        ValueError: there is no such dataset, setting or level, or the dataset cannot be played.
    """
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(f"dataset = {name!r}; expected one of reasoning-gym's {', '.join(sorted(DATASETS))}")
    if name in REFUSED:
        raise ValueError(f"dataset = {name!r} is refused: {REFUSED[name]}")
    dataset_class, config_class = DATASETS[name]
    wanted = _at_level(name, level, levels or {}) if level is not None or levels else {}
    known = config_class.__dataclass_fields__
    for key in config:
        if key not in known:
            raise ValueError(f"config of dataset {name!r} has no {key!r}; expected {', '.join(sorted(known))}")
    try:
        return dataset_class(config_class(**{**wanted, **config, "seed": _SEED, "size": SIZE}))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"config of dataset {name!r} is refused: {error}") from error


def _at_level(name: str, level: int | None, levels: Mapping[str, int]) -> dict[str, Any]:
    """Return the settings of a dataset's curriculum at the given levels."""
    from reasoning_gym.factory import CURRICULA, create_curriculum

    if name not in CURRICULA:
        raise ValueError(f"level = {level}; expected None, because dataset {name!r} has no curriculum")
    curriculum = create_curriculum(name)
    highest = {key: len(attribute.levels) - 1 for key, attribute in curriculum.attributes.items()}
    if level is not None:
        if not 0 <= level <= max(highest.values()):
            raise ValueError(f"level = {level}; expected 0 to {max(highest.values())} for dataset {name!r}")
        curriculum.set_global_level(level)
    for key, value in levels.items():
        if key not in highest or type(value) is not int or not 0 <= value <= highest[key]:
            listed = ", ".join(f"{known} 0 to {most}" for known, most in highest.items())
            raise ValueError(f"levels = {dict(levels)!r}; expected for dataset {name!r}: {listed}")
        curriculum.set_attr_level(key, value)
    return asdict(curriculum.generate_configuration())


def answer_of(entry: dict[str, Any], name: str) -> str:
    """Return the answer of an entry, "" for none."""
    answer = entry["metadata"][ANSWER_IN_METADATA[name]] if name in ANSWER_IN_METADATA else entry["answer"]
    if isinstance(answer, dict):
        return json.dumps({str(key): value for key, value in answer.items()})
    return answer.strip() if isinstance(answer, str) else ""


def question_of(entry: dict[str, Any]) -> str:
    """Return the question of an entry."""
    return str(entry["question"]).strip()
