"""Checks that need no run: installed packages, memory and disk, the output directory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from rllib_srl.cli.diagnosis.lines import FAILURE, OK, WARNING, Line
from rllib_srl.cli.shared.runs import RunError, refuse_used

GIB = 2**30
LEAST_MEMORY, LEAST_DISK = 2 * GIB, 2 * GIB  # free, below which there is a warning
PACKAGE = "rllib_srl"


def of_packages(declared: Sequence[str] | None = None) -> Iterator[Line]:
    """Compare the installed packages with the version ranges that this package declares.

    Args:
        declared: requirements, as in its metadata; None: those of the installed package.
    """
    if declared is None:
        try:
            declared = requires(PACKAGE) or []
        except PackageNotFoundError:
            yield Line(WARNING, "packages", f"{PACKAGE} is not installed, so its versions are not known: pip install .")
            return
    needed = [one for one in map(Requirement, declared) if one.marker is None or one.marker.evaluate({"extra": ""})]
    is_fine = True
    for one in needed:
        try:
            found = version(one.name)
        except PackageNotFoundError:
            is_fine = False
            yield Line(FAILURE, "packages", f"{one.name} is missing; expected {one}: pip install '{one}'")
            continue
        if not one.specifier.contains(found, prereleases=True):
            is_fine = False
            yield Line(WARNING, "packages", f"{one.name} {found}; expected {one.specifier}: pip install '{one}'")
    if is_fine:
        yield Line(OK, "packages", f"all {len(needed)} in the expected versions")


def of_memory() -> Iterator[Line]:
    """Report the free memory."""
    free = psutil.virtual_memory().available
    low = free < LEAST_MEMORY
    yield Line(WARNING if low else OK, "machine", f"{free / GIB:.1f} GiB of memory are free{_at_least(low)}")


def of_build(num_gpus: float | None = None) -> Iterator[Line]:
    """Report a torch that is built for CPUs on a machine whose GPUs Ray declares; a run would take them and fail.

    Args:
        num_gpus: that Ray declares on this machine; None: those it finds when it starts here.
    """
    from rllib_srl.algorithm.resources import build_fault, gpus_ray_finds

    num_gpus = gpus_ray_finds() if num_gpus is None else num_gpus
    if line := build_fault(num_gpus):
        yield Line(FAILURE, "GPUs", line)
    elif num_gpus:
        yield Line(OK, "GPUs", f"{num_gpus:g} that Ray declares, and torch {version('torch')} is built for them")


def of_directory(out: Path) -> Iterator[Line]:
    """Check that a new run can be written to a directory, by writing a file beside it."""
    try:
        refuse_used(out)
        place = next(one for one in (out, *out.absolute().parents) if one.exists())
        with tempfile.TemporaryDirectory(prefix=".srl-doctor-", dir=place) as scratch:
            (Path(scratch) / "written").write_bytes(b"\0" * 4096)
        free = shutil.disk_usage(place).free
    except RunError as error:
        yield Line(FAILURE, "directory", str(error))
        return
    except OSError as error:
        yield Line(FAILURE, "directory", f"--out {out} cannot be written: {error.strerror}; expected another directory")
        return
    low = free < LEAST_DISK
    yield Line(WARNING if low else OK, "directory", f"{out} can be written, {free / GIB:.0f} GiB free{_at_least(low)}")


def _at_least(is_low: bool) -> str:
    return f"; expected at least {LEAST_DISK / GIB:.0f} GiB" if is_low else ""
