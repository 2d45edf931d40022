import contextlib
import errno
import json
import os
import stat

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maskconnect.errors import CheckpointError
from maskconnect.training.files import fsync_folder, load_tensors, save_tensors, write_atomically

TENSORS = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "half": torch.full((3,), 1.5, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "none": torch.zeros(0, 4),
    "ä": torch.zeros(2, dtype=torch.uint8),
}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def names(folder):
    return [path.name for path in folder.iterdir()]


def fail_with(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(("content", "expected"), [(b"\x00\xff\r\n", b"\x00\xff\r\n"), ("ä\n", "ä\n".encode())])
def test_a_file_holds_just_what_was_written(tmp_path, content, expected):
    write_atomically(tmp_path / "a", "the old content, which is longer")
    write_atomically(tmp_path / "a", content)
    assert (tmp_path / "a").read_bytes() == expected
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_a_file_has_the_mode_that_open_would_give_it(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    write_atomically(tmp_path / "a", b"old")
    monkeypatch.setattr(os, step, fail_with(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "a", b"new")
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_write_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "a", b"new")
    assert names(tmp_path) == []


def test_the_content_is_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(handle):
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else f"{os.fstat(handle).st_size} bytes")
        fsync(handle)

    def watched_replace(*names):
        done.append("rename")
        replace(*names)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    write_atomically(tmp_path / "a", b"four")
    assert done == ["4 bytes", "rename", "folder"]


def test_a_file_system_that_cannot_sync_folders_is_not_an_error_but_a_broken_disk_is(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", fail_with(errno.EINVAL))
    fsync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", fail_with(errno.EIO))
    with pytest.raises(OSError, match="error"):
        fsync_folder(tmp_path)


def test_tensors_come_back_as_they_were(tmp_path):
    save_tensors(tmp_path / "t", TENSORS)
    assert_same(load_tensors(tmp_path / "t"), TENSORS)
    assert names(tmp_path) == ["t"]


def test_no_tensors_are_a_file_too(tmp_path):
    save_tensors(tmp_path / "t", {})
    assert load_tensors(tmp_path / "t") == {}


def test_shared_strided_and_learned_tensors_are_saved_by_value(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "base": base,
        "same": base,
        "row": base[1],
        "transposed": base.T,
        "column": base[:, 2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "learned": torch.nn.Parameter(base),
    }
    save_tensors(tmp_path / "t", tensors)
    found = load_tensors(tmp_path / "t")
    assert_same(found, {name: tensor.detach() for name, tensor in tensors.items()})
    found["base"].zero_()
    torch.testing.assert_close(found["same"], base)


def test_any_reader_of_safetensors_reads_the_tensors_and_the_metadata(tmp_path):
    save_tensors(tmp_path / "t", TENSORS, {"what": "weights", "ö": "ü"})
    assert_same(safetensors.torch.load_file(tmp_path / "t"), TENSORS)
    with safetensors.safe_open(tmp_path / "t", framework="pt") as file:
        metadata = file.metadata()
    assert len(metadata.pop("sha256")) == 64
    assert metadata == {"what": "weights", "ö": "ü"}


def test_the_same_tensors_and_metadata_in_any_order_give_the_same_bytes(tmp_path):
    metadata = {f"key{number}": "value" for number in range(8)}  # safetensors alone writes them in a random order
    for name, turn in [("a", list), ("b", list), ("c", reversed)]:
        save_tensors(tmp_path / name, dict(turn(list(TENSORS.items()))), dict(turn(list(metadata.items()))))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()


def test_a_file_without_our_checksum_is_read(tmp_path):
    safetensors.torch.save_file(TENSORS, tmp_path / "t")
    assert_same(load_tensors(tmp_path / "t"), TENSORS)
    safetensors.torch.save_file(TENSORS, tmp_path / "t", {"format": "pt"})
    assert_same(load_tensors(tmp_path / "t"), TENSORS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "t"
    save_tensors(path, TENSORS, {"what": "weights"})
    return path.read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch") / "t"


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_no_flipped_bit_goes_unnoticed_or_else_it_changes_nothing(data, saved, scratch):
    position, bit = data.draw(st.integers(0, len(saved) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(saved)
    damaged[position] ^= 1 << bit
    scratch.write_bytes(damaged)
    named = saved.index(b"sha256")
    if named <= position < named + len(b"sha256"):
        with contextlib.suppress(CheckpointError):  # without a checksum it is a file of others
            assert_same(load_tensors(scratch), TENSORS)
        return
    with pytest.raises(CheckpointError, match=r"^[^\n]* is damaged [^\n]*$"):
        load_tensors(scratch)


def test_a_flipped_bit_that_spells_a_name_otherwise_is_found(saved, scratch):
    scratch.write_bytes(saved.replace(b"\\u00e4", b"\\u00E4"))
    assert scratch.read_bytes() != saved
    with pytest.raises(CheckpointError, match="checksum is wrong"):
        load_tensors(scratch)


def test_every_flipped_bit_of_the_tensors_themselves_is_found(saved, scratch):
    start = 8 + int.from_bytes(saved[:8], "little")
    for position in range(start, len(saved)):
        damaged = bytearray(saved)
        damaged[position] ^= 1 << position % 8
        scratch.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="checksum is wrong"):
            load_tensors(scratch)


def test_a_file_that_is_cut_short_or_too_long_is_an_error(saved, scratch):
    for content in [*(saved[:length] for length in range(len(saved))), saved + b"\0"]:
        scratch.write_bytes(content)
        with pytest.raises(CheckpointError, match="is damaged"):
            load_tensors(scratch)


@pytest.mark.parametrize(
    "header", [b"[]", b"{", b"\xff", b"[" * 100_000, b'{"__metadata__":1}', b'{"__metadata__":"sha256"}']
)
def test_a_header_of_another_kind_is_an_error(scratch, header):
    scratch.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        load_tensors(scratch)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_errors_that_say_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"t cannot be read \(No such file or directory\)"):
        load_tensors(tmp_path / "t")
    with pytest.raises(CheckpointError, match=r"cannot be read \(Is a directory\)"):
        load_tensors(tmp_path)


def test_the_tensors_of_another_file_under_the_same_header_are_refused(tmp_path):
    save_tensors(tmp_path / "a", {"x": torch.zeros(4)})
    save_tensors(tmp_path / "b", {"x": torch.ones(4)})
    a, b = (tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()
    assert len(json.loads(a[8:-16])) == 2
    (tmp_path / "b").write_bytes(a[:-16] + b[-16:])
    with pytest.raises(CheckpointError, match="checksum"):
        load_tensors(tmp_path / "b")
