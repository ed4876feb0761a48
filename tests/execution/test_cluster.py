"""Connecting to Ray, and whether a cluster has room for another trial."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.config.command_line import EXIT_BAD_INPUT, run_command
from autotune.execution.cluster import ClusterSize
from autotune.training.capabilities import Capabilities
from autotune.tune_study import tune_command


@pytest.mark.parametrize(("num_running", "has_room"), [(2, True), (3, False)])
def test_as_many_as_fit(num_running: int, has_room: bool) -> None:
    size = ClusterSize(((8, 2), (8, 1)))
    # it has what is asked
    tasks: Any = [SimpleNamespace(num_cpus=2, num_gpus=1)] * num_running
    assert size.has_room(tasks, 2, 1) is has_room


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


@pytest.mark.slow
def test_a_study_whose_gpu_ray_does_not_have_ends_in_one_line(
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
        " GPU\n"
    )
    assert capsys.readouterr().err == wanted
