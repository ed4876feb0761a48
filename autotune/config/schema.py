"""Schema of the configuration, and the part of the configuration that one training needs.

OmegaConf checks a composed configuration against ``Config``. The arguments of a component of the
user's choice (a model, an optimizer) are an open mapping, since the component's own signature
checks them. ``TrialConfig`` is resolved plain data, which is sent to workers.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from omegaconf import MISSING

from autotune.errors import ConfigError
from autotune.measurement import Target


@dataclass(kw_only=True)
class TargetConfig:
    """Schema of ``target``: see ``autotune.measurement.Target``."""

    metric: str = MISSING
    value: float = MISSING
    mode: str = MISSING
    max_train_seconds: float = MISSING
    constraints: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class PrecisionConfig:
    """Schema of ``precision``: see ``autotune.training.runtime``."""

    autocast_dtype: str | None = MISSING
    weights_dtype: str = MISSING
    float32_precision: str | None = MISSING
    float8: bool = MISSING


@dataclass(kw_only=True)
class RuntimeConfig:
    """Schema of ``runtime``: see ``autotune.training.runtime``."""

    channels_last: bool = MISSING
    num_threads: int | None = MISSING
    compile: str | None = MISSING
    cuda_graph: bool = MISSING
    optimizer_kernels: str | None = MISSING
    cudnn_benchmark: bool = MISSING
    expandable_segments: bool = MISSING
    micro_batch_size: int | None = MISSING
    activation_checkpointing: bool = MISSING


@dataclass(kw_only=True)
class DataPathConfig:
    """Schema of ``data_path``: see ``autotune.training.data``."""

    on_device: bool | None = MISSING
    num_workers: int = MISSING
    prefetch_batches: int = MISSING


@dataclass(kw_only=True)
class SearchConfig:
    """Schema of ``search``."""

    sampler: dict[str, Any] = MISSING
    num_trials: int | None = MISSING
    time_budget_seconds: float | None = MISSING
    max_concurrent_trials: int | None = MISSING
    trial_deadline_seconds: float | None = MISSING
    max_errors_in_a_row: int = MISSING
    max_retries: int = MISSING
    max_retakes: int = MISSING
    stop_when_not_worth: bool = MISSING
    expected_trainings: int | None = MISSING
    repeats: bool = MISSING
    storage: str | None = MISSING


@dataclass(kw_only=True)
class ClusterConfig:
    """Schema of ``cluster``."""

    address: str | None = MISSING
    cpus_per_worker: int | None = MISSING
    num_cpus: int | None = MISSING
    num_gpus: int | None = MISSING
    accelerator_type: str | None = MISSING
    placement: str = MISSING
    connect_timeout_seconds: float = MISSING
    price_per_hour: dict[str, float] | None = MISSING
    currency: str = MISSING

    @property
    def is_local(self) -> bool:
        """Whether trainings run on this machine, on a Ray of the driver's own."""
        return self.address in (None, "local")


@dataclass(kw_only=True)
class ConfirmConfig:
    """Schema of ``confirm``."""

    num_candidates: int = MISSING
    num_seeds: int | None = MISSING
    max_runs: int = MISSING
    budget_fraction: float | None = MISSING
    min_reach_rate: float = MISSING


@dataclass(kw_only=True)
class CheckpointConfig:
    """Schema of ``checkpoint``."""

    folder: str | None = MISSING


@dataclass(kw_only=True)
class StudyConfig:
    """Schema of ``study``."""

    name: str | None = MISSING
    seed: int = MISSING
    folder: str = MISSING


@dataclass(kw_only=True)
class Config:
    """Schema of the whole configuration."""

    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    loss: dict[str, Any] = MISSING
    metric: dict[str, Any] = MISSING
    optimizer: dict[str, Any] = MISSING
    lr_schedule: dict[str, Any] = MISSING
    averaging: dict[str, Any] = MISSING
    augmentation: dict[str, Any] = MISSING
    views: dict[str, Any] = MISSING
    technique: dict[str, Any] = MISSING
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallelism: dict[str, Any] = MISSING
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    data_path: DataPathConfig = field(default_factory=DataPathConfig)
    batch_size: int = MISSING
    epochs: float = MISSING
    max_grad_norm: float | None = MISSING
    device: str = MISSING
    seed: int = MISSING
    evaluate_every_samples: int | None = MISSING
    evaluation_batch_size: int | None = MISSING
    training: dict[str, Any] | None = MISSING
    target: TargetConfig = field(default_factory=TargetConfig)

    search_space: list[Any] = MISSING
    warm_start: list[str] = MISSING
    search: SearchConfig = field(default_factory=SearchConfig)
    stopping: dict[str, Any] = MISSING
    objective: dict[str, Any] = MISSING
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: dict[str, Any] = MISSING
    confirm: ConfirmConfig = field(default_factory=ConfirmConfig)
    study: StudyConfig = field(default_factory=StudyConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    allowed_targets: list[str] = MISSING
    dry_run: bool = MISSING


STUDY_KEYS = frozenset(
    {
        "search_space",
        "search",
        "stopping",
        "objective",
        "cluster",
        "tracking",
        "confirm",
        "study",
        "checkpoint",
        "allowed_targets",
        "warm_start",
        "dry_run",
        "experiment",
    }
)
"""Top-level keys that say how a study is run: never part of a trial, never searchable."""

FIXED_KEYS = STUDY_KEYS | {"seed", "target", "evaluate_every_samples"}
"""Top-level keys that are the same for all trials of a study, or set for each by the study
itself: never searchable."""

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
_MAY_BE_NULL = (
    "evaluate_every_samples",
    "evaluation_batch_size",
    "runtime.num_threads",
    "runtime.micro_batch_size",
)
_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "device": ("auto", "cpu", "cuda", "mps", "xpu"),
    "target.mode": ("max", "min"),
    "precision.autocast_dtype": (None, "bfloat16", "float16"),
    "precision.weights_dtype": ("float32", "bfloat16", "float16"),
    "precision.float32_precision": (None, "ieee", "tf32"),
    "runtime.compile": (None, "default", "reduce-overhead", "max-autotune"),
    "runtime.optimizer_kernels": (None, "fused", "foreach", "for_loop"),
}
"""Values of each key that names one of a few things."""


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """Configuration of one training: resolved plain data.

    Raises:
        ConfigError: no training can run with a value; names the key, what was found and what to
            give.
    """

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    loss: Mapping[str, Any]
    metric: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    lr_schedule: Mapping[str, Any]
    averaging: Mapping[str, Any]
    augmentation: Mapping[str, Any]
    views: Mapping[str, Any]
    technique: Mapping[str, Any]
    precision: PrecisionConfig
    parallelism: Mapping[str, Any]
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
    training: Mapping[str, Any] | None
    """Node of the user's own training function; None for autotune's loop."""
    target: Target
    allowed_targets: tuple[str, ...]
    """Packages that ``_target_`` may name besides autotune's own list."""
    max_grad_norm: float | None = None
    """Limit of the Euclidean norm of all gradients together, to which larger ones are scaled
    down before each step; None for no limit."""
    evaluation_batch_size: int | None = None
    """Samples that a worker scores at once; None for the usual number, halved until it fits into
    memory."""

    def __post_init__(self) -> None:
        for key, least in _WHOLE_NUMBERS.items():
            found = self._value(key)
            is_whole = isinstance(found, int) and not isinstance(found, bool) and found >= least
            if not is_whole and not (found is None and key in _MAY_BE_NULL):
                raise ConfigError(f"{key}: found {found}; give a whole number from {least}")
        for key, known in _CHOICES.items():
            if (found := self._value(key)) not in known:
                names = ", ".join("null" if option is None else str(option) for option in known)
                raise ConfigError(f"{key}: found {found!r}; give one of {names}")
        for key in ("epochs", "max_grad_norm"):
            if (found := self._value(key)) is not None and not 0 < found < math.inf:
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

    def _value(self, key: str) -> Any:
        value: Any = self
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part)
        return value

    def _check_together(self) -> None:
        """Refuse combinations of settings that exclude each other."""
        runtime, precision = self.runtime, self.precision
        micro_batch_size = runtime.micro_batch_size
        for is_refused, why in (
            (
                self.num_workers > 1 and self.training is not None,
                f"parallelism.num_workers: found {self.num_workers}; a training function of your"
                " own has one worker",
            ),
            (
                self.num_workers > 1 and self.device in ("mps", "xpu"),
                f"parallelism.num_workers: found {self.num_workers}; device={self.device} trains"
                " with one worker",
            ),
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
        """Number of processes that train together."""
        return int(self.parallelism["num_workers"])

    def as_dict(self) -> dict[str, Any]:
        """The training's configuration as plain nested data, for YAML."""
        return {**asdict(self), "allowed_targets": list(self.allowed_targets)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a training's configuration from a whole resolved one, or from the result of
        ``as_dict``.
        """
        known: dict[str, Any] = {
            name: values[name] for name in cls.__dataclass_fields__ if name in values
        }
        for name, make in (
            ("precision", PrecisionConfig),
            ("runtime", RuntimeConfig),
            ("data_path", DataPathConfig),
            ("target", Target),
        ):
            known[name] = make(**known[name])
        return cls(**{**known, "allowed_targets": tuple(known["allowed_targets"])})


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
