"""What counts as too much else on a machine, by numbers.

How it is counted is in tests/execution/test_watchdog.py.
"""

import json
from dataclasses import asdict
from typing import Any

import pytest

from autotune.contention import Contention


def contention(**numbers: Any) -> Contention:
    """Of ten seconds, with nothing else on the machine unless said."""
    nothing = {
        "seconds": 10.0,
        "stopped_seconds": 0.0,
        "waited_seconds": 0.0,
        "others_cpu_seconds": 0.0,
        "study_cpu_seconds": 0.0,
    }
    return Contention(**{**nothing, **numbers})


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        # two trials and their driver on two cores
        {"waited_seconds": 4.0, "study_cpu_seconds": 12.0},
        # and what any machine does beside
        {"waited_seconds": 4.0, "study_cpu_seconds": 12.0, "others_cpu_seconds": 0.5},
        # one busy neighbour, and a core for each
        {"waited_seconds": 0.3, "others_cpu_seconds": 10.0},
        # nobody waits for others longer than they run
        {"waited_seconds": 3.0, "others_cpu_seconds": 0.4},
        {"seconds": 0.1, "waited_seconds": 0.04, "others_cpu_seconds": 0.1},
        {"stopped_seconds": 0.3},
        {"brakes": ("GPU-a is slowed down by heat",)},
        # trifles in two hours
        {"seconds": 7200.0, "stopped_seconds": 0.5},
        {"seconds": 7200.0, "stopped_seconds": 100.0},
        {"seconds": 7200.0, "shared_seconds": 100.0},
    ],
)
def test_what_any_machine_does_is_no_contention(numbers: dict[str, float]) -> None:
    assert contention(**numbers).reason is None


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        (
            {"waited_seconds": 6.0, "others_cpu_seconds": 16.0, "study_cpu_seconds": 0.5},
            "it waited 5.82 s of 10.00 s for a CPU while other programs used 1.6 CPUs",
        ),
        (
            {"waited_seconds": 4.0, "others_cpu_seconds": 8.0, "study_cpu_seconds": 8.0},
            "it waited 2.00 s of 10.00 s for a CPU while other programs used 0.8 CPUs",
        ),
        ({"stopped_seconds": 4.04}, "its process was stopped for 4.0 s of 10.0 s"),
        (
            {"seconds": 2.0, "stopped_seconds": 0.5},
            "its process was stopped for 0.5 s of 2.0 s",
        ),
        (
            {"seconds": 7200.0, "stopped_seconds": 150.0},
            "its process was stopped for 150.0 s of 7200.0 s",
        ),
        (
            {"shared_seconds": 0.5},
            "other programs computed on its GPU for 0.5 s of 10.0 s",
        ),
        (
            {"seconds": 7200.0, "shared_seconds": 2160.0, "stopped_seconds": 150.0},
            "other programs computed on its GPU for 2160.0 s of 7200.0 s",
        ),
    ],
)
def test_what_spoils_a_time_is_told_in_one_line(numbers: dict[str, Any], reason: str) -> None:
    assert contention(**numbers).reason == reason


def test_stretches_of_a_paused_trial_are_judged_together() -> None:
    short = contention(seconds=1.0, waited_seconds=0.6, others_cpu_seconds=1.6)
    assert short.reason is not None
    assert (contention() + short).reason is None
    assert (short + short).seconds == 2.0
    beside = contention(shared_seconds=1.0, brakes=("GPU-b", "GPU-a"))
    total = beside + contention(seconds=90.0, shared_seconds=2.0, brakes=("GPU-a",))
    assert (total.seconds, total.shared_seconds) == (100.0, 3.0)
    assert total.reason == "other programs computed on its GPU for 3.0 s of 100.0 s"
    assert total.brakes == ("GPU-a", "GPU-b")
    assert (beside + contention(seconds=90.0)).reason is None


def test_ranks_are_as_disturbed_as_the_worst_of_them_and_tell_the_brakes_of_all() -> None:
    stopped = contention(stopped_seconds=0.6, brakes=("GPU-a",))
    shared = contention(shared_seconds=5.0, brakes=("GPU-b",))
    for ranks in ([stopped, shared], [shared, stopped]):
        worst = Contention.of_ranks(ranks)
        assert (worst.shared_seconds, worst.brakes) == (5.0, ("GPU-a", "GPU-b"))
    # a part of what is too much after the next pause
    nearly = contention(shared_seconds=0.15)
    assert Contention.of_ranks([contention(stopped_seconds=0.1), nearly]) == nearly


def test_a_record_survives_json() -> None:
    record = contention(shared_seconds=1.0, brakes=("GPU-a",))
    assert Contention.from_dict(json.loads(json.dumps(asdict(record)))) == record
