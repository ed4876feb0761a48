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

REUSE_KEY = "_reuse_process_"
"""Key beside ``_target_`` in ``training``: whether a process may call the function for one trial
after another; false if absent."""
COMMAND_KEY = "_command_"
"""Key beside ``_target_`` in ``training`` that ``autotune.tune`` sets where the function runs a
command."""
_COMMAND = "autotune.script.run"
"""Function that runs a command, for configuration files."""


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """Configuration of one training: resolved plain data.

    Raises:
        ConfigError: no training can run with a value; names the key, what was found and what is
            accepted.
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
        _check_at_least("batch_size", self.batch_size, 1)
        _check_at_least("parallelism.num_workers", self.parallelism.get("num_workers"), 1)
        _check_at_least("data_path.num_workers", self.data_path.num_workers, 0)
        _check_at_least("data_path.prefetch_batches", self.data_path.prefetch_batches, 1)
        for key, value in (
            ("evaluate_every_samples", self.evaluate_every_samples),
            ("evaluation_batch_size", self.evaluation_batch_size),
            ("runtime.num_threads", self.runtime.num_threads),
            ("runtime.micro_batch_size", self.runtime.micro_batch_size),
        ):
            if value is not None:
                _check_at_least(key, value, 1)
        for key, found, accepted in (
            ("device", self.device, ("auto", "cpu", "cuda", "mps", "xpu")),
            ("target.mode", self.target.mode, ("max", "min")),
            (
                "precision.autocast_dtype",
                self.precision.autocast_dtype,
                (None, "bfloat16", "float16"),
            ),
            (
                "precision.weights_dtype",
                self.precision.weights_dtype,
                ("float32", "bfloat16", "float16"),
            ),
            (
                "precision.float32_precision",
                self.precision.float32_precision,
                (None, "ieee", "tf32"),
            ),
            (
                "runtime.compile",
                self.runtime.compile,
                (None, "default", "reduce-overhead", "max-autotune"),
            ),
            (
                "runtime.optimizer_kernels",
                self.runtime.optimizer_kernels,
                (None, "fused", "foreach", "for_loop"),
            ),
        ):
            _check_one_of(key, found, accepted)
        if not (0 < self.epochs < math.inf):
            raise ConfigError(f"epochs: found {self.epochs}, accepted is above 0")
        if self.max_grad_norm is not None and not 0 < self.max_grad_norm < math.inf:
            raise ConfigError(
                f"max_grad_norm: found {self.max_grad_norm}, accepted is above 0, or null"
            )
        if not self.target.max_train_seconds > 0:
            raise ConfigError(
                f"target.max_train_seconds: found {self.target.max_train_seconds}, accepted is"
                " above 0"
            )
        for name, limits in self.target.constraints.items():
            _check_limits(f"target.constraints.{name}", limits)
            if self.training is None and name != "loss":
                raise ConfigError(
                    f"target.constraints: found {name}, accepted without a training function of"
                    " one's own is loss"
                )
        self._check_together()

    def _check_together(self) -> None:
        """Refuse combinations of settings that exclude each other."""
        if self.training is not None and self.num_workers > 1:
            raise ConfigError(
                f"parallelism.num_workers: found {self.num_workers}, accepted with a training"
                " function of one's own is 1"
            )
        if self.device in ("mps", "xpu") and self.num_workers > 1:
            raise ConfigError(
                f"parallelism.num_workers: found {self.num_workers}, accepted with"
                f" device={self.device} is 1"
            )
        if self.precision.autocast_dtype is not None and self.precision.weights_dtype != "float32":
            raise ConfigError(
                "precision.weights_dtype: autocast keeps float32 weights; accepted beside"
                " autocast_dtype is float32"
            )
        if self.runtime.cuda_graph and self.runtime.compile not in (None, "default"):
            raise ConfigError(
                f"runtime.cuda_graph: compile={self.runtime.compile} makes graphs of its own;"
                " accepted beside true is null or default"
            )
        if self.runtime.cuda_graph and self.runtime.activation_checkpointing:
            raise ConfigError(
                "runtime.activation_checkpointing: found true, accepted beside cuda_graph=true is"
                " false: it reads the random state, which a graph that is being captured does not"
                " let it"
            )
        micro_batch_size = self.runtime.micro_batch_size
        if (
            self.runtime.compile in ("reduce-overhead", "max-autotune")
            and micro_batch_size is not None
            and micro_batch_size < self.batch_size
        ):
            raise ConfigError(
                f"runtime.micro_batch_size: found {micro_batch_size} of"
                f" batch_size={self.batch_size}, accepted with compile={self.runtime.compile} is"
                " null: its graphs write over gradients that are being added up"
            )
        if self.runtime.cuda_graph and self.precision.autocast_dtype == "float16":
            raise ConfigError(
                "runtime.cuda_graph: a graph cannot hold float16's gradient scaling; accepted"
                " beside it is bfloat16 or null"
            )

    @property
    def num_workers(self) -> int:
        """Number of processes that train together."""
        return int(self.parallelism["num_workers"])

    @property
    def needs_fresh_process(self) -> bool:
        """Whether no other training may share this one's process: a user's function may leave
        anything behind there.

        A command is a process of its own already.
        """
        training = self.training
        return training is not None and not (
            training.get(REUSE_KEY) or training.get(COMMAND_KEY) or training["_target_"] == _COMMAND
        )

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


def _check_at_least(key: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key}: found {value}, accepted is a whole number from {least}")


def _check_limits(key: str, limits: Any) -> None:
    numbers = limits.values() if isinstance(limits, Mapping) else ()
    is_known = isinstance(limits, Mapping) and limits and set(limits) <= {"at_most", "at_least"}
    if not is_known or not all(
        isinstance(limit, int | float) and math.isfinite(limit) for limit in numbers
    ):
        raise ConfigError(
            f"{key}: found {limits}, accepted is at_most, at_least or both, with a number:"
            " {at_most: 20}"
        )


def _check_one_of(key: str, value: Any, accepted: tuple[Any, ...]) -> None:
    if value not in accepted:
        names = ", ".join("null" if option is None else str(option) for option in accepted)
        raise ConfigError(f"{key}: found {value!r}, accepted are {names}")


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
