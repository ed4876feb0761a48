"""What a machine can run, and which errors say that memory ran out."""

import resource
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.exc import InductorError
from torch.distributed import DistBackendError

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.training import capabilities
from autotune.training import device as device_module
from autotune.training.capabilities import (
    Capabilities,
    cpu_name,
    cpu_quota,
    describe_device,
    several_kinds,
    together,
    unsupported,
    uses_cuda,
    visible_devices,
    visible_devices_environment,
)
from autotune.training.device import (
    device_kind,
    is_out_of_memory,
    local_capabilities,
    no_gpu_reason,
    peak_memory_bytes,
    pick_device,
    reset_device,
    synchronizer,
)

CPU_ONLY = Capabilities(num_cpus=4, num_gpus=0, gpu_name=None, compute_capability=None, has_compiler=True, has_torchao=True)
BARE = replace(CPU_ONLY, has_compiler=False, has_torchao=False)
OLD_GPU = Capabilities(num_cpus=4, num_gpus=1, gpu_name="NVIDIA T4", compute_capability=(7, 5), has_compiler=True, has_torchao=True)
NEW_GPUS = Capabilities(num_cpus=4, num_gpus=2, gpu_name="NVIDIA H200", compute_capability=(9, 0), has_compiler=True, has_torchao=True)
MAC = replace(CPU_ONLY, other_devices={"mps": 1})
RADEON = replace(NEW_GPUS, gpu_name="AMD Radeon RX 7900 XTX", compute_capability=None, architecture="gfx1100")
INSTINCT = replace(NEW_GPUS, gpu_name="AMD Instinct MI300X", compute_capability=None, architecture="gfx942")
NO_TORCHAO = "precision.float8 needs torchao, which is not installed (pip install 'autotune[fp8]')"
FOR_GPUS = "{} is for GPUs, and this training runs on the CPU"

NO_SHARED_MEMORY = "out of resource: triton_mm Required: 262144 Hardware limit:232448 Reducing block sizes or `num_stages` may help."
NCCL_FAILED = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO for details), "
    "NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:"
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
        ((), "cuda", replace(CPU_ONLY, no_gpu_reason="too old"), "device=cuda needs a GPU, and torch sees none: too old"),
        ((), "mps", NEW_GPUS, "device=mps needs Apple's GPU, and torch sees none"),
        ((), "xpu", CPU_ONLY, "device=xpu needs Intel's GPU, and torch sees none"),
        ((), "mps", MAC, None),
        (("precision=bf16",), "mps", MAC, None),
        (("runtime.cuda_graph=true",), "mps", MAC, "runtime.cuda_graph is for CUDA GPUs, and this training runs with device=mps"),
        (("precision=fp8",), "cuda", RADEON, "float8 needs an AMD GPU of gfx942, gfx950, gfx12, and AMD Radeon RX 7900 XTX has gfx1100"),
        (("precision=tf32",), "cuda", RADEON, "TensorFloat-32 needs an AMD GPU of gfx942, and AMD Radeon RX 7900 XTX has gfx1100"),
        (("precision=bf16",), "auto", RADEON, None),
        (
            ("precision=bf16",),
            "auto",
            replace(RADEON, architecture="gfx1030"),
            "bfloat16 needs an AMD GPU of gfx908, gfx90a, gfx94, gfx95, gfx11, gfx12, and AMD Radeon RX 7900 XTX has gfx1030",
        ),
        (("precision=fp8",), "cuda", INSTINCT, None),
        (("precision=tf32",), "cuda", INSTINCT, None),
        (
            ("precision=tf32",),
            "cuda",
            replace(INSTINCT, architecture="gfx950"),
            "TensorFloat-32 needs an AMD GPU of gfx942, and AMD Instinct MI300X has gfx950",
        ),
        (("precision=bf16",), "auto", OLD_GPU, "bfloat16 needs CUDA compute capability 8.0, and NVIDIA T4 has 7.5"),
        (("precision=bf16",), "cuda", OLD_GPU, "bfloat16 needs CUDA compute capability 8.0, and NVIDIA T4 has 7.5"),
        (("parallelism.num_workers=3",), "auto", NEW_GPUS, "parallelism.num_workers=3 needs as many GPUs, and there are 2"),
        (("precision=pure_bf16",), "cuda", OLD_GPU, "bfloat16 needs CUDA compute capability 8.0, and NVIDIA T4 has 7.5"),
        (("precision=tf32",), "cuda", OLD_GPU, "TensorFloat-32 needs CUDA compute capability 8.0, and NVIDIA T4 has 7.5"),
        (("precision=fp8",), "cuda", OLD_GPU, "float8 needs CUDA compute capability 8.9, and NVIDIA T4 has 7.5"),
        (("precision=fp8",), "cuda", replace(NEW_GPUS, has_torchao=False), NO_TORCHAO),
        (("runtime.compile=default",), "cpu", BARE, "runtime.compile=default needs a C++ compiler, and there is none"),
        (("precision=fp8",), "cpu", CPU_ONLY, "precision.float8 is for GPUs, and this training runs on the CPU"),
        (("precision=tf32",), "cpu", CPU_ONLY, "precision.float32_precision=tf32 is for GPUs, and this training runs on the CPU"),
        (("runtime.cuda_graph=true",), "auto", CPU_ONLY, "runtime.cuda_graph is for GPUs, and this training runs on the CPU"),
        (("runtime.compile=reduce-overhead",), "cpu", NEW_GPUS, FOR_GPUS.format("runtime.compile=reduce-overhead")),
        (("runtime.cudnn_benchmark=true",), "auto", CPU_ONLY, FOR_GPUS.format("runtime.cudnn_benchmark")),
        (("runtime.expandable_segments=true",), "auto", CPU_ONLY, FOR_GPUS.format("runtime.expandable_segments")),
        (("runtime.compile=default",), "cpu", CPU_ONLY, None),
        (("precision=fp16",), "cuda", OLD_GPU, None),
        (("precision=fp8",), "cuda", NEW_GPUS, None),
        (("precision=tf32", "runtime.cuda_graph=true"), "auto", NEW_GPUS, None),
        ((), "cuda", OLD_GPU, None),
        (("precision=bf16",), "cpu", OLD_GPU, None),
        (("precision=bf16",), "auto", CPU_ONLY, None),
        (("precision=bf16",), "auto", NEW_GPUS, None),
    ],
)
def test_what_a_machine_cannot_run_has_a_reason(
    trial_config: MakeConfig, overrides: tuple[str, ...], device: str, capabilities: Capabilities, reason: str | None
) -> None:
    assert unsupported(trial_config(*overrides, device=device), capabilities) == reason


def test_auto_takes_a_gpu_where_there_is_one(trial_config: MakeConfig) -> None:
    assert uses_cuda(trial_config(device="auto"), OLD_GPU)
    assert not uses_cuda(trial_config(device="auto"), CPU_ONLY)
    assert not uses_cuda(trial_config(device="cpu"), OLD_GPU)


@pytest.mark.parametrize(
    ("build", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("hip", "HIP_VISIBLE_DEVICES"), ("xpu", "ZE_AFFINITY_MASK")]
)
def test_a_process_is_limited_to_gpus_by_the_variable_of_their_vendor(build: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "torch_build", lambda: {build: "1.0"})
    monkeypatch.setenv(variable, "3,5,6")
    assert visible_devices_environment(visible_devices(2)) == {variable: "3,5"}


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), True),
        (RuntimeError("GET was unable to find an engine to execute this computation"), True),
        (RuntimeError("FIND was unable to find an engine to execute this computation after trying 5 plans."), True),
        (RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"), True),
        (OutOfResources("out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes may help."), True),
        (InductorError(RuntimeError(f"No valid triton configs. OutOfMemoryError: {NO_SHARED_MEMORY}"), None), True),
        (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 63.98 GiB"), True),
        (DistBackendError(f"{NCCL_FAILED}\nCuda failure 2 'out of memory'"), True),
        (DistBackendError(f"{NCCL_FAILED}\nFailed to CUDA calloc async 608 bytes"), True),
        (DistBackendError(f"{NCCL_FAILED}\nCuda failure 999 'unknown error'"), False),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."), True),
        (RuntimeError("unable to mmap 1024 bytes from file </torch_7_1_0>: Cannot allocate memory (12)"), True),
        (caused(ValueError("the batch failed"), by=torch.OutOfMemoryError("CUDA out of memory.")), True),
        (caused(caused(RuntimeError("backward failed"), by=ValueError("no")), by=None), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_that_say_memory_ran_out_are_known(error: BaseException, says: bool) -> None:
    assert is_out_of_memory(error) is says


@pytest.mark.parametrize(("free", "says"), [(1, True), (50, False)])
@pytest.mark.parametrize("words", ["cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling"])
def test_an_error_of_a_library_is_for_want_of_memory_if_hardly_any_is_left(
    monkeypatch: pytest.MonkeyPatch, words: str, free: int, says: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 100))
    assert is_out_of_memory(RuntimeError(words)) is says


def test_an_error_met_while_memory_had_run_out_is_for_want_of_memory() -> None:
    def fail() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except torch.OutOfMemoryError:
            raise ValueError("cleaning up failed")  # noqa: B904  # as a library that does not say from what

    with pytest.raises(ValueError, match="cleaning up") as raised:
        fail()
    assert is_out_of_memory(raised.value)
    circular = ValueError()
    assert not is_out_of_memory(caused(circular, by=circular))


def test_an_allocation_that_fails_here_says_that_memory_ran_out() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        torch.empty(1 << 58, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


def test_this_machine_is_described() -> None:
    here = local_capabilities()
    assert here.num_cpus >= 1
    assert here.device_name == (here.gpu_name or cpu_name())
    assert cpu_name()
    assert CPU_ONLY.device_name == cpu_name()
    assert OLD_GPU.device_name == "NVIDIA T4"


def test_the_cpu_is_always_there() -> None:
    device = pick_device("cpu")
    assert device.type == "cpu"
    assert peak_memory_bytes(device) > 1 << 20
    synchronizer(device)()


@pytest.mark.parametrize(("platform", "num_bytes"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_of_resident_memory_is_in_bytes_on_every_system(platform: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=7_000_000))
    assert peak_memory_bytes(torch.device("cpu")) == 7_000_000 * num_bytes


@pytest.mark.parametrize(
    ("device", "capabilities", "text"),
    [
        ("auto", NEW_GPUS, "NVIDIA H200"),
        ("auto", CPU_ONLY, "the CPU: torch sees no GPU"),
        ("auto", replace(CPU_ONLY, no_gpu_reason="the driver is too old"), "the CPU: the driver is too old"),
        ("cpu", OLD_GPU, "the CPU: device=cpu leaves the GPU idle"),
        ("auto", MAC, "the CPU: Apple's GPU is used with device=mps only"),
        ("mps", MAC, "Apple's GPU (mps)"),
    ],
)
def test_the_device_and_why_it_is_no_better_one_are_a_line(
    trial_config: MakeConfig, device: str, capabilities: Capabilities, text: str
) -> None:
    assert describe_device(trial_config(device=device), capabilities) == text


@pytest.fixture
def torch_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Has torch be built for something, on a machine with the driver of a vendor's GPUs, where CUDA begins or fails with an error."""

    def make(build: dict[str, str], driver: str | None, error: str | None = None) -> None:
        there = {"cuda": (), "hip": (), **({driver: (str(tmp_path),)} if driver else {})}
        monkeypatch.setattr(device_module, "_DRIVERS", {"cuda": ("NVIDIA", there["cuda"]), "hip": ("AMD", there["hip"])})
        for module in (device_module, capabilities):
            monkeypatch.setattr(module, "torch_build", lambda: build)

        def init() -> None:
            raise RuntimeError(error)

        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    return make


_TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading ..."


@pytest.mark.parametrize(
    ("build", "driver", "visible", "reason"),
    [
        ({"cuda": "13.0"}, None, None, None),
        ({}, "cuda", None, f"torch {torch.__version__} is built for the CPU, and here is the driver of NVIDIA GPUs"),
        ({"cuda": "13.0"}, "hip", None, f"torch {torch.__version__} is built for cuda, and here is the driver of AMD GPUs"),
        ({"cuda": "13.0"}, "cuda", "", "CUDA_VISIBLE_DEVICES= hides the NVIDIA GPUs"),
        ({"cuda": "13.0"}, "cuda", "-1", "CUDA_VISIBLE_DEVICES=-1 hides the NVIDIA GPUs"),
        ({"cuda": "13.0"}, "cuda", None, "The NVIDIA driver on your system is too old (found version 11040)"),
    ],
)
def test_why_torch_sees_none_of_the_gpus_that_are_there_is_said(
    torch_of: Callable[..., None], build: dict[str, str], driver: str | None, visible: str | None, reason: str | None, monkeypatch: Any
) -> None:
    torch_of(build, driver, _TOO_OLD)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert no_gpu_reason() == reason
    assert local_capabilities().no_gpu_reason == reason
    why = "there is no GPU here" if reason is None else f"torch sees no GPU: {reason}"
    with pytest.raises(ConfigError) as raised:
        pick_device("cuda")
    assert str(raised.value) == f"device: found cuda, and {why}; accepted are auto, cpu"


def test_gpus_of_several_kinds_count_as_the_weakest_and_are_warned_of(trial_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [SimpleNamespace(name=name, major=major, minor=minor, uuid="a") for name, major, minor in (("H200", 9, 0), ("T4", 7, 5))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cards[device if isinstance(device, int) else 0])
    here = local_capabilities()
    assert (here.num_gpus, here.gpu_name, here.gpu_kinds) == (2, "T4", ("H200", "T4"))
    assert unsupported(trial_config("precision=bf16", device="auto"), here) == "bfloat16 needs CUDA compute capability 8.0, and T4 has 7.5"
    assert several_kinds(trial_config(device="auto"), here) == (
        "trainings are timed on GPUs of several kinds, whose times do not compare: H200, T4; CUDA_VISIBLE_DEVICES chooses some of a "
        "machine's, cluster.accelerator_type the machines of a cluster that have one kind"
    )
    assert several_kinds(trial_config(device="cpu"), here) is None
    assert several_kinds(trial_config(device="auto"), NEW_GPUS) is None
    cluster = together([NEW_GPUS, OLD_GPU, NEW_GPUS])
    assert (cluster.gpu_name, cluster.gpu_kinds) == ("NVIDIA T4", ("NVIDIA H200", "NVIDIA T4"))


def test_slices_that_torch_sees_one_at_a_time_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    slice_of_card = SimpleNamespace(name="NVIDIA A100 MIG 1g.5gb", major=8, minor=0, uuid="a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: slice_of_card)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b,MIG-c")
    assert local_capabilities().num_gpus == 3


@pytest.mark.parametrize(("kind", "build"), [("mps", {}), ("xpu", {"xpu": "20250101"})])
def test_a_gpu_of_apple_or_intel_is_used_where_it_is_asked_for(kind: str, build: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.get_device_module(kind)
    with pytest.raises(ConfigError, match=f"device: found {kind}, and torch sees no such device here"):
        pick_device(kind)
    monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(module, "device_count", lambda: 1)
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 7)
    device = pick_device(kind)
    synchronizer(device)()
    assert (device.type, waited, peak_memory_bytes(device), device_kind(device)) == (kind, [device], 7, kind)
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert local_capabilities().other_devices == {kind: 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert pick_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="device: found cuda, and there is no GPU here; accepted are auto, cpu"):
        pick_device("cuda")


def test_a_reset_undoes_what_a_training_left() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    reset_device(torch.device("cpu"))
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()


class Cycle:
    """An object that holds itself, and a tensor."""

    def __init__(self) -> None:
        self.itself, self.tensor = self, torch.zeros(1)


def test_a_reset_frees_what_reference_cycles_hold_before_it_empties_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = weakref.ref(Cycle().tensor)
    reset_device(torch.device("cpu"))
    assert kept() is None
    kept, said = weakref.ref(Cycle().tensor), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append(kept() is None))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: said.append(device.type == "cuda"))
    reset_device(torch.device("cuda"))
    assert said == [True, True]


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
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "max 100000\n"}, None),
        ({"a/b/cpu.max": "200000 100000\n"}, 2.0),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ({"other/cpu.max": "50000 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.5),
    ],
)
def test_a_quota_of_cpu_time_is_seen(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, content in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "membership").write_text("0::/a/b\n")
    assert cpu_quota(tmp_path / "root", tmp_path / "membership") == quota
