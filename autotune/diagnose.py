"""Say what this machine is, how fast it is, and what it cannot run: ``autotune diagnose
[experiment=NAME]``.

Exit code 0; 2: bad input.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from autotune.config.command_keys import own_key, own_keys_help, read_own_keys
from autotune.config.command_line import composer_of, parse_command_line, print_config, run_main
from autotune.config.experiments import names_experiment
from autotune.execution.cluster import capabilities_of
from autotune.execution.plan import plan_study
from autotune.remote import refuse_url, user_path
from autotune.reporting.study_files import write_json
from autotune.reporting.terminal import output_console
from autotune.yaml_files import yaml_text

_PURPOSE = (
    "Say what this machine is, what its devices give, and what of a search space it cannot run."
)
_OTHER_KEYS = """with experiment=NAME, any key of the configuration, as for autotune. What a
study would leave out is then told of that experiment's search space; else of all precisions,
search_spaces/runtime.yaml and parallelism.yaml."""
_ALL_OPTIONS = "all precisions, search_spaces/runtime.yaml and search_spaces/parallelism.yaml"
_ALL_OVERRIDES = (
    "experiment=cnn",
    "search_space=[{precision:[default,tf32,bf16,fp16,pure_bf16,pure_fp16,fp8]},runtime,"
    "parallelism]",
)
"""Overrides that take the search space of ``_ALL_OPTIONS``."""


@dataclass(kw_only=True)
class DiagnoseKeys:
    """Keys that ``autotune diagnose`` takes beside those of the configuration."""

    seconds: float = own_key(
        0.3, "time for each of some ten measurements; 0 measures nothing", least=0, most=60
    )
    output: str | None = own_key(None, "where the same goes as JSON", shown="FILE.json")


def diagnose_command(arguments: Sequence[str]) -> int:
    """Run ``autotune diagnose`` with command-line arguments and return its exit code."""
    takes = "[experiment=NAME] [seconds=NUMBER] [output=FILE.json]"
    line = parse_command_line(
        "autotune diagnose",
        _PURPOSE,
        f"{own_keys_help(DiagnoseKeys)}\n\n{_OTHER_KEYS}",
        arguments,
        takes=takes,
    )
    own, overrides = read_own_keys(DiagnoseKeys, line.overrides)
    refuse_url(own.output or "", "output", "a file of this machine")
    load = os.getloadavg()[0]
    has_experiment = names_experiment(overrides)
    if not has_experiment:
        overrides = (*_ALL_OVERRIDES, *overrides)
    composer = composer_of(line, overrides)
    if print_config(line, composer):
        return 0
    cluster = composer.compose().config.cluster
    from autotune.training import diagnosis  # noqa: PLC0415  # torch

    console, rates = output_console(), list[diagnosis.Rate]()
    with console.status("reading the configuration") as status:
        plan = plan_study(composer, capabilities_of(cluster, None))
        machine = diagnosis.this_machine()
        if own.seconds:
            for name in ("cpu", *(f"cuda:{index}" for index in range(len(machine["gpus"])))):
                status.update(f"measuring matrix products and copies on {name}")
                rates += diagnosis.measured_rates(name, own.seconds)
    space = f"the search space of {plan.experiment}" if has_experiment else _ALL_OPTIONS
    found: dict[str, Any] = {
        "machine": machine,
        "environment": diagnosis.environment(),
        "load": load,
        "rates": [asdict(rate) for rate in rates],
        "capability_filter": {"space": space, "left_out": list(plan.dropped)},
    }
    for text in _lines(found):
        console.print(text, soft_wrap=True, markup=False, highlight=False)
    if rates:
        console.print(_table(found["rates"]))
    if own.output is not None:
        write_json(user_path(own.output), found)
    return 0


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines of the diagnosis; measured rates are in a table of their own."""
    machine, load = found["machine"], found["load"]
    num_cpus = machine["processor"]["num_cpus"]
    system = {key: found["environment"][key] for key in ("os", "cudnn_version")}
    yield yaml_text({**machine, **system}, default_flow_style=None).rstrip()
    if found["rates"] and load > 0.5 * num_cpus:
        yield (
            f"busy: {load:.1f} processes wanted these {num_cpus} CPUs in the last minute; rates are"
            " of what they left"
        )
    yield f"left out of {found['capability_filter']['space']} by a study here:"
    yield from (f"  {line}" for line in found["capability_filter"]["left_out"] or ["nothing"])


def _table(rates: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("measured", "of", "rate", "ms", box=None, padding=(0, 2, 0, 0))
    for rate in rates:
        speed, milliseconds = f"none: {rate['reason']}", ""
        if rate["per_second"] is not None:
            unit = "GFLOP/s" if rate["kind"] == "matrix product" else "GB/s"
            speed = f"{rate['per_second'] / 1e9:,.4g} {unit}"
            milliseconds = f"{1e3 * rate['seconds']:.3g}"
        table.add_row(rate["kind"], rate["what"], Text(speed), milliseconds)
    return table


if __name__ == "__main__":
    run_main(diagnose_command)
