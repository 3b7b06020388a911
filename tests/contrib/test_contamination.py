"""The contamination gate: pairs by hand, and a run whose repeats are left out or that does not start."""

import json
from pathlib import Path

import pytest

from rllib_srl.contrib.contamination import AUDIT, ContaminationError, Row, find_hits, tokens_of
from tests.small_envs import small_config, watch

SUMS = [{"question": f"What is {n} + {2 * n + 1}?", "answer": str(3 * n + 1)} for n in range(10, 40)]
REPEATS = ["WHAT is 5+2", "Think first. What is 5 + 2.0?"]  # in other spacing, and in a longer text
HELDOUT = [{"question": "What is 5 + 2?", "answer": "7"}, {"question": "What is 9 * 9?", "answer": "81"}]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_pairs_share_tokens_that_few_rows_have() -> None:
    assert tokens_of("Tom’s  2,500 Apples − and 3.50?") == ("tom", "s", "2500", "apples", "-", "and", "3.5")
    start = "read the following question with care and answer it with one number only"
    rows = [Row("a", str(n), f"{start} what is word{n}") for n in range(40)]
    assert find_hits(rows, [Row("b", "1", f"{start} what is wordx")]) == []


@pytest.mark.parametrize(("train", "evaluation", "score"), [
    (("WHAT is 5+2", "7"), ("What is 5 + 2?", "7"), 1.0),
    (("Think: what is 5 + 2?", "7"), ("What is 5 + 2?", "7 apples"), 1.0),
    (("Think: what is 5 + 2 + 1?", "8"), ("What is 5 + 2?", "7"), None),  # another answer
    (("What is 5 + 3?", "8"), ("What is 5 + 2?", "7"), None),
    # 12 tokens have five 8-grams; a change of the last one spoils one of them: 4 / 5
    (("a b c d e f g h i j k l", ""), ("a b c d e f g h i j k m", ""), 0.8),
    (("a b c d e f g h i j k l", ""), ("a b c d e f g h i j x l", ""), None),  # 3 / 5
    (("a b c d e f g h i j k l 3", ""), ("a b c d e f g h i j k l 4", ""), None),  # another number
])  # fmt: skip
def test_a_pair_by_hand(train: tuple[str, str], evaluation: tuple[str, str], score: float | None) -> None:
    hits = find_hits([Row("a", "1", *train)], [Row("b", "1", *evaluation)])
    assert [hit.score for hit in hits] == ([] if score is None else [score])


@pytest.mark.slow
def test_a_run_plays_no_row_that_is_left_out(random_llama_dir, tmp_path: Path, build) -> None:
    repeats = [{"question": text, "answer": "7"} for text in REPEATS]
    train, heldout = write(tmp_path / "train.jsonl", SUMS + repeats), write(tmp_path / "test.jsonl", HELDOUT)
    played = {}
    for variant in ("contamination", "drop"):
        config = small_config(random_llama_dir, tmp_path / variant)
        places = {"num_shots": 0, "path": train, "heldout_path": heldout}
        config.environment("question_file", env_config=places).env_runners(max_episode_tokens=96)
        config.training(num_prompts_per_batch=16).callbacks(f"contrib.contamination:{variant}")
        algo = build(config)
        batches = watch(algo)
        for _ in range(3):
            algo.train()  # 48 groups: more than one pass over all 32 rows
        env = algo.source.environments["question_file"]
        played[variant] = {env.question(group.prompt.prompt_id).text for one in batches for group in one.groups}
        assert json.loads((Path(algo.logdir) / AUDIT).read_text())["shares"] == {"question_file": 0.5}
    assert played["contamination"] == {row["question"] for row in SUMS} | set(REPEATS)
    assert played["drop"] == {row["question"] for row in SUMS}
    config.callbacks("contrib.contamination:halt")
    with pytest.raises(ContaminationError, match=r"training repeats 50.00% of question_file; expected at most 0.00%"):
        config.build_algo()
