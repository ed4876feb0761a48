"""The Python interface: ``autotune.tune`` finds the fastest configuration of a training function,
or of an experiment by name.

It writes the function and the settings that YAML files would hold into a folder within the study's,
and then does what ``python -m autotune --config-dir ...`` does: the same search, the same files,
and the same commands go on with the study.
"""

import csv
import difflib
import inspect
import keyword
import math
import pickle
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property, wraps
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from autotune.config.command_line import EXIT_INTERRUPTED
from autotune.config.experiments import dated_name, shipped_folder
from autotune.errors import AutotuneError, ConfigError, FileError, StudyError, WorkerError
from autotune.files import make_folder, replace_file
from autotune.remote import user_path
from autotune.session import refuse_within_training
from autotune.yaml_files import read_yaml, yaml_text

if TYPE_CHECKING:
    import pandas as pd

    from autotune.search.study import Study

CONFIG_FOLDER = "function"
"""Folder, within a study's, of the function and the settings that ``tune`` was called with."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_MODULE = '''"""The function that autotune.tune was called with, for the processes that train it."""

from autotune.api import load_function

{name} = load_function(__file__, {folders!r})
'''


@dataclass(frozen=True)
class TargetSpec:
    """The quality that a training must reach; made by ``target``."""

    metric: str
    value: float
    mode: str
    max_train_seconds: float
    constraints: Mapping[str, Mapping[str, float]]


def target(
    metric: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    max_seconds: float,
    constraints: Mapping[str, Mapping[str, float]] | None = None,
) -> TargetSpec:
    """Say what counts as trained: ``target("val_f1", at_least=0.93, max_seconds=60)``.

    Args:
        metric: name of the metric; ``report`` takes its value by position or by this name.
        at_least: value to reach, of a metric that is better the higher it is.
        at_most: value to reach, of a metric that is better the lower it is.
        max_seconds: seconds of training after which a trial has missed the target.
        constraints: bounds of further metrics that are reported, which the same evaluation must
            keep: ``{"latency_ms": {"at_most": 20}}``.

    Raises:
        ConfigError: both or none of ``at_least`` and ``at_most`` are given.
    """
    if (at_least is None) == (at_most is None):
        raise ConfigError(f"target({metric!r}) needs one of at_least= and at_most=")
    value, mode = (at_least, "max") if at_most is None else (at_most, "min")
    assert value is not None
    return TargetSpec(metric, float(value), mode, float(max_seconds), constraints or {})


def uniform(low: float, high: float, *, step: float | None = None) -> dict[str, Any]:
    """A number between ``low`` and ``high``, of all values equally likely."""
    return {"type": "float", "low": low, "high": high, **({} if step is None else {"step": step})}


def log(low: float, high: float) -> dict[str, Any]:
    """A number between ``low`` and ``high``, of all orders of magnitude equally likely: learning
    rates, weight decays.
    """
    return {"type": "float", "low": low, "high": high, "log": True}


def integer(low: int, high: int, *, step: int = 1, log: bool = False) -> dict[str, Any]:
    """A whole number from ``low`` to ``high``, both included."""
    return {
        "type": "int",
        "low": low,
        "high": high,
        **({"step": step} if step != 1 else {}),
        **({"log": True} if log else {}),
    }


def power_of_two(low: int, high: int) -> dict[str, Any]:
    """A power of two from ``low`` to ``high``, both included: batch sizes, widths."""
    return {"type": "power_of_two", "low": low, "high": high}


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
        if self._best_json is None:
            return None
        if self._arguments is not None:
            return read_yaml(self._arguments) or {}
        from autotune.config.overrides import read_value  # noqa: PLC0415  # imports Hydra

        pairs = (override.partition("=") for override in self._best_json["overrides"])
        return {key: read_value(text) for key, _, text in pairs}

    @property
    def speed_up(self) -> float | None:
        """The baseline's expected time to target over the best configuration's, on fresh seeds.

        None if no gain was shown.
        """
        return self._ratio("ratio")

    @property
    def speed_up_interval(self) -> tuple[float, float] | None:
        """95% interval of ``speed_up``, up to infinity if the baseline never reached the target.

        None if it does not lie above 1.
        """
        low, high = self._ratio("low"), self._ratio("high")
        return None if low is None else (low, math.inf if high is None else high)

    @property
    def expected_seconds(self) -> float | None:
        """Expected time to target of the best configuration on fresh seeds.

        None if another quantity was minimised, or none confirmed.
        """
        return None if self._best_json is None else self._best_json["best"].get("expected_seconds")

    @property
    def weights(self) -> Path | None:
        """File of the best configuration's weights; None if its training saved none."""
        path = self.folder / "best.safetensors"
        return path if path.is_file() else None

    @cached_property
    def study(self) -> "Study":
        """The study as Optuna's own object."""
        from autotune.search.study import read_study  # noqa: PLC0415  # imports Optuna

        return read_study(self.name, self.folder)

    def trials_dataframe(self) -> "pd.DataFrame":
        """A row for each trial: outcome, score, times, and values with their types.

        NA where a trial does not have a parameter.
        """
        import pandas as pd  # noqa: PLC0415  # takes a second to import

        path = self.folder / "trials.csv"
        frame = pd.read_csv(path)
        with path.open(newline="", encoding="utf-8") as file:
            cells = list(zip(*csv.reader(file), strict=True))
        for index in range(frame.columns.get_loc("error") + 1, len(cells)):
            frame[frame.columns[index]] = _typed_column(cells[index][1:])
        return frame

    def report(self) -> Path:
        """Path of the study's HTML report, which is written if it is missing.

        Raises:
            StudyError: the study has not ended.
        """
        # a script need not import what a report takes
        from autotune.report_command import write_report  # noqa: PLC0415
        from autotune.reporting.study_files import REPORT  # noqa: PLC0415

        path = self.folder / REPORT
        return path if path.is_file() else write_report(self.folder)

    def export(self, path: str | Path) -> Path:
        """Write the best configuration as YAML: the function's arguments, or an experiment file
        that runs by name.

        Raises:
            StudyError: nothing was confirmed to reach the target.
        """
        best = self._arguments or self.folder / "best.yaml"
        if self._best_json is None:
            raise StudyError(f"study {self.name} has nothing confirmed to export")
        path = user_path(path)
        make_folder(path.parent)
        replace_file(path, best.read_bytes())
        return path

    def _ratio(self, field: str) -> float | None:
        speed_up = None if self._best_json is None else self._best_json["speed_up"]
        return speed_up[field] if speed_up is not None and (speed_up["low"] or 0.0) > 1 else None

    @cached_property
    def _best_json(self) -> dict[str, Any] | None:
        # importing autotune is to be quick
        from autotune.reporting.study_files import read_summary  # noqa: PLC0415

        return read_summary(self.folder / "best.json") or None

    @property
    def _arguments(self) -> Path | None:
        """File of the best configuration's arguments; None if the study tunes no function."""
        path = self.folder / "best_arguments.yaml"
        return path if path.is_file() else None


def _brief(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function, whose refusals show the caller their line, and none of the frames that they
    came through.
    """

    @wraps(function)
    def call(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        try:
            return function(*arguments, **keywords)
        except AutotuneError as error:
            raise error.with_traceback(None) from None

    return call


@_brief
def tune(
    training: Callable[..., Any] | None = None,
    *,
    space: Mapping[str, Any] | None = None,
    target: TargetSpec | None = None,
    baseline: Mapping[str, Any] | None = None,
    experiment: str | None = None,
    trials: int | None = None,
    time_budget_seconds: float | None = None,
    name: str | None = None,
    folder: str | Path = "outputs",
    seed: int | None = None,
    reuse_process: bool = False,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
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
        name: name of the study; a study that exists goes on.
        folder: folder that contains the studies' folders.
        seed: seed of the study.
        reuse_process: whether a process may call the function for one trial after another, after a
            call that does not count. That is faster where the function is slow to begin, but a
            trial then finds what earlier ones left in the process.
        overrides: further ``key=value`` settings, as on the command line.
        config_dirs: your own configuration folders, as ``--config-dir``.
        quiet: whether nothing is printed.
        groups: settings by their first part: ``search="tpe"``, ``confirm={"max_runs": 20}``,
            ``cluster={"num_cpus": 4}``, ``objective="energy"``, ``tracking={"uri": ...}``,
            ``warm_start=["earlier"]``.

    Raises:
        AutotuneError: the study cannot be run; the message is one line.
        WorkerError: the function failed in several trials in a row.
        KeyboardInterrupt: Ctrl-C ended the study; the same call with its ``name`` goes on.
        SystemExit: SIGTERM or SIGHUP ended it, likewise.
    """
    refuse_within_training()
    if (training is None) == (experiment is None):
        raise ConfigError("tune() needs a training function or experiment=NAME, not both")
    name = name or dated_name(str(experiment) if training is None else _function_name(training))
    study_folder = user_path(folder) / name
    if training is None:
        if reuse_process or any(given is not None for given in (space, target, baseline)):
            raise ConfigError(
                "tune: space, target, baseline and reuse_process need a training function; use"
                " overrides= with an experiment"
            )
        arguments = [f"experiment={experiment}"]
    else:
        if space is None or not isinstance(target, TargetSpec):
            raise ConfigError("tune() with a function needs space= and target=autotune.target(...)")
        arguments = _write_function(
            study_folder / CONFIG_FOLDER,
            training,
            _module_name(name),
            space,
            target,
            baseline,
            reuse_process,
        )
    arguments += _as_overrides("study", {"name": name, "folder": str(folder), "seed": seed})
    arguments += _as_overrides(
        "search", {"num_trials": trials, "time_budget_seconds": time_budget_seconds}
    )
    if trials is None and time_budget_seconds is not None:
        arguments.append("search.num_trials=null")
    for key, value in groups.items():
        arguments += _as_overrides(key, value)
    for config_dir in config_dirs:
        arguments += ["--config-dir", str(config_dir)]
    return _run([*arguments, *overrides], name, study_folder, quiet=quiet)


def load_function(module: str, folders: Sequence[str]) -> Callable[..., Any]:
    """Load the function that ``tune`` wrote beside a module, as a function of that module's own.

    Args:
        module: path of the module that ``tune`` wrote.
        folders: folders that the function's own imports are found in.
    """
    path = Path(module)
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    # the user's own code, which the user's own process wrote
    given = pickle.loads(path.with_suffix(".pkl").read_bytes())  # noqa: S301
    function = _copied(given) if isinstance(given, FunctionType) else _wrapped(given)
    function.__module__ = path.stem
    return function


def _copied(given: FunctionType) -> Callable[..., Any]:
    """A function of its own with the same code, so that the one that others import stays as it
    is.
    """
    function = FunctionType(
        given.__code__, given.__globals__, given.__name__, given.__defaults__, given.__closure__
    )
    function.__kwdefaults__ = given.__kwdefaults__
    return function


def _wrapped(given: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls another kind of callable, such as a method or a partial."""

    def function(**arguments: Any) -> Any:
        return given(**arguments)

    function.__signature__ = inspect.signature(given)  # type: ignore[attr-defined]
    return function


def _run(arguments: Sequence[str], name: str, study_folder: Path, *, quiet: bool) -> TuneResult:
    from rich.console import Console  # noqa: PLC0415  # importing autotune is to be quick

    from autotune.execution import interrupt  # noqa: PLC0415  # importing autotune is to be quick

    # importing autotune is to be quick
    from autotune.tune_study import tune_command  # noqa: PLC0415

    try:
        exit_code = tune_command(arguments, console=Console(quiet=quiet))
    except WorkerError as error:
        error.add_note(error.traceback_text)
        raise
    if exit_code == EXIT_INTERRUPTED:
        if (number := interrupt.latest_signal) not in (None, signal.SIGINT):
            sys.exit(128 + number)  # as a shell says that a signal ended a program
        raise KeyboardInterrupt
    return TuneResult(name, study_folder)


def _write_function(
    folder: Path,
    training: Callable[..., Any],
    module: str,
    space: Mapping[str, Any],
    target: TargetSpec,
    baseline: Mapping[str, Any] | None,
    reuse_process: bool = False,
) -> list[str]:
    """Write the function as a module, and its settings as an experiment.

    Return the arguments that tune it.
    """
    from autotune.config.overrides import as_configured  # noqa: PLC0415  # imports Hydra
    from autotune.pickling import pickled  # noqa: PLC0415  # importing autotune is to be quick
    from autotune.space import override_text  # noqa: PLC0415  # importing autotune is to be quick

    name = _function_name(training)
    is_shipped = (shipped_folder("conf") / "experiment" / f"{name}.yaml").is_file()
    experiment_name = f"{name}_function" if is_shipped else name
    experiment = {
        "training": {
            "_target_": f"{module}.{name}",
            **_baseline(training, name, space, baseline),
            **({"_command_": True} if getattr(training, "is_command", False) else {}),
            **({"_reuse_process_": True} if reuse_process else {}),
        },
        "target": {
            **asdict(target),
            "constraints": {key: dict(limits) for key, limits in target.constraints.items()},
        },
        "search_space": [
            {f"training.{key}": _domain(name, key, domain) for key, domain in space.items()}
        ],
    }
    content_of_function = pickled(training)
    path, source = folder / f"{module}.py", _source(training)
    if (
        source
        and (folder / "source.txt").is_file()
        and (folder / "source.txt").read_text(encoding="utf-8") != source
    ):
        warnings.warn(
            f"tune({name}): the function has changed since this study began; its earlier trials"
            " count as they are",
            stacklevel=4,
        )
    # of one that is empty, the working folder
    folders = [str(Path(entry).absolute()) for entry in sys.path if Path(entry).exists()]
    sys.modules.pop(module, None)
    try:
        make_folder(folder / "experiment")
        for file, content in (
            (path.with_suffix(".pkl"), content_of_function),
            (folder / "source.txt", source.encode()),
            (path, _MODULE.format(folders=folders, name=name).encode()),
            (
                folder / "experiment" / f"{experiment_name}.yaml",
                "# @package _global_\n# Written by"
                f" autotune.tune.\n{yaml_text(as_configured(experiment))}".encode(),
            ),
        ):
            replace_file(file, content)
    except FileError as error:
        raise ConfigError(str(error)) from error
    return [
        f"experiment={override_text(experiment_name)}",
        "--config-dir",
        str(folder),
        f"allowed_targets=[{module}]",
    ]


def _source(training: Callable[..., Any]) -> str:
    """The function's source text; empty if it has none."""
    try:
        return inspect.getsource(training)
    except (OSError, TypeError):
        return ""


def _baseline(
    training: Callable[..., Any],
    name: str,
    space: Mapping[str, Any],
    baseline: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The arguments of the baseline: those given, else the function's own defaults of the space's
    keys.

    Raises:
        ConfigError: an argument is missing, or the function does not take it.
    """
    parameters = inspect.signature(training).parameters
    takes_all = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    given = dict(baseline or {})
    for key in space:
        if (
            key not in given
            and key in parameters
            and parameters[key].default is not inspect.Parameter.empty
        ):
            given[key] = parameters[key].default
    unknown = [key for key in (*space, *given) if key not in parameters and not takes_all]
    if unknown:
        close = difflib.get_close_matches(unknown[0], parameters, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(
            f"tune({name}): {unknown[0]}: no such argument{meant}; it takes {', '.join(parameters)}"
        )
    missing = [key for key in space if key not in given]
    if missing:
        raise ConfigError(
            f"tune({name}): baseline: {', '.join(missing)} is missing; it needs a value of each key"
            " of the space"
        )
    return {key: _plain(f"tune({name}): {key}", value) for key, value in given.items()}


def _domain(name: str, key: str, domain: Any) -> Any:
    """A domain as a search-space file has it: a list of values or a mapping.

    Optuna's distributions are translated.
    """
    where = f"tune({name}): space: {key}"
    if isinstance(domain, str | bytes):
        raise ConfigError(
            f"{where}: found {domain!r}; give a list of values or a domain such as"
            " autotune.log(1e-4, 1e-1)"
        )
    if isinstance(domain, Mapping):
        choices = domain.get("choices")
        if not isinstance(choices, Mapping):
            return _plain(where, domain)
        opened = {
            _plain(where, option): _subspace(name, beneath) for option, beneath in choices.items()
        }
        return _plain(
            where, {field: value for field, value in domain.items() if field != "choices"}
        ) | {"choices": opened}
    if isinstance(domain, list | tuple | range):
        values = _plain(where, list(domain))
        if isinstance(domain, tuple) and len(values) == 2 and {*map(type, values)} <= {int, float}:
            raise ConfigError(
                f"{where}: found {domain}; a range is autotune.uniform{domain}, and a choice of the"
                " two a list"
            )
        return values
    kind = type(domain).__name__
    if kind == "CategoricalDistribution":
        return _plain(where, list(domain.choices))
    if kind == "FloatDistribution":
        return (
            log(domain.low, domain.high)
            if domain.log
            else uniform(domain.low, domain.high, step=domain.step)
        )
    if kind == "IntDistribution":
        return integer(domain.low, domain.high, step=domain.step, log=domain.log)
    raise ConfigError(
        f"{where}: found {kind}; give a list of values, autotune.log, uniform, integer or"
        " power_of_two, or a distribution of Optuna's"
    )


def _subspace(name: str, beneath: Any) -> Any:
    """What opens beneath an option of a choice, as a search-space file has it."""
    return (
        {key: _domain(name, key, domain) for key, domain in beneath.items()}
        if isinstance(beneath, Mapping)
        else beneath
    )


def _plain(where: str, value: Any) -> Any:
    """A value as YAML holds it: NumPy's and torch's become Python's, and tuples lists.

    Raises:
        ConfigError: YAML cannot hold the value so that it is the same again; the message begins
            with ``where``.
    """
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(where, item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(field, str) for field in value):
        return {_plain(where, field): _plain(where, item) for field, item in value.items()}
    if isinstance(value, int) and not isinstance(value, Enum):
        return int(value)
    if isinstance(value, str) and not isinstance(value, Enum):
        return str.__str__(value)  # without its own class, such as numpy.str_
    found = (
        "a mapping with other keys than text"
        if isinstance(value, Mapping)
        else type(value).__name__
    )
    raise ConfigError(
        f"{where}: found {found}, not numbers, text, booleans, None, or lists and mappings (by"
        " text) of them"
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
    from autotune.space import override_text  # noqa: PLC0415  # importing autotune is to be quick

    return [f"{key}={override_text(_plain(f'tune: {key}', value))}"]


def _typed_column(cells: Sequence[str]) -> "pd.Series[Any]":
    """A parameter's cells in ``trials.csv`` as a column of one of pandas' own types, or of
    objects where that would change a value.
    """
    import pandas as pd  # noqa: PLC0415  # takes a second to import

    from autotune.config.overrides import read_value  # noqa: PLC0415  # imports Hydra

    def value_of(cell: str) -> Any:
        try:
            return read_value(cell) if cell else pd.NA
        except ConfigError:  # a text that an earlier version wrote without quotes
            return cell

    column = pd.Series([value_of(cell) for cell in cells], dtype=object)
    types = {type(value) for value in column if value is not pd.NA}
    return (
        column.convert_dtypes()
        if len(types) == 1 and types <= {bool, int}
        else column.infer_objects()
    )


def _function_name(training: Callable[..., Any]) -> str:
    name = getattr(training, "__name__", type(training).__name__)
    return name if name.isidentifier() and not keyword.iskeyword(name) else "training"


def _module_name(study: str) -> str:
    return "study_" + re.sub(r"\W", "_", study, flags=re.ASCII)
