"""What a study's ``trace.csv`` tells."""

import csv
import itertools
from pathlib import Path


def trained_at_once(trace: Path) -> bool:
    """Whether two trials were ever in training at the same time."""
    if not trace.is_file():
        return False
    with trace.open(newline="") as file:
        spans = [(float(row["started_seconds"]), float(row["stopped_seconds"])) for row in csv.DictReader(file)]
    return any(one[0] < other[1] and other[0] < one[1] for one, other in itertools.combinations(spans, 2))
