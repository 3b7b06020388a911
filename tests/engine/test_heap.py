"""Freed memory is used again without new pages from the kernel."""

import subprocess
import sys

import pytest

# Blocks of 8 MiB, 200 in all: in the first round the kernel clears 51,200 pages of 4 KiB.
PROGRAM = """
import resource, sys
import torch
from rllib_srl.engine.heap import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
else:  # glibc's own start values, which it raises by itself as memory is freed
    import ctypes
    ctypes.CDLL(None).mallopt(-1, 128 * 1024)
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(2 * 2**20) for _ in range(25)]
    del blocks
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="an option of glibc")
def test_a_second_round_of_allocations_clears_no_pages():
    pages = {}
    for way in ("kept", "returned"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, timeout=120, check=True
        )
        pages[way] = [int(line) for line in done.stdout.split()]
    assert all(rounds[0] > 20_000 for rounds in pages.values()), pages
    assert pages["kept"][2] < 5_000 and pages["returned"][2] > 20_000, pages
