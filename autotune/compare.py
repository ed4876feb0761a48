"""Compare configurations by time to target: ``autotune compare experiment=NAME a=[key=value,...]
b=[...]``.

All of them are trained in turns, in fresh processes, on ``num_seeds`` shared seeds. The same
command with the comparison's ``study.name`` continues it. Exit code 0: compared; 2: bad input; 3:
one never reached the target, so there is at most a bound; 130: interrupted, and the result so far
was printed; 1: the trained code failed several times in a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from autotune.config.command_keys import own_key, own_keys_help, read_own_keys
from autotune.config.command_line import (
    EXIT_INTERRUPTED,
    EXIT_NOT_REACHED,
    import_user_code_from,
    parse_command_line,
)
from autotune.config.experiments import options_help, require_experiment
from autotune.config.overrides import read_override_list
from autotune.confirm.compare import (
    check_comparison,
    compose_configurations,
    describe_comparison,
    plan_comparison,
    run_comparison,
)
from autotune.execution.launcher import started_launcher
from autotune.redaction import without_secrets
from autotune.reporting.comparison import Comparison
from autotune.reporting.terminal import output_console
from autotune.session import refuse_within_training

_PURPOSE = (
    "Compare configurations by time to target and time of a step: in turns, in fresh processes."
)
_OTHER_KEYS = """any other key is of all configurations:
  experiment=NAME                       what to run; or of each: a=[experiment=cnn]
  target.value=0.97                     what counts as trained
  study.name=NAME study.folder=DIR      where results go: outputs/compare-EXPERIMENT-TIME; a name
                                        that there is continues, with more num_seeds if you like
  cluster.address=auto tracking=none    where it runs, and whether MLflow keeps it
  dry_run=true                          print runs and resources; train nothing

what more workers bring, with their efficiency:
  a=[] b=[parallelism=ddp] c=[parallelism=ddp,parallelism.num_workers=4]
"""


@dataclass(kw_only=True)
class CompareKeys:
    """Keys that ``autotune compare`` takes beside those of the configuration."""

    a: str = own_key(
        ...,
        "what one has beside what all have; quote it: 'a=[optimizer=adamw,optimizer.lr=0.01]'",
        shown="[key=value,...]",
    )
    b: str = own_key(
        ...,
        "what another one has, as in b=[device=cpu]; [] is the experiment as it stands",
        shown="[key=value,...]",
    )
    c: str = own_key("", "a third one, held against a as b is", shown="[key=value,...]")
    d: str = own_key("", "a fourth one", shown="[key=value,...]")
    num_seeds: int = own_key(
        10,
        "runs of each; those of a pair share their seed",
        least=2,
    )


def compare(
    common: Sequence[str],
    *,
    num_seeds: int,
    config_dirs: Sequence[str] = (),
    console: Console | None = None,
    **configurations: Sequence[str],
) -> Comparison | None:
    """Compare configurations as ``autotune compare`` does.

    Args:
        common: overrides of all configurations, such as ``experiment=cnn``.
        num_seeds: runs of each configuration; those of a pair share their seed. More than before
            may be given where a comparison is continued, by its ``study.name`` in ``common``.
        console: where progress is printed; None prints nothing.
        configurations: overrides of each one only, such as ``a=["optimizer.lr=0.1"]``.

    Returns:
        The comparison; None after a dry run, which only prints the plan.

    Raises:
        AutotuneError: the comparison cannot be run; its message is one line.
    """
    out = console or Console(quiet=True)

    def say(line: str) -> None:
        out.print(without_secrets(line), markup=False, highlight=False, soft_wrap=True)

    own = [override for overrides in configurations.values() for override in overrides]
    code_folders = import_user_code_from(config_dirs, [*common, *own])
    composed = compose_configurations(common, configurations, config_dirs)
    require_experiment(all(each.experiment for each in composed), config_dirs)
    config = composed[0].composed.config
    flags = [part for folder in config_dirs for part in ("--config-dir", folder)]
    shown = [f"{name}=[{','.join(overrides)}]" for name, overrides in configurations.items()]
    with started_launcher(config.cluster, is_wanted=not config.dry_run) as launcher:
        with out.status("reading and checking all configurations"):
            plan = plan_comparison(
                composed,
                num_seeds=num_seeds,
                command=[*flags, *common, *shown, f"num_seeds={num_seeds}"],
                code_folders=code_folders,
                launcher=launcher,
            )
            check_comparison(plan, say, launcher)
        if config.dry_run:
            for text in describe_comparison(plan):
                say(text)
            return None
        return run_comparison(plan, console=out, launcher=launcher)


def compare_command(arguments: Sequence[str]) -> int:
    """Run ``autotune compare`` with command-line arguments and return its exit code."""
    experiments, keys = options_help("experiment"), own_keys_help(CompareKeys)
    epilog = f"experiments:\n{experiments}\n\n{keys}\n\n{_OTHER_KEYS}"
    line = parse_command_line("autotune compare", _PURPOSE, epilog, arguments)
    own, common = read_own_keys(CompareKeys, line.overrides)
    given = {"a": own.a, "b": own.b, "c": own.c, "d": own.d}
    lists = {name: read_override_list(text, name) for name, text in given.items() if text}
    if line.cfg:
        for each in compose_configurations(common, lists, line.config_dirs):
            text = each.composer.config_yaml(resolve=line.resolve)
            print(f"---\n# {each.name}: {' '.join(each.overrides)}\n{text}", end="")
        return 0
    refuse_within_training("compare")
    comparison = compare(
        common,
        num_seeds=own.num_seeds,
        config_dirs=line.config_dirs,
        console=output_console(),
        **lists,
    )
    if comparison is None:
        return 0
    if not comparison.is_complete:
        return EXIT_INTERRUPTED
    return 0 if comparison.all_reached else EXIT_NOT_REACHED
