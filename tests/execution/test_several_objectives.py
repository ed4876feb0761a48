"""A study of several objectives with real Ray, one of them the user's own: its front is what its
trials say.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support.studies import rows_of

pytestmark = pytest.mark.slow

_SAMPLES = '''
class Samples:
    """How many training samples were seen."""

    quantity = "samples to target"
    unit = "samples"

    def score(self, result):
        return self.lower_bound(result.last)

    def lower_bound(self, evaluation):
        return float(evaluation.samples)
'''
_COMMAND = (
    "experiment=cnn_smoke",
    "study.name=several",
    "objective=pareto",
    "+objective.objectives.samples={_target_: my_objective.Samples}",
    "+objective.preferences.lean={samples: 1}",
    "objective.search_for=quick",
    "allowed_targets=[my_objective]",
    "stopping=none",
    "search=tpe",
    "search.num_trials=8",
    "target.value=0.7",
    "evaluate_every_samples=256",
    "confirm=none",
    "tracking=none",
)


def test_a_study_of_several_objectives_ends_with_its_front(commands: Any, tmp_path: Path) -> None:
    (tmp_path / "my_objective.py").write_text(_SAMPLES)
    said = commands.succeed(*_COMMAND, folder=tmp_path)
    folder = tmp_path / "outputs/several"
    front = rows_of(folder / "pareto_front.csv")
    assert list(front[0]) == [
        "trial",
        "time (s)",
        "device_seconds (device-s)",
        "samples (samples)",
        "picked_by",
        "overrides",
    ]
    points = {row["trial"]: tuple(float(row[key]) for key in list(row)[1:4]) for row in front}
    for one, other in itertools.permutations(points.values(), 2):
        assert not all(mine <= theirs for mine, theirs in zip(one, other, strict=True))

    reached = [row for row in rows_of(folder / "trials.csv") if row["outcome"] == "REACHED"]
    least = min(reached, key=lambda row: float(row["score"]))
    assert {row["score_unit"] for row in reached} == {""}
    assert points[least["trial"]][0] == pytest.approx(
        float(least["build_seconds"]) / 100
        + float(least["prepare_seconds"])
        + float(least["train_seconds"])
    )
    picked = {name: row["trial"] for row in front for name in row["picked_by"].split()}
    assert picked.keys() == {"balanced", "quick", "thrifty", "lean"}
    assert picked["quick"] == least["trial"]
    assert float(
        next(row for row in front if row["trial"] == picked["lean"])["samples (samples)"]
    ) == min(point[2] for point in points.values())
    assert (folder / "figures/front.html").stat().st_size > 5_000
    told = (
        f"Pareto front: {len(front)} of {len(reached)} trials that reached the target, by time,"
        " device_seconds, samples"
    )
    assert told in said

    assert told in commands.succeed(*_COMMAND, folder=tmp_path)
    assert rows_of(folder / "pareto_front.csv") == front
