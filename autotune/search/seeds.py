"""Seeds: the seeds of all trials, samplers and confirmation runs of a study are derived from the study's seed."""

import hashlib


def derived_seed(seed: int, purpose: str) -> int:
    """A seed for one purpose, the same on every machine: 31 bits of a SHA-256 of ``seed`` and ``purpose``."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:4]) >> 1
