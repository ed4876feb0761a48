"""Schema of the configuration, and the part of the configuration that one training needs.

OmegaConf checks a composed configuration against ``Config``. The arguments of a component of the
user's choice (a model, an optimizer) are an open mapping, since the component's own signature
checks them. ``TrialConfig`` is the part that is sent to workers.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Self

from autotune.errors import ConfigError, check_choice
from autotune.measurement import Target


@dataclass(kw_only=True)
class PrecisionConfig:
    """Schema of ``precision``: see ``autotune.training.runtime``."""

    autocast_dtype: str | None
    weights_dtype: str
    float32_precision: str | None
    float8: bool


@dataclass(kw_only=True)
class RuntimeConfig:
    """Schema of ``runtime``: see ``autotune.training.runtime``."""

    channels_last: bool
    num_threads: int | None
    compile: str | None
    cuda_graph: bool
    optimizer_kernels: str | None
    cudnn_benchmark: bool
    expandable_segments: bool
    micro_batch_size: int | None
    activation_checkpointing: bool


@dataclass(kw_only=True)
class DataPathConfig:
    """Schema of ``data_path``: see ``autotune.training.data``."""

    on_device: bool | None
    num_workers: int
    prefetch_batches: int


@dataclass(kw_only=True)
class SearchConfig:
    """Schema of ``search``."""

    sampler: dict[str, Any]
    num_trials: int | None
    time_budget_seconds: float | None
    max_concurrent_trials: int | None
    trial_deadline_seconds: float | None
    max_errors_in_a_row: int
    max_retries: int
    max_retakes: int
    expected_trainings: int | None
    repeats: bool
    storage: str | None


@dataclass(kw_only=True)
class ClusterConfig:
    """Schema of ``cluster``."""

    address: str | None
    cpus_per_worker: int | None
    num_cpus: int | None
    num_gpus: int | None
    trials_per_gpu: int
    accelerator_type: str | None
    placement: str
    connect_timeout_seconds: float
    notice_seconds: float
    price_per_hour: dict[str, float] | None
    currency: str

    @property
    def is_local(self) -> bool:
        """Whether trainings run on this machine, on a Ray of the driver's own."""
        return self.address in (None, "local")


@dataclass(kw_only=True)
class ConfirmConfig:
    """Schema of ``confirm``."""

    num_candidates: int
    num_seeds: int | None
    max_runs: int
    budget_fraction: float | None
    min_reach_rate: float


@dataclass(kw_only=True)
class CheckpointConfig:
    """Schema of ``checkpoint``."""

    every_minutes: float | None
    folder: str | None


@dataclass(kw_only=True)
class TrialsConfig:
    """Schema of ``trials``: the folders of runs of the user's code."""

    keep: str


@dataclass(kw_only=True)
class StudyConfig:
    """Schema of ``study``."""

    name: str | None
    seed: int
    folder: str


COMMAND = "autotune.script.run"
"""The training function of a training that is a command."""
_WHOLE_NUMBERS = {
    "batch_size": 1,
    "parallelism.num_workers": 1,
    "data_path.num_workers": 0,
    "data_path.prefetch_batches": 1,
    "evaluate_every_samples": 1,
    "evaluation_batch_size": 1,
    "runtime.num_threads": 1,
    "runtime.micro_batch_size": 1,
}
"""Lowest value of each key that is a whole number."""
_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "target.mode": ("max", "min"),
    "precision.autocast_dtype": (None, "bfloat16", "float16"),
    "precision.weights_dtype": ("float32", "bfloat16", "float16"),
    "precision.float32_precision": (None, "ieee", "tf32"),
    "runtime.compile": (None, "default", "reduce-overhead", "max-autotune"),
    "runtime.optimizer_kernels": (None, "fused", "foreach", "for_loop"),
}
"""Values of each key that names one of a few things."""


@dataclass(kw_only=True)
class TrialConfig:
    """Configuration of one training: resolved plain data.

    Raises:
        ConfigError: no training can run with a value; names the key, what was found and what to
            give.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    loss: dict[str, Any]
    metric: dict[str, Any]
    optimizer: dict[str, Any]
    lr_schedule: dict[str, Any]
    averaging: dict[str, Any]
    augmentation: dict[str, Any]
    views: dict[str, Any]
    technique: dict[str, Any]
    precision: PrecisionConfig
    parallelism: dict[str, Any]
    runtime: RuntimeConfig
    data_path: DataPathConfig
    batch_size: int
    """Samples per step, over all workers."""
    epochs: float
    """Length of the schedule in passes over the training split, rounded to the nearest whole
    step."""
    device: str
    seed: int
    evaluate_every_samples: int | None
    """Training samples between two evaluations; None for the size of the training split."""
    training: dict[str, Any] | None
    """Node of the user's own training function; None for autotune's loop."""
    target: Target
    allowed_targets: list[str]
    """Packages that ``_target_`` may name besides autotune's own list."""
    max_grad_norm: float | None = None
    """Limit of the Euclidean norm of all gradients together, to which larger ones are scaled
    down before each step; None for no limit."""
    evaluation_batch_size: int | None = None
    """Samples that a worker scores at once; None for the usual number, halved until it fits into
    memory."""

    def __post_init__(self) -> None:
        values = self.as_dict()
        for key, least in _WHOLE_NUMBERS.items():
            found = value_at(values, key)
            is_whole = type(found) is int and found >= least
            # of the others that may not be null, OmegaConf refuses it
            may_be_null = key != "parallelism.num_workers"
            if not is_whole and not (found is None and may_be_null):
                raise ConfigError(f"{key}: found {found}; give a whole number from {least}")
        for key, known in _CHOICES.items():
            check_choice(key, value_at(values, key), known)
        for key in ("epochs", "max_grad_norm"):
            if (found := values[key]) is not None and not 0 < found < math.inf:
                raise ConfigError(f"{key}: found {found}; give a number above 0")
        if not self.target.max_train_seconds > 0:
            raise ConfigError(
                f"target.max_train_seconds: found {self.target.max_train_seconds}; give a number"
                " above 0"
            )
        for name, limits in self.target.constraints.items():
            _check_limits(f"target.constraints.{name}", limits)
            if self.training is None and name != "loss":
                raise ConfigError(
                    f"target.constraints: found {name}; autotune's own loop reports loss only"
                )
        self._check_together()

    def _check_together(self) -> None:
        """Refuse combinations of settings that exclude each other."""
        runtime, precision = self.runtime, self.precision
        micro_batch_size = runtime.micro_batch_size
        for is_refused, why in (
            (
                precision.autocast_dtype is not None and precision.weights_dtype != "float32",
                f"precision.weights_dtype: found {precision.weights_dtype}; autocast_dtype keeps"
                " float32 weights",
            ),
            (
                runtime.cuda_graph and runtime.compile not in (None, "default"),
                f"runtime.cuda_graph: compile={runtime.compile} makes graphs of its own; set"
                " compile to null or default",
            ),
            (
                runtime.cuda_graph and runtime.activation_checkpointing,
                "runtime.activation_checkpointing: found true, which reads the random state, and a"
                " CUDA graph cannot; set cuda_graph=false",
            ),
            (
                runtime.compile in ("reduce-overhead", "max-autotune")
                and micro_batch_size is not None
                and micro_batch_size < self.batch_size,
                f"runtime.micro_batch_size: found {micro_batch_size} of"
                f" batch_size={self.batch_size}; with compile={runtime.compile} it must be null,"
                " whose graphs write over gradients that are being added up",
            ),
            (
                runtime.cuda_graph and precision.autocast_dtype == "float16",
                "runtime.cuda_graph: a graph cannot hold float16's gradient scaling; use bfloat16",
            ),
        ):
            if is_refused:
                raise ConfigError(why)

    @property
    def num_workers(self) -> int:
        """Number of processes that train together, each with a device."""
        return int(self.parallelism["num_workers"])

    @property
    def num_processes(self) -> int:
        """Number of processes that are started to train together: a command starts its own."""
        return 1 if self.is_command else self.num_workers

    @property
    def is_command(self) -> bool:
        """Whether the training is a command."""
        return self.training is not None and self.training["_target_"] == COMMAND

    @property
    def has_rendezvous(self) -> bool:
        """Whether the processes of a function find each other as torchrun's do: one alone, too, if
        a strategy for several was chosen.
        """
        is_function = self.training is not None and not self.is_command
        return is_function and (
            self.num_workers > 1 or not str(self.parallelism.get("_target_")).endswith(".Single")
        )

    def as_dict(self) -> dict[str, Any]:
        """The training's configuration as plain nested data, for YAML."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from a whole resolved one, or from the result of ``as_dict``."""
        made: dict[str, Any] = {}
        for field in fields(cls):
            if field.name in values:
                value, kind = values[field.name], field.type
                made[field.name] = (
                    kind(**value) if isinstance(kind, type) and is_dataclass(kind) else value
                )
        return cls(**made)


@dataclass(kw_only=True)
class Config(TrialConfig):
    """The whole configuration: that of a training, and how a study is run."""

    search_space: list[Any]
    warm_start: list[str]
    search: SearchConfig
    stopping: dict[str, Any]
    objective: dict[str, Any]
    cluster: ClusterConfig
    tracking: dict[str, Any]
    confirm: ConfirmConfig
    study: StudyConfig
    trials: TrialsConfig
    checkpoint: CheckpointConfig
    dry_run: bool


STUDY_KEYS = {field.name for field in fields(Config)} - {
    field.name for field in fields(TrialConfig)
} | {
    "allowed_targets",
    "experiment",
}
"""Top-level keys that say how a study is run: never part of a trial, never searchable."""

FIXED_KEYS = STUDY_KEYS | {"seed", "target", "evaluate_every_samples"}
"""Top-level keys that are the same for all trials of a study, or set for each by the study
itself: never searchable."""


def value_at(config: Any, key: str) -> Any:
    """Value of a dotted key in nested plain data; None if there is no such key."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def _check_limits(key: str, limits: Any) -> None:
    if (
        not isinstance(limits, Mapping)
        or not limits
        or not set(limits) <= {"at_most", "at_least"}
        or not all(
            isinstance(limit, int | float) and math.isfinite(limit) for limit in limits.values()
        )
    ):
        raise ConfigError(
            f"{key}: found {limits}; give at_most, at_least or both, with a number: {{at_most: 20}}"
        )


def with_raised_limit(kept: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """A stored configuration of a training with the ``target.max_train_seconds`` that is asked for,
    if that is higher: a limit may be raised when what was stored continues.
    """
    key = "max_train_seconds"
    limit = value_at(kept, f"target.{key}")
    if not isinstance(limit, int | float):
        return dict(kept)
    return {**kept, "target": {**kept["target"], key: max(limit, asked["target"][key])}}


def first_difference(kept: Mapping[str, Any], asked: Mapping[str, Any]) -> str | None:
    """First key at which a configuration differs from a stored one, with both values, as a text.

    None if they are equal.

    A key that is in only one of them is no difference if it is off (null or false): a version of
    autotune added or removed it.
    """
    for key in {**kept, **asked}:
        is_in_both = key in kept and key in asked
        one, other = kept.get(key), asked.get(key)
        if all(isinstance(config[key], Mapping) for config in (kept, asked) if key in config):
            inner = first_difference(kept.get(key, {}), asked.get(key, {}))
            if inner is not None:
                return f"{key}.{inner}"
        elif (
            one != other
            and repr(one) != repr(other)
            and (is_in_both or (other if one is None else one) is not False)
        ):
            return f"{key}: {one!r} there, {other!r} here"
    return None
