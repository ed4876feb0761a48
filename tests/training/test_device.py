"""What a machine can run, and which errors say that memory ran out."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._inductor.exc import InductorError
from torch.distributed import DistBackendError

from autotune.config.schema import TrialConfig
from autotune.training import capabilities
from autotune.training.capabilities import (
    Capabilities,
    cpu_quota,
    describe_device,
    several_kinds,
    together,
    unsupported,
    visible_devices,
    visible_devices_environment,
)
from autotune.training.device import (
    is_out_of_memory,
    local_capabilities,
    peak_memory_bytes,
    pick_device,
    reset_device,
    synchronizer,
)

CPU_ONLY = Capabilities(
    num_cpus=4,
    num_gpus=0,
    gpu_name=None,
    compute_capability=None,
    has_compiler=True,
    has_torchao=True,
)
BARE = replace(CPU_ONLY, has_compiler=False, has_torchao=False)
OLD_GPU = replace(
    CPU_ONLY,
    num_gpus=1,
    gpu_name="NVIDIA T4",
    gpu_kinds=("NVIDIA T4",),
    compute_capability=(7, 5),
)
NEW_GPUS = replace(
    CPU_ONLY,
    num_gpus=2,
    gpu_name="NVIDIA H200",
    gpu_kinds=("NVIDIA H200",),
    compute_capability=(9, 0),
)
RADEON = replace(NEW_GPUS, gpu_name="AMD Instinct MI300X", compute_capability=None)
NO_TORCHAO = "precision.float8 needs torchao, which is not installed (pip install 'autotune[fp8]')"

NO_SHARED_MEMORY = (
    "out of resource: triton_mm Required: 262144 Hardware limit:232448 Reducing block sizes or"
    " `num_stages` may help."
)
NCCL_FAILED = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run"
    " with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA"
    " function failed.\nLast error:"
)


class OutOfResources(Exception):  # noqa: N818  # Triton's name
    """What Triton raises, which is not installed with a torch for CPUs."""


def caused(error: Exception, by: Exception | None) -> Exception:
    """An error that was raised from another, or while none was handled."""
    error.__cause__ = by
    return error


MakeConfig = Callable[..., TrialConfig]


@pytest.mark.parametrize(
    ("overrides", "device", "capabilities", "reason"),
    [
        ((), "cuda", CPU_ONLY, "device=cuda needs a GPU, and there is none"),
        (
            (),
            "cuda",
            replace(CPU_ONLY, no_gpu_reason="too old"),
            "device=cuda needs a GPU, and torch sees none: too old",
        ),
        (
            ("precision=bf16",),
            "auto",
            OLD_GPU,
            "bfloat16 needs CUDA compute capability 8.0, and NVIDIA T4 has 7.5",
        ),
        (
            ("parallelism.num_workers=3",),
            "auto",
            NEW_GPUS,
            "3 devices (parallelism.num_workers) need as many GPUs, and there are 2",
        ),
        (
            ("precision=fp8",),
            "cuda",
            OLD_GPU,
            "float8 needs CUDA compute capability 8.9, and NVIDIA T4 has 7.5",
        ),
        (("precision=fp8",), "cuda", replace(NEW_GPUS, has_torchao=False), NO_TORCHAO),
        (
            ("runtime.compile=default",),
            "cpu",
            BARE,
            "runtime.compile=default needs a C++ compiler, and there is none",
        ),
        (
            ("precision=tf32",),
            "cpu",
            CPU_ONLY,
            "precision.float32_precision=tf32 is for CUDA GPUs, and this training runs on the CPU",
        ),
        (
            ("runtime.cuda_graph=true",),
            "auto",
            CPU_ONLY,
            "runtime.cuda_graph is for CUDA GPUs, and this training runs on the CPU",
        ),
        (("precision=fp8",), "cuda", RADEON, None),
        (("precision=tf32", "runtime.cuda_graph=true"), "auto", NEW_GPUS, None),
    ],
)
def test_what_a_machine_cannot_run_has_a_reason(
    trial_config: MakeConfig,
    overrides: tuple[str, ...],
    device: str,
    capabilities: Capabilities,
    reason: str | None,
) -> None:
    assert unsupported(trial_config(*overrides, device=device), capabilities) == reason


@pytest.mark.parametrize(
    ("build", "variable"),
    [("cuda", "CUDA_VISIBLE_DEVICES"), ("hip", "HIP_VISIBLE_DEVICES")],
)
def test_a_process_is_limited_to_gpus_by_the_variable_of_their_vendor(
    build: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "torch_build", lambda: {build: "1.0"})
    monkeypatch.setenv(variable, "3,5,6")
    assert visible_devices_environment(visible_devices(2)) == {variable: "3,5"}


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), True),
        (MemoryError(), True),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
                " bytes"
            ),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("GET was unable to find an engine to execute this computation"), True),
        (
            OutOfResources(
                "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing"
                " block sizes may help."
            ),
            True,
        ),
        (
            InductorError(
                RuntimeError(f"No valid triton configs. OutOfMemoryError: {NO_SHARED_MEMORY}"), None
            ),
            True,
        ),
        (DistBackendError(f"{NCCL_FAILED}\nFailed to CUDA calloc async 608 bytes"), True),
        (
            caused(
                ValueError("the batch failed"), by=torch.OutOfMemoryError("CUDA out of memory.")
            ),
            True,
        ),
        (caused(caused(RuntimeError("backward failed"), by=ValueError("no")), by=None), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_that_say_memory_ran_out_are_known(error: BaseException, says: bool) -> None:
    assert is_out_of_memory(error) is says


@pytest.mark.parametrize(
    ("device", "capabilities", "text"),
    [
        ("auto", NEW_GPUS, "NVIDIA H200"),
        ("auto", CPU_ONLY, "the CPU: torch sees no GPU"),
        ("cpu", OLD_GPU, "the CPU: device=cpu leaves the GPU idle"),
    ],
)
def test_the_device_and_why_it_is_no_better_one_are_a_line(
    trial_config: MakeConfig, device: str, capabilities: Capabilities, text: str
) -> None:
    assert describe_device(trial_config(device=device), capabilities) == text


def test_gpus_of_several_kinds_count_as_the_weakest_and_are_warned_of(
    trial_config: MakeConfig,
) -> None:
    cluster = together([NEW_GPUS, OLD_GPU, NEW_GPUS])
    assert (cluster.gpu_name, cluster.gpu_kinds) == ("NVIDIA T4", ("NVIDIA H200", "NVIDIA T4"))
    assert (several_kinds(trial_config(device="auto"), cluster) or "").startswith(
        "trainings are timed on GPUs of several kinds, whose times do not compare: NVIDIA H200,"
        " NVIDIA T4; CUDA_VISIBLE_DEVICES chooses some"
    )
    assert several_kinds(trial_config(device="cpu"), cluster) is None
    assert several_kinds(trial_config(device="auto"), NEW_GPUS) is None


def test_a_reset_undoes_what_a_training_left() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    reset_device(torch.device("cpu"))
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()


@pytest.mark.gpu
def test_a_gpu_is_picked_and_measured() -> None:
    device = pick_device("auto")
    assert device.type == "cuda"
    assert local_capabilities().num_gpus >= 1
    reset_device(device)
    torch.zeros(1 << 20, device=device)
    synchronizer(device)()
    assert 1 << 20 <= peak_memory_bytes(device) < 1 << 30


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.5),
    ],
)
def test_a_quota_of_cpu_time_is_seen(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    for name, content in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert cpu_quota(tmp_path / "root") == quota
