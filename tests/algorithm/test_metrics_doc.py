"""docs/metrics.md against runs: every name in it is written by one, and every name that a run writes is in it."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.small_memory import memory_config

SECTIONS = (  # headings in the document, and keys of the results
    "env_runners", "rollout", "learners/default_policy", "replay", "domains", "ratings", "retention", "weight_sync",
    "timers", "evaluation", "planner",
)  # fmt: skip
RLLIBS = {  # RLlib's own, beside ours
    "env_runners": r"num_(agent|module)_steps_.*",
    "learners/default_policy": r"(num_module_steps_|num_(non_)?trainable_|module_train_batch|weights_seq_no).*",
    "timers": r"(training_(iteration|step)|evaluation_iteration|restore_env_runners|synch_.*)",
    "evaluation": r"(env_runners/num_episodes|num_agent_steps|num_env_steps|timesteps).*",
    "": r"(num_env_steps_sampled_lifetime|num_training_step_calls_per_iteration)",
}
# Written when something fails, or by settings that need processes of their own.
# Not in these runs: restarts, GPUs, reward functions of one's own (test_own_data.py), agents
# (rollout/test_agents.py), rollouts ahead of training (test_ahead.py).
RARE = {"num_runner_restarts", "num_attention_graphs", "reward/[^/]+"}
RARE |= {"num_groups_played_again"}
RARE |= {"num_groups_undone"}  # after a restore
RARE |= {"regularisers/[^/]+", "num_importance_episodes"}
RARE |= {f"agent/num_{name}" for name in ("calls", "conversations", "rewritten", "refused", "unheard")}
RARE |= {"lag_mean", "lag_max", "late_share", "num_tokens_dropped_late"}
RARE |= {f"by_domain/[^/]+/{name}" for name in ("nll", "delta", "cosine")}  # test_retention.py
RARE |= {"cosine"}  # likewise: every tenth iteration
RARE |= {"reuse_fraction"}  # contrib/test_forgetting.py
NO_METRICS = ("Trackers", "Prometheus", "The live page")  # headings of other sections


def documented(text: str) -> dict[str, list[str]]:
    """Return the names of each section, `<anything>` as a regular expression, by key of the results."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        if heading in NO_METRICS:
            continue
        is_top = heading.startswith("Lifetime counts at the top level")
        key = "" if is_top else next(name for name in SECTIONS if heading.strip("`").startswith(name))
        cells = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
        names = found[key] = []
        for cell in cells:
            first = ""
            for name in re.findall(r"`([^`]+)`", cell):
                first = first if name.startswith("_") else name
                whole = first.rsplit("_", 1)[0] + name if name.startswith("_") else name
                names.append(re.sub("<[^>]+>", "[^/]+", re.escape(whole).replace(r"\<", "<").replace(r"\>", ">")))
    return found


def names_in(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from names_in(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}"


@pytest.mark.slow
def test_every_documented_metric_is_written_and_every_written_one_documented(random_llama_dir, tmp_path, ray_here):
    iterating = {"env": "tests.small_envs:Even", "env_config": {"num_prompts": 400}, "num_steps": 4}
    runs = []
    for at in range(2):
        config = memory_config(random_llama_dir, tmp_path / f"log{at}").env_runners(max_episode_tokens=512)
        config.environment("rllib_srl.envs.wrappers.self_iteration:SelfIteration")
        config.env_config = iterating  # in place of what `Even` takes
        config.evaluation(evaluation_interval=1, evaluation_duration=4)
        if at == 0:
            config.evaluation(evaluation_pass_k=2)
            config.callbacks(["contrib.recap", "contrib.forgetting"])
        else:
            config.training(kl_coeff=0.01, kl_on_reused="weighted")
            config.callbacks(["contrib.sec", "contrib.probe"])
            config.replay(spacing="fsrs", retain=1.0)
        algo = config.build_algo()
        for _ in range(3):
            runs.append(algo.train())
        algo.stop()
    written: dict[str, set[str]] = {}
    for section in (*SECTIONS, ""):
        found = list(runs)
        for key in filter(None, section.split("/")):
            found = [one[key] for one in found if key in one]
        if section:
            written[section] = {name for one in found for name in names_in(one)}
        else:
            written[section] = {name for one in found for name in one if name.startswith("num_")}
    missing, unknown = [], []
    for section, patterns in documented((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")).items():
        names = written[section]
        missing += [(section, p) for p in patterns if p not in RARE and not any(re.fullmatch(p, n) for n in names)]
        rllibs = RLLIBS.get(section, "nothing")
        unknown += [
            (section, name)
            for name in sorted(names)
            if not re.fullmatch(rllibs, name) and not any(re.fullmatch(p, name) for p in patterns)
        ]
    assert (missing, unknown) == ([], [])
