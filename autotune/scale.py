"""Measure what more workers bring: ``python -m autotune.scale experiment=NAME workers=[1,2,4]``.

One configuration is trained to its target on each number of workers, in turns, in fresh processes. Exit code 0: each number of workers
reached the target; 2: bad input; 3: one never did; 130: interrupted, what was measured until then is told.
"""

import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.config.command_line import (
    EXIT_INTERRUPTED,
    EXIT_NOT_REACHED,
    experiments_help,
    import_user_code_from,
    names_experiment,
    parse_command_line,
    require_experiment,
    run_main,
)
from autotune.errors import ConfigError

_MODES = ("strong", "weak", "both")
_LOG_WIDTH = 120
"""Columns where no terminal says how many there are."""
_PURPOSE = "Measure what more workers bring: time to target, seconds a step and efficiency over their number."
_EPILOG = """keys of its own:
  workers=[1,2,4]                  numbers of workers
  mode=both                        strong: the same batch for all; weak: the same part of it for each worker; or both
  num_seeds=3                      runs of each, in turns

any other key is of the training:
  parallelism=fsdp                 how several workers share it; ddp where it says nothing
  batch_size=256                   on the fewest workers, and on all where scaling is strong
  cluster.address=auto             where it runs
  study.name=NAME study.folder=DIR where results go: outputs/scale-EXPERIMENT-TIME
  dry_run=true                     print the runs and what they need; train nothing
"""


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What the command line asks for."""

    overrides: tuple[str, ...]
    workers: tuple[int, ...]
    modes: tuple[str, ...]
    num_seeds: int


def scale_command(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    line = parse_command_line("python -m autotune.scale", _PURPOSE, f"experiments:\n{experiments_help()}\n\n{_EPILOG}", arguments)
    request = _read(line.overrides)
    require_experiment(names_experiment(request.overrides), line.config_dirs)
    code_folders = import_user_code_from(line.config_dirs)
    if line.cfg:
        from autotune.config.compose import Composer  # noqa: PLC0415  # after --help

        print(Composer(request.overrides, line.config_dirs).config_yaml(line.cfg, resolve=line.resolve), end="")
        return 0
    from rich.console import Console  # noqa: PLC0415  # after --help

    from autotune.execution.comparison_plan import check_comparison, describe_comparison  # noqa: PLC0415  # imports torch
    from autotune.execution.run_scaling import plan_scaling, run_scaling  # noqa: PLC0415  # imports torch
    from autotune.report.scaling import Mode  # noqa: PLC0415  # after --help

    console = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with console.status("reading the configuration and checking every number of workers"):
        plan = plan_scaling(
            request.overrides,
            workers=request.workers,
            modes=[Mode(each) for each in request.modes],
            num_seeds=request.num_seeds,
            config_dirs=line.config_dirs,
        )
        is_dry_run = plan.runs.config.dry_run
        if not (is_dry_run and plan.runs.missing_sources):  # what starts from them could not be made without training them
            check_comparison(plan.runs, say)
    if is_dry_run:
        for text in describe_comparison(plan.runs):
            say(text)
        return 0
    scaling = run_scaling(plan, command=arguments, code_folders=code_folders, console=console)
    if not scaling.is_complete:
        return EXIT_INTERRUPTED
    return 0 if scaling.each_reached else EXIT_NOT_REACHED


def _read(overrides: Sequence[str]) -> _Request:
    """Take the command's own keys out of a command line.

    Raises:
        ConfigError: one is there twice, misspelt, or not what it should be.
    """
    own = {"workers": "[1,2]", "mode": "both", "num_seeds": "3"}
    given = [each for each in overrides if each.partition("=")[0] in own]
    keys = [each.partition("=")[0] for each in given]
    for key in (each.partition("=")[0] for each in overrides if each not in given):
        close = difflib.get_close_matches(key, ("workers", "num_seeds"), n=1, cutoff=0.75)
        if close:
            raise ConfigError(f"{key}: no such key (did you mean {close[0]}=...?)")
    twice = next((each for each in keys if keys.count(each) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice}: found twice; accepted is once")
    own |= {key: each.partition("=")[2] for key, each in zip(keys, given, strict=True)}
    if not re.fullmatch(r"\[\s*[1-9]\d*(\s*,\s*[1-9]\d*)+\s*\]", own["workers"].strip()):
        raise ConfigError(
            f"workers: found {own['workers']!r}, accepted is a list of at least two numbers of workers, as in workers=[1,2,4]"
        )
    workers = tuple(sorted({int(each) for each in re.findall(r"\d+", own["workers"])}))
    if len(workers) < 2:
        raise ConfigError(f"workers: found {own['workers']!r}, accepted are at least two different numbers")
    if own["mode"] not in _MODES:
        raise ConfigError(f"mode: found {own['mode']!r}, accepted are {', '.join(_MODES)}")
    if not re.fullmatch(r"[1-9]\d*", own["num_seeds"]):
        raise ConfigError(f"num_seeds: found {own['num_seeds']!r}, accepted is a whole number from 1")
    modes = ("strong", "weak") if own["mode"] == "both" else (own["mode"],)
    kept = tuple(each for each in overrides if each not in given)
    return _Request(overrides=kept, workers=workers, modes=modes, num_seeds=int(own["num_seeds"]))


def main() -> None:
    """Entry point of ``python -m autotune.scale``."""
    run_main(scale_command)


if __name__ == "__main__":
    main()
