"""Where a run may write: a path of this machine, never a folder named like a URI."""

from pathlib import Path

import pytest

from rllib_srl import SRLConfig
from rllib_srl.storage.local_paths import local_path


@pytest.mark.parametrize(("text", "path"), [
    ("results/first", "results/first"),
    ("file:///data/a%20b", "/data/a b"),
    ("file://localhost/data", "/data"),
    ("FILE:/data", "/data"),
    ("c:/data", "c:/data"),  # a drive
    ("a:b/c", "a:b/c"),
    ("run:/x", None),
    ("s3://bucket/run", None),
    ("file://server/share", None),
    (Path("s3://bucket/run"), None),  # "s3:/bucket/run" by now
])  # fmt: skip
def test_a_uri_is_no_path(text: str, path: str | None) -> None:
    if path is not None:
        assert local_path(text) == Path(path)
        return
    with pytest.raises(ValueError, match="is a URI; expected a path on this machine, such as that of a mounted bucket"):
        local_path(text)


@pytest.mark.parametrize(("directory", "message"), [
    ("s3://bucket/run", "log_directory = 's3://bucket/run'; s3://bucket/run is a URI; expected a path"),
    (7, "log_directory = 7; expected a path, or None"),
])  # fmt: skip
def test_a_run_does_not_log_into_a_uri(tmp_path: Path, monkeypatch, directory, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    config = SRLConfig().environment("compare").training(log_directory=directory)
    with pytest.raises(ValueError) as caught:
        config.validate()
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())
