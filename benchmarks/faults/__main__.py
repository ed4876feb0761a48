"""Does a study survive what goes wrong? ``python -m benchmarks.faults``.

A study of at least 60 trainings of a tenth of a second, which are paused and gone on with (except
under TPE, in three rows), with Optuna's journal, MLflow on SQLite and a confirmation, meets one
fault again and again while it runs, is resumed by the same command where it ended, and runs to its
end without one. Then its records (``records.py``) are read without autotune's own code. For each
row of the table:

* injected: faults that met a running process of the study; only those are counted;
* finished: trials with a result at the end;
* lost: runs whose result stood in the storage or in ``trials.csv`` when a process of the study
  ended, and that the storage, MLflow, ``trials.csv`` or the recording do not have at the end;
* doubled: results that stand twice in the journal, runs that are twice in a record, and trainings
  of what had a result already, by the diary that the trainings write;
* disagree: contradictions of storage, ``trials.csv``, recording, MLflow and ``best.json``; runs
  that one of them lacks; trials that are still running; trials that were charged for time they did
  not train, and are not marked; another outcome than the fault's;
* leftovers: processes ten seconds after the driver's end (found by an environment variable), and at
  the end of the study Ray's session folders, temporary files, shared memory, lock files, states,
  and MLflow's runs that are open;
* seconds: the longest time from a fault to the end of the driver, or to the next training where the
  study goes on;
* the line: what the driver printed last as it ended because of the fault.

Rows of the killing bench (``killing.py``), which run where they are named, claim more of trainings
of a minute.

Exit code 0: everything is 0, every end was told in one line, in at most 30 s, and each row has as
many injections as it should; 1: a list of what does not hold; 2: no such row. A row that this
machine cannot inject (no root, no control groups, no C compiler) does not hold.
"""

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

from benchmarks.faults.killing import WAYS, KilledStudy
from benchmarks.faults.rows import ROWS, Row, UnavailableError
from benchmarks.faults.study import Study
from benchmarks.measuring import circumstances, write_result

_MAX_SHOWN = 5
_LONG_PART_SECONDS = 0.1
"""Seconds of a part of a training from which on a row's trainings are long."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one row came to."""

    name: str
    what: str
    wanted: int
    injected: int
    finished: int
    lost: Sequence[str]
    doubled: Sequence[str]
    disagreeing: Sequence[str]
    leftovers: Sequence[str]
    faults: Sequence[str]
    """What else is wrong: tracebacks, several lines or none, too late, not to be injected here."""
    seconds: Sequence[float]
    lines: Sequence[str]
    row_seconds: float
    measured: Mapping[str, Any]
    """What the killing bench measures: the share of steps that were repeated, by what; kills,
    starts, exit codes, and the jobs of each run."""

    def wrong(self) -> Iterator[str]:
        """What does not hold, a line each."""
        if self.injected < self.wanted:
            yield f"{self.injected} injections of {self.wanted}"
        for kind in ("lost", "doubled", "disagreeing", "leftovers", "faults"):
            told: Sequence[str] = getattr(self, kind)
            yield from (f"{kind}: {line}" for line in told[:_MAX_SHOWN])
            if len(told) > _MAX_SHOWN:
                yield f"{kind}: {len(told) - _MAX_SHOWN} more"


def run_row(row: Row, *, count: int | None = None, num_trials: int | None = None) -> Found:
    """Run one row; ``count`` and ``num_trials`` in place of the row's own."""
    began = time.monotonic()
    study = (
        Study(
            row.name,
            row.count if count is None else min(row.count, count),
            overrides=row.overrides,
            part_seconds=row.part_seconds,
            environment=row.environment,
            outcomes=row.outcomes,
            is_alone=row.is_alone,
            **({} if num_trials is None else {"num_trials": num_trials}),
        )
        if row.killed is None
        else KilledStudy(row.name, row.killed)
    )
    study.tracking = f"sqlite:///{study.home / row.database}"
    try:
        row.inject(study)
        study.finish()
        study.check()
    except UnavailableError as error:
        study.faults.append(f"cannot be injected here: {error}")
    except Exception as error:  # noqa: BLE001  # the other rows go on
        traceback.print_exc()
        study.faults.append(f"the bench itself failed: {error!r}")
    finally:
        if is_wrong := bool(
            study.lost or study.doubled or study.disagreeing or study.leftovers or study.faults
        ):
            study.faults.append(f"its files are kept in {study.home}")
        study.close(keeps_files=is_wrong)
    return Found(
        name=row.name,
        what=row.what,
        wanted=study.count,
        injected=study.injected,
        finished=study.finished,
        lost=sorted(study.lost),
        doubled=sorted(study.doubled),
        disagreeing=sorted(study.disagreeing),
        leftovers=sorted(study.leftovers),
        faults=study.faults,
        seconds=study.seconds,
        lines=study.lines,
        row_seconds=time.monotonic() - began,
        measured=getattr(study, "measured", {}),
    )


def _lengths(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "unit_seconds": arguments.seconds,
        "num_trials": arguments.trials,
        "ways": tuple(arguments.ways.split(",")),
    }


def _print(found: Found) -> None:
    counts = (
        found.injected,
        found.finished,
        *map(len, (found.lost, found.doubled, found.disagreeing, found.leftovers)),
    )
    line = found.lines[-1] if found.lines else "goes on"
    longest = max(found.seconds, default=0.0)
    print(
        f"{found.name:<22}"
        + "".join(f"{count:>9}" for count in counts)
        + f"{longest:>8.1f}{found.row_seconds:>7.0f}  {line[:150]}"
    )
    if found.measured:
        print(f"    {found.measured}")
    for wrong in found.wrong():
        print(f"    {wrong[:300]}")
    sys.stdout.flush()


def main() -> int:
    """Run the rows, print and write what they come to, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--rows",
        help=(
            "only these, with commas between them; those of the killing bench take hours and run"
            " only so: 'killed-*,confirmed-*,compared-*,jobs-*'"
        ),
    )
    parser.add_argument("--injections", type=int, help="at most so many a row")
    parser.add_argument(
        "--side-by-side",
        type=int,
        default=2,
        help=(
            "rows that run at once, beside one of long trainings, which leave the CPUs idle; except"
            " those that need the machine alone"
        ),
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="killing: of a training, a job")
    parser.add_argument("--trials", type=int, default=12, help="killing: trainings of a study")
    parser.add_argument("--ways", default=",".join(WAYS), help="killing: what happens, in turn")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    arguments = parser.parse_args()
    patterns = arguments.rows.split(",") if arguments.rows else []
    chosen = [
        replace(row, killed=row.killed and replace(row.killed, **_lengths(arguments)))
        for row in ROWS
        if (any(fnmatch(row.name, each) for each in patterns) if patterns else not row.killed)
    ]
    unknown = [each for each in patterns if not any(fnmatch(row.name, each) for row in ROWS)]
    if unknown := [*unknown, *(set(arguments.ways.split(",")) - set(WAYS))]:
        print(
            f"--rows, --ways: found {', '.join(unknown)}; use"
            f" {', '.join(row.name for row in ROWS)}; {', '.join(WAYS)}",
            file=sys.stderr,
        )
        return 2
    if arguments.list:
        for row in chosen:
            print(f"{row.name:<22} {row.count:>3}  {row.what}")
        return 0

    started, began = circumstances(), time.monotonic()
    header = ("injected", "finished", "lost", "doubled", "disagree", "left")
    print(
        f"{'fault':<22}"
        + "".join(f"{title:>9}" for title in header)
        + f"{'seconds':>8}{'row':>7}  the line",
        flush=True,
    )
    founds: list[Found] = []

    def run(row: Row) -> None:
        founds.append(run_row(row, count=arguments.injections))
        _print(founds[-1])

    together = sorted(
        (row for row in chosen if not row.is_alone),
        key=lambda row: (not row.ends_study, -row.part_seconds),
    )
    with ThreadPoolExecutor(arguments.side_by_side) as pool, ThreadPoolExecutor(1) as beside:
        running = [
            (beside if row.part_seconds >= _LONG_PART_SECONDS else pool).submit(run, row)
            for row in together
        ]
    for future in running:
        future.result()
    for row in chosen:
        if row.is_alone:
            run(row)
    wrong = {found.name: list(found.wrong()) for found in founds}
    holds = not any(wrong.values())
    path = write_result(
        "faults",
        started=started,
        settings=vars(arguments),
        result={
            "holds": holds,
            "wrong": wrong,
            "seconds": time.monotonic() - began,
            "rows": founds,
        },
    )
    if not holds:
        print(
            "does not hold: "
            + ", ".join(f"{name} ({len(lines)})" for name, lines in wrong.items() if lines)
        )
    print(
        f"{'holds' if holds else 'FAILS'}: nothing lost, doubled, contradicting or left behind, and"
        f" one line for each end, over {sum(found.injected for found in founds)} faults in"
        f" {len(founds)} rows"
    )
    print(f"written to {path}")
    return 0 if holds else 1


if __name__ == "__main__":
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # nohup's and a background job's ignored signals would be ignored by the studies, too
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
