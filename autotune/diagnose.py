"""Say what this machine is, how fast it is, and what it cannot run: ``autotune diagnose
[experiment=NAME]``.

Exit code 0; 2: bad input.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autotune.config.command_line import composer_of, parse_command_line, print_config, run_main
from autotune.config.experiments import names_experiment, shipped_folder
from autotune.config.own_keys import own_key, own_keys_help, read_own_keys
from autotune.errors import ConfigError, FileError
from autotune.remote import refuse_url, user_path

_PURPOSE = (
    "Say what this machine is, what its devices and links give, and what of a search space it"
    " cannot run."
)
_OTHER_KEYS = """with experiment=NAME, any key of the configuration, as for autotune. What a
study would leave out is then told of that experiment's search space; else of all precisions,
search_spaces/runtime.yaml and parallelism.yaml."""
_ALL_OPTIONS = "all precisions, search_spaces/runtime.yaml and search_spaces/parallelism.yaml"


@dataclass(kw_only=True)
class DiagnoseKeys:
    """Keys that ``autotune diagnose`` takes beside those of the configuration."""

    seconds: float = own_key(
        0.3,
        "time for each of some ten measurements, more with GPUs; 0 measures nothing",
        least=0,
        most=60,
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
    load, output = os.getloadavg()[0], None
    if own.output is not None:  # checked before anything is measured
        refuse_url(own.output, "output", "a file of this machine")
        output = user_path(own.output)
        if output.suffix != ".json" or output.is_dir() or not os.access(output.parent, os.W_OK):
            raise ConfigError(
                f"output: cannot write {own.output!r}; `output=FILE.json` needs a folder that can"
                " be written"
            )
    has_experiment = names_experiment(overrides)
    if overrides and not has_experiment:
        raise ConfigError(
            f"found {overrides[0]}: keys of the configuration need experiment=NAME; without it,"
            " diagnose takes seconds= and output="
        )
    precisions = sorted(
        path.stem
        for path in (shipped_folder("conf") / "precision").glob("*.yaml")
        if path.stem != "default"
    )
    all_options = (
        f"search_space=[{{precision:[default,{','.join(precisions)}]}},runtime,parallelism]"
    )
    composer = composer_of(line, overrides if has_experiment else ["experiment=cnn", all_options])
    if print_config(line, composer):
        return 0
    cluster = composer.compose().config.cluster
    from rich.table import Table  # noqa: PLC0415  # after --cfg

    from autotune.execution.cluster import cluster_capabilities  # noqa: PLC0415  # after --cfg

    # imports torch, which takes more than a second
    from autotune.execution.plan import plan_study  # noqa: PLC0415
    from autotune.reporting.study_files import write_json  # noqa: PLC0415  # after --cfg
    from autotune.reporting.terminal import output_console  # noqa: PLC0415  # after --cfg
    from autotune.training.device import local_capabilities  # noqa: PLC0415  # imports torch

    # imports torch
    from autotune.training.diagnosis import (  # noqa: PLC0415
        environment,
        measured_rates,
        this_machine,
    )

    console = output_console()
    with console.status("reading the configuration") as status:
        here = cluster.address in (None, "local")
        plan = plan_study(composer, local_capabilities() if here else cluster_capabilities(cluster))
        rates = [*measured_rates(seconds=own.seconds, say=status.update)] if own.seconds else []
        space = f"the search space of {plan.experiment}" if has_experiment else _ALL_OPTIONS
    diagnosis: dict[str, Any] = {
        "machine": this_machine(),
        "environment": environment(),
        "load": load,
        "rates": [asdict(rate) for rate in rates],
        "capability_filter": {"space": space, "left_out": list(plan.dropped)},
    }
    for name, text in _lines(diagnosis):
        console.print(f"{name:<14}{text}", soft_wrap=True, markup=False, highlight=False)
    table = Table("measured", "of", "rate", "ms", box=None, padding=(0, 2, 0, 0))
    for rate in rates:
        if rate.per_second is not None and rate.seconds is not None:
            unit = "GFLOP/s" if rate.kind == "matrix product" else "GB/s"
            table.add_row(
                rate.kind,
                rate.what,
                f"{rate.per_second / 1e9:,.4g} {unit}",
                f"{1e3 * rate.seconds:.3g}",
            )
    if rates:
        console.print(table)
    if output is not None:
        try:
            write_json(output, "diagnosis", diagnosis)
        except FileError as error:
            raise ConfigError(f"output={error}") from error
    return 0


def _lines(diagnosis: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Lines of the diagnosis, each after its name; measured rates are in a table of their own."""
    machine, measured = diagnosis["machine"], diagnosis["rates"]
    num_cpus = machine["processor"]["num_cpus"]
    yield "host", machine["host"]
    for name, devices in (("processor", [machine["processor"]]), ("GPU", machine["gpus"])):
        for facts in devices:
            others = [
                f"{key} {value}"
                for key, value in facts.items()
                if key not in ("name", "memory_bytes")
            ]
            yield (
                name,
                ", ".join((facts["name"], *others, f"{facts['memory_bytes'] / 2**30:.1f} GiB")),
            )
    if not machine["gpus"]:
        yield "GPU", machine["no_gpu_reason"] or "none found"
    yield (
        "versions",
        ", ".join(
            f"{name} {value}" for name, value in machine["versions"].items() if value is not None
        ),
    )
    for name, key in (("system", "os"), ("cuDNN", "cudnn_version")):
        yield name, diagnosis["environment"][key] or "none found"
    if measured and diagnosis["load"] > 0.5 * num_cpus:
        wanted = (
            f"{diagnosis['load']:.1f} processes wanted these {num_cpus} CPUs in the last minute"
        )
        yield "but", f"busy: {wanted}; rates are of what they left"
    for rate in measured:
        if rate["per_second"] is None:
            yield "not measured", f"{rate['kind']}, {rate['what']}: {rate['reason']}"
    for line in diagnosis["capability_filter"]["left_out"] or ["nothing"]:
        yield "left out", line
    yield (
        "",
        (
            f"Left out is what a study would take out of {diagnosis['capability_filter']['space']}"
            " here."
        ),
    )


if __name__ == "__main__":
    run_main(diagnose_command)
