"""Counter-based random numbers: a pure function of (seed, sample, draw), the same on every device.

The numbers are a hash of a counter in 64-bit integers (the finalizer of splitmix64: G. Steele, D. Lea, C. Flood: Fast
splittable pseudorandom number generators, 2014), computed for whole batches.
"""

from __future__ import annotations

import hashlib

import torch

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as int64, in which products wrap around


def derived(*parts: object) -> int:
    """Derive a seed, at least 0 and below 2⁶³, from ``parts``."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def bits(seed: int, numbers: torch.Tensor, draws: int) -> torch.Tensor:
    """Return random bits, int64 (n, draws), for the sample indices ``numbers``, int64 (n,), on the same device."""
    key = _mix(numbers * GOLDEN + _scramble(seed))
    return _mix(key[:, None] + torch.arange(1, draws + 1, device=numbers.device) * GOLDEN)


def uniform(random: torch.Tensor) -> torch.Tensor:
    """Convert random bits to float64 numbers, at least 0 and below 1."""
    return _shift(random, 11).double() * 2.0**-53


def below(random: torch.Tensor, limit: int) -> torch.Tensor:
    """Convert random bits to int64 numbers, at least 0 and below ``limit``, which is at most 2³¹."""
    return _shift(random, 33) * limit >> 31


def sample_seed(seed: int, number: int) -> int:
    """Return the seed, at least 0 and below 2⁶³, for all random operations on one sample."""
    return int(_shift(bits(seed, torch.tensor([number]), 1), 1))


def _scramble(seed: int) -> int:
    """Hash ``seed``. Without the hash, seed + GOLDEN would give the random bits of ``seed``, shifted by one sample."""
    wrapped = (seed + 2**63) % 2**64 - 2**63
    return int(_mix(torch.tensor(wrapped)))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, distance: int) -> torch.Tensor:
    """Shift right and fill with zeros; torch's ``>>`` fills with the sign bit."""
    return (x >> distance) & ((1 << (64 - distance)) - 1)
