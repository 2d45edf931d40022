"""Random numbers that depend only on seed, epoch and the index of an image, not on the order of calls.

So order and augmentation are the same with any number of workers or machines, and after a run resumes in the middle of
an epoch. The numbers come from SplitMix64 (Steele, Lea and Flood, 2014), a bijection of 64 bits that mixes well.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from maskconnect.errors import ConfigError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seed: int, epoch: int, index: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Return `count` numbers in [0, 1) for every image at `index`, N x count."""
    for name, number in (("seed", seed), ("epoch", epoch)):
        if not 0 <= number < 2**63:
            raise ConfigError(f"{name} is {number}; it must be at least 0 and below 2**63.")
    with np.errstate(over="ignore"):
        key = _mix(_mix(np.uint64(seed)) ^ np.uint64(epoch))
        image = _mix(key ^ index.astype(np.uint64))
        bits = _mix(image[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def order(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Return the order of the images in an epoch: a permutation of 0 to size-1, by the first number of each."""
    number = uniform(seed, epoch, np.arange(size), 1)[:, 0]
    return np.argsort(number, kind="stable")


def _mix(z: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = z + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)))
