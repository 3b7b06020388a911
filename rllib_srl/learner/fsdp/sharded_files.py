"""Write and read tensors sharded over learners: one safetensors file per learner and a JSON index, without pickle.

    learner_shards/shard_00000.safetensors     learner 0's rows of every tensor
                   shard_00001.safetensors     learner 1's rows, which follow those of learner 0
                   index.json                  shapes of the whole tensors, number of shards, plain values

Tensors are split along dimension 0 in the order of the learners; concatenating the rows of all shards gives the whole
tensor. Any number of learners can read the files. Each reads only the rows it needs, from the shards that hold them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rllib_srl.storage.checkpoints import CheckpointError

INDEX = "index.json"
SHARDS = "learner_shards"  # in a checkpoint


def write_shard(directory: Path, rank: int, rows: Mapping[str, torch.Tensor]) -> None:
    """Write one learner's rows of every tensor.

    Args:
        directory: shared by all learners; created if missing.
        rank: rank of the learner.
        rows: tensors by name, each with at least one dimension; a tensor may have 0 rows here.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    scratch = directory / f"{_name(rank)}.tmp"
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in rows.items()}, scratch)
    scratch.replace(directory / _name(rank))


def write_index(
    directory: Path, num_shards: int, shapes: Mapping[str, Sequence[int]], values: Mapping[str, Any]
) -> None:
    """Write the JSON index: shapes of the whole tensors, number of shards and plain values.

    Args:
        directory: as for `write_shard`.
        num_shards: number of learners that write a shard.
        shapes: shapes of the whole tensors, by name.
        values: values that JSON represents exactly.
    """
    content = {"num_shards": num_shards, "shapes": {name: list(shape) for name, shape in shapes.items()}}
    text = json.dumps({**content, "values": dict(values)}, indent=1, sort_keys=True, allow_nan=False)
    scratch = directory / f"{INDEX}.tmp"
    scratch.write_text(text)
    scratch.replace(directory / INDEX)


class ShardedFiles:
    """A directory written by `write_shard` and `write_index`. Invariant: the shards hold every row of every tensor."""

    def __init__(self, directory: Path) -> None:
        """Open every file and check that their rows add up to the shapes in the index.

        Raises:
            CheckpointError: a file is missing or unreadable, or the shards do not match the index.
        """
        from safetensors import SafetensorError, safe_open

        self._directory = directory
        index = self._read_index()
        self.values: dict[str, Any] = index["values"]
        self.shapes = {name: tuple(shape) for name, shape in index["shapes"].items()}
        names = [_name(rank) for rank in range(index["num_shards"])]
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise CheckpointError(
                f"{directory} has no {', '.join(missing)}; expected all {len(names)} shards: learners on several "
                "machines need a directory that all of them share"
            )
        try:
            self._shards = [safe_open(directory / name, framework="pt") for name in names]
        except SafetensorError as error:
            raise CheckpointError(f"a shard in {directory} cannot be read ({error}); use another checkpoint") from error
        if faults := list(self._faults()):
            raise CheckpointError(f"the shards in {directory} do not fit together: {'; '.join(faults[:5])}")

    def _read_index(self) -> dict[str, Any]:
        path = self._directory / INDEX
        try:
            index: dict[str, Any] = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint") from error
        return index

    def _faults(self) -> Iterator[str]:
        for rank, shard in enumerate(self._shards):
            if odd := sorted(set(shard.keys()) ^ set(self.shapes)):
                yield f"{_name(rank)} and {INDEX} differ in {', '.join(odd[:3])}"
                return
        for name, shape in self.shapes.items():
            found = [tuple(shard.get_slice(name).get_shape()) for shard in self._shards]
            if sum(one[0] for one in found) != shape[0] or any(one[1:] != shape[1:] for one in found):
                yield f"{name}: parts {', '.join(map(str, found))}; expected rows of {shape}"

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop` - 1 of a tensor, read from the shards that hold them.

        Args:
            name: a key of `shapes`.
            start: first row.
            stop: row after the last one; may equal `start`.
        """
        parts, above = [], 0
        for shard in self._shards:
            part = shard.get_slice(name)
            num = part.get_shape()[0]
            first, last = max(start - above, 0), min(stop - above, num)
            if first < last:
                parts.append(part[first:last])
            above += num
        return torch.cat(parts) if parts else self._shards[0].get_tensor(name)[:0]


def _name(rank: int) -> str:
    return f"shard_{rank:05d}.safetensors"
