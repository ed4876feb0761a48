"""The tags, params and metrics that trackers receive about a run, as plain data.

Users' dashboards rely on the names, so they must not change. Values that MLflow would refuse are
cut or left out here, so that one such value never costs a whole batch.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotune.measurement import Evaluation, TrialResult
from autotune.policy import Run
from autotune.tracking.tracker import StudyInfo

_MAX_TAG_CHARACTERS, _MAX_PARAM_CHARACTERS, _MAX_KEY_CHARACTERS = 5000, 6000, 250
RUN_TAG, OUTCOME_TAG = "autotune.run", "autotune.outcome"
"""Tags of a trial's run: its name, as the study knows it, and its outcome."""
INTERRUPTED = "INTERRUPTED"
"""The outcome tag of a run whose driver ended before the run did; no member of ``Outcome``."""

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


def study_tags(info: StudyInfo) -> dict[str, str]:
    """Tags of the run of a whole study or comparison."""
    return plain_tags(
        {
            **info.tags,
            "autotune.study": info.name,
            "autotune.phase": info.kind,
            "autotune.experiment": info.experiment,
            "autotune.workload": info.workload,
            "autotune.folder": Path(info.folder).resolve(),
        }
    )


def trial_tags(trial: Run, study: str) -> dict[str, str]:
    """Tags that a trial's run has from its start."""
    return plain_tags(
        {
            "autotune.study": study,
            RUN_TAG: trial.name,
            "autotune.trial": trial.trial,
            "autotune.phase": trial.phase,
            "autotune.seed": trial.seed,
            "autotune.retry_of": trial.retry_of,
        }
    )


def result_tags(result: TrialResult) -> dict[str, str]:
    """Tags that a trial's run gets at its end."""
    return plain_tags(
        {
            OUTCOME_TAG: result.outcome,
            "autotune.cap_seconds": result.cap_seconds,
            "autotune.contention": result.contention,
            "autotune.trials_per_gpu": result.fingerprint.get("trials_per_gpu"),
        }
    )


def evaluation_metrics(evaluation: Evaluation, trial: Run) -> dict[str, float]:
    """The metrics of one evaluation; the target's metric is in them as ``metric`` and by its name.

    A reported metric with the name of one that autotune has measured itself, such as ``loss`` or
    ``score``, gets a key with a hash.
    """
    measured = _finite((key, getattr(evaluation, key)) for key in EVALUATION_METRICS)
    reported = dict(evaluation.metrics)
    if (name := trial.config.get("target", {}).get("metric", "metric")) != "metric":
        reported[name] = evaluation.metric
    return measured | _finite(
        (hashed_key(name) if name in (*measured, *RESULT_METRICS) else plain_key(name), value)
        for name, value in reported.items()
    )


def evaluated_at(result: TrialResult, evaluation: Evaluation) -> float:
    """Estimated Unix time of an evaluation that was not received live: the run's start plus the
    seconds of all phases until then.
    """
    spent = evaluation.spent_build_seconds + evaluation.warm_seconds + evaluation.evaluate_seconds
    return min(result.started_at + spent, result.stopped_at)


def result_metrics(result: TrialResult, score: float | None) -> dict[str, float]:
    """The metrics of a whole run."""
    values: dict[str, float | None] = {
        "time_to_target_seconds": result.time_to_target_seconds,
        "score": score,
        "test_metric": result.test_metric,
    }
    if (last := result.last) is not None:
        values |= {
            "warm_seconds": last.warm_seconds,
            "cold_seconds": last.build_seconds + last.warm_seconds,
            "reused_build_seconds": last.reused_build_seconds or None,
        }
    return _finite(values.items())


def _finite(values: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """The values without those that are missing or not finite: MLflow stores infinity as 1.8e308,
    which flattens every chart.
    """
    return {
        key: float(value) for key, value in values if value is not None and math.isfinite(value)
    }


def params(values: Mapping[str, Any]) -> dict[str, str]:
    """Values as MLflow params: texts as they are, all else as JSON, cut to what MLflow takes."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(plain(value))
        for key, value in values.items()
    }
    return {plain_key(key): storable(text)[:_MAX_PARAM_CHARACTERS] for key, text in texts.items()}


def plain_tags(tags: Mapping[str, object]) -> dict[str, str]:
    """Tags with keys that MLflow accepts, and values as text, cut to what it takes; without those
    that are None.
    """
    return {
        plain_key(key): storable(str(value))[:_MAX_TAG_CHARACTERS]
        for key, value in tags.items()
        if value is not None
    }


_PLAIN = re.compile(r"(?!\.)[\w.\- ]+(/(?!\.)[\w.\- ]+)*")
"""Names that every store takes as keys: relative paths of words."""


def plain_key(key: str) -> str:
    """A key that MLflow accepts, another one for every name: the name itself where that will do,
    else what can be kept of it and a hash.
    """
    is_plain = len(key) <= _MAX_KEY_CHARACTERS and _PLAIN.fullmatch(key)
    return key if is_plain else hashed_key(key)


def hashed_key(key: str) -> str:
    """What can be kept of a name in a key, and a hash of the whole name."""
    parts = (part.lstrip(".") for part in re.sub(r"[^/\w.\- ]", "_", key).split("/"))
    digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
    ending = f"-{digest[:8]}"
    return ("/".join(filter(None, parts)) or "_")[: _MAX_KEY_CHARACTERS - len(ending)] + ending


def plain(value: Any) -> Any:
    """A value as mappings, lists, numbers and text, which JSON and YAML can store."""
    return json.loads(json.dumps(value, default=str))


def storable(text: str) -> str:
    """A text as databases and files take it: escapes stand for characters that UTF-8 does not
    have, and for NUL.
    """
    return text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()
