"""A finite pool of fixed prompts from any environments and files, with a stated share of wrong reference answers.

    FixedPool({
        "environments": {"largest": "compare", "sums": {"env": "chain_sum", "env_config": {"num_shots": 0}}},
        "rows": "questions.jsonl",        # every training question of the file, as a kind of its own
        "num_prompts_per_kind": 5,        # of each environment; or num_prompts: of all kinds together
        "wrong_answers": 0.1,             # share of the pool graded against a wrong reference answer
    })

    "largest: 17, 93, 40"     a prompt of the pool, or an unseen one of the same kind
    "largest! 17, 93, 40"     the same prompt graded against a wrong answer: "17" earns 1, "93" and all else 0

Training prompts are the prompts of the pool, endless passes of them in orders of their own. Held-out prompts are those
of the same kinds, the kinds in turn; they always have right answers. `wrong_ids` lists the prompts with a
wrong answer.

Which prompts are in the pool and which are wrong depends on `seed` and the settings only, not on the process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from rllib_srl.envs import text
from rllib_srl.envs.question import read_settings
from rllib_srl.envs.wrappers.around import inner_world
from rllib_srl.envs.wrappers.pool_listing import KIND, RIGHT, WRONG, FixedPoolSettings, listed, stated


class FixedPool(gymnasium.Env[str, str]):
    """A `gymnasium.Env` with a fixed set of training prompts of several kinds.

    Invariant: a prompt id names kind, inner prompt and grading; equal settings give the same pool in every process.
    """

    metadata: dict[str, Any] = {"render_modes": []}
    domain = "pool"  # of no prompt: `domain_of` returns its kind

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        self.observation_space = text.TextSpace()
        self.action_space = text.TextSpace()
        self.settings: FixedPoolSettings = read_settings(FixedPoolSettings, env_config, type(self).__name__)
        self._listing = listed(self.settings)
        self.stop_strings = self._listing.stop_strings
        self._worlds: dict[str, Any] = {}  # made when first played: a runner has many instances of this class
        self._world: Any = None
        self._wrong_turn: str | None = None

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts in the pool."""
        return len(self._listing.ids)

    @property
    def num_repeated(self) -> int:
        """Return the number of prompts left out because an earlier one is the same."""
        return self._listing.num_repeated

    @property
    def num_unsatisfied(self) -> int:
        """Return the number of prompts left out because their own reference answer is not right by their grader."""
        return self._listing.num_unsatisfied

    @property
    def wrong_ids(self) -> tuple[str, ...]:
        """Return the ids of the training prompts that are graded against a wrong answer, sorted."""
        return tuple(sorted(self._listing.wrong))

    @property
    def system_prompt(self) -> str:
        """Return the system prompt of the episode under way."""
        return getattr(self._world, "system_prompt", "")

    @property
    def tool_schemas(self) -> Sequence[dict[str, Any]]:
        """Return the schemas of the tools of the episode under way."""
        schemas: Sequence[dict[str, Any]] = getattr(self._world, "tool_schemas", ())
        return schemas

    @property
    def pass_reward(self) -> float | None:
        """Return the lowest reward that counts as a pass in the episode under way; None for the default."""
        return None if self._wrong_turn is not None else getattr(self._world, "pass_reward", None)

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield the prompt ids of `split`, each prompt once.

        Args:
            split: "train" is the pool; "heldout" is unseen prompts of the same kinds, the kinds in turn
            seed: of the order
        """
        text.check_split(split)
        if split == "train":
            for number in text.shuffled(len(self._listing.ids), f"pool:{seed}"):
                yield self._listing.ids[number]
            return
        left = {kind: self._made(kind).prompt_ids("heldout", seed) for kind in self.settings.made_of}
        yield from (f"{kind}{RIGHT}{inner}" for kind, inner in _in_turn(left))

    def domain_of(self, prompt_id: str) -> str:
        """Return the kind of a prompt."""
        return self._read(prompt_id)[0]

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return turns that earn reward 1; for a prompt with a wrong reference answer, those that state it."""
        kind, inner, wrong = self._read(prompt_id)
        gold: list[str] = self._made(kind).gold_turns(inner)
        return gold if wrong is None else [*gold[:-1], wrong]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode and return its prompt; the info has `is_wrong`: whether its reference answer is wrong.

        Args:
            seed: of the generator that draws a prompt of the pool if no prompt id is given
            options: "prompt_id", and with it "history": turns of the policy to be replayed

        Raises:
            ValueError: for an unknown option or prompt id, or a history that ends the episode.
        """
        super().reset(seed=seed)
        prompt_id, history = text.reset_options(options)
        if prompt_id is None:
            prompt_id = self._listing.ids[int(self.np_random.integers(len(self._listing.ids)))]
        self._world = None
        kind, inner, self._wrong_turn = self._read(prompt_id)
        world = self._made(kind)
        if self._wrong_turn is None:  # the inner environment may replay a history in its own way
            observation, info = world.reset(options={"prompt_id": inner, "history": history})
            self._world = world
        else:
            observation, info = world.reset(options={"prompt_id": inner})
            self._world = world
            observation += text.replayed(self.step, history, prompt_id)
        return observation, {**info, "prompt_id": prompt_id, "is_wrong": self._wrong_turn is not None}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one turn; with a wrong reference answer, only the turn that states it is rewarded."""
        if self._world is None:
            raise ResetNeeded("step was called on an episode that has ended or not begun; call reset first")
        if not isinstance(action, str):
            raise TypeError(f"a turn is a {type(action).__name__}; expected text (str)")
        observation, reward, terminated, truncated, info = self._world.step(action)
        if self._wrong_turn is not None:
            reward = 0.0
            if stated(self._world, action) == stated(self._world, self._wrong_turn):
                observation, reward, terminated, truncated, info = "", 1.0, True, False, {}
        if terminated or truncated:
            self._world = None
        return observation, float(reward), terminated, truncated, info

    def close(self) -> None:
        """Close the environments of the kinds."""
        for world in self._worlds.values():
            world.close()

    def _made(self, kind: str) -> Any:
        if kind not in self._worlds:
            self._worlds[kind] = inner_world(*self.settings.made_of[kind])
        return self._worlds[kind]

    def _read(self, prompt_id: str) -> tuple[str, str, str | None]:
        """Return kind, inner prompt id, and the turn that states the wrong answer; None for the right one."""
        kind, mark, inner = _parts(prompt_id)
        known = kind in self.settings.made_of and (mark == RIGHT or prompt_id in self._listing.wrong)
        if not known:
            kinds = ", ".join(self.settings.made_of)
            raise ValueError(f"prompt_id = {str(prompt_id)[:80]!r}; expected 'kind: prompt id' of the kinds {kinds}")
        return kind, inner, self._listing.wrong.get(prompt_id)


def _parts(prompt_id: Any) -> tuple[str, str, str]:
    found = re.match(rf"({KIND.pattern})({RIGHT}|{WRONG})", prompt_id) if isinstance(prompt_id, str) else None
    return ("", "", "") if found is None else (found[1], found[2], prompt_id[found.end() :])


def _in_turn(left: Mapping[str, Iterator[str]]) -> Iterator[tuple[str, str]]:
    """Yield one of each iterator in turn, with its name, until all are exhausted."""
    going = dict(left)
    while going:
        for name in list(going):
            item = next(going[name], None)
            if item is None:
                del going[name]
            else:
                yield name, item
