"""Training functions of the user's own: any loop (plain PyTorch, Lightning, Hugging Face) becomes a generator of evaluations.

Contract of ``training:`` in the configuration: ``_target_`` names a generator function that yields mappings, or a function
that takes ``report`` and calls it at every evaluation. A yield, or a call of ``report``, gives ``metric`` and whatever is known
of ``loss``, ``step``, ``epoch`` and ``samples``. Further arguments are the node's other values, and, where the signature names
them, ``config`` (the TrialConfig), ``seed``, ``device`` and ``clock``. All time counts as training, less imports and what stands in
``with clock.building():`` and ``with clock.evaluating():``. A process calls the function once before it counts, up to its first
report, unless ``training._warm_up_`` is false: see ``autotune.training.first_call``.
"""

import contextlib
import functools
import inspect
import logging
import math
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch

from autotune.config.build import accepted_arguments, build_partial
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Phase, PhaseClock
from autotune.training.device import device_kind, peak_memory_bytes, pick_device, reset_device, synchronizer
from autotune.training.energy import energy_meter
from autotune.training.first_call import (
    WARMED_UP,
    PaidOnce,
    TrainingEnded,
    function_node,
    how_called,
    imports_are_build,
    prepare_call,
    warm_up_of,
)
from autotune.training.outcome import as_measured, outcome_of
from autotune.training.seeding import seed_everything

_log = logging.getLogger(__name__)

_END_SECONDS = 60.0
"""What a training function may take to clean up after itself; beside what goes on longer nothing could be timed."""
_REPORTED = frozenset({"metric", "loss", "step", "epoch", "samples"})


class TrainingClock:
    """How a training function says what is not training."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Time that one process pays once: loading data, compiling."""
        return self._within(Phase.BUILD)

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Time of scoring the validation data."""
        return self._within(Phase.EVALUATE)

    @contextlib.contextmanager
    def _within(self, phase: Phase) -> Iterator[None]:
        before = self._clock.phase
        self._clock.enter(phase)
        try:
            yield
        finally:
            self._clock.enter(before)


def train_own(config: TrialConfig, *, cap_seconds: float, num_threads: int) -> Generator[Evaluation, None, None]:
    """Run the configuration's own training function as ``autotune.training.loop.train`` runs autotune's.

    Raises:
        ConfigError: the function has no way to report, or reports something that is no evaluation.
        Exception: whatever the function raises.
    """
    device = pick_device(config.device)
    clock = PhaseClock(synchronizer(device), energy_meter(device))
    clock.enter(Phase.BUILD)
    _make_anew(config, device, num_threads)
    _warm_up(device)
    is_first = how_called(config) is None
    paid = prepare_call(config, clock, lambda: _throw_away(config, device, num_threads))
    _make_anew(config, device, num_threads)
    clock.enter(Phase.TRAIN)
    before: Evaluation | None = None
    try:
        with contextlib.closing(_reports(config, device, clock, paid)) as reports:
            for values in reports:
                phase = clock.phase  # a report may stand within evaluating()
                clock.enter(None)
                evaluation = _evaluation(config, values, clock, device, cap_seconds, before)
                yield evaluation
                if evaluation.outcome is not None:
                    return
                before = evaluation
                clock.enter(phase)
    except Exception:
        if before is None and is_first and paid.how == WARMED_UP:
            _log.warning(
                f"training: {_name(config)} failed when it was called again; if it must not be, _warm_up_: false beside _target_ says so"
            )
        raise
    if before is None:
        raise ConfigError(f"training: {_name(config)} ended without one evaluation; accepted is at least one call of report, or one yield")


def _make_anew(config: TrialConfig, device: torch.device, num_threads: int) -> None:
    """Set what a call of the function starts from, whatever an earlier one left."""
    torch.set_num_threads(config.runtime.num_threads or num_threads)
    reset_device(device)
    seed_everything(config.seed)


def _throw_away(config: TrialConfig, device: torch.device, num_threads: int) -> None:
    """Call the function up to its first report; what that takes, and how it sets its clock, does not count."""
    _make_anew(config, device, num_threads)
    with contextlib.suppress(TrainingEnded), contextlib.closing(_reports(config, device, PhaseClock(), PaidOnce(WARMED_UP))) as reports:
        next(reports, None)


def _warm_up(device: torch.device) -> None:
    """One step of a tiny model: what torch sets up at its first backward pass and optimizer step is a process's, not a training's."""
    model = torch.nn.Linear(1, 1, device=device)
    model(torch.ones(1, 1, device=device)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()


def check_own(config: TrialConfig) -> None:
    """Refuse a training function that cannot report, before it runs.

    Raises:
        ConfigError: its target cannot be resolved, or it neither yields nor takes ``report``.
    """
    warm_up_of(config)
    made = _function(config)
    takes_report = "report" in accepted_arguments(made, {"report": None})
    if not takes_report and not inspect.isgeneratorfunction(made.func):
        raise ConfigError(f"training: {_name(config)}: accepted is a generator function, or a function with an argument named report")


def _function(config: TrialConfig) -> "functools.partial[Any]":
    assert config.training is not None
    return build_partial(function_node(config.training), config.allowed_targets, "training")


def _reports(config: TrialConfig, device: torch.device, clock: PhaseClock, paid: PaidOnce) -> Generator[Mapping[str, Any], None, None]:
    with imports_are_build(clock, paid):
        made = _function(config)
    offered = {"config": config, "seed": config.seed, "device": device, "clock": TrainingClock(clock)}
    given = accepted_arguments(made, offered)
    if inspect.isgeneratorfunction(made.func):
        with imports_are_build(clock, paid):
            yield from made(**given)
        return

    def function(report: Callable[..., None]) -> None:
        with imports_are_build(clock, paid):
            made(report=report, **given)

    yield from _reports_of_function(function)


def _reports_of_function(function: Callable[[Callable[..., None]], Any]) -> Generator[Mapping[str, Any], None, None]:
    """What a function reports, as a generator: it runs in a thread that waits inside ``report`` until it is asked to go on."""
    said: queue.SimpleQueue[Mapping[str, Any] | BaseException | None] = queue.SimpleQueue()
    goes_on: queue.SimpleQueue[None] = queue.SimpleQueue()
    ended = threading.Event()

    def report(metric: Any, **values: Any) -> None:
        """Report one evaluation; returns when training is to go on."""
        if not ended.is_set():
            said.put({"metric": metric, **values})
            goes_on.get()
        if ended.is_set():  # also for a function that catches the first one and reports again
            raise TrainingEnded

    def run() -> None:
        goes_on.get()
        if ended.is_set():
            return
        try:
            function(report)
        except TrainingEnded:
            pass
        except BaseException as error:  # noqa: BLE001  # it is raised again where the generator stands
            said.put(error)
            return
        said.put(None)

    thread = threading.Thread(target=run, name="training", daemon=True)
    thread.start()
    try:
        while True:
            goes_on.put(None)
            values = said.get()
            if values is None:
                return
            if isinstance(values, BaseException):
                raise values
            yield values
    finally:
        ended.set()
        goes_on.put(None)
        thread.join(timeout=_END_SECONDS)


def _evaluation(
    config: TrialConfig, values: Any, clock: PhaseClock, device: torch.device, cap_seconds: float, before: Evaluation | None
) -> Evaluation:
    if not isinstance(values, Mapping) or "metric" not in values or not set(values) <= _REPORTED:
        found = sorted(map(str, values)) if isinstance(values, Mapping) else type(values).__name__
        optional = ", ".join(sorted(_REPORTED - {"metric"}))
        raise ConfigError(f"training: {_name(config)} reported {found}, accepted is metric and any of {optional}")
    numbers = {key: _number(config, key, value) for key, value in values.items()}
    metric, loss = as_measured(numbers["metric"]), numbers.get("loss", 0.0)
    train_seconds, prepare_seconds = clock.seconds(Phase.TRAIN), clock.seconds(Phase.PREPARE)
    samples = int(numbers.get("samples", 0))
    since = (before.samples, before.train_seconds) if before else (0, 0.0)
    return Evaluation(
        step=int(numbers.get("step", before.step + 1 if before else 1)),
        epoch=numbers.get("epoch", 0.0),
        samples=samples,
        build_seconds=clock.seconds(Phase.BUILD),
        prepare_seconds=prepare_seconds,
        train_seconds=train_seconds,
        evaluate_seconds=clock.seconds(Phase.EVALUATE),
        metric=metric,
        loss=numbers.get("loss", math.nan),
        samples_per_second=(samples - since[0]) / max(train_seconds - since[1], 1e-9),
        peak_memory_bytes=peak_memory_bytes(device),
        energy_joules=clock.joules(Phase.PREPARE, Phase.TRAIN),
        build_joules=clock.joules(Phase.BUILD),
        device_kind=device_kind(device),
        outcome=outcome_of(config.target, metric, loss, train_seconds, prepare_seconds, cap_seconds, ended=False),
    )


def _number(config: TrialConfig, key: str, value: Any) -> float:
    """A reported value as a float; only what is measured may be other than finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"training: {_name(config)} reported {key} as {type(value).__name__}, accepted is a number ({said})") from error
    if key not in ("metric", "loss") and not math.isfinite(number):
        raise ConfigError(f"training: {_name(config)} reported {key}={number}, accepted is a finite number")
    return number


def _name(config: TrialConfig) -> str:
    assert config.training is not None
    return str(config.training["_target_"])
