"""Studies, one question per file: what is varied, against what, and how the answer is read.

A study is a module whose docstring asks the question in its first line, with a function `study()` that returns a
`Study`; `python scripts/tune.py` lists and runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rllib_srl import SRLConfig


@dataclass(frozen=True)
class Study:
    """What Tune needs to answer a question.

    Invariant: each name in `varied` is a setting of `param_space` that holds one of Tune's search spaces.
    """

    param_space: SRLConfig  # one trial's settings; where a metric of evaluation counts, each trial ends with one
    iterations: int  # of each trial
    varied: tuple[str, ...]
    metric: str  # a name in a trial's last result, levels joined by "/"
    mode: str = "max"
    num_samples: int = 1  # times each combination is run
