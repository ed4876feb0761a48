"""How the ranks of a user's training function agree: what the first rank is told of a report, all
are told.

The ranks meet at the first one's store. Each rank may report; the first one's reports count, and
its n-th decision is that of every rank's n-th report. A rank that never reports is not waited for.

A rank waits for another one as long as both live: whoever started them ends all where one has
failed, and at the trial's deadline.
"""

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # missing in torch's stubs
    HashStore,
    Store,
    TCPStore,
)

from autotune.errors import ConfigError, DataError, TimedOutError
from autotune.session import as_number
from autotune.training.main_thread import TrainingEnded

_GO_ON, _END, _GATHER = "go on", "end", "gather"
_STATE = "autotune/state"
_ARRIVE_SECONDS = 5.0
"""Seconds within which the other ranks make their first report after the first rank's, or are
known to make none; later ones may take as long as the longest interval between two reports."""
_MEAN_INTERVALS, _MIN_MEAN_SECONDS = 10.0, 300.0
"""Time that the other ranks may take to give their part of a mean: longest intervals between two
reports so far, and at least so many seconds."""
_MAX_POLL_SECONDS = 0.1
"""Longest time between two looks for what another rank says."""


class LeadingRank:
    """The first rank, whose reports count.

    Args:
        store: where the ranks meet; None if this is the only one.
    """

    def __init__(self, store: TCPStore | None, size: int) -> None:
        self._store: Store = HashStore() if store is None else store
        self._size = size
        self._num_reports = self._num_decisions = 0
        self._reported_at = time.monotonic()
        """When this rank has made its last report, or began."""
        self._longest_seconds = 0.0
        """Longest interval between two reports."""

    def tell_state(self, folder: Path | None) -> None:
        """Tell the other ranks the folder of the state that the training continues from."""
        self._store.set(_STATE, "" if folder is None else str(folder))

    def mean(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The mean over all ranks of what they report now.

        Raises:
            ConfigError: a rank gives nothing for it.
            TimedOutError: a rank does not report in time.
        """
        self._note_interval()
        of_ranks = [{name: as_number(name, value) for name, value in values.items()}]
        for rank in range(1, self._size):
            of_ranks.append(self._shared_by(rank))
            if missing := sorted(values.keys() - of_ranks[-1].keys()):
                found = "has returned" if self._has_ended(rank) else f"reports no {missing[0]}"
                raise ConfigError(
                    f"autotune.report: reduce='mean': rank {rank} {found}; {_EACH_REPORTS}"
                )
        return {name: statistics.fmean(each[name] for each in of_ranks) for name in values}

    def _shared_by(self, rank: int) -> dict[str, float]:
        """What another rank gives for the mean; nothing where it does not call this."""
        key = f"value/{self._num_reports + 1}/{rank}"
        seconds = max(_MIN_MEAN_SECONDS, _MEAN_INTERVALS * self._longest_seconds)
        if self._arrives(key, rank, seconds):
            return dict(json.loads(self._store.get(key)))
        if self._has_ended(rank):
            return {}
        raise TimedOutError(
            f"autotune.report: reduce='mean': rank {rank} did not report within {seconds:.0f} s;"
            f" {_EACH_REPORTS}"
        )

    def _arrives(self, key: str, rank: int, seconds: float) -> bool:
        """Whether another rank says something within so many seconds, and before it returns."""
        return _waited(self._store, key, seconds, lambda: self._has_ended(rank))

    def _has_ended(self, rank: int) -> bool:
        """Whether the function has returned on another rank."""
        return bool(self._store.check([f"ended/{rank}"]))

    def reported(self) -> None:
        """Note that this rank has made one more report, on which no decision was taken yet."""
        self._num_reports += 1
        self._note_interval()

    def _note_interval(self) -> None:
        seconds = time.monotonic() - self._reported_at
        self._longest_seconds = max(self._longest_seconds, seconds)

    def go_on(self) -> None:
        """Tell the other ranks that the training goes on."""
        self._decide(_GO_ON)
        self._reported_at = time.monotonic()

    def end(self) -> None:
        """Tell the other ranks that the training ends."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._decide(_END)

    def can_keep(self, *, is_sharded: bool) -> bool:
        """Whether the ranks can write the training's state now.

        They cannot where one does not see the folder, or does not report, and holds a part of it.
        """
        if any(self._store.check([f"blind/{rank}"]) for rank in range(1, self._size)):
            return False
        return not is_sharded or len(self._reporters()) == self._size - 1

    def gather(self, write: Callable[[], None], *, is_sharded: bool) -> None:
        """Write weights, which all ranks gather if each has a part, or not if one cannot."""
        if not is_sharded:
            write()
        elif self.can_keep(is_sharded=True):
            self.together(_GATHER, write)

    def together(self, request: str, act: Callable[[], None]) -> None:
        """Act while the other ranks that report do what they are asked for: the name of a folder,
        to write their part of the training's state into it, or to gather weights, however long
        that takes.

        Raises:
            DataError: a rank could not.
        """
        reporters = self._reporters()
        self._decide(request)
        number = self._num_decisions
        act()
        for rank in reporters:
            key = f"kept/{number}/{rank}"
            _waited(self._store, key)
            if (error := self._store.get(key).decode()) != "":
                raise DataError(error)

    def _reporters(self) -> list[int]:
        """The ranks that have made the report which this one has made last."""
        found = []
        for rank in range(1, self._size):
            key = f"report/{self._num_reports}/{rank}"
            is_known = self._num_reports == 1 or self._store.check([f"report/1/{rank}"])
            longest = 0.0 if self._num_reports == 1 else self._longest_seconds
            if self._arrives(key, rank, max(_ARRIVE_SECONDS, longest) if is_known else 0.0):
                found.append(rank)
        return found

    def _decide(self, decision: str) -> None:
        self._num_decisions += 1
        if self._size > 1:
            self._store.set(f"decision/{self._num_decisions}", decision)


class FollowingRank:
    """A rank other than the first, which is told what the first one's caller wants.

    Args:
        store: the first rank's store.
        sees_folder: whether this rank can write into the folder of the training's state.
    """

    def __init__(self, store: TCPStore, rank: int, *, sees_folder: bool) -> None:
        self._store, self.rank = store, rank
        self._num_reports = self._num_decisions = 0
        self._has_shared = False
        if not sees_folder:
            store.set(f"blind/{rank}", "")

    def told_state(self) -> Path | None:
        """The folder of the state that the training continues from; None if it begins."""
        told = self._store.get(_STATE).decode()
        return Path(told) if told else None

    def shared(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give the first rank the values that it takes the mean of, and return them."""
        numbers = {name: as_number(name, value) for name, value in values.items()}
        with contextlib.suppress(RuntimeError):  # the first rank is gone
            self._store.set(f"value/{self._num_reports + 1}/{self.rank}", json.dumps(numbers))
        self._has_shared = True
        return numbers

    def end(self) -> None:
        """Note that this rank makes no further report, for which the first one may wait."""
        with contextlib.suppress(RuntimeError):  # the first rank is gone
            self._store.set(f"ended/{self.rank}", "")

    def report(self, keep: Callable[[Path], object], gather: Callable[[], object]) -> None:
        """Wait for the decision on the first rank's report of the same number, however long that
        rank takes.

        Args:
            keep: writes this rank's part of the training's state into a folder.
            gather: gives the first rank this rank's part of the weights.

        Raises:
            TrainingEnded: the training ends.
        """
        if not self._has_shared:
            self.shared({})
        self._has_shared = False
        self._num_reports += 1
        self._store.set(f"report/{self._num_reports}/{self.rank}", "")
        while True:
            self._num_decisions += 1
            key = f"decision/{self._num_decisions}"
            _waited(self._store, key)
            decision = self._store.get(key).decode()
            if decision == _GO_ON:
                return
            if decision == _END:
                raise TrainingEnded
            error = ""
            try:
                gather() if decision == _GATHER else keep(Path(decision))
            except Exception as failure:  # noqa: BLE001  # the first rank raises it
                error = f"rank {self.rank}: {' '.join(str(failure).split())}"
            self._store.set(f"kept/{self._num_decisions}/{self.rank}", error)


def _waited(
    store: Store,
    key: str,
    seconds: float = math.inf,
    is_over: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait until a key is in a store; return whether it came within so many seconds, and before
    something was over.

    The store's own ``wait`` lets no signal be handled, and logs that its time ran out.

    Raises:
        RuntimeError: the process that has the store is gone.
    """
    began = time.monotonic()
    while not store.check([key]):
        waited = time.monotonic() - began
        if waited >= seconds or is_over():
            return bool(store.check([key]))
        # late by 2% of the wait
        time.sleep(min(_MAX_POLL_SECONDS, max(0.001, waited / 50)))
    return True


_EACH_REPORTS = "each process must call report with reduce='mean', as often, with the same names"
