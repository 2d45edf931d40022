"""The command itself: quick where nothing is to be computed, and interrupted at any moment."""

import os
import signal
import subprocess
import sys
import time

SLOW_TORCH = """
import pathlib, time
pathlib.Path("loading").touch()
try:
    time.sleep(60)
except BaseException:
    raise ImportError("cannot load module more than once per process") from None
"""


def test_help_and_mistakes_do_not_wait_for_torch():
    code = """
import sys
from maskconnect.cli.main import main
assert main(["--help"]) == main(["prune", "--help"]) == main(["--version"]) == 0
assert main(["prnue"]) == 2
assert main(["train", "quick/digits", "--thraeds", "2"]) == main(["train", "quick/digits", "--epochs", "2"]) == 2
assert main([]) == 0
heavy = {"torch", "numpy", "rich", "maskconnect.core"} & sys.modules.keys()
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_command_alone_prints_its_help(type_in):
    code, said, errors = type_in()
    assert (code, errors) == (0, "")
    assert said == type_in("--help")[1]


def test_a_public_name_is_found_and_listed_before_it_is_used():
    code = """
import sys, maskconnect as mc
assert set(mc.__all__) <= set(dir(mc))
assert "torch" not in sys.modules
from maskconnect import prune, save
assert mc.prune is prune
assert all(getattr(mc, name).__name__ == name for name in mc.__all__)
assert not hasattr(mc, "nothing")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ctrl_c_while_torch_is_being_loaded_is_one_word(tmp_path):
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-m", "maskconnect", "train", "quick/digits"]
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # the tests may ignore it
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "loading").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, ("", "interrupted\n"))
