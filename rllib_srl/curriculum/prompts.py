"""Draw fresh prompts on the driver, from a generator whose state is in the checkpoint.

    environments -> endless passes over the prompt ids of each -> mixture, stream or plan -> Prompt, Prompt, ...
    environments -> one pool of all their prompts -> shuffled epochs -> Prompt, Prompt, ...      order = "epochs"

Prompts are never drawn in a runner: an engine's seed call resets Python's global generator there, and
every run would play the same tasks.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from rllib_srl.common.environments import NAMED, SEED_PREFIX, EnvError, Environment
from rllib_srl.curriculum.quotas import quotas
from rllib_srl.curriculum.streams import Progress, Stages, Stream
from rllib_srl.types import Prompt

logger = logging.getLogger(__name__)
MAX_REFUSED = 100_000  # limit on consecutive prompt ids that a filter rejects
MAX_POOL = 1_000_000  # prompts of all environments together, for shuffled epochs
MAX_LISTED = 10_000  # prompts of one environment whose domains are looked up before they are drawn
NUM_NAMED = 3  # environments in a warning
ORDERS = ("mixture", "epochs")
SPLITS = ("train", "heldout")


class PromptSource:
    """An endless, seeded, restorable stream of training prompts, and a fixed list of held-out prompts.

    Invariant: the prompts drawn after `set_state(s)` are those drawn after `get_state()` returned s.
    """

    def __init__(
        self,
        creators: Mapping[str, Callable[[dict[str, Any]], Environment]],
        env_configs: Mapping[str, dict[str, Any]],
        mixture: Mapping[str, float],
        seed: int,
        stream: Stream | None = None,
        order: str = "mixture",
    ) -> None:
        """Construct one instance of each environment, for its prompt ids only.

        Args:
            creators: environment id -> creator.
            env_configs: environment id -> settings for the creator.
            mixture: environment id -> weight > 0; weights need not sum to 1.
            seed: the run's seed.
            stream: weights as a function of progress, for the same environment ids; replaces the mixture's weights.
            order: "mixture" draws an environment by weight and takes its next prompt; "epochs" plays the prompts of
                all environments once each, in a seeded order, before any is played again.

        Raises:
            ValueError: "epochs" with a stream, or with environments whose prompts are not a finite list.
        """
        self._stream = stream
        self._progress = Progress()
        self._carry: Mapping[int, float] = {}
        self._domains: dict[str, dict[str, None]] = {}  # domains of each environment, in the order of their first draw
        entries = stream.entries if stream else {}
        self._filters = {env_id: entry.predicate() for env_id, entry in entries.items()}
        self._envs = {env_id: creators[env_id](env_configs.get(env_id, {})) for env_id in mixture}
        self._ids = list(mixture)
        weights = np.array([mixture[env_id] for env_id in self._ids], float)
        self._probabilities: np.ndarray = weights / weights.sum()
        self._seed = seed
        self._left_out: Mapping[str, Collection[str]] = {}  # environment id -> prompt ids
        self._epochs: list[Prompt] | None = None
        self._epoch: tuple[int, ...] = (0, 0)  # number of the epoch, and position in it
        self._order: list[Prompt] = []  # prompts of the epoch; [] until its first one
        self._start()
        if order == "epochs":
            self._epochs = self._listed(MAX_POOL)
            if self._epochs is None:
                raise ValueError(
                    "prompt_order = 'epochs'; expected environments with a finite list of prompts, at most "
                    f"{MAX_POOL:,} in all, and no stream"
                )

    @property
    def environments(self) -> Mapping[str, Environment]:
        """Return environment id -> the instance that lists its prompts."""
        return self._envs

    def ids(self, env_id: str, split: str) -> Iterator[str]:
        """Yield the prompt ids of an environment's split that pass its filter; nothing is drawn."""
        return self._heldout_ids(env_id) if split == "heldout" else self._all_ids(env_id, 0)

    def leave_out(self, prompt_ids: Mapping[str, Collection[str]]) -> None:
        """Exclude these training prompts; call it before the first draw.

        Args:
            prompt_ids: environment id -> ids.
        """
        self._left_out = prompt_ids
        self._start()
        if self._epochs is not None:
            self._epochs = self._listed(MAX_POOL)

    def _lists_all(self) -> bool:
        """Return whether every environment lists its prompts, and all of them are drawn from start to end."""
        return self._stream is None and all(hasattr(env.unwrapped, "prompt_ids") for env in self._envs.values())

    def _listed(self, limit: int) -> list[Prompt] | None:
        """Return all training prompts in an order independent of the seed; None for a stream or above `limit`."""
        if not self._lists_all():
            return None
        ids: list[tuple[str, str]] = []
        for env_id in self._ids:
            ids += [(env_id, str(prompt_id)) for prompt_id in islice(self._all_ids(env_id, 0), limit + 1 - len(ids))]
            if len(ids) > limit:
                return None
        if not ids:
            raise ValueError(f"environments {self._ids} have no training prompts; expected at least one")
        if twice := len(ids) - len(set(ids)):
            logger.warning("%d of %d training prompts are listed twice; each is played once", twice, len(ids))
        return [self._prompt(*pair) for pair in sorted(set(ids))]

    def _shuffled(self, prompts: list[Prompt], epoch: int) -> list[Prompt]:
        generator = np.random.default_rng(np.random.SeedSequence([self._seed, sum(b"epochs"), epoch]))
        return [prompts[at] for at in generator.permutation(len(prompts))]

    def draw(self, num_prompts: int, shares: Mapping[str, float] | None = None) -> list[Prompt]:
        """Return the next prompts; an environment whose ids are exhausted starts its next pass.

        Args:
            num_prompts: number of prompts.
            shares: domain -> share, exact in the long run; None draws by the current weights.

        Raises:
            ValueError: shares with "epochs".
        """
        if self._epochs is not None and shares is not None:
            raise ValueError("a callback sets the shares of domains, but prompt_order = 'epochs'; expected 'mixture'")
        if self._epochs is not None:
            return [self._next_of_epoch(self._epochs) for _ in range(num_prompts)]
        if shares is None:
            envs = self._generator.choice(len(self._ids), size=num_prompts, p=self._weights())
            return [self._next(self._ids[index]) for index in envs]
        weights = dict(enumerate(self._by_env(shares)))
        numbers = quotas(num_prompts, weights, self._generator, self._carry)
        self._carry = numbers.carry
        return [self._next(self._ids[index]) for index, num in numbers.num.items() for _ in range(num)]

    def _next_of_epoch(self, prompts: list[Prompt]) -> Prompt:
        epoch, at = self._epoch
        self._order = self._order or self._shuffled(prompts, epoch)
        prompt = self._order[at]
        self._epoch = (epoch, at + 1)
        if at + 1 == len(prompts):
            self._epoch, self._order = (epoch + 1, 0), []
        return prompt

    def first(self, env_id: str) -> Prompt:
        """Return the next training prompt of one environment; it counts as drawn.

        Raises:
            ValueError: the environment has no training prompts.
        """
        return self._next(env_id)

    def advance(self, num_tokens: int) -> tuple[str, ...]:
        """Advance the progress by one iteration; return the domains whose stage of the stream ended with it."""
        before = self._progress
        self._progress = Progress(before.iterations + 1, before.tokens + num_tokens)
        if not isinstance(self._stream, Stages):
            return ()
        ended = range(self._stream.stage(before), self._stream.stage(self._progress))  # a short one may be skipped
        return tuple(domain for stage in ended for domain in self.domains_of(self._stream.env_id_of(stage)))

    @property
    def progress(self) -> Progress:
        """Return the progress of the run."""
        return self._progress

    def domains_of(self, env_id: str) -> tuple[str, ...]:
        """Return the domains of an environment; if it mixes several, those drawn so far, else its id."""
        return tuple(self._domains[env_id]) or (env_id,)

    def domain_weights(self) -> dict[str, float]:
        """Return domain -> current share of fresh prompts, for every domain, 0 included."""
        weights: dict[str, float] = {}
        for env_id, weight in zip(self._ids, self._weights().tolist(), strict=True):
            domains = self.domains_of(env_id)
            for domain in domains:
                weights[domain] = weights.get(domain, 0.0) + weight / len(domains)
        return weights

    def _weights(self) -> np.ndarray:
        if self._stream is None:
            return self._probabilities
        weights = self._stream.weights(self._progress)
        return np.array([weights[env_id] for env_id in self._ids])

    def _by_env(self, shares: Mapping[str, float]) -> list[float]:
        """Divide the share of each domain among its environments, in proportion to their weights."""
        totals = self.domain_weights()
        parts = [
            sum(
                shares.get(domain, 0.0) * weight / len(self.domains_of(env_id)) / totals[domain]
                for domain in self.domains_of(env_id)
                if totals[domain]
            )
            for env_id, weight in zip(self._ids, self._weights().tolist(), strict=True)
        ]
        if not sum(parts):
            raise ValueError(f"shares = {dict(shares)}; expected one of a domain with fresh prompts: {totals}")
        return parts

    def heldout(self, num_prompts: int) -> list[Prompt]:
        """Return the same held-out prompts at each call, the same number per environment, unless one has fewer."""
        share = -(-num_prompts // len(self._ids))
        prompts: list[Prompt] = []
        for env_id in self._ids:
            prompts += [self._made(env_id, prompt_id) for prompt_id in islice(self._heldout_ids(env_id), share)]
        return prompts[:num_prompts]

    def small_pools(self, num_prompts: int) -> list[str]:
        """Return one warning if there are fewer training prompts than a batch draws, [] if there are enough.

        With "epochs" all environments together are compared with the batch. Otherwise each one is compared with its
        average share of a batch, by its weight; in a stream of stages, with the whole batch of its stage. A stream
        whose weights change is not checked.

        Args:
            num_prompts: prompts per batch.
        """
        batch = f"num_prompts_per_batch = {num_prompts}"
        if self._epochs is not None:
            if (num := len(self._epochs)) >= num_prompts:
                return []
            whole = f"environment {self._ids[0]!r} has" if len(self._ids) == 1 else "all environments together have"
            often = f"an iteration plays each about {num_prompts / num:.1f} times"
            return [f"{whole} {num} training prompts, fewer than {batch}: {often}"]
        if self._stream is not None and not isinstance(self._stream, Stages):
            return []
        shares = self._probabilities if self._stream is None else np.ones(len(self._ids))
        small: dict[str, tuple[int, float]] = {}
        draws = np.round(num_prompts * shares, 6)  # without floating-point errors such as .7 x 10 = 7.000000000000001
        for env_id, drawn in zip(self._ids, draws.tolist(), strict=True):
            if hasattr(self._envs[env_id].unwrapped, "prompt_ids"):
                num = sum(1 for _ in islice(self._all_ids(env_id, 0), math.ceil(drawn)))
                small |= {env_id: (num, drawn)} if 0 < num < drawn else {}
        if not small:
            return []
        if len(self._ids) == 1:
            ((env_id, (num, drawn)),) = small.items()
            often = f"an iteration plays each about {drawn / num:.1f} times"
            return [f"environment {env_id!r} has {num} training prompts, fewer than {batch}: {often}"]
        first = islice(small.items(), NUM_NAMED)
        named = [f"{name!r} ({num} prompts, {drawn:.1f} draws)" for name, (num, drawn) in first]
        more = f" and {len(small) - NUM_NAMED} more" if len(small) > NUM_NAMED else ""
        each = "an iteration" if self._stream is None else "an iteration of its stage"
        have = "has" if len(small) == 1 else "have"
        return [
            f"{len(small)} of {len(self._ids)} environments {have} fewer training prompts than {each} draws, with "
            f"{batch}: {', '.join(named)}{more}"
        ]

    def known_domains(self) -> frozenset[str] | None:
        """Return the domains of all training prompts; None if they are not all known before they are drawn.

        The state does not change, and no domain counts as drawn.
        """
        domains: set[str] = set()
        for env_id, env in self._envs.items():
            if named_domain(env_id) or not hasattr(env.unwrapped, "domain_of"):
                domains.add(self._domain(env_id, ""))
                continue
            ids = list(islice(self._all_ids(env_id, 0), MAX_LISTED + 1)) if hasattr(env.unwrapped, "prompt_ids") else []
            if not 0 < len(ids) <= MAX_LISTED:
                return None
            domains.update(self._domain(env_id, str(prompt_id)) for prompt_id in ids)
        return frozenset(domains)

    def num_listed(self, most: int) -> int | None:
        """Return the number of distinct training prompts; None if there are more, or no finite list of them.

        The state does not change, and no domain counts as drawn.
        """
        if not self._lists_all():
            return None
        ids: set[tuple[str, str]] = set()
        for env_id in self._ids:
            for prompt_id in islice(self._all_ids(env_id, 0), MAX_LISTED):
                ids.add((env_id, str(prompt_id)))
                if len(ids) > most:
                    return None
        return len(ids)

    def probes(self, domain: str, num_prompts: int, num_evaluated: int) -> list[Prompt]:
        """Return the same held-out prompts of a domain at each call, disjoint from `heldout(num_evaluated)`.

        The state does not change: no generator is used.

        Raises:
            ValueError: the domain has fewer than `num_prompts`.
        """
        skipped = -(-num_evaluated // len(self._ids))
        prompts: list[Prompt] = []
        for env_id in self._ids:
            if domain in self.domains_of(env_id):
                ids = islice(self._heldout_ids(env_id), skipped, skipped + MAX_REFUSED)
                mine = (prompt for prompt in (self._made(env_id, i) for i in ids) if prompt.domain == domain)
                prompts += islice(mine, num_prompts - len(prompts))
        if len(prompts) < num_prompts:
            raise ValueError(
                f"domain {domain!r} has {len(prompts)} held-out prompts besides the {skipped} of evaluation; "
                f"expected at least {num_prompts}"
            )
        return prompts

    def get_state(self) -> dict[str, Any]:
        """Return the state, for a checkpoint."""
        return {
            "generator": self._generator.bit_generator.state,
            "passes": dict(self._passes),
            "drawn": dict(self._drawn),
            "seed": self._seed,
            "progress": list(self._progress),
            "domains": {env_id: list(domains) for env_id, domains in self._domains.items()},
            "carry": dict(self._carry),
            "epoch": list(self._epoch),
        }

    @property
    def env_ids(self) -> list[str]:
        """Return the environment ids that prompts come from."""
        return list(self._ids)

    def check_envs(self, theirs: Iterable[str]) -> None:
        """Check that a state with the environment ids `theirs` can be restored.

        Raises:
            ValueError: the state has other environments.
        """
        if sorted(theirs) != sorted(self._ids):
            raise ValueError(f"the checkpoint's environments are {sorted(theirs)}; expected {sorted(self._ids)}")

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state of `get_state`.

        Raises:
            ValueError: the state has other environments, or has drawn more prompts of one than there are.
        """
        self.check_envs(state["drawn"])
        self._seed = state["seed"]
        self._start()
        self._generator.bit_generator.state = state["generator"]
        self._progress = Progress(*state["progress"])
        self._domains = {env_id: dict.fromkeys(domains) for env_id, domains in state["domains"].items()}
        self._carry = dict(state["carry"])
        self._epoch = tuple(state["epoch"])
        if self._epochs is not None and self._epoch[1] >= len(self._epochs):
            raise _too_few(self._ids, len(self._epochs), self._epoch[1])
        for env_id, drawn in state["drawn"].items():
            self._passes[env_id] = state["passes"][env_id]
            self._open(env_id)
            if (num := sum(1 for _ in islice(self._streams[env_id], drawn))) < drawn:
                raise _too_few([env_id], num, drawn)
            self._drawn[env_id] = drawn

    def _start(self) -> None:
        self._generator = np.random.default_rng(np.random.SeedSequence([self._seed, 1]))
        self._passes = dict.fromkeys(self._ids, 0)
        self._drawn = dict.fromkeys(self._ids, 0)
        self._streams: dict[str, Iterator[str]] = {}
        self._progress, self._carry = Progress(), {}
        self._epoch, self._order = (0, 0), []
        # An environment with several domains (`domain_of`) does not list them in advance.
        self._domains = {
            env_id: dict.fromkeys([] if hasattr(env.unwrapped, "domain_of") else [self._domain(env_id, "")])
            for env_id, env in self._envs.items()
        }
        for env_id in self._ids:
            self._open(env_id)

    def _open(self, env_id: str) -> None:
        self._streams[env_id] = self._all_ids(env_id, self._passes[env_id])

    def _all_ids(self, env_id: str, number: int) -> Iterator[str]:
        """Return the ids of one pass over an environment; each pass has its own order."""
        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        left_out = self._left_out.get(env_id, ())
        ids = prompts_of(self._envs[env_id], "train", seed)
        return self._kept(env_id, (i for i in ids if str(i) not in left_out) if left_out else ids)

    def _heldout_ids(self, env_id: str) -> Iterator[str]:
        return self._kept(env_id, prompts_of(self._envs[env_id], "heldout", self._seed))

    def _kept(self, env_id: str, ids: Iterable[str]) -> Iterator[str]:
        """Yield the ids that pass the environment's filter."""
        is_kept = self._filters.get(env_id)
        num_refused = 0
        for prompt_id in ids:
            if is_kept is None or is_kept(str(prompt_id)):
                num_refused = 0
                yield prompt_id
            elif (num_refused := num_refused + 1) == MAX_REFUSED:
                raise ValueError(
                    f"the filter of environment {env_id!r} rejected {MAX_REFUSED} prompts in a row; expected a filter "
                    "that accepts some"
                )

    def _next(self, env_id: str) -> Prompt:
        for prompt_id in self._streams[env_id]:
            self._drawn[env_id] += 1
            return self._prompt(env_id, prompt_id)
        if self._drawn[env_id] == 0:
            raise ValueError(
                f"environment {env_id!r} has no training prompts; expected some from prompt_ids('train', seed)"
            )
        self._passes[env_id] += 1
        self._drawn[env_id] = 0
        self._open(env_id)
        return self._next(env_id)

    def _prompt(self, env_id: str, prompt_id: str) -> Prompt:
        prompt = self._made(env_id, prompt_id)
        self._domains[env_id].setdefault(prompt.domain)
        return prompt

    def _made(self, env_id: str, prompt_id: str) -> Prompt:
        return Prompt(env_id, str(prompt_id), self._domain(env_id, prompt_id))

    def _domain(self, env_id: str, prompt_id: str) -> str:
        env = self._envs[env_id].unwrapped
        if named := named_domain(env_id):
            return named
        # An environment with several kinds of task defines `domain_of`.
        return str(env.domain_of(prompt_id) if hasattr(env, "domain_of") else getattr(env, "domain", env_id))


def prompts_of(env: Environment, split: str, seed: int) -> Iterator[str]:
    """Yield the prompt ids of a split: the environment's own (each once), or an endless sequence of seeds.

    Even seeds train and odd seeds are held out, so the splits are disjoint.

    Args:
        env: an environment
        split: "train" or "heldout"
        seed: seed of the order

    Raises:
        EnvError: `split` is unknown.
    """
    if split not in SPLITS:
        raise EnvError(f"split = {split!r}; expected one of {', '.join(SPLITS)}")
    plain = env.unwrapped
    if hasattr(plain, "prompt_ids"):
        yield from plain.prompt_ids(split, seed)
        return
    generator = random.Random(f"{split}:{seed}")
    while True:
        yield f"{SEED_PREFIX}{2 * generator.getrandbits(30) + SPLITS.index(split)}"


def _too_few(env_ids: list[str], num: int, drawn: int) -> ValueError:
    have = f"environment {env_ids[0]!r} has" if len(env_ids) == 1 else f"environments {env_ids} together have"
    return ValueError(
        f"{have} {num} training prompts, but the checkpoint has drawn {drawn} of a longer list; expected the data with "
        "which the run began, or a new run"
    )


def named_domain(env_id: str) -> str:
    """Return the domain in an environment id, "" if the id has none and the environment defines the domain."""
    return env_id.partition(NAMED)[2]
