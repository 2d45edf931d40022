"""`maskconnect export`: the same network for programs that know nothing of maskconnect."""

import json
import re
import sys
from pathlib import Path

import pytest
import runs
import torch
from torch import nn

import maskconnect as mc
from maskconnect.core.count import pruned_parameters
from maskconnect.errors import CheckpointError, ConfigError, ConnectivityError, MaskConnectError
from maskconnect.ship import checked, export, saved
from maskconnect.ship.export import export_onnx, export_pt2, preprocessing_of
from maskconnect.ship.preprocessing import Preprocessing
from maskconnect.ship.trained import from_run

CLASSES = ("ant", "bee", "süß")
MEAN = Preprocessing(channels=3, raw=(12, 12), size=8, mean=torch.rand(3, 12, 12), std=(0.1, 0.2, 1 / 3))
EXAMPLE = torch.zeros(1, 3, 8, 8)


@pytest.fixture
def network():
    """A network whose batch norm has seen something."""
    made = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        *(nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
    )
    made(3 * torch.randn(16, 3, 8, 8) + 1)
    return made.eval()


def run_onnx(path, x):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": x.numpy()})[0])


def run_pt2(path, x):
    return torch.export.load(path).module()(x)


FORMS = pytest.mark.parametrize(("write", "run"), [(export_onnx, run_onnx), (export_pt2, run_pt2)])


@FORMS
@torch.no_grad()
def test_the_file_computes_what_the_network_does_for_any_number_of_images(write, run, network, tmp_path):
    apart = write(network, EXAMPLE, tmp_path / "a.file")
    assert 0 <= apart < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["a.file"]
    for count in (1, 2, 3, 64):
        x = torch.randn(count, 3, 8, 8)
        torch.testing.assert_close(run(tmp_path / "a.file", x), network(x), rtol=1e-5, atol=1e-5)


@FORMS
def test_a_network_in_training_mode_is_exported_in_eval_mode_and_stays_as_it_was(write, run, network, tmp_path):
    x = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        expected = network(x)
    before = {name: value.clone() for name, value in network.train().state_dict().items()}
    write(network, EXAMPLE, tmp_path / "a.pt2")
    assert all(part.training for part in network.modules())
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(run(tmp_path / "a.pt2", x), expected, rtol=1e-5, atol=1e-5)


def test_an_onnx_file_has_names_a_free_batch_and_no_traces_of_this_machine(network, tmp_path):
    import onnx

    export_onnx(network, EXAMPLE, tmp_path / "a.onnx")
    model = onnx.load(tmp_path / "a.onnx")
    onnx.checker.check_model(model, full_check=True)
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    assert shapes == {"images": ["batch", 3, 8, 8], "scores": ["batch", 3]}
    assert not model.metadata_props  # nothing is known of this network
    assert b"site-packages" not in (tmp_path / "a.onnx").read_bytes()


def test_the_same_network_gives_the_same_onnx_file(network, tmp_path):
    for name in ("a", "b"):
        export_onnx(network, EXAMPLE, tmp_path / name, classes=CLASSES, preprocessing=MEAN)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def onnx_metadata(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.get_modelmeta().custom_metadata_map


def pt2_metadata(path):
    found = {"classes.json": "", "preprocessing.json": ""}
    torch.export.load(path, extra_files=found)
    return {name.removesuffix(".json"): text for name, text in found.items()}


@pytest.mark.parametrize(("write", "read"), [(export_onnx, onnx_metadata), (export_pt2, pt2_metadata)])
def test_classes_and_preprocessing_are_in_the_file(write, read, network, tmp_path):
    write(network, EXAMPLE, tmp_path / "a.pt2", classes=CLASSES, preprocessing=MEAN)
    found = read(tmp_path / "a.pt2")
    assert json.loads(found["classes"]) == list(CLASSES)
    described = json.loads(found["preprocessing"])
    mean = torch.tensor(described.pop("mean"))
    torch.testing.assert_close(mean, MEAN.mean, rtol=0, atol=0)
    assert described == MEAN.describe()
    again = preprocessing_of(found["preprocessing"])
    assert again.describe() == MEAN.describe()
    torch.testing.assert_close(again.mean, MEAN.mean, rtol=0, atol=0)


@FORMS
def test_a_file_that_is_there_is_replaced_only_if_that_was_asked_for(write, run, network, tmp_path):
    place = tmp_path / "a.pt2"
    place.write_text("precious")
    with pytest.raises(ConfigError, match=r"a\.pt2 exists; .* --overwrite"):
        write(network, EXAMPLE, place)
    assert place.read_text() == "precious"
    write(network, EXAMPLE, place, overwrite=True)
    assert run(place, torch.zeros(1, 3, 8, 8)).shape == (1, 3)


@FORMS
def test_a_file_that_computes_something_else_is_not_left_behind(write, run, network, tmp_path, monkeypatch):
    (tmp_path / "a.pt2").write_text("precious")
    for runner in ("_onnx_runner", "_pt2_runner"):
        monkeypatch.setattr(export, runner, lambda path: lambda x: 1.001 * network(x))
    with pytest.raises(MaskConnectError, match=r"differs from this one by 1.0e-03 of the largest output"):
        write(network, EXAMPLE, tmp_path / "a.pt2", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt2"]
    assert (tmp_path / "a.pt2").read_text() == "precious"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_file_that_computes_no_numbers_is_not_left_behind(wrong, network, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_pt2_runner", lambda path: lambda x: wrong * network(x))
    with pytest.raises(MaskConnectError, match="differs"):
        export_pt2(network, EXAMPLE, tmp_path / "a.pt2")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_run_is_not_left_behind(network, tmp_path, monkeypatch):
    def fail(path):
        raise RuntimeError("no such operator.\nand more")

    monkeypatch.setattr(export, "_pt2_runner", fail)
    message = "the exported file cannot be run and was discarded: no such operator. Try the other format"
    with pytest.raises(MaskConnectError, match=rf"^{message} \(ONNX or torch\.export\)\.$"):
        export_pt2(network, EXAMPLE, tmp_path / "a.pt2")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_is_one_sentence(network, tmp_path, monkeypatch):
    def full(path, content):
        path.write_bytes(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checked, "write_atomically", full)
    with pytest.raises(CheckpointError, match=r"a\.pt2 cannot be written: No space left on device"):
        export_pt2(network, EXAMPLE, tmp_path / "a.pt2")
    assert not list(tmp_path.iterdir())


def test_a_network_that_is_random_is_not_exported(tmp_path):
    class Noisy(nn.Module):
        def forward(self, x):
            return x.flatten(1) + torch.rand_like(x.flatten(1))

    with pytest.raises(MaskConnectError, match="perhaps the network is random"):
        export_pt2(Noisy(), EXAMPLE, tmp_path / "a.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, about how it reads Python
@FORMS
def test_a_network_that_cannot_be_exported_is_one_sentence(write, run, tmp_path):
    class Choosy(nn.Module):
        def forward(self, x):
            return x.flatten(1) if x.sum() > 0 else -x.flatten(1)

    with pytest.raises(MaskConnectError, match="cannot be exported") as caught:
        write(Choosy(), EXAMPLE, tmp_path / "a.pt2")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_images_that_the_network_cannot_read_are_an_error(network, tmp_path):
    with pytest.raises(ConfigError, match="cannot read images of 1x4x8x8"):
        export_pt2(network, torch.zeros(1, 4, 8, 8), tmp_path / "a.pt2")


def test_a_network_that_returns_no_tensor_is_an_error(tmp_path):
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(ConfigError, match="returns a tuple"):
        export_pt2(Pair(), EXAMPLE, tmp_path / "a.pt2")


def test_places_where_no_file_can_be_are_an_error(network, tmp_path):
    with pytest.raises(ConfigError, match="is a folder; pass a file in it"):
        export_pt2(network, EXAMPLE, tmp_path, overwrite=True)
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        export_pt2(network, EXAMPLE, tmp_path / "nowhere/a.pt2")


@pytest.mark.parametrize("module", ["onnx", "onnxscript", "onnxruntime"])
def test_without_onnx_the_error_says_what_to_install(module, network, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MaskConnectError, match=rf"{module} is not installed; run: pip install 'maskconnect\[export\]'"):
        export_onnx(network, EXAMPLE, tmp_path / "a.onnx")


def test_a_network_too_large_for_onnx_names_pt2(network, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "LARGEST", 100)
    with pytest.raises(ConfigError, match=r"too large for an ONNX file.* --pt2"):
        export_onnx(network, EXAMPLE, tmp_path / "a.onnx")
    export_pt2(network, EXAMPLE, tmp_path / "a.pt2")


@FORMS
def test_a_network_that_is_still_learning_is_refused(write, run, tmp_path):
    model = mc.resnet(depth=14, fan_in=2, num_classes=3)
    with pytest.raises(ConnectivityError, match=r"still being learned; freeze it first with mc\.freeze\(model\)"):
        write(model, EXAMPLE, tmp_path / "a.pt2")


@FORMS
@torch.no_grad()
def test_a_frozen_network_is_pruned_first(write, run, tmp_path):
    model = mc.resnet(depth=20, fan_in=1, num_classes=3, connectivity="random", seed=1).eval()
    counts = pruned_parameters(model)
    assert counts.transitive < 0.9 * counts.weights
    assert write(model, EXAMPLE, tmp_path / "a.pt2") < 1e-5
    assert (tmp_path / "a.pt2").stat().st_size < 4 * counts.weights
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(run(tmp_path / "a.pt2", x), model(x), rtol=1e-4, atol=1e-5)


def test_the_command_writes_both_and_says_what_came_of_it_and_no_more(learned, tmp_path, monkeypatch):
    """In a process of its own: much of what exporters have to say they say once."""
    monkeypatch.chdir(tmp_path)
    process = runs.command("export", learned, "--onnx", "a.onnx", "--pt2", "a.pt2")
    said, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    onnx, pt2, pruned = said.splitlines()
    for name, line in (("a.onnx", onnx), ("a.pt2", pt2)):
        size = (tmp_path / name).stat().st_size / 1e6
        assert line.startswith(f"{name}   {size:.2f} MB   images Nx1x8x8   differs from torch by ")
        assert float(re.search(r"by (\S+) of", line)[1]) < 1e-5
    assert pruned.startswith("the network was frozen, not pruned")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "a.pt2"]
    assert json.loads(onnx_metadata("a.onnx")["classes"]) == list("0123456789")
    of_run = from_run(learned)
    x = torch.randn(6, 1, 8, 8)
    with torch.no_grad():
        for found in (run_onnx("a.onnx", x), run_pt2("a.pt2", x)):
            torch.testing.assert_close(found, of_run.network(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no output file is given; add --onnx FILE, --pt2 FILE, or both"),
        (("--pt2", "there"), "there exists"),
        (("--pt2", "a.pt2", "--input", "3x8"), "--input is '3x8'; it must be channels, height and width"),
        (("--pt2", "a.pt2", "--input", "0x8x8"), "--input is '0x8x8'"),
        (("--pt2", "a.pt2", "--input", "3x8x8"), "the network cannot read images of 2x3x8x8"),
    ],
)
def test_what_cannot_be_exported_so_is_one_sentence(words, message, type_in, learned, tmp_path):
    (tmp_path / "there").touch()
    code, said, errors = type_in("export", learned, *words)
    assert (code, said, errors.count("\n")) == (2, "", 1)
    assert message in errors
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_saved_network_without_preprocessing_needs_the_shape_of_its_input(type_in, learned, tmp_path):
    saved.save(from_run(learned).network, tmp_path / "saved")
    code, _, errors = type_in("export", "saved", "--pt2", "a.pt2")
    assert code == 2
    assert "add it, such as --input 3x32x32" in errors
    assert type_in("export", "saved", "--pt2", "a.pt2", "--input", "1x8x8")[0] == 0
    assert Path("a.pt2").exists()


def test_a_saved_network_that_is_pruned_is_exported_as_it_is(type_in, learned, tmp_path):
    of_run = from_run(learned)
    pruned = mc.prune(of_run.network, torch.zeros(1, 1, 8, 8))
    saved.save(pruned, tmp_path / "saved", classes=of_run.classes, preprocessing=of_run.preprocessing)
    code, said, errors = type_in("export", "saved", "--onnx", "a.onnx")
    assert (code, said.count("\n"), errors) == (0, 1, "")
    x = torch.randn(4, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(run_onnx("a.onnx", x), of_run.network(x), rtol=1e-4, atol=1e-5)
    assert preprocessing_of(onnx_metadata("a.onnx")["preprocessing"]).describe() == of_run.preprocessing.describe()


def test_help_of_export_has_examples(type_in):
    code, said, _ = type_in("export", "--help")
    assert code == 0
    assert "maskconnect export saved --pt2 network.pt2" in said


def test_what_is_exported_is_not_written_over(learned, type_in, tmp_path):
    found = from_run(learned)
    mc.save(found.network, tmp_path / "saved", classes=found.classes, preprocessing=found.preprocessing)
    target = tmp_path / "saved" / "model.safetensors"
    before = target.read_bytes()
    code, _, errors = type_in("export", tmp_path / "saved", "--onnx", target, "--overwrite")
    assert (code, "is a file of the network to export" in errors) == (2, True)
    assert target.read_bytes() == before


def test_two_forms_need_two_files(learned, type_in, tmp_path):
    code, _, errors = type_in("export", learned, "--onnx", "a", "--pt2", tmp_path / "a", "--overwrite")
    assert (code, "both name a" in errors) == (2, True)
    assert not (tmp_path / "a").exists()
