"""What is mistyped is refused in one message with the nearest right name, by every command."""

from pathlib import Path

import pytest

from rllib_srl.cli import train
from rllib_srl.cli.main import main
from rllib_srl.cli.shared import diagnosis


def said(argv: list[str], capsys: pytest.CaptureFixture) -> str:
    """Run a command that must fail, and return its message."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = int(stop.code or 0)
    message: str = capsys.readouterr().err
    assert status in (1, 2) and message.count("error: ") == 1 and "Traceback" not in message and "usage" not in message
    return message


@pytest.mark.parametrize(("argv", "hint"), [
    (["trian"], "unknown command 'trian'; did you mean 'train'?"),
    (["train", "--groupsize", "4"], "--groupsize: did you mean --group_size?"),
    (["train", "--learning_rate", "1e-4"], "--learning_rate: use --lr"),
    (["train", "--num_shots", "4"], "--num_shots: use --env_config (num_shots=4)"),
    (["check-data", "--data", "x", "--out", "y"], "--out: a flag of srl train, not of this command"),
    (["rate", "x", "--lr", "3"], "--lr: a flag of srl train, not of this command"),
    (["report", "x", "--ou", "y"], "--ou: did you mean --out?"),
    (["train", "--env", "comapre", "--model", "tiny"], "environment 'comapre' is unknown; did you mean compare?"),
    (["env", "comapre"], "environment 'comapre' is unknown; did you mean compare?"),
    (["train", "--config", "run.yaml"], "group_sise"),
    (["tune", "repaly"], "study 'repaly' is unknown; did you mean replay?"),
])  # fmt: skip
def test_names(argv: list[str], hint: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("env: compare\nmodel: tiny\ngroup_sise: 4\n")
    message = said(argv, capsys)
    assert hint in message and ("group_sise" not in hint or "did you mean group_size?" in message)


RUN = ("--env", "compare", "--model", "tiny")


@pytest.mark.parametrize("words", [
    ("train", *RUN, "--out"), ("train", *RUN, "--export"), ("train", "--resume"), ("quickstart", "--out"),
    ("tune", "replay", "--storage"), ("report", "results", "--out"),
])  # fmt: skip
def test_a_uri_is_refused_and_no_folder_is_named_after_it(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    place = "s3://bucket/run is a URI; expected a path on this machine, such as that of a mounted bucket"
    assert f"{words[-1]}: {place}" in said([*words, "s3://bucket/run"], capsys)
    assert not list(tmp_path.iterdir())
    assert train.main.parse([*RUN, "--out", f"file://{tmp_path}/a%20b"]).out == tmp_path / "a b"


@pytest.mark.parametrize("name", ["evaluate", "compare", "chat", "report", "dashboard", "export", "train"])
def test_directories(name: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    Path("results/first").mkdir(parents=True)
    rest = {"compare": ["tiny"], "export": ["out"]}.get(name, [])
    words = [name, "--resume"] if name == "train" else [name]
    message = said([*words, "results/frist", *rest], capsys)
    assert "does not exist; did you mean" in message and "results/first?" in message
    assert "results/first has" in said([*words, "results/first", *rest], capsys).replace("holds", "has")  # no run


@pytest.mark.parametrize(("argv", "file"), [
    (["memory", "list", "it"], "replay/memory.db"), (["rate", "it"], "ratings.db"), (["versions", "it"], "served.db"),
    (["versions", "it", "--rollback"], ""),
])  # fmt: skip
def test_a_file_of_no_use_is_one_message_without_the_name_of_an_exception(argv, file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("replay/memory.db", "settings.json", file or "other"):
        Path("it", name).parent.mkdir(parents=True, exist_ok=True)
        Path("it", name).write_text("no database" * 1000)
    message = said(argv, capsys)
    assert (f"it/{file}" if file else "expected a trained version to roll back") in message
    assert "Error" not in message and "--debug" not in message


def test_another_package_than_the_installed_one_is_named(monkeypatch) -> None:
    monkeypatch.setattr(diagnosis, "is_installed", lambda: False)
    (line,) = diagnosis.of_package()
    assert line.status == diagnosis.WARNING and "is not the installed one; expected: pip install" in line.text
