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
from typing import TYPE_CHECKING

from rich.console import Console

from autotune.config.command_line import (
    EXIT_BAD_INPUT,
    commands_help,
    composer_of,
    import_user_code_from,
    parse_command_line,
    print_config,
)
from autotune.config.experiments import options_help, require_experiment
from autotune.errors import ConfigError
from autotune.redaction import without_secrets

if TYPE_CHECKING:
    from autotune.config.compose import Composer
    from autotune.config.schema import Config

_PURPOSE = (
    "Find the configuration that reaches a target quality in the least time, confirm it and"
    " export it."
)

_LISTED = {
    "experiment": "experiments",
    "search": "search=NAME, who proposes",
    "stopping": "stopping=NAME, when a trial is given up",
    "objective": "objective=NAME, what is minimised",
    "tracking": "tracking=NAME, where runs are kept",
    "model": "model=NAME, what is trained",
    "data": "data=NAME, on what",
}
"""Groups whose options ``--help`` lists."""
_KEYS = """\
keys that people change most:
  optimizer.lr=0.1                 any value of the baseline; --cfg job shows all keys
  optimizer.lr=interval(1e-3,1)    what to search over, in place of the experiment's domain
  target.value=0.97                what counts as trained; target.max_train_seconds=60 limits it
  search.num_trials=100            how much to search; search.time_budget_seconds=600, for how long
  warm_start=[NAME,DIR]            earlier studies that the search learns from
  study.name=NAME                  name a study; the same name continues it
  data.root=DIR data.download=true where a data set lies, and to fetch it there; also s3://...
  cluster.address=auto             run on the Ray cluster this machine belongs to
  tracking.uri=URI                 where MLflow keeps its runs
  dry_run=true                     print space, baseline, budget and resources; train nothing
"""


def tune_command(
    arguments: Sequence[str], *, console: Console | None = None, trains: bool = True
) -> int:
    """Run ``autotune`` with command-line arguments, print to ``console`` or else to stdout, and
    return the exit code.

    Without ``trains`` nothing is trained: the tracker of the study, which must exist, is given what
    is missing.
    """
    if not arguments:
        print(
            "usage: autotune experiment=NAME [key=value"
            f" ...]\n\nexperiments:\n{options_help('experiment')}\n\n--help says more.",
            file=sys.stderr,
        )
        return EXIT_BAD_INPUT
    flags = itertools.pairwise(arguments)
    config_dirs = [folder for flag, folder in flags if flag in ("--config-dir", "-cd")]
    lists = [f"{what}:\n{options_help(group, config_dirs)}\n" for group, what in _LISTED.items()]
    commands = f"commands, each with its own --help:\n{commands_help()}"
    epilog = "\n".join([*lists, _KEYS, commands])
    line = parse_command_line("autotune", _PURPOSE, epilog, arguments)
    code_folders = import_user_code_from(line.config_dirs, line.overrides)
    composer = composer_of(line, line.overrides)
    if print_config(line, composer):
        return 0
    composed = composer.compose()
    require_experiment(bool(composed.choices.get("experiment")), line.config_dirs)
    _ = composed.trial  # checks the trial's configuration
    console = console or Console()
    return _plan_and_run(
        composer, composed.config, arguments, code_folders, console=console, trains=trains
    )


def _plan_and_run(
    composer: "Composer",
    config: "Config",
    command: Sequence[str],
    code_folders: Sequence[str],
    *,
    console: Console,
    trains: bool,
) -> int:
    """Plan the study while the launcher and Ray start, then run it; return the exit code.

    What is imported takes seconds, so each module waits for what starts beside it.
    """
    from autotune.execution import launcher as launching  # noqa: PLC0415

    is_local, trains_now = config.cluster.is_local, trains and not config.dry_run

    def say(line: str) -> None:
        console.print(without_secrets(line), markup=False, highlight=False, soft_wrap=True)

    with contextlib.ExitStack() as stack:
        launcher = stack.enter_context(
            launching.started_launcher(config.cluster, is_wanted=trains_now)
        )
        from autotune.execution import cluster, settings, study_folder  # noqa: PLC0415
        from autotune.reporting.study_files import SUMMARY  # noqa: PLC0415

        study = settings.check_settings(composer)
        if not trains and not study.folder.exists():
            raise ConfigError(f"study.name={study.name}: no such study in {config.study.folder}")
        if not config.dry_run:
            study_folder.check_usable(study.folder)
        connection = cluster.RaySession(config.cluster, launcher)
        stack.callback(connection.close)
        # it has trials to run, unless there is a mistake
        if is_local and trains_now and not (study.folder / SUMMARY).exists():
            connection.start()
        from autotune.execution import plan, run_study  # noqa: PLC0415
        from autotune.training import sources  # noqa: PLC0415

        with console.status(
            "reading the configuration and checking every branch of the search space"
        ):
            capabilities = cluster.capabilities_of(config.cluster, launcher)
            planned = plan.plan_study(
                composer, capabilities, study, code_folders=code_folders, command=command
            )
            if trains_now:
                sources.train_missing_sources(composer, say)
            # on a remote cluster, this machine need not have the data set
            if trains and is_local and not composer.missing_sources:
                with launching.calling(launcher) as call_there:
                    plan.check_plan(planned, partial(call_there, launching.CHECK_TRAINING))
        if config.dry_run:
            for text in plan.describe_plan(planned):
                say(text)
            return 0
        return run_study.run_study(
            planned,
            console=console,
            connection=connection,
            launcher=launcher,
            trains=trains,
        )
