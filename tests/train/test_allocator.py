"""Freed memory is reused."""

import ctypes
import resource

import pytest

from tests.support.processes import python

PROGRAM = """
import ctypes, resource, sys
from train.cli.command import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = ctypes.c_void_p(libc.malloc(2**27))
    ctypes.memset(block, 1, 2**27)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    return int(python("-c", PROGRAM, how).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_kept():
    """The third time 128 MiB are allocated and written, no new page is requested; by default all of them are."""
    pages = 2**27 // resource.getpagesize()
    assert faults("keep") < pages / 100
    assert faults("leave") > pages / 2
