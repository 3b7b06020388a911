"""A results directory that several tests read."""

from __future__ import annotations

import os

import pytest

from tests.studies.synthetic import small_study, write_synthetic


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Return the directory of a whole study of five arms and ten seeds; tests only read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda number: None)  # nobody pulls the plug here
        return write_synthetic(tmp_path_factory.mktemp("study"), small_study())


@pytest.fixture
def quick(monkeypatch):
    """Write without waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda number: None)
