"""Reads the events of a Chrome trace from torch.profiler: how they are nested, and which stretches of time they cover.

``ts`` and ``dur`` are microseconds. ``cat`` is the kind of an event: an operator of torch (``cpu_op``), a Python function, a label
(``user_annotation``), a CUDA call (``cuda_runtime``, ``cuda_driver``), or what such a call started on the GPU.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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
