"""The command that the killing bench tunes, and the diary of all trainings that it kills.

``python long_command.py RATE WIDTH DIARY SECONDS STATE_SECONDS FOLDER`` draws a number a step, adds
it up, and writes a file of its own into the folder that it is given, from which it continues: every
so many seconds, and when it is ended by SIGTERM. It imports neither torch nor autotune, so it
starts at once.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

EPOCHS, STEPS = 30, 4
"""Evaluations of a training, and the steps of each."""


class Steps:
    """The diary of one training in one process: a line for each step, once it is done.

    Args:
        diary: file that all trainings append to, each line in one call.
        seconds: that a step lasts, apart from what it computes.
        rate: a value that is searched, as is ``width``; with the seed they say what is trained.
    """

    def __init__(self, diary: str, seconds: float, seed: int, rate: float, width: int) -> None:
        self._diary, self._seconds, self._is_begun = diary, seconds, False
        folder = os.environ.get("AUTOTUNE_TRIAL_FOLDER")
        self._facts = {
            "seed": seed,
            "rate": rate,
            "width": width,
            "run": None if folder is None else Path(folder).name,
            "folder": folder,
            "rank": int(os.environ.get("RANK", "0")),
        }

    def sleep(self) -> None:
        """Last as long as a step does."""
        time.sleep(self._seconds)

    def done(self, step: int, state: bytes, rank: int | None = None) -> None:
        """Write the line of a step, counted from 1, and what the training then was."""
        if not self._is_begun:
            self._write("begin", rank, part=step - 1)
            self._is_begun = True
        self._write("step", rank, step=step, digest=hashlib.sha256(state).hexdigest()[:16])

    def _write(self, event: str, rank: int | None, **facts: Any) -> None:
        own = {"event": event, "pid": os.getpid(), "at": time.monotonic()}
        ranks = {} if rank is None else {"rank": rank}
        line = json.dumps({**own, **self._facts, **ranks, **facts}) + "\n"
        file = os.open(self._diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, line.encode())
        os.close(file)


def main(rate: float, width: int, steps: Steps, state_seconds: float, path: Path) -> None:
    """Train, from the state in the file ``path`` where there is one."""
    chance, total, step, state = random.Random(os.environ["AUTOTUNE_SEED"]), 0.0, 0, ""
    if path.exists():
        kept = json.loads(path.read_text())
        step, total = kept["step"], kept["total"]
        version, numbers, gauss = kept["chance"]
        chance.setstate((version, tuple(numbers), gauss))

    def save() -> None:
        if state and os.environ.get("RANK", "0") == "0":
            path.with_suffix(".new").write_text(state)
            path.with_suffix(".new").replace(path)

    def end(*_: object) -> None:
        save()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    saved_at = time.monotonic()
    while step < EPOCHS * STEPS:
        steps.sleep()
        total = total * (1 - rate) + chance.gauss(0, width)
        step += 1
        steps.done(step, repr(total).encode())
        if step % STEPS == 0:
            state = json.dumps({"step": step, "total": total, "chance": chance.getstate()})
            if time.monotonic() - saved_at >= state_seconds:
                save()
                saved_at = time.monotonic()
            report = {"accuracy": step / STEPS / EPOCHS, "epoch": step // STEPS}
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    rate, width, diary, seconds, state_seconds, folder = sys.argv[1:]
    steps = Steps(diary, float(seconds), int(os.environ["AUTOTUNE_SEED"]), float(rate), int(width))
    main(float(rate), int(width), steps, float(state_seconds), Path(folder, "state.json"))
