"""The class-incremental study: its arms, what all of them share, and the comparison that decides.

Frozen before the reported seeds (1, 2, ...) ran: learning rate, updates a step and capacity were chosen for the
reservoir, on seeds from 101; of the buffer, which of its defaults do not carry over to labels (`LABELLED`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rllib_srl.continual.study import Arm, Domain, Primary, Study
from scripts.images_data import ImageSet

SHORT_IMAGES = 12  # of each class


@dataclass(frozen=True)
class Setup:
    """What all arms share."""

    num_fresh: int = 10  # new images a step; each is in one step only
    num_replayed: int = 10  # stored images an update, all there are as long as they are fewer
    num_updates: int = 4  # a step; the new images are in all of them, the stored ones are drawn anew
    capacity_per_class: int = 5  # stored images
    num_views: int = 4  # of an image, in a test of its recall
    num_hidden: int = 100
    lr: float = 0.3
    num_tests: int = 4  # a stage


# Images hold no text, features come from the classifier, and stored groups are not reused: a label is always known.
ITEMS: Mapping[str, Any] = {"on_secret": "keep", "embedding": "policy", "groups_per_item": 1}
# A label teaches most where everything is wrong; a group of equal rewards teaches a policy nothing. So no image is of
# low priority because it is never recognised, and none is suspended. Which images are held is left to the lot.
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
        "Holds a uniform sample of all images so far, drawn by lot, and replays any of them.",
    ),
    Arm(
        "srl",
        "SRL + diversity",
        "Holds the same images as reservoir replay; replays those that are due to be forgotten, unlike ones first.",
        dict(LABELLED),
    ),
    Arm(
        "recent",
        "newest images again",
        "Trains on as many images as the arms with replay, but the additional ones are of the newest, not old.",
    ),
    Arm(
        "spacing",
        "SRL without diversity",
        "As SRL + diversity, but blind to how unlike images are.",
        {**LABELLED, "diversity_coeff": 0.0},
    ),
    Arm(
        "srl_defaults",
        "SRL + diversity, as for prompts",
        "The buffer as it is for prompts: images that are never recognised are of low priority and leave first.",
        dict(ITEMS),
    ),
)
REPLAYING = tuple(arm.name for arm in ARMS if arm.name != "none")


def study_of(images: ImageSet, num_seeds: int, is_short: bool) -> tuple[Study, Setup]:
    """Return the study on a data set, and what its arms share.

    Args:
        images: the data; of a short study, the few images of each class that it trains on.
        num_seeds: seeds 1, 2, ...
        is_short: a study that only shows that the script works.
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
    """Return the names of the stages' classes, "classes_0-1"."""
    return [f"classes_{classes[0]}-{classes[-1]}" for classes in images.stages()]
