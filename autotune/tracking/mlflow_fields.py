"""What MLflow is told about a run: its status, tags, params and metrics, as plain data.

The fields' names are a contract with everyone's dashboards. Values that MLflow would refuse are cut or left out here, so
that one odd value never costs a whole batch.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from autotune.measurement import Evaluation, TrialResult
from autotune.tracking.tracker import StudyInfo, TrackedTrial

MAX_PARAM_CHARACTERS = 6000
MAX_TAG_CHARACTERS = 5000
CUT_MARK = " ... [cut]"
INTERRUPTED = "INTERRUPTED"
"""The outcome of a run whose driver went away before it ended; no trial's result says so."""

EVALUATION_METRICS = (
    "metric",
    "loss",
    "build_seconds",
    "prepare_seconds",
    "train_seconds",
    "evaluate_seconds",
    "samples",
    "epoch",
    "samples_per_second",
    "peak_memory_bytes",
    "energy_joules",
    "build_joules",
    "num_workers",
)
STEP_METRIC = "train_seconds"
"""The metric that every evaluation has, so its history says which evaluations are kept."""


class Point(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    timestamp_ms: int
    step: int


def milliseconds(unix_seconds: float) -> int:
    """A Unix time in MLflow's unit."""
    return round(unix_seconds * 1000)


def study_tags(info: StudyInfo, folder: str) -> dict[str, str]:
    """The tags of the parent run of a study or a comparison; ``folder`` is absolute."""
    own = {
        "autotune.study": info.name,
        "autotune.phase": info.kind,
        "autotune.experiment": info.experiment,
        "autotune.folder": folder,
    }
    return plain_tags({**info.tags, **own})


def trial_tags(trial: TrackedTrial, study: str) -> dict[str, str]:
    """The tags that a run has from its start."""
    again = {} if trial.retry_of is None else {"autotune.retry_of": str(trial.retry_of)}
    return plain_tags(
        {
            "autotune.study": study,
            "autotune.trial": str(trial.trial),
            "autotune.phase": trial.phase,
            "autotune.seed": str(trial.seed),
            **again,
        }
    )


def result_tags(trial: TrackedTrial, result: TrialResult) -> dict[str, str]:
    """The tags that a run gets at its end."""
    last = result.last
    told = {
        "autotune.cap_seconds": None if result.cap_seconds is None else repr(result.cap_seconds),
        "autotune.contention": result.contention,
        "autotune.last_evaluation": None if last is None or last.outcome is None else str(last.outcome),
    }
    known = {key: value for key, value in told.items() if value is not None}
    return {"autotune.outcome": str(result.outcome), "autotune.fingerprint": fingerprint_of(trial, result), **known}


def fingerprint_of(trial: TrackedTrial, result: TrialResult) -> str:
    """Twelve hexadecimal digits that are equal for runs of one configuration and seed in one environment."""
    parts = {"fingerprint": plain(result.fingerprint), "config": plain(trial.config), "seed": trial.seed}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def evaluation_points(evaluation: Evaluation, at: float) -> list[Point]:
    """One evaluation's metrics; ``at`` is the Unix time when it was made."""
    values = ((key, getattr(evaluation, key)) for key in EVALUATION_METRICS)
    return list(_points(values, at, evaluation.step))


def evaluated_at(result: TrialResult, evaluation: Evaluation) -> float:
    """The Unix time of an evaluation that was not seen as it was made: its phases' seconds after the start."""
    spent = evaluation.build_seconds + evaluation.warm_seconds + evaluation.evaluate_seconds
    return min(result.started_at + spent, result.stopped_at)


def result_points(result: TrialResult, score: float | None) -> list[Point]:
    """The metrics that only a whole run has, at its last step."""
    last = result.last
    values: dict[str, float | None] = {
        "time_to_target_seconds": result.time_to_target_seconds,
        "score": score,
        "test_metric": result.test_metric,
    }
    if last is not None:
        values |= {
            "warm_seconds": last.warm_seconds,
            "cold_seconds": last.build_seconds + last.warm_seconds,
        }
    return list(_points(values.items(), result.stopped_at, last.step if last else 0))


def study_points(metrics: Mapping[str, float], at: float) -> list[Point]:
    """The metrics of a study as a whole."""
    return list(_points(metrics.items(), at, 0))


def _points(values: Iterable[tuple[str, float | None]], at: float, step: int) -> Iterator[Point]:
    # MLflow keeps an infinity as 1.8e308, which flattens every chart; a gap, with the outcome beside it, says it better.
    for key, value in values:
        if value is not None and math.isfinite(value):
            yield Point(plain_key(key), float(value), milliseconds(at), step)


def params(values: Mapping[str, Any]) -> dict[str, str]:
    """Values as MLflow's params: text as it is, all else as JSON, so that a value read back from a file is the same."""
    return {plain_key(key): param_text(value) for key, value in values.items()}


def param_text(value: Any) -> str:
    """One value as a param."""
    return _cut(value if isinstance(value, str) else json.dumps(plain(value)), MAX_PARAM_CHARACTERS)


def plain_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags as MLflow accepts them."""
    return {plain_key(key): _cut(value, MAX_TAG_CHARACTERS) for key, value in tags.items()}


def plain_key(key: str) -> str:
    """A key of the characters that MLflow accepts, at most 250 of them."""
    return re.sub(r"[^/\w.\- ]", "_", key).strip("/")[:250]


def plain(value: Any) -> Any:
    """A value as mappings with text keys, lists, numbers and text, so that JSON and YAML can hold it."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if type(value) in (str, bool, int, float, type(None)):
        return value
    return str(value)


def _cut(text: str, max_characters: int) -> str:
    if len(text) <= max_characters:
        return text
    return text[: max_characters - len(CUT_MARK)] + CUT_MARK
