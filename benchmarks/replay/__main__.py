"""Replay a search over recorded learning curves: ``python -m benchmarks.replay recording=DIR
[search=... stopping=...]``.

Nothing is trained: on a virtual clock, a trial takes the seconds that were recorded. Exit code 0: a
trace was written; 2: bad input.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.config.command_keys import own_key, own_keys_help, read_own_keys
from autotune.config.command_line import composer_of, parse_command_line, run_main
from autotune.errors import ConfigError, check_choice
from autotune.remote import refuse_url, user_path

_PURPOSE = (
    "Replay a search over a recording: what would have been trained, in which order, and for how"
    " long."
)
_OTHER_KEYS = """what is replayed:
  search=tpe stopping=cap      the groups of a study, and their keys: stopping.cap_margin=1.1
  cluster.price_per_hour={...}  of devices, for objective=cost
  search.num_trials=40         trials to end; else all that the recording has
  warm_start=[DIR2,NAME]       recordings or studies that the search learns from
"""
_SEARCH_KEYS = (
    "search",
    "stopping",
    "objective",
    "cluster",
    "warm_start",
    "study",
    "tracking",
    "allowed_targets",
)


@dataclass(kw_only=True)
class ReplayKeys:
    """Keys that ``benchmarks.replay`` takes beside those of the configuration."""

    recording: str = own_key(
        ...,
        "a recording: outputs/STUDY/recording, or any folder of that format (docs/recording.md)",
        shown="DIR",
    )
    seed: int = own_key(0, "of the search", least=0)
    num_workers: int = own_key(1, "virtual workers", least=1)
    within: float | None = own_key(
        0.1,
        "end when a trial is within 10% of the best recorded time to target, whatever the"
        " objective; null: when none is left",
        least=0,
    )
    repeats: str = own_key(
        "recorded",
        "points that the search may train again: those recorded again, or any, as in a study",
    )
    output: str = own_key("trace.csv", "where the trace goes")


def replay_command(arguments: Sequence[str]) -> int:
    """Run ``python -m benchmarks.replay`` with command-line arguments and return its exit code."""
    epilog = f"{own_keys_help(ReplayKeys)}\n\n{_OTHER_KEYS}"
    line = parse_command_line(
        "python -m benchmarks.replay", _PURPOSE, epilog, arguments, takes="recording=DIR"
    )
    own, overrides = read_own_keys(ReplayKeys, line.overrides)
    other = next(
        (
            override
            for override in overrides
            if re.split("[.=]", override.lstrip("+"))[0] not in _SEARCH_KEYS
        ),
        None,
    )
    if other is not None:
        raise ConfigError(
            f"{other}: accepted beside the command's own keys are those of"
            f" {', '.join(_SEARCH_KEYS)}; --help shows them"
        )
    check_choice("repeats", own.repeats, ("recorded", "any"))
    refuse_url(
        own.recording, "recording", "a folder of this machine, such as outputs/STUDY/recording"
    )
    refuse_url(own.output, "output", "a file of this machine")
    output = user_path(own.output)
    from autotune.recording import read_recording  # after --help
    from autotune.search.study import earlier_recording  # imports optuna
    from autotune.search.warm_start import earlier_study  # imports optuna
    from benchmarks.replay.replayed_policy import replayed_policy  # imports optuna
    from benchmarks.replay.simulation import best_seconds, replay, write_trace  # imports optuna

    composer = composer_of(line, ["search.num_trials=null", *overrides])
    composer.refuse_sweeps()
    composed = composer.compose()
    recording = read_recording(user_path(own.recording))
    if not output.parent.is_dir():
        raise ConfigError(f"output={output}: there is no folder {output.parent}")
    config = composed.config
    studies = Path(config.study.folder)
    earlier_by_name = [
        earlier_recording(entry, studies=studies, storage_url=config.search.storage)
        for entry in config.warm_start
    ]
    earlier = [earlier_study(name, recorded, recording.space) for name, recorded in earlier_by_name]
    for study in earlier:
        print(f"warm start: {study.summary}")
    trace = replay(
        recording,
        lambda place: replayed_policy(
            recording, composed, seed=own.seed, place=place, earlier=earlier
        ),
        num_workers=own.num_workers,
        within=own.within,
        repeats_any=own.repeats == "any",
    )
    write_trace(output, trace)
    num_trials = len({stretch.trial for stretch in trace.stretches})
    print(
        f"{Path(own.recording).name}: {num_trials} of {len(recording.trials)} trials,"
        f" {trace.train_seconds:.4g} s of training"
    )
    best = best_seconds(recording)
    if best is None:
        print("no recorded trial reaches the target")
    else:
        within = 0.1 if own.within is None else own.within
        seconds = trace.seconds_until(recording, within)
        when = (
            "never"
            if seconds is None
            else f"after {seconds:.4g} device seconds, {seconds / best:.4g} times that"
        )
        print(f"best recorded time to target {best:.4g} s; one within {within:.0%} of it: {when}")
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    run_main(replay_command)
