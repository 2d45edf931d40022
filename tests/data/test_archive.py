"""Archives of data sets that hold more, or something else, than a set: refused, and nothing of them is unpacked."""

import gzip
import io
import tarfile

import pytest

import maskconnect as mc
from maskconnect.data import load
from maskconnect.data import small as small_sets
from maskconnect.data.archive import unpack

pytestmark = pytest.mark.timeout(20)
FOLDER = "cifar-10-batches-py"
NAME = f"{FOLDER}/data_batch_1"


def packed(place, *members):
    """An archive of members, of which none has the content that its header speaks of."""
    content = b"".join(member.tobuf(tarfile.GNU_FORMAT) for member in members) + bytes(1 << 20)
    archive = place / "cifar-10-python.tar.gz"
    archive.write_bytes(gzip.compress(content, 1))
    return archive


def member(name=NAME, **fields):
    found = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(found, key, value)
    return found


def link(to, kind=tarfile.SYMTYPE, name=NAME):
    return member(name, type=kind, linkname=to)


LINKS = {
    "dangling": [link("nothing")],
    "looping": [link("data_batch_1")],
    "looping in a pair": [link("data_batch_2"), link("data_batch_1", name=f"{FOLDER}/data_batch_2")],
    "outward": [link("../../../../../../etc/passwd")],
    "absolute": [link("/dev/zero")],
    "hard and dangling": [link("nothing", tarfile.LNKTYPE)],
    "hard and looping": [link(NAME, tarfile.LNKTYPE)],
    "a pipe": [member(type=tarfile.FIFOTYPE)],
    "a device": [member(type=tarfile.CHRTYPE, devmajor=1, devminor=5)],
}


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("name", LINKS)
def test_an_archive_with_anything_but_files_and_folders_is_refused(name, verified, tmp_path):
    packed(tmp_path, *LINKS[name])
    with pytest.raises(mc.DataError, match=r"cifar-10-python\.tar\.gz holds .*neither a file nor a folder"):
        load("cifar10", tmp_path, verified=verified)


@pytest.mark.parametrize("name", LINKS)
def test_such_an_archive_is_not_unpacked_either(name, tmp_path):
    with pytest.raises(mc.DataError, match="neither a file nor a folder"):
        unpack(packed(tmp_path, *LINKS[name]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


HUGE = {
    "one member": [member(size=8 << 30)],
    "a member that nobody wants": [member("other", size=8 << 30)],
    "a long name": [member("././@LongLink", type=tarfile.GNUTYPE_LONGNAME, size=8 << 30)],
    "a header of its own": [member("pax", type=tarfile.XHDTYPE, size=8 << 30)],
}


@pytest.mark.parametrize("name", HUGE)
def test_an_archive_of_eight_gigabytes_is_refused_before_these_are_unpacked(name, tmp_path):
    packed(tmp_path, *HUGE[name])
    with pytest.raises(mc.DataError, match=r"unpacks to more than 536,870,912 bytes"):
        load("cifar10", tmp_path)


def test_the_command_says_it_in_one_sentence(type_in, tmp_path):
    for members in (LINKS["dangling"], LINKS["looping"], HUGE["one member"]):
        packed(tmp_path, *members)
        code, _, errors = type_in("data", "check", "cifar10", tmp_path)
        assert (code, len(errors.splitlines())) == (2, 1)


def test_a_gzip_file_of_more_than_a_set_has_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(small_sets, "MOST", 1000, raising=False)
    for name in small_sets.FASHION_MD5:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(bytes(100_000)))
    with pytest.raises(mc.DataError, match="unpacks to more than 1,000 bytes"):
        load("fashion-mnist", tmp_path)


def test_files_and_folders_are_unpacked(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.addfile(member("folder", type=tarfile.DIRTYPE, mode=0o755))
        archive.addfile(member("folder/file", size=3), io.BytesIO(b"abc"))
    unpack(tmp_path / "a.tar.gz", tmp_path / "out")
    assert (tmp_path / "out/folder/file").read_bytes() == b"abc"
