"""The events of a Chrome trace as torch.profiler writes it: which lies in which, and what stretches of time they cover.

``ts`` and ``dur`` are microseconds, ``cat`` says what an event is: an operator of torch's (``cpu_op``), a Python function, a label
(``user_annotation``), a call of the GPU's (``cuda_runtime``, ``cuda_driver``), or what that call started there.
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
"""What the host did, labels apart."""
GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""What a GPU did."""
_ROUNDING = 2e-3
"""Microseconds by which an event may end after the one that it lies in."""


class Stretch(Protocol):
    """A stretch of time, in microseconds."""

    @property
    def start(self) -> float:
        """Its begin."""

    @property
    def end(self) -> float:
        """Its end."""


@dataclass(frozen=True)
class Range:
    """A labelled stretch of the host's time."""

    start: float
    end: float
    label: str


@dataclass(eq=False)
class Call:
    """An event of the host, and the one that it lies in."""

    event: Event
    parent: "Call | None"

    @property
    def name(self) -> str:
        """What was called."""
        return str(self.event["name"])

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What the trace says of it: shapes and types of its inputs, its number."""
        return self.event.get("args", {})  # type: ignore[no-any-return]  # JSON

    @property
    def start(self) -> float:
        """Its begin, in microseconds."""
        return float(self.event["ts"])

    @property
    def end(self) -> float:
        """Its end, in microseconds."""
        return end_of(self.event)

    @property
    def is_operator(self) -> bool:
        """Whether it is an operator of torch's, or autograd's around some."""
        return bool(self.event["cat"] == "cpu_op")

    @property
    def is_aten(self) -> bool:
        """Whether it is one of the operators that a model is written in."""
        return self.is_operator and self.name.startswith("aten::")

    @property
    def ancestors(self) -> "Iterator[Call]":
        """What it lies in, innermost first."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent

    @property
    def operator(self) -> "Call | None":
        """The innermost operator that it lies in."""
        return next((each for each in self.ancestors if each.is_operator), None)

    @property
    def functions(self) -> Iterator[str]:
        """The Python functions that it lies in as ``file(line): name``, innermost first; none where stacks were not recorded."""
        names = (each.name for each in self.ancestors if each.event["cat"] == "python_function")
        return (name for name in names if re.fullmatch(r".+\(\d+\): .+", name))


@dataclass(frozen=True, eq=False)
class Kernel:
    """What a GPU ran, and the host's call that launched it; None where the trace does not hold that."""

    name: str
    start: float
    end: float
    launch: Call | None

    @property
    def operator(self) -> Call | None:
        """The innermost operator that launched it."""
        return self.launch if self.launch is None or self.launch.is_operator else self.launch.operator


def read_events(path: Path) -> list[Event]:
    """The events of a trace file."""
    events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def end_of(event: Event) -> float:
    """When an event ended, in microseconds."""
    return float(event["ts"] + event.get("dur", 0.0))


def nested(events: Iterable[Event]) -> list[Call]:
    """Events of the host, each with the one of its thread that it lies in."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for each in events:
        threads[each["tid"]].append(each)
    calls = []
    for own in threads.values():
        around: list[Call] = []
        for event in sorted(own, key=lambda each: (each["ts"], -each.get("dur", 0.0))):
            while around and around[-1].end <= event["ts"] + _ROUNDING:
                around.pop()
            call = Call(event, around[-1] if around else None)
            around.append(call)
            calls.append(call)
    return calls


def gpu_kernels(events: Iterable[Event], calls: Iterable[Call]) -> list[Kernel]:
    """What a GPU ran, by its start: it shares a correlation with its launch, and an external id with the operator around that."""
    calls = list(calls)
    launches = {call.arguments["correlation"]: call for call in calls if "correlation" in call.arguments}
    operators = {call.arguments["External id"]: call for call in calls if call.is_operator and "External id" in call.arguments}
    found = []
    for each in events:
        if each.get("cat") in GPU_CATEGORIES:
            said = each.get("args", {})
            launch = launches.get(said.get("correlation")) or operators.get(said.get("External id"))
            found.append(Kernel(each["name"], each["ts"], end_of(each), launch))
    return sorted(found, key=lambda kernel: kernel.start)


def self_microseconds(calls: Iterable[Call]) -> dict[Call, float]:
    """Of each operator, less what the operators within it take."""
    spent: dict[Call, float] = defaultdict(float)
    for call in calls:
        if not call.is_operator:
            continue
        spent[call] += call.end - call.start
        if call.operator is not None:
            spent[call.operator] -= call.end - call.start
    return spent


def union(stretches: Iterable[Stretch]) -> list[tuple[float, float]]:
    """The time in which at least one of them lies, as stretches apart from each other."""
    merged: list[tuple[float, float]] = []
    for each in sorted(stretches, key=lambda each: each.start):
        if merged and each.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], each.end))
        else:
            merged.append((each.start, each.end))
    return merged


def time_outside(stretch: Stretch, taken: Sequence[tuple[float, float]]) -> float:
    """Microseconds of a stretch that lie in none of the others."""
    overlap = sum(max(0.0, min(stretch.end, end) - max(stretch.start, start)) for start, end in taken)
    return stretch.end - stretch.start - overlap
