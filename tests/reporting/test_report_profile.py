"""A profile is told in columns that add up. Each line of advice is given where its number stands
out, names the setting to try, and is not given anywhere else.
"""

from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from autotune.reporting.profile import advise, print_profile
from autotune.training.profiling import BETWEEN, IDLE, WAITING, OperatorTime, StepProfile

SETTINGS: dict[str, Any] = {
    "runtime.channels_last": False,
    "runtime.compile": None,
    "runtime.cuda_graph": False,
    "runtime.optimizer_kernels": None,
    "runtime.cudnn_benchmark": False,
    "runtime.micro_batch_size": None,
    "runtime.activation_checkpointing": False,
    "data_path.num_workers": 0,
    "precision.autocast_dtype": None,
    "precision.weights_dtype": "float32",
    "precision.float8": False,
    "precision.float32_precision": "ieee",
}
GIBIBYTE = 1 << 30


def operators(**seconds: float) -> tuple[OperatorTime, ...]:
    return tuple(
        OperatorTime(name=f"aten::{name}", calls=1, seconds=value)
        for name, value in seconds.items()
    )


CPU = StepProfile(
    num_steps=20,
    batch_size=64,
    plain_step_seconds=0.8,
    step_seconds=1.0,
    host_seconds={"data": 0.05, "forward": 0.45, "backward": 0.4, "optimizer": 0.05, BETWEEN: 0.05},
    device_seconds={},
    operators=operators(addmm=0.6, mkldnn_convolution=0.1),
    num_kernels=0,
    waits=(),
    device_name="a processor",
    compute_capability=None,
    num_threads=2,
    peak_memory_bytes=GIBIBYTE,
    memory_limit_bytes=None,
    is_resident=True,
    is_small=True,
    optimizer_kernels=("fused", "foreach"),
    settings=SETTINGS,
)
GPU: StepProfile = replace(
    CPU,
    host_seconds={
        "data": 0.02,
        "forward": 0.1,
        "backward": 0.1,
        "optimizer": 0.05,
        BETWEEN: 0.03,
        WAITING: 0.7,
    },
    device_seconds={"data": 0.02, "forward": 0.4, "backward": 0.43, "optimizer": 0.05, IDLE: 0.1},
    operators=operators(mm=0.2, add=0.5, cudnn_convolution=0.05),
    num_kernels=300,
    device_name="a GPU",
    compute_capability=(9, 0),
    memory_limit_bytes=10 * GIBIBYTE,
)
IDLE_GPU: dict[str, Any] = {"device_seconds": {"backward": 0.5, IDLE: 0.5}}
SLOW_DATA: dict[str, Any] = {"host_seconds": {"data": 0.43, "forward": 0.57}, "is_resident": False}
SLOW_OPTIMIZER = {"host_seconds": {"forward": 0.6, "optimizer": 0.4}}
FLOAT32 = {"operators": operators(mm=0.25, cudnn_convolution=0.15)}
CONVOLUTIONS: dict[str, Any] = {"operators": operators(convolution=0.25, max_pool2d=0.5)}
FULL = {"peak_memory_bytes": 9 * GIBIBYTE}


@pytest.mark.parametrize(
    ("profile", "fields", "settings", "said"),
    [
        (CPU, {}, {}, None),
        (GPU, {}, {}, None),
        (
            CPU,
            SLOW_DATA,
            {},
            (
                "next batch takes 43% of a step: try data_path.on_device=true or"
                " data_path.num_workers=2"
            ),
        ),
        (
            CPU,
            {**SLOW_DATA, "is_small": False},
            {"data_path.num_workers": 3},
            "43% of a step: try data_path.num_workers=6",
        ),
        (GPU, SLOW_DATA, {}, "waiting for the next batch takes 10% of a step"),
        (
            GPU,
            IDLE_GPU,
            {},
            (
                "idle for 50% of a step: its 300 kernels end before the host has started the next"
                " ones: try runtime.cuda_graph=true or runtime.compile=default or batch_size=128"
            ),
        ),
        (
            GPU,
            IDLE_GPU,
            {"runtime.cuda_graph": True, "runtime.compile": "default"},
            "the next ones: try batch_size=128",
        ),
        (
            GPU,
            FLOAT32,
            {},
            (
                "in float32 take 40% of a step, and this GPU has tensor cores: try precision=tf32"
                " or precision=bf16"
            ),
        ),
        (GPU, FLOAT32, {"precision.float32_precision": "tf32"}, "tensor cores: try precision=bf16"),
        (GPU, {**FLOAT32, "compute_capability": None}, {}, None),
        (GPU, FLOAT32, {"precision.autocast_dtype": "bfloat16"}, None),
        (CPU, CONVOLUTIONS, {}, "convolutions take 25% of a step: try runtime.channels_last=true"),
        (CPU, CONVOLUTIONS, {"runtime.channels_last": True}, None),
        (
            GPU,
            CONVOLUTIONS,
            {"runtime.channels_last": True},
            "25% of a step: try runtime.cudnn_benchmark=true",
        ),
        (
            CPU,
            SLOW_OPTIMIZER,
            {},
            "the optimizer takes 40% of a step: try runtime.optimizer_kernels=fused",
        ),
        (CPU, {**SLOW_OPTIMIZER, "optimizer_kernels": ()}, {}, "40% of a step: try batch_size=128"),
        (GPU, SLOW_OPTIMIZER, {}, None),
        (
            GPU,
            FULL,
            {},
            (
                "the peak memory is 90% of the GPU's: try runtime.activation_checkpointing=true or"
                " runtime.micro_batch_size=32"
            ),
        ),
        (
            GPU,
            {"waits": ("loss.py:7",)},
            {},
            "the host waits for the GPU at loss.py:7; what it reads can stay on the device",
        ),
    ],
)
def test_advice_is_given_where_a_number_stands_out(
    profile: StepProfile, fields: Mapping[str, Any], settings: Mapping[str, Any], said: str | None
) -> None:
    advice = advise(replace(profile, **fields, settings={**SETTINGS, **settings}))
    assert len(advice) == (said is not None), advice
    assert said is None or said in advice[0]


def test_the_largest_share_comes_first() -> None:
    advice = advise(replace(CPU, **SLOW_DATA | {"operators": CONVOLUTIONS["operators"]}))
    assert [line.split(" take")[0] for line in advice] == [
        "waiting for the next batch",
        "convolutions",
    ]


def lines(profile: StepProfile) -> list[list[str]]:
    file = StringIO()
    console = Console(file=file, width=80, force_terminal=False)
    print_profile(console, profile, title="cnn", files={"trace": "a/folder [of] mine/trace.json"})
    return [line.split() for line in file.getvalue().splitlines()]


def test_a_step_is_told_by_parts_and_operators() -> None:
    said = lines(CPU)
    assert ["forward", "450.000", "45.0%"] in said
    assert ["Python", "between", "50.000", "5.0%"] in said
    assert ["step", "800", "ms,", "80", "samples/s", "(mean", "of", "20", "steps)"] in said
    assert ["aten::addmm", "1", "600.000", "60.0%"] in said
    assert ["trace", "a/folder", "[of]", "mine/trace.json"] in said
    assert ["advice", "none:", "nothing", "stands", "out"] in said


def test_a_gpu_has_columns_of_its_own() -> None:
    said = lines(GPU)
    assert ["backward", "100.000", "10.0%", "430.000", "43.0%"] in said
    assert ["waiting", "for", "the", "GPU", "700.000", "70.0%", "0.000", "0.0%"] in said
    assert ["idle", "0.000", "0.0%", "100.000", "10.0%"] in said
