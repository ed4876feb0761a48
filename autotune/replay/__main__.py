"""Replay a search over recorded learning curves: ``python -m autotune.replay recording=DIR [search=... stopping=...]``.

Nothing is trained: a trial takes the seconds that were recorded, on a virtual clock. Exit code 0: a trace was written; 2: bad input.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.config.command_line import import_user_code_from, parse_command_line, run_main
from autotune.errors import ConfigError
from autotune.remote.url import refuse_url

_PURPOSE = "Replay a search over a recording: what would have been trained, in which order, and for how long."
_EPILOG = """keys of its own:
  recording=DIR                a recording: outputs/STUDY/recording, or any folder of that format (docs/recording.md)
  seed=0                       of the search
  num_workers=1                virtual workers
  lost_every_seconds=null      mean seconds of the virtual clock until a worker is lost; its trial begins again
  within=0.1                   end when a trial reaches the target within 10% of the best recorded time, whatever the objective; null: when
                               none is left
  resume_seconds=0             what taking up a paused trial takes, which the clock leaves out; told besides
  decision_seconds=0           what a decision takes, likewise
  output=trace.csv             where the trace goes

what is replayed:
  search=tpe stopping=cap      the same groups as of a study (objective too), and their keys, as in stopping.cap_margin=1.1
  cluster.price_per_hour={...}  of devices, for objective=cost; the recording must tell what the objective needs
  search.num_trials=40         trials to end; else all that the recording has
  warm_start=[DIR2,NAME]       recordings, studies or MLflow runs that the search learns from
"""
_OWN_KEYS = ("recording", "seed", "num_workers", "within", "lost_every_seconds", "resume_seconds", "decision_seconds", "output")
_SEARCH_KEYS = ("search", "stopping", "objective", "cluster", "warm_start", "study", "tracking", "allowed_targets")


@dataclass(kw_only=True)
class _Request:
    """What the command line asks for."""

    recording: Path
    seed: int = 0
    num_workers: int = 1
    within: float | None = 0.1
    lost_every_seconds: float | None = None
    resume_seconds: float = 0.0
    decision_seconds: float = 0.0
    output: Path = Path("trace.csv")
    overrides: list[str] = field(default_factory=list)


def replay_command(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    line = parse_command_line("python -m autotune.replay", _PURPOSE, _EPILOG, arguments, takes="recording=DIR")
    request = _read(line.overrides)
    from autotune.config.compose import Composer  # noqa: PLC0415  # after --help
    from autotune.recording import read_recording  # noqa: PLC0415  # likewise
    from autotune.replay.replayed_policy import replayed_policy  # noqa: PLC0415  # imports optuna
    from autotune.replay.simulation import replay  # noqa: PLC0415  # likewise
    from autotune.replay.trace_file import write_trace  # noqa: PLC0415  # likewise
    from autotune.search.earlier_trials import earlier_study  # noqa: PLC0415  # likewise
    from autotune.tracking.earlier_recordings import earlier_recordings  # noqa: PLC0415  # likewise

    import_user_code_from(line.config_dirs)
    composer = Composer(["search.num_trials=null", *request.overrides], line.config_dirs)
    composer.refuse_sweeps()
    composed = composer.compose()
    recording = read_recording(request.recording)
    if not request.output.parent.is_dir():
        raise ConfigError(f"output={request.output}: there is no folder {request.output.parent}")
    config = composed.config
    named = earlier_recordings(config.warm_start, Path(config.study.folder), config.tracking.get("uri"))
    earlier = [earlier_study(name, each, recording.space) for name, each in named]
    for each in earlier:
        print(f"warm start: {each.summary}")
    trace = replay(
        recording,
        lambda place: replayed_policy(recording, composed, seed=request.seed, place=place, earlier=earlier),
        num_workers=request.num_workers,
        within=request.within,
        lost_every_seconds=request.lost_every_seconds,
        seed=request.seed,
    )
    write_trace(request.output, trace)
    trials = len({each.trial for each in trace.stretches})
    print(f"{request.recording.name}: {trials} of {len(recording.trials)} trials, {trace.train_seconds:.4g} s of training")
    if request.resume_seconds or request.decision_seconds:
        charges = trace.charges(resume_seconds=request.resume_seconds, decision_seconds=request.decision_seconds)
        print(f"resuming and deciding take {charges:.4g} device seconds besides, which are in no figure below")
    best = recording.best_seconds
    if best is None:
        print("no recorded trial reaches the target")
    else:
        within = 0.1 if request.within is None else request.within
        seconds = trace.seconds_until(recording, within)
        found = "never" if seconds is None else f"after {seconds:.4g} device seconds, {seconds / best:.4g} times that"
        print(f"best recorded time to target {best:.4g} s; one within {within:.0%} of it: {found}")
    print(f"wrote {request.output}")
    return 0


def _read(overrides: Sequence[str]) -> _Request:
    given: dict[str, str] = {}
    passed: list[str] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if key in _OWN_KEYS and equals:
            given[key] = value
        elif key.split(".")[0].lstrip("+") in _SEARCH_KEYS:
            passed.append(text)
        else:
            raise ConfigError(
                f"{text}: accepted are recording=DIR, {', '.join(_OWN_KEYS[1:])}, warm_start, and keys of search, stopping and objective; "
                f"--help shows them"
            )
    if "recording" not in given:
        raise ConfigError("no recording; accepted is recording=DIR, a folder such as outputs/STUDY/recording")
    refuse_url(given["recording"], "recording", "a folder of this machine, such as outputs/STUDY/recording")
    refuse_url(given.get("output", ""), "output", "a file of this machine")
    request = _Request(recording=Path(given["recording"]).expanduser(), overrides=passed)
    request.output = Path(given.get("output", request.output)).expanduser()
    request.seed = _whole("seed", given.get("seed", "0"), least=0)
    request.num_workers = _whole("num_workers", given.get("num_workers", "1"), least=1)
    request.within = _number_or_null("within", given.get("within", "0.1"))
    request.lost_every_seconds = _number_or_null("lost_every_seconds", given.get("lost_every_seconds", "null"))
    request.resume_seconds = _number_or_null("resume_seconds", given.get("resume_seconds", "0")) or 0.0
    request.decision_seconds = _number_or_null("decision_seconds", given.get("decision_seconds", "0")) or 0.0
    if request.lost_every_seconds == 0:
        raise ConfigError("lost_every_seconds: found 0, accepted is a number above 0, or null")
    return request


def _whole(key: str, text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ConfigError(f"{key}: found {text!r}, accepted is a whole number from {least}")
    return value


def _number_or_null(key: str, text: str) -> float | None:
    if text == "null":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{key}: found {text!r}, accepted is a number from 0, or null")
    return value


def main() -> None:
    """Entry point of ``python -m autotune.replay``."""
    run_main(replay_command)


if __name__ == "__main__":
    main()
