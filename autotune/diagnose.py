"""Say what this machine is, how fast it is, and what it cannot run: ``autotune diagnose [experiment=NAME]``.

Exit code 0; 2: bad input.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.config.command_line import composer_of, parse_command_line, print_config, run_main
from autotune.config.experiments import names_experiment, shipped_folder
from autotune.config.own_keys import own_key, own_keys_help, read_own_keys
from autotune.errors import ConfigError, FileError
from autotune.remote.url import refuse_url, user_path

_PURPOSE = "Say what this machine is, what its devices and links give, and what of a search space it cannot run."
_OTHER_KEYS = """with experiment=NAME, any key of the configuration, as for autotune. What a study would leave out is then told of that
experiment's search space; else of all precisions, search_spaces/runtime.yaml and parallelism.yaml."""
_OPTIONS = "all precisions, search_spaces/runtime.yaml and search_spaces/parallelism.yaml"


@dataclass(kw_only=True)
class DiagnoseKeys:
    """Keys that ``autotune diagnose`` takes beside those of the configuration."""

    seconds: float = own_key(
        0.3,
        "time for each of some ten measurements, more with GPUs; 0 measures nothing",
        least=0,
        most=60,
        accepted="a number from 0, which measures nothing, to 60",
    )
    output: str | None = own_key(None, "where the same goes as JSON", shown="FILE.json")


def diagnose_command(arguments: Sequence[str]) -> int:
    """Run ``autotune diagnose`` with command-line arguments and return its exit code."""
    takes = "[experiment=NAME] [seconds=NUMBER] [output=FILE.json]"
    line = parse_command_line("autotune diagnose", _PURPOSE, f"{own_keys_help(DiagnoseKeys)}\n\n{_OTHER_KEYS}", arguments, takes=takes)
    own, overrides = read_own_keys(DiagnoseKeys, line.overrides)
    output, load = _output(own.output), os.getloadavg()[0]
    has_experiment = names_experiment(overrides)
    if overrides and not has_experiment:
        raise ConfigError(f"found {overrides[0]}; accepted are seconds=NUMBER, output=FILE.json and experiment=NAME, and with that any key")
    composer = composer_of(line, overrides if has_experiment else _all_options())
    if print_config(line, composer):
        return 0
    composed = composer.compose()
    from autotune.execution.cluster import cluster_capabilities  # noqa: PLC0415  # after --cfg
    from autotune.execution.plan import plan_study  # noqa: PLC0415  # imports torch, which takes more than a second
    from autotune.machine import Diagnosis  # noqa: PLC0415  # after --cfg
    from autotune.reporting.machine_text import print_diagnosis  # noqa: PLC0415  # after --cfg
    from autotune.reporting.study_files import write_json  # noqa: PLC0415  # after --cfg
    from autotune.reporting.terminal import output_console  # noqa: PLC0415  # after --cfg
    from autotune.training.device import local_capabilities  # noqa: PLC0415  # imports torch
    from autotune.training.diagnosis.rates import measured_rates  # noqa: PLC0415  # imports torch
    from autotune.training.diagnosis.this_machine import this_machine  # noqa: PLC0415  # imports torch

    console = output_console()
    with console.status("reading the configuration") as status:
        cluster = composed.config.cluster
        is_local = cluster.address in (None, "local")
        plan = plan_study(composer, local_capabilities() if is_local else cluster_capabilities(cluster))
        machine = this_machine()
        rates = measured_rates(machine, limit_seconds=own.seconds, say=status.update) if own.seconds else ()
        diagnosis = Diagnosis(
            machine=machine,
            rates=tuple(rates),
            load=load,
            space=f"the search space of {plan.experiment}" if has_experiment else _OPTIONS,
            left_out=plan.dropped,
        )
    print_diagnosis(console, diagnosis)
    if output is not None:
        try:
            write_json(output, "diagnosis", diagnosis.as_dict())
        except FileError as error:
            raise ConfigError(f"output={error}") from error
    return 0


def _all_options() -> list[str]:
    """Overrides for a study whose search space has all precisions and the whole of ``runtime`` and ``parallelism``."""
    files = (shipped_folder("conf") / "precision").glob("*.yaml")
    precisions = sorted((path.stem for path in files), key=lambda name: (name != "default", name))
    return ["experiment=cnn", f"search_space=[{{precision:[{','.join(precisions)}]}},runtime,parallelism]"]


def _output(given: str | None) -> Path | None:
    """Path of the file for the diagnosis; None if no file was given. Checked before anything is measured.

    Raises:
        ConfigError: the file is not one that can be written.
    """
    if given is None:
        return None
    refuse_url(given, "output", "a file of this machine")
    path = user_path(given)
    if path.suffix != ".json":
        raise ConfigError(f"output: found {given!r}, accepted is FILE.json")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"output={path}: cannot be written; accepted is a file in a folder that is there")
    return path


if __name__ == "__main__":
    run_main(diagnose_command)
