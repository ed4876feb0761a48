"""A profile is told in columns that add up, and drawn as parts of a whole."""

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from autotune.reporting.advice import Advice
from autotune.reporting.drawing import write_charts
from autotune.reporting.profile import print_profile, profile_chart
from autotune.step_profile import BETWEEN, IDLE, WAITING, OperatorTime, StepProfile, StepTimes

LONG_KERNEL = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_nn_align4>(Params) [with] $brackets$"


def operator(name: str, seconds: float, shapes: str = "") -> OperatorTime:
    return OperatorTime(name=name, calls=2, self_seconds=seconds, shapes=shapes, float32_seconds=0.0, contiguous_seconds=0.0)


ON_CPU = StepProfile(
    times=StepTimes(
        step_seconds=0.01,
        median_step_seconds=0.009,
        host_seconds={"data": 0.0005, "augmentation": 0.0005, "forward": 0.004, "backward": 0.004, "optimizer": 0.0005, BETWEEN: 0.0005},
        device_seconds={},
        data_wait_seconds=0.0005,
        python_seconds=0.002,
        operators=tuple(operator(f"aten::operator_{index}", 0.001 / (index + 1), "64x3x32x32") for index in range(14)),
        kernels=(),
        num_operators=70.0,
        num_kernels=0.0,
        synchronisations=(),
    ),
    num_steps=20,
    batch_size=64,
    plain_step_seconds=0.008,
    device="cpu",
    device_name="a processor",
    compute_capability=None,
    num_threads=2,
    peak_memory_bytes=300 << 20,
    memory_limit_bytes=None,
    is_resident=True,
    is_small=True,
    optimizer_kernels=("fused",),
    settings={},
)
ON_GPU = replace(
    ON_CPU,
    device="cuda",
    device_name="a GPU",
    times=replace(
        ON_CPU.times,
        host_seconds={"data": 0.001, "graph": 0.001, "optimizer": 0.001, BETWEEN: 0.001, WAITING: 0.006},
        device_seconds={"data": 0.0001, "graph": 0.0069, "optimizer": 0.001, IDLE: 0.002},
        operators=(operator(LONG_KERNEL, 0.006), operator("aten::add_", 0.001)),
        kernels=(operator(LONG_KERNEL, 0.006), operator("add", 0.001)),
    ),
)
EMPTY = replace(ON_CPU, times=replace(ON_CPU.times, operators=()))
ADVICE = (
    Advice(share=0.4, finding="[bold]much[/] takes 40% of a step", overrides=("precision=bf16", "batch_size=128")),
    Advice(share=0.1, finding="change the code", overrides=()),
)


def lines(profile: StepProfile, advice: Sequence[Advice] = (), *, width: int = 120) -> list[str]:
    file = StringIO()
    console = Console(file=file, width=width, force_terminal=False)
    print_profile(console, profile, advice, title="cnn", files={"trace": "a/folder [of] mine/trace.json"})
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_parts_are_told_with_their_shares_of_the_step() -> None:
    said = [line.split() for line in lines(ON_CPU)]
    assert ["forward", "4.00", "40.0%"] in said
    assert ["Python", "between", "0.500", "5.0%"] in said
    assert ["step", "10.00", "100.0%"] in said
    assert ["step", "8.00", "ms,", "8,000", "samples/s", "(mean", "of", "20", "steps)"] in said
    assert ["aten::operator_0", "2", "1.00", "10.0%", "64x3x32x32"] in said
    assert ["4", "others", "8", "0.323", "3.2%"] in said


def test_a_few_long_steps_are_pointed_out() -> None:
    few = replace(ON_CPU, times=replace(ON_CPU.times, median_step_seconds=0.004))
    assert any("half of these steps took at most 4.00 ms" in line for line in lines(few))
    assert not any("half of these steps" in line for line in lines(ON_CPU))


def test_a_gpu_has_columns_of_its_own() -> None:
    said = [line.split() for line in lines(ON_GPU)]
    assert ["forward,", "backward", "1.00", "10.0%", "6.90", "69.0%"] in said
    assert ["waiting", "for", "the", "GPU", "6.00", "60.0%", "-", "-"] in said
    assert ["idle", "-", "-", "2.00", "20.0%"] in said
    assert ["step", "10.00", "100.0%", "10.00", "100.0%"] in said
    assert sum(line[0] == "kernel" for line in said if line) == 1


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_keeps_the_numbers(width: int) -> None:
    for profile in (ON_CPU, ON_GPU):
        said = lines(profile, width=width)
        table = [line for line in said if line.endswith(("%", "x32"))]
        assert len(table) >= 9
        assert max(map(len, table)) <= width
        assert ("x32" in "".join(table)) is (width >= 100 and profile is ON_CPU)


def test_advice_and_files_are_printed_as_they_are() -> None:
    said = lines(ON_CPU, ADVICE, width=60)
    assert "advice  [bold]much[/] takes 40% of a step: try precision=bf16 or batch_size=128" in said
    assert "advice  change the code" in said
    assert "trace   a/folder [of] mine/trace.json" in said
    assert "advice  none: nothing stands out" in lines(ON_CPU)


@pytest.mark.parametrize("profile", [ON_CPU, ON_GPU, EMPTY], ids=["cpu", "gpu", "no operator"])
def test_the_parts_in_the_chart_add_up(profile: StepProfile, tmp_path: Path) -> None:
    chart = profile_chart(profile, "cnn · 20 steps of 64 samples")
    parts = [trace.x for trace in chart.figure.data if trace.xaxis == "x"]
    columns = 2 if profile.times.device_seconds else 1
    assert [sum(shares) for shares in zip(*parts, strict=True)] == pytest.approx([1.0] * columns)
    assert [path.name for path in write_charts(tmp_path, [chart])] == ["profile.html"]
