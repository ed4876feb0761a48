"""Seeds: one study's seed makes those of all its trials, samplers and confirmation runs."""

import hashlib


def derived_seed(seed: int, purpose: str) -> int:
    """A seed of its own for each purpose, the same on every machine: 31 bits of a SHA-256."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:4]) >> 1
