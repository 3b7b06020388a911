"""A results directory that several tests read."""

import os

import pytest

from tests.studies.synthetic import small_study, write_synthetic


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda number: None)  # nobody pulls the plug here
        return write_synthetic(tmp_path_factory.mktemp("study"), small_study())


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda number: None)
