"""The trace of a replayed search as a table."""

import csv
import io
from pathlib import Path

from autotune.replay.simulation import Trace
from autotune.report.trace_file import COLUMNS


def write_trace(path: Path, trace: Trace) -> None:
    """Write a row for each stretch of training, in the order in which they ended; seconds to the last bit."""
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for order, each in enumerate(trace.stretches):
        rows.writerow([order, *(getattr(each, name) for name in COLUMNS[1:])])
    part = path.with_name(f".{path.name}.part")
    part.write_text(text.getvalue(), encoding="utf-8")
    part.replace(path)
