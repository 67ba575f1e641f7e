"""What the C library does with the memory of tensors (`numerics.keep_memory`), each time in a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
PAGES = 64 * 2**20 // os.sysconf("SC_PAGE_SIZE")  # of one tensor
CODE = """
import ctypes, resource, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # small pages alone (PR_SET_THP_DISABLE), so that they can be counted
from visard.numerics import on_device
on_device(torch.nn.Linear(2, 2))
for _ in range(10):
    torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(code: str = CODE, **variables: str) -> int:
    """Pages that the system has to map for ten tensors of 64 MB, one after the other."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=rest | variables, capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


@glibc
def test_memory_stays_with_the_process() -> None:
    assert faults() < PAGES


@glibc
def test_what_the_user_has_set_stays() -> None:
    assert faults(MALLOC_MMAP_THRESHOLD_="131072") >= 5 * PAGES
    assert faults(GLIBC_TUNABLES="glibc.malloc.mmap_threshold=131072") >= 5 * PAGES


# Blocks of the C library itself: beside those of a tensor torch takes small ones, and one that is left above a block
# keeps it from going back.
BLOCKS = """
import ctypes, resource, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
from visard.numerics import give_back_memory, on_device
on_device(torch.nn.Linear(2, 2))
assert give_back_memory(MEGABYTES * 2**20)
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.memset.argtypes, library.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
for turn in range(11):
    if turn == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = library.malloc(2**26)
    library.memset(block, 1, 2**26)
    library.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@glibc
def test_a_process_with_a_large_network_gives_memory_back() -> None:
    assert faults(BLOCKS.replace("MEGABYTES", "32")) >= 5 * PAGES
    assert faults(BLOCKS.replace("MEGABYTES", "80")) < PAGES, "but for what it may keep"
