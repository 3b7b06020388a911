"""`srl serve`: what is wrong with its command line is said at once, and before anything is written or is for good."""

import pytest

from rllib_srl.cli.serving.serve import main
from rllib_srl.cli.serving.served_directory import DirectoryError, ServedDirectory
from rllib_srl.envs.agents.web import listen
from rllib_srl.people.served_store import FILE, ServedStore
from tests.cli.serving.small_engine import FIXED
from tests.people.test_served_store import conversation


def test_all_errors_of_the_command_line_are_said_at_once(tmp_path, capsys):
    flags = ["--port", "70000", "--train-after", "-1", "--lr", "x", "--keep", "compare", "compare", "nosuch"]
    assert main(["tiny", "--out", str(tmp_path / "served"), *flags]) == 1
    said = capsys.readouterr().err
    for part in (
        "--port 70000: Input should be less than or equal to 65535",
        "--train_after -1: Input should be greater than or equal to 0",
        "--lr x: Input should be a valid number",
        "--keep: environment 'nosuch' is unknown",
        "--keep names the domain 'compare' twice",
    ):
        assert part in said
    assert main(["tiny", "--out", str(tmp_path / "served")]) == 1
    assert "--keep is empty; expected an environment that must not be lost" in capsys.readouterr().err
    assert not (tmp_path / "served").exists()


def test_a_start_that_fails_leaves_the_settings_open(tmp_path, capsys):
    out, listening = tmp_path / "served", listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    flags = ["--out", str(out), "--train-after", "0", "--port", str(port), "--temperature"]
    with listening:
        for temperature, scheme in (("0.5", "ordinal"), ("1", "binary")):
            assert main(["tiny", *flags, temperature, "--scheme", scheme]) == 1
            said = capsys.readouterr().err
            assert said.startswith(f"error: 127.0.0.1:{port} cannot be used: ")
            assert said.endswith("; choose another --port (0 takes a free one)\n")
    with ServedStore(out / FILE) as store:
        store.log(conversation())
    with pytest.raises(DirectoryError, match=f"model = small; expected .*, as --out {out} has been served before"):
        ServedDirectory(out).fix_settings(FIXED)
