"""On what a run runs."""

import ctypes
import platform

import pytest

from maskconnect.training.options import keep_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_glibc_can_be_told_to_keep_memory():
    assert keep_memory()


def test_another_c_library_is_left_alone(monkeypatch):
    def without(name):
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", without)
    assert keep_memory() is False
