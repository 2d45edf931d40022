import errno
import json
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import time
from contextlib import contextmanager, suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maskconnect.errors import CheckpointError
from maskconnect.training import checkpoint
from maskconnect.training.checkpoint import FORMAT, MANIFEST, STATE, Checkpoints

FILES = (STATE, MANIFEST)


def state_of(step, size=8, tag=""):
    return {"step": step, "tag": tag, "weights": {"w": torch.full((size,), float(step))}, "log": [1.5, "a", None, True]}


def assert_whole(found, step, **kind):
    """`found` is the checkpoint of this step, bitwise identical."""
    assert found is not None
    assert found[0] == step
    expected = state_of(step, **kind)
    torch.testing.assert_close(found[1].pop("weights"), expected.pop("weights"), rtol=0, atol=0)
    assert found[1] == expected


def no_warning(sentence):
    raise AssertionError(sentence)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def saved(folder, *steps, keep=100):
    checkpoints = Checkpoints(folder, keep=keep)
    for step in steps:
        checkpoints.save(step, state_of(step))
    return checkpoints


def flip(path, position, bit):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def rewrite_manifest(path, **changes):
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | changes))


def put_state(path, content):
    """Replace the state and let the manifest agree, as one could who means harm."""
    (path / STATE).write_bytes(content)
    sha256 = checkpoint.hashlib.sha256(content).hexdigest()
    rewrite_manifest(path, files={STATE: {"size": len(content), "sha256": sha256}})


@contextmanager
def full_disk(size):
    """No file can be larger: the same path through the code as a full disk, with another reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fail_with(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


# What is saved comes back.


def test_no_checkpoints_are_none(tmp_path):
    assert Checkpoints(tmp_path / "checkpoints").latest(no_warning) is None
    assert Checkpoints(tmp_path).latest(no_warning) is None
    assert names(tmp_path) == []


def test_the_newest_comes_back_as_it_was(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.save(5, state_of(5)) == tmp_path / "run" / "checkpoints" / "step-000000005"
    checkpoints.save(12, state_of(12))
    assert names(checkpoints.folder) == ["step-000000005", "step-000000012"]
    assert names(checkpoints.folder / "step-000000012") == sorted(FILES)
    assert_whole(checkpoints.latest(no_warning), 12)


def test_the_newest_is_the_one_of_the_highest_step_even_with_ten_digits(tmp_path):
    checkpoints = saved(tmp_path, 999_999_999, 1_000_000_000)
    assert_whole(checkpoints.latest(no_warning), 1_000_000_000)


def training(optimizer_class, **options):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    return net, optimizer_class(net.parameters(), **options), torch.Generator().manual_seed(7)


def train(net, optimizer, generator, steps):
    for _ in range(steps):
        loss = net(torch.randn(16, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.01})],
)
def test_training_resumes_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path, kind, options):
    net, optimizer, generator = training(kind, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    train(net, optimizer, generator, 3)
    state = {
        "network": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "random": torch.get_rng_state(),
        "order": generator.get_state(),
    }
    Checkpoints(tmp_path).save(3, state)
    train(net, optimizer, generator, 3)
    expected = net.state_dict()

    net, optimizer, generator = training(kind, **options)
    _, found = Checkpoints(tmp_path).latest(no_warning)
    net.load_state_dict(found["network"])
    optimizer.load_state_dict(found["optimizer"])
    torch.set_rng_state(found["random"])
    generator.set_state(found["order"])
    assert found["scaler"] == scaler.state_dict()
    train(net, optimizer, generator, 3)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_state_that_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path):
    checkpoints = saved(tmp_path, 1)
    with pytest.raises(AssertionError, match=r"pathlib\.PosixPath"):
        checkpoints.save(2, {"folder": tmp_path})
    assert names(tmp_path) == ["step-000000001"]


def test_a_saved_file_has_ordinary_modes(tmp_path):
    before = os.umask(0o027)
    try:
        path = Checkpoints(tmp_path).save(1, state_of(1))
    finally:
        os.umask(before)
    modes = [place.stat().st_mode & 0o777 for place in (path, path / STATE, path / MANIFEST)]
    assert modes == [0o750, 0o640, 0o640]


# Damage.


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two checkpoints, and what is in the files of the newer one."""
    checkpoints = saved(tmp_path_factory.mktemp("pair"), 1, 20)
    newer = checkpoints.folder / "step-000000020"
    return checkpoints, newer, {file: (newer / file).read_bytes() for file in FILES}


@contextmanager
def restored(pair):
    _, newer, contents = pair
    try:
        yield
    finally:
        for file, content in contents.items():
            (newer / file).write_bytes(content)


def assert_the_one_before_is_used(checkpoints, newer, *, because, step=1):
    said = []
    assert_whole(checkpoints.latest(said.append), step)
    assert len(said) == 1
    assert said[0].startswith(f"{newer} cannot be used: ")
    assert because in said[0]
    assert said[0].endswith(f"; using the one before it, step-{step:09d}.")
    assert "\n" not in said[0]


@pytest.mark.parametrize("file", FILES)
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_found(pair, file, data):
    checkpoints, newer, contents = pair
    position, bit = data.draw(st.integers(0, len(contents[file]) - 1)), data.draw(st.integers(0, 7))
    with restored(pair):
        flip(newer / file, position, bit)
        assert_the_one_before_is_used(checkpoints, newer, because="")


def test_every_flipped_bit_of_the_manifest_is_found(pair):
    checkpoints, newer, contents = pair
    with restored(pair):
        for position in range(len(contents[MANIFEST])):
            for bit in range(8):
                flip(newer / MANIFEST, position, bit)
                assert not checkpoint._is_complete(newer, 20), (position, bit)
                (newer / MANIFEST).write_bytes(contents[MANIFEST])
    assert_whole(checkpoints.latest(no_warning), 20)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_a_file_that_is_cut_short_is_found(pair, file, part):
    checkpoints, newer, contents = pair
    with restored(pair):
        os.truncate(newer / file, int(part * len(contents[file])))
        assert_the_one_before_is_used(checkpoints, newer, because=file)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_found(pair, file):
    checkpoints, newer, _ = pair
    with restored(pair):
        (newer / file).unlink()
        because = f"{file} cannot be read (No such file or directory)"
        assert_the_one_before_is_used(checkpoints, newer, because=because)


@pytest.mark.parametrize(
    "content", [b"[]", b"{}", b"null", b"\xff", b"[" * 100_000, b'{"format": 1, "step": 20, "files": {"state.pt": 3}}']
)
def test_a_manifest_of_another_kind_is_found(pair, content):
    checkpoints, newer, _ = pair
    with restored(pair):
        (newer / MANIFEST).write_bytes(content)
        assert_the_one_before_is_used(checkpoints, newer, because=f"{MANIFEST} is damaged")


def test_a_checkpoint_under_the_name_of_another_step_is_found(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    (tmp_path / "step-000000002").rename(tmp_path / "step-000000003")
    assert_the_one_before_is_used(checkpoints, tmp_path / "step-000000003", because=f"{MANIFEST} is damaged")


def test_a_newer_format_has_its_own_sentence(pair):
    checkpoints, newer, _ = pair
    with restored(pair):
        rewrite_manifest(newer, format=FORMAT + 1)
        because = f"a newer maskconnect wrote it (format {FORMAT + 1}; this version reads formats up to {FORMAT})"
        assert_the_one_before_is_used(checkpoints, newer, because=because)


def test_each_of_several_damaged_ones_is_reported(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3)
    (tmp_path / "step-000000003" / STATE).unlink()
    flip(tmp_path / "step-000000002" / STATE, 100, 0)
    said = []
    assert_whole(checkpoints.latest(said.append), 1)
    assert ["step-000000003" in said[0], "step-000000002" in said[1], len(said)] == [True, True, 2]
    assert names(tmp_path) == ["step-000000001", "step-000000002", "step-000000003"]  # nothing was removed


def test_if_none_is_whole_that_is_an_error_that_says_what_to_do(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    for step in (1, 2):
        os.truncate(tmp_path / f"step-{step:09d}" / STATE, 100)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.latest(no_warning)
    message = str(caught.value)
    assert message.startswith(f"none of the checkpoints in {tmp_path} can be used (step-000000002: {STATE} has 100 ")
    assert message.endswith("); restore one from a backup, or restart with --fresh.")
    assert "\n" not in message


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be read \(Not a directory\)"):
        Checkpoints(tmp_path / "file").latest(no_warning)


class Harmful:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("form", ["archive", "bare pickle"])
def test_code_in_a_state_does_not_run_even_if_the_manifest_agrees(tmp_path, form):
    checkpoints = saved(tmp_path / "checkpoints", 1)
    harmful = {"weights": Harmful(tmp_path / "it ran")}
    if form == "archive":
        torch.save(harmful, tmp_path / "harmful.pt")
    else:
        (tmp_path / "harmful.pt").write_bytes(pickle.dumps(harmful, protocol=2))
    put_state(checkpoints.folder / "step-000000001", (tmp_path / "harmful.pt").read_bytes())
    with pytest.raises(CheckpointError, match="contains more than plain data"):
        checkpoints.latest(no_warning)
    assert not (tmp_path / "it ran").exists()


def test_a_state_that_is_not_an_archive_or_not_a_table_is_refused_even_if_the_manifest_agrees(tmp_path):
    checkpoints = saved(tmp_path / "checkpoints", 1)
    for content in (b"", b"PK\x03\x04", b"text"):
        put_state(checkpoints.folder / "step-000000001", content)
        with pytest.raises(CheckpointError, match=STATE):
            checkpoints.latest(no_warning)
    torch.save([1, 2], tmp_path / "list.pt")
    put_state(checkpoints.folder / "step-000000001", (tmp_path / "list.pt").read_bytes())
    with pytest.raises(CheckpointError, match=r"state\.pt does not contain a state"):
        checkpoints.latest(no_warning)


# What is kept.


@pytest.mark.parametrize(("keep", "stay"), [(3, [5, 6, 7]), (2, [6, 7]), (1, [6, 7]), (0, [6, 7])])
def test_the_newest_are_kept_and_never_less_than_two(tmp_path, keep, stay):
    saved(tmp_path, *range(1, 8), keep=keep)
    assert names(tmp_path) == [f"step-{step:09d}" for step in stay]


def test_damaged_ones_do_not_count_among_those_that_are_kept(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3, 4)
    for step in (2, 3, 4):
        flip(tmp_path / f"step-{step:09d}" / STATE, 70, 3)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(5, state_of(5))
    assert names(tmp_path) == [f"step-{step:09d}" for step in (1, 2, 3, 4, 5)]  # 1 is the only whole one but 5
    flip(tmp_path / "step-000000005" / STATE, 70, 3)
    said = []
    assert_whole(checkpoints.latest(said.append), 1)
    assert len(said) == 4


def test_after_falling_back_the_run_replaces_the_damaged_one_when_it_comes_to_it(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 4, keep=2)
    flip(tmp_path / "step-000000004" / STATE, 70, 3)
    checkpoints.save(3, state_of(3))
    assert names(tmp_path) == [f"step-{step:09d}" for step in (2, 3, 4)]  # a newer one is never removed
    assert_the_one_before_is_used(checkpoints, tmp_path / "step-000000004", because="checksum", step=3)
    checkpoints.save(4, state_of(4))
    assert_whole(checkpoints.latest(no_warning), 4)
    assert names(tmp_path) == [f"step-{step:09d}" for step in (3, 4)]


def test_newer_ones_stay_and_do_not_count(tmp_path):
    saved(tmp_path, 1, 2, 8, 9)
    saved(tmp_path, 3, keep=2)
    assert names(tmp_path) == [f"step-{step:09d}" for step in (2, 3, 8, 9)]


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    checkpoints.save(2, state_of(2, tag="again"))
    assert names(tmp_path) == ["step-000000001", "step-000000002"]
    assert_whole(checkpoints.latest(no_warning), 2, tag="again")


def test_leftovers_of_a_killed_process_are_not_read_and_go_at_the_next_save(tmp_path):
    checkpoints = saved(tmp_path, 1)
    (tmp_path / ".writing-0123456789abcdef").mkdir()
    (tmp_path / ".writing-0123456789abcdef" / STATE).write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("the user's own")
    (tmp_path / "step-5").mkdir()
    assert_whole(checkpoints.latest(no_warning), 1)
    checkpoints.save(2, state_of(2))
    assert names(tmp_path) == ["notes.txt", "step-000000001", "step-000000002", "step-5"]


def test_the_files_are_synced_then_the_manifest_then_the_folder_then_it_is_renamed(tmp_path, monkeypatch):
    done, fsync, rename = [], os.fsync, os.rename

    def watched_fsync(handle):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))  # noqa: PTH115, PTH119
        done.append(".writing" if name.startswith(".writing") else name)
        fsync(handle)

    def watched_rename(old, new):
        done.append("rename")
        rename(old, new)

    Checkpoints(tmp_path / "c").save(1, state_of(1))
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    Checkpoints(tmp_path / "c").save(2, state_of(2))
    assert done == [STATE, ".writing", ".writing", "rename", "c"]  # the manifest is .writing before it has its name


# When it cannot be written.


@pytest.mark.parametrize("size", [0, 100, 1000, 5000, 60_000, 400_000])
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_is_intact(tmp_path, size):
    checkpoints = saved(tmp_path, 1, 2)
    with full_disk(size), pytest.raises(CheckpointError) as caught:
        checkpoints.save(3, state_of(3, size=100_000))
    assert str(caught.value) == (
        f"the checkpoint of step 3 cannot be written to {tmp_path} (File too large); "
        "the previous one, step-000000002, is intact."
    )
    assert names(tmp_path) == ["step-000000001", "step-000000002"]
    assert_whole(checkpoints.latest(no_warning), 2)
    checkpoints.save(3, state_of(3))
    assert_whole(checkpoints.latest(no_warning), 3)


def test_a_full_disk_at_the_first_checkpoint_says_that_there_is_none(tmp_path):
    with full_disk(100), pytest.raises(CheckpointError, match=r"\(File too large\); there is no earlier one\.$"):
        Checkpoints(tmp_path).save(3, state_of(3))
    assert names(tmp_path) == []


@pytest.mark.parametrize("operation", ["fsync", "rename", "replace", "mkdir"])
def test_any_operation_may_fail_and_the_last_checkpoint_stays(tmp_path, monkeypatch, operation):
    checkpoints = saved(tmp_path, 1, 2)
    monkeypatch.setattr(os, operation, fail_with(errno.ENOSPC))
    with pytest.raises(CheckpointError, match=r"No space left on device\); the previous one, step-000000002"):
        checkpoints.save(3, state_of(3))
    monkeypatch.undo()
    assert names(tmp_path) == ["step-000000001", "step-000000002"]
    assert_whole(checkpoints.latest(no_warning), 2)


def test_a_damaged_checkpoint_is_not_called_good_when_the_disk_is_full(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    flip(tmp_path / "step-000000002" / STATE, 70, 3)
    with full_disk(100), pytest.raises(CheckpointError, match="the previous one, step-000000001, is intact"):
        checkpoints.save(3, state_of(3))


def test_if_the_new_one_cannot_take_its_place_the_replaced_one_is_still_found(tmp_path, monkeypatch):
    checkpoints, rename = saved(tmp_path, 2), os.rename

    def fail_at_the_second(old, new):
        monkeypatch.setattr(os, "rename", fail_with(errno.EIO))
        rename(old, new)

    monkeypatch.setattr(os, "rename", fail_at_the_second)
    with pytest.raises(CheckpointError, match=r"the previous one, step-000000002-old-[0-9a-f]{8}, is intact"):
        checkpoints.save(2, state_of(2, tag="again"))
    monkeypatch.undo()
    assert_whole(checkpoints.latest(no_warning), 2)
    checkpoints.save(2, state_of(2, tag="again"))
    assert_whole(checkpoints.latest(no_warning), 2, tag="again")
    assert names(tmp_path) == ["step-000000002"]


def test_a_folder_below_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/checkpoints \(Not a directory\); there is no earlier one\.$"):
        Checkpoints(tmp_path / "file" / "checkpoints").save(1, state_of(1))


def test_what_cannot_be_removed_does_not_stop_the_run(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 1, 2, keep=2)
    monkeypatch.setattr(os, "rmdir", fail_with(errno.EACCES))
    monkeypatch.setattr(os, "unlink", fail_with(errno.EACCES))
    checkpoints.save(3, state_of(3))
    monkeypatch.undo()
    assert names(tmp_path) == [f"step-{step:09d}" for step in (1, 2, 3)]
    assert_whole(checkpoints.latest(no_warning), 3)


def test_ctrl_c_in_the_middle_leaves_nothing_half_done(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    checkpoints = saved(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, state_of(2))
    assert names(tmp_path) == ["step-000000001"]


# Real processes, really killed.

LARGE = 200_000  # numbers, so that most kills meet a file that is being written


@pytest.fixture(scope="module")
def processes():
    """Processes that need not import torch: they are forked from one that has."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["maskconnect.training.checkpoint", "hypothesis", "pytest"])
    return context


def save_until_killed(folder, reports):
    checkpoints = Checkpoints(folder)
    folder.mkdir(exist_ok=True)
    found = checkpoints.latest(no_warning)
    step = found[0] if found else 0  # once more, so replacing is among what is interrupted
    reports.send(None)
    while True:
        checkpoints.save(step, state_of(step, size=LARGE))
        reports.send(step)
        step += 1


def test_a_kill_at_any_moment_leaves_what_was_saved_last(tmp_path, processes):
    moments, reached, interrupted = random.Random(0), -1, 0
    began = time.monotonic()
    Checkpoints(tmp_path / "timed").save(0, state_of(0, size=LARGE))
    duration, folder = time.monotonic() - began, tmp_path / "checkpoints"
    for kills in range(400):  # 40, and more if too few of them met a file that was being written
        if kills >= 40 and interrupted > 3:
            break
        reports, sender = processes.Pipe(duplex=False)
        child = processes.Process(target=save_until_killed, args=(folder, sender))
        child.start()
        sender.close()
        told = [reports.recv() for _ in range(moments.randint(1, 3))]  # the first one says that it begins
        child.join(moments.uniform(0, duration))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        with suppress(EOFError):
            while True:
                told.append(reports.recv())
        reports.close()
        reached = max(reached, *told[1:], -1)
        interrupted += any(name.startswith(".") for name in names(folder))
        found = Checkpoints(folder).latest(no_warning)
        if reached >= 0:
            assert found is not None
            assert found[0] >= reached
        if found is not None:
            assert_whole(found, found[0], size=LARGE)
    assert reached > 10
    assert interrupted > 3


def die_at(operation, folder, step):
    """Save once, and be killed just before the file operation of this number."""
    checkpoints, left = Checkpoints(folder), operation

    def count(event, args):
        nonlocal left
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    checkpoints.save(step, state_of(step, tag="new"))


@pytest.mark.parametrize(
    ("there", "damaged", "step"),
    [([1, 2], [], 3), ([2], [], 2), ([1, 2], [2], 2), ([], [], 1)],
    ids=["a new one", "the only one again", "a damaged one again", "the first"],
)
def test_a_kill_before_any_of_its_file_operations_leaves_a_whole_one(tmp_path, processes, there, damaged, step):
    whole = [number for number in there if number not in damaged]
    for operation in range(1, 100):
        folder = tmp_path / str(operation)
        checkpoints = saved(folder, *there)
        for number in damaged:
            flip(folder / f"step-{number:09d}" / STATE, 70, 3)
        child = processes.Process(target=die_at, args=(operation, folder, step))
        child.start()
        child.join()
        found = checkpoints.latest((lambda sentence: None) if damaged else no_warning)
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        if found is None:
            assert not whole
        elif found[1]["tag"] == "new":
            assert_whole(found, step, tag="new")
        else:
            assert_whole(found, whole[-1])
        saved(folder, step + 1, keep=2)  # and the run continues
        assert_whole(checkpoints.latest(no_warning), step + 1)
        assert not [name for name in names(folder) if name.startswith(".")]
    assert operation > 5
    assert_whole(found, step, tag="new")
