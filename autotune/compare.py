"""Compare two configurations by time to target: ``autotune compare experiment=NAME a=[key=value,...] b=[...]``.

Both sides are trained in turns, in fresh processes, on ``num_seeds`` shared seeds. Exit code 0: compared; 2: bad input; 3: a side never
reached the target, so there is at most a bound; 130: interrupted, and the result so far was printed; 1: the trained code failed several
times in a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from autotune.config.command_line import EXIT_INTERRUPTED, EXIT_NOT_REACHED, import_user_code_from, parse_command_line, run_main
from autotune.config.experiments import experiments_help, require_experiment
from autotune.config.own_keys import own_key, own_keys_help, read_own_keys
from autotune.reporting.compared import Comparison

_PURPOSE = "Compare two configurations by time to target and time of a step: in turns, in fresh processes."
_OTHER_KEYS = """any other key is of both sides:
  experiment=NAME                       what to run; a side may have its own: a=[experiment=cnn] b=[experiment=mine]
  target.value=0.97                     what counts as trained
  study.name=NAME study.folder=DIR      where results go: outputs/compare-EXPERIMENT-TIME
  cluster.address=auto tracking=none    where it runs, and whether MLflow keeps it
  dry_run=true                          print sides, runs and resources; train nothing
"""


@dataclass(kw_only=True)
class CompareKeys:
    """Keys that ``autotune compare`` takes beside those of the configuration."""

    a: str = own_key(
        ..., "what one side has beside what both have; quote it: 'a=[optimizer=adamw,optimizer.lr=0.01]'", shown="[key=value,...]"
    )
    b: str = own_key(..., "what the other side has, as in b=[device=cpu]; [] is the experiment as it stands", shown="[key=value,...]")
    num_seeds: int = own_key(
        10,
        "pairs of runs; the two of a pair share their seed",
        least=2,
        accepted="a whole number from 2: one pair of runs has no interval",
    )


def compare(
    common: Sequence[str],
    *,
    a: Sequence[str],
    b: Sequence[str],
    num_seeds: int,
    config_dirs: Sequence[str] = (),
    console: Console | None = None,
) -> Comparison:
    """Compare two configurations as ``autotune compare`` does; called by benchmarks.

    Args:
        common: overrides of both sides, such as ``experiment=cnn``.
        a: overrides of side a only.
        b: overrides of side b only.
        num_seeds: pairs of runs; the two runs of a pair share their seed.
        console: where progress is printed; None prints nothing.

    Raises:
        AutotuneError: the comparison cannot be run; its message is one line.
    """
    from autotune.execution.comparison_plan import check_comparison, compose_sides, plan_comparison  # noqa: PLC0415  # after --help
    from autotune.execution.fork_server import started_fork_server  # noqa: PLC0415  # after --help
    from autotune.execution.run_comparison import run_comparison  # noqa: PLC0415  # after --help

    code_folders = import_user_code_from(config_dirs, [*common, *a, *b])
    out = console or Console(quiet=True)
    sides = compose_sides(common, {"a": a, "b": b}, config_dirs)
    command = [*common, f"a={list(a)}", f"b={list(b)}", f"num_seeds={num_seeds}"]
    with started_fork_server(sides[0].composed.config.cluster) as fork_server:
        plan = plan_comparison(sides, num_seeds=num_seeds, fork_server=fork_server)
        check_comparison(plan, lambda line: out.print(line, markup=False, highlight=False, soft_wrap=True), fork_server)
        return run_comparison(plan, command=command, code_folders=code_folders, console=out, fork_server=fork_server)


def compare_command(arguments: Sequence[str]) -> int:
    """Run ``autotune compare`` with command-line arguments and return its exit code."""
    epilog = f"experiments:\n{experiments_help()}\n\n{own_keys_help(CompareKeys)}\n\n{_OTHER_KEYS}"
    line = parse_command_line("autotune compare", _PURPOSE, epilog, arguments)
    own, common = read_own_keys(CompareKeys, line.overrides)
    from autotune.config.overrides import read_override_list  # noqa: PLC0415  # imports Hydra
    from autotune.execution.comparison_plan import (  # noqa: PLC0415  # after --help
        check_comparison,
        compose_sides,
        describe_comparison,
        plan_comparison,
    )
    from autotune.execution.fork_server import started_fork_server  # noqa: PLC0415  # after --help

    a, b = read_override_list(own.a, "a"), read_override_list(own.b, "b")
    code_folders = import_user_code_from(line.config_dirs, [*common, *a, *b])
    sides = compose_sides(common, {"a": a, "b": b}, line.config_dirs)
    if line.cfg:
        for side in sides:
            print(f"---\n# {side.name}: {' '.join(side.overrides)}\n{side.composer.config_yaml(line.cfg, resolve=line.resolve)}", end="")
        return 0
    require_experiment(all(side.experiment for side in sides), line.config_dirs)
    console = Console()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    config = sides[0].composed.config
    with started_fork_server(config.cluster, is_wanted=not config.dry_run) as fork_server:
        with console.status("reading the configuration and checking both sides"):
            plan = plan_comparison(sides, num_seeds=own.num_seeds, fork_server=fork_server)
            if not (config.dry_run and plan.missing_sources):  # the check would train them first
                check_comparison(plan, say, fork_server)
        if config.dry_run:
            for text in describe_comparison(plan):
                say(text)
            return 0
        from autotune.execution.run_comparison import run_comparison  # noqa: PLC0415  # after a dry run

        comparison = run_comparison(plan, command=arguments, code_folders=code_folders, console=console, fork_server=fork_server)
    if not comparison.is_complete:
        return EXIT_INTERRUPTED
    return 0 if comparison.both_sides_reached else EXIT_NOT_REACHED


if __name__ == "__main__":
    run_main(compare_command)
