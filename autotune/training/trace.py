"""Computes the mean times of a training step from the events of torch.profiler's Chrome trace.

A GPU kernel belongs to the part of the step, and to the operator, in which the host launched it. The host's part at a moment is found
by time, not by thread, because a GPU's backward pass is launched from autograd's own thread while the training's thread waits for it.

In a trace, ``ts`` and ``dur`` are microseconds. ``cat`` is the kind of an event: an operator of torch (``cpu_op``), a Python function, a
label (``user_annotation``), a CUDA call (``cuda_runtime``, ``cuda_driver``), or what such a call started on the GPU.
"""

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from autotune.step_profile import BETWEEN, IDLE, PARTS, WAITING, OperatorTime, StepTimes, Synchronisation

STEP = "step"
"""Label of a whole step."""
WAIT = "wait"
"""Label of the wait for a GPU after the last step."""

_WAITS = frozenset(
    {
        "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy",
        "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize",
    }
)  # fmt: skip
"""Names of calls in which the host waits for a GPU."""
_WOULD_WAIT = frozenset(
    {
        "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::bincount", "aten::_unique2",
        "aten::unique_dim", "aten::unique_consecutive",
    }
)  # fmt: skip
"""Names of operators whose result the host reads from the device, so that it would wait for a GPU."""
_MICROSECONDS = 1e6
Event = Mapping[str, Any]

HOST_CATEGORIES = frozenset({"cpu_op", "python_function", "cuda_runtime", "cuda_driver"})
"""Kinds of events on the host, without labels."""
GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Kinds of events on a GPU."""
_ROUNDING = 2e-3
"""Microseconds by which an event may end after the event that contains it, because of rounding."""


class Stretch(Protocol):
    """A stretch of time, in microseconds."""

    @property
    def start(self) -> float:
        """Start of the stretch, in microseconds."""

    @property
    def end(self) -> float:
        """End of the stretch, in microseconds."""


@dataclass(frozen=True)
class Range:
    """A labelled stretch of the host's time, in microseconds."""

    start: float
    end: float
    label: str


@dataclass(eq=False)
class Call:
    """An event on the host, and the innermost event of the same thread that contains it."""

    event: Event
    parent: "Call | None"

    @property
    def name(self) -> str:
        """Name of the operator, function or CUDA call."""
        return str(self.event["name"])

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Details in the trace, such as the shapes and types of the inputs, and the correlation id."""
        return self.event.get("args", {})  # type: ignore[no-any-return]  # JSON

    @property
    def start(self) -> float:
        """Start of the event, in microseconds."""
        return float(self.event["ts"])

    @property
    def end(self) -> float:
        """End of the event, in microseconds."""
        return end_of(self.event)

    @property
    def is_operator(self) -> bool:
        """Whether the event is an operator of torch, or an autograd function around operators."""
        return bool(self.event["cat"] == "cpu_op")

    @property
    def is_aten(self) -> bool:
        """Whether the event is an ``aten`` operator, of those that models are written in."""
        return self.is_operator and self.name.startswith("aten::")

    @property
    def ancestors(self) -> "Iterator[Call]":
        """The events that contain this one, innermost first."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent

    @property
    def operator(self) -> "Call | None":
        """Innermost operator that contains this event; None if there is none."""
        return next((call for call in self.ancestors if call.is_operator), None)

    @property
    def functions(self) -> Iterator[str]:
        """Python functions that contain this event, as ``file(line): name``, innermost first; empty if stacks were not recorded."""
        names = (call.name for call in self.ancestors if call.event["cat"] == "python_function")
        return (name for name in names if re.fullmatch(r".+\(\d+\): .+", name))


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel or memory operation of a GPU, with the host's call that launched it; None if the trace does not contain that call."""

    name: str
    start: float
    end: float
    launch: Call | None

    @property
    def operator(self) -> Call | None:
        """Innermost operator that launched the kernel; None if it is unknown."""
        return self.launch if self.launch is None or self.launch.is_operator else self.launch.operator


def step_times(events: Sequence[Event], *, on_gpu: bool) -> StepTimes:
    """Mean times of the steps in a trace.

    Args:
        events: events of the steps; labels are STEP for a step, a name in PARTS for its parts, WAIT for the wait after the last step.
        on_gpu: whether the steps ran on a GPU; otherwise the host is the device.
    """
    trace = _Trace.of(events, on_gpu=on_gpu)
    host = trace.host_microseconds()
    if on_gpu:
        device = trace.device_microseconds()
        data_wait = sum(time_outside(part, union(trace.kernels)) for part in trace.parts if part.label == "data")
        operators = [(kernel.operator, kernel.name, kernel.end - kernel.start) for kernel in trace.kernels]
    else:
        device, data_wait = {}, host.get("data", 0.0)
        operators = [(call, call.name, spent) for call, spent in self_microseconds(trace.calls).items()]
    return StepTimes(
        step_seconds=trace.per_step(trace.span.end - trace.span.start),
        median_step_seconds=median(trace.step_microseconds) / _MICROSECONDS,
        host_seconds={part: trace.per_step(spent) for part, spent in host.items()},
        device_seconds={part: trace.per_step(spent) for part, spent in device.items()},
        data_wait_seconds=trace.per_step(data_wait),
        python_seconds=trace.per_step(trace.python_microseconds()),
        operators=trace.summed((call, call.name if call else name, spent) for call, name, spent in operators),
        kernels=trace.summed((None, kernel.name, kernel.end - kernel.start) for kernel in trace.kernels),
        num_operators=sum(call.is_aten and not any(outer.is_aten for outer in call.ancestors) for call in trace.calls) / trace.num_steps,
        num_kernels=len(trace.kernels) / trace.num_steps,
        synchronisations=tuple(trace.synchronisations()),
    )


@dataclass(frozen=True, eq=False)
class _Trace:
    """The events of a trace that lie in its steps."""

    on_gpu: bool
    step_microseconds: Sequence[float]
    """Duration of each step on the host."""
    span: Range
    """Time from the first step's start to the end of the last step, or of the wait after it."""
    parts: Sequence[Range]
    """Named parts of all steps, by start."""
    calls: Sequence[Call]
    """Events of the host, on the threads that trained."""
    kernels: Sequence[Kernel]

    @classmethod
    def of(cls, events: Sequence[Event], *, on_gpu: bool) -> "_Trace":
        annotations = [Range(event["ts"], end_of(event), event["name"]) for event in events if event.get("cat") == "user_annotation"]
        steps = [annotation for annotation in annotations if annotation.label == STEP]
        start = min(step.start for step in steps)
        span = Range(start, max(annotation.end for annotation in annotations if annotation.label in (STEP, WAIT)), STEP)
        within = [event for event in events if span.start <= event.get("ts", -1.0) < span.end]
        threads = {event["tid"] for event in within if event.get("cat") in ("cpu_op", "user_annotation")}
        calls = nested(event for event in within if event.get("cat") in HOST_CATEGORIES and event["tid"] in threads)
        names = {part: part for part in PARTS} | ({WAIT: WAITING} if on_gpu else {})
        named = (annotation for annotation in annotations if annotation.label in names and annotation.start >= start)
        return cls(
            on_gpu=on_gpu,
            step_microseconds=[step.end - step.start for step in steps],
            span=span,
            parts=sorted((replace(annotation, label=names[annotation.label]) for annotation in named), key=lambda part: part.start),
            calls=calls,
            kernels=gpu_kernels(within, calls),
        )

    @property
    def num_steps(self) -> int:
        return len(self.step_microseconds)

    def per_step(self, microseconds: float) -> float:
        """Seconds per step: the given microseconds divided among the steps."""
        return microseconds / self.num_steps / _MICROSECONDS

    def part_at(self, moment: float) -> str:
        """Name of the part that the host was in at a moment, in microseconds; BETWEEN outside all parts."""
        index = bisect_right(self.parts, moment, key=lambda part: part.start) - 1
        return self.parts[index].label if index >= 0 and moment < self.parts[index].end else BETWEEN

    def host_microseconds(self) -> dict[str, float]:
        """Time of the host by part, over all steps; waits for a GPU within a part count as WAITING."""
        spent = dict.fromkeys((*PARTS, BETWEEN, WAITING), 0.0)
        for part in self.parts:
            spent[part.label] += part.end - part.start
        for wait in self.waits():
            spent[self.part_at(wait.start)] -= wait.end - wait.start
            spent[WAITING] += wait.end - wait.start
        spent[BETWEEN] += self.span.end - self.span.start - sum(spent.values())
        return {name: microseconds for name, microseconds in spent.items() if microseconds or name == BETWEEN}

    def device_microseconds(self) -> dict[str, float]:
        """Time of the GPU by the part that launched its kernels, and IDLE; if kernels overlap, the time counts for the first kernel."""
        spent = dict.fromkeys((*PARTS, BETWEEN, WAITING), 0.0)
        until = self.span.start
        for kernel in self.kernels:
            part = self.part_at(kernel.launch.start) if kernel.launch else BETWEEN
            spent[part] += max(0.0, kernel.end - max(kernel.start, until))
            until = max(until, kernel.end)
        busy = {part: microseconds for part, microseconds in spent.items() if microseconds}
        return {**busy, IDLE: self.span.end - self.span.start - sum(busy.values())}

    def python_microseconds(self) -> float:
        """Time of Python code: no thread was in an operator or a GPU call, and the host waited for no batch and no GPU."""
        busy: list[Stretch] = [part for part in self.parts if part.label in ("data", WAITING)]
        busy += [call for call in self.calls if call.event["cat"] != "python_function"]
        return time_outside(self.span, union(busy))

    def waits(self) -> list[Call]:
        """Calls within the steps in which the host waits for a GPU; empty for steps on the CPU."""
        return [call for call in self.calls if call.name in _WAITS and self.part_at(call.start) != WAITING] if self.on_gpu else []

    def synchronisations(self) -> Iterator[Synchronisation]:
        """Yield the operators in the steps that make the host wait for a GPU; on the CPU, those that would on a GPU."""
        would_wait = (call for call in self.calls if call.is_operator and call.name in _WOULD_WAIT and not _reads_host_memory(call))
        groups: dict[tuple[str, str, str | None], list[float]] = defaultdict(list)
        for call in self.waits() if self.on_gpu else would_wait:
            outermost = [call, *(outer for outer in call.ancestors if outer.is_aten)][-1]
            groups[outermost.name, self.part_at(call.start), _source(call)].append(call.end - call.start)
        for (operator, part, source), spent in groups.items():
            seconds = self.per_step(sum(spent))
            yield Synchronisation(operator=operator, part=part, calls=len(spent) / self.num_steps, seconds=seconds, source=source)

    def summed(self, spent: Iterable[tuple[Call | None, str, float]]) -> tuple[OperatorTime, ...]:
        """Sum triples of call, name and microseconds by name, longest first; a call is None if its inputs are unknown."""
        groups: dict[str, list[tuple[Mapping[str, Any], float]]] = defaultdict(list)
        for call, name, microseconds in spent:
            groups[name].append((call.arguments if call else {}, microseconds))
        times = [self._operator_time(name, group) for name, group in groups.items()]
        return tuple(sorted(times, key=lambda time: time.self_seconds, reverse=True))

    def _operator_time(self, name: str, group: Sequence[tuple[Mapping[str, Any], float]]) -> OperatorTime:
        by_shapes: dict[str, float] = defaultdict(float)
        for arguments, spent in group:
            by_shapes[_shapes(arguments)] += spent
        return OperatorTime(
            name=name,
            calls=len(group) / self.num_steps,
            self_seconds=self.per_step(sum(spent for _, spent in group)),
            shapes=max(by_shapes, key=lambda shapes: by_shapes[shapes]),
            float32_seconds=self.per_step(sum(spent for arguments, spent in group if _is_float32(arguments))),
            contiguous_seconds=self.per_step(sum(spent for arguments, spent in group if _is_contiguous(arguments))),
        )


def _source(call: Call) -> str | None:
    """Innermost Python function outside torch that a call lies in; None if there is none or stacks were not recorded."""
    return next((name for name in call.functions if not (name.startswith("torch/") or "/torch/" in name)), None)


def _reads_host_memory(call: Call) -> bool:
    """Whether one of torch's optimizers reads its step count, which is in host memory on every device."""
    return "torch/optim/" in next(call.functions, "")


def _shapes(arguments: Mapping[str, Any]) -> str:
    """Shapes of the first three tensors among a call's inputs, as text."""
    shapes = [shape for shape in arguments.get("Input Dims", []) if shape and not isinstance(shape[0], list)]
    return ", ".join("x".join(map(str, shape)) for shape in shapes[:3])


def _is_float32(arguments: Mapping[str, Any]) -> bool:
    """Whether a call's inputs include a float32 tensor; single numbers do not count."""
    types = zip(arguments.get("Input type", []), arguments.get("Input Dims", []), strict=False)
    return any(kind == "float" and shape for kind, shape in types)


def _is_contiguous(arguments: Mapping[str, Any]) -> bool:
    """Whether a call's first 4-D input is contiguous, and channels-last would be a different memory format for its shape."""
    for shape, strides in zip(arguments.get("Input Dims", []), arguments.get("Input Strides", []), strict=False):
        if len(shape) == len(strides) == 4 and not isinstance(shape[0], list):
            _, channels, height, width = shape
            return bool(channels > 1 and height * width > 1 and strides[1] == height * width)
    return False


def read_events(path: Path) -> list[Event]:
    """Read the events of a trace file."""
    events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def end_of(event: Event) -> float:
    """End of an event, in microseconds."""
    return float(event["ts"] + event.get("dur", 0.0))


def nested(events: Iterable[Event]) -> list[Call]:
    """Turn events of the host into calls, each with the event of its thread that contains it."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        threads[event["tid"]].append(event)
    calls = []
    for thread_events in threads.values():
        stack: list[Call] = []
        for event in sorted(thread_events, key=lambda event: (event["ts"], -event.get("dur", 0.0))):
            while stack and stack[-1].end <= event["ts"] + _ROUNDING:
                stack.pop()
            call = Call(event, stack[-1] if stack else None)
            stack.append(call)
            calls.append(call)
    return calls


def gpu_kernels(events: Iterable[Event], calls: Iterable[Call]) -> list[Kernel]:
    """Kernels in order of start, with their launches, found by correlation id, or else the operators with the same external id."""
    calls = list(calls)
    launches = {call.arguments["correlation"]: call for call in calls if "correlation" in call.arguments}
    operators = {call.arguments["External id"]: call for call in calls if call.is_operator and "External id" in call.arguments}
    kernels = []
    for event in events:
        if event.get("cat") in GPU_CATEGORIES:
            arguments = event.get("args", {})
            launch = launches.get(arguments.get("correlation")) or operators.get(arguments.get("External id"))
            kernels.append(Kernel(event["name"], event["ts"], end_of(event), launch))
    return sorted(kernels, key=lambda kernel: kernel.start)


def self_microseconds(calls: Iterable[Call]) -> dict[Call, float]:
    """Microseconds of each operator, without those of the operators within it."""
    spent: dict[Call, float] = defaultdict(float)
    for call in calls:
        if not call.is_operator:
            continue
        spent[call] += call.end - call.start
        if call.operator is not None:
            spent[call.operator] -= call.end - call.start
    return spent


def union(stretches: Iterable[Stretch]) -> list[tuple[float, float]]:
    """The time that at least one stretch covers, as disjoint pairs of start and end in microseconds."""
    merged: list[tuple[float, float]] = []
    for stretch in sorted(stretches, key=lambda stretch: stretch.start):
        if merged and stretch.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stretch.end))
        else:
            merged.append((stretch.start, stretch.end))
    return merged


def time_outside(stretch: Stretch, taken: Sequence[tuple[float, float]]) -> float:
    """Microseconds of a stretch outside the disjoint pairs of start and end in ``taken``."""
    overlap = sum(max(0.0, min(stretch.end, end) - max(stretch.start, start)) for start, end in taken)
    return stretch.end - stretch.start - overlap
