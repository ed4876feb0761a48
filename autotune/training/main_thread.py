"""The main thread of a process in which a user's training function runs, while another thread
answers who asks for its evaluations.

Python handles signals in the main thread only, and many libraries refuse others. So whoever asks
for the next evaluation does so in a second thread, and hands the function over to the main one
(``MainThread``). In a process without one, as in most tests, the function runs in a thread of its
own.
"""

import contextlib
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_CLEAN_UP_SECONDS = 60.0
"""Seconds that a training function may take to end after it was told to."""


class TrainingEnded(BaseException):
    """Raised inside a training function to end it; user code must not catch it."""


class MainThread:
    """This process's main thread, which carries out what its other threads hand to it, one call
    after another.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._before: Any = signal.SIG_DFL
        """What handled SIGINT before."""
        self.is_ending = False
        """Whether this process is about to end."""
        self._runs_function = False

    def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do some work in another thread and return its result; meanwhile the main thread, which
        calls this, carries out what is handed to it.

        Raises:
            BaseException: the work raised it, or a signal's handler.
        """
        if threading.current_thread() is not threading.main_thread():
            return work(*arguments)
        global _main  # noqa: PLW0603  # a process has one main thread
        self._before, _main = signal.signal(signal.SIGINT, self._interrupt), self
        result = in_thread("serve", work, *arguments)
        result.add_done_callback(lambda _: self._calls.put(None))
        try:
            while (call := self._calls.get()) is not None:
                call()
                if self.is_ending:
                    raise SystemExit(0)
            return result.result()
        finally:
            _main = None
            signal.signal(signal.SIGINT, self._before)

    def start(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Have the main thread call a function, once it has done what it was handed before."""
        result: Future[T] = Future()
        self._calls.put(lambda: _settle(result, function, *arguments))
        return result

    def end(self) -> None:
        """End this process: a training function within ``endable`` is raised ``TrainingEnded``, and
        may clean up; without one the process exits at once.
        """
        self.is_ending = True
        if not self._runs_function:
            os._exit(0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # ends a sleep, too

    @contextlib.contextmanager
    def endable(self) -> Iterator[None]:
        """Context of a user's training function, which ``end`` ends."""
        self._runs_function = True
        try:
            yield
        finally:
            self._runs_function = False

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT, unless the user's code sets a handler of its own."""
        if not self.is_ending:
            if callable(self._before):
                self._before(number, frame)
        elif self._runs_function:
            raise TrainingEnded


_main: MainThread | None = None
"""The one that runs now."""


def is_owner_gone() -> bool:
    """Whether this process ends because whoever asked for its evaluations is gone."""
    return _main is not None and _main.is_ending


def in_main_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in the main thread that a ``MainThread`` has at hand, or else here."""
    return function(*arguments) if _main is None else _main.start(function, *arguments).result()


def endable() -> contextlib.AbstractContextManager[None]:
    """Context of a user's training function, which ends if its process is to end meanwhile."""
    return contextlib.nullcontext() if _main is None else _main.endable()


def reported_by(function: Callable[[Callable[[T], None]], Any]) -> Generator[T, None, None]:
    """Yield what a function reports by its argument.

    The function runs in the main thread, or in one of its own. It stands still inside its report
    until the next one is asked for.
    """
    reported: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
    requests: queue.SimpleQueue[None] = queue.SimpleQueue()
    is_over = threading.Event()

    def report(value: T) -> None:
        if not is_over.is_set():
            reported.put((value,))
            requests.get()
        if is_over.is_set():  # raised again if the function catches the first one and reports again
            raise TrainingEnded

    def run() -> None:
        requests.get()
        raised, process = None, os.getpid()
        try:
            if not is_over.is_set():
                function(report)
        except TrainingEnded:
            pass
        except BaseException as error:  # noqa: BLE001  # the generator raises it again
            raised = error
        if os.getpid() != process:  # a copy of this one, which the function has forked
            if raised is not None:
                traceback.print_exception(raised)
            os._exit(raised is not None)
        reported.put(raised)

    ended = in_thread("training", run) if _main is None else _main.start(run)
    try:
        requests.put(None)
        while (values := reported.get()) is not None:
            if isinstance(values, BaseException):
                raise values
            yield values[0]
            requests.put(None)
    finally:
        is_over.set()
        requests.put(None)
        wait([ended], _CLEAN_UP_SECONDS)


def in_thread(name: str, function: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Call a function in a new thread, which ends with the process at the latest."""
    result: Future[T] = Future()
    settle = threading.Thread(
        target=_settle, args=(result, function, *arguments), name=name, daemon=True
    )
    settle.start()
    return result


def _settle(result: "Future[T]", function: Callable[..., T], *arguments: Any) -> None:
    """Call a function, and give a future what it returns or raises."""
    try:
        result.set_result(function(*arguments))
    except BaseException as error:  # noqa: BLE001  # whoever asks for the result gets it
        result.set_exception(error)
