"""The attributes of an `SRLConfig`, with plain values in place of dictionaries of parameters.

    config.flat().kl_coeff              a parameter by its flat name
    config.flat().loss_settings()       the settings of a part, for those who work with it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllib_srl.algorithm.settings import FLAT, GROUPS, NO_ATTRIBUTES
from rllib_srl.engine.adapters import AdapterSpec
from rllib_srl.losses.settings import LossSettings
from rllib_srl.replay.settings import ReplaySettings

LONGEST_EPISODE = 1024  # tokens: `max_episode_tokens`, unless the user or the model says less


class FlatSettings:
    """Settings by flat names. Invariant: a setting with parameters has the value of its head."""

    def __init__(self, config: Any, instead: Mapping[str, Any] | None = None) -> None:
        """Take the present values of an `SRLConfig`, and those of `instead` where it has one."""
        self._config = config
        for group in GROUPS.values():
            vars(self).update(group.spread(getattr(config, group.name)))
        vars(self).update(instead or {})
        self.max_episode_tokens = vars(self).get("max_episode_tokens", config.max_episode_tokens) or LONGEST_EPISODE

    def loss_settings(self) -> LossSettings:
        """Return the resolved settings of the loss: the user's value, else the preset's, else the default."""
        return LossSettings.of(self)

    def replay_settings(self) -> ReplaySettings:
        """Return the memory's settings, without their prefix; `min_graded` is at most `group_size`."""
        prefix = ReplaySettings.prefix
        values = {name.removeprefix(prefix): getattr(self, name) for name in ReplaySettings.table()}
        found = ReplaySettings.model_construct(**values)
        return found.model_copy(update={"min_graded": min(found.min_graded, self.group_size)})

    def may_draw(self, kind: str) -> bool:
        """Return whether the memory is ever drawn from for "revisit" or "reuse"."""
        return bool(getattr(self, f"replay_{kind}_fraction"))

    def adapter_spec(self) -> AdapterSpec:
        """Return the form of the adapters; only with `lora_rank` above 0."""
        return AdapterSpec.of(self.lora_rank, self.lora_alpha, self.lora_targets)

    def sends_adapter(self) -> bool:
        """Return whether engines receive the adapters and not whole weights."""
        return bool(self.lora_rank) and self.lora_send == "adapter"

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the config."""
        return getattr(self._config, name)


def values_of(config: Any) -> dict[str, Any]:
    """Return flat name -> the value that the user gave to an `SRLConfig`."""
    flat, table = FlatSettings(config), {n: row for n, row in FLAT.items() if n not in NO_ATTRIBUTES}
    return {name: getattr(flat if row.of else config, name) for name, row in table.items()}
