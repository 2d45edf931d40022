"""Files that are none, that never end, or that are nested without end: an error each, and no hang."""

import json
import os

import pytest

from maskconnect.reading import parse_json, parse_toml, read_bytes, read_json

pytestmark = pytest.mark.timeout(20)
DEEP = 100_000


def pipe(path):
    os.mkfifo(path)
    return path


def device(path):
    path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("make", [pipe, device])
def test_a_pipe_or_a_device_is_an_error_and_no_hang(make, tmp_path):
    with pytest.raises(OSError, match="it is a pipe, a device or a socket, not a file"):
        read_bytes(make(tmp_path / "x"))


def test_a_file_and_a_link_to_one_are_read(tmp_path):
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").symlink_to("a")
    assert read_bytes(tmp_path / "a", 2) == read_bytes(tmp_path / "b") == b"12"
    with pytest.raises(OSError, match="it has 2 bytes, more than 1"):
        read_bytes(tmp_path / "a", 1)


@pytest.mark.parametrize("depth", [33, 500, DEEP])
@pytest.mark.parametrize("ends", ["[]", '{"a":}'])
def test_json_that_is_nested_deeply_is_an_error(depth, ends):
    with pytest.raises(ValueError, match="nested deeper than 32 levels"):
        parse_json(ends[:-1] * depth + "1" + ends[-1] * depth)


@pytest.mark.parametrize("depth", [33, 300, DEEP])
@pytest.mark.parametrize("form", ["a = [{}]", "a = {{a = {}}}"])
def test_toml_that_is_nested_deeply_is_an_error(depth, form):
    start, end = form.removeprefix("a = ").split("{}") if "[" in form else ("{a = ", "}")
    with pytest.raises(ValueError, match="nested deeper than 32 levels"):
        parse_toml("a = " + start * depth + "1" + end * depth)


@pytest.mark.parametrize("form", ["{} = 1", "[{}]", "a = {{{} = 1}}"])
def test_keys_of_many_parts_are_an_error_and_no_hang(form):
    for count in (100, DEEP):
        with pytest.raises(ValueError, match=r"nested deeper|more than 200 dots"):
            parse_toml(form.format(".".join("a" * count)))


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999", "-1e400"])
def test_a_number_that_is_not_finite_is_an_error(number, tmp_path):
    (tmp_path / "a.json").write_text(f'{{"a": [{number}]}}')
    with pytest.raises(ValueError, match="it holds a number that is not finite"):
        read_json(tmp_path / "a.json")
    assert parse_json(number, finite=False) is not None


def test_what_is_sound_is_read():
    plain = {"a": [1, 2.5, None, True, "x"], "b": {"c": [[[]]]}}
    assert parse_json(json.dumps(plain)) == plain
    assert parse_toml("a.b.c = 1\n[d]\ne = [[1]]") == {"a": {"b": {"c": 1}}, "d": {"e": [[1]]}}
