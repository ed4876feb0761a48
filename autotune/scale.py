"""Measure what more workers bring: ``autotune scale experiment=NAME workers=[1,2,4]``.

One configuration is trained to its target on each number of workers, in turns, in fresh processes. Exit code 0: each number of workers
reached the target; 2: bad input; 3: one never did; 130: interrupted, and the result so far was printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.config.command_line import (
    EXIT_INTERRUPTED,
    EXIT_NOT_REACHED,
    composer_of,
    import_user_code_from,
    parse_command_line,
    print_config,
    run_main,
)
from autotune.config.experiments import experiments_help, names_experiment, require_experiment
from autotune.config.own_keys import own_key, own_keys_help, read_own_keys
from autotune.errors import ConfigError

_PURPOSE = "Measure what more workers bring: time to target, seconds a step and efficiency over their number."
_OTHER_KEYS = """any other key is of the training:
  parallelism=fsdp                 how several workers share it; ddp where it says nothing
  batch_size=256                   on the fewest workers, and on all where scaling is strong
  cluster.address=auto             where it runs
  study.name=NAME study.folder=DIR where results go: outputs/scale-EXPERIMENT-TIME
  dry_run=true                     print the runs and what they need; train nothing
"""


@dataclass(kw_only=True)
class ScaleKeys:
    """Keys that ``autotune scale`` takes beside those of the configuration."""

    workers: list[int] = own_key(
        [1, 2],
        "numbers of workers",
        shown="[1,2,4]",
        least=1,
        accepted="a list of at least two numbers of workers, as in workers=[1,2,4]",
    )
    mode: str = own_key(
        "both",
        "strong: the same batch for all; weak: the same part of it for each worker; or both",
        choices=("strong", "weak", "both"),
    )
    num_seeds: int = own_key(3, "runs of each, in turns", least=1)


def scale_command(arguments: Sequence[str]) -> int:
    """Run ``autotune scale`` with command-line arguments and return its exit code."""
    epilog = f"experiments:\n{experiments_help()}\n\n{own_keys_help(ScaleKeys)}\n\n{_OTHER_KEYS}"
    line = parse_command_line("autotune scale", _PURPOSE, epilog, arguments)
    own, overrides = read_own_keys(ScaleKeys, line.overrides)
    workers = sorted(set(own.workers))
    if len(workers) < 2:
        raise ConfigError(f"workers: found {own.workers}, accepted are at least two different numbers")
    require_experiment(names_experiment(overrides), line.config_dirs)
    composer = composer_of(line, overrides)
    if print_config(line, composer):
        return 0
    composer.refuse_sweeps()
    config = composer.compose().config
    code_folders = import_user_code_from(line.config_dirs, overrides)
    from autotune.execution.comparison_plan import check_comparison, describe_comparison  # noqa: PLC0415  # after --help
    from autotune.execution.fork_server import started_fork_server  # noqa: PLC0415  # after --help
    from autotune.execution.run_scaling import plan_scaling, run_scaling  # noqa: PLC0415  # imports torch
    from autotune.reporting.scaling import Mode  # noqa: PLC0415  # after --help
    from autotune.reporting.terminal import output_console  # noqa: PLC0415  # after --cfg

    console = output_console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with started_fork_server(config.cluster, is_wanted=not config.dry_run) as fork_server:
        with console.status("reading the configuration and checking every number of workers"):
            plan = plan_scaling(
                overrides,
                workers=workers,
                modes=[*Mode] if own.mode == "both" else [Mode(own.mode)],
                num_seeds=own.num_seeds,
                config_dirs=line.config_dirs,
                fork_server=fork_server,
            )
            if not (config.dry_run and plan.runs.missing_sources):  # the check would train them first
                check_comparison(plan.runs, say, fork_server)
        if config.dry_run:
            for text in describe_comparison(plan.runs):
                say(text)
            return 0
        scaling = run_scaling(plan, command=arguments, code_folders=code_folders, console=console, fork_server=fork_server)
    if not scaling.is_complete:
        return EXIT_INTERRUPTED
    return 0 if scaling.all_points_reached else EXIT_NOT_REACHED


if __name__ == "__main__":
    run_main(scale_command)
