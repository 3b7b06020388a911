"""Pickles that show when they are opened, in every place of a checkpoint that RLlib or Tune reads one from."""

import pickle
from pathlib import Path

from rllib_srl.storage.checkpoints import seal, verify_sealed
from rllib_srl.storage.seal_key import make_key

MORE = ("_dict_checkpoint.pkl", "algorithm_state.msgpack", "env_runner/state.pkl")  # that SRL does not write


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.marker,))


def poisoned(checkpoint: Path, marker: Path) -> list[Path]:
    """Put a `Bomb` into every pickle of a checkpoint, and one into each of `MORE`; seal it anew with a foreign key."""
    about = verify_sealed(checkpoint)
    files = [*checkpoint.rglob("*.pkl"), *(checkpoint / name for name in MORE)]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(pickle.dumps(Bomb(marker)))
    seal(checkpoint, about, make_key(marker.with_name("foreign.key")))
    return files
