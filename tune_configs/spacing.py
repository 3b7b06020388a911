"""Which spacing rule remembers most, and is any rule better than none?

A rule matters if FSRS is better than no rule in final accuracy and retention. Items must be reviewed
often enough to tell: if the median item came back fewer than 4 times, the report rejects the study as a test of
spacing. For enough reviews the memory is small, and half of the played prompts come from it.
"""

from __future__ import annotations

from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs.arms import on_stream, varied


def study() -> Study:
    """Return the study."""
    rules = {"sm2": "SM-2", "leitner": "Leitner boxes", "fixed": "fixed interval", "expanding": "expanding intervals",
             "srl1": "SRL-1", "none": "no rule"}
    fsrs = varied("fsrs", "FSRS", "An old prompt is due when FSRS expects it to be forgotten.",
                  replay_spacing={"name": "fsrs"})
    others = [varied(rule, title, f"An old prompt is due as {title} says.", replay_spacing={"name": rule})
              for rule, title in rules.items()]
    return on_stream(
        "cpu", module=__name__, doc=__doc__, arms=[fsrs, *others], primary=Primary("fsrs", ("none",)),
        asks_about_spacing=True, settings={"replay_revisit_fraction": 0.5, "replay_capacity": 64},
    )
