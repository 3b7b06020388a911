"""Defines the class-incremental study: its arms, their shared settings, and the primary comparison.

All settings were frozen before the reported seeds (1, 2, ...) ran. Learning rate, updates per step and capacity were
tuned for the reservoir, on seeds from 101; of the buffer's schedule (`ITEMS`), only what does not suit labels is off
(`LABELLED`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rllib_srl.contrib.images.data import ImageSet
from rllib_srl.studies.study import Arm, Domain, Primary, Study

SHORT_IMAGES = 12  # training images of each class with --short


@dataclass(frozen=True)
class Setup:
    """Settings that all arms share."""

    num_fresh: int = 10  # new images per step; each is in one step only
    num_replayed: int = 10  # stored images per update; all while there are fewer
    num_updates: int = 4  # updates per step; each has all new images of the step and a new draw of stored ones
    capacity_per_class: int = 5  # stored images
    num_views: int = 4  # views per image in a test of its recall
    num_hidden: int = 100
    lr: float = 0.3
    num_tests: int = 4  # tests per stage


# Images contain no text, features come from the classifier, and stored groups are not reused: labels are always known.
# All parts of the schedule are on.
ITEMS: Mapping[str, Any] = {
    "on_secret": "keep",
    "embedding": "policy",
    "groups_per_item": 1,
    "spacing": "fsrs",
    "selection": "srl",
    "load_control": "throttle_new",
    "leech_failures": 8,
    "diversity_coeff": 0.5,
}
# Supervised learning gains most from images that are always misclassified, while a group of equal rewards has no policy
# gradient. So images that are never recognised keep their priority and are not suspended. Eviction is by reservoir.
LABELLED: Mapping[str, Any] = {
    **ITEMS,
    "eviction": "reservoir",
    "selection_config": {"learnability_coeff": 0.0},
    "leech_failures": 0,
}
ARMS = (
    Arm("none", "no replay", "Trains on new images only."),
    Arm(
        "reservoir",
        "reservoir replay",
        "Stores a uniform random sample of all images so far, and replays them at random.",
    ),
    Arm(
        "srl",
        "SRL + diversity",
        "Stores the same images as reservoir replay; replays those that are due, dissimilar ones first.",
        dict(LABELLED),
    ),
    Arm(
        "recent",
        "newest images again",
        "Trains on as many images as the arms with replay; the additional images are the newest ones, not old ones.",
    ),
    Arm(
        "spacing",
        "SRL without diversity",
        "As SRL + diversity, without its measure of similarity.",
        {**LABELLED, "diversity_coeff": 0.0},
    ),
    Arm(
        "srl_defaults",
        "SRL + diversity, as for prompts",
        "With leeches and the eviction for prompts: images that are never recognised are evicted first.",
        dict(ITEMS),
    ),
)
REPLAYING = tuple(arm.name for arm in ARMS if arm.name != "none")


def study_of(images: ImageSet, num_seeds: int, is_short: bool) -> tuple[Study, Setup]:
    """Return the study on a data set, and the settings that its arms share.

    Args:
        images: the data; for a short study, with few training images of each class.
        num_seeds: number of seeds: 1, 2, ...
        is_short: whether the study only tests that the script works.
    """
    setup = Setup(num_updates=2, num_tests=2) if is_short else Setup()
    data = hashlib.blake2b(images.train_NCHW.tobytes() + images.train_label_N.tobytes(), digest_size=8).hexdigest()
    stages = images.stages()
    study = Study(
        name=f"images-{re.sub('[^A-Za-z0-9_.+-]', '-', images.name)}" + ("-short" if is_short else ""),
        question="Does replaying images when they are due keep more of earlier classes than replaying any of them?",
        answered_by=(
            "SRL + diversity ends with a higher accuracy and a higher retention than reservoir replay and than no "
            "replay, over paired seeds, with equally many images stored and replayed."
        ),
        arms=ARMS,
        domains=tuple(Domain(name, at) for at, name in enumerate(domain_names(images))),
        num_stages=len(stages),
        seeds=tuple(range(1, num_seeds + 1)),
        budget=len(images.train_label_N),
        primary=Primary("srl", ("reservoir", "none")),
        is_confirmation=not is_short,
        asks_about_spacing=True,
        settings={**asdict(setup), "data": data, "image": list(images.train_NCHW.shape[1:])},
        subject="a small image classifier",
    )
    return study.checked(), setup


def domain_names(images: ImageSet) -> list[str]:
    """Return the domain name of each stage, such as "classes_0-1"."""
    return [f"classes_{classes[0]}-{classes[-1]}" for classes in images.stages()]
