"""Say what this machine is, how fast it is, and what of an experiment it cannot run: ``autotune
diagnose [experiment=NAME]``.

Exit code 0; 2: bad input.
"""

from collections.abc import Sequence

from rich.console import Console

from autotune.config.command_line import composer_of, parse_command_line, print_config
from autotune.config.experiments import names_experiment, require_experiment
from autotune.execution.cluster import capabilities_of
from autotune.execution.plan import plan_study
from autotune.yaml_files import yaml_text

_PURPOSE = "Say what this machine is, how fast it is, and what of a search space it cannot run."
_OTHER_KEYS = """with experiment=NAME, any key of the configuration, as for autotune; what a study
would leave out of that experiment's search space is then told, too."""


def diagnose_command(arguments: Sequence[str]) -> int:
    """Run ``autotune diagnose`` with command-line arguments and return its exit code."""
    line = parse_command_line(
        "autotune diagnose", _PURPOSE, _OTHER_KEYS, arguments, takes="[experiment=NAME]"
    )
    has_experiment = names_experiment(line.overrides)
    require_experiment(has_experiment or not line.overrides, line.config_dirs)
    composer = composer_of(line, line.overrides)
    if print_config(line, composer):
        return 0
    console = Console(highlight=False)
    if has_experiment:
        cluster = composer.compose().config.cluster
        plan = plan_study(composer, capabilities_of(cluster, None))
        console.out(f"left out of the search space of {plan.experiment} by a study here:")
        console.out("\n".join(f"  {reason}" for reason in plan.dropped or ["nothing"]))
    from autotune.training import diagnosis  # noqa: PLC0415  # imports torch

    console.out(yaml_text(diagnosis.this_machine(), default_flow_style=None))
    console.out(diagnosis.environment())
    for rate in diagnosis.measured_rates():
        console.out(rate)
    return 0
