"""Computes the mean times of a training step from the events of a profiler's trace.

A GPU kernel belongs to the part of the step, and to the operator, in which the host launched it. The host's part at a moment is found
by time, not by thread, because a GPU's backward pass is launched from autograd's own thread while the training's thread waits for it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from autotune.step_profile import BETWEEN, IDLE, PARTS, WAITING, OperatorTime, StepTimes, Synchronisation
from autotune.training.trace_events import (
    HOST_CATEGORIES,
    Call,
    Event,
    Kernel,
    Range,
    Stretch,
    end_of,
    gpu_kernels,
    nested,
    self_microseconds,
    time_outside,
    union,
)

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
