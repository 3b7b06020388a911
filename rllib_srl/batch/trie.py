"""Represent a prefix trie of tokens and cover its attention with dense rectangles: pure NumPy.

Tokens are in depth-first order, so the descendants of token j are one run of rows, j + 1 up to `end_T[j]` - 1:

    0 few ─ 1 shot ─┬─ 2 prompt ─┬─ 3 a ─ 4 b        end_T     8 8 6 5 5 6 8 8
                    │            └─ 5 c              depth_T   0 1 2 3 4 3 2 3
                    └─ 6 prompt ─── 7 d

    i may attend to j   <=>   j <= i < end_T[j]                      and depth_T[i] - depth_T[j] < window

A run of tokens without a branch is a segment. Attention consists of a few dense parts: the causal triangle of each long
segment, the rectangle of its descendants (one run of rows) against it, and one masked square per small subtree. Squares
of similar size are computed together. Rows of unrelated tries cost nothing.

    rows 0 1 2 3 4 5 6 7        T triangle of the few-shot text     R its descendants against it
       0 T                      S small subtrees, masked inside
       1 T T
       2 R R S
       3 R R S S
       4 R R S S S
       5 R R S . . S
       6 R R . . . . S
       7 R R . . . . S S
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SMALL = 96  # a subtree of at most this many rows is one masked square
FILL = 64  # neighbouring subtrees share a square up to this many rows; the masked part of a square is wasted
STEP = 16  # squares are padded to a multiple of this; squares of equal size are computed together


@dataclass(frozen=True)
class Rectangle:
    """Rows `rows` attend to keys `keys`: to all, causally (`is_causal`), or where `mask` is True."""

    rows: slice
    keys: slice
    is_causal: bool = False
    mask: np.ndarray | None = None


@dataclass(frozen=True)
class Squares:
    """Masked squares on the diagonal, computed together: run n lies within the S rows from `starts[n]` on.

    Invariant: in `mask_NSS` the rows and columns of a square outside its run are all False.
    """

    size: int  # S
    starts: list[int]
    runs: list[slice]
    mask_NSS: np.ndarray


@dataclass(frozen=True)
class Cover:
    """Parts of a trie's attention. Invariant: every row is in exactly one square run or triangle."""

    squares: list[Squares]
    triangles: list[Rectangle]  # on the diagonal; with a window some have a mask
    below: list[Rectangle]  # descendants against a segment


@dataclass(frozen=True)
class Trie:
    """A prefix trie: end row of each token's subtree and depth of each token, both [T]; covers are cached by window.

    Invariant: `row < end_T[row]`, and subtrees nest. `depth_T` is 0 at every root.
    """

    end_T: np.ndarray
    depth_T: np.ndarray
    covers: dict[int | None, Cover] = field(default_factory=dict, compare=False, repr=False)
    block_masks: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.end_T)

    def sees(self, rows: slice, keys: slice, window: int | None = None) -> np.ndarray:
        """Return which rows may attend to which keys, bool [rows, keys]."""
        i_R, j_K = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)[None]
        seen_RK = (j_K <= i_R) & (i_R < self.end_T[keys][None])
        if window is not None:
            seen_RK &= self.depth_T[rows][:, None] - self.depth_T[keys][None] < window
        return seen_RK

    def mask_TT(self, window: int | None = None) -> np.ndarray:
        """Return the explicit mask, bool [T, T], for checks and for kernels without sparse masks."""
        return self.sees(slice(0, len(self)), slice(0, len(self)), window)

    def blocks(self, size: int, window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return which square blocks of the mask must be computed, and which of these need no mask, bool [N, N] each.

        Computed from the ends and depths of each block in O(T + N^2), without the [T, T] mask. N = T / `size`, rounded
        up; a block that reaches beyond row T needs its mask. The second array is exact. The first is exact without a
        window; with one it may contain blocks without a visible pair, which cost time but change no result.

        Args:
            size: rows, and keys, of a block; at least 2.
            window: number of depths a token attends to, itself included; None means all.
        """
        starts_N = np.arange(0, len(self), size)
        if not len(starts_N):
            return np.zeros((0, 0), bool), np.zeros((0, 0), bool)
        block_N = np.arange(len(starts_N))
        stops_N = starts_N + size
        is_below_NN, is_diagonal_NN = block_N[:, None] > block_N[None], block_N[:, None] == block_N[None]
        # Row i > j sees key j up to the end of j: the first row of a block decides "some", its last row "all".
        last_end_N, first_end_N = (f.reduceat(self.end_T, starts_N) for f in (np.maximum, np.minimum))
        some_NN = is_diagonal_NN | (is_below_NN & (last_end_N[None] > starts_N[:, None]))
        all_NN = is_below_NN & (first_end_N[None] >= stops_N[:, None])
        if window is not None:
            deepest_N, flattest_N = (f.reduceat(self.depth_T, starts_N) for f in (np.maximum, np.minimum))
            some_NN &= is_diagonal_NN | (flattest_N[:, None] - deepest_N[None] < window)
            all_NN &= deepest_N[:, None] - flattest_N[None] < window
        return some_NN, all_NN

    def cover(self, window: int | None = None) -> Cover:
        """Return squares and rectangles that contain each visible (row, key) pair exactly once.

        Args:
            window: number of depths a token attends to, itself included; None means all.
        """
        if window is not None and (not len(self) or window > self.depth_T.max()):
            window = None  # reaches every root
        if window not in self.covers:
            self.covers[window] = self._make_cover(window)
        return self.covers[window]

    def _make_cover(self, window: int | None) -> Cover:
        small: list[slice] = []
        large: list[Rectangle] = []
        for area in self._cover(0, len(self)):
            (small if isinstance(area, slice) else large).append(area)  # type: ignore[arg-type]
        if window is not None:
            large = [part for rectangle in large for part in self._windowed(rectangle, window)]
        by_size: dict[int, list[slice]] = {}
        for rows in small:
            by_size.setdefault(-(-(rows.stop - rows.start) // STEP) * STEP, []).append(rows)
        squares = [self._squares(runs, size, window) for size, runs in sorted(by_size.items())]
        is_diagonal = [r.rows == r.keys for r in large]
        triangles = [r for r, yes in zip(large, is_diagonal, strict=True) if yes]
        return Cover(squares, triangles, [r for r, yes in zip(large, is_diagonal, strict=True) if not yes])

    def _cover(self, start: int, stop: int) -> Iterator[Rectangle | slice]:
        """Yield the rectangles, and the rows of squares (as slices), of the subtrees in rows `start` to `stop` - 1."""
        todo = [(start, stop)]
        while todo:
            at, stop = todo.pop()
            small_from = at
            while at < stop:
                end = int(self.end_T[at])
                if end - small_from <= (SMALL if small_from == at else FILL):
                    at = end
                    continue
                if small_from < at:  # close the square before this subtree and try it again
                    yield slice(small_from, at)
                    small_from = at
                    continue
                branch = self._segment_end(at)
                yield Rectangle(slice(at, branch), slice(at, branch), is_causal=True)
                if branch < end:
                    yield Rectangle(slice(branch, end), slice(at, branch))
                    todo.append((branch, end))
                small_from = at = end
            if small_from < at:
                yield slice(small_from, at)

    def _segment_end(self, start: int) -> int:
        """Return the row after the last one that follows `start` without a branch."""
        stop = int(self.end_T[start])
        branches = np.flatnonzero(self.end_T[start:stop] != stop)
        return start + int(branches[0]) if len(branches) else stop

    def _squares(self, runs: list[slice], size: int, window: int | None) -> Squares:
        size = min(size, len(self))
        starts = [min(run.start, len(self) - size) for run in runs]
        mask_NSS = np.zeros((len(runs), size, size), bool)
        for mask_SS, start, run in zip(mask_NSS, starts, runs, strict=True):
            inside = slice(run.start - start, run.stop - start)
            mask_SS[inside, inside] = self.sees(run, run, window)
        return Squares(size, starts, runs, mask_NSS)

    def _windowed(self, rectangle: Rectangle, window: int) -> Iterator[Rectangle]:
        seen_RK = self.sees(rectangle.rows, rectangle.keys, window)
        if not seen_RK.any():
            return
        whole = self.sees(rectangle.rows, rectangle.keys)
        yield rectangle if (seen_RK == whole).all() else Rectangle(rectangle.rows, rectangle.keys, mask=seen_RK)

    @staticmethod
    def of(depth_T: np.ndarray) -> Trie:
        """Build a trie from token depths in depth-first order.

        A token's subtree ends before the next token of the same or a smaller depth.

        Raises:
            ValueError: the first depth is not 0, or a token is more than 1 deeper than the one before it.
        """
        if len(depth_T) and (depth_T[0] != 0 or np.diff(depth_T).max(initial=0) > 1):
            raise ValueError(f"depth_T = {depth_T[:8].tolist()}...; expected a root first, each token at most 1 deeper")
        end_T = np.full(len(depth_T), len(depth_T), np.int64)
        path: list[int] = []  # rows from the root to the last token
        for row, depth in enumerate(depth_T.tolist()):
            end_T[path[depth:]] = row
            del path[depth:]
            path.append(row)
        return Trie(end_T, np.asarray(depth_T, np.int64))
