"""Seeding every generator that a training may draw from."""

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, all devices included."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
