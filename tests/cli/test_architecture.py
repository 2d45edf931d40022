"""`maskconnect train` of unlike branches ends with the architecture that was found."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import runs
import torch

import maskconnect as mc
from maskconnect.cli import architecture
from maskconnect.cli.architecture import layers_of, names_of, readable, reading_of, show_architecture
from maskconnect.core.wiring import Layout
from maskconnect.pruning.prune import pruned_parameters
from maskconnect.report.wires import fixed_wires
from maskconnect.ship.trained import from_run

TRAIN = ("train", "tiny.toml", "--threads", "1", "--set", "phase.freeze.epochs=1")
MIXED = [word for setting in runs.MIXED for word in ("--set", setting)]


@pytest.fixture(scope="session")
def mixed(tmp_path_factory):
    """A finished run of unlike branches."""
    place = tmp_path_factory.mktemp("mixed")
    runs.run(runs.tiny(place, *runs.MIXED, "phase.freeze.epochs=1"), place / "run")
    return place / "run"


def small():
    """Layers of a, b, a; of c, d; and of e. Of the first the last two are unused, of the second the first."""
    layout = Layout((3, 2, 1), layered=True)
    return fixed_wires(layout, ((), (), (), (1, 2), (0,), (4,)), ("a", "b", "a", "c", "d", "e"))


def test_kept_and_removed_branches_are_listed_by_layer_and_kept_ones_say_what_they_read():
    assert names_of(small()) == ["a (0)", "b", "a (2)", "c", "d", "e"]
    assert list(layers_of(small())) == [("0", "a (0)", "b, a (2)"), ("1", "d", "c"), ("2", "e", "")]
    assert list(reading_of(small())) == [
        "layer 0  a (0)  reads the stem",
        "layer 1  d      reads a (0)",
        "layer 2  e      reads d",
    ]


def test_a_run_of_unlike_branches_ends_with_its_architecture_and_shows_it_again(type_in, tmp_path):
    runs.tiny(tmp_path)
    code, said, errors = type_in(*TRAIN, *MIXED)
    assert (code, errors) == (0, "")
    out = Path("runs/tiny-seed0")
    network, wiring = from_run(out).network, json.loads((out / "wiring.json").read_text())
    kinds, alive = ("conv3x3", "maxpool3x3", "identity", "globalmean"), network.stack.masks.current_wiring().alive
    end = said[said.index("The architecture:") :]
    for layer in (0, 1):
        kept, removed = (
            ", ".join(kind for branch, kind in enumerate(kinds) if alive[4 * layer + branch] is on)
            for on in (True, False)
        )
        assert re.search(rf"^{layer} +{kept} +{removed}$".replace(" +$", "$"), end, re.MULTILINE)
    read = " + ".join(kinds[branch] for branch in wiring[2][0])
    assert re.search(rf"^layer 2  conv3x3 +reads {re.escape(read)}$", end, re.MULTILINE)
    assert len(re.findall(r"^layer \d  ", end, re.MULTILINE)) == sum(alive)
    counts = pruned_parameters(network)
    assert f"9 blocks -> {sum(alive)}, {counts.weights:,} parameters -> {counts.transitive:,}." in end
    assert "bitwise identical" in end
    assert "def forward(self, x):" in end
    assert end.splitlines()[-1] == "picture: runs/tiny-seed0/wiring.svg"
    assert (out / "wiring.svg").read_text() == mc.draw(network).svg
    texts = {text.text for text in ElementTree.parse(out / "wiring.svg").iter("{http://www.w3.org/2000/svg}text")}
    assert set(kinds) <= texts
    again = type_in(*TRAIN, *MIXED)[1]
    assert again[again.index("The architecture:") :] == end


def test_a_network_of_equal_blocks_shows_none(type_in, tmp_path):
    runs.tiny(tmp_path)
    _, said, _ = type_in(*TRAIN)
    assert "architecture" not in said
    assert not (tmp_path / "runs/tiny-seed0/wiring.svg").exists()


def test_a_picture_that_cannot_be_written_is_reported_and_is_not_a_failure(mixed, tmp_path, capsys, monkeypatch):
    (tmp_path / "wiring.svg").mkdir()
    architecture.write_picture("<svg/>", tmp_path / "wiring.svg")
    assert "no picture: " in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["wiring.svg"], "nothing half-written is left"
    monkeypatch.setattr(architecture, "pruned", lambda saved: 1 / 0)
    show_architecture(mixed)
    assert capsys.readouterr().out.splitlines()[-1] == "the architecture cannot be shown: division by zero"


@pytest.mark.parametrize("how", [{"merge": False}, {"merge": True}, {"fold": True}])
def test_the_code_of_a_pruned_network_names_its_kinds_and_stays_code_when_made_readable(how):
    model = mc.mixed((1, 1), 8, 10, fan_in=2, in_channels=1, kinds=("dilated3x3", "maxpool3x3", "separable5x5"))
    mc.freeze(model)
    slim = mc.prune(model.eval(), torch.randn(1, 1, 8, 8), **how)
    shown = readable(slim.code)
    compile(shown, "slim", "exec")
    kept = {
        module.kind
        for module, on in zip(model.stack.flat(), model.stack.masks.current_wiring().alive, strict=True)
        if on and module.kind != "conv3x3"
    }
    assert kept
    for text in (slim.code, shown):
        assert all(kind in text for kind in kept)
    assert "= None\n" not in shown
    assert "slice(" not in shown
    assert "getattr" not in shown
    assert 'self.stack.blocks["0"]["' in shown


def test_readable_code_loses_nothing_but_deletions_and_getattr():
    code = """


def forward(self, x):
    stem_0 = getattr(self.stem, "0")(x);  x = None
    a = getattr(getattr(self.stack.blocks, "1"), "5").maxpool3x3(stem_0)
    add = a + stem_0;  a = stem_0 = None
    add /= 2;  truediv = add;  add = None
    half = truediv[(slice(None, None, None), slice(None, None, 2))]
    full = f(truediv, axis = None);  truediv = None
    return full
    """
    assert readable(code).splitlines() == [
        "def forward(self, x):",
        '    stem_0 = self.stem["0"](x)',
        '    a = self.stack.blocks["1"]["5"].maxpool3x3(stem_0)',
        "    add = a + stem_0",
        "    add /= 2;  truediv = add",
        "    half = truediv[:, ::2]",
        "    full = f(truediv, axis = None)",
        "    return full",
    ]


def test_a_run_of_unlike_branches_is_pruned_and_compared_with_a_chain_of_the_first(mixed, type_in, tmp_path):
    quick = ["--seconds", "0", "--batches", "1", "--draws", "5", "--threads", "1"]
    code, said, errors = type_in("prune", mixed, "--out", tmp_path / "slim", *quick)
    assert code == 0, errors
    assert "a chain of conv3x3" in said.splitlines()[0]
    report = json.loads((tmp_path / "slim/report.json").read_text())
    network = from_run(mixed).network
    assert report["modules"] == {"frozen": 9, "pruned": sum(network.stack.masks.current_wiring().alive), "plain": 3}
    plain = mc.mixed((1, 1), 4, 10, connectivity="prev", in_channels=1, kinds=("conv3x3", "identity"))
    assert report["parameters"]["plain"] == pruned_parameters(plain).transitive
    assert report["parameters"]["transitive"] == pruned_parameters(network).transitive
    assert type_in("export", tmp_path / "slim", "--pt2", tmp_path / "slim.pt2")[0] == 0
    assert type_in("export", mixed, "--pt2", tmp_path / "whole.pt2")[0] == 0
