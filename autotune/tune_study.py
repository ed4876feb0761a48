"""Find the configuration that reaches a target quality in the least time: ``autotune
experiment=NAME``.

Exit code 0: a configuration was confirmed; 2: bad input; 3: no configuration reached the target;
130: interrupted; 1: the trained code failed several times in a row.
"""

import contextlib
import itertools
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from autotune.config.command_line import (
    commands_help,
    composer_of,
    import_user_code_from,
    parse_command_line,
    print_config,
)
from autotune.config.experiments import options_help, require_experiment
from autotune.session import refuse_within_training

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
  study.name=NAME                  name a study; the same name continues it, with more trials or a
                                   higher target.max_train_seconds if you like
  data.root=DIR data.download=true where a data set lies, and to fetch it there; also s3://...
  cluster.address=auto             run on the Ray cluster this machine belongs to
  tracking.uri=URI                 where MLflow keeps its runs
  dry_run=true                     print space, baseline, budget and resources; train nothing
"""


def tune_command(arguments: Sequence[str], *, console: Console | None = None) -> int:
    """Run ``autotune`` with command-line arguments, print to ``console`` or else to stdout, and
    return the exit code.
    """
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
    refuse_within_training()
    composed = composer.compose()
    require_experiment(bool(composed.choices.get("experiment")), line.config_dirs)
    _ = composed.trial  # checks the trial's configuration
    # seconds, which no help and no mistake waits for
    from autotune.execution.cluster import RaySession, capabilities_of  # noqa: PLC0415
    from autotune.execution.launcher import (  # noqa: PLC0415
        CHECK_TRAINING,
        calling,
        started_launcher,
    )

    config, console = composed.config, console or Console()
    trains = not config.dry_run
    with started_launcher(config.cluster, is_wanted=trains) as launcher:
        from autotune.execution.live_study import say  # noqa: PLC0415
        from autotune.execution.plan import check_plan, describe_plan, plan_study  # noqa: PLC0415
        from autotune.execution.run_study import run_study  # noqa: PLC0415
        from autotune.training.sources import train_missing_sources  # noqa: PLC0415

        with console.status(
            "reading the configuration and checking every branch of the search space"
        ):
            plan = plan_study(
                composer,
                capabilities_of(config.cluster, launcher),
                code_folders=code_folders,
                command=arguments,
            )
            if trains:
                train_missing_sources(composer, partial(say, console))
            # on a remote cluster, this machine need not have the data set
            if config.cluster.is_local and not composer.missing_sources:
                with calling(launcher) as call_there:
                    check_plan(plan, partial(call_there, CHECK_TRAINING))
        if config.dry_run:
            for text in describe_plan(plan):
                say(console, text)
            return 0
        with contextlib.closing(RaySession(config.cluster, launcher)) as connection:
            return run_study(plan, console=console, connection=connection, launcher=launcher)
