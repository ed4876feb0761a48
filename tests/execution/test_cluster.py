"""Connecting to Ray, and whether a cluster has room for another trial."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from autotune.config.command_line import EXIT_BAD_INPUT, run_command
from autotune.config.schema import ClusterConfig
from autotune.execution import ray_cluster
from autotune.execution.cluster import ClusterSize, FreeResources, RayConnection
from autotune.execution.process_group import rank_environment
from autotune.execution.task import TrialTask
from autotune.execution.worker import TrialWorker
from autotune.training import capabilities
from autotune.training.capabilities import Capabilities
from autotune.tune_study import tune_command
from tests.support.records import make_trial_task


class Task:
    num_workers, num_cpus, num_gpus, placement = 1, 2, 1, "PACK"


@pytest.mark.parametrize(
    ("settings", "num_running", "has_room"),
    [
        ({"most": None, "can_grow": True}, 0, True),  # Ray says whether even one fits
        ({"most": None, "can_grow": True}, 2, True),
        ({"most": None, "can_grow": True}, 3, False),
        ({"most": 2, "can_grow": False}, 2, False),
        ({"most": 9, "can_grow": False}, 3, False),
        ({"most": 9, "can_grow": True}, 3, True),
    ],
)
def test_as_many_as_fit_or_as_were_asked_for(
    settings: dict[str, Any], num_running: int, has_room: bool
) -> None:
    size = ClusterSize(((8, 2), (8, 1)))
    room = FreeResources(lambda: size, num_cpus=2, num_gpus=1, **settings)
    # it has what is asked
    assert room([Task()] * num_running) is has_room  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("machines", "placement", "fits"),
    [
        ([(8, 2), (8, 1)], "pack", True),
        ([(8, 2), (8, 1)], "strict_pack", False),
        ([(8, 2), (8, 1)], "strict_spread", False),
        ([(8, 3), (8, 0)], "strict_pack", True),
        ([(8, 1), (8, 1), (8, 1)], "strict_spread", True),
        # six CPUs in all, but each machine has room for one worker of two
        ([(3, 8), (3, 8)], "pack", False),
        ([], "pack", False),
    ],
)
def test_each_worker_lies_on_one_machine(
    machines: list[tuple[int, int]], placement: str, fits: bool
) -> None:
    shortage = ClusterSize(tuple(machines)).shortage(
        num_workers=3, num_cpus=6, num_gpus=3, placement=placement
    )
    assert (shortage is None) is fits
    if shortage is not None:
        assert shortage.startswith(
            f"it takes 6 CPU and 3 GPU in 3 workers ({placement}), and Ray has "
        )


@pytest.mark.parametrize(("kind", "num_cpus"), [(None, 12), ("H100", 8), ("A100", 0)])
def test_machines_that_are_alive_and_have_the_kind_of_gpu_count(
    kind: str | None, num_cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0, "accelerator_type:H100": 1.0}},
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": False, "Resources": {}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: machines)
    assert ray_cluster.size_of(kind).num_cpus == num_cpus


def test_machines_that_leave_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = [(8, 1), (4, 0)]
    monkeypatch.setattr("autotune.execution.cluster._ASK_AGAIN_SECONDS", -1.0)
    room = FreeResources(
        lambda: ClusterSize(tuple(machines)), num_cpus=2, num_gpus=1, most=None, can_grow=False
    )
    task = Task()
    assert room.shortage(task) is None  # type: ignore[arg-type]  # it has what is asked
    del machines[0]
    assert room.shortage(task) == "it takes 2 CPU and 1 GPU, and Ray has 4 CPU and 0 GPU"  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_study_whose_gpu_ray_does_not_count_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one_gpu = Capabilities(
        num_cpus=2,
        num_gpus=1,
        gpu_name="NVIDIA H200",
        compute_capability=(9, 0),
        has_compiler=True,
        has_torchao=False,
    )
    monkeypatch.setattr(
        "autotune.execution.cluster.capabilities_of", lambda cluster, launcher: one_gpu
    )
    monkeypatch.chdir(tmp_path)
    assert (
        run_command(
            tune_command,
            ["experiment=cnn", "study.name=blind", "tracking=none", "cluster.num_cpus=2"],
        )
        == EXIT_BAD_INPUT
    )
    wanted = (
        "autotune: cluster: a trial cannot start: it takes 2 CPU and 1 GPU, and Ray has 2 CPU and 0"
        " GPU; torch sees GPUs that Ray does not count: accepted are cluster.num_gpus=1 and"
        " device=cpu\n"
    )
    assert capsys.readouterr().err == wanted


def test_what_ray_imports_warns_of_no_missing_socks_while_hydra_catches_warnings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RayConnection, "_hold", lambda self: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        RayConnection(ClusterConfig()).start()
        warnings.warn(
            "SOCKS support in urllib3 requires the installation of optional dependencies: PySocks",
            stacklevel=1,
        )
        warnings.warn("another", stacklevel=1)
    assert [str(each.message) for each in caught] == ["another"]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray that is told of four GPUs, and told not to say in the environment which of them a
    worker has.
    """
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-a,7")
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=4,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
def test_each_worker_and_what_is_forked_for_it_has_the_gpu_that_ray_gave_it(
    trial_config: Any,
) -> None:
    task = make_trial_task(trial_config(), num_gpus=1)

    class Sees(TrialWorker):
        def setup(self, config: Any) -> None:
            if config["is_rocm"]:
                capabilities.torch_build = lambda: {"hip": "7.0"}
            super().setup(config)

        def sees(self, task: TrialTask) -> tuple[dict[str, str], dict[str, str]]:
            variables = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
            return tuple(
                {name: env[name] for name in variables if name in env}
                for env in (os.environ, rank_environment(task))
            )

    workers = [
        ray.remote(num_gpus=1)(Sees).remote({"task": task, "is_rocm": is_rocm})
        for is_rocm in (False, False, True, True)
    ]
    seen = ray.get([worker.sees.remote(task) for worker in workers], timeout=60)
    of_workers, of_forked = zip(*seen, strict=True)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in of_forked[:2]] == [
        env["CUDA_VISIBLE_DEVICES"] for env in of_workers[:2]
    ]
    assert [env["HIP_VISIBLE_DEVICES"] for env in of_forked[2:]] == [
        env["HIP_VISIBLE_DEVICES"] for env in of_workers[2:]
    ]
    assert {*(next(iter(env.values())) for env in of_forked)} == {"4", "5", "GPU-a", "7"}
