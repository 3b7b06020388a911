"""From the name of a dataset of reasoning-gym, and a level of its curriculum, to the dataset and what its entries say.

    dataset = make_dataset("chain_sum", {"max_terms": 2}, level=None)
    question_of(dataset[7]), answer_of(dataset[7], "chain_sum")         "State the final answer to ...: 4 + 3 =", "7"

Three datasets keep their answer in the metadata of an entry, and it is taken from there.

Source: Stojanovski et al., 2025, arXiv 2505.24760, and the package reasoning-gym.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

SIZE = 20_000  # of every dataset, for some make other entries at another size; word_ladder takes no more
ANSWER_IN_METADATA = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
REFUSED = {
    "boxnet": "it states no answers that could be checked against its grader",
    "rush_hour": "it states no answers that could be checked against its grader",
    "composite": "its settings are no JSON; expected envs.reasoning_gym_mixture in its place",
}

_SEED = 0  # of every dataset: the index in it is what varies


def make_dataset(
    name: str, config: Mapping[str, Any], level: int | None, levels: Mapping[str, int] | None = None
) -> Any:
    """Return a dataset of reasoning-gym.

    Args:
        name: that reasoning-gym knows
        config: of the dataset, in reasoning-gym's own words
        level: of all attributes of its curriculum; None leaves the dataset's own defaults
        levels: of single attributes of its curriculum

    Raises:
        ValueError: if there is no such dataset, setting or level, or it cannot be played.
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
    """Return what the curriculum of a dataset sets at its levels."""
    from reasoning_gym.factory import CURRICULA, create_curriculum

    if name not in CURRICULA:
        raise ValueError(f"level = {level}; expected None, for dataset {name!r} has no curriculum")
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
    """Return the answer that an entry states, "" for none."""
    answer = entry["metadata"][ANSWER_IN_METADATA[name]] if name in ANSWER_IN_METADATA else entry["answer"]
    if isinstance(answer, dict):
        return json.dumps({str(key): value for key, value in answer.items()})
    return answer.strip() if isinstance(answer, str) else ""


def question_of(entry: dict[str, Any]) -> str:
    """Return what an entry asks."""
    return str(entry["question"]).strip()
