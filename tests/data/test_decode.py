"""Every kind of JPEG and PNG becomes the same red, green and blue, by either decoder."""

import contextlib
import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

from maskconnect.data import decode as module
from maskconnect.data.decode import decode, decoder_name, resize, with_pillow, with_simplejpeg
from maskconnect.errors import ConfigError, DataError, MaskConnectError

Image = pytest.importorskip("PIL.Image")
ImageChops = pytest.importorskip("PIL.ImageChops")


def photo(height=48, width=64, seed=0):
    """Smooth colors with some noise, for a JPEG of nothing but noise would test no upsampling."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([127 + 90 * np.sin(x / (7 + 3 * c) + y / (11 + c)) for c in range(3)], axis=2)
    noise = np.random.default_rng(seed).normal(0, 12, waves.shape)
    return (waves + noise).clip(0, 255).astype(np.uint8)


def jpeg(image, **options):
    file = io.BytesIO()
    image.save(file, format="JPEG", **options)
    return file.getvalue()


def saved(image, path, **options):
    image.save(path, **options)
    return path


def difference(one, other):
    assert one.shape == other.shape
    return np.abs(one.astype(int) - other.astype(int)).max()


@pytest.fixture(params=["simplejpeg", "Pillow"])
def decoder(request, monkeypatch):
    """Each decoder in turn, as if the other were not there."""
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(module, "_simplejpeg", lambda: None)
    return request.param


def test_the_decoder_in_use_has_a_name(decoder):
    assert decoder_name() == decoder


def test_simplejpeg_is_what_decodes_a_jpeg_where_it_is_installed(tmp_path, monkeypatch):
    pytest.importorskip("simplejpeg")
    path = saved(Image.fromarray(photo()), tmp_path / "a.jpg")
    monkeypatch.setattr(module, "with_pillow", lambda data, name: pytest.fail("Pillow was asked"))
    assert decode(path).shape == (48, 64, 3)


@pytest.mark.parametrize("size", [(48, 64), (33, 17), (1, 1), (7, 3), (200, 150)])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("progressive", [False, True])
def test_the_two_decoders_agree_within_a_gray_level(size, subsampling, progressive):
    pytest.importorskip("simplejpeg")
    for quality in (30, 75, 95):
        image = Image.fromarray(photo(*size))
        data = jpeg(image, quality=quality, subsampling=subsampling, progressive=progressive)
        assert difference(with_simplejpeg(data), with_pillow(data, "it")) <= 1


@pytest.mark.parametrize("subsampling", ["440", "411"])
def test_the_two_decoders_agree_on_what_pillow_cannot_write(subsampling):
    simplejpeg = pytest.importorskip("simplejpeg")
    data = simplejpeg.encode_jpeg(photo(), quality=80, colorsubsampling=subsampling)
    assert difference(with_simplejpeg(data), with_pillow(data, "it")) <= 1


def test_the_two_decoders_agree_on_gray_and_on_jpegs_stored_as_rgb():
    pytest.importorskip("simplejpeg")
    for data in (jpeg(Image.fromarray(photo()[:, :, 0])), jpeg(Image.fromarray(photo()), keep_rgb=True)):
        assert difference(with_simplejpeg(data), with_pillow(data, "it")) <= 1


def test_a_jpeg_comes_out_near_what_went_in(tmp_path, decoder):
    smooth = photo()[:1].repeat(48, axis=0)
    path = saved(Image.fromarray(smooth), tmp_path / "a.JPEG", quality=98, subsampling=0)
    found = decode(path)
    assert (found.dtype, found.flags.writeable) == (np.uint8, True)
    assert difference(found, smooth) < 12


def test_a_gray_jpeg_has_three_equal_channels(tmp_path, decoder):
    gray = photo()[:, :, 0]
    found = decode(saved(Image.fromarray(gray), tmp_path / "a.jpg", quality=98))
    assert (found == found[:, :, :1]).all()
    assert difference(found[:, :, 0], gray) < 12


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (17, 31)])
def test_a_png_comes_out_as_it_went_in(tmp_path, size):
    assert difference(decode(saved(Image.fromarray(photo(*size)), tmp_path / "a.png")), photo(*size)) == 0


def test_a_gray_png_with_or_without_alpha_has_three_equal_channels(tmp_path):
    gray = photo()[:, :, 0]
    expected = np.stack([gray] * 3, axis=2)
    with_alpha = Image.merge("LA", [Image.fromarray(gray), Image.fromarray(photo()[:, :, 1])])
    assert difference(decode(saved(Image.fromarray(gray), tmp_path / "l.png")), expected) == 0
    assert difference(decode(saved(with_alpha, tmp_path / "la.png")), expected) == 0


def test_a_png_with_alpha_keeps_the_colors_that_are_stored(tmp_path):
    image = Image.fromarray(photo()).convert("RGBA")
    image.putalpha(Image.fromarray(photo()[:, :, 1]))
    assert difference(decode(saved(image, tmp_path / "a.png")), photo()) == 0


def test_a_black_and_white_png_is_0_and_255(tmp_path):
    bits = photo()[:, :, 0] > 127
    expected = np.stack([bits * np.uint8(255)] * 3, axis=2)
    assert difference(decode(saved(Image.fromarray(bits), tmp_path / "a.png")), expected) == 0


@pytest.mark.parametrize("options", [{}, {"transparency": 1}, {"transparency": bytes([0, 128, 255])}])
def test_a_palette_is_looked_up_even_if_some_of_it_is_transparent(tmp_path, options):
    number_HW = (photo()[:, :, 0] // 86).astype(np.uint8)
    colors = np.array([[250, 3, 7], [0, 200, 90], [12, 34, 56]], dtype=np.uint8)
    image = Image.fromarray(number_HW)
    image.putpalette(colors.tobytes())
    path = saved(image, tmp_path / "a.png", **options)
    with Image.open(path) as stored:
        assert stored.mode == "P"
    assert difference(decode(path), colors[number_HW]) == 0


def test_of_16_bit_gray_the_upper_8_remain(tmp_path):
    deep = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    found = decode(saved(Image.fromarray(deep), tmp_path / "a.png"))
    assert difference(found, np.stack([deep >> 8] * 3, axis=2)) == 0


def test_of_16_bit_color_the_upper_8_remain(tmp_path):
    """Written by hand, for Pillow writes no such file."""
    deep = np.random.default_rng(0).integers(0, 65536, (4, 5, 3), dtype=np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep)
    header = struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        file += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    (tmp_path / "a.png").write_bytes(file)
    assert difference(decode(tmp_path / "a.png"), deep >> 8) == 0


def without_adobe_marker(data):
    start = data.index(b"\xff\xee")
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4], "big") :]


def test_inks_become_light_whether_adobe_inverted_them_or_not(tmp_path, decoder):
    smooth = photo()[:1].repeat(48, axis=0)
    inks = Image.fromarray(smooth).convert("CMYK")
    adobe = jpeg(inks, quality=98)  # Pillow inverts what it writes, and says so by Adobe's marker
    assert b"Adobe" in adobe
    plain = without_adobe_marker(jpeg(ImageChops.invert(inks), quality=98))
    assert b"Adobe" not in plain
    for data in (adobe, plain):
        (tmp_path / "a.jpg").write_bytes(data)
        assert difference(decode(tmp_path / "a.jpg"), smooth) < 12


def test_the_orientation_in_exif_is_ignored(tmp_path, decoder):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    path = saved(Image.fromarray(photo()), tmp_path / "a.jpg", exif=exif)
    assert decode(path).shape == (48, 64, 3)


def test_a_png_that_is_called_jpeg_is_decoded_all_the_same(tmp_path, decoder):
    path = saved(Image.fromarray(photo()), tmp_path / "a.JPEG", format="PNG")
    assert difference(decode(path), photo()) == 0


@pytest.mark.parametrize("kept", [0, 2, 10, 300, 0.5, 0.99])
def test_a_truncated_jpeg_is_an_error_that_names_it(tmp_path, decoder, kept):
    data = jpeg(Image.fromarray(photo()))
    path = tmp_path / "cut short.jpg"
    path.write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    with pytest.raises(DataError, match=r"cut short\.jpg is not a readable JPEG or PNG image \([^<]+\); replace it"):
        decode(path)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_a_truncated_png_is_an_error_that_names_it(tmp_path, kept):
    path = saved(Image.fromarray(photo()), tmp_path / "short.png")
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(DataError, match=r"short\.png is not a readable JPEG or PNG image"):
        decode(path)


@pytest.mark.parametrize("offset", [8, 14, 40, 200, 1000])
def test_bytes_that_are_wrong_are_a_data_error_or_an_image_but_no_other_error(tmp_path, decoder, offset):
    for suffix in ("jpg", "png"):
        path = saved(Image.fromarray(photo()), tmp_path / f"a.{suffix}")
        data = path.read_bytes()
        path.write_bytes(data[:offset] + bytes(range(255, 215, -1)) + data[offset + 40 :])
        with contextlib.suppress(DataError):
            assert decode(path).shape[2] == 3


def test_a_jpeg_with_stray_bytes_between_its_markers_is_decoded_by_both(tmp_path, decoder):
    """libjpeg warns of them, and simplejpeg makes an error of a warning."""
    data = jpeg(Image.fromarray(photo()))
    scan = data.index(b"\xff\xda")
    (tmp_path / "a.jpg").write_bytes(data[:scan] + b"\0\0\0" + data[scan:])
    assert difference(decode(tmp_path / "a.jpg"), with_pillow(data, "it")) == 0


def test_an_image_of_another_format_is_an_error_that_names_it(tmp_path):
    path = saved(Image.fromarray(photo()), tmp_path / "a.png", format="BMP")
    with pytest.raises(DataError, match=r"a\.png is not a readable JPEG or PNG image \(unknown format\)"):
        decode(path)


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match=r"gone\.png cannot be read \(No such file or directory\)"):
        decode(tmp_path / "gone.png")


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_an_image_of_too_many_pixels_is_an_error_that_names_it(tmp_path, decoder, monkeypatch, suffix):
    path = saved(Image.fromarray(photo()), tmp_path / f"bomb.{suffix}")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match=rf"bomb\.{suffix} is not .*exceeds limit of 2000 pixels"):
        decode(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert decode(path).shape == (48, 64, 3)


def test_resize_keeps_the_mean_of_an_image_that_shrinks():
    image = photo(96, 128)
    small = resize(image, 6, 8)
    assert small.shape == (6, 8, 3)
    np.testing.assert_allclose(small.mean((0, 1)), image.mean((0, 1)), atol=2)
    checks = np.indices((64, 64)).sum(0) % 2 * np.uint8(255)
    gray = resize(np.stack([checks.astype(np.uint8)] * 3, axis=2), 16, 16)
    assert ((gray > 120) & (gray < 136)).all()  # without antialiasing all would be black or white


def test_resize_to_the_same_size_changes_nothing():
    assert difference(resize(photo(), 48, 64), photo()) == 0


def test_resize_takes_the_height_first_and_grows_too():
    assert resize(photo(), 100, 7).shape == (100, 7, 3)


def test_a_part_of_an_image_may_begin_between_two_pixels():
    steps = np.repeat(np.arange(0, 200, 20, dtype=np.uint8)[None, :, None], 10, axis=0).repeat(3, axis=2)
    part = resize(steps, 2, 2, box=(2.5, 0, 4.5, 2))
    assert part[0, :, 0].tolist() == [50, 70]  # half of 40 and half of 60, half of 60 and half of 80


def test_a_size_of_nothing_is_an_error():
    with pytest.raises(ConfigError, match="height and width are 0 and 5; both must be 1 or more"):
        resize(photo(), 0, 5)


def test_without_pillow_the_package_is_imported_and_decoding_says_what_to_install(tmp_path):
    path = saved(Image.fromarray(photo()), tmp_path / "a.jpg")
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "import maskconnect, maskconnect.data.decode as d, maskconnect.data.folder, maskconnect.data.mini\n"
        f"from pathlib import Path\ntry: d.decode(Path({str(path)!r}))\n"
        f"except maskconnect.errors.{MaskConnectError.__name__} as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "PIL is not installed; run: pip install 'maskconnect[data]'\n"
