"""Runs a training function of the user: turns any loop (plain PyTorch, Lightning, Hugging Face)
into a generator of evaluations.

Contract of ``training:`` in the configuration: ``_target_`` names a function that calls
``autotune.report`` at every evaluation, or the ``report`` that it takes as an argument, or a
generator function that yields mappings. Each report passes ``metric`` and optionally ``loss``,
``step``, ``epoch``, ``samples``, and further metrics by name, which are tracked. The function's
other arguments are the node's other values and, if its signature names them, ``config`` (the
TrialConfig), ``seed``, ``device``, ``clock``, ``checkpoint``, ``devices`` (their number) and
``process_group`` (of torch.distributed, which is then initialised). All time counts as training,
except imports and code within ``with clock.building():`` and ``with clock.evaluating():``. Each
training has a process of its own for each rank, which calls the function once. A function that
calls ``checkpoint.save`` before a report can be paused there.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import math
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]  # missing in torch's stubs

from autotune.config.build import accepted_arguments, build_partial
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError, StateError
from autotune.failure import FailureKind
from autotune.files import make_folder
from autotune.measurement import Evaluation, Phase, PhaseClock, as_measured
from autotune.session import (
    REPORTED,
    Clock,
    Session,
    as_number,
    as_reported,
    check_finite,
    in_session,
    is_pausable,
    meant_by,
    own_files,
)
from autotune.training.checkpoint import TrainingCheckpoint, read_state, save_state
from autotune.training.device import pick_device, reset_device, seed_everything, synchronizer
from autotune.training.energy import energy_meter
from autotune.training.failures import failure_of
from autotune.training.loop import evaluation_of
from autotune.training.main_thread import TrainingEnded, endable, in_main_thread, reported_by
from autotune.training.parallel.reports import FollowingRank, LeadingRank
from autotune.training.states import TrainingStates

_OFFERED = ("config", "seed", "device", "devices", "clock", "checkpoint", "process_group")
"""Names of the arguments that a function gets if its signature names them, besides ``report``."""
_LIBRARY_FOLDERS = tuple(
    sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")
)


class TrainingClock(Clock):
    """The ``clock`` argument of a training function, and of a command."""

    def __init__(self, clock: PhaseClock) -> None:
        super().__init__(lambda phase: clock.within(Phase(phase)))
        self._clock = clock

    @property
    def train_seconds(self) -> float:
        """The seconds that count as training so far."""
        return self._clock.seconds(Phase.TRAIN)

    def count(self, *, train: float, build: float = 0.0) -> None:
        """Count seconds more, or fewer, as training, and those that are moved to building.

        Their energy stays where it is. A training that has not yet loaded its state counts nothing.
        """
        if self._clock.phase is not None:
            trained = self._clock.seconds(Phase.TRAIN)
            self._clock.add(Phase.TRAIN, max(train, -trained), 0.0)
            self._clock.add(Phase.BUILD, min(build, trained), 0.0)


def train_function(
    config: TrialConfig,
    *,
    cap_seconds: float,
    num_threads: int,
    states: TrainingStates | None = None,
    weights_path: Path | None = None,
    origin: Mapping[str, Any] = MappingProxyType({}),
    leader: LeadingRank | None = None,
) -> Generator[Evaluation, bool | None, None]:
    """Run the user's training function that the configuration names, as a generator of evaluations.

    Arguments and saving are as in ``autotune.training.loop.train``; state and weights are those
    that the function saved before its last report, if it did. The clock of a resumed training
    stands still until the function has loaded its state. Of a function that saves nothing so, and
    writes files into its trial's folder, the evaluations are saved: it may continue from its files.
    ``leader`` speaks to the other ranks, which run ``follow_function``.

    Raises:
        ConfigError: the function never reports, reports something that is not an evaluation, or
            saves what cannot be written.
        DataError: a state is damaged, belongs to another configuration, or cannot be written.
        StateError: the function, or a library, cannot load the state that it continues from.
        Exception: the function raised it.
    """
    clock, states = PhaseClock(), states or TrainingStates()
    leader = leader or LeadingRank(None, 1)
    # before anything asks for a GPU: CUDA's start and context are paid once per process
    clock.enter(Phase.BUILD)
    device = in_main_thread(_set_up, config, clock, num_threads)
    saver = _Saver(config, states, clock, device, leader)
    checkpoint, last = saver.checkpoint, states.curve.last
    if last is not None and last.outcome is not None:
        yield last
        return
    call = in_main_thread(_prepared, config, device, clock, checkpoint, leader.mean)
    reports = reported_by(call)
    try:
        # the other ranks are told first: this one's end may need them
        with contextlib.closing(reports), contextlib.ExitStack() as stack:
            stack.callback(leader.end)
            for values in reports:
                if not checkpoint.is_loaded:
                    raise ConfigError(
                        f"training: {_name(config)} was paused, and reported before it called"
                        " checkpoint.load"
                    )
                phase = clock.phase  # a report may be made within evaluating()
                clock.enter(None)
                leader.reported()
                previous = saver.continued(values)
                evaluation = _evaluation(config, values, clock, device, cap_seconds, previous)
                if previous is None and checkpoint.is_fresh:
                    checkpoint.check()  # before anything is paused
                states.evaluated(evaluation)
                saver.save_if_due()
                while (yield evaluation):
                    save = states.save if checkpoint.end is not None else states.try_to_save
                    save(saver.write)
                if evaluation.outcome is not None:
                    if weights_path is not None:
                        given = weights_path, config, evaluation, origin
                        write = functools.partial(checkpoint.write_weights, *given)
                        leader.gather(write, is_sharded=checkpoint.is_sharded)
                    return
                checkpoint.expire()
                leader.go_on()
                clock.enter(phase)
    except Exception as error:
        # a fault of the device or of another rank says nothing of the state
        if checkpoint.is_loaded or failure_of(error).kind is not FailureKind.USER_CODE:
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise StateError(
            f"training: {_name(config)} cannot continue from the state that it saved: {said}"
        ) from error
    if states.curve.last is None:
        raise ConfigError(
            f"training: {_name(config)} ended without one evaluation; call autotune.report, or the"
            " argument report, or yield, or give the Trainer autotune's ReportCallback"
        )


def follow_function(
    config: TrialConfig,
    follower: FollowingRank,
    *,
    num_threads: int,
) -> None:
    """Run the user's training function as another rank than the first, until the first one ends it.

    Raises:
        DivergedError: this rank reported a metric or a loss that is not finite.
        Exception: the function raised it.
    """
    clock = PhaseClock()  # the first rank's counts
    device = _set_up(config, clock, num_threads)
    folder = follower.told_state()
    # the first rank checks it
    state = None if folder is None else read_state(folder, is_checked=False)
    checkpoint = TrainingCheckpoint(device, state, folder, lambda: None, follower.rank)
    state = None  # which the checkpoint lets go

    def take(reported: Mapping[str, Any]) -> None:
        numbers = {name: _number(config, name, value) for name, value in reported.items()}
        check_finite(numbers, config.target.metric, follower.rank)
        follower.report(checkpoint.write_part, checkpoint.weights)
        checkpoint.expire()

    try:
        _prepared(config, device, clock, checkpoint, follower.shared)(take)
        follower.end()
    except TrainingEnded:
        pass


def _set_up(config: TrialConfig, clock: PhaseClock, num_threads: int) -> torch.device:
    """Make this process ready to train, and return its device: of several GPUs, the one that
    ``LOCAL_RANK`` says.
    """
    device = pick_device(config.device)
    if device.type == "cuda" and config.num_processes > 1:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    clock.attach(synchronizer(device), _meter(device, config.num_workers))
    reset_device(device)
    _warm_up(device)
    torch.set_num_threads(config.runtime.num_threads or num_threads)
    seed_everything(config.seed)
    return device


def _meter(device: torch.device, num_devices: int) -> Callable[[], float] | None:
    """Energy meter of all devices of a training; None if one of them cannot be read from here."""
    if device.type != "cuda" or num_devices == 1:
        return energy_meter(device)
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    meters = list(filter(None, map(energy_meter, gpus)))
    if len(meters) != num_devices:  # some are on other machines
        return None
    return lambda: sum(meter() for meter in meters)


class _Saver:
    """Saves a function's training, and restores it.

    What a function saves is written; of one that writes files of its own into its trial's folder,
    which it may continue from, the evaluations are.
    """

    def __init__(
        self,
        config: TrialConfig,
        states: TrainingStates,
        clock: PhaseClock,
        device: torch.device,
        leader: LeadingRank,
    ) -> None:
        self._config, self._states, self._clock, self._leader = config, states, clock, leader
        folder, state = states.restore(config, clock) or (None, None)
        self._has_state = state is not None and "values" in state
        """Whether the function has saved what it continues from."""
        self._continues_itself = state is not None and not self._has_state
        leader.tell_state(folder if self._has_state else None)
        # the clock stands still until the function has loaded its state
        self.checkpoint = TrainingCheckpoint(
            device,
            state if self._has_state else None,
            folder,
            lambda: clock.enter(Phase.TRAIN),
        )
        self.checkpoint.is_resumed = state is not None
        if state is not None and state.get("is_ended"):
            self.checkpoint.ended_at = states.curve.last
        if not self._has_state:
            clock.enter(Phase.TRAIN)

    def continued(self, values: Any) -> Evaluation | None:
        """The last evaluation before one that is reported; None if there is none.

        The clock of a training that continues from files of its own goes back to the evaluation
        before its first report. One that reports neither its step nor its epoch is charged for all
        that was trained before.
        """
        curve, last = self._states.curve, self._states.curve.last
        named = values if isinstance(values, Mapping) and self._continues_itself else {}
        self._continues_itself = False
        for name in ("step", "epoch"):
            if last is not None and name in named:
                now, numbered = as_number(name, named[name]), curve.numbered
                before = [number for number in numbered if getattr(numbered[number], name) < now]
                curve.cut(max(before, default=-1) + 1)
                kept_seconds = 0.0 if curve.last is None else curve.last.train_seconds
                self._clock.add(Phase.TRAIN, kept_seconds - last.train_seconds, 0.0)
                break
        return curve.last

    def save_if_due(self) -> None:
        """Save the training at its last evaluation, if that is due, and it can be."""
        states, checkpoint = self._states, self.checkpoint
        if checkpoint.is_fresh:  # one that ends may continue from what it wrote since then
            self._has_state = checkpoint.end is None
        may_go_on = checkpoint.end is None or states.has_notice
        is_due = states.is_due(checkpoint.num_bytes)
        if is_due and may_go_on and is_pausable(self._leader.can_keep):
            states.try_to_save(self.write)
        elif (
            not self._has_state
            and states.is_curve_due
            and (checkpoint.end is not None or own_files())  # it may write some before it ends
        ):
            contents = states.contents(self._config, self._clock)
            states.try_to_save(functools.partial(save_state, state=contents))

    def write(self, folder: Path) -> None:
        """Write the training's state into a new folder: of one that saves where it is ended, its
        evaluations.
        """
        make_folder(folder)
        if (end := self.checkpoint.end) is not None:
            self._clock.add(Phase.TRAIN, end(), 0.0)
            contents = self._states.contents(self._config, self._clock)
            save_state(folder, {**contents, "is_ended": True})
            return
        self._leader.together(str(folder), lambda: self.checkpoint.write_part(folder))
        self.checkpoint.write(folder, self._states.contents(self._config, self._clock))


def _warm_up(device: torch.device) -> None:
    """Train a tiny model for one step, so that torch's lazy set-up in a process is over before
    the user's training.
    """
    model = torch.nn.Linear(1, 1, device=device)
    model(torch.ones(1, 1, device=device)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()


def check_function(config: TrialConfig) -> None:
    """Check, before it runs, that the custom training function can be called.

    Raises:
        ConfigError: the target cannot be resolved, or takes other arguments.
    """
    function = _function(config)
    if (check := getattr(function.func, "autotune_check", None)) is not None:
        check(**function.keywords)
    try:
        signature = inspect.signature(function.func)
    except ValueError:  # some callables written in C have none
        return
    offered = accepted_arguments(function, dict.fromkeys(("report", *_OFFERED)))
    try:
        signature.bind(**function.keywords, **offered)
    except TypeError as error:
        raise ConfigError(
            f"training: {_name(config)}: {error}; it takes {', '.join(signature.parameters)}"
        ) from error


def _function(config: TrialConfig) -> "functools.partial[Any]":
    assert config.training is not None
    return build_partial(config.training, config.allowed_targets, "training")


def _prepared(
    config: TrialConfig,
    device: torch.device,
    clock: PhaseClock,
    checkpoint: TrainingCheckpoint,
    mean: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> Callable[[Callable[[Any], None]], None]:
    """Import the user's training function, with the arguments that it gets.

    Args:
        mean: turns the values of a report with ``reduce="mean"`` into what this rank reports.

    Returns:
        Calls the function in the thread that calls this. Its argument gets each evaluation that the
        function reports or yields, and returns when the training is to continue.
    """
    with _imports_are_build(clock):
        function = _function(config)
    is_generator = inspect.isgeneratorfunction(inspect.unwrap(function.func))
    user_clock = TrainingClock(clock)
    offered = {
        "config": config,
        "seed": config.seed,
        "device": device,
        "clock": user_clock,
        "checkpoint": checkpoint,
        "devices": config.num_workers,
    }

    def call(take: Callable[[Any], None]) -> None:
        def report(*metric: Any, **values: Any) -> None:
            """Report one evaluation; returns when the training is to continue."""
            if is_generator:
                raise ConfigError(
                    f"training: {_name(config)} yields its evaluations, so it cannot call report,"
                    " too"
                )
            take(as_reported(metric, values))

        session = Session(
            report=report,
            mean=mean,
            clock=user_clock,
            make_checkpoint=lambda: checkpoint,
            seed=config.seed,
            num_processes=config.num_processes,
        )
        if device.index is not None:  # of this thread
            torch.cuda.set_device(device)
        with (
            _imports_are_build(clock),
            in_session(session),
            _process_group(function) as group,
            endable(),
        ):
            result = function(
                **accepted_arguments(function, {**offered, **group, "report": report})
            )
            if is_generator:
                with contextlib.closing(result):
                    for evaluation in result:
                        take(evaluation)

    return call


@contextlib.contextmanager
def _process_group(function: "functools.partial[Any]") -> Iterator[dict[str, Any]]:
    """Context in which the ranks have joined a process group, if the function asks for it; yields
    the argument that it gets.
    """
    if not accepted_arguments(function, {"process_group": None}):
        yield {}
        return
    alone: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1}
    distributed.init_process_group(**{} if "RANK" in os.environ else alone)
    try:
        yield {"process_group": distributed.group.WORLD}
    finally:
        distributed.destroy_process_group()


@contextlib.contextmanager
def _imports_are_build(clock: PhaseClock) -> Iterator[None]:
    """Context in which imports of this thread count into the clock's build phase.

    Those of installed libraries stop the clock: torch's own are made before a process is forked.
    """
    finder = _TimedImports(clock)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _TimedImports(importlib.abc.MetaPathFinder):
    """Finds modules as Python does, and notes when their code is run."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._thread = threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec, whose loader runs it with the clock in its build phase, or stopped."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        is_timed = self._clock.phase is not None and threading.get_ident() == self._thread
        if is_timed and spec is not None and spec.loader is not None:
            is_library = fullname.partition(".")[0] == "autotune" or str(spec.origin).startswith(
                _LIBRARY_FOLDERS
            )
            run = spec.loader.exec_module

            def timed(module: ModuleType) -> None:
                with self._clock.within(None if is_library else Phase.BUILD):
                    run(module)

            # of this one module's loader
            spec.loader.exec_module = timed  # type: ignore[method-assign]
        return spec


def _evaluation(
    config: TrialConfig,
    values: Any,
    clock: PhaseClock,
    device: torch.device,
    cap_seconds: float,
    previous: Evaluation | None,
) -> Evaluation:
    target = config.target
    named = values if isinstance(values, Mapping) else {}
    if "metric" not in named:
        named = {"metric" if key == target.metric else key: named[key] for key in named}
    if "metric" not in named or not all(isinstance(key, str) for key in named):
        names = sorted(map(str, named))
        found = names if isinstance(values, Mapping) else type(values).__name__
        optional = ", ".join(sorted(REPORTED - {"metric"}))
        raise ConfigError(
            f"training: {_name(config)} reported {found}; report metric (or {target.metric}), any"
            f" of {optional}, and further metrics by name{meant_by(names, target.metric)}"
        )
    numbers = {key: _number(config, key, value) for key, value in named.items()}
    further = {key: number for key, number in numbers.items() if key not in REPORTED}
    loss, samples = numbers.get("loss"), numbers.get("samples")
    bounded = further if loss is None else further | {"loss": loss}
    if missing := sorted(set(target.constraints) - set(bounded)):
        raise ConfigError(
            f"training: {_name(config)} reported no {missing[0]}, which target.constraints bounds"
        )
    return evaluation_of(
        config,
        clock,
        device,
        previous,
        cap_seconds,
        step=int(numbers.get("step", previous.step + 1 if previous else 1)),
        epoch=numbers.get("epoch", 0.0),
        samples=None if samples is None else int(samples),
        metric=as_measured(numbers["metric"]),
        loss=loss,
        energy_joules=clock.joules(Phase.PREPARE, Phase.TRAIN),
        build_joules=clock.joules(Phase.BUILD),
        metrics=further,
        ended=False,
        counts=not target.violations(bounded),
    )


def _number(config: TrialConfig, key: str, value: Any) -> float:
    """A reported value as a float; only metrics and the loss may be NaN or infinite."""
    try:
        number = as_number(key, value)
    except ConfigError as error:
        raise ConfigError(f"training: {_name(config)} {error}") from error
    if key in ("step", "epoch", "samples") and not math.isfinite(number):
        raise ConfigError(f"training: {_name(config)} reported {key}={number}, which is not finite")
    return number


def _name(config: TrialConfig) -> str:
    assert config.training is not None
    return str(config.training["_target_"])
