"""Find the configuration that reaches a target quality in the least time: ``autotune
experiment=NAME``.

Exit code 0: a configuration was confirmed; 2: bad input; 3: no configuration reached the target;
130: interrupted; 1: the trained code failed several times in a row.
"""

import contextlib
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.config.command_line import (
    EXIT_BAD_INPUT,
    commands_help,
    composer_of,
    import_user_code_from,
    parse_command_line,
    print_config,
)
from autotune.config.experiments import experiments_help, require_experiment
from autotune.errors import ConfigError
from autotune.hiding import without_secrets

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.config.compose import Composer
    from autotune.config.schema import Config

_PURPOSE = (
    "Find the configuration that reaches a target quality in the least time, confirm it and"
    " export it."
)

_KEYS = """
keys that people change most:
  optimizer.lr=0.1                 any value of the baseline; --cfg job shows all keys
  optimizer.lr=interval(1e-3,1)    what to search over, in place of the experiment's domain
  target.value=0.97                what counts as trained; target.max_train_seconds=60 limits it
  search.num_trials=100            how much to search; search.time_budget_seconds=600, for how long
  search=tpe|gp|cmaes|random       who proposes, in place of freeze_thaw
  objective=device_seconds|energy|cost|pareto    what is minimised, in place of time
  warm_start=[NAME,DIR]            earlier studies that the search learns from
  study.name=NAME                  name a study; the same name goes on with it
  data.root=DIR data.download=true where a data set lies, and to fetch it there; also s3://...
  cluster.address=auto             run on the Ray cluster this machine belongs to
  tracking.uri=URI                 where MLflow keeps its runs
  dry_run=true                     print space, baseline, budget and resources; train nothing
"""


def tune_command(
    arguments: Sequence[str], *, console: "Console | None" = None, trains: bool = True
) -> int:
    """Run ``autotune`` with command-line arguments, print to ``console`` or else to stdout, and
    return the exit code.

    Without ``trains`` nothing is trained: the tracker of the study, which must exist, is given what
    it lacks.
    """
    if not arguments:
        print(
            "usage: autotune experiment=NAME [key=value"
            f" ...]\n\nexperiments:\n{experiments_help()}\n\n--help says more.",
            file=sys.stderr,
        )
        return EXIT_BAD_INPUT
    epilog = (
        f"experiments:\n{experiments_help(_config_dirs(arguments))}\n{_KEYS}\ncommands, each with"
        f" its own --help:\n{commands_help()}"
    )
    line = parse_command_line("autotune", _PURPOSE, epilog, arguments)
    code_folders = import_user_code_from(line.config_dirs, line.overrides)
    composer = composer_of(line, line.overrides)
    if print_config(line, composer):
        return 0
    composed = composer.compose()
    require_experiment(bool(composed.choices.get("experiment")), line.config_dirs)
    _ = composed.trial  # checks the trial's configuration
    if console is None:
        from rich.console import Console  # noqa: PLC0415  # after --cfg

        console = Console()

    folder = _existing_folder(composed.config)
    if not trains and folder is None:
        raise ConfigError(
            f"study.name={composed.config.study.name}: no such study in"
            f" {composed.config.study.folder}"
        )
    is_ended = False
    if folder is not None and not composed.config.dry_run:
        from autotune.execution.study_folder import check_usable  # noqa: PLC0415
        from autotune.reporting.study_files import SUMMARY  # noqa: PLC0415

        check_usable(folder)  # before anything is started
        is_ended = (folder / SUMMARY).exists()
    return _plan_and_run(
        composer,
        composed.config,
        arguments,
        code_folders,
        console=console,
        trains=trains,
        is_ended=is_ended,
    )


def _plan_and_run(
    composer: "Composer",
    config: "Config",
    command: Sequence[str],
    code_folders: Sequence[str],
    *,
    console: "Console",
    trains: bool,
    is_ended: bool,
) -> int:
    """Plan the study while the launcher and Ray start, then run it; return the exit code."""
    from autotune.execution.launcher import (  # noqa: PLC0415
        CHECK_TRAINING,
        calling,
        started_launcher,
    )

    cluster, is_dry_run = config.cluster, config.dry_run

    def say(line: str) -> None:
        console.print(without_secrets(line), markup=False, highlight=False, soft_wrap=True)

    with contextlib.ExitStack() as stack:
        launcher = stack.enter_context(
            started_launcher(cluster, is_wanted=trains and not is_dry_run)
        )
        from autotune.execution.settings import check_settings  # noqa: PLC0415

        settings = check_settings(composer)
        from autotune.execution.cluster import RayConnection, capabilities_of  # noqa: PLC0415

        connection = stack.enter_context(contextlib.closing(RayConnection(cluster)))
        # it has trials to run, unless there is a mistake
        if cluster.is_local and trains and not is_dry_run and not is_ended:
            connection.start()
        from autotune.execution.plan import check_plan, describe_plan, plan_study  # noqa: PLC0415
        from autotune.training.sources import train_missing_sources  # noqa: PLC0415

        with console.status(
            "reading the configuration and checking every branch of the search space"
        ):
            plan = plan_study(composer, capabilities_of(cluster, launcher), settings)
            if not is_dry_run and trains:
                train_missing_sources(composer, say)
            # on a remote cluster, this machine need not have the data set
            if trains and cluster.is_local and not composer.missing_sources:
                with calling(launcher) as call_there:
                    check_plan(plan, partial(call_there, CHECK_TRAINING))
        if is_dry_run:
            for text in describe_plan(plan):
                say(text)
            return 0
        from autotune.execution.run_study import run_study  # noqa: PLC0415  # after a dry run

        return run_study(
            plan,
            command=command,
            code_folders=code_folders,
            console=console,
            connection=connection,
            launcher=launcher,
            trains=trains,
        )


def push_command(arguments: Sequence[str]) -> int:
    """Run ``autotune record --push``: give the tracker of the study with these arguments what it
    lacks; return the exit code.
    """
    return tune_command(arguments, trains=False)


def _existing_folder(config: "Config") -> Path | None:
    """The folder of a study that was begun before.

    None if it has no name, or no folder of that name exists.
    """
    from autotune.execution.settings import study_name  # noqa: PLC0415  # after --help and --cfg

    folder = (
        (Path(config.study.folder) / study_name(config, "")).absolute()
        if config.study.name
        else None
    )
    return folder if folder is not None and folder.exists() else None


def _config_dirs(arguments: Sequence[str]) -> list[str]:
    """Folders of ``--config-dir`` in the raw arguments, whose experiments the help text lists."""
    return [
        value for flag, value in itertools.pairwise(arguments) if flag in ("--config-dir", "-cd")
    ]
