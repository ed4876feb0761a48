"""Failures that gather on one option of a choice: the search could not tell what such an option is
worth, and says so.

A study goes on when trials fail, and announces a winner. Where all trials with ``mixed=bf16``
raised the same error, that winner is the best of the other options only.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from autotune.outcome import Outcome

_FAILURES = (Outcome.ERRORED, Outcome.OUT_OF_MEMORY, Outcome.INVALID)
"""Outcomes of trials that could not be trained; one that diverged was."""


class EndedTrial(NamedTuple):
    """What of a trial tells whether its failure has to do with an option."""

    values: Mapping[str, str]
    """Text of each value, by config key."""
    outcome: Outcome
    error: str
    """Its error in one line; empty without one."""


def gathered_failures(trials: Iterable[EndedTrial], choices: Collection[str]) -> list[str]:
    """A line for each option of which every trial failed, at least two, while few others did: with
    counts and causes.

    A trial counts for one option only.

    Args:
        choices: config keys of the search space's choices, outer ones first.
    """
    left, lines = list(trials), []
    for key in choices:
        of_options: dict[str | None, list[EndedTrial]] = {}
        for trial in left:
            of_options.setdefault(trial.values.get(key), []).append(trial)
        for option, having in of_options.items():
            others_failed = [
                trial.outcome in _FAILURES for trial in left if trial.values.get(key) != option
            ]
            is_told = (
                len(having) >= 2 and others_failed and sum(others_failed) <= len(others_failed) / 4
            )
            if (
                option is not None
                and is_told
                and all(trial.outcome in _FAILURES for trial in having)
            ):
                lines.append(
                    f"{key}={option}: all of {len(having)} trials failed ({_causes(having)}); it"
                    " was not explored"
                )
                left = [trial for trial in left if trial.values.get(key) != option]
    return lines


def _causes(failed: Sequence[EndedTrial]) -> str:
    causes = []
    for outcome, count in Counter(trial.outcome for trial in failed).most_common():
        error, _ = Counter(trial.error for trial in failed if trial.outcome == outcome).most_common(
            1
        )[0]
        shortened = error if len(error) <= 120 else f"{error[:120]}..."
        causes.append(
            f"{count} {outcome}: {shortened}"
            if error and outcome != Outcome.OUT_OF_MEMORY
            else f"{count} {outcome}"
        )
    return ", ".join(causes)
