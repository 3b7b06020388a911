"""The rule `signal`: visit again, at growing intervals, what gave no signal, and take the rest in turn.

    priority_i = w_i / cost_i * elapsed_i * S_i * L_i * exp(noise * Gumbel)
    S_i = (kappa pi_d + 1) / (kappa + 1 + c_i)              chance that the next group has signal
    L_i = 1 / (1 + max(0, u_i - 2 U) / U)                   chance that training on it leads anywhere

    elapsed  iterations since the last visit; never visited: now + 1, at least one pass (items / slots)
    c        silent groups in a row, at most 8           u    groups with signal of an item never solved, see `varies`
    pi_d     (M + 1) / (T + 2): share of the domain's groups with signal        U    mean u at the first solution
    kappa    how alike the items of a domain are         w, cost   given by the user; running mean of generated tokens
    Estimates: kappa = (1 - ICC) / ICC within [.3, 10] and phi = 1 - ICC, the ICC being the correlation of successive
    pass rates of the domain's items.

A slot goes to a domain first, by n_d^(1 - phi) * wait_d * pi_d * L_d / cost_d, and then to the item of the highest
priority in it. The wait counts slots, and is reset after every slot inside a batch. With phi = 0 each item counts and
domains do not: a slot goes to the item of the highest priority of all.

S is Laplace's rule of succession: with kappa = 0 an item whose groups are silent waits 1, 2, 3, ... passes, and one
pass after any group with signal. Where S, L, w and cost are equal, the priority is the elapsed time: oldest first.

With the posterior baseline a silent group trains if it is a surprise. S is then the expected squared advantage,
see `expected_square`, and pi_d is its mean over the domain's candidates. A group of one episode is always silent,
so there it is used with any baseline. The domain's mean m_d = (R + 1) / (T + 2), of the faded rewards R of T groups,
follows the rule of succession as well: with the plain mean, a domain whose first answers are all wrong, or all right,
has S = 0 and never comes back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rllib_srl.replay.history import MAX_SILENT
from rllib_srl.replay.selection.candidates import Candidates, SelectionSettings
from rllib_srl.replay.selection.context import Context, SignalSettings

KAPPA_BOUNDS = (0.3, 10.0)  # of an estimate
LEAST_PRIOR = 1.0  # episodes that the domain's mean counts as with a baseline that does not read it (w0 = 0)


def chance_of_signal(
    live_N: np.ndarray, num_silent_N: np.ndarray, kappa_N: np.ndarray | float
) -> np.ndarray:
    """Return S = (kappa pi + 1) / (kappa + 1 + c).

    Args:
        live_N: pi, share of the domain's groups with signal, in [0, 1].
        num_silent_N: c, silent groups in a row; counted up to 8.
        kappa_N: at least 0.
    """
    chance_N: np.ndarray = (kappa_N * live_N + 1) / (kappa_N + 1 + np.minimum(num_silent_N, MAX_SILENT))
    return chance_N


def chance_of_progress(num_unsolved_N: np.ndarray, solved_after_N: np.ndarray | float) -> np.ndarray:
    """Return L = 1 / (1 + max(0, u - 2 U) / U): 1 up to twice the mean U, then U / (u - U).

    Args:
        num_unsolved_N: u, at least 0.
        solved_after_N: U, above 0.
    """
    progress_N: np.ndarray = 1 / (1 + np.maximum(0, num_unsolved_N - 2 * solved_after_N) / solved_after_N)
    return progress_N


def expected_square(mean_N: np.ndarray, weight_N: np.ndarray, group_size: int) -> np.ndarray:
    """Return 4 E[(r_j - b_j)^2] of an episode of the next group, in [0, 1]: the expected squared advantage.

    The prompt's pass rate is p ~ Beta(a, b) with a + b = N0 = w0 + n_i and mean m = a / N0 = (w0 m_d + s_i) / N0.
    Given p, rewards are independent and 1 with probability p. The baseline b_j = (a + K) / (N0 + n - 1), K the sum of
    the n - 1 other rewards, is the mean of p given the others; so r_j is 1 with probability b_j, and

        E[(r_j - b_j)^2] = E[b_j (1 - b_j)] = E[alpha beta] / (N0 + n - 1)^2

    where Beta(alpha, beta) is the posterior of p after the others. As E[p (1 - p)] is the same before and after data,
    E[alpha beta] / ((N0 + n - 1)(N0 + n)) = a b / (N0 (N0 + 1)). Therefore

        E[(r_j - b_j)^2] = m (1 - m) * N0 / (N0 + 1) * (N0 + n) / (N0 + n - 1)

    For n = 1 it is m (1 - m), which includes the surprise of a silent group. The factor 4 makes its largest value 1.

    Args:
        mean_N: m, in [0, 1].
        weight_N: N0, above 0.
        group_size: n, at least 1.
    """
    square_N: np.ndarray = 4 * mean_N * (1 - mean_N)
    square_N *= weight_N / (weight_N + 1)
    square_N *= 1 + 1 / (weight_N + group_size - 1)
    return square_N


def kappas(kappa: float | None, icc_D: np.ndarray) -> np.ndarray:
    """Return kappa of each domain; None is estimated: (1 - ICC) / ICC within [.3, 10], 1 where the ICC is nan."""
    if kappa is not None:
        return np.full(len(icc_D), float(kappa))
    clipped_D = np.clip(np.where(np.isnan(icc_D), 0.5, icc_D), 1e-9, 1.0)
    kappa_D: np.ndarray = np.clip((1 - clipped_D) / clipped_D, *KAPPA_BOUNDS)
    return kappa_D


def phis(phi: float | None, icc_D: np.ndarray) -> np.ndarray:
    """Return phi of each domain; None is estimated: 1 - ICC within [0, 1], .5 where the ICC is nan."""
    if phi is not None:
        return np.full(len(icc_D), float(phi))
    return 1 - np.clip(np.where(np.isnan(icc_D), 0.5, icc_D), 0.0, 1.0)


class Factors(NamedTuple):
    """The factors of a candidate's priority, one entry each."""

    weight: np.ndarray  # w
    cost: np.ndarray
    elapsed: np.ndarray
    chance: np.ndarray  # S
    progress: np.ndarray  # L
    priority: np.ndarray  # without noise


def factors(candidates: Candidates, pass_length: float, settings: SignalSettings) -> Factors:
    """Return the factors of each candidate's priority.

    Args:
        candidates: with their context.
        pass_length: iterations in which every item could be played once: items / slots.
        settings: of the rule.
    """
    context = candidates.context.of_domains(int(candidates.domain.max(initial=-1)) + 1)
    domain_N = candidates.domain
    progress_N = chance_of_progress(candidates.num_unsolved, context.solved_after_D[domain_N])
    if context.group_size:
        prior_weight = context.prior_weight or LEAST_PRIOR
        weight_N = prior_weight + candidates.history_count
        mean_N = (prior_weight * context.expected_D[domain_N] + candidates.history_sum) / weight_N
        chance_N = expected_square(np.clip(mean_N, 0, 1, out=mean_N), weight_N, context.group_size)
    else:
        kappa_N = kappas(settings.kappa, context.icc_D)[domain_N]
        chance_N = chance_of_signal(context.live_D[domain_N], candidates.num_silent, kappa_N)
    first_N = np.maximum(candidates.elapsed, pass_length)
    elapsed_N = np.where(candidates.visits == 0, first_N, candidates.elapsed)
    priority_N = candidates.weight / candidates.cost * elapsed_N * chance_N * progress_N
    return Factors(candidates.weight, candidates.cost, elapsed_N, chance_N, progress_N, priority_N)


class DomainSlots(NamedTuple):
    """The domain of each slot of a draw, and how they were chosen; arrays with D are indexed by domain."""

    slots: np.ndarray
    base_D: np.ndarray  # see `domain_base`
    wait_D: np.ndarray  # slots since the last one, at the start of the draw
    have_D: np.ndarray  # number of candidates

    def facts_of(self, domain: int) -> dict[str, float]:
        """Return base, wait, rank and slots of a domain; the rank is by base * wait among domains with candidates."""
        value_D = self.base_D * self.wait_D
        return {
            "base": float(self.base_D[domain]),
            "wait": int(self.wait_D[domain]),
            "rank": 1 + int(np.count_nonzero(value_D > value_D[domain])),  # without candidates the base is 0
            "num_domains": int(np.count_nonzero(self.have_D)),
            "num_slots": int(np.count_nonzero(self.slots == domain)),
            "num_drawn": len(self.slots),
        }


class Drawn(NamedTuple):
    """The candidates of a draw in the order of its slots, the factors of each, and the choice of their domains."""

    indices: np.ndarray
    factors: Factors
    domains: DomainSlots | None  # None: no domain was chosen first


def signal(candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings) -> np.ndarray:
    """Return the candidates of `num` slots, in the order of the slots."""
    return drawn_by_signal(candidates, num, generator, settings).indices


def drawn_by_signal(
    candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings
) -> Drawn:
    """Draw as `signal` does; return the reasons as well, which the draw has computed anyway."""
    num, own = min(num, len(candidates)), settings.signal
    if num < 1:
        return Drawn(np.empty(0, np.int64), Factors(*[np.empty(0)] * len(Factors._fields)), None)
    found = factors(candidates, len(candidates) / num, own)
    priority_N = found.priority
    if own.noise:
        # Gumbel = -log(exponential). Single precision takes a quarter of the time, and ties are rare enough.
        lot_N = np.maximum(generator.standard_exponential(len(candidates), np.float32), np.float32(1e-30))
        priority_N = priority_N * np.exp(np.float32(-own.noise) * np.log(lot_N))
    domains = slots_by_domain(candidates, found.chance, num, generator, own)
    if domains is None:
        drawn_S = highest(priority_N, num, generator, candidates.visits)
    else:
        drawn_S = np.empty(num, np.int64)
        have_D = domains.have_D
        grouped = np.argsort(candidates.domain.astype(np.uint16 if len(have_D) < 1 << 16 else np.int64), kind="stable")
        ends_D = np.cumsum(have_D)
        for domain in np.unique(domains.slots).tolist():
            inside = grouped[ends_D[domain] - have_D[domain] : ends_D[domain]]
            at_S = np.flatnonzero(domains.slots == domain)
            drawn_S[at_S] = inside[highest(priority_N[inside], len(at_S), generator, candidates.visits[inside])]
    return Drawn(drawn_S, Factors(*(column_N[drawn_S] for column_N in found)), domains)


class Recorded:
    """The rule `signal` for one call of `rules.select`, which may apply it to parts of the candidates.

    Invariant: after the call, `factors` and `domains` have the reasons of each draw of the rule.
    """

    def __init__(self) -> None:
        """Record nothing yet."""
        self.factors: dict[int, dict[str, float]] = {}  # `seq` of a drawn candidate -> its factors
        self.domains: dict[int, dict[str, float]] = {}  # drawn domain -> `DomainSlots.facts_of`; {}: none chosen first

    def __call__(
        self, candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings
    ) -> np.ndarray:
        """Draw as `signal` does, and record the reasons."""
        drawn = drawn_by_signal(candidates, num, generator, settings)
        rows = zip(*(column_S.tolist() for column_S in drawn.factors), strict=True)
        names = Factors._fields
        for seq, row in zip(candidates.seq[drawn.indices].tolist(), rows, strict=True):
            self.factors[seq] = dict(zip(names, map(float, row), strict=True))
        if drawn.domains is not None:
            for domain in set(drawn.domains.slots.tolist()):
                self.domains[domain] = drawn.domains.facts_of(domain)
        return drawn.indices


def slots_by_domain(
    candidates: Candidates, chance_N: np.ndarray, num: int, generator: np.random.Generator, settings: SignalSettings
) -> DomainSlots | None:
    """Return the domain of each of `num` slots; None with phi = 0 or one domain, where no domain is chosen first.

    Args:
        candidates: with their context.
        chance_N: S of each.
        num: at most the number of candidates.
        generator: breaks ties.
        settings: of the rule.
    """
    have_D = np.bincount(candidates.domain)
    context = candidates.context.of_domains(len(have_D))
    phi_D = phis(settings.phi, context.icc_D)
    if not phi_D[have_D > 0].any() or np.count_nonzero(have_D) == 1:
        return None
    base_D = domain_base(candidates, context, chance_N, phi_D, have_D)
    return DomainSlots(domain_slots(base_D, context.wait_D, have_D, num, generator), base_D, context.wait_D, have_D)


def domain_base(
    candidates: Candidates, context: Context, chance_N: np.ndarray, phi_D: np.ndarray, have_D: np.ndarray
) -> np.ndarray:
    """Return n_d^(1 - phi) * pi_d * L_d * w_d / cost_d; w_d and cost_d are means over the domain's candidates."""
    weight_D, cost_D = (np.bincount(candidates.domain, column) for column in (candidates.weight, candidates.cost))
    live_D = np.bincount(candidates.domain, chance_N) / np.maximum(have_D, 1) if context.group_size else context.live_D
    progress_D = chance_of_progress(context.unsolved_D, context.solved_after_D)
    base_D: np.ndarray = have_D ** (1 - phi_D) * live_D * progress_D * weight_D / np.where(have_D, cost_D, 1.0)
    return base_D


def domain_slots(
    base_D: np.ndarray, wait_D: np.ndarray, have_D: np.ndarray, num: int, generator: np.random.Generator
) -> np.ndarray:
    """Return the domain of each of `num` slots: the largest base * wait each time, ties at random.

    The wait of every domain grows by 1 a slot; that of the domain that got the slot starts again at 1.

    Args:
        base_D: at least 0.
        wait_D: slots since the last one, at least 1.
        have_D: number of candidates; a domain gets no more slots than it has.
        num: at most the sum of `have_D`.
    """
    wait_D, have_D = wait_D.astype(np.float64), have_D.copy()
    slots = np.empty(num, np.int64)
    for slot in range(num):
        value_D = np.where(have_D > 0, base_D * wait_D, -1.0)
        ties = np.flatnonzero(value_D == value_D.max())
        slots[slot] = ties[0] if len(ties) == 1 else generator.choice(ties)
        have_D[slots[slot]] -= 1
        wait_D += 1
        wait_D[slots[slot]] = 1
    return slots


def highest(value_N: np.ndarray, num: int, generator: np.random.Generator, visits_N: np.ndarray) -> np.ndarray:
    """Return the indices of the `num` highest values, highest first; only these few are sorted.

    Ties go to the fewest visits, so that each item is played once before any is played twice, and then by chance.
    """
    if num < 1:
        return np.empty(0, np.int64)
    is_one = num == 1
    least = value_N.max() if is_one else np.partition(value_N, len(value_N) - num)[len(value_N) - num]
    tied = np.flatnonzero(value_N == least)
    if is_one and len(tied) == 1:
        return tied
    above = np.flatnonzero(value_N > least)
    above = above[np.lexsort((generator.random(len(above)), visits_N[above], -value_N[above]))]
    key_T, num = visits_N[tied] + generator.random(len(tied)), num - len(above)
    first_T = np.argpartition(key_T, num - 1)[:num]
    return np.concatenate([above, tied[first_T[np.argsort(key_T[first_T])]]])
