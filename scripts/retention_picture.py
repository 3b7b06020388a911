"""Draw what became of each task on one stream of the study of retention: the conflict stream of the median seed.

    python -m scripts.retention_picture DIRECTORY docs/assets/retention.svg        DIRECTORY as of retention_study.py

A panel is a task: held-out accuracy before training and after each stage, without a memory, with old prompts and with
held answers. The seed is the one whose difference of the last two, in final accuracy, is the (lower) median.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from rllib_srl.studies.report.charts import COLOURS, DASHES, FONT
from scripts.retention_study import ATTEMPT_3, NUM_TASKS, TOKENS, best, read_rows, rows_of, rows_of_arm

matplotlib.use("Agg")
from matplotlib import pyplot

HELD = "cross_entropy"
TITLES = {"none": "no memory", "uniform": "old prompts come back", HELD: "old answers are held"}
SIZE = (9.6, 2.5)  # inches
PLAN = ATTEMPT_3[0]  # conflict streams


def median_seed(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the seed of the proof with the lower median of tested form minus uniform revisits."""
    final = {(row["arm"], row["seed"]): row["final"] for row in rows if row["kind"] == PLAN.kind}
    gains = sorted((final[HELD, seed] - final["uniform", seed], seed) for seed in PLAN.table)
    return gains[(len(gains) - 1) // 2][1]


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture as SVG; equal rows give equal bytes."""
    seed = median_seed(rows)
    chosen = {row["arm"]: row for row in rows if row["kind"] == PLAN.kind and row["seed"] == seed}
    tokens = np.arange(NUM_TASKS + 1) * TOKENS / 1000
    with matplotlib.rc_context({**FONT, "font.size": 8, "svg.hashsalt": "retention"}):
        figure, panels = pyplot.subplots(1, NUM_TASKS, figsize=SIZE, sharey=True, layout="constrained")
        for stage, (panel, task) in enumerate(zip(panels, chosen[HELD]["tasks"], strict=True)):
            panel.axvspan(tokens[stage], tokens[stage + 1], color="#eeeeee", lw=0)
            for (arm, title), colour, dash in zip(TITLES.items(), ("#888888", *COLOURS), DASHES, strict=False):
                row = chosen[arm]
                accuracy = [row["before"][stage], *(mark[stage] for mark in row["after"])]
                panel.plot(tokens, accuracy, color=colour, linestyle=dash, marker=".", label=title)
            panel.set(title=task.replace("_", " "), xlabel="1,000 generated tokens", ylim=(0, 1.02))
        panels[0].set_ylabel("held-out accuracy")
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(TITLES), frameon=False
        )
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    rows = read_rows(arguments.directory / "trials.jsonl")
    own = {arm: rows_of_arm(rows, PLAN.kind, arm) for arm in TITLES}
    shown = [rows_of(own[arm], best(rows, PLAN, arm) or {}, PLAN.table).values() for arm in TITLES]
    draw([row for by_seed in shown for row in by_seed], arguments.picture)


if __name__ == "__main__":
    main()
