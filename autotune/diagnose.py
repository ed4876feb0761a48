"""Say what this machine is, what it gives, and what it cannot run: ``python -m autotune.diagnose [experiment=NAME]``.

Exit code 0; 2: bad input.
"""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from autotune.config.command_line import import_user_code_from, names_experiment, parse_command_line, run_main
from autotune.config.paths import shipped_folder
from autotune.errors import ConfigError
from autotune.remote.url import refuse_url

_PURPOSE = "Say what this machine is, what its devices and links give, and what of a search space it cannot run."

_EPILOG = """keys:
  seconds=0.3         time for each of some ten measurements, more with GPUs; 0 measures nothing
  output=FILE.json    where the same goes as JSON

with experiment=NAME, any key of the configuration, as for python -m autotune. What a study would leave out is then told of that
experiment's search space; else of all precisions, search_spaces/runtime.yaml and parallelism.yaml."""

_LOG_WIDTH = 120
"""Columns where no terminal says how many there are."""
_OWN_KEYS = ("seconds", "output")
_SECONDS = 0.3
_MOST_SECONDS = 60.0
_ACCEPTED = "accepted are seconds=NUMBER, output=FILE.json and experiment=NAME, and with that any key of the configuration"
_OPTIONS = "all precisions, search_spaces/runtime.yaml and search_spaces/parallelism.yaml"


def diagnose_command(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    takes = "[experiment=NAME] [seconds=NUMBER] [output=FILE.json]"
    line = parse_command_line("python -m autotune.diagnose", _PURPOSE, _EPILOG, arguments, takes=takes)
    own = {key: value for key, _, value in (each.partition("=") for each in line.overrides) if key in _OWN_KEYS}
    overrides = [each for each in line.overrides if each.partition("=")[0] not in _OWN_KEYS]
    seconds, output, load = _seconds(own), _output(own), os.getloadavg()[0]
    has_experiment = names_experiment(overrides)
    if overrides and not has_experiment:
        raise ConfigError(f"found {overrides[0]}; {_ACCEPTED}")
    from autotune.config.compose import Composer  # noqa: PLC0415  # after --help

    import_user_code_from(line.config_dirs)
    composer = Composer(overrides if has_experiment else _all_options(), line.config_dirs)
    if line.cfg:
        print(composer.config_yaml(line.cfg, resolve=line.resolve), end="")
        return 0
    composed = composer.compose()
    from rich.console import Console  # noqa: PLC0415  # likewise

    from autotune.execution.cluster import cluster_capabilities  # noqa: PLC0415  # likewise
    from autotune.execution.plan import plan_study  # noqa: PLC0415  # imports torch, which takes more than a second
    from autotune.machine import Diagnosis  # noqa: PLC0415  # likewise
    from autotune.report.machine_text import print_diagnosis  # noqa: PLC0415  # likewise
    from autotune.report.study_files import write_json  # noqa: PLC0415  # likewise
    from autotune.training.device import local_capabilities  # noqa: PLC0415  # likewise
    from autotune.training.diagnosis.measuring import measured_rates  # noqa: PLC0415  # likewise
    from autotune.training.diagnosis.this_machine import this_machine  # noqa: PLC0415  # likewise

    console = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
    with console.status("reading the configuration") as status:
        cluster = composed.config.cluster
        is_local = cluster.address in (None, "local")
        plan = plan_study(composer, local_capabilities() if is_local else cluster_capabilities(cluster))
        machine = this_machine()
        rates = measured_rates(machine, limit_seconds=seconds, say=status.update) if seconds else ()
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
            write_json(output, diagnosis.as_dict())
        except OSError as error:
            raise ConfigError(f"output={output}: cannot be written: {error.strerror}") from error
    return 0


def _all_options() -> list[str]:
    """The command line of a study whose search space has every precision and every way to run, alone and together."""
    options = sorted((path.stem for path in (shipped_folder("conf") / "precision").glob("*.yaml")), key=lambda name: (name != "fp32", name))
    return [
        "experiment=cnn",
        f"search_space=[{{precision:[{','.join(options)}]}},search_spaces/runtime.yaml,search_spaces/parallelism.yaml]",
    ]


def _seconds(own: dict[str, str]) -> float:
    """The time of each measurement.

    Raises:
        ConfigError: it is no number, or out of its range.
    """
    try:
        seconds = float(own.get("seconds", _SECONDS))
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _MOST_SECONDS:
        raise ConfigError(f"seconds: found {own['seconds']}, accepted is a number from 0, which measures nothing, to {_MOST_SECONDS:g}")
    return seconds


def _output(own: dict[str, str]) -> Path | None:
    """The file that the diagnosis is written to, where it can be.

    Raises:
        ConfigError: it cannot; better said before anything is measured.
    """
    if "output" not in own:
        return None
    refuse_url(own["output"], "output", "a file of this machine")
    path = Path(own["output"]).expanduser()
    if path.suffix != ".json":
        raise ConfigError(f"output: found {own['output'] or 'nothing'}, accepted is FILE.json")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"output={path}: cannot be written; accepted is a file in a folder that is there")
    return path


def main() -> None:
    """Entry point of ``python -m autotune.diagnose``."""
    run_main(diagnose_command)


if __name__ == "__main__":
    main()
