"""What is read from traces written by hand, on the CPU and on a GPU: no device is needed to know what must come out."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.step_profile import BETWEEN, IDLE, WAITING, StepTimes
from autotune.training.trace import STEP, WAIT, Event, step_times

MAIN, AUTOGRAD, PREFETCH = 1, 2, 3
MICROSECOND = 1e-6


def event(category: str, name: str, start: float, end: float, thread: int = MAIN, **arguments: Any) -> Event:
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": start, "dur": end - start, "args": arguments}


def label(name: str, start: float, end: float) -> Event:
    return event("user_annotation", name, start, end)


def operator(name: str, start: float, end: float, thread: int = MAIN, shapes: Any = (), kinds: Any = (), strides: Any = ()) -> Event:
    inputs = {"Input Dims": list(shapes), "Input type": list(kinds), "Input Strides": list(strides)}
    return event("cpu_op", name, start, end, thread, **inputs)


def launch(correlation: int, start: float, thread: int = MAIN, name: str = "cudaLaunchKernel") -> Event:
    return event("cuda_runtime", name, start, start + 1, thread, correlation=correlation)


def kernel(correlation: int, start: float, end: float, name: str = "", category: str = "kernel") -> Event:
    return event(category, name or f"kernel_{correlation}", start, end, 7, correlation=correlation, stream=7)


def microseconds(seconds: Any) -> dict[str, float]:
    return {part: round(each / MICROSECOND, 6) for part, each in seconds.items()}


CPU_STEP = [
    label("data", 0, 10),
    operator("aten::index_select", 2, 6),
    label("augmentation", 10, 20),
    label("forward", 20, 50),
    operator("aten::conv2d", 21, 45, shapes=[[8, 3, 4, 4], [6, 3, 3, 3], []], kinds=["float", "float", ""]),
    operator(
        "aten::mkldnn_convolution",
        22,
        42,
        shapes=[[8, 3, 4, 4], [6, 3, 3, 3], []],
        kinds=["float", "float", "Scalar"],
        strides=[[48, 16, 4, 1], [27, 9, 3, 1], []],
    ),
    operator("aten::empty", 23, 25),
    label("backward", 52, 80),
    operator("autograd::engine::evaluate_function: ConvolutionBackward0", 53, 78),
    operator("aten::convolution_backward", 55, 75, kinds=["c10::BFloat16"], shapes=[[8, 6, 2, 2]], strides=[[24, 1, 12, 6]]),
    label("optimizer", 80, 95),
    label("Optimizer.step#SGD.step", 81, 94),
    operator("aten::add_", 82, 84, shapes=[[6]], kinds=["float"]),
    operator("aten::add_", 86, 90, shapes=[[6, 3, 3, 3]], kinds=["float"]),
]


def shifted(events: list[Event], by: float) -> list[Event]:
    return [{**each, "ts": each["ts"] + by} for each in events]


@pytest.fixture(scope="module")
def cpu() -> StepTimes:
    """Two equal steps with five microseconds between them, and what a trace holds besides."""
    noise = [
        {"ph": "M", "name": "process_name", "args": {}},
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "tid": MAIN, "ts": 30, "id": 1},
        operator("aten::before", -10, -1),
        operator("aten::after", 206, 300),
    ]
    steps = [*CPU_STEP, label(STEP, 0, 100), *shifted([*CPU_STEP, label(STEP, 0, 100)], 105)]
    return step_times([*steps, *noise, label(WAIT, 205, 206)], on_gpu=False)


def test_parts_of_a_step_add_up_to_it(cpu: StepTimes) -> None:
    assert microseconds(cpu.host_seconds) == {
        "data": 10, "augmentation": 10, "forward": 30, "backward": 28, "optimizer": 15, BETWEEN: 10,
    }  # fmt: skip
    assert cpu.step_seconds == pytest.approx(103 * MICROSECOND)
    assert cpu.median_step_seconds == pytest.approx(100 * MICROSECOND)
    assert cpu.device_seconds == {}
    assert cpu.data_wait_seconds == pytest.approx(10 * MICROSECOND)


def test_an_operator_is_counted_less_what_it_calls(cpu: StepTimes) -> None:
    spent = {each.name: (each.calls, round(each.self_seconds / MICROSECOND, 3)) for each in cpu.operators}
    assert spent == {
        "aten::convolution_backward": (1, 20),
        "aten::mkldnn_convolution": (1, 18),
        "aten::add_": (2, 6),
        "autograd::engine::evaluate_function: ConvolutionBackward0": (1, 5),
        "aten::index_select": (1, 4),
        "aten::conv2d": (1, 4),
        "aten::empty": (1, 2),
    }
    times = [each.self_seconds for each in cpu.operators]
    assert times == sorted(times, reverse=True)
    assert cpu.num_operators == 5


def test_an_operator_says_what_it_computed_on(cpu: StepTimes) -> None:
    by_name = {each.name: each for each in cpu.operators}
    convolution, backward = by_name["aten::mkldnn_convolution"], by_name["aten::convolution_backward"]
    assert convolution.float32_seconds == convolution.contiguous_seconds == convolution.self_seconds
    assert backward.float32_seconds == backward.contiguous_seconds == 0
    assert by_name["aten::add_"].shapes == "6x3x3x3"
    assert convolution.shapes == "8x3x4x4, 6x3x3x3"
    assert convolution.is_convolution
    assert not convolution.is_matrix_product


def test_python_is_what_lies_in_no_operator_and_waits_for_no_batch(cpu: StepTimes) -> None:
    assert cpu.python_seconds == pytest.approx((103 - 10 - 24 - 25 - 6) * MICROSECOND)


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [
        ([8, 3, 4, 4], [48, 16, 4, 1], True),
        ([8, 3, 4, 4], [48, 1, 12, 3], False),
        ([8, 1, 4, 4], [16, 16, 4, 1], False),  # both formats at once
        ([8, 3, 1, 1], [3, 1, 1, 1], False),
        ([8, 48], [48, 1], False),
        ([[8, 3, 4, 4]] * 4, [[48, 16, 4, 1]] * 4, False),  # a list of tensors
    ],
)
def test_memory_formats_are_told_by_strides(shape: list[Any], strides: list[Any], contiguous: bool) -> None:
    convolution = operator("aten::conv", 1, 9, shapes=[shape], strides=[strides])
    (found,) = step_times([label(STEP, 0, 10), convolution], on_gpu=False).operators
    assert (found.contiguous_seconds > 0) is contiguous


FUNCTION = "python_function"


def test_on_the_cpu_what_would_wait_for_a_gpu_is_named_with_its_caller() -> None:
    reading = [
        event(FUNCTION, "autotune/training/step.py(40): __call__", 1, 60),
        event(FUNCTION, "mine/losses.py(7): clipped", 2, 50),
        event(FUNCTION, "torch/_tensor.py(900): item", 3, 49),
        event(FUNCTION, "<built-in method item of Tensor object at 0x7f>", 4, 40),
        operator("aten::item", 5, 30),
        operator("aten::_local_scalar_dense", 6, 16),
    ]
    (found,) = step_times([label(STEP, 0, 100), label("forward", 0, 60), *reading], on_gpu=False).synchronisations
    assert (found.operator, found.part, found.calls, found.source) == ("aten::item", "forward", 1, "mine/losses.py(7): clipped")
    assert found.seconds == pytest.approx(10 * MICROSECOND)


def test_an_optimizer_that_reads_its_step_count_waits_for_nothing() -> None:
    reading = [
        event(FUNCTION, "autotune/training/step.py(90): _step_optimizer", 1, 60),
        event(FUNCTION, "torch/optim/optimizer.py(110): _get_value", 3, 49),
        operator("aten::item", 5, 30),
        operator("aten::_local_scalar_dense", 6, 16),
    ]
    assert step_times([label(STEP, 0, 100), *reading], on_gpu=False).synchronisations == ()


GPU_STEP = [
    label(STEP, 0, 100),
    label(WAIT, 100, 160),
    event("cuda_runtime", "cudaDeviceSynchronize", 101, 158),
    label("data", 0, 10),
    launch(1, 2, name="cudaMemcpyAsync"),
    kernel(1, 5, 8, "Memcpy HtoD (Pinned -> Device)", "gpu_memcpy"),
    launch(2, 6, name="cudaMemcpyAsync"),
    kernel(2, 40, 50, "Memcpy HtoD (Pinned -> Device)", "gpu_memcpy"),  # on a stream of its own, beside the convolution
    label("forward", 10, 40),
    operator("aten::conv2d", 11, 21),
    operator("aten::cudnn_convolution", 12, 20, shapes=[[8, 3, 4, 4]], kinds=["float"], strides=[[48, 16, 4, 1]]),
    launch(3, 15),
    kernel(3, 30, 60, "implicit_gemm"),
    operator("aten::item", 25, 39),
    operator("aten::_local_scalar_dense", 26, 38),
    event("cuda_runtime", "cudaStreamSynchronize", 30, 37),
    label("backward", 40, 80),
    operator("aten::convolution_backward", 45, 60, AUTOGRAD, shapes=[[8, 6, 2, 2]], kinds=["float"]),
    launch(4, 50, AUTOGRAD),
    kernel(4, 60, 110, "implicit_gemm"),
    label("optimizer", 80, 95),
    launch(5, 85, name="cudaLaunchKernelExC"),
    kernel(5, 110, 120, "triton_fused_sgd"),
    event("gpu_user_annotation", "forward", 30, 60, 7),
    event("cuda_runtime", "cudaStreamSynchronize", 20, 29, PREFETCH),
]


@pytest.fixture(scope="module")
def gpu() -> StepTimes:
    return step_times(GPU_STEP, on_gpu=True)


def test_the_host_waits_for_a_gpu_within_a_step_and_at_its_end(gpu: StepTimes) -> None:
    assert microseconds(gpu.host_seconds) == {
        "data": 10, "forward": 23, "backward": 40, "optimizer": 15, BETWEEN: 5, WAITING: 67,
    }  # fmt: skip
    assert gpu.step_seconds == pytest.approx(160 * MICROSECOND)


def test_a_kernel_belongs_to_the_part_that_launched_it_from_whatever_thread(gpu: StepTimes) -> None:
    assert microseconds(gpu.device_seconds) == {"data": 3, "forward": 30, "backward": 50, "optimizer": 10, IDLE: 67}
    assert gpu.idle_share == pytest.approx(67 / 160)
    assert gpu.num_kernels == 5


def test_a_kernel_is_found_by_its_operator_where_its_launch_is_missing() -> None:
    product = {**operator("aten::mm", 12, 20), "args": {"External id": 40}}
    found = {**kernel(7, 30, 45), "args": {"External id": 40}}
    unknown = kernel(8, 50, 60)
    times = step_times([label(STEP, 0, 50), label("forward", 10, 40), product, found, unknown, label(WAIT, 50, 80)], on_gpu=True)
    assert microseconds(times.device_seconds) == {"forward": 15, BETWEEN: 10, IDLE: 55}
    assert [each.name for each in times.operators] == ["aten::mm", "kernel_8"]


def test_data_is_waited_for_only_while_the_gpu_is_idle(gpu: StepTimes) -> None:
    assert gpu.data_wait_seconds == pytest.approx(7 * MICROSECOND)


def test_on_a_gpu_operators_take_what_their_kernels_take(gpu: StepTimes) -> None:
    spent = {each.name: round(each.self_seconds / MICROSECOND, 3) for each in gpu.operators}
    assert spent == {
        "aten::convolution_backward": 50,
        "aten::cudnn_convolution": 30,
        "Memcpy HtoD (Pinned -> Device)": 13,
        "triton_fused_sgd": 10,
    }
    assert {each.name: each.calls for each in gpu.kernels} == {
        "implicit_gemm": 2, "Memcpy HtoD (Pinned -> Device)": 2, "triton_fused_sgd": 1,
    }  # fmt: skip
    convolution = next(each for each in gpu.operators if each.name == "aten::cudnn_convolution")
    assert convolution.float32_seconds == convolution.contiguous_seconds == convolution.self_seconds


def test_on_a_gpu_a_synchronisation_is_what_the_training_threads_waited_in(gpu: StepTimes) -> None:
    (found,) = gpu.synchronisations
    assert (found.operator, found.part, found.calls) == ("aten::item", "forward", 1)
    assert found.seconds == pytest.approx(7 * MICROSECOND)


def test_a_graph_is_one_launch_of_many_kernels() -> None:
    replay = [label("graph", 10, 20), launch(1, 12, name="cudaGraphLaunch"), kernel(1, 15, 30), kernel(1, 31, 40)]
    found = step_times([label(STEP, 0, 50), *replay, label(WAIT, 50, 60)], on_gpu=True)
    assert microseconds(found.device_seconds) == {"graph": 24, IDLE: 36}
    assert found.num_kernels == 2


moments = st.lists(st.integers(0, 1000), min_size=2, max_size=24).map(sorted)


@given(moments, st.lists(st.tuples(st.integers(0, 999), st.integers(0, 300), st.integers(1, 400)), max_size=12))
def test_parts_add_up_whatever_happened(cuts: list[int], ran: list[tuple[int, int, int]]) -> None:
    names = itertools.cycle(["data", "forward", "backward", "optimizer"])
    parts = [label(next(names), start, end) for start, end in itertools.pairwise(cuts) if end > start]
    launched = []
    for index, (start, after, lasts) in enumerate(ran):
        begin = start + after
        launched += [operator("aten::op", start, start + 1), launch(index, start), kernel(index, begin, min(begin + lasts, 1900))]
    events = [label(STEP, 0, 1000), label(WAIT, 1000, 2000), *parts, *launched]
    found = step_times(events, on_gpu=True)
    assert sum(found.host_seconds.values()) == pytest.approx(found.step_seconds)
    assert sum(found.device_seconds.values()) == pytest.approx(found.step_seconds)
    assert min(found.device_seconds.values()) >= 0
    assert 0 <= found.data_wait_seconds <= found.step_seconds
