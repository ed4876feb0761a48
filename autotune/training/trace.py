"""Reading a profiler's trace: from the events of a few steps to the seconds of one.

The events are those of a Chrome trace as torch.profiler writes it: ``ts`` and ``dur`` in microseconds, ``cat`` says what they are. A GPU
kernel belongs to the part of the step, and to the operator, in which the host launched it; launch and kernel share a
``correlation``. The host's parts are told apart by time, not by thread, because a GPU's backward pass is launched from a thread of
autograd's own while the training's waits for it.
"""

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.step_profile import BETWEEN, IDLE, PARTS, WAITING, OperatorTime, StepTimes, Synchronisation

STEP = "step"
"""The label of a whole step."""
WAIT = "wait"
"""The label of waiting for a GPU after the last step."""

Event = Mapping[str, Any]
_Call = tuple["_Node | None", str, float]
"""The operator that was called, the name to sum it by, its microseconds."""

_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_NESTED = _LAUNCHES | {"cpu_op", "python_function"}
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
_ROUNDING = 2e-3
"""Microseconds by which an event may end after the one that it lies in."""
_MICROSECONDS = 1e6


def read_events(path: Path) -> list[Event]:
    """The events of a Chrome trace."""
    events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def step_times(events: Iterable[Event], *, on_gpu: bool) -> StepTimes:
    """The mean times of the steps in a trace.

    Args:
        events: steps labelled STEP, their parts as in ``PARTS``, and what a profiler adds.
        on_gpu: whether they were trained on a GPU; without one the host is the device.
    """
    trace = _Trace.of(events, on_gpu=on_gpu)
    launched = trace.launched_kernels()
    host = trace.host_microseconds()
    device = trace.device_microseconds(launched) if on_gpu else {}
    own = _self_microseconds(trace.nodes)
    operators: list[_Call] = [(each, each.name, own[id(each)]) for each in trace.nodes if each.is_operator]
    if on_gpu:
        operators = [(each.operator, each.operator.name if each.operator else each.name, each.end - each.start) for each in launched]
    return StepTimes(
        step_seconds=trace.per_step(trace.end - trace.start),
        host_seconds={part: trace.per_step(spent) for part, spent in host.items()},
        device_seconds={part: trace.per_step(spent) for part, spent in device.items()},
        data_wait_seconds=trace.per_step(_outside(trace.ranges_of("data"), _union(launched)) if on_gpu else host.get("data", 0.0)),
        python_seconds=trace.per_step(trace.python_microseconds()),
        operators=_by_name(operators, trace),
        kernels=_by_name([(None, each.name, each.end - each.start) for each in launched], trace),
        num_operators=sum(each.is_outermost_operator for each in trace.nodes) / trace.num_steps,
        num_kernels=len(launched) / trace.num_steps,
        synchronisations=tuple(trace.synchronisations()),
    )


@dataclass(eq=False)
class _Node:
    """An event of the host and the one that it lies in."""

    event: Event
    parent: "_Node | None"

    @property
    def start(self) -> float:
        return float(self.event["ts"])

    @property
    def end(self) -> float:
        return float(self.event["ts"] + self.event.get("dur", 0.0))

    @property
    def name(self) -> str:
        return str(self.event["name"])

    @property
    def is_operator(self) -> bool:
        return bool(self.event["cat"] == "cpu_op")

    @property
    def ancestors(self) -> Iterator["_Node"]:
        """What the event lies in, innermost first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    @property
    def operator(self) -> "_Node | None":
        """The innermost operator that the event lies in."""
        return next((each for each in self.ancestors if each.is_operator), None)

    @property
    def is_outermost_operator(self) -> bool:
        """Whether it is torch's and none of torch's lies around it."""
        return _is_torchs(self) and not any(map(_is_torchs, self.ancestors))


def _is_torchs(node: _Node) -> bool:
    return node.is_operator and node.name.startswith("aten::")


@dataclass(frozen=True, eq=False)
class _Kernel:
    """A GPU's kernel or copy, and the host's call that launched it."""

    name: str
    start: float
    end: float
    launch: _Node

    @property
    def operator(self) -> _Node | None:
        return self.launch.operator


@dataclass(frozen=True)
class _Range:
    """A labelled stretch of the host's time."""

    start: float
    end: float
    part: str


@dataclass(frozen=True, eq=False)
class _Trace:
    """The steps' stretch of a trace."""

    on_gpu: bool
    num_steps: int
    start: float
    end: float
    ranges: Sequence[_Range]
    """The parts of all steps, one after the other."""
    nodes: Sequence[_Node]
    """What the host did, of the threads that trained."""
    kernels: Sequence[Event]
    starts: Sequence[float] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event], *, on_gpu: bool) -> "_Trace":
        complete = [each for each in events if each.get("ph") == "X"]
        labels = [each for each in complete if each.get("cat") == "user_annotation" and each["name"] in {STEP, WAIT, *PARTS}]
        steps = [each for each in labels if each["name"] == STEP]
        start = min(each["ts"] for each in steps)
        end = max(_end(each) for each in labels if each["name"] in {STEP, WAIT})
        parts = {**{part: part for part in PARTS}, **({WAIT: WAITING} if on_gpu else {})}
        ranges = [
            _Range(each["ts"], _end(each), parts[each["name"]])
            for each in sorted(labels, key=lambda each: each["ts"])
            if each["name"] in parts and start <= each["ts"] < end
        ]
        threads = {each["tid"] for each in complete if each.get("cat") == "cpu_op"} | {steps[0]["tid"]}
        happened = [each for each in complete if each.get("cat") in _NESTED and each["tid"] in threads and start <= each["ts"] < end]
        return cls(
            on_gpu=on_gpu,
            num_steps=len(steps),
            start=start,
            end=end,
            ranges=ranges,
            nodes=_nested(happened),
            kernels=[each for each in complete if each.get("cat") in _KERNELS],
            starts=[each.start for each in ranges],
        )

    def per_step(self, microseconds: float) -> float:
        """Seconds a step."""
        return microseconds / self.num_steps / _MICROSECONDS

    def part_at(self, moment: float) -> str:
        """The part that the host was in."""
        index = bisect_right(self.starts, moment) - 1
        return self.ranges[index].part if index >= 0 and moment < self.ranges[index].end else BETWEEN

    def ranges_of(self, part: str) -> list[tuple[float, float]]:
        return [(each.start, each.end) for each in self.ranges if each.part == part]

    def host_microseconds(self) -> dict[str, float]:
        """By part: what is waited for a GPU within one counts as WAITING."""
        spent = dict.fromkeys((*PARTS, BETWEEN, WAITING), 0.0)
        for each in self.ranges:
            spent[each.part] += each.end - each.start
        for wait in self.waits():
            spent[self.part_at(wait.start)] -= wait.end - wait.start
            spent[WAITING] += wait.end - wait.start
        spent[BETWEEN] += self.end - self.start - sum(spent.values())
        return {part: each for part, each in spent.items() if each or part == BETWEEN}

    def launched_kernels(self) -> list[_Kernel]:
        """What the steps ran on a GPU, by its start."""
        launches = {each.event["args"]["correlation"]: each for each in self.nodes if "correlation" in each.event.get("args", {})}
        found = [
            _Kernel(each["name"], each["ts"], min(_end(each), self.end), launches[each["args"]["correlation"]])
            for each in self.kernels
            if each.get("args", {}).get("correlation") in launches and each["ts"] < self.end
        ]
        return sorted(found, key=lambda each: each.start)

    def device_microseconds(self, launched: Sequence[_Kernel]) -> dict[str, float]:
        """By the part that launched: where kernels run side by side, the time is the first one's."""
        spent: dict[str, float] = defaultdict(float)
        until = self.start
        for each in launched:
            spent[self.part_at(each.launch.start)] += max(0.0, each.end - max(each.start, until))
            until = max(until, each.end)
        ordered = {part: spent[part] for part in (*PARTS, BETWEEN, WAITING) if spent.get(part)}
        return {**ordered, IDLE: self.end - self.start - sum(ordered.values())}

    def python_microseconds(self) -> float:
        """Time in which no thread was in an operator or in a call of the GPU's, and no batch or GPU was waited for."""
        busy: list[_Range | _Node] = [each for each in self.ranges if each.part in ("data", WAITING)]
        busy += [each for each in self.nodes if each.event["cat"] != "python_function"]
        return _outside([(self.start, self.end)], _union(busy))

    def waits(self) -> list[_Node]:
        """The calls within the steps in which the host waits for a GPU."""
        if not self.on_gpu:
            return []
        return [each for each in self.nodes if each.name in _WAITS and self.part_at(each.start) != WAITING]

    def synchronisations(self) -> Iterator[Synchronisation]:
        """What waits for a GPU in the steps; on the CPU, what would."""
        found: dict[tuple[str, str, str | None], list[float]] = defaultdict(list)
        for node in self.waits() if self.on_gpu else self._would_wait():
            operators = [each for each in node.ancestors if _is_torchs(each)]
            name = (operators[-1] if operators else node).name
            found[name, self.part_at(node.start), _source(node)].append(node.end - node.start)
        for (name, part, source), spent in found.items():
            yield Synchronisation(
                operator=name, part=part, calls=len(spent) / self.num_steps, seconds=self.per_step(sum(spent)), source=source
            )

    def _would_wait(self) -> Iterator[_Node]:
        for node in self.nodes:
            if node.is_operator and node.name in _WOULD_WAIT and not _reads_host_memory(node):
                yield node


def _nested(events: Iterable[Event]) -> list[_Node]:
    """Events of each thread with the ones they lie in."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for each in events:
        threads[each["tid"]].append(each)
    nodes = []
    for own in threads.values():
        around: list[_Node] = []
        for event in sorted(own, key=lambda each: (each["ts"], -each.get("dur", 0.0))):
            while around and around[-1].end <= event["ts"] + _ROUNDING:
                around.pop()
            node = _Node(event, around[-1] if around else None)
            around.append(node)
            nodes.append(node)
    return nodes


def _self_microseconds(nodes: Iterable[_Node]) -> dict[int, float]:
    """Of each operator, by identity, less what the operators within it take."""
    spent: dict[int, float] = defaultdict(float)
    for node in nodes:
        if not node.is_operator:
            continue
        spent[id(node)] += node.end - node.start
        if node.operator is not None:
            spent[id(node.operator)] -= node.end - node.start
    return spent


def _by_name(calls: Iterable[_Call], trace: _Trace) -> tuple[OperatorTime, ...]:
    """Times of calls, summed by name."""
    groups: dict[str, list[tuple[Mapping[str, Any], float]]] = defaultdict(list)
    for node, name, spent in calls:
        groups[name].append((node.event.get("args", {}) if node else {}, spent))
    found = []
    for name, group in groups.items():
        by_shapes: dict[str, float] = defaultdict(float)
        for arguments, spent in group:
            by_shapes[_shapes(arguments)] += spent
        found.append(
            OperatorTime(
                name=name,
                calls=len(group) / trace.num_steps,
                self_seconds=trace.per_step(sum(spent for _, spent in group)),
                shapes=max(by_shapes, key=lambda shapes: by_shapes[shapes]),
                float32_seconds=trace.per_step(sum(spent for arguments, spent in group if _is_float32(arguments))),
                contiguous_seconds=trace.per_step(sum(spent for arguments, spent in group if _is_contiguous(arguments))),
            )
        )
    return tuple(sorted(found, key=lambda each: each.self_seconds, reverse=True))


def _shapes(arguments: Mapping[str, Any]) -> str:
    shapes = [each for each in arguments.get("Input Dims", []) if each and not isinstance(each[0], list)]
    return ", ".join("x".join(map(str, each)) for each in shapes[:3])


def _is_float32(arguments: Mapping[str, Any]) -> bool:
    types, shapes = arguments.get("Input type", []), arguments.get("Input Dims", [])
    return any(kind == "float" and shape for kind, shape in zip(types, shapes, strict=False))


def _is_contiguous(arguments: Mapping[str, Any]) -> bool:
    """Whether the first 4-D input lies in the usual memory format, and channels-last is another one for its shape."""
    for shape, strides in zip(arguments.get("Input Dims", []), arguments.get("Input Strides", []), strict=False):
        if len(shape) == 4 and len(strides) == 4 and not isinstance(shape[0], list):
            _, channels, height, width = shape
            return bool(channels > 1 and height * width > 1 and strides[1] == height * width)
    return False


def _source(node: _Node) -> str | None:
    """The innermost function outside torch that an event lies in, as the trace names it."""
    return next((name for name in _functions(node) if not _is_in_torch(name)), None)


def _reads_host_memory(node: _Node) -> bool:
    """Whether it is torch's optimizers that read their step count: it lies in host memory whatever the device."""
    return "torch/optim/" in next(_functions(node), "")


def _functions(node: _Node) -> Iterator[str]:
    """The Python functions that an event lies in, innermost first; none where stacks were not recorded."""
    for each in node.ancestors:
        if each.event["cat"] == "python_function" and re.fullmatch(r".+\(\d+\): .+", each.name):
            yield each.name


def _is_in_torch(name: str) -> bool:
    return name.startswith("torch/") or "/torch/" in name


def _end(event: Event) -> float:
    return float(event["ts"] + event.get("dur", 0.0))


def _union(stretches: Iterable[_Kernel | _Node | _Range]) -> list[tuple[float, float]]:
    """The stretches of time in which at least one of them lies."""
    merged: list[tuple[float, float]] = []
    for each in sorted(stretches, key=lambda each: each.start):
        if merged and each.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], each.end))
        else:
            merged.append((each.start, each.end))
    return merged


def _outside(stretches: Sequence[tuple[float, float]], taken: Sequence[tuple[float, float]]) -> float:
    """Time of some stretches that lies in none of the others."""
    overlap = 0.0
    for start, end in stretches:
        overlap += sum(max(0.0, min(end, other_end) - max(start, other_start)) for other_start, other_end in taken)
    return sum(end - start for start, end in stretches) - overlap
