"""Failures that gather on one option of a choice: the search could not tell what such an option is worth, and says so.

A study goes on when trials fail, and announces a winner. Where all trials with ``mixed=bf16`` raised the same error, that winner is the
best of the other options only.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from autotune.outcome import Outcome

FAILURES = (Outcome.ERRORED, Outcome.OUT_OF_MEMORY, Outcome.INVALID)
"""Outcomes of trials that could not be trained; one that diverged was."""
_MOST_OF_OTHERS = 0.25
"""Largest fraction of the other trials that may have failed where an option of which every trial failed is told."""
_RARE = 0.01
"""Probability of as many failures by chance below which an option is told that has most of all failures."""
_MAX_CAUSE_CHARACTERS = 120


class EndedTrial(NamedTuple):
    """What of a trial tells whether its failure has to do with an option."""

    values: Mapping[str, str]
    """Text of each value, by config key."""
    outcome: Outcome
    error: str
    """Its error in one line; empty without one."""


def gathered_failures(trials: Iterable[EndedTrial], choices: Collection[str]) -> list[str]:
    """A line for each option that failures gather on, with counts and causes; empty where they are scattered.

    Failures gather on an option if every trial with it failed, at least two, while few others did; or if it has most of all failures,
    and chance would rarely give it as many. A trial counts for one option only.

    Args:
        choices: config keys of the search space's choices, outer ones first.
    """
    left = list(trials)
    lines = []
    while (found := _worst(left, choices)) is not None:
        key, text = found
        lines.append(_line(f"{key}={text}", [trial for trial in left if trial.values.get(key) == text]))
        left = [trial for trial in left if trial.values.get(key) != text]
    return lines


def _worst(trials: Collection[EndedTrial], choices: Collection[str]) -> tuple[str, str] | None:
    """Key and text of the option whose failures are least likely to be chance; None if they gather on none."""
    failed = [trial for trial in trials if trial.outcome in FAILURES]
    num_trials, num_failed = len(trials), len(failed)
    tried, failures = (
        Counter((key, trial.values[key]) for trial in some for key in choices if key in trial.values) for some in (trials, failed)
    )
    found: list[tuple[float, tuple[str, str]]] = []
    for option, count in failures.items():
        num_others, others_failed = num_trials - tried[option], num_failed - count
        chance = math.fsum(
            math.exp(
                _log_choices(num_failed, number)
                + _log_choices(num_trials - num_failed, tried[option] - number)
                - _log_choices(num_trials, tried[option])
            )
            for number in range(count, min(num_failed, tried[option]) + 1)
        )
        has_all = 2 <= count == tried[option] and others_failed <= _MOST_OF_OTHERS * num_others
        has_most = 2 * count > num_failed and chance < _RARE
        if num_others and (has_all or has_most):
            found.append((chance, option))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _log_choices(total: int, chosen: int) -> float:
    """Logarithm of the number of ways to choose so many of a total."""
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)


def _line(option: str, trials: Collection[EndedTrial]) -> str:
    """What is told of an option: how many of its trials failed, and of what."""
    failed = [trial for trial in trials if trial.outcome in FAILURES]
    causes = []
    for outcome, count in Counter(trial.outcome for trial in failed).most_common():
        error, _ = Counter(trial.error for trial in failed if trial.outcome is outcome).most_common(1)[0]
        cause = error if len(error) <= _MAX_CAUSE_CHARACTERS else f"{error[:_MAX_CAUSE_CHARACTERS]}..."
        is_known = outcome is Outcome.OUT_OF_MEMORY or not error
        causes.append(f"{count} {outcome}" if is_known else f"{count} {outcome}: {cause}")
    explored = "; it was not explored" if len(failed) == len(trials) else ""
    return f"{option}: {len(failed)} of {len(trials)} trials failed ({', '.join(causes)}){explored}"
