"""On what a run runs."""

import ctypes
import platform
import subprocess
import sys

import pytest

from maskconnect.training.options import keep_memory

FAULTS = """
import resource, torch
from maskconnect.training.options import keep_memory
if {keep}: keep_memory()
def step():
    for _ in range(20): torch.ones(2**21).add(1)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_was_freed_is_used_again():
    faults = [
        int(subprocess.run([sys.executable, "-c", FAULTS.format(keep=keep)], capture_output=True, check=True).stdout)
        for keep in (False, True)
    ]
    assert faults[1] < faults[0] / 10


def test_another_c_library_is_left_alone(monkeypatch):
    def without(name):
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", without)
    assert keep_memory() is False
