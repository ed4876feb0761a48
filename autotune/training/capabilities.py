"""What a machine can run, and the versions of its software, without torch: a driver that asks
its launcher need not import it.
"""

import os
import platform
import runpy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from autotune.config.schema import ClusterConfig, TrialConfig
from autotune.measurement import Device


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of a machine: its CPUs, GPUs and installed tools, which decide what it can
    run.
    """

    num_cpus: int
    num_gpus: int
    """Number of GPUs that torch calls CUDA: NVIDIA's, or AMD's with ROCm."""
    gpu_name: str | None
    """Name of the GPUs; of several kinds, of the oldest."""
    compute_capability: tuple[int, int] | None
    """CUDA compute capability of that kind, such as (8, 0), which bfloat16 needs; None without a
    GPU of NVIDIA's."""
    has_compiler: bool
    """Whether there is a C++ compiler, which torch.compile needs."""
    has_torchao: bool
    """Whether torchao is installed, which float8 needs."""
    host: str = "this machine"
    """Name of the machine, for messages."""
    energy_faults: Mapping[str, str] = field(default_factory=dict)
    """Why energy cannot be read, by device type (``cpu``, ``cuda``); no entry for a type whose
    energy can be read."""
    gpu_kinds: tuple[str, ...] = ()
    """Names of all kinds of GPU."""
    no_gpu_reason: str | None = None
    """Why torch sees none of the GPUs that this machine seems to have, in words; None if it
    seems to have none."""

    @property
    def device_name(self) -> str:
        """Name of the GPU, or of the processor if there is no GPU."""
        return self.gpu_name or cpu_name()

    def device_of(self, config: TrialConfig) -> Device:
        """The device that each worker of a training has on this machine."""
        is_gpu = uses_cuda(config, self)
        return Device(
            kind=self.gpu_name if is_gpu else "cpu",
            where=self.host,
            energy_fault=self.energy_faults.get("cuda" if is_gpu else "cpu"),
        )


_MIN_COMPUTE_CAPABILITY = {"float8": (8, 9), "bfloat16": (8, 0), "TensorFloat-32": (8, 0)}
"""Least CUDA compute capability of a GPU whose tensor cores support a number format, by the
format's name."""


def together(machines: Sequence[Capabilities]) -> Capabilities:
    """The capabilities of machines of several kinds: those of the one whose GPUs are the oldest,
    and all kinds.
    """
    names = dict.fromkeys(name for machine in machines for name in machine.gpu_kinds)
    oldest = min(machines, key=lambda machine: machine.compute_capability or (99, 0))
    return replace(oldest, gpu_kinds=tuple(names))


def describe_device(config: TrialConfig, capabilities: Capabilities) -> str:
    """The device that a training runs on, in words, and why it is no better one."""
    if uses_cuda(config, capabilities):
        return capabilities.gpu_name or "a GPU"
    if capabilities.num_gpus:
        return "the CPU: device=cpu leaves the GPU idle"
    return f"the CPU: {capabilities.no_gpu_reason or 'torch sees no GPU'}"


def several_kinds(config: TrialConfig, capabilities: Capabilities) -> str | None:
    """A warning that trials are timed on GPUs of several kinds, and how to choose.

    None if they are not.
    """
    if len(capabilities.gpu_kinds) < 2 or not uses_cuda(config, capabilities):
        return None
    return (
        "trainings are timed on GPUs of several kinds, whose times do not compare:"
        f" {', '.join(capabilities.gpu_kinds)}; {visible_devices_variable()} chooses some of a"
        " machine's, cluster.accelerator_type the machines of a cluster that have one kind"
    )


def unsupported(config: TrialConfig, capabilities: Capabilities) -> str | None:
    """Why this machine cannot run a training; None if it can."""
    return next(_obstacles(config, capabilities), None)


def _obstacles(config: TrialConfig, capabilities: Capabilities) -> Iterator[str]:
    """What a training asks for that this machine does not have, in words."""
    runtime, precision = config.runtime, config.precision
    if config.device == "cuda" and capabilities.num_gpus == 0:
        reason = capabilities.no_gpu_reason
        seen = "there is none" if reason is None else f"torch sees none: {reason}"
        yield f"device=cuda needs a GPU, and {seen}"
    uses_gpu = uses_cuda(config, capabilities)
    available = {"CPUs": capabilities.num_cpus}
    if uses_gpu:
        available["GPUs"] = capabilities.num_gpus
    num_workers = config.parallelism["num_workers"]
    for kind, number in available.items():
        if num_workers > number:
            yield (
                f"{num_workers} devices (parallelism.num_workers) need as many {kind}, and"
                f" there are {number}"
            )
    if runtime.compile is not None and not capabilities.has_compiler:
        yield f"runtime.compile={runtime.compile} needs a C++ compiler, and there is none"
    if precision.float8 and not capabilities.has_torchao:
        yield "precision.float8 needs torchao, which is not installed (pip install 'autotune[fp8]')"
    if uses_gpu:
        formats = {
            "float8": precision.float8,
            "bfloat16": "bfloat16" in (precision.autocast_dtype, precision.weights_dtype),
            "TensorFloat-32": _is_plain_tf32(config),
        }
        found = capabilities.compute_capability
        for name, is_wanted in formats.items():
            if is_wanted and found is not None and found < (least := _MIN_COMPUTE_CAPABILITY[name]):
                yield (
                    f"{name} needs CUDA compute capability {least[0]}.{least[1]}, and"
                    f" {capabilities.gpu_name} has {found[0]}.{found[1]}"
                )
        return
    # these have no effect but with CUDA
    for setting, is_set in (
        ("parallelism.backend=nccl", config.parallelism.get("backend") == "nccl"),
        ("parallelism.compression=bf16", config.parallelism.get("compression") == "bf16"),
        ("precision.float8", precision.float8),
        ("precision.float32_precision=tf32", _is_plain_tf32(config)),
        ("runtime.cuda_graph", runtime.cuda_graph),
        ("runtime.compile=reduce-overhead", runtime.compile == "reduce-overhead"),
        ("runtime.cudnn_benchmark", runtime.cudnn_benchmark),
        ("runtime.expandable_segments", runtime.expandable_segments),
    ):
        if is_set:
            yield f"{setting} is for CUDA GPUs, and this training runs on the CPU"


def _is_plain_tf32(config: TrialConfig) -> bool:
    """Whether TensorFloat-32 is the only difference between the precision and plain float32."""
    precision = config.precision
    is_float32 = (
        precision.autocast_dtype is None
        and precision.weights_dtype == "float32"
        and not precision.float8
    )
    return is_float32 and precision.float32_precision == "tf32"


def uses_cuda(config: TrialConfig, capabilities: Capabilities) -> bool:
    """Whether a training runs on GPUs on this machine.

    Device ``auto`` takes a GPU if there is one.
    """
    return config.device == "cuda" or (config.device == "auto" and capabilities.num_gpus > 0)


def cpus_per_worker(config: TrialConfig, cluster: ClusterConfig, capabilities: Capabilities) -> int:
    """CPUs, and so threads, of each worker of a training: ``cluster.cpus_per_worker``, or else its
    GPU's share of this machine's CPUs.

    It is one on the CPU, and on a cluster that was joined, whose machines may be of any sizes.
    """
    if (
        cluster.cpus_per_worker is not None
        or not cluster.is_local
        or not uses_cuda(config, capabilities)
    ):
        return cluster.cpus_per_worker or 1
    return max(
        1,
        (cluster.num_cpus or capabilities.num_cpus)
        // (cluster.num_gpus or capabilities.num_gpus or 1),
    )


def num_available_cpus() -> int:
    """Number of CPUs that this process may use, as Ray counts them: a container's quota may
    allow less than its affinity.
    """
    count, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs' worth of time that this process's container may use; None if it has no quota.

    Source: the kernel's documentation, "Control Group v2", cpu.max; "CFS Bandwidth Control",
    cpu.cfs_quota_us.
    """
    folder = root / "cpu"
    limit = text_of(root / "cpu.max") or " ".join(
        text_of(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    )
    quota, _, period = limit.partition(" ")
    return int(quota) / int(period) if quota.isdigit() else None


def text_of(path: Path) -> str:
    """What a file of the kernel's says; empty if it is not there."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def cpu_name() -> str:
    """The processor's model name from ``/proc/cpuinfo``, or else the platform's name for the
    processor.
    """
    lines = text_of(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def versions() -> dict[str, str | None]:
    """Versions of Python, CUDA and packages that measurements depend on.

    None for a package that is not installed.
    """
    packages = ("autotune", "torch", "numpy", "ray", "optuna", "hydra-core", "mlflow")
    return {
        "python": platform.python_version(),
        "cuda": torch_build().get("cuda"),
        **{name: _installed(name) for name in packages},
    }


@cache  # called for every trial
def torch_build() -> Mapping[str, str]:
    """Versions of ``cuda`` and ``hip`` (ROCm) that torch was built for, read without importing it;
    empty for the CPU.
    """
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return {}
    found = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))
    return {name: str(found[name]) for name in ("cuda", "hip") if found.get(name) is not None}


def visible_devices_variable() -> str:
    """Environment variable that limits a process to some of the GPUs of the vendor that torch was
    built for.
    """
    return "HIP_VISIBLE_DEVICES" if "hip" in torch_build() else "CUDA_VISIBLE_DEVICES"


def visible_devices(num_gpus: int) -> list[str]:
    """Ids of the first GPUs that this process may use, as ``visible_devices_variable`` takes
    them: indices or UUIDs.
    """
    visible = os.environ.get(visible_devices_variable())
    return visible.split(",")[:num_gpus] if visible else [str(index) for index in range(num_gpus)]


def visible_devices_environment(devices: Sequence[str]) -> dict[str, str]:
    """The environment variable that limits a process, before it uses a GPU, to the GPUs with
    these ids.
    """
    return {visible_devices_variable(): ",".join(devices)}


@cache
def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Version of the NVIDIA driver, as its kernel module reports it.

    None if there is no such driver.
    """
    first_line = text_of(Path("/proc/driver/nvidia/version")).partition("\n")[0]
    return next((word for word in first_line.split() if word[0].isdigit()), None)
