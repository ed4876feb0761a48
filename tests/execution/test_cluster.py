"""Connecting to Ray, and whether a cluster has room for another trial."""

import warnings
from typing import Any

import pytest
import ray

from autotune.config.schema import ClusterConfig
from autotune.execution.cluster import Connection, Room


class Task:
    num_cpus, num_gpus = 2, 1


@pytest.mark.parametrize(
    ("settings", "num_running", "has_room"),
    [
        ({"most": None, "can_grow": True}, 0, True),  # Ray says whether even one fits
        ({"most": None, "can_grow": True}, 2, True),
        ({"most": None, "can_grow": True}, 3, False),
        ({"most": 2, "can_grow": False}, 2, False),
        ({"most": 9, "can_grow": False}, 3, False),
        ({"most": 9, "can_grow": True}, 3, True),
        ({"most": None, "can_grow": True, "accelerator_type": "H100"}, 1, True),
        ({"most": None, "can_grow": True, "accelerator_type": "H100"}, 2, False),
    ],
)
def test_as_many_as_fit_or_as_were_asked_for(
    settings: dict[str, Any], num_running: int, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0, "accelerator_type:H100": 1.0}},
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A100": 1.0}},
        {"Alive": False, "Resources": {}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: machines)
    room = Room(num_cpus=2, num_gpus=1, **{"accelerator_type": None, **settings})
    assert room([Task()] * num_running) is has_room  # type: ignore[list-item]  # it has what is asked


def test_what_ray_imports_warns_of_no_missing_socks_while_hydra_catches_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "_hold", lambda self: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        Connection(ClusterConfig()).start()
        warnings.warn("SOCKS support in urllib3 requires the installation of optional dependencies: PySocks", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert [str(each.message) for each in caught] == ["another"]
