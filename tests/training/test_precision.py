import os
import signal
import subprocess

import pytest
import torch
from torch import nn

from maskconnect.errors import ConfigError
from maskconnect.training import precision
from maskconnect.training.precision import PRECISIONS, Precision, probe

ONEDNN = "ONEDNN_MAX_CPU_ISA"
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    monkeypatch.delenv(ONEDNN, raising=False)


@pytest.fixture
def no_child(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a child process was started")

    monkeypatch.setattr(subprocess, "run", refuse)


def one_step(precision):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 4, 5))
    before = [weight.detach().clone() for weight in net.parameters()]
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), precision.scaler()
    with precision.autocast():
        outputs = net(torch.randn(2, 3, 4, 4))
    loss = outputs.float().square().mean()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all((weight != old).any() for weight, old in zip(net.parameters(), before, strict=True))
    return outputs.dtype


@pytest.mark.parametrize(
    ("name", "dtype", "scales"),
    [("fp32", torch.float32, False), ("bf16", torch.bfloat16, False), ("fp16", torch.float16, True)],
)
def test_a_network_computes_in_the_precision_that_was_asked_for(name, dtype, scales):
    try:
        variables = probe(name, "cpu")
    except ConfigError as error:
        pytest.skip(str(error))
    if variables:
        pytest.skip(f"oneDNN may have been used in this process before {variables} could be set")
    chosen = Precision(name, "cpu")
    assert one_step(chosen) == dtype
    assert (chosen.scaler() is not None) == scales
    assert not scales or chosen.scaler().is_enabled()


def test_the_precisions_are_these():
    assert PRECISIONS == ("fp32", "bf16", "fp16", "fp64") == tuple(precision.DTYPES)


def test_fp32_needs_no_child(no_child):
    assert probe("fp32", "cpu") == {}


def test_an_unknown_precision_names_the_nearest(no_child):
    with pytest.raises(ConfigError, match="Did you mean 'bf16'"):
        probe("bf61", "cpu")
    with pytest.raises(ConfigError, match="fp32, bf16, fp16"):
        Precision("double", "cpu")


def test_a_cpu_that_dies_with_amx_gets_the_variable_that_avoids_it(monkeypatch):
    monkeypatch.setattr(precision, "SCRIPT", f"import os\nif {ONEDNN!r} not in os.environ:\n    {DIES}")
    assert probe("bf16", "cpu") == {ONEDNN: "AVX512_CORE_BF16"}
    assert ONEDNN not in os.environ  # setting it is up to the caller


def test_the_variable_overrides_one_with_which_the_child_died(monkeypatch):
    monkeypatch.setenv(ONEDNN, "DEFAULT")
    monkeypatch.setattr(precision, "SCRIPT", f"import os\nif os.environ[{ONEDNN!r}] == 'DEFAULT':\n    {DIES}")
    assert probe("bf16", "cpu") == {ONEDNN: "AVX512_CORE_BF16"}


def test_a_child_that_always_dies_is_an_error_that_names_the_signal(monkeypatch):
    monkeypatch.setattr(precision, "SCRIPT", DIES)
    with pytest.raises(ConfigError) as caught:
        probe("bf16", "cpu")
    assert str(caught.value) == (
        "bf16 does not work on this machine: a small network was killed by SIGILL; use --precision fp32."
    )


def test_a_signal_without_a_name_has_its_number(monkeypatch):
    number = signal.SIGRTMIN + 3
    monkeypatch.setattr(precision, "SCRIPT", f"import os; os.kill(os.getpid(), {number})")
    with pytest.raises(ConfigError, match=f"was killed by signal {number};"):
        probe("fp16", "cpu")


def test_an_error_in_the_child_gives_its_last_line_and_no_second_try(monkeypatch, tmp_path):
    script = f"open({str(tmp_path / 'tries')!r}, 'a').write('x'); raise RuntimeError('first\\nno kernel for this')"
    monkeypatch.setattr(precision, "SCRIPT", script)
    with pytest.raises(ConfigError, match=r"a small network failed \(no kernel for this\); use --precision fp32\.$"):
        probe("fp16", "cpu")
    assert (tmp_path / "tries").read_text() == "x"


def test_an_exit_without_a_word_gives_its_code(monkeypatch):
    monkeypatch.setattr(precision, "SCRIPT", "import sys; sys.exit(3)")
    with pytest.raises(ConfigError, match=r"failed \(exit code 3\)"):
        probe("fp16", "cpu")


def test_a_result_that_is_not_finite_is_an_error(monkeypatch):
    script = precision.SCRIPT.replace("lr=0.1", "lr=float('nan')").replace("dtype=dtype)", "enabled=False)")
    monkeypatch.setattr(precision, "SCRIPT", script)  # without autocast, so that it runs everywhere
    with pytest.raises(ConfigError, match="is not finite"):
        probe("bf16", "cpu")


def test_a_child_that_hangs_is_an_error(monkeypatch):
    monkeypatch.setattr(precision, "SCRIPT", "import time; time.sleep(60)")
    monkeypatch.setattr(precision, "TIMEOUT", 0.5)
    with pytest.raises(ConfigError, match=r"did not finish within 0\.5 s; use --precision fp32"):
        probe("bf16", "cpu")


def test_the_child_does_not_import_from_the_working_folder(monkeypatch, tmp_path):
    (tmp_path / "resource.py").write_text("raise RuntimeError('the wrong file')")
    monkeypatch.setattr(precision, "SCRIPT", "import resource")
    monkeypatch.chdir(tmp_path)
    assert probe("bf16", "cpu") == {}


def test_a_gpu_is_asked_without_a_child(monkeypatch, no_child):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert probe("bf16", "cuda:1") == {}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert probe("fp16", "cuda") == {}
    with pytest.raises(ConfigError, match="the device cuda:1 does not support bf16; use --precision fp16"):
        probe("bf16", "cuda:1")
