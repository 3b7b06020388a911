"""`srl versions`: what it says about the ratings that a rollback withdraws, and that no text controls the terminal."""

from rllib_srl.cli.serving.served_directory import DirectoryError, ServedDirectory
from rllib_srl.cli.serving.versions import main
from rllib_srl.people.served_store import FILE, ServedStore
from tests.cli.serving.small_engine import FIXED


def test_texts_of_others_do_not_control_the_terminal(tmp_path, capsys, monkeypatch):
    served = ServedDirectory(tmp_path / "served")
    served.fix_settings(FIXED)
    change = {"before": 0.5, "after": 0.75}
    with ServedStore(served.path / FILE) as store:
        number = store.begin({"c0\u001b[2J/0": "good"}, {}).number
        store.finish(number, {}, {"changes": {"own\u009b1m": change}})
        store.activate(number)
        store.begin({"c1/0": "good"}, {})
    reason = "rude \u001b[2J\u202e\nversion 7 is active"
    assert main([str(served.path), "--rollback", "--reason", reason]) == 0
    assert main([str(served.path)]) == 0
    said, shown = capsys.readouterr().out.split("\n", 1)
    assert said.endswith("1 rating is withdrawn: c0\\x1b[2J/0")
    (row,) = [line for line in shown.split("\n") if line.split()[:1] == ["1"]]
    assert row.endswith("own\\x9b1m 0.500 -> 0.750  rude \\x1b[2J\\u202e\\nversion 7 is active")
    assert len(shown.strip().split("\n")) == 4  # the head, two versions, and which is active

    def refuse(*_):
        raise DirectoryError("the server said \u001b[2J")

    monkeypatch.setattr("rllib_srl.cli.serving.versions.roll_back", refuse)
    assert main([str(served.path), "--rollback"]) == 1
    assert capsys.readouterr().err == "error: the server said \\x1b[2J\n"
