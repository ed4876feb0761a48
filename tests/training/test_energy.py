"""Energy meters over counters that a test sets: RAPL files in a folder, and a driver that says
what it is told.
"""

import math
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from autotune.config.schema import TrialConfig
from autotune.measurement import Evaluation, Phase, PhaseClock
from autotune.objective import Energy
from autotune.training import energy
from autotune.training.energy import RaplMeter, energy_fault, energy_meter, joules_of_all
from autotune.training.loop import train
from autotune.training.parallel.ranks import joined, open_store
from tests.support.nvml import Driver, Gpu

MakeConfig = Callable[..., TrialConfig]


def zone(
    folder: Path, number: str, name: str, microjoules: int, wraps_at: int = 1_000_000_000
) -> Path:
    made = folder / f"intel-rapl:{number}"
    made.mkdir(parents=True)
    (made / "name").write_text(f"{name}\n")
    (made / "max_energy_range_uj").write_text(f"{wraps_at}\n")
    (made / "energy_uj").write_text(f"{microjoules}\n")
    return made


def used(zone: Path, microjoules: int) -> None:
    """The zone's counter goes on, and wraps around where it must."""
    wraps_at = int((zone / "max_energy_range_uj").read_text())
    (zone / "energy_uj").write_text(
        f"{(int((zone / 'energy_uj').read_text()) + microjoules) % wraps_at}\n"
    )


def test_packages_are_counted_and_their_parts_and_the_platform_are_not(tmp_path: Path) -> None:
    zones = [
        zone(tmp_path, number, name, 5_000_000)
        for number, name in (
            ("0", "package-0"),
            ("0:0", "core"),
            ("0:1", "dram"),
            ("1", "package-1"),
            ("2", "psys"),
        )
    ]
    meter = RaplMeter(tmp_path)
    assert meter() == 0.0
    for each in zones:
        used(each, 1_500_000)
    assert meter() == 3.0
    used(zones[0], 250_000)
    assert meter() == 3.25


def test_a_counter_that_wraps_around_goes_on(tmp_path: Path) -> None:
    package = zone(tmp_path, "0", "package-0", 999_000_000)
    meter = RaplMeter(tmp_path)
    total = 0
    for microjoules in (500_000, 700_000, 999_999_999, 1, 0, 800_000_000, 800_000_000):
        used(package, microjoules)
        total += microjoules
        assert meter() == pytest.approx(total * 1e-6, abs=1e-9)


def test_a_gpus_counter_is_in_millijoules(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("1-a", millijoules=12_345_678)
    Driver(monkeypatch, gpu)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-a")
    )
    meter = energy_meter(torch.device("cuda"))
    assert meter is not None
    assert meter() == 12_345.678
    gpu.millijoules = None
    assert math.isnan(meter())


@pytest.mark.parametrize(
    ("cards", "message"),
    [
        ([Gpu("1-a", millijoules=None)], "NVML: Not Supported"),
        ([Gpu("2-a")], "NVML of GPU 1-a: Not Found"),
        ([], "NVML of GPU 1-a: Driver Not Loaded"),
    ],
)
def test_a_driver_that_does_not_tell_is_said(
    cards: list[Gpu], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Driver(monkeypatch, *cards)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-a")
    )
    assert energy_meter(torch.device("cuda")) is None
    assert energy_fault("cuda") == message


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One package in place of this machine's own; its folder."""
    package = zone(tmp_path, "0", "package-0", 0)
    monkeypatch.setattr(energy, "RaplMeter", lambda: RaplMeter(tmp_path))
    energy._cpu_meter.cache_clear()
    return package


@pytest.fixture
def uses_joules(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every phase uses as many joules as its name has letters."""
    enter = PhaseClock.enter

    def enter_and_use(clock: PhaseClock, phase: Phase | None) -> None:
        ending = clock.phase
        if ending is not None:
            used(packages, 1_000_000 * len(ending))
        enter(clock, phase)

    monkeypatch.setattr(PhaseClock, "enter", enter_and_use)


@pytest.mark.usefixtures("uses_joules")
def test_a_training_counts_the_joules_of_its_phases(trial_config: MakeConfig) -> None:
    evaluations: list[Evaluation] = list(train(trial_config("epochs=3", "target.value=2")))
    assert [each.build_joules for each in evaluations] == [pytest.approx(5)] * 3
    assert [each.energy_joules for each in evaluations] == [
        pytest.approx(7 + 5 * each) for each in (1, 2, 3)
    ]
    assert Energy(num_trainings=10).lower_bound(evaluations[-1]) == pytest.approx(0.5 + 22)


def test_a_device_without_a_counter_has_no_joules_and_says_why(
    trial_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(energy, "RaplMeter", lambda: RaplMeter(tmp_path))
    energy._cpu_meter.cache_clear()
    assert energy_meter(torch.device("cpu")) is None
    assert energy_fault("cpu") == f"{tmp_path} has no intel-rapl package"
    last = list(train(trial_config("epochs=1", "target.value=2")))[-1]
    assert (last.energy_joules, last.build_joules) == (None, None)
    energy._cpu_meter.cache_clear()


def _sum_as_rank(rank: int, machine: str, port: int, told: Connection) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    with joined(store, rank=rank, size=3, device=torch.device("cpu")) as ranks:
        energy._machine = lambda: machine
        own = (10.0 ** (rank + 1), None if rank == 1 else 1.0)
        told.send(
            {device: joules_of_all(own, torch.device(device), ranks) for device in ("cpu", "cuda")}
        )


@pytest.mark.slow
def test_ranks_sum_their_gpus_and_count_each_machines_cpu_once() -> None:
    store, context = open_store(), multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(3)]
    machines = ("a", "a", "b")
    others = [
        context.Process(
            target=_sum_as_rank, args=(rank, machines[rank], store.port, theirs), daemon=True
        )
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for each in others:
        each.start()
    assert [ours.recv() for ours, _ in pipes] == [
        {"cpu": (1010.0, 2.0), "cuda": (1110.0, None)}
    ] * 3
    for each in others:
        each.join(10)


@pytest.mark.gpu
def test_a_gpus_joules_grow_while_it_works() -> None:
    device = torch.device("cuda")
    meter = energy_meter(device)
    assert meter is not None, energy_fault("cuda")
    before, factor = meter(), torch.randn(4096, 4096, device=device)
    for _ in range(500):
        factor = torch.nn.functional.normalize(factor @ factor)
    torch.cuda.synchronize(device)
    assert meter() > before
