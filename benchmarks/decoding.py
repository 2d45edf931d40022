"""Compare simplejpeg with Pillow: the time to decode a photograph, and the difference of pixels.

OMP_NUM_THREADS=1 python benchmarks/decoding.py --images 200
"""

from __future__ import annotations

import argparse
import io
import time

import numpy as np
from PIL import Image

from maskconnect.data.decode import Pixels, decoder_name, with_pillow, with_simplejpeg

HEIGHT, WIDTH = 375, 500  # the most common size in ImageNet


def photograph(seed: int) -> bytes:
    """Return a JPEG of smooth colors with some noise, about as large as one of ImageNet."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    waves = [127 + 90 * np.sin(x / generator.uniform(5, 40) + y / generator.uniform(5, 40)) for _ in range(3)]
    pixels = np.stack(waves, axis=2) + generator.normal(0, 12, (HEIGHT, WIDTH, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, format="JPEG", quality=90)
    return file.getvalue()


def timed_simplejpeg(data: bytes) -> tuple[float, Pixels]:
    """Return the time in seconds, and the image."""
    start = time.perf_counter()
    image_HW3 = with_simplejpeg(data)
    seconds = time.perf_counter() - start
    assert image_HW3 is not None
    return seconds, image_HW3


def timed_pillow(data: bytes) -> tuple[float, Pixels]:
    """Return the time in seconds, and the image."""
    start = time.perf_counter()
    image_HW3 = with_pillow(data, "a photograph")
    return time.perf_counter() - start, image_HW3


def main() -> None:
    """Decode every photograph with both in turn, several times; use the shortest time of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200, help="number of photographs (default: 200)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is decoded (default: 5)")
    arguments = parser.parse_args()
    if arguments.images < 1 or arguments.rounds < 1:
        parser.error("--images and --rounds must be 1 or more")
    if decoder_name() != "simplejpeg":
        parser.error("simplejpeg is not installed; install it to compare it with Pillow")
    files = [photograph(seed) for seed in range(arguments.images)]
    least = np.full((2, len(files)), np.inf)
    apart = 0
    for _ in range(arguments.rounds):
        for number, data in enumerate(files):
            (fast, one_HW3), (slow, other_HW3) = timed_simplejpeg(data), timed_pillow(data)
            least[:, number] = np.minimum(least[:, number], (fast, slow))
            apart = max(apart, int(np.abs(one_HW3.astype(int) - other_HW3).max()))
    fast, slow = 1000 * least.mean(axis=1)
    size = sum(map(len, files)) / len(files) / 1000
    print(f"{len(files)} JPEGs of {WIDTH}x{HEIGHT}, {size:.0f} kB each, least of {arguments.rounds} rounds, in ms")
    print(f"simplejpeg {fast:.3f}, Pillow {slow:.3f}: Pillow takes {slow / fast:.2f} times as long")
    print(f"largest difference of a pixel: {apart}")


if __name__ == "__main__":
    main()
