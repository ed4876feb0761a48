"""What disturbs a training's GPU and what limits it, of cards and drivers that a test makes up."""

import os
import platform
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.training.device import gpu_facts, look_at_gpus, memory_held_by_others
from tests.support.nvml import Driver, Gpu

OWN, CHILD, OTHER = os.getpid(), 1_000_001, 1_000_002


@pytest.fixture
def has_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process trains on the GPU ``a``."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a")
    )


def is_shared(own: list[int], started: list[int]) -> bool:
    return any(look.is_shared for look in look_at_gpus(own, started))


@pytest.mark.usefixtures("has_context")
@pytest.mark.parametrize(
    ("processes", "shared"),
    [
        ({OWN: 90, CHILD: 90}, False),
        ({OWN: 0, CHILD: 90, OTHER: 9}, False),
        ({OWN: 0, CHILD: 90, OTHER: 10}, True),
    ],
)
def test_only_processes_outside_the_study_disturb_a_gpu(
    processes: dict[int, int], shared: bool, monkeypatch: Any
) -> None:
    Driver(monkeypatch, Gpu("b", {OTHER: 90}), Gpu("a", processes))
    assert is_shared([], [CHILD]) == shared
    assert is_shared([CHILD], []) == shared


@pytest.mark.usefixtures("has_context")
def test_a_rank_that_sees_the_gpus_of_all_looks_at_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab"[device])
    )
    monkeypatch.setenv("LOCAL_RANK", "1")
    Driver(monkeypatch, Gpu("a", {OWN: 90}), Gpu("b", {OWN: 90, OTHER: 90}))
    assert is_shared([], [])


def test_a_command_computes_in_a_process_of_its_own_and_no_context_is_made_to_see_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch.cuda, "current_device", lambda: pytest.fail("this makes CUDA's state in the process")
    )
    gpu = Gpu("a", {CHILD: 90})
    Driver(monkeypatch, Gpu("b", {OTHER: 90}), gpu)
    assert not is_shared([], [CHILD])
    gpu.processes[OTHER] = 90
    assert is_shared([], [CHILD])
    assert not look_at_gpus([], []), "nothing is trained on a GPU"
    assert [limits["uuid"] for limits in gpu_facts([CHILD])["gpus"]] == ["GPU-a"]


@pytest.mark.usefixtures("has_context")
@pytest.mark.parametrize(
    ("reasons", "causes"),
    [
        (0x20, ["heat"]),
        (0xC0, ["heat", "its power supply"]),
        (0x4, []),  # its usual power limit
    ],
)
def test_brakes_are_lower_clocks_by_heat_or_power_supply(
    reasons: int, causes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Driver(monkeypatch, Gpu("a", {OWN: 90}, reasons=reasons))
    [look] = look_at_gpus()
    where = f"GPU-a of {platform.node()} is slowed down by"
    assert look == (False, [f"{where} {cause}" for cause in causes], [])


@pytest.mark.usefixtures("has_context")
def test_a_gpu_that_failed_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "current_device", fails)
    assert look_at_gpus() == []


@pytest.mark.usefixtures("has_context")
def test_what_a_driver_does_not_tell_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(
        monkeypatch,
        Gpu("a", {OTHER: 90}, milliwatts=500_000),
        missing=("nvmlDeviceGetCurrentClocksThrottleReasons",),
    )
    assert not is_shared([], [])
    facts = gpu_facts([])
    assert facts["gpus"] == [
        {
            "uuid": "GPU-a",
            "power_limit_watts": 500.0,
            "default_power_limit_watts": 700.0,
            "max_clock_mhz": 1980,
            "application_clock_mhz": None,
        }
    ]
    slowed, shared = facts["warnings"]
    assert slowed.startswith(
        "whether a GPU is slowed down by heat or its power supply cannot be told: "
    )
    assert shared.startswith(
        "whether other programs compute on a GPU cannot be told: NVML lists no process of the study"
        " there"
    )
    Driver(monkeypatch)
    assert look_at_gpus() == []
    assert gpu_facts([]) == {
        "gpus": [],
        "warnings": ["what else uses the GPU cannot be told: NVML of GPU a: Driver Not Loaded"],
    }


@pytest.mark.usefixtures("has_context")
@pytest.mark.parametrize(
    ("memory", "held"),
    [
        ({OWN: 60, CHILD: 30, OTHER: 10}, 10),
        ({OWN: 90, OTHER: 5}, 0),  # little
        ({OWN: None, OTHER: None}, 0),  # NVML does not tell it
        ({OTHER: 90}, 0),  # a container has process ids of its own
    ],
)
def test_memory_that_other_programs_hold_is_told(
    memory: dict[int, int | None], held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Driver(monkeypatch, Gpu("b", memory={OTHER: 50}), Gpu("a", memory=memory))
    assert memory_held_by_others(1, [CHILD]) == held


@pytest.mark.parametrize("visible", ["1", "GPU-a"])
def test_memory_is_told_of_the_gpu_of_a_command_that_has_ended(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    Driver(monkeypatch, Gpu("b"), Gpu("a", memory={OTHER: 50}))
    assert memory_held_by_others(1, []) == 50
