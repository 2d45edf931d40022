"""Networks as files: what is saved comes back, and what is damaged does not."""

import copy
import fcntl
import json
import os
import pickle
import stat
import sys
import time
from functools import partial

import pytest
import runs
import torch
from networks import conv_blocks, mlp_blocks, mlp_layers
from torch import nn

import maskconnect as mc
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.models.groups import GroupedBatchNorm2d, group_norms_
from maskconnect.pruning.prune import difference
from maskconnect.ship import description, saved
from maskconnect.ship.preprocessing import Preprocessing
from maskconnect.training import files

NETWORKS = {
    "resnet": partial(mc.resnet, 14, 7, 2, seed=5),
    "resnet gray": partial(mc.resnet, 8, 7, 2, in_channels=1, mask_init=0.5),
    "resnet imagenet": partial(mc.resnet, 18, 7, 2, stem="imagenet"),
    "resnet mean": partial(mc.resnet, 14, 7, 2, aggregation="mean"),
    "resnet residual": partial(mc.resnet, 14, 7, 2, aggregation="residual"),
    "resnet stream": partial(mc.resnet, 14, 7, 2, aggregation="stream"),
    "resnext": partial(mc.resnext, 11, 4, 4, 7, 2),
    "resnext sum": partial(mc.resnext, 11, 4, 4, 7, 1, norm="sum"),
    "resnext mean": partial(mc.resnext, 11, 4, 4, 7, 2, aggregation="mean", stem="mini"),
}
FORMS = ["learned", "frozen", "random", "pruned", "folded", "unmerged"]


def picture(network, count=3):
    channels = next(p for p in network.parameters() if p.dim() == 4).shape[1]
    like = next(p for p in network.parameters() if p.dim() == 4)
    return torch.randn(count, channels, 64, 64, dtype=like.dtype)


def network(name, form, dtype=torch.float32):
    torch.manual_seed(3)
    options = {"connectivity": "random"} if form == "random" else {}
    model = NETWORKS[name](**options).to(dtype)
    x = picture(model)
    model(x)
    if form != "learned":
        mc.freeze(model)
    if form in ("pruned", "folded", "unmerged"):
        model = mc.prune(model, x, fold=form == "folded", merge=form != "unmerged")
    return model.eval()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_comes_back_bitwise(name, form, tmp_path):
    model = network(name, form)
    mc.save(model, tmp_path / "saved")
    before = torch.get_rng_state()
    loaded = mc.load(tmp_path / "saved")
    assert torch.equal(before, torch.get_rng_state()), "loading draws no random numbers"
    assert not any(part.training for part in loaded.modules())
    x = picture(model)
    assert torch.equal(loaded(x), model(x))
    assert loaded.state_dict().keys() == model.state_dict().keys()
    mc.save(loaded, tmp_path / "again")
    for file in ("maskconnect.json", "model.safetensors"):
        assert (tmp_path / "saved" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


@pytest.mark.parametrize(
    ("form", "dtype"), [("learned", torch.float64), ("folded", torch.float64), ("learned", torch.bfloat16)]
)
def test_numbers_keep_their_precision(form, dtype, tmp_path):
    model = network("resnet", form, dtype)
    mc.save(model, tmp_path)
    loaded = mc.load(tmp_path)
    x = picture(model)
    assert loaded(x).dtype == dtype
    assert torch.equal(loaded(x), model(x))


def test_a_network_that_learns_continues_with_the_same_draws(tmp_path):
    model = network("resnext", "learned")
    mc.save(model, tmp_path)
    loaded = mc.load(tmp_path)
    x = picture(model)
    for each in (model, loaded):
        each.train()
    for _ in range(3):
        assert torch.equal(model(x), loaded(x))
        assert torch.equal(model.stack.masks.binary, loaded.stack.masks.binary)
    assert mc.count_parameters(loaded).mask_entries > 0


def test_a_frozen_network_stays_frozen_and_keeps_its_groups_of_images(tmp_path):
    model = network("resnet", "frozen")
    group_norms_(model, 3)
    mc.save(model, tmp_path)
    loaded = mc.load(tmp_path)
    assert loaded.stack.masks.is_frozen
    assert mc.wiring_of(loaded) == mc.wiring_of(model)
    norms = [part for part in loaded.modules() if isinstance(part, nn.BatchNorm2d)]
    assert all(type(part) is GroupedBatchNorm2d and part.group == 3 for part in norms)
    slim = mc.prune(loaded, picture(model))
    assert all(type(part) is nn.BatchNorm2d for part in slim.modules() if isinstance(part, nn.BatchNorm2d))


def test_files_are_plain_and_readable_by_the_group_like_any_other(tmp_path):
    before = os.umask(0o022)
    try:
        mc.save(network("resnet", "folded"), tmp_path / "a" / "b", classes=list("é234567"))
    finally:
        os.umask(before)
    files = sorted((tmp_path / "a" / "b").iterdir())
    assert [file.name for file in files] == ["maskconnect.json", "model.safetensors"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o644}
    found = json.loads(files[0].read_text())
    assert found["maskconnect"] == mc.__version__
    assert found["kind"] == "pruned"
    assert found["architecture"]["depth"] == 14
    assert len(found["stacks"]["stack"]["wiring"]) == 6
    assert found["classes"] == list("é234567")


def test_classes_and_preprocessing_come_back(tmp_path):
    how = Preprocessing(channels=3, raw=(32, 32), size=16, shrink=2, mean=torch.rand(3, 16, 16))
    mc.save(network("resnet", "folded"), tmp_path, classes=tuple("abcdefg"), preprocessing=how)
    found = saved.read(tmp_path)
    assert (found.kind, found.classes) == ("pruned", tuple("abcdefg"))
    assert found.preprocessing.describe() == how.describe()
    assert torch.equal(found.preprocessing.mean, how.mean)
    mc.save(network("resnet", "folded"), tmp_path)  # over it, without
    assert saved.read(tmp_path).preprocessing is None
    assert not (tmp_path / "input.safetensors").exists()


def test_every_flipped_bit_is_refused(tmp_path):
    how = Preprocessing(channels=1, raw=(8, 8), size=8, mean=torch.rand(1, 8, 8))
    mc.save(network("resnet gray", "folded"), tmp_path, classes=list("abcdefg"), preprocessing=how)
    generator = torch.Generator().manual_seed(0)
    for file in sorted(tmp_path.iterdir()):
        content = file.read_bytes()
        if file.suffix == ".json":
            places = range(8 * len(content))
        else:
            places = [*range(64), *torch.randint(8 * len(content), (60,), generator=generator).tolist()]
        places = list(places)[:: 1 + len(places) // 500]
        for place in places:
            flipped = bytearray(content)
            flipped[place // 8] ^= 1 << place % 8
            file.write_bytes(flipped)
            with pytest.raises(mc.MaskConnectError):
                mc.load(tmp_path)
        for short in (content[:-1], content[:9], b"", content + b"\n"):
            file.write_bytes(short)
            with pytest.raises(mc.CheckpointError, match=r"damaged|which version|no safetensors"):
                mc.load(tmp_path)
        file.write_bytes(content)
    mc.load(tmp_path)


def test_weights_of_another_network_of_the_same_shape_are_refused(tmp_path):
    mc.save(network("resnet", "folded"), tmp_path / "a")
    torch.manual_seed(9)
    mc.save(mc.prune(mc.resnet(14, 7, 2, connectivity="random"), torch.randn(2, 3, 32, 32), fold=True), tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").replace(tmp_path / "a" / "model.safetensors")
    with pytest.raises(mc.CheckpointError, match=r"its checksum differs from the one in maskconnect\.json"):
        mc.load(tmp_path / "a")


@pytest.mark.parametrize("version", ["0.1.1", "0.2.0", "1.0", "99.0.0"])
def test_what_a_newer_version_wrote_is_refused_with_the_reason(version, tmp_path, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr(description, "version", lambda: version)
        mc.save(network("resnet", "frozen"), tmp_path)
    with pytest.raises(mc.CheckpointError, match=rf"was written by maskconnect {version} .* Install that version"):
        mc.load(tmp_path)


def test_another_format_is_refused_and_older_versions_are_read(tmp_path, monkeypatch):
    model = network("resnet", "frozen")
    with monkeypatch.context() as older:
        older.setattr(description, "version", lambda: "0.0.9")
        mc.save(model, tmp_path)
    mc.load(tmp_path)
    with monkeypatch.context() as newer:
        newer.setattr(description, "FORMAT", 2)
        mc.save(model, tmp_path)
    with pytest.raises(mc.CheckpointError, match=r"\(format 2\)"):
        mc.load(tmp_path)


class Own(nn.Module):
    """A network of the user's own modules."""

    def __init__(self, width=6, connectivity="random"):
        super().__init__()
        options = {} if connectivity == "learned" else {"connectivity": connectivity}
        self.first = mc.MaskedStack(mlp_blocks(8, width), 2, seed=1, **options)
        self.second = mc.MaskedStack(mlp_layers(3, 3, width), 1, seed=2, **options)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.second(self.first(x)))


X = torch.linspace(-1, 1, 18).reshape(3, 6)


@pytest.mark.parametrize("kind", ["learned", "frozen", "pruned"])
def test_a_network_of_ones_own_modules_goes_into_a_model_that_is_given(kind, tmp_path):
    model = Own(connectivity="learned" if kind == "learned" else "random").eval()
    written = mc.prune(model, X) if kind == "pruned" else model
    mc.save(written, tmp_path)
    with pytest.raises(mc.ConfigError, match=r"of custom modules.* mc\.load\(folder, into=model\)"):
        mc.load(tmp_path)
    torch.manual_seed(7)
    fresh = Own(connectivity="learned")  # other weights, and wired in no way as yet
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    loaded = mc.load(tmp_path, into=fresh)
    assert torch.equal(loaded(X), model(X))
    if kind == "pruned":
        assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())
        assert sum(p.numel() for p in loaded.parameters()) < sum(p.numel() for p in fresh.head.parameters()) + 17 * 42
        mc.save(loaded, tmp_path / "again")
        assert (tmp_path / "again" / "maskconnect.json").read_text() == (tmp_path / "maskconnect.json").read_text()
        torch.nn.init.zeros_(loaded.head.weight)
        assert torch.equal(mc.load(tmp_path, into=loaded)(X), model(X)), "or into a network that is pruned already"
    else:
        assert loaded is fresh


def test_sources_are_aligned_after_loading_as_they_were_before(tmp_path):
    wiring = [[], [0], [1], [0], [1, 3], [0, 1, 3]]
    model = mc.MaskedStack(conv_blocks(), connectivity=wiring).eval()
    mc.save(mc.prune(model, torch.randn(2, 4, 16, 16)), tmp_path)
    loaded = mc.load(tmp_path, into=mc.MaskedStack(conv_blocks(), [len(row) for row in wiring[1:]]))
    x = torch.randn(2, 4, 32, 24)
    assert difference(model, loaded, x) < 1e-5


def test_a_model_that_does_not_fit_is_refused(tmp_path):
    mc.save(mc.prune(Own(), X), tmp_path / "pruned")
    mc.save(Own(), tmp_path / "frozen")
    for folder in ("pruned", "frozen"):
        place = tmp_path / folder
        with pytest.raises(mc.CheckpointError, match=r"is \(6,\) there and \(5,\) in the model"):
            mc.load(place, into=Own(width=5))
        with pytest.raises(mc.CheckpointError, match=r"torch\.float32, the model in torch\.float64; convert"):
            mc.load(place, into=Own().double())
        with pytest.raises(mc.MaskConnectError, match="this Linear has no MaskedStack"):
            mc.load(place, into=nn.Linear(6, 6))
    with pytest.raises(mc.MaskConnectError, match="the model has no stack 'first'"):
        mc.load(tmp_path / "pruned", into=nn.Sequential(Own()))
    other = Own()
    other.first = mc.MaskedStack(mlp_blocks(8), 3)
    with pytest.raises(mc.ConnectivityError, match="its fan-in is 3, and it may read"):
        mc.load(tmp_path / "pruned", into=other)


def test_a_network_that_was_changed_since_it_was_built_counts_as_ones_own(tmp_path):
    def changed():
        model = mc.resnet(8, 7, 2, connectivity="random", seed=1)
        model.classifier = nn.Linear(64, 3)
        return model

    def activated():
        model = mc.resnet(8, 7, 2, connectivity="random", seed=1)
        model.stem[2] = nn.GELU()  # the same weights compute something else
        return model

    for make in (changed, activated):
        model = make().eval()
        x = torch.randn(2, 3, 32, 32)
        for network in (model, mc.prune(model, x)):
            mc.save(network, tmp_path)
            with pytest.raises(mc.ConfigError, match="into=model"):
                mc.load(tmp_path)
            assert torch.equal(mc.load(tmp_path, into=make())(x), network.eval()(x))


def test_a_saved_network_is_replaced_and_other_files_are_not(tmp_path):
    first, second = network("resnet", "frozen"), network("resnet", "folded")
    mc.save(first, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    mc.save(second, tmp_path)
    assert saved.read(tmp_path).kind == "pruned"
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "maskconnect.json").unlink()
    with pytest.raises(mc.ConfigError, match=r"model-2\.safetensors exists and is not part of a saved network"):
        mc.save(first, tmp_path)


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    model = network("resnet", "frozen")
    mc.save(model, tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved, "write_description", full)
    with pytest.raises(mc.CheckpointError, match="cannot be written: No space left on device"):
        mc.save(network("resnet", "folded"), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["maskconnect.json", "model.safetensors"]
    x = picture(model)
    assert torch.equal(mc.load(tmp_path)(x), model(x))


SAVE = """
import torch, maskconnect as mc
from maskconnect.ship.preprocessing import Preprocessing
how = Preprocessing(channels=3, raw=(8, 8), size=8, mean=torch.zeros(3, 1, 1))
mc.save(mc.resnet(8, 7, 2, seed=5), "saved", preprocessing=how)
"""


@pytest.mark.parametrize("moment", [1, *(pytest.param(moment, marks=pytest.mark.slow) for moment in (2, 4, 5, 7))])
def test_a_save_that_is_killed_can_be_repeated(moment, tmp_path):
    """SIGKILL before the first of three files is in its place, after each of the first two, in the last; and none."""
    model, folder = network("resnet", "frozen"), tmp_path / "saved"
    assert runs.killed(SAVE, moment, tmp_path) == (moment < 7)
    mc.save(model, folder)
    assert sorted(path.name for path in folder.iterdir()) in (
        ["maskconnect.json", "model.safetensors"],
        ["maskconnect.json", "model-2.safetensors"],
    )
    torch.testing.assert_close(mc.load(folder)(x := picture(model)), model(x))


def test_a_save_into_a_folder_that_another_process_saves_into_is_refused(tmp_path):
    mc.save(network("resnet", "frozen"), tmp_path)
    with (tmp_path / ".saving").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(mc.CheckpointError, match="another process is writing to"):
            mc.save(network("resnet", "learned"), tmp_path)
    assert saved.read(tmp_path).kind == "frozen"


def test_a_save_holds_the_folder_even_if_another_ended_as_it_began(tmp_path, monkeypatch):
    """The other process removes the lock file after this one has opened it: a lock on that file would hold nothing."""
    place, lock, files_seen = tmp_path / ".saving", files.lock, []

    def late(file):
        files_seen.append(file)
        if len(files_seen) == 1:
            place.unlink()
        return lock(file)

    monkeypatch.setattr(files, "lock", late)
    with files.held(place):
        assert os.path.samestat(os.fstat(files_seen[-1].fileno()), place.stat())
    assert len(files_seen) == 2
    assert not place.exists()


def test_what_cannot_be_saved_or_loaded_is_one_sentence(tmp_path):
    with pytest.raises(mc.ConfigError, match="this Linear has no MaskedStack"):
        mc.save(nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(mc.ConfigError, match="model is a str"):
        mc.save("model", tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(mc.ConfigError, match=r"holds no saved network; pass a folder that mc\.save wrote"):
        mc.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(mc.CheckpointError, match="cannot be written"):
        mc.save(network("resnet", "frozen"), tmp_path / "file" / "b")
    whole = mc.prune(Own(), X)
    with pytest.raises(mc.ConfigError, match=r"did not come from mc\.prune as a whole"):
        mc.save(nn.Sequential(whole), tmp_path / "a")
    mc.save(network("resnet", "frozen"), tmp_path / "gone")
    (tmp_path / "gone" / "model.safetensors").unlink()
    with pytest.raises(mc.CheckpointError, match="the saved network needs it"):
        mc.load(tmp_path / "gone")

    class Odd(Own):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    with pytest.raises(mc.ConfigError, match="the state of the model contains a dict"):
        mc.save(Odd(), tmp_path / "a")


def rewritten(folder, change):
    """Change what a description says, and make its checksum right again, as somebody with bad intentions would."""
    found = json.loads((folder / "maskconnect.json").read_text())
    files = list(found["files"])
    content = {key: value for key, value in found.items() if key not in ("files", "checksum", "format", "maskconnect")}
    change(content)
    description.write_description(folder, content, files)


HOSTILE = {
    "kind": lambda c: c.update(kind=[1]),
    "fold": lambda c: c.update(fold="no"),
    "classes": lambda c: c.update(classes="abc"),
    "class": lambda c: c.update(classes=[1]),
    "no classes": lambda c: c.pop("classes"),
    "preprocessing": lambda c: c.update(preprocessing=3),
    "weights": lambda c: c.update(weights="../model.safetensors"),
    "many outputs": lambda c: c["architecture"].update(num_classes=10**12),
    "deep": lambda c: c["architecture"].update(depth=6 * 10**9 + 2),
    "family": lambda c: c["architecture"].update(family="os"),
    "key": lambda c: c["architecture"].update(more=1),
    "wiring": lambda c: c["stacks"]["stack"].update(wiring=[[], [5]]),
    "steps": lambda c: c["stacks"]["stack"].update(steps=[{"number": "a"}]),
    "stride": lambda c: c["stacks"]["stack"]["steps"][0].update(number=-1),
    "half": lambda c: c["stacks"]["stack"].update(half="yes"),
    "stacks": lambda c: c.update(stacks=[]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_description_that_says_nonsense_is_one_sentence(name, tmp_path):
    mc.save(network("resnet", "folded"), tmp_path)
    rewritten(tmp_path, HOSTILE[name])
    with pytest.raises(mc.MaskConnectError) as error:
        mc.load(tmp_path)
    assert "\n" not in str(error.value)


HUGE = {
    "deep": {"depth": 20_000},
    "deep, and of the right form": {"depth": 19_994},
    "deep, but within the limit": {"depth": 3_998},
    "as deep as may be": {"depth": 2_000},
    "wide": {"width": 2**40},
    "of many branches": {"cardinality": 5_000},
    "of more branches than there are numbers": {"cardinality": 2**64},
    "of many channels": {"in_channels": 10**12},
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HUGE)
def test_a_description_of_a_huge_network_is_refused_before_anything_is_built(name, tmp_path):
    family = "resnext" if HUGE[name].keys() & {"width", "cardinality"} else "resnet"
    mc.save(network(family, "frozen"), tmp_path)
    rewritten(tmp_path, lambda c: c["architecture"].update(HUGE[name]))
    start = time.monotonic()
    with pytest.raises(mc.MaskConnectError) as error:
        mc.load(tmp_path)
    assert time.monotonic() - start < 1
    assert "\n" not in str(error.value)


SIDES = [{"raw": [10**9, 10**9]}, {"size": 10**9, "raw": [10**9, 10**9]}, {"shrink": 10**30}, {"raw": [8, 10**5000]}]


@pytest.mark.parametrize("sides", SIDES, ids=lambda sides: str(list(sides)))
def test_a_description_of_huge_pictures_is_refused(sides, tmp_path):
    sample = Preprocessing(channels=3, raw=(8, 8), size=8, mean=torch.zeros(3, 1, 1))
    mc.save(network("resnet", "frozen"), tmp_path, preprocessing=sample)
    sys.set_int_max_str_digits(0)
    try:
        rewritten(tmp_path, lambda c: c["preprocessing"].update(sides))
    finally:
        sys.set_int_max_str_digits(4300)
    with pytest.raises(mc.CheckpointError):
        mc.load(tmp_path)


@pytest.mark.parametrize("name", ["b, a=__import__('os').mkdir('owned'), *c", "class", "", 0, True, 1.5])
def test_a_description_cannot_run_code(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mc.save(network("resnet", "folded"), "saved")
    rewritten(tmp_path / "saved", lambda c: c["stacks"]["stack"].update(arguments=[name]))
    with pytest.raises(mc.CheckpointError, match="is not a valid argument name"):
        mc.load("saved")
    assert not (tmp_path / "owned").exists()


def test_names_of_files_cannot_lead_out_of_the_folder(tmp_path):
    mc.save(network("resnet", "frozen"), tmp_path / "a")
    (tmp_path / "secret.safetensors").write_text("")
    found = json.loads((tmp_path / "a" / "maskconnect.json").read_text())
    content = {key: value for key, value in found.items() if key not in ("files", "checksum", "format", "maskconnect")}
    description.write_description(
        tmp_path / "a", {**content, "weights": "../secret.safetensors"}, ["../secret.safetensors"]
    )
    with pytest.raises(mc.CheckpointError, match="names of files"):
        mc.load(tmp_path / "a")


@pytest.mark.parametrize("version", ["0.1.0rc1", "0.1", "0.1.0.dev3", "0.0.99"])
def test_older_versions_and_other_spellings_of_this_one_are_read(version, tmp_path, monkeypatch):
    with monkeypatch.context() as other:
        other.setattr(description, "version", lambda: version)
        mc.save(network("resnet", "frozen"), tmp_path)
    mc.load(tmp_path)


def test_a_pruned_network_is_not_loaded_into_one_that_is_wired_otherwise(tmp_path):
    def pruned(wiring, **options):
        return mc.prune(mc.MaskedStack(mlp_blocks(4), connectivity=wiring, **options), X, merge=False)

    first, other = [[], [0], [0, 1], [1, 2]], [[], [0], [0, 1], [0, 2]]
    mc.save(pruned(first), tmp_path)
    mc.load(tmp_path, into=pruned(first))
    with pytest.raises(
        mc.CheckpointError,
        match=r"the stack '' differs in its wiring\. Build the model .* as the saved one, and do not prune it\.",
    ):
        mc.load(tmp_path, into=pruned(other))
    mc.load(tmp_path, into=mc.MaskedStack(mlp_blocks(4), connectivity=first))
    with pytest.raises(mc.CheckpointError, match="was pruned with merge=False, the model with merge=True"):
        mc.load(tmp_path, into=mc.prune(mc.MaskedStack(mlp_blocks(4), connectivity=first), X))
    with pytest.raises(
        mc.CheckpointError, match=r"the stack '' differs in its aggregation\. Build the model with the same arg"
    ):
        mc.load(tmp_path, into=mc.MaskedStack(mlp_blocks(4), [1, 2, 2], aggregation="sum"))


def test_a_load_that_fails_leaves_the_model_as_it_was(tmp_path):
    mc.save(mc.MaskedStack(mlp_blocks(4), 2), tmp_path)
    model = mc.MaskedStack(mlp_blocks(4), 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        mc.CheckpointError, match=r"masks\.fan_in differs from the model's\. Build the model with the same arguments"
    ):
        mc.load(tmp_path, into=model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_pruned_network_that_was_copied_or_pickled_can_be_saved(tmp_path):
    model = network("resnext", "folded")
    x = picture(model)
    for number, again in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        mc.save(again, tmp_path / str(number))
        assert torch.equal(mc.load(tmp_path / str(number))(x), model(x))


def test_a_network_whose_parts_are_frozen_comes_back(tmp_path):
    model = mc.resnext(11, 4, 4, 7, connectivity="full")
    model.stack.blocks[0][1].requires_grad_(False)
    pruned = mc.prune(model, picture(model)).eval()
    mc.save(pruned, tmp_path)
    x = picture(model)
    assert torch.equal(mc.load(tmp_path)(x), pruned(x))


def test_classes_and_preprocessing_that_do_not_fit_are_refused(tmp_path):
    model = network("resnet", "frozen")
    gray = Preprocessing(channels=1, raw=(8, 8), size=8, mean=torch.rand(1, 8, 8))
    for options, sentence in (
        ({"classes": ["a", "b"]}, "there are 2 classes, but the network has 7 outputs"),
        ({"classes": "abcdefg"}, "it must be a list of names"),
        ({"classes": range(7)}, "it must be a list of names"),
        ({"classes": ["\udc80"] * 7}, "is not text that UTF-8 can encode"),
        ({"preprocessing": {"size": 32}}, "preprocessing is a dict"),
        ({"preprocessing": gray}, "images with 1 channels; the network needs 3"),
    ):
        with pytest.raises(mc.ConfigError, match=sentence):
            mc.save(model, tmp_path / "a", **options)


class Twice(nn.Module):
    """A stack under two names, and one inside of a module that goes."""

    def __init__(self):
        super().__init__()
        unused = mc.MaskedStack(mlp_blocks(3), connectivity="prev")
        blocks = [*mlp_blocks(2), unused, *mlp_blocks(1)]
        self.first = mc.MaskedStack(blocks, connectivity=[[], [0], [1], [0, 1]])
        self.again = self.first

    def forward(self, x):
        return self.again(self.first(x))


@pytest.mark.parametrize("pruned", [False, True])
def test_a_stack_that_has_two_names_comes_back(pruned, tmp_path):
    model = Twice().eval()
    mc.save(mc.prune(model, X) if pruned else model, tmp_path)
    loaded = mc.load(tmp_path, into=Twice())
    assert loaded.again is loaded.first
    assert difference(model, loaded, X) < 1e-6


def test_a_part_of_a_pruned_network_is_not_saved_as_if_it_were_the_whole(tmp_path):
    with pytest.raises(mc.ConfigError, match=r"did not come from mc\.prune as a whole"):
        mc.save(mc.prune(Own(), X).first, tmp_path)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", [mc.Blend(steps=2), mc.Draw(gradient="direction")], ids=["blend", "direction"])
def test_a_network_comes_back_however_its_masks_learned(how, frozen, tmp_path):
    model = mc.resnet(8, 4, 2)
    model.stack.masks.learn_by(how)
    model.stack.masks.progress += 2
    if frozen:
        mc.freeze(model)
    mc.save(model, tmp_path / "saved")
    again = mc.load(tmp_path / "saved")
    assert again.stack.masks.how == how
    assert int(again.stack.masks.progress) == 2
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(again.eval()(x), model.eval()(x))


def test_a_network_that_version_0_1_saved_is_loaded(tmp_path):
    class Old(ConnectivityMasks):
        def get_extra_state(self):
            return self.generator.get_state()

    model = mc.resnet(8, 4, 2)
    mc.freeze(model)
    model.stack.masks.__class__ = Old
    del model.stack.masks._buffers["progress"]
    mc.save(model, tmp_path / "saved")
    again = mc.load(tmp_path / "saved")
    assert mc.wiring_of(again) == mc.wiring_of(model)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("file", ["maskconnect.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_file_that_never_ends_is_an_error_and_no_hang(file, kind, tmp_path):
    mc.save(network("resnet", "frozen"), tmp_path)
    (tmp_path / file).unlink()
    os.mkfifo(tmp_path / file) if kind == "pipe" else (tmp_path / file).symlink_to("/dev/zero")
    with pytest.raises(mc.CheckpointError, match=r"cannot be read: it is a pipe, a device or a socket"):
        mc.load(tmp_path)
