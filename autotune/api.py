"""The Python interface: ``autotune.tune`` finds the fastest configuration of a training function,
or of an experiment by name.

It writes the function and the settings that YAML files would hold into a folder within the study's,
and then does what ``python -m autotune --config-dir ...`` does: the same search, the same files,
and the same commands continue the study.
"""

import inspect
import keyword
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from autotune.config.command_line import EXIT_AGAIN, EXIT_INTERRUPTED
from autotune.config.experiments import dated_name, shipped_folder
from autotune.config.overrides import as_configured, read_value
from autotune.config.schema import COMMAND
from autotune.errors import (
    AutotuneError,
    ConfigError,
    StudyError,
    WorkerError,
    did_you_mean,
)
from autotune.files import make_folder, replace_file
from autotune.measurement import Target
from autotune.pickling import pickled
from autotune.remote import user_path
from autotune.reporting.study_files import REPORT, read_summary
from autotune.session import refuse_within_training
from autotune.space import as_domain, override_text
from autotune.tune_study import tune_command
from autotune.yaml_files import read_yaml, yaml_text

if TYPE_CHECKING:
    import pandas as pd

    from autotune.search.study import Study

CONFIG_FOLDER = "function"
"""Folder, within a study's, of the function and the settings that ``tune`` was called with."""

_MODULE = '''"""The function that autotune.tune was called with, for the processes that train it."""

from autotune.pickling import load_function

{name} = load_function(__file__, {folders!r})
'''

_NUM_DEVICES = "parallelism.num_workers"
"""The key of the configuration that ``devices`` sets."""


def target(
    metric: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    max_seconds: float,
    constraints: Mapping[str, Mapping[str, float]] | None = None,
) -> Target:
    """Say what counts as trained: ``target("val_f1", at_least=0.93, max_seconds=60)``.

    Args:
        metric: name of the metric; ``report`` takes its value by position or by this name.
        at_least: value to reach, of a metric that is better the higher it is.
        at_most: value to reach, of a metric that is better the lower it is.
        max_seconds: seconds of training after which a trial has missed the target; may be raised
            when a study is continued.
        constraints: bounds of further metrics that are reported, which the same evaluation must
            keep: ``{"latency_ms": {"at_most": 20}}``.

    Raises:
        ConfigError: both or none of ``at_least`` and ``at_most`` are given.
    """
    if (at_least is None) == (at_most is None):
        raise ConfigError(f"target({metric!r}) needs one of at_least= and at_most=")
    value, mode = (at_least, "max") if at_most is None else (at_most, "min")
    assert value is not None
    return Target(
        metric=metric,
        value=float(value),
        mode=mode,
        max_train_seconds=float(max_seconds),
        constraints=dict(constraints or {}),
    )


def uniform(low: float, high: float, *, step: float | None = None) -> dict[str, Any]:
    """A number between ``low`` and ``high``, of all values equally likely."""
    return _range("float", low, high, step=step)


def log(low: float, high: float) -> dict[str, Any]:
    """A number between ``low`` and ``high``, of all orders of magnitude equally likely: learning
    rates, weight decays.
    """
    return _range("float", low, high, log=True)


def integer(low: int, high: int, *, step: int = 1, log: bool = False) -> dict[str, Any]:
    """A whole number from ``low`` to ``high``, both included."""
    return _range("int", low, high, step=None if step == 1 else step, log=log)


def power_of_two(low: int, high: int) -> dict[str, Any]:
    """A power of two from ``low`` to ``high``, both included: batch sizes, widths."""
    return _range("power_of_two", low, high)


def _range(kind: str, low: float, high: float, **settings: Any) -> dict[str, Any]:
    """A range as a search-space file has it, without the settings that are None or False."""
    return {"type": kind, "low": low, "high": high} | {
        name: value for name, value in settings.items() if value
    }


@dataclass(frozen=True)
class TuneResult:
    """What a study found; its files lie in ``folder``."""

    name: str
    folder: Path

    @property
    def best(self) -> dict[str, Any] | None:
        """The values of the exported configuration by key.

        None if nothing was confirmed to reach the target.
        """
        if not self._summary:
            return None
        if self._arguments.is_file():
            return read_yaml(self._arguments) or {}
        pairs = (override.partition("=") for override in self._summary["overrides"])
        return {key: read_value(text) for key, _, text in pairs}

    @property
    def speed_up(self) -> float | None:
        """The baseline's expected time to target over the best configuration's, on fresh seeds.

        None if no gain was shown.
        """
        gain = self._gain
        return None if gain is None else float(gain["ratio"])

    @property
    def speed_up_interval(self) -> tuple[float, float] | None:
        """95% interval of ``speed_up``, up to infinity if the baseline never reached the target.

        None if it does not lie above 1.
        """
        gain = self._gain
        return None if gain is None else (gain["low"], gain["high"] or math.inf)

    @property
    def expected_seconds(self) -> float | None:
        """Expected time to target of the best configuration on fresh seeds.

        None if another quantity was minimised, or none confirmed.
        """
        best: dict[str, Any] = self._summary.get("best", {})
        return best.get("expected_seconds")

    @property
    def weights(self) -> Path | None:
        """File of the best configuration's weights; None if its training saved none."""
        path = self.folder / "best.safetensors"
        return path if path.is_file() else None

    @cached_property
    def study(self) -> "Study":
        """The study as Optuna's own object."""
        from autotune.search.study import read_study  # noqa: PLC0415  # a second

        return read_study(self.name, self.folder)

    def trials_dataframe(self) -> "pd.DataFrame":
        """A row for each trial: outcome, score, times, and values with their types.

        NA where a trial does not have a parameter.
        """
        import pandas as pd  # noqa: PLC0415  # takes a second to import

        path = self.folder / "trials.csv"
        frame, texts = pd.read_csv(path), pd.read_csv(path, dtype=str, keep_default_na=False)
        for name in frame.columns[frame.columns.get_loc("error") + 1 :]:
            values = [read_value(text) if text else pd.NA for text in texts[name]]
            column, types = pd.Series(values, dtype=object), {*map(type, values)} - {type(pd.NA)}
            # pandas' own type of whole numbers or booleans may be missing, its others may not
            is_nullable = types in ({bool}, {int})
            frame[name] = column.convert_dtypes() if is_nullable else column.infer_objects()
        return frame

    def report(self) -> Path:
        """Path of the study's HTML report, which is written if it is missing.

        Raises:
            StudyError: the study has not ended.
        """
        from autotune.reporting.html import write_study_report  # noqa: PLC0415  # Plotly

        path = self.folder / REPORT
        return path if path.is_file() else write_study_report(self.folder)

    def export(self, path: str | Path) -> Path:
        """Write the best configuration as YAML: the function's arguments, or an experiment file
        that runs by name.

        Raises:
            StudyError: nothing was confirmed to reach the target.
        """
        if not self._summary:
            raise StudyError(f"study {self.name} has nothing confirmed to export")
        path = user_path(path)
        make_folder(path.parent)
        best = self._arguments if self._arguments.is_file() else self.folder / "best.yaml"
        replace_file(path, best.read_bytes())
        return path

    @cached_property
    def _summary(self) -> dict[str, Any]:
        """What was confirmed; empty if nothing was."""
        return read_summary(self.folder / "best.json")

    @property
    def _gain(self) -> dict[str, Any] | None:
        """The speed-up with its interval; None if that does not lie above 1."""
        speed_up = self._summary.get("speed_up")
        return speed_up if speed_up is not None and (speed_up["low"] or 0.0) > 1 else None

    @property
    def _arguments(self) -> Path:
        """File of the best configuration's arguments, which is there if a function was tuned."""
        return self.folder / "best_arguments.yaml"


def tune(
    training: Callable[..., Any] | None = None,
    *,
    space: Mapping[str, Any] | None = None,
    target: Target | None = None,
    baseline: Mapping[str, Any] | None = None,
    experiment: str | None = None,
    trials: int | None = None,
    time_budget_seconds: float | None = None,
    name: str | None = None,
    folder: str | Path = "outputs",
    seed: int | None = None,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    devices: float | None = None,
    quiet: bool = False,
    **groups: Any,
) -> TuneResult:
    """Find the configuration that reaches a target in the least time, and confirm it on fresh
    seeds.

    Examples:
        >>> result = autotune.tune(
        ...     fit,
        ...     space={"lr": autotune.log(1e-3, 1e-1), "batch_size": [32, 64]},
        ...     target=autotune.target("accuracy", at_least=0.95, max_seconds=60),
        ...     baseline={"lr": 0.01, "batch_size": 32},
        ...     trials=30,
        ... )
        >>> result.best, result.speed_up

    Args:
        training: function that trains, with the space's keys as keyword arguments; it calls
            ``autotune.report(metric)`` after each evaluation. Where its signature names them, it
            gets ``report``, ``clock``, ``checkpoint``, ``seed`` and ``device``.
        space: what may vary: by argument, a list of values or a domain such as ``log(1e-4, 1e-1)``,
            or one of Optuna's distributions.
        target: the quality to reach, from ``autotune.target``.
        baseline: the arguments of today's configuration, which everything is compared with; the
            function's own defaults if left out.
        experiment: name of an experiment, in place of a function; the command line's
            ``experiment=NAME``.
        trials: number of trials.
        time_budget_seconds: limit of the search's time.
        name: name of the study; one that exists is continued.
        folder: folder that contains the studies' folders.
        seed: seed of the study.
        overrides: further ``key=value`` settings, as on the command line.
        config_dirs: your own configuration folders, as ``--config-dir``.
        devices: number of GPUs (or shares of the CPUs) of each trial. A function is called once for
            each, in a process of its own, as by torchrun; a command starts its processes itself,
            ``torchrun --nproc_per_node={devices} ...``. It may be a key of ``space``, too. With a
            part of one, such as 0.5, trials of the search share GPUs.
        quiet: whether nothing is printed.
        groups: settings by their first part: ``search="tpe"``, ``confirm={"max_runs": 20}``,
            ``cluster={"num_cpus": 4}``, ``objective="energy"``, ``tracking={"uri": ...}``,
            ``warm_start=["earlier"]``.

    Raises:
        AutotuneError: the study cannot be run; the message is one line.
        WorkerError: the function failed in several trials in a row.
        KeyboardInterrupt: Ctrl-C ended the study; the same call with its ``name`` continues it.
        SystemExit: SIGTERM or SIGHUP ended it, likewise.
    """
    name = name or dated_name(experiment or _name(training))
    study = {"name": name, "folder": str(folder), "seed": seed}
    limits = {"num_trials": trials, "time_budget_seconds": time_budget_seconds}
    try:
        refuse_within_training()
        study_folder = user_path(folder) / name
        arguments = _devices(devices)
        if training is not None and devices is not None and devices >= 1:
            baseline, arguments = {"devices": devices, **(baseline or {})}, []
        if experiment is not None and all(
            given is None for given in (training, space, target, baseline)
        ):
            arguments.append(f"experiment={experiment}")
        elif (
            experiment is None
            and training is not None
            and space is not None
            and isinstance(target, Target)
        ):
            arguments += _write_function(study_folder, training, space, target, baseline)
        else:
            raise ConfigError(
                "tune() needs a training function with space= and target=autotune.target(...), or"
                " experiment=NAME without them"
            )
        if trials is None and time_budget_seconds is not None:
            arguments.append("search.num_trials=null")
        for key, value in [("study", study), ("search", limits), *groups.items()]:
            arguments += _as_overrides(key, value)
        for config_dir in config_dirs:
            arguments += ["--config-dir", str(config_dir)]
        return _run([*arguments, *overrides], study_folder, quiet=quiet)
    except AutotuneError as error:  # the caller's line is shown, and no frames of autotune's
        raise error.with_traceback(None) from None


def _devices(devices: float | None) -> list[str]:
    """The arguments that give each trial so many devices, or a part of one.

    Raises:
        ConfigError: the number is neither whole nor below 1.
    """
    if devices is None or (isinstance(devices, int) and devices > 0):
        return _as_overrides(_NUM_DEVICES, devices)
    if isinstance(devices, float) and 0 < devices < 1:
        return _as_overrides("cluster", {"trials_per_gpu": int(1 / devices + 1e-9)})
    raise ConfigError(
        f"devices: found {devices!r}, must be 1, 2, ..., or a part of one, such as 0.5"
    )


def _run(arguments: Sequence[str], study_folder: Path, *, quiet: bool) -> TuneResult:
    try:
        exit_code = tune_command(arguments, console=Console(quiet=quiet))
    except WorkerError as error:
        error.add_note(error.traceback_text)
        raise
    if exit_code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if exit_code == EXIT_AGAIN:
        raise SystemExit(exit_code)
    return TuneResult(study_folder.name, study_folder)


def _write_function(
    study_folder: Path,
    training: Callable[..., Any],
    space: Mapping[str, Any],
    target: Target,
    baseline: Mapping[str, Any] | None,
) -> list[str]:
    """Write the function as a module, and its settings as an experiment.

    Return the arguments that tune it.
    """
    folder, name = study_folder / CONFIG_FOLDER, _name(training)
    module = "study_" + re.sub(r"\W", "_", study_folder.name, flags=re.ASCII)
    is_shipped = (shipped_folder("conf") / "experiment" / f"{name}.yaml").is_file()
    experiment_name = f"{name}_function" if is_shipped else name
    command = getattr(training, "template", None)
    node: dict[str, Any] = {"_target_": f"{module}.{name}"}
    if command is not None:
        node = {"_target_": COMMAND, "command": command}
    allowed = node["_target_"].rpartition(".")[0]
    baseline = dict(baseline or {})
    num_devices = baseline.pop("devices", None)
    arguments = {key: domain for key, domain in space.items() if key != "devices"}
    for key, value in _baseline(training, arguments, baseline).items():
        *groups, last = key.split(".")
        reduce(lambda inner, group: inner.setdefault(group, {}), groups, node)[last] = value
    experiment = {
        "training": node,
        "target": _plain("target", asdict(target)),
        "search_space": [
            {
                _NUM_DEVICES if key == "devices" else f"training.{key}": _domain(
                    f"tune({name}): space: {key}", domain
                )
                for key, domain in space.items()
            }
        ],
    }
    if num_devices is not None or "devices" in space:
        experiment["parallelism"] = {"num_workers": num_devices or 1}
        if command is None:  # found as by torchrun, by one process alone, too
            experiment["defaults"] = [{"override /parallelism": "ddp"}]
    # of an entry that is empty, the working folder
    folders = [str(Path(entry).absolute()) for entry in sys.path if Path(entry).exists()]
    settings = yaml_text(as_configured(experiment))
    text = f"# @package _global_\n# Written by autotune.tune.\n{settings}"
    sys.modules.pop(module, None)
    make_folder(folder / "experiment")
    if command is None:
        replace_file(folder / f"{module}.pkl", pickled(training))
        replace_file(folder / f"{module}.py", _MODULE.format(folders=folders, name=name))
    replace_file(folder / "experiment" / f"{experiment_name}.yaml", text)
    given = ["--config-dir", str(folder), f"allowed_targets=[{allowed}]"]
    return [f"experiment={override_text(experiment_name)}", *given]


def _baseline(
    training: Callable[..., Any], space: Mapping[str, Any], baseline: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The arguments of the baseline: those given, else the function's own defaults of the space's
    keys.

    Raises:
        ConfigError: an argument is missing, stands beneath another one's value, or the function
            does not take it.
    """
    where, parameters = f"tune({_name(training)})", inspect.signature(training).parameters
    accepted = getattr(training, "command_keys", [*parameters])
    is_open = accepted is None or (
        accepted == [*parameters]
        and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    )
    given = dict(baseline or {})
    for key, parameter in parameters.items():
        if key in space and parameter.default is not parameter.empty:
            given.setdefault(key, parameter.default)
    for key in (*space, *given):
        if not is_open and key not in accepted:
            raise ConfigError(
                f"{where}: {key}: no such argument{did_you_mean(key, accepted)}; it takes"
                f" {', '.join(accepted)}"
            )
        if key not in given:
            raise ConfigError(f"{where}: baseline: {key}, a key of the space, needs a value")
        if beneath := [other for other in given if other.startswith(f"{key}.")]:
            raise ConfigError(
                f"{where}: {key} has a value, so {beneath[0]} cannot stand beneath it; give one of"
                " these keys another name, as in optimizer.lr={lr} of a command"
            )
    return {key: _plain(f"{where}: {key}", value) for key, value in given.items()}


def _domain(where: str, domain: Any) -> Any:
    """A domain as a search-space file has it: a list of values or a mapping.

    Optuna's distributions are translated.
    """
    domain = as_domain(domain)
    if not isinstance(domain, Mapping | list | tuple | range):
        raise ConfigError(
            f"{where}: found {domain!r}; give a list of values, autotune.log, uniform, integer or"
            " power_of_two, or a distribution of Optuna's"
        )
    if isinstance(domain, tuple) and len(domain) == 2 and {*map(type, domain)} <= {int, float}:
        raise ConfigError(
            f"{where}: found {domain}; a range is autotune.uniform{domain}, and a choice of the"
            " two a list"
        )
    return _plain(where, list(domain) if isinstance(domain, range) else domain)


def _plain(where: str, value: Any) -> Any:
    """A value as YAML holds it: NumPy's and torch's become Python's, and tuples lists.

    Raises:
        ConfigError: YAML cannot hold the value so that it is the same again; the message begins
            with ``where``.
    """
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(where, item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(field, str) for field in value):
        return {str(field): _plain(where, item) for field, item in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ConfigError(
        f"{where}: found {type(value).__name__}, not numbers, text, booleans, None, or lists and"
        " mappings (by text) of them"
    )


def _as_overrides(key: str, value: Any) -> list[str]:
    """A keyword of ``tune`` as command-line settings: an option of a group, or a value of each
    key beneath.
    """
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [
            override
            for field, item in value.items()
            for override in _as_overrides(f"{key}.{field}", item)
        ]
    return [f"{key}={override_text(_plain(f'tune: {key}', value))}"]


def _name(training: Callable[..., Any] | None) -> str:
    name = getattr(training, "__name__", type(training).__name__)
    return name if name.isidentifier() and not keyword.iskeyword(name) else "training"
