"""Recommend shuffled passes for a fixed pool of prompts whose order was left at its default.

Evidence: docs/does-memory-help.md, "A fixed pool of unlike prompts".
"""

from __future__ import annotations

from rllib_srl import SRLConfig
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.envs.math.question_file import QuestionFile
from rllib_srl.envs.wrappers.fixed_pool import FixedPool

LEAST_PLAYS = 3.0  # of each prompt, on average, from which the order of a pool matters
# Settings that order prompts, with the names that users give.
OF_ORDER = (
    *("prompt_order", "stream", "mixture"),
    *("replay_revisit_fraction", "replay_selection", "replay_spacing"),
)


def pool_hint(config: SRLConfig, source: PromptSource, last: int) -> str:
    """Return one line on the order of prompts, "" if it does not apply.

    It applies to own data and to the environment `pool`, if each prompt will be played several times and every setting
    of `OF_ORDER` is its default.

    Args:
        config: of the run.
        source: of its prompts.
        last: iteration at which the run ends.
    """
    are_pools = all(isinstance(env.unwrapped, QuestionFile | FixedPool) for env in source.environments.values())
    given, defaults = config.flat(), SRLConfig().flat()
    if not are_pools or any(getattr(given, name) != getattr(defaults, name) for name in OF_ORDER):
        return ""
    num_played = last * config.num_prompts_per_batch
    if not (num := source.num_training_prompts(int(num_played / LEAST_PLAYS))):
        return ""
    return (
        f"hint: {last} iterations play each of the {num:,} prompts about {num_played / num:.0f} times. For a fixed "
        "pool, shuffled passes are the plain choice: --prompt_order epochs --replay_revisit_fraction 0 "
        "(docs/does-memory-help.md)"
    )
