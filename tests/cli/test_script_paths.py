"""Flags that name a directory refuse URIs, in every script that has one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rllib_srl.cli import quickstart, report, train
from rllib_srl.cli.tuning import tune

RUN = ("--env", "compare", "--model", "tiny")


@pytest.mark.parametrize(("script", "flag", "others"), [
    (train, "--out", RUN), (train, "--export", RUN), (train, "--resume", ()), (quickstart, "--out", ()),
    (tune, "--storage", ("replay",)), (report, "--out", ("results",)),
])  # fmt: skip
@pytest.mark.parametrize("uri", ["s3://bucket/run", "gs://bucket"])
def test_a_uri_is_refused_and_no_folder_is_named_after_it(tmp_path, monkeypatch, capsys, script, flag, others, uri):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        script.main([*others, flag, uri])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{flag}: {uri} is a URI; expected a path on this machine, such as that of a mounted bucket" in said
    assert not list(tmp_path.iterdir())


def test_a_file_uri_is_the_path_it_names(tmp_path: Path) -> None:
    assert train.main.parse([*RUN, "--out", f"file://{tmp_path}/a%20b"]).out == tmp_path / "a b"
    assert train.main.parse([*RUN, "--out", "results/first"]).out == Path("results/first")
