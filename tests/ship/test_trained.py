"""The network of a run, from its files, where the images that it was trained on are gone."""

import json
import shutil

import pytest
import runs
import torch
from safetensors.torch import load_file, save_file

from maskconnect.core.lookup import wiring_of
from maskconnect.errors import CheckpointError, ConfigError, MaskConnectError
from maskconnect.ship.trained import from_run, open_folder
from maskconnect.training import images
from maskconnect.training.loading import load_run
from maskconnect.training.options import Options


@pytest.fixture
def run(learned, tmp_path):
    """A copy of a run, to be damaged."""
    return shutil.copytree(learned, tmp_path / "run")


def test_the_network_of_a_run_comes_without_its_images(learned, monkeypatch):
    expected, prepared, _ = load_run(learned, Options())
    x, _ = next(iter(prepared.test.epoch(0)))
    monkeypatch.setattr(images, "load", None)  # by which data sets are read
    found = from_run(learned)
    assert found.kind == "frozen"
    assert not found.network.training
    assert found.classes == tuple("0123456789")
    with torch.inference_mode():
        torch.testing.assert_close(found.network(x), expected(x), rtol=0, atol=0)
    assert wiring_of(found.network) == json.loads((learned / "wiring.json").read_text())


def test_its_preprocessing_is_that_of_the_run(learned):
    found = from_run(learned).preprocessing
    assert found.describe() == {
        **{"channels": 1, "raw": [8, 8], "test_shorter": None, "shrink": 1, "size": 8, "std": None},
    }
    torch.testing.assert_close(found.mean, load_file(learned / "final/input.safetensors")["mean"], rtol=0, atol=0)


def test_random_numbers_continue_as_if_nothing_had_been_loaded(learned):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    from_run(learned)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


PARTS = (
    *("recipe.toml", "summary.json", "data.json"),
    *("final/model.safetensors", "final/input.safetensors", "final/classes.json"),
)


@pytest.mark.parametrize("name", PARTS)
def test_a_missing_file_is_named(name, run):
    (run / name).unlink()
    with pytest.raises(MaskConnectError) as caught:
        from_run(run)
    assert name.split("/")[-1] in str(caught.value) or "has not finished" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["final/model.safetensors", "final/input.safetensors"])
def test_a_flipped_bit_is_noticed(name, run):
    content = bytearray((run / name).read_bytes())
    content[len(content) // 2] ^= 1
    (run / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        from_run(run)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ('{"a": 1}', "it must be a list of names"),
        ("[]", "it must be a list of names"),
        ("[1, 2]", "it must be a list of names"),
        (json.dumps(list("1123456789")), "name different classes"),
    ],
)
def test_classes_that_cannot_be_those_of_the_run_are_an_error(content, message, run):
    (run / "final/classes.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        from_run(run)


@pytest.mark.parametrize("mean", [torch.zeros(2, 8, 8), torch.zeros(1, 7, 7)])
def test_a_mean_that_does_not_fit_the_recipe_is_an_error(mean, run):
    save_file({"mean": mean}, run / "final/input.safetensors")
    with pytest.raises(CheckpointError, match=r"input\.safetensors does not fit the recipe"):
        from_run(run)


def test_an_input_without_a_mean_is_an_error(run):
    save_file({"average": torch.zeros(1)}, run / "final/input.safetensors")
    with pytest.raises(CheckpointError, match="does not contain a mean"):
        from_run(run)


def test_weights_of_another_network_are_an_error(run):
    save_file({"weight": torch.zeros(1)}, run / "final/model.safetensors")
    with pytest.raises(CheckpointError, match="does not fit the recipe"):
        from_run(run)


def test_a_folder_with_a_recipe_is_opened_as_a_run(learned):
    assert open_folder(learned).classes == tuple("0123456789")


def test_what_is_not_a_folder_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="nothing does not exist"):
        open_folder(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is not a folder"):
        open_folder(tmp_path / "file")


def test_a_run_of_fixed_wiring_and_another_seed_is_loaded_too(tmp_path):
    short = [f"phase.{name}.epochs=1" for name in ("learn", "freeze")]
    recipe = runs.tiny(tmp_path, *short, "model.connectivity=random", "data.shrink=2", "augmentation.size=4", seed=3)
    runs.run(recipe, tmp_path / "run")
    expected, prepared, _ = load_run(tmp_path / "run", Options())
    found = from_run(tmp_path / "run")
    assert (found.preprocessing.raw, found.preprocessing.shrink) == ((8, 8), 2)
    x, _ = next(iter(prepared.test.epoch(0)))
    with torch.inference_mode():
        torch.testing.assert_close(found.network(x), expected(x), rtol=0, atol=0)
