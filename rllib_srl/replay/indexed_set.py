"""A set of row numbers that finds its k-th member, and the smallest number outside it, in O(log n).

    words_W   64 numbers a word, one bit each: 1 = member
    tree_W    Fenwick tree of the members per word: how many lie below word w, without counting

What is drawn depends on the members and the generator alone, never on the order in which they came and went:
a set rebuilt from the rows of a journal draws what the set that was never stopped would have drawn. (The usual
list with swap-and-pop draws by its history.) A member costs between one bit and a few; one word costs 12 bytes.

Source: Fenwick 1994, "A new data structure for cumulative frequency tables", Software: Practice and Experience 24(3).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WORD = 64
_HALVES = (32, 16, 8, 4, 2, 1)
_MANY = 32  # numbers, from which looking them all up at once is faster


class IndexedSet:
    """Distinct integers >= 0, at best dense from 0 upwards.

    Invariant: `tree_W` counts the ones of `words_W`; the number of words is a power of two.
    """

    def __init__(self, members: np.ndarray | None = None) -> None:
        """Start with some members, or none."""
        self._words_W = np.zeros(1, np.uint64)
        self._tree_W = np.zeros(2, np.int32)
        if members is not None and len(members):
            self._grow(int(members.max()))
            bits_N = np.uint64(1) << (members % _WORD).astype(np.uint64)
            np.bitwise_or.at(self._words_W, members // _WORD, bits_N)
            self._count()

    def __len__(self) -> int:
        """Return the number of members."""
        return self._tree_W.item(-1)

    def __contains__(self, member: int) -> bool:
        """Say whether `member` is in the set."""
        word = member // _WORD
        return 0 <= word < len(self._words_W) and bool(self._words_W.item(word) >> member % _WORD & 1)

    def has_all(self, numbers: Sequence[int]) -> bool:
        """Say whether all of some numbers are in the set."""
        if len(numbers) < _MANY:
            return all(number in self for number in numbers)
        numbers_N = np.array(numbers, np.int64)
        if numbers_N.min() < 0 or numbers_N.max() >= _WORD * len(self._words_W):
            return False
        bit_N = (numbers_N % _WORD).astype(np.uint64)
        return bool((self._words_W[numbers_N // _WORD] >> bit_N & np.uint64(1)).all())

    @property
    def nbytes(self) -> int:
        """Return the bytes the set takes."""
        return self._words_W.nbytes + self._tree_W.nbytes

    def add(self, member: int) -> None:
        """Add a number that is not in the set.

        Raises:
            ValueError: it is in the set already, or below 0.
        """
        if member < 0 or member in self:
            raise ValueError(f"member = {member}; expected a number >= 0 that is not in the set")
        if member >= _WORD * len(self._words_W):
            self._grow(member)
        self._flip(member, 1)

    def remove(self, member: int) -> None:
        """Remove a member.

        Raises:
            ValueError: it is not in the set.
        """
        if member not in self:
            raise ValueError(f"member = {member}; expected a member of the set")
        self._flip(member, -1)

    def members(self) -> np.ndarray:
        """Return all members, ascending, int64. Costs O(n)."""
        return np.flatnonzero(np.unpackbits(self._words_W.view(np.uint8), bitorder="little"))

    def first_absent(self) -> int:
        """Return the smallest number >= 0 that is not a member."""
        tree_W, word, step = self._tree_W, 0, len(self._words_W)
        if tree_W.item(-1) == _WORD * step:
            return _WORD * step
        while step := step // 2:
            if tree_W.item(word + step) == _WORD * step:
                word += step
        ones = self._words_W.item(word)
        return _WORD * word + (~ones & (ones + 1)).bit_length() - 1

    def select(self, ranks_N: np.ndarray) -> np.ndarray:
        """Return the members at some ranks; rank 0 is the smallest.

        Args:
            ranks_N: each in [0, len(self)).

        Raises:
            ValueError: a rank outside that range.
        """
        if len(ranks_N) and not (ranks_N.min() >= 0 and ranks_N.max() < len(self)):
            raise ValueError(f"ranks = {ranks_N}; expected numbers in [0, {len(self)})")
        left_N = ranks_N.astype(np.int64)
        word_N = np.zeros(len(left_N), np.int64)
        step = len(self._words_W)
        while step := step // 2:
            below_N = self._tree_W[word_N + step]
            is_right_N = below_N <= left_N
            left_N -= below_N * is_right_N
            word_N += step * is_right_N
        return _WORD * word_N + _select_bits(self._words_W[word_N], left_N)

    def sample(self, num: int, generator: np.random.Generator) -> np.ndarray:
        """Draw distinct members, each with the same probability, in random order; all of them if they are fewer."""
        if not len(self):
            return np.empty(0, np.int64)
        return self.select(generator.choice(len(self), min(num, len(self)), replace=False))

    def check_valid(self) -> None:
        """Check the invariant.

        Raises:
            ValueError: the counts and the members differ.
        """
        counts_W = self._tree_W.copy()
        self._count()
        if not np.array_equal(counts_W, self._tree_W):
            raise ValueError(f"the set counts its members as {counts_W[1:]}; expected {self._tree_W[1:]}")

    def _flip(self, member: int, change: int) -> None:
        word, tree_W, size = member // _WORD, self._tree_W, len(self._words_W)
        self._words_W[word] = self._words_W.item(word) ^ 1 << member % _WORD
        node = word + 1
        while node <= size:
            tree_W[node] += change
            node += node & -node

    def _grow(self, member: int) -> None:
        size = len(self._words_W)
        while _WORD * size <= member:
            size *= 2
        words_W = np.zeros(size, np.uint64)
        words_W[: len(self._words_W)] = self._words_W
        self._words_W = words_W
        self._count()

    def _count(self) -> None:
        """Build the tree: node w + 1 first counts word w, then each node adds to its parent."""
        size = len(self._words_W)
        self._tree_W = np.zeros(size + 1, np.int32)
        self._tree_W[1:] = np.bitwise_count(self._words_W)
        step = 1
        while step < size:
            self._tree_W[2 * step :: 2 * step] += self._tree_W[step : size - step + 1 : 2 * step]
            step *= 2


def _select_bits(word_N: np.ndarray, rank_N: np.ndarray) -> np.ndarray:
    """Return the position of the one of each rank in each word: halve the word that holds it, six times."""
    left_N, bit_N = rank_N.copy(), np.zeros(len(rank_N), np.int64)
    for half in _HALVES:
        low_N = word_N & np.uint64((1 << half) - 1)
        below_N = np.bitwise_count(low_N).astype(np.int64)
        is_high_N = below_N <= left_N
        left_N -= below_N * is_high_N
        bit_N += half * is_high_N
        word_N = np.where(is_high_N, word_N >> np.uint64(half), low_N)
    return bit_N
