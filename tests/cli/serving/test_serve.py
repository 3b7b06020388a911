"""`srl serve`: what is wrong with its command line is said at once, and before anything is written."""

from rllib_srl.cli.serving.serve import main


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
