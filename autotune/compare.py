"""Compare two configurations by time to target: ``python -m autotune.compare experiment=NAME a=[key=value,...] b=[...]``.

Both are trained in turns, in fresh processes, on ``num_seeds`` seeds that they share. Exit code 0: compared; 2: bad input; 3: a side
never reached the target, so there is at most a bound; 130: interrupted, what was measured until then is told; 1: the code that was
trained failed several times in a row.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from autotune.config.command_line import (
    EXIT_INTERRUPTED,
    EXIT_NOT_REACHED,
    experiments_help,
    import_user_code_from,
    parse_command_line,
    require_experiment,
    run_main,
)
from autotune.errors import ConfigError
from autotune.report.compared import Comparison

_NUM_SEEDS = 10
_FEWEST_SEEDS = 2
_PURPOSE = "Compare two configurations by time to target and time of a step: in turns, in fresh processes."
_ACCEPTED = "accepted is a=[key=value,...] b=[key=value,...], as in a=[device=cpu] b=[device=cuda]; [] is the experiment as it stands"
_EPILOG = f"""keys of its own:
  a=[key=value,...] b=[key=value,...]   what each side has beside what both have; quote it: 'a=[optimizer=adamw,optimizer.lr=0.01]'
  num_seeds={_NUM_SEEDS}                          pairs of runs; the two of a pair share their seed

any other key is of both sides:
  experiment=NAME                       what to run; a side may have its own: a=[experiment=cnn] b=[experiment=mine]
  target.value=0.97                     what counts as trained
  study.name=NAME study.folder=DIR      where results go: outputs/compare-EXPERIMENT-TIME
  cluster.address=auto tracking=none    where it runs, and whether MLflow keeps it
  dry_run=true                          print sides, runs and resources; train nothing
"""


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What the command line asks for."""

    common: tuple[str, ...]
    sides: dict[str, tuple[str, ...]]
    num_seeds: int


def compare(
    common: Sequence[str],
    *,
    a: Sequence[str],
    b: Sequence[str],
    num_seeds: int,
    config_dirs: Sequence[str] = (),
    console: Console | None = None,
) -> Comparison:
    """Compare two configurations, as the command does; for benchmarks.

    Args:
        common: overrides of both sides, such as ``experiment=cnn``.
        a: overrides of side a alone, likewise b.
        console: what is told goes there; None says nothing.

    Raises:
        AutotuneError: it cannot be run, in one line.
    """
    from autotune.execution.comparison_plan import check_comparison, compose_sides, plan_comparison  # noqa: PLC0415  # imports torch
    from autotune.execution.run_comparison import run_comparison  # noqa: PLC0415

    code_folders = import_user_code_from(config_dirs)
    plan = plan_comparison(compose_sides(common, {"a": a, "b": b}, config_dirs), num_seeds=num_seeds)
    out = console or Console(quiet=True)
    check_comparison(plan, lambda line: out.print(line, markup=False, highlight=False, soft_wrap=True))
    command = [*common, f"a={list(a)}", f"b={list(b)}", f"num_seeds={num_seeds}"]
    return run_comparison(plan, command=command, code_folders=code_folders, console=out)


def compare_command(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    line = parse_command_line("python -m autotune.compare", _PURPOSE, f"experiments:\n{experiments_help()}\n\n{_EPILOG}", arguments)
    from autotune.execution.comparison_plan import (  # noqa: PLC0415  # after --help; imports torch
        check_comparison,
        compose_sides,
        describe_comparison,
        plan_comparison,
    )

    request = _read(line.overrides)
    code_folders = import_user_code_from(line.config_dirs)
    sides = compose_sides(request.common, request.sides, line.config_dirs)
    if line.cfg:
        for side in sides:
            print(f"---\n# {side.name}: {' '.join(side.overrides)}\n{side.composer.config_yaml(line.cfg, resolve=line.resolve)}", end="")
        return 0
    require_experiment(all(side.experiment for side in sides), line.config_dirs)
    console = Console()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with console.status("reading the configuration and checking both sides"):
        plan = plan_comparison(sides, num_seeds=request.num_seeds)
        is_dry_run = plan.config.dry_run
        if not (is_dry_run and plan.missing_sources):  # what starts from them could not be made without training them
            check_comparison(plan, say)
    if is_dry_run:
        for text in describe_comparison(plan):
            say(text)
        return 0
    from autotune.execution.run_comparison import run_comparison  # noqa: PLC0415

    comparison = run_comparison(plan, command=arguments, code_folders=code_folders, console=console)
    if not comparison.is_complete:
        return EXIT_INTERRUPTED
    return 0 if comparison.each_side_reached else EXIT_NOT_REACHED


def _read(overrides: Sequence[str]) -> _Request:
    """Take the command's own keys out of a command line.

    Raises:
        ConfigError: one is missing, there twice, misspelt, or no list or number.
    """
    from autotune.config.override_lists import read_override_list  # noqa: PLC0415  # imports Hydra

    own: dict[str, str] = {}
    common: list[str] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if key not in ("a", "b", "num_seeds") or not equals:
            _check_spelling(key)
            common.append(text)
        elif key in own:
            raise ConfigError(f"{key}: found twice; accepted is once")
        else:
            own[key] = value
    missing = [name for name in ("a", "b") if name not in own]
    if missing:
        raise ConfigError(f"{' and '.join(missing)}: missing; {_ACCEPTED}")
    found = own.get("num_seeds", str(_NUM_SEEDS))
    if not re.fullmatch(r"[0-9]+", found) or int(found) < _FEWEST_SEEDS:
        raise ConfigError(f"num_seeds: found {found!r}, accepted is a whole number from {_FEWEST_SEEDS}: one pair of runs has no interval")
    return _Request(common=tuple(common), sides={name: read_override_list(own[name], name) for name in ("a", "b")}, num_seeds=int(found))


def _check_spelling(key: str) -> None:
    """Refuse what looks like one of the command's own keys, which Hydra knows nothing of.

    Raises:
        ConfigError: it does.
    """
    close = key.lower() if key in ("A", "B", "a", "b") else next(iter(difflib.get_close_matches(key, ["num_seeds"], n=1, cutoff=0.7)), None)
    if close is not None:
        raise ConfigError(f"{key}: no such key (did you mean {close}=...?); {_ACCEPTED}, num_seeds={_NUM_SEEDS}")


def main() -> None:
    """Entry point of ``python -m autotune.compare``."""
    run_main(compare_command)


if __name__ == "__main__":
    main()
