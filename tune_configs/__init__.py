"""Studies, one question per file: the settings that vary, the comparison, and how to read the answer.

A study is a module with a function `study()`. The first line of its docstring asks the question, the rest states which
result answers it. There are two kinds, and `srl tune` lists and runs both:

    Study    compares arms on a stream of domains, paired by seed, at an equal budget of generated tokens; its results
             are a directory that `srl report` reads (`rllib_srl.studies.study`)
    Search   lets Ray Tune look for a good value of some settings; its answer is the table at the end

`arms.py` holds the shared parts of the studies: the settings of a trial, the arms, and the stream they run on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllib_srl import SRLConfig


@dataclass(frozen=True)
class Search:
    """Input of Ray Tune's search for a good value of some settings.

    Invariant: each name in `varied` is a setting of `param_space` that holds one of Tune's search spaces, or that the
    scheduler changes.
    """

    param_space: SRLConfig  # one trial's settings; where a metric of evaluation counts, each trial ends with one
    iterations: int  # of each trial
    varied: tuple[str, ...]
    metric: str  # a name in a trial's last result, levels joined by "/"
    mode: str = "max"
    num_samples: int = 1  # times each combination is run
    scheduler: Callable[[int], Any] | None = None  # makes Tune's scheduler from the iterations of a trial
