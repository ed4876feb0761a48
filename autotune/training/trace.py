"""Reading a profiler's trace: from the events of a few training steps to the seconds of one.

A GPU kernel belongs to the part of the step, and to the operator, in which the host launched it. The host's parts are told apart by
time, not by thread, because a GPU's backward pass is launched from a thread of autograd's own while the training's waits for it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
"""The label of a whole step."""
WAIT = "wait"
"""The label of waiting for a GPU after the last step."""

_WAITS = frozenset(
    {
        "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy",
        "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize",
    }
)  # fmt: skip
"""Calls in which the host waits for a GPU."""
_WOULD_WAIT = frozenset(
    {
        "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::bincount", "aten::_unique2",
        "aten::unique_dim", "aten::unique_consecutive",
    }
)  # fmt: skip
"""Operators that read from the device what the host goes on with."""
_MICROSECONDS = 1e6


def step_times(events: Sequence[Event], *, on_gpu: bool) -> StepTimes:
    """The mean times of the steps in a trace.

    Args:
        events: of steps labelled STEP, their parts labelled as in PARTS, the wait at their end WAIT.
        on_gpu: whether they were trained on a GPU; without one the host is the device.
    """
    trace = _Trace.of(events, on_gpu=on_gpu)
    host = trace.host_microseconds()
    if on_gpu:
        device = trace.device_microseconds()
        data_wait = sum(time_outside(each, union(trace.kernels)) for each in trace.ranges if each.label == "data")
        operators = [(each.operator, each.name, each.end - each.start) for each in trace.kernels]
    else:
        device, data_wait = {}, host.get("data", 0.0)
        operators = [(call, call.name, spent) for call, spent in self_microseconds(trace.calls).items()]
    return StepTimes(
        step_seconds=trace.per_step(trace.whole.end - trace.whole.start),
        median_step_seconds=median(trace.step_microseconds) / _MICROSECONDS,
        host_seconds={part: trace.per_step(spent) for part, spent in host.items()},
        device_seconds={part: trace.per_step(spent) for part, spent in device.items()},
        data_wait_seconds=trace.per_step(data_wait),
        python_seconds=trace.per_step(trace.python_microseconds()),
        operators=trace.summed((call, call.name if call else name, spent) for call, name, spent in operators),
        kernels=trace.summed((None, each.name, each.end - each.start) for each in trace.kernels),
        num_operators=sum(call.is_aten and not any(each.is_aten for each in call.ancestors) for call in trace.calls) / trace.num_steps,
        num_kernels=len(trace.kernels) / trace.num_steps,
        synchronisations=tuple(trace.synchronisations()),
    )


@dataclass(frozen=True, eq=False)
class _Trace:
    """The steps' stretch of a trace."""

    on_gpu: bool
    step_microseconds: Sequence[float]
    """Of the host, of each step."""
    whole: Range
    ranges: Sequence[Range]
    """The parts of all steps, one after the other."""
    calls: Sequence[Call]
    """What the host did, of the threads that trained."""
    kernels: Sequence[Kernel]

    @classmethod
    def of(cls, events: Sequence[Event], *, on_gpu: bool) -> "_Trace":
        labels = [Range(each["ts"], end_of(each), each["name"]) for each in events if each.get("cat") == "user_annotation"]
        steps = [each for each in labels if each.label == STEP]
        whole = Range(min(each.start for each in steps), max(each.end for each in labels if each.label in (STEP, WAIT)), STEP)
        within = [each for each in events if whole.start <= each.get("ts", -1.0) < whole.end]
        threads = {each["tid"] for each in within if each.get("cat") in ("cpu_op", "user_annotation")}
        calls = nested(each for each in within if each.get("cat") in HOST_CATEGORIES and each["tid"] in threads)
        parts = {part: part for part in PARTS} | ({WAIT: WAITING} if on_gpu else {})
        named = [Range(each.start, each.end, parts[each.label]) for each in labels if each.label in parts and each.start >= whole.start]
        return cls(
            on_gpu=on_gpu,
            step_microseconds=[each.end - each.start for each in steps],
            whole=whole,
            ranges=sorted(named, key=lambda each: each.start),
            calls=calls,
            kernels=gpu_kernels(within, calls),
        )

    @property
    def num_steps(self) -> int:
        return len(self.step_microseconds)

    def per_step(self, microseconds: float) -> float:
        """Seconds a step."""
        return microseconds / self.num_steps / _MICROSECONDS

    def part_at(self, moment: float) -> str:
        """The part that the host was in."""
        index = bisect_right(self.ranges, moment, key=lambda each: each.start) - 1
        return self.ranges[index].label if index >= 0 and moment < self.ranges[index].end else BETWEEN

    def host_microseconds(self) -> dict[str, float]:
        """By part: what is waited for a GPU within one counts as WAITING."""
        spent = dict.fromkeys((*PARTS, BETWEEN, WAITING), 0.0)
        for each in self.ranges:
            spent[each.label] += each.end - each.start
        for wait in self.waits():
            spent[self.part_at(wait.start)] -= wait.end - wait.start
            spent[WAITING] += wait.end - wait.start
        spent[BETWEEN] += self.whole.end - self.whole.start - sum(spent.values())
        return {part: each for part, each in spent.items() if each or part == BETWEEN}

    def device_microseconds(self) -> dict[str, float]:
        """By the part that launched: where kernels run side by side, the time is the first one's."""
        spent = dict.fromkeys((*PARTS, BETWEEN, WAITING), 0.0)
        until = self.whole.start
        for each in self.kernels:
            part = self.part_at(each.launch.start) if each.launch else BETWEEN
            spent[part] += max(0.0, each.end - max(each.start, until))
            until = max(until, each.end)
        busy = {part: each for part, each in spent.items() if each}
        return {**busy, IDLE: self.whole.end - self.whole.start - sum(busy.values())}

    def python_microseconds(self) -> float:
        """Time in which no thread was in an operator or in a call of the GPU's, and no batch or GPU was waited for."""
        busy: list[Stretch] = [each for each in self.ranges if each.label in ("data", WAITING)]
        busy += [each for each in self.calls if each.event["cat"] != "python_function"]
        return time_outside(self.whole, union(busy))

    def waits(self) -> list[Call]:
        """The calls within the steps in which the host waits for a GPU."""
        return [each for each in self.calls if each.name in _WAITS and self.part_at(each.start) != WAITING] if self.on_gpu else []

    def synchronisations(self) -> Iterator[Synchronisation]:
        """What waits for a GPU in the steps; on the CPU, what would."""
        would = (each for each in self.calls if each.is_operator and each.name in _WOULD_WAIT and not _reads_host_memory(each))
        found: dict[tuple[str, str, str | None], list[float]] = defaultdict(list)
        for call in self.waits() if self.on_gpu else would:
            outermost = [call, *(each for each in call.ancestors if each.is_aten)][-1]
            found[outermost.name, self.part_at(call.start), _source(call)].append(call.end - call.start)
        for (operator, part, source), spent in found.items():
            seconds = self.per_step(sum(spent))
            yield Synchronisation(operator=operator, part=part, calls=len(spent) / self.num_steps, seconds=seconds, source=source)

    def summed(self, spent: Iterable[tuple[Call | None, str, float]]) -> tuple[OperatorTime, ...]:
        """Microseconds of calls, summed by name, longest first; None where a call's inputs are unknown."""
        groups: dict[str, list[tuple[Mapping[str, Any], float]]] = defaultdict(list)
        for call, name, each in spent:
            groups[name].append((call.arguments if call else {}, each))
        summed = [self._operator_time(name, group) for name, group in groups.items()]
        return tuple(sorted(summed, key=lambda each: each.self_seconds, reverse=True))

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
    """The innermost function outside torch that a call lies in."""
    return next((name for name in call.functions if not (name.startswith("torch/") or "/torch/" in name)), None)


def _reads_host_memory(call: Call) -> bool:
    """Whether torch's optimizers read their step count: it lies in host memory whatever the device."""
    return "torch/optim/" in next(call.functions, "")


def _shapes(arguments: Mapping[str, Any]) -> str:
    """Of the first three tensors."""
    shapes = [each for each in arguments.get("Input Dims", []) if each and not isinstance(each[0], list)]
    return ", ".join("x".join(map(str, each)) for each in shapes[:3])


def _is_float32(arguments: Mapping[str, Any]) -> bool:
    """Whether a tensor of them, not a single number, is."""
    types = zip(arguments.get("Input type", []), arguments.get("Input Dims", []), strict=False)
    return any(kind == "float" and shape for kind, shape in types)


def _is_contiguous(arguments: Mapping[str, Any]) -> bool:
    """Whether the first 4-D tensor lies in the usual memory format, where channels-last is another one for its shape."""
    for shape, strides in zip(arguments.get("Input Dims", []), arguments.get("Input Strides", []), strict=False):
        if len(shape) == len(strides) == 4 and not isinstance(shape[0], list):
            _, channels, height, width = shape
            return bool(channels > 1 and height * width > 1 and strides[1] == height * width)
    return False
