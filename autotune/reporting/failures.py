"""Failures that gather on one option of a choice: the search could not tell what such an option is
worth, and says so.

A study goes on when trials fail, and announces a winner. Where all trials with ``mixed=bf16``
raised the same error, that winner is the best of the other options only.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from autotune.measurement import TrialResult
from autotune.outcome import Outcome
from autotune.space import override_text

_FAILURES = (Outcome.ERRORED, Outcome.OUT_OF_MEMORY, Outcome.INVALID)
"""Outcomes of trials that could not be trained; one that diverged was."""


def gathered_failures(results: Iterable[TrialResult], choices: Collection[str]) -> list[str]:
    """A line for each option of which every trial failed, at least two, while few others did: with
    counts and causes.

    A trial counts for one option only.

    Args:
        choices: config keys of the search space's choices, outer ones first.
    """
    remaining, lines = list(results), []
    for key in choices:
        options = defaultdict(list)
        for result in remaining:
            if key in result.values:
                options[override_text(result.values[key])].append(result)
        for option, trials in options.items():
            numbers = {result.trial for result in trials}
            others = [result for result in remaining if result.trial not in numbers]
            num_failed = sum(result.outcome in _FAILURES for result in others)
            is_told = len(trials) >= 2 and others and num_failed <= len(others) / 4
            if is_told and all(result.outcome in _FAILURES for result in trials):
                lines.append(
                    f"{key}={option}: all of {len(trials)} trials failed ({_causes(trials)}); it"
                    " was not explored"
                )
                remaining = others
    return lines


def _causes(failed: Sequence[TrialResult]) -> str:
    causes = []
    for outcome, count in Counter(result.outcome for result in failed).most_common():
        errors = Counter(result.error_line for result in failed if result.outcome is outcome)
        [(error, _)] = errors.most_common(1)
        is_told = error and outcome is not Outcome.OUT_OF_MEMORY
        shortened = error if len(error) <= 120 else f"{error[:120]}..."
        causes.append(f"{count} {outcome}{f': {shortened}' if is_told else ''}")
    return ", ".join(causes)
