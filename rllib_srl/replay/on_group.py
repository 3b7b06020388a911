"""The hook `replay_on_group`: a function that makes new items from each played group that is stored.

    def mine(group, room, generator):                       replay_on_group="my_module:mine"
        yield replace(group.prompt, history=(*group.prompt.history, group.extra["turns"][0][0]))

Arguments: the group; `room`, the most tokens of a prompt that leave room for a turn, None without a limit; a generator
whose state is saved. Known prompts are left out. With the hook, groups keep the policy's texts: `group.extra["turns"]`,
a list of texts for each episode, and `group.extra["can_iterate"]`, if the environment says it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from rllib_srl.common.rules import Rules
from rllib_srl.types import Group, Prompt

OnGroup = Callable[[Group, int | None, np.random.Generator], Iterable[Prompt]]

ON_GROUP: Rules[OnGroup] = Rules("replay_on_group", {})
