"""Retrieval: measures by hand, facts that hold together, searches that find, and files."""

import json

import pytest

from rllib_srl.envs.search.corpus import Corpus
from rllib_srl.envs.search.facts import Document, facts
from rllib_srl.envs.search.retrieval import Retrieval, exact_match, f1


@pytest.mark.parametrize(("answer", "right", "exact", "overlap"), [
    ("Ulvane", "ulvane.", 1, 1), ("The river Mide!", "river mide", 1, 1),
    ("Karo Velmin", "Karo", 0, 2 / 3),  # precision 1/2, recall 1
    ("the city of Tarosk", "Tarosk city", 0, 0.8),  # precision 2/3, recall 1
    ("no no no", "no", 0, 0.5),  # precision 1/3, recall 1
    ("Oslo", "Riga", 0, 0), ("Velmin Karo", "Karo Velmin", 0, 1), ("the", "an", 1, 1),
])  # fmt: skip
def test_exact_match_and_f1_by_hand(answer, right, exact, overlap):
    assert exact_match(answer, right) == exact
    assert f1(answer, right) == pytest.approx(overlap)


def test_bm25_finds_rare_words_and_orders_ties_by_position():
    documents = [Document(title, text) for title, text in (("A", "fox fox dog"), ("B", "dog cat"), ("C", "dog cat"))]
    corpus = Corpus(documents)
    assert [one.title for one in corpus.search("fox", 3)] == ["A"]
    assert [one.title for one in corpus.search("Cat!", 3)] == ["B", "C"]
    assert [one.title for one in corpus.search("cat", 1)] == ["B"]
    assert corpus.search("", 3) == corpus.search("unicorn", 3) == corpus.search("?!", 3) == []


def test_the_facts_of_a_seed_hold_together_and_a_person_is_in_one_split():
    one = facts(0)
    assert one.facts == facts.__wrapped__(0).facts != facts(1).facts
    assert len(one.documents()) == len(one.facts) == 900 + 150 + 90 + 18
    for chain in one.chains()[::97]:
        named = [*chain.looked_up[1:], chain.answer]
        texts = {document.title: document.text for document in one.documents()}
        for title, told in zip(chain.looked_up, named, strict=True):
            assert told in texts[title]
    env = Retrieval({})
    subjects = {
        split: {env._chains[prompt_id].subject for prompt_id in env.prompt_ids(split, 0)}
        for split in ("train", "heldout")
    }
    assert len(subjects["heldout"]) > 80
    assert not subjects["train"] & subjects["heldout"]


def test_files_are_played_and_their_errors_are_named(tmp_path):
    corpus, questions = tmp_path / "corpus.jsonl", tmp_path / "questions.jsonl"
    documents = [{"title": "Oslo", "text": "Oslo is in Norway."}, {"id": 1, "contents": '"Riga"\nRiga is in Latvia.'}]
    corpus.write_text("\n".join(map(json.dumps, documents)))
    rows = [
        {"question": "Where is Oslo?", "golden_answers": ["Norway", "in Norway"]},
        {"question": "Where is Riga?", "answer": "Latvia"},
    ]
    questions.write_text("\n".join(map(json.dumps, rows)))
    settings = {"corpus_path": str(corpus), "questions_path": str(questions), "num_shots": 0}
    env = Retrieval(settings)
    assert env.num_questions == 2
    env.reset(options={"prompt_id": "Where is Oslo?"})
    assert "(Oslo) Oslo is in Norway." in env.step("<search>oslo</search>")[0]
    assert env.step("<answer>In Norway</answer>")[1] == 1.0
    questions.write_text("\n".join(map(json.dumps, [*rows, {"question": "Who?"}, {"question": ""}])))
    again = tmp_path / "again.jsonl"
    again.write_text(questions.read_text())
    settings["questions_path"] = str(again)
    with pytest.raises(ValueError, match=r"again.jsonl, row 3: field 'answer'; expected text.*\(and 1 more\)"):
        Retrieval(settings)
    env = Retrieval({**settings, "bad_rows": "skip"})
    assert (env.num_questions, len(env.row_errors)) == (2, 2)
