"""What a study prints at its end."""

from io import StringIO
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from autotune.execution.conclusion import _Conclusion
from autotune.execution.live_study import LiveStudy
from autotune.measurement import Target
from autotune.outcome import Outcome
from autotune.reporting.scores import SECONDS
from tests.support.records import make_evaluation, make_result


def test_where_nothing_reached_the_closest_trial_says_which_bound_it_missed() -> None:
    target = Target(
        metric="fake_acc",
        value=0.5,
        mode="max",
        max_train_seconds=60,
        constraints={"g_loss": {"at_most": 0.01}},
    )
    results = {
        trial: make_result(
            trial, Outcome.MISSED, make_evaluation(metric=metric, metrics={"g_loss": g_loss})
        )
        for trial, metric, g_loss in ((0, 0.98, 0.031), (1, 0.6, 0.012), (2, 0.3, 0.001))
    }
    plan = SimpleNamespace(
        objective=None,
        trial=SimpleNamespace(target=target),
        score_format=SECONDS,
        space=SimpleNamespace(choices=()),
        further_command="autotune",
    )
    console = Console(file=StringIO(), width=80)
    policy = SimpleNamespace(results=results, scores={})
    tracker = SimpleNamespace(page=None)
    live: Any = SimpleNamespace(plan=plan, policy=policy, console=console, tracker=tracker)
    live.closest = LiveStudy.closest.fget(live)  # type: ignore[attr-defined]
    assert _Conclusion(live, None).print() == 3
    nothing, closest, *_ = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert nothing == "nothing reached fake_acc >= 0.5, g_loss <= 0.01"
    assert closest == "closest: trial 1, fake_acc 0.6, g_loss 0.012 > 0.01: the baseline"
