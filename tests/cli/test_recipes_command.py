import json
import subprocess
import sys

import pytest

from maskconnect.cli.main import main
from maskconnect.recipes import load, names
from maskconnect.recipes.load import HOME

MINE = """
base = "paper/cifar100-resnet38-learned"
[variant.learned]
[variant.short]
phase.freeze.epochs = 1
model.connectivity = "prev"
[variant.wired]
model.depth = 8
model.connectivity = [[], [0], [0, 1]]
[variant.broken]
model.fanin = 4
[variant.never]
"""


def run(capsys, *argv):
    """The exit code, what was printed, and what was complained of."""
    code = main([str(word) for word in argv])
    return code, *capsys.readouterr()


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return path


def test_the_list_has_a_line_for_every_recipe_with_the_accuracy_of_the_paper(capsys):
    code, printed, _ = run(capsys, "recipes")
    title, *lines = printed.splitlines()
    assert code == 0
    assert title.split() == ["name", "what", "it", "is", "epochs", "paper,", "%", "where"]
    assert [line.split()[0] for line in lines] == list(names())
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    about = "CIFAR-100, ResNet-38, learned connectivity, K=10"
    assert found["paper/cifar100-resnet38-learned"] == f"{about} 80 70.40 table 1"
    assert found["paper/cifar100-resnext29-4-8-learned-k1"].endswith(", K=1 320 figure 5")
    assert found["quick/digits-prev"] == f"Digits, ResNet-20, Fixed-Prev {load('quick/digits-prev').epochs}"
    assert printed == "\n".join(line.rstrip() for line in printed.splitlines()) + "\n"


def test_a_narrow_terminal_has_whole_names(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    code, printed, _ = run(capsys, "recipes")
    assert code == 0
    assert max(map(len, printed.splitlines())) <= 80
    assert set(names()) <= set(printed.split())


def test_the_list_as_json_has_all_numbers_of_the_paper(capsys):
    code, printed, _ = run(capsys, "recipes", "--json")
    found = {entry["name"]: entry for entry in json.loads(printed)}
    assert code == 0
    assert list(found) == list(names())
    assert found["quick/digits"]["paper"] is None
    assert found["paper/cifar100-resnext29-8-8-learned-k1"] == {
        "name": "paper/cifar100-resnext29-8-8-learned-k1",
        "about": "CIFAR-100, ResNeXt {29,8,8}, learned connectivity, K=1",
        "data": "cifar100",
        "epochs": 320,
        "paper": {
            **{"where": "table 2", "accuracy": 73.91, "top5": None, "mean": 73.76, "std": 0.14},
            **{"parameters": 0.86, "pruned": 0.65},
        },
    }


def test_show_prints_what_loads_as_the_same_recipe(capsys, tmp_path):
    code, printed, _ = run(capsys, "recipes", "show", "paper/mini-resnext20-4-8-full")
    (tmp_path / "shown.toml").write_text(printed)
    assert code == 0
    assert load(str(tmp_path / "shown.toml")) == load("paper/mini-resnext20-4-8-full")
    assert "# maskconnect train paper/mini-resnext20-4-8-full\n" in printed


def test_show_lays_settings_over_the_recipe_and_names_them_in_the_command(capsys, tmp_path):
    settings = ["phase.learn.epochs=2", "about=two words"]
    flags = [word for setting in settings for word in ("--set", setting)]
    code, printed, _ = run(capsys, "recipes", "show", "quick/digits", *flags)
    (tmp_path / "shown.toml").write_text(printed)
    assert code == 0
    assert load(str(tmp_path / "shown.toml")) == load("quick/digits", settings)
    command = "maskconnect train quick/digits --set phase.learn.epochs=2 --set 'about=two words'"
    assert printed.startswith(f"# two words; changed: phase.learn.epochs=2\n# {command}\n\n")


def test_show_of_a_file_names_the_file_in_the_command(capsys, mine):
    code, printed, _ = run(capsys, "recipes", "show", f"{mine}:short")
    assert code == 0
    assert f"# maskconnect train {mine}:short\n" in printed


def test_check_has_a_line_for_each_recipe_and_stops_at_the_first_wrong_one(capsys, mine):
    code, printed, complaint = run(capsys, "recipes", "check", mine)
    assert code == 2
    assert printed.splitlines() == [
        f"ok  {mine}:learned: ResNet-38, learned K=10, 80 epochs of cifar100",
        f"ok  {mine}:short: ResNet-38, prev, 51 epochs of cifar100",
        f"ok  {mine}:wired: ResNet-8, explicit wiring, 80 epochs of cifar100",
    ]
    assert complaint == f"error: {mine}:broken: unknown field `model.fanin`; did you mean `model.fan_in`?\n"


def test_check_takes_several_files(capsys):
    files = [HOME / "paper" / f"imagenet-{name}.toml" for name in ("resnet", "resnext")]
    code, printed, _ = run(capsys, "recipes", "check", *files)
    lines = printed.splitlines()
    assert (code, len(lines)) == (0, 8)
    assert lines[1] == f"ok  {files[0]}:imagenet-resnet50-learned: ResNet-50, learned K=10, 120 epochs of imagenet"
    assert (
        lines[6] == f"ok  {files[1]}:imagenet-resnext101-4-64-full: ResNeXt {{101,4,64}}, full, 120 epochs of imagenet"
    )


def test_check_takes_the_name_of_one_recipe(capsys, mine):
    code, printed, _ = run(capsys, "recipes", "check", "quick/digits-prev", f"{mine}:never")
    assert (code, [line.split(":")[-2] for line in printed.splitlines()]) == (0, ["ok  quick/digits-prev", "never"])


def test_one_epoch_is_not_plural(capsys, tmp_path):
    path = tmp_path / "one.toml"
    path.write_text(
        "base = 'paper/cifar100-resnet38-learned'\n[[phase]]\nname = 'all'\nepochs = 1\nlr = 0.1\nmask_lr = 0.3\n"
    )
    assert run(capsys, "recipes", "check", path)[1] == f"ok  {path}: ResNet-38, learned K=10, 1 epoch of cifar100\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipes", "shw"], "the command is 'shw'; it must be one of show, check. Did you mean 'show'?"),
        (["recipes", "show", "digits"], "Did you mean 'quick/digits'?"),
        (["recipes", "show", "quick/digits", "--set", "model.fanin=4"], "did you mean `model.fan_in`?"),
        (
            ["recipes", "show", "quick/digits", "--set", "seed"],
            "seed is not a setting; write FIELD=VALUE, such as model.fan_in=4.",
        ),
        (["recipes", "check", "none.toml"], "none.toml cannot be read: No such file or directory. "),
        (
            ["recipes", "check", "none.tml"],
            "the recipe is 'none.tml'; it must be one that `maskconnect recipes` lists, or ",
        ),
        (["recipes", "show"], "missing: NAME; see: maskconnect recipes show --help"),
        (["recipes", "check"], "missing: FILE; see: maskconnect recipes check --help"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(capsys, words, said):
    code, printed, complaint = run(capsys, *words)
    assert (code, printed) == (2, "")
    assert complaint.startswith("error: ")
    assert complaint.count("\n") == 1
    assert said in complaint


@pytest.mark.parametrize("verb", [[], ["show"], ["check"]])
def test_help_has_an_example_that_runs(capsys, verb, monkeypatch, mine):
    code, printed, _ = run(capsys, "recipes", *verb, "--help")
    assert code == 0
    examples = [line.split()[1:] for line in printed.splitlines() if line.startswith("  maskconnect recipes")]
    assert examples
    mine.write_text(MINE.replace("fanin", "fan_in"))
    monkeypatch.chdir(mine.parent)
    assert all(main(words) == 0 for words in examples)


def test_the_command_line_loads_no_recipe_before_one_is_asked_for():
    code = "import sys; from maskconnect.cli import recipes; assert 'maskconnect.recipes' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_recipe_cannot_fake_lines_or_move_the_cursor(type_in, tmp_path):
    text = 'base = "quick/digits"\n[variant."x\\n\\u001b[2Jok  safe"]\nabout = "a\\u009b\\nb"\n'
    (tmp_path / "hostile.toml").write_text(text)
    code, said, errors = type_in("recipes", "check", "hostile.toml")
    assert (code, errors, len(said.splitlines())) == (0, "", 1)
    assert said.startswith("ok  hostile.toml:x\\n\\x1b[2Jok  safe: ")
