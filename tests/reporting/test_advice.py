"""Each line of advice is given where its number stands out, names the setting to try, and is not given anywhere else."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.reporting.advice import Advice, advise
from autotune.step_profile import BETWEEN, IDLE, WAITING, OperatorTime, StepProfile, StepTimes, Synchronisation

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
    "precision.float32_precision": "ieee",
}
GIBIBYTE = 1 << 30


def operator(name: str, seconds: float, *, float32: float = 0.0, contiguous: float = 0.0) -> OperatorTime:
    return OperatorTime(name=name, calls=1, self_seconds=seconds, shapes="", float32_seconds=float32, contiguous_seconds=contiguous)


def on_the_cpu(*, settings: dict[str, Any] | None = None, times: dict[str, Any] | None = None, **fields: Any) -> StepProfile:
    """A profile of a step of one second in which nothing stands out, with changes."""
    plain = StepTimes(
        step_seconds=1.0,
        median_step_seconds=1.0,
        host_seconds={"data": 0.05, "augmentation": 0.05, "forward": 0.4, "backward": 0.4, "optimizer": 0.05, BETWEEN: 0.05},
        device_seconds={},
        data_wait_seconds=0.05,
        python_seconds=0.2,
        operators=(operator("aten::addmm", 0.5, float32=0.5), operator("aten::mkldnn_convolution", 0.1, float32=0.1, contiguous=0.1)),
        kernels=(),
        num_operators=80,
        num_kernels=0,
        synchronisations=(),
    )
    profile = StepProfile(
        times=replace(plain, **(times or {})),
        num_steps=20,
        batch_size=64,
        plain_step_seconds=0.8,
        device="cpu",
        device_name="a processor",
        compute_capability=None,
        num_threads=1,
        peak_memory_bytes=GIBIBYTE,
        memory_limit_bytes=None,
        is_resident=True,
        is_small=True,
        optimizer_kernels=("fused", "foreach"),
        settings={**SETTINGS, **(settings or {})},
    )
    return replace(profile, **fields)


def on_a_gpu(*, settings: dict[str, Any] | None = None, times: dict[str, Any] | None = None, **fields: Any) -> StepProfile:
    """Likewise on a GPU that is busy nearly all the time."""
    plain: dict[str, Any] = {
        "host_seconds": {"data": 0.02, "forward": 0.1, "backward": 0.1, "optimizer": 0.05, BETWEEN: 0.03, WAITING: 0.7},
        "device_seconds": {"data": 0.02, "forward": 0.4, "backward": 0.43, "optimizer": 0.05, IDLE: 0.1},
        "data_wait_seconds": 0.01,
        "operators": (operator("aten::mm", 0.2, float32=0.2), operator("aten::cudnn_convolution", 0.1, float32=0.05, contiguous=0.1)),
        "num_kernels": 300,
    }
    facts: dict[str, Any] = {
        "device": "cuda",
        "device_name": "a GPU",
        "compute_capability": (9, 0),
        "memory_limit_bytes": 10 * GIBIBYTE,
    }
    return on_the_cpu(settings=settings, times={**plain, **(times or {})}, **{**facts, **fields})


def only(profile: StepProfile) -> Advice:
    """The one line of advice."""
    (advice,) = advise(profile)
    return advice


@pytest.mark.parametrize("profile", [on_the_cpu(), on_a_gpu()], ids=["cpu", "gpu"])
def test_nothing_is_said_where_nothing_stands_out(profile: StepProfile) -> None:
    assert advise(profile) == ()


@pytest.mark.parametrize(
    ("is_small", "num_workers", "overrides"),
    [
        (True, 0, ("data_path.on_device=true", "data_path.num_workers=2")),
        (False, 0, ("data_path.num_workers=2",)),
        (False, 3, ("data_path.num_workers=6",)),
    ],
)
@pytest.mark.parametrize("make", [on_the_cpu, on_a_gpu])
def test_waiting_for_data(make: Any, is_small: bool, num_workers: int, overrides: tuple[str, ...]) -> None:
    settings, waits = {"data_path.num_workers": num_workers}, {"data_wait_seconds": 0.43}
    advice = only(make(settings=settings, times=waits, is_resident=False, is_small=is_small))
    assert advice.share == pytest.approx(0.43)
    assert advice.overrides == overrides
    assert advice.line.startswith("waiting for the next batch takes 43% of a step: try ")
    assert advise(make(settings=settings, times=waits, is_resident=True)) == ()
    assert advise(make(settings=settings, times={"data_wait_seconds": 0.09}, is_resident=False)) == ()


IDLE_GPU = {"device_seconds": {"forward": 0.25, "backward": 0.25, "optimizer": 0.05, IDLE: 0.45}}


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        ({}, ("runtime.cuda_graph=true", "runtime.compile=default", "batch_size=128")),
        ({"runtime.compile": "default"}, ("runtime.cuda_graph=true", "batch_size=128")),
        ({"runtime.compile": "reduce-overhead"}, ("batch_size=128",)),
        ({"runtime.cuda_graph": True}, ("runtime.compile=default", "batch_size=128")),
        ({"precision.autocast_dtype": "float16"}, ("runtime.compile=default", "batch_size=128")),
    ],
)
def test_a_gpu_that_waits_for_launches(settings: dict[str, Any], overrides: tuple[str, ...]) -> None:
    advice = only(on_a_gpu(settings=settings, times=IDLE_GPU))
    assert advice.overrides == overrides
    assert advice.share == pytest.approx(0.45)
    assert "idle for 45% of a step: its 300 kernels of 1833 µs" in advice.finding


def test_a_gpu_that_waits_for_data_is_not_waiting_for_launches() -> None:
    advice = only(on_a_gpu(times={**IDLE_GPU, "data_wait_seconds": 0.4}, is_resident=False))
    assert advice.overrides[-1] == "data_path.num_workers=2"


def test_a_cpu_that_is_mostly_in_python() -> None:
    advice = only(on_the_cpu(times={"python_seconds": 0.55}))
    assert advice.overrides == ("batch_size=128", "runtime.compile=default")
    assert advice.finding == "55% of a step is Python around its 80 operators"
    assert only(on_the_cpu(times={"python_seconds": 0.55}, settings={"runtime.compile": "default"})).overrides == ("batch_size=128",)
    assert advise(on_a_gpu(times={"python_seconds": 0.55})) == ()


PRODUCTS = {"operators": (operator("aten::mm", 0.4, float32=0.3), operator("aten::convolution_backward", 0.1, float32=0.1))}


@pytest.mark.parametrize(
    ("capability", "settings", "overrides"),
    [
        ((9, 0), {}, ("precision=tf32", "precision=bf16")),
        ((9, 0), {"precision.float32_precision": "tf32"}, ("precision=bf16",)),
        ((7, 5), {}, ("precision=fp16",)),
    ],
)
def test_float32_products_where_there_are_tensor_cores(
    capability: tuple[int, int], settings: dict[str, Any], overrides: tuple[str, ...]
) -> None:
    advice = only(on_a_gpu(times=PRODUCTS, compute_capability=capability, settings=settings))
    assert advice.overrides == overrides
    assert advice.share == pytest.approx(0.4)


def test_float32_products_are_left_alone_without_tensor_cores() -> None:
    assert advise(on_a_gpu(times=PRODUCTS, compute_capability=(6, 1))) == ()
    assert advise(on_the_cpu(times=PRODUCTS)) == ()


@pytest.mark.parametrize(
    ("chosen", "can", "override"),
    [
        (None, ("fused", "foreach"), "runtime.optimizer_kernels=fused"),
        ("foreach", ("fused", "foreach"), "runtime.optimizer_kernels=fused"),
        ("for_loop", ("foreach",), "runtime.optimizer_kernels=foreach"),
        ("foreach", ("foreach",), "batch_size=128"),
        ("fused", ("fused", "foreach"), "batch_size=128"),
        (None, (), "batch_size=128"),
    ],
)
def test_an_optimizer_that_takes_long(chosen: str | None, can: tuple[str, ...], override: str) -> None:
    slow = {"host_seconds": {"forward": 0.4, "backward": 0.3, "optimizer": 0.3}}
    advice = only(on_the_cpu(times=slow, settings={"runtime.optimizer_kernels": chosen}, optimizer_kernels=can))
    assert advice.overrides == (override,)
    assert advice.line == f"the optimizer takes 30% of a step: try {override}"


def test_the_optimizer_counts_where_the_step_is_bound() -> None:
    launches_long = {"host_seconds": {"optimizer": 0.4, WAITING: 0.6}}
    assert advise(on_a_gpu(times=launches_long)) == ()  # the GPU is busy, and little of it is the optimizer's
    overrides = [advice.overrides[0] for advice in advise(on_a_gpu(times={**launches_long, **IDLE_GPU}))]
    assert overrides == ["runtime.cuda_graph=true", "runtime.optimizer_kernels=fused"]


def test_convolutions_in_the_contiguous_format() -> None:
    contiguous = {"operators": (operator("aten::mkldnn_convolution", 0.5, contiguous=0.3),)}
    advice = only(on_the_cpu(times=contiguous))
    assert advice.line == "convolutions in the contiguous memory format take 30% of a step: try runtime.channels_last=true"
    assert advise(on_the_cpu(times=contiguous, settings={"runtime.channels_last": True})) == ()


def test_convolutions_whose_algorithms_nobody_timed() -> None:
    convolutions = {"operators": (operator("aten::cudnn_convolution", 0.5),)}
    assert only(on_a_gpu(times=convolutions)).overrides == ("runtime.cudnn_benchmark=true",)
    assert advise(on_a_gpu(times=convolutions, settings={"runtime.cudnn_benchmark": True})) == ()
    assert advise(on_the_cpu(times=convolutions)) == ()


READING = Synchronisation(operator="aten::item", part="forward", calls=1, seconds=0.02, source="mine.py(7): loss")


def test_what_waits_for_the_device_is_named_with_its_source() -> None:
    on_gpu, on_cpu = (only(make(times={"synchronisations": (READING,)})).line for make in (on_a_gpu, on_the_cpu))
    assert on_gpu == (
        "aten::item in forward makes the host wait for the GPU for 2% of a step, called by mine.py(7): loss; "
        "what it reads can stay on the device"
    )
    assert on_cpu.startswith("aten::item in forward would make the host wait for a GPU, called by mine.py(7): loss")


def test_scaled_gradients_need_not_wait() -> None:
    of_scaler = {"synchronisations": (replace(READING, part="optimizer"),)}
    half = {"precision.autocast_dtype": "float16"}
    assert only(on_a_gpu(times=of_scaler, settings=half)).overrides == ("runtime.optimizer_kernels=fused",)
    assert only(on_a_gpu(times=of_scaler)).overrides == ()


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        ({}, ("runtime.activation_checkpointing=true", "runtime.micro_batch_size=32")),
        ({"runtime.activation_checkpointing": True, "runtime.micro_batch_size": 8}, ("runtime.micro_batch_size=4",)),
        ({"runtime.activation_checkpointing": True, "runtime.micro_batch_size": 1}, ()),
    ],
)
def test_memory_that_is_nearly_full(settings: dict[str, Any], overrides: tuple[str, ...]) -> None:
    advice = only(on_a_gpu(settings=settings, peak_memory_bytes=9 * GIBIBYTE))
    assert advice.overrides == overrides
    assert advice.finding == "the peak memory is 90% of the GPU's 10 GiB"
    assert advise(on_a_gpu(settings=settings, peak_memory_bytes=8 * GIBIBYTE)) == ()


def test_the_largest_share_comes_first() -> None:
    shares = [advice.share for advice in advise(on_a_gpu(times={**IDLE_GPU, **PRODUCTS}, peak_memory_bytes=9 * GIBIBYTE))]
    assert len(shares) == 3
    assert shares == sorted(shares, reverse=True)
