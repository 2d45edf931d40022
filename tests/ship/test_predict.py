"""`maskconnect predict`: what pictures in files are taken for."""

import json
import shutil
from pathlib import Path

import pytest
import runs
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from maskconnect.data.small import read_digits
from maskconnect.errors import CheckpointError, ConfigError
from maskconnect.ship import saved
from maskconnect.ship.predict import predict_files
from maskconnect.ship.preprocessing import Preprocessing
from maskconnect.ship.saved import Saved
from maskconnect.ship.trained import from_run
from maskconnect.training import images
from maskconnect.training.folder import RunFolder


@pytest.fixture(scope="session")
def pictures(learned, tmp_path_factory):
    """The test images of the run as PNG files, in order."""
    folder = tmp_path_factory.mktemp("pictures")
    test = images.read(RunFolder(learned).recipe().data, None).test
    paths = [folder / f"{number:02d}.png" for number in range(len(test))]
    for path, image_1HW in zip(paths, test.images, strict=True):
        Image.fromarray(image_1HW[0].numpy()).save(path)
    return paths


@pytest.fixture(scope="session")
def trained_on_files(tmp_path_factory):
    """A finished run on a folder of pictures of many sizes, and the paths of its test images."""
    folder = tmp_path_factory.mktemp("files")
    digits = read_digits().train
    for number in range(60):
        image, label = digits.images[number, 0].numpy(), int(digits.labels[number])
        place = folder / "set" / ("val" if number >= 40 else "train") / f"{label % 3}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).resize((20 + number % 7, 20 + number % 5)).save(place / f"{number}.png")
    recipe = runs.tiny(
        folder,
        *("data.name=folder", "data.train_images=none", "data.test_images=none"),
        *("augmentation.size=16", "augmentation.pad=0", "augmentation.mean=[0.4, 0.5, 0.6]"),
        *("augmentation.std=[0.2, 0.3, 0.4]", "augmentation.shorter=[16, 20]", "augmentation.test_shorter=18"),
        *("phase.learn.epochs=1", "phase.freeze.epochs=1"),
    )
    runs.run(recipe, folder / "run", data=folder / "set")
    names = images.read(recipe.data, folder / "set").test.names
    return folder / "run", [folder / "set" / name for name in names]


def expect_the_runs_own_predictions(run, found):
    """What the run has written down at its end, to the last digit but one."""
    expected = load_file(run / "final/predictions.safetensors")
    assert all(each.problem is None for each in found)
    assert [[rank.number for rank in each.likely] for each in found] == expected["class"].tolist()
    probabilities = torch.tensor([[rank.probability for rank in each.likely] for each in found])
    torch.testing.assert_close(probabilities, expected["probability"], rtol=1e-5, atol=1e-7)


def test_pictures_of_the_test_images_get_the_predictions_of_the_run(learned, pictures):
    expect_the_runs_own_predictions(learned, list(predict_files(from_run(learned), pictures, batch=16)))


def test_the_test_images_of_a_folder_get_the_predictions_of_the_run(trained_on_files):
    run, paths = trained_on_files
    found = list(predict_files(from_run(run), paths))
    expect_the_runs_own_predictions(run, found)
    assert len(found[0].likely) == 3  # there are no more classes
    assert {rank.name for rank in found[0].likely} == {"0", "1", "2"}


def test_the_command_shows_names_and_probabilities(type_in, learned, pictures):
    code, said, errors = type_in("predict", learned, *pictures[:2], "--device", "cpu")
    assert (code, errors) == (0, "")
    lines = said.splitlines()
    expected = load_file(learned / "final/predictions.safetensors")
    assert lines[0] == str(pictures[0])
    assert lines[6] == str(pictures[1])
    for line, number, probability in zip(lines[1:6], expected["class"][0], expected["probability"][0], strict=True):
        name, shown, percent = line.split()
        assert (name, percent) == (str(int(number)), "%")
        assert float(shown) == pytest.approx(100 * float(probability), abs=0.0051)


def test_json_is_a_line_an_image(type_in, learned, pictures):
    code, said, _ = type_in("predict", learned, *pictures[:3], "--json", "--top", "2")
    assert code == 0
    lines = [json.loads(line) for line in said.splitlines()]
    assert [line["image"] for line in lines] == [str(path) for path in pictures[:3]]
    expected = load_file(learned / "final/predictions.safetensors")
    for line, numbers, probabilities in zip(lines, expected["class"], expected["probability"], strict=False):
        assert [each["class"] for each in line["predictions"]] == numbers[:2].tolist()
        assert [each["name"] for each in line["predictions"]] == [str(int(number)) for number in numbers[:2]]
        found = [each["probability"] for each in line["predictions"]]
        assert found == pytest.approx(probabilities[:2].tolist(), rel=1e-5)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_bad_picture_is_named_and_the_others_are_shown(form, type_in, learned, pictures, tmp_path):
    (tmp_path / "bad.png").write_bytes(pictures[0].read_bytes()[:60])
    (tmp_path / "folder").mkdir()
    names = [pictures[0], "bad.png", "folder", "missing.png", pictures[1]]
    code, said, errors = type_in("predict", learned, *names, *form)
    assert code == 2
    bad, folder, missing = errors.splitlines()
    assert bad.startswith("error: bad.png is not a readable JPEG or PNG image")
    assert folder == "error: folder is a folder; pass the images in it, such as folder/*.png"
    assert missing == "error: missing.png does not exist; pass a JPEG or PNG file"
    if form:
        lines = [json.loads(line) for line in said.splitlines()]
        assert [line["image"] for line in lines] == [str(name) for name in names]
        assert ["error" in line for line in lines] == [False, True, True, True, False]
        assert lines[1]["error"] == bad.removeprefix("error: ")
    code, alone, errors = type_in("predict", learned, names[0], names[-1], *form)
    assert (code, errors) == (0, "")
    assert [line for line in said.splitlines() if "error" not in line] == alone.splitlines()


def test_only_bad_pictures_are_an_error_too(type_in, learned):
    code, said, errors = type_in("predict", learned, "a.png", "b.png")
    assert (code, said, errors.count("\n")) == (2, "", 2)


class Counting(nn.Module):
    """Remembers how many pictures came at a time; scores are the first three pixels."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(len(x))
        return 100 * x.flatten(1)[:, :3]


PLAIN = Preprocessing(channels=1, raw=(4, 4), size=4, mean=torch.zeros(1, 1, 1))


@pytest.fixture
def three(tmp_path):
    """Three pictures, of classes 0, 1 and 2 in the eyes of `Counting`."""
    paths = [tmp_path / f"{label}.png" for label in range(3)]
    for label, path in enumerate(paths):
        image = torch.zeros(4, 4, dtype=torch.uint8)
        image[0, label] = 255
        Image.fromarray(image.numpy()).save(path)
    return paths


def test_only_a_batch_of_pictures_is_in_memory_and_the_order_is_kept(three):
    network = Counting()
    paths = (three[k % 3] if k % 5 else Path("missing") for k in range(23))
    found = []
    for each in predict_files(Saved(network=network, kind="frozen", preprocessing=PLAIN), paths, batch=4):
        found.append(each)
        assert sum(network.seen) <= len(found) + 4  # nothing is read long before it is asked for
    assert max(network.seen) == 4
    assert sum(network.seen) == 18
    assert [each.likely[0].number if each.likely else None for each in found] == [
        k % 3 if k % 5 else None for k in range(23)
    ]


def test_without_classes_there_are_numbers(three):
    (found,) = predict_files(Saved(network=Counting(), kind="frozen", preprocessing=PLAIN), three[1:2])
    assert (found.likely[0].number, found.likely[0].name) == (1, None)
    assert found.likely[0].probability == pytest.approx(1.0)


def test_classes_of_another_number_are_an_error(three):
    wrong = Saved(network=Counting(), kind="frozen", classes=("a", "b"), preprocessing=PLAIN)
    with pytest.raises(CheckpointError, match="the network returns 3 scores per image, but its folder names 2 classes"):
        list(predict_files(wrong, three[:1]))


def test_scores_that_are_not_finite_are_an_error(three):
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    nn.init.constant_(network[1].weight, float("nan"))
    with pytest.raises(CheckpointError, match="not finite"):
        list(predict_files(Saved(network=network, kind="frozen", preprocessing=PLAIN), three[:1]))


def test_a_network_in_training_mode_predicts_in_eval_mode_and_stays_as_it_was(three):
    network = nn.Sequential(Counting(), nn.Dropout(0.99))
    found = list(predict_files(Saved(network=network, kind="frozen", preprocessing=PLAIN), three))
    assert [each.likely[0].number for each in found] == [0, 1, 2]
    assert network[1].training


def test_without_preprocessing_the_error_says_what_to_do(three):
    with pytest.raises(ConfigError, match=r"saved without preprocessing.*save it again"):
        predict_files(Saved(network=Counting(), kind="frozen"), three)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--top", "0"), "top is 0; it must be 1 or more"),
        (("--device", "nonsense"), "device is 'nonsense'"),
    ],
)
def test_options_that_cannot_be_meant_are_an_error(words, message, type_in, learned, pictures):
    code, said, errors = type_in("predict", learned, pictures[0], *words)
    assert (code, said, errors.count("\n")) == (2, "", 1)
    assert message in errors


def test_a_run_that_has_not_ended_is_an_error(type_in, learned, pictures, tmp_path):
    run = shutil.copytree(learned, tmp_path / "run")
    (run / "summary.json").unlink()
    code, _, errors = type_in("predict", run, pictures[0])
    assert code == 2
    assert "has not finished" in errors


def test_a_saved_network_predicts_what_its_run_does(type_in, learned, pictures, tmp_path):
    of_run = from_run(learned)
    saved.save(of_run.network, tmp_path / "saved", classes=of_run.classes, preprocessing=of_run.preprocessing)
    words = (*pictures[:3], "--json")
    assert type_in("predict", tmp_path / "saved", *words) == type_in("predict", learned, *words)


def test_a_saved_network_without_classes_shows_numbers(type_in, learned, pictures, tmp_path):
    of_run = from_run(learned)
    saved.save(of_run.network, tmp_path / "saved", preprocessing=of_run.preprocessing)
    code, said, _ = type_in("predict", tmp_path / "saved", pictures[0], "--top", "1")
    number = int(load_file(learned / "final/predictions.safetensors")["class"][0, 0])
    assert code == 0
    assert said.splitlines()[1].split()[:2] == ["class", str(number)]


def test_help_has_examples(type_in):
    code, said, _ = type_in("predict", "--help")
    assert code == 0
    assert "maskconnect predict saved *.jpg --top 1 --json" in said


def test_names_of_classes_cannot_fake_rows_or_move_the_cursor(type_in, learned, pictures, tmp_path):
    names = ["cat\n  dog   99.99 %", "\x1b[2J\x1b[Hgone", "\x9b31mred", "\u202eolleh", *"456789"]
    found = from_run(learned)
    saved.save(found.network, tmp_path / "hostile", classes=names, preprocessing=found.preprocessing)
    picture = tmp_path / "a\nb.png"
    shutil.copy(pictures[0], picture)
    code, said, _ = type_in("predict", tmp_path / "hostile", picture, "--top", "10", "--device", "cpu")
    assert code == 0
    assert len(said.splitlines()) == 11
    assert all(character.isprintable() for character in said.replace("\n", ""))
    assert "cat\\n  dog   99.99 %" in said
    code, said, errors = type_in("predict", tmp_path / "hostile", tmp_path / "gone\n\x1b[2J.png", "--device", "cpu")
    assert (code, len(errors.splitlines())) == (2, 1)
    assert "\x1b" not in errors
