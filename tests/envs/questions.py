"""Files of rows, and `QuestionFile` environments of them."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rllib_srl.envs.math.question_file import QuestionFile


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows as the suffix says; return the path."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def env_of(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> QuestionFile:
    """Return the environment of some rows, without shots."""
    return QuestionFile({"path": write(tmp_path / "rows.jsonl", rows), "num_shots": 0, **settings})


def asked(env: QuestionFile) -> dict[str, str]:
    """Return question -> answer of both splits."""
    return dict(map(env.data_question, env._ids))


def played(env: QuestionFile, turn: str, prompt_id: str = "") -> tuple[float, dict[str, Any]]:
    """Return what a turn earns, and its info; of the first prompt unless another is given."""
    env.reset(options={"prompt_id": prompt_id or env._ids[0]})
    _, reward, terminated, _, info = env.step(turn)
    assert terminated
    return reward, info
