"""The tags, params and metrics that MLflow receives about a run, as plain data.

Users' dashboards rely on the fields' names, so they must not change. Values that MLflow would
refuse are cut or left out here, so that one such value never costs a whole batch.
"""

import hashlib
import json
import math
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from autotune.measurement import Evaluation, TrialResult
from autotune.tracking.tracker import StudyInfo, TrackedTrial

MAX_PARAM_CHARACTERS = 6000
MAX_TAG_CHARACTERS = 5000
RUN_TAG, OUTCOME_TAG = "autotune.run", "autotune.outcome"
"""Tags of a child run: its name, as the study knows it, and its outcome."""
INTERRUPTED = "INTERRUPTED"
"""The ``autotune.outcome`` tag of a run whose driver ended before the run did; it is not a
member of ``Outcome``."""

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
RESULT_METRICS = (
    "time_to_target_seconds",
    "score",
    "test_metric",
    "warm_seconds",
    "cold_seconds",
    "reused_build_seconds",
)
STEP_METRIC = "train_seconds"
"""The metric that every evaluation has, so that its history shows which evaluations MLflow
holds."""


class Point(NamedTuple):
    """One value of one metric at a step."""

    key: str
    value: float
    timestamp_ms: int
    step: int


def milliseconds(unix_seconds: float) -> int:
    """A Unix time in milliseconds, MLflow's unit."""
    return round(unix_seconds * 1000)


def study_tags(info: StudyInfo, folder: str) -> dict[str, str]:
    """Tags of the parent run of a study or a comparison; ``folder`` is an absolute path."""
    identity = {
        "autotune.study": info.name,
        "autotune.phase": info.kind,
        "autotune.experiment": info.experiment,
        "autotune.workload": info.workload,
        "autotune.folder": folder,
    }
    return plain_tags({**info.tags, **identity})


def trial_tags(trial: TrackedTrial, study: str) -> dict[str, str]:
    """Tags that a trial's run has from its start."""
    retry = {} if trial.retry_of is None else {"autotune.retry_of": str(trial.retry_of)}
    return plain_tags(
        {
            "autotune.study": study,
            RUN_TAG: trial.name,
            "autotune.trial": str(trial.trial),
            "autotune.phase": trial.phase,
            "autotune.seed": str(trial.seed),
            **retry,
        }
    )


def result_tags(trial: TrackedTrial, result: TrialResult) -> dict[str, str]:
    """Tags that a trial's run gets at its end."""
    last = result.last
    optional = {
        "autotune.cap_seconds": None if result.cap_seconds is None else repr(result.cap_seconds),
        "autotune.contention": result.contention,
        "autotune.last_evaluation": (
            None if last is None or last.outcome is None else str(last.outcome)
        ),
    }
    known = {key: value for key, value in optional.items() if value is not None}
    return {
        OUTCOME_TAG: str(result.outcome),
        "autotune.fingerprint": fingerprint_of(trial, result),
        **known,
    }


def fingerprint_of(trial: TrackedTrial, result: TrialResult) -> str:
    """A hash of twelve hexadecimal digits that is equal for runs of the same configuration and
    seed in the same environment.
    """
    parts = {
        "fingerprint": plain(result.fingerprint),
        "config": plain(trial.config),
        "seed": trial.seed,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def evaluation_points(
    evaluation: Evaluation, at: float, metric_name: str | None = None
) -> list[Point]:
    """The metrics of one evaluation; ``at`` is its Unix time.

    The target's metric is written as ``metric`` and by its own name.

    A reported metric whose name is one of autotune's own fields, such as ``score``, gets a key with
    a hash.
    """
    values = {key: getattr(evaluation, key) for key in EVALUATION_METRICS}
    named = dict(evaluation.metrics)
    if metric_name not in (None, "metric"):
        named[str(metric_name)] = evaluation.metric
    # the target's metric is the loss, and was not reported as such, too
    if math.isnan(evaluation.loss) and "loss" in named:
        values["loss"] = named.pop("loss")
    values |= {
        (
            hashed_key(key)
            if key in EVALUATION_METRICS or key in RESULT_METRICS
            else plain_key(key)
        ): named[key]
        for key in named
    }
    return list(_points(values.items(), at, evaluation.step))


def metric_name_of(trial: TrackedTrial) -> str | None:
    """Name of the metric of the trial's target; None if its configuration has no target."""
    target = trial.config.get("target")
    return str(target["metric"]) if isinstance(target, Mapping) and "metric" in target else None


def evaluated_at(result: TrialResult, evaluation: Evaluation) -> float:
    """Estimated Unix time of an evaluation that was not received live: the run's start plus the
    seconds of all phases until then.
    """
    spent = evaluation.spent_build_seconds + evaluation.warm_seconds + evaluation.evaluate_seconds
    return min(result.started_at + spent, result.stopped_at)


def result_points(result: TrialResult, score: float | None) -> list[Point]:
    """The metrics of a whole run, at the step of its last evaluation."""
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
            "reused_build_seconds": last.reused_build_seconds or None,
        }
    return list(_points(values.items(), result.stopped_at, last.step if last else 0))


def study_points(metrics: Mapping[str, float], at: float) -> list[Point]:
    """The metrics of a whole study, at step 0; ``at`` is their Unix time."""
    return list(_points(((plain_key(key), value) for key, value in metrics.items()), at, 0))


def _points(values: Iterable[tuple[str, float | None]], at: float, step: int) -> Iterator[Point]:
    # a database has no larger ones, and would refuse the run
    step = min(max(step, -(2**63)), 2**63 - 1)
    # MLflow stores infinity as 1.8e308, which flattens every chart, so such values are left out;
    # the outcome tag tells the reason.
    for key, value in values:
        if value is not None and math.isfinite(value):
            yield Point(key, float(value), milliseconds(at), step)


def params(values: Mapping[str, Any]) -> dict[str, str]:
    """Values as MLflow params (see ``param_text``), so that values read back from a file give
    equal params.
    """
    return {plain_key(key): param_text(value) for key, value in values.items()}


def param_text(value: Any) -> str:
    """One value as the text of an MLflow param, cut to ``MAX_PARAM_CHARACTERS``: JSON, and text
    unchanged unless it could be read as JSON.

    The number 1 is ``1`` and the text ``"1"``, with quotes.
    """
    return _cut(
        value if isinstance(value, str) and not _is_json(value) else json.dumps(plain(value)),
        MAX_PARAM_CHARACTERS,
    )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def plain_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags with keys that MLflow accepts, and values cut to ``MAX_TAG_CHARACTERS``."""
    return {plain_key(key): _cut(value, MAX_TAG_CHARACTERS) for key, value in tags.items()}


_MAX_KEY_CHARACTERS = 250
_REPLACED = re.compile(r"[^/\w.\- ]")
"""Characters that no server takes in a key; a colon is refused by servers on Windows."""
_HASH_DIGITS = 8
_LOOKS_HASHED = re.compile(rf"-[0-9a-f]{{{_HASH_DIGITS}}}\Z")


def plain_key(key: str) -> str:
    """A key that MLflow accepts, another one for every name: the name itself where that will do,
    else what can be kept of it and a hash.

    MLflow refuses characters, more than 250 of them, and what is no plain relative path, such as
    ``..`` or ``/loss``.
    """
    is_path = posixpath.normpath(key) == key and key != "." and not key.startswith(("..", "/"))
    is_plain = is_path and len(key) <= _MAX_KEY_CHARACTERS and not _REPLACED.search(key)
    return key if is_plain and not _LOOKS_HASHED.search(key) else hashed_key(key)


def hashed_key(key: str) -> str:
    """What can be kept of a name in a key, and a hash of the whole name."""
    kept = [part for part in _REPLACED.sub("_", key).split("/") if part.strip(".")]
    readable = "/".join(kept).lstrip(".") or "_"
    return f"{readable[: _MAX_KEY_CHARACTERS - _HASH_DIGITS - 1]}-{_hash(key)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_HASH_DIGITS]


def plain(value: Any) -> Any:
    """A value as mappings with text keys, lists, numbers and text, which JSON and YAML can
    store.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if type(value) in (str, bool, int, float, type(None)):
        return value
    return str(value)


def storable(text: str) -> str:
    """A text as databases and files take it: escapes stand for characters that UTF-8 does not
    have, and for NUL.
    """
    return text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()


def _cut(text: str, max_characters: int) -> str:
    """A text of at most that many characters.

    The end of one that is cut tells it from others that begin alike.
    """
    text = storable(text)
    if len(text) <= max_characters:
        return text
    mark = f" ... [cut, {_hash(text)}]"
    return text[: max_characters - len(mark)] + mark
