"""srl chat: the tokens of a conversation, commands, limits, and real replies of a checkpoint and a model."""

import io
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rllib_srl.cli import chat
from rllib_srl.cli.chat import LoadedModel, form_of, talk
from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model
from rllib_srl.engine.protocol import Sampling
from rllib_srl.rollout.transcript import make_transcript


class Counting:
    """A form of one token for each word, 0 in front of a message and 9 behind a reply."""

    def first(self, message: str) -> list[int]:
        return [0, *(int(word.strip("/")) for word in message.split())]

    def later(self, message: str, last_id: int) -> list[int]:
        return [9, *self.first(message)[1:]]


class Parrot:
    """An engine that notes its prompts, and answers with the number of tokens and 7, which ends a turn."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[SimpleNamespace]:
        self.prompts += prompts
        reason = "stop" if len(prompts[0]) < 6 else "length"
        return [SimpleNamespace(token_ids=np.array([len(prompts[0]), 7]), reason=reason)]


class Words:
    """A tokenizer whose texts are the token ids, with a control character."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids)) + "\x1b[31m\n"


def talked(text: str, context: int = 100) -> tuple[list[str], list[str], list[list[int]]]:
    out, notes, engine = io.StringIO(), io.StringIO(), Parrot()
    sampling = Sampling(3, end_ids=(7,))
    model = LoadedModel(engine, Words(), Counting(), sampling, context)  # type: ignore[arg-type]
    talk(model, io.StringIO(text), out, notes)
    return out.getvalue().splitlines(), notes.getvalue().splitlines(), engine.prompts


def test_a_line_is_a_turn_and_commands_are_none() -> None:
    out, notes, prompts = talked("1\n\n2\n/reset\n3\n/what now\n//4\n/quit\n5\n")
    assert prompts[:3] == [[0, 1], [0, 1, 2, 7, 9, 2], [0, 3]]  # replies as sampled
    assert out == ["2\\x1b[31m", "6\\x1b[31m", "2\\x1b[31m", "6\\x1b[31m"]  # control characters are shown, not sent
    assert notes[:2] == ["(cut off after 3 tokens (--max-tokens))", "(new conversation)"]
    assert notes[2].startswith("(unknown command /what; expected /reset or /quit") and prompts[3][-1] == 4


def test_a_message_that_does_not_fit_is_refused() -> None:
    _, (note,), prompts = talked("1\n2\n", 8)
    assert note.startswith("(with your message the conversation has 6 tokens; expected at most 5") and len(prompts) == 1


def test_a_model_without_a_template_is_asked_questions() -> None:
    tiny = load_tokenizer(local_model("tiny"))
    form, name = form_of({"env_config": {"system_prompt": "Hi."}}, tiny, None, {})
    assert name == "Question: ... Answer:" and form.stop == ("\n",)
    assert tiny.decode(form.first("1 or 2?")).endswith("Question: 1 or 2?\nAnswer:")
    assert tiny.decode(form.later("3?", 5)) == "\nQuestion: 3?\nAnswer:"
    plain, _ = form_of({}, tiny, "Be brief.", {})
    assert tiny.decode(form.first("1?")).startswith("Hi.") and tiny.decode(plain.first("1?")).startswith("Be brief.")


@pytest.mark.parametrize(("argv", "message"), [
    (["tiny", "--max-tokens", "0"], "--max-tokens: '0'; expected an integer of at least 1"),
    (["tiny", "--temperature", "-1"], "--temperature -1.0; expected 0 or a number from 0.01 to 100"),
    (["tiny", "--lr", "1"], "--lr"),
    ([], "expected WHAT or --server URL, and not both"),
    (["tiny", "--server", "http://a"], "expected WHAT or --server URL, and not both"),
    (["--server", "http://a"], "it has no token, and SRL_TOKEN is not set; expected what srl serve printed"),
    (["./nowhere"], "model directory ./nowhere does not exist"),
])  # fmt: skip
def test_bad_input_is_one_message(argv: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    try:
        status = chat.main(argv)
    except SystemExit as error:
        status = int(error.code or 0)
    assert status and message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_answers_with_the_weights_of_its_checkpoint(trained: Path, capsys: pytest.CaptureFixture) -> None:
    words = chat.main.parse([str(trained), "--temperature", "0", "--max-tokens", "4"])
    capsys.readouterr()
    status = run_cleanly(lambda: chat.chat(words, io.StringIO("Which is largest: 4, 7 or 5?\n")), debug=False)
    out, err = capsys.readouterr()
    assert status == 0 and re.fullmatch(r" ?\d+.*\n", out), (out, err)
    assert "checkpoint_000002; Question: ... Answer:" in err


@pytest.mark.slow
def test_a_chat_template_is_used_where_there_is_one() -> None:
    tokenizer = load_tokenizer(local_model("smollm2-135m"))
    form, name = form_of({}, tokenizer, "Be brief.", {})
    assert name == "the model's chat template"
    said = tokenizer.decode(form.first("Hello"))
    assert said.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>")
    text, _ = form_of({}, tokenizer, None, {"prompt_format": "text"})
    assert tokenizer.decode(text.first("1?")) == "Question: 1?\nAnswer:"
    transcript = make_transcript("chat", tokenizer)
    assert (transcript.stop(()), transcript.end_ids) == (form.stop, form.transcript.end_ids)
