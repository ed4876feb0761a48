"""Confirmation as a race: which configuration is run again next, which one wins, and which runs its claim is made of.

The candidates race first, the baseline is compared with the winner alone: choosing among candidates needs no baseline, and runs of the
winner that had a part in choosing it flatter it.

* **Choosing**: in rounds on common seeds, in turns. After some rounds the worse half leaves, and whoever is clearly behind leaves at once
  (successive halving), until one is left or the runs for choosing are spent. What the search expected of a candidate counts as
  as many runs as reached the target there.
* **Claiming**: pairs of runs of the baseline and the winner on seeds that had no part in choosing, as many as should tell the two apart by
  the gain that choosing has shown. That gain is settled before the first pair, and only how much scores vary is looked at once more, after
  the fourth: so the interval of their ratio is an honest one (an internal pilot study).

A race keeps no state: where it stands follows from its entrants, its limits and the runs that were made, so that it goes on in another
process exactly where it stood.

Source: Karnin, Koren and Somekh, Almost Optimal Exploration in Multi-Armed Bandits (ICML 2013), sequential halving; Cohen and Sackrowitz
(Statistics and Probability Letters 8, 1989), on claims from the stage that did not choose; Wittes and Brittain, The role of internal pilot
studies (Statistics in Medicine 9, 1990).
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autotune.comparison import RunScore, in_turns

LEAST_PAIRS = 4
"""Of runs that a claim is made of, unless the user asks for fewer."""
_TRIED_PAIRS = 2
"""Pairs after which a winner that reached the target in none of them gives way to the next best."""
_CLAIM_SHARE = 0.45
"""Of the runs, or of their seconds, that is kept for the claim while candidates are chosen from."""
_PRIOR_RUNS = 2.0
_PRIOR_REACHED = 1.6
"""How often a configuration that reached the target in the search is expected to: a prior worth two runs."""
_PRIOR_SD = 0.2
_PRIOR_SD_RUNS = 4
"""Standard deviation of the logarithm of a configuration's score, before its runs are seen, and how many runs that is worth."""
_BEHIND = 2.0
"""Standard errors behind the best at which a candidate leaves at once."""
_HOPED_SHARE = 0.75
"""Of the logarithm of the gain that choosing showed, what the claim should be able to tell from none: the search flatters."""
_POWER = 1.28
"""Standard errors by which that gain should clear the interval's reach: nine times out of ten."""
_OVERTIME = 2.0
"""Times the seconds of all runs that a claim may take whose first pairs vary more than choosing has shown."""
_MOST_PAIRS = 200


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A configuration that races, or the baseline."""

    arm: int
    expected_score: float
    """What the search expects its score to be; infinite where it never reached the target."""
    run_seconds: float
    """Seconds of training that a run of it is expected to take."""
    num_runs: int = 1
    """Runs that reached the target in the search, whose expectation counts as so many."""
    least_score: float = 0.0
    """What its trial had spent when it ended, in the unit of scores, where it never reached the target."""


@dataclass(frozen=True, kw_only=True)
class RaceLimits:
    """What a race may cost."""

    max_runs: int
    max_seconds: float = math.inf
    """Seconds of training, all runs together. The least that a claim needs is run all the same, and one whose first pairs vary more than
    choosing has shown may take up to twice as many."""
    num_pairs: int | None = None
    """Pairs of runs that the claim is made of; None for as many as should tell winner and baseline apart."""
    min_reach_rate: float = 0.0
    """Share of runs that must reach the target."""


class Run(NamedTuple):
    """What a run came to."""

    score: RunScore
    train_seconds: float


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a race stands."""

    pending: tuple[tuple[int, int], ...]
    """Arm and round of the runs that come next, in the order to make them; none where the race is over."""
    num_runs: int
    """Runs that the race will have taken in all, as far as that is known now."""
    winner: int | None
    """The arm that was chosen; None while that is open, or where there is no candidate."""
    claim_rounds: tuple[int, ...]
    """The rounds whose runs the claim is made of."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Why candidates left, by arm."""
    is_baseline_better: bool = False
    """Once it is over: whether the baseline scored better than the winner, all runs taken together."""


def standing(baseline: Entrant, candidates: Sequence[Entrant], limits: RaceLimits, runs: Mapping[tuple[int, int], Run]) -> Standing:
    """Where a race stands once these runs are made.

    Args:
        candidates: any number, in any order.
        runs: by arm and number of the round, from 0.
    """
    return _Race(baseline, candidates, limits, runs).standing()


class _Race:
    """One pass over the runs of a race, from its start to where it stands."""

    def __init__(self, baseline: Entrant, candidates: Sequence[Entrant], limits: RaceLimits, runs: Mapping[tuple[int, int], Run]) -> None:
        self._baseline = baseline
        self._ordered = sorted(candidates, key=lambda entrant: entrant.expected_score)
        self._limits = limits
        self._known = runs
        self._taken: dict[int, list[Run]] = {entrant.arm: [] for entrant in [baseline, *candidates]}
        self._num_chosen_by: dict[int, int] = {}
        """Runs of an arm before its claim."""
        self._expected = {entrant.arm: entrant.expected_score for entrant in [baseline, *candidates]}
        self._reasons: dict[int, str] = {}
        self._abandoned: set[int] = set()
        """Arms that were chosen and then fell short."""
        self._round = 0

    def standing(self) -> Standing:
        """Go through the race as far as its runs are known."""
        chosen = self._choose() if self._ordered else None
        return chosen if isinstance(chosen, Standing) else self._claim(chosen)

    def _choose(self) -> Entrant | Standing:
        """Choose a winner, or say which runs that still needs."""
        limits, pair_seconds = self._limits, self._baseline.run_seconds + self._ordered[0].run_seconds
        num_pairs = limits.num_pairs or max(LEAST_PAIRS, round(_CLAIM_SHARE * limits.max_runs / 2))
        claim_seconds = min(num_pairs * pair_seconds, max(_CLAIM_SHARE * limits.max_seconds, LEAST_PAIRS * pair_seconds))
        runs_left, seconds_left = limits.max_runs - 2 * num_pairs, limits.max_seconds - claim_seconds
        racing = list(self._ordered)
        while len(racing) > 1 and not _fits(racing, runs_left, seconds_left):
            self._reasons[racing.pop().arm] = "not run: the limits leave no runs for it, and the search expected more of the others"
        while len(racing) > 1:
            halvings = math.ceil(math.log2(len(racing)))
            round_seconds = sum(entrant.run_seconds for entrant in racing)
            affordable = min(runs_left / len(racing), seconds_left / round_seconds if round_seconds > 0 else math.inf)
            for _ in range(max(1, int(affordable / halvings))):
                pending = self._pending([entrant.arm for entrant in racing], self._round)
                if pending:
                    least = sum(_halving_sizes(len(racing))) - (len(racing) - len(pending)) + 2 * num_pairs
                    return Standing(
                        pending=pending, num_runs=self._num_taken + least, winner=None, claim_rounds=(), reasons=dict(self._reasons)
                    )
                for entrant in racing:
                    run = self._known[entrant.arm, self._round]
                    self._taken[entrant.arm].append(run)
                    runs_left, seconds_left = runs_left - 1, seconds_left - run.train_seconds
                self._round += 1
                racing = self._without_those_behind(racing)
                if len(racing) == 1:
                    break
            self._halve(racing)
            racing = [entrant for entrant in racing if entrant.arm not in self._reasons]
        return racing[0]

    def _claim(self, winner: Entrant | None) -> Standing:
        """The winner's pairs with the baseline; the baseline's runs alone where there is no candidate."""
        arms = [self._baseline.arm] if winner is None else [self._baseline.arm, winner.arm]
        needed = self._needed_pairs(winner)
        rounds = tuple(range(self._round, self._round + needed(1.0)))
        if winner is not None and (next_best := self._next_best(winner, rounds)) is not None:
            self._take(arms, rounds[:_TRIED_PAIRS])
            self._round += _TRIED_PAIRS
            self._reasons[winner.arm] = f"left after round {self._round}: chosen, and short of the target in the first rounds of its claim"
            self._abandoned.add(winner.arm)
            self._reasons.pop(next_best.arm)
            return self._claim(next_best)
        self._num_chosen_by |= {arm: len(self._taken[arm]) for arm in arms if arm not in self._num_chosen_by}
        first, rest = rounds[:LEAST_PAIRS], rounds[LEAST_PAIRS:]
        self._take(arms, first)
        if all((arm, number) in self._known for arm in arms for number in first):
            rounds = tuple(range(self._round, self._round + max(len(rounds), needed(_OVERTIME))))
            rest = rounds[LEAST_PAIRS:]
        pending = tuple(each for number in rounds for each in self._pending(arms, number))
        self._take(arms, rest)
        is_baseline_better = winner is not None and self._rank(self._baseline) < self._rank(winner)
        return Standing(
            pending=pending,
            num_runs=self._num_taken + len(pending),
            winner=None if winner is None else winner.arm,
            claim_rounds=rounds,
            reasons=dict(self._reasons),
            is_baseline_better=is_baseline_better and not pending,
        )

    def _take(self, arms: Sequence[int], rounds: Sequence[int]) -> None:
        for number in rounds:
            for arm in arms:
                if (arm, number) in self._known:
                    self._taken[arm].append(self._known[arm, number])

    def _next_best(self, winner: Entrant, rounds: Sequence[int]) -> Entrant | None:
        """Who takes the winner's place, where it fell short in all the first rounds of its claim; None where it stays."""
        tried = [self._known.get((arm, number)) for number in rounds[:_TRIED_PAIRS] for arm in (winner.arm, self._baseline.arm)]
        is_short = None not in tried and not any(run.score.reached for run in tried[::2] if run is not None)
        runs_left = self._limits.max_runs - self._num_taken - len(tried)
        if not is_short or len(rounds) <= _TRIED_PAIRS or runs_left < 2 * _TRIED_PAIRS:
            return None
        others = [entrant for entrant in self._ordered if entrant is not winner and self._taken[entrant.arm]]
        return min((each for each in others if each.arm not in self._abandoned), key=self._rank, default=None)

    @property
    def _num_taken(self) -> int:
        return sum(map(len, self._taken.values()))

    def _pending(self, arms: Sequence[int], number: int) -> tuple[tuple[int, int], ...]:
        """The runs of a round that were not made yet; each round begins with another arm."""
        turns = [arms[turn] for turn, at in in_turns(len(arms), number + 1) if at == number]
        return tuple((arm, number) for arm in turns if (arm, number) not in self._known)

    def _needed_pairs(self, winner: Entrant | None) -> Callable[[float], int]:
        """What tells how many pairs should tell winner and baseline apart, by how scores vary so far, in so many times the seconds allowed.

        The gain that they should tell is the one that choosing has shown, whatever the pairs show of it.
        """
        limits, runs_left = self._limits, self._limits.max_runs - self._num_taken
        if limits.num_pairs is not None or winner is None:
            num_pairs = limits.num_pairs or LEAST_PAIRS
            num_pairs = min(num_pairs, runs_left // 2) if self._abandoned else num_pairs
            return lambda overtime: num_pairs
        pair_seconds = self._baseline.run_seconds + winner.run_seconds
        spent = math.fsum(run.train_seconds for runs in self._taken.values() for run in runs)
        least = min(LEAST_PAIRS, runs_left // 2)
        baseline_score = self._score(self._baseline)
        gain = (baseline_score if math.isfinite(baseline_score) else self._baseline.least_score) / self._score(winner)
        hoped = math.log(gain) * _HOPED_SHARE if gain > 1 else 0.0

        def needed(overtime: float) -> int:
            affordable = (overtime * limits.max_seconds - spent) / pair_seconds if pair_seconds > 0 else math.inf
            most = max(least, int(min(runs_left // 2, affordable, _MOST_PAIRS)))
            deviation = math.sqrt(sum(self._variance(each) + self._variance_of_misses_to_come(each) for each in (self._baseline, winner)))
            return next((count for count in range(least, most) if _reach(count, deviation) <= hoped), most)

        return needed

    def _without_those_behind(self, racing: list[Entrant]) -> list[Entrant]:
        """Those that may still be the best; why the others leave is noted."""
        best = min(racing, key=self._rank)
        for entrant in racing:
            gap = math.log(self._score(entrant) / self._score(best)) if self._score(entrant) < math.inf else math.inf
            error = math.sqrt(sum(self._variance(each) / (len(self._taken[each.arm]) + each.num_runs) for each in (entrant, best)))
            if entrant is not best and gap > _BEHIND * error:
                self._reasons[entrant.arm] = f"left after round {self._round}: clearly behind"
        return [entrant for entrant in racing if entrant.arm not in self._reasons]

    def _halve(self, racing: list[Entrant]) -> None:
        for entrant in sorted(racing, key=self._rank)[math.ceil(len(racing) / 2) :]:
            below = self._rank(entrant)[0]
            why = f"reached too rarely, confirm.min_reach_rate is {self._limits.min_reach_rate:g}" if below else "in the slower half"
            self._reasons[entrant.arm] = f"left after round {self._round}: {why}"

    def _rank(self, entrant: Entrant) -> tuple[bool, float]:
        """Less is better: whether it reaches too rarely, then its score."""
        runs = self._taken[entrant.arm]
        rate = sum(run.score.reached for run in runs) / len(runs) if runs else 1.0
        return rate < self._limits.min_reach_rate, self._score(entrant)

    def _score(self, entrant: Entrant) -> float:
        """What a success of it is expected to cost, with what the search expected as runs that reached and a prior of reaching."""
        runs = self._taken[entrant.arm]
        spent = [run.score.score for run in runs if run.score.score is not None]
        num_reached = sum(run.score.reached for run in runs)
        if math.isfinite(entrant.expected_score):
            spent += [entrant.expected_score] * entrant.num_runs
            num_reached += entrant.num_runs
        if not spent:
            return math.inf
        num_runs = len(runs) + entrant.num_runs
        return math.fsum(spent) / len(spent) * (num_runs + _PRIOR_RUNS) / (num_reached + _PRIOR_REACHED)

    def _variance(self, entrant: Entrant) -> float:
        """Of the logarithm of what one run says of the expected score: how scores vary, and whether runs reach."""
        squares, degrees = _PRIOR_SD**2 * _PRIOR_SD_RUNS, float(_PRIOR_SD_RUNS)
        for scores in self._repeats():
            logarithms = [math.log(score) for score in scores if 0 < score < math.inf]
            if len(logarithms) > 1:
                mean = math.fsum(logarithms) / len(logarithms)
                squares += math.fsum((each - mean) ** 2 for each in logarithms)
                degrees += len(logarithms) - 1
        return squares / degrees + self._variance_of_missing(entrant)

    def _variance_of_missing(self, entrant: Entrant) -> float:
        """What runs that fall short add: one is a success less, and most often it has spent more than a success does."""
        runs = [run.score for run in self._taken[entrant.arm]]
        if all(run.reached for run in runs):
            return 0.0
        rate = (sum(run.reached for run in runs) + _PRIOR_REACHED) / (len(runs) + _PRIOR_RUNS)
        reached, missed = ([run.score for run in runs if run.reached is each and run.score is not None] for each in (True, False))
        dearer = 0.0
        if reached and missed and (mean := statistics.fmean(reached + missed)) > 0:
            dearer = (statistics.fmean(missed) - statistics.fmean(reached)) / mean
        return rate * (1 - rate) * (1 / rate + dearer) ** 2

    def _variance_of_misses_to_come(self, entrant: Entrant) -> float:
        """What misses may yet add for an arm that has had none, where others have: its rate has a prior of two runs like theirs."""
        runs, others = self._taken[entrant.arm], [run for taken in self._taken.values() for run in taken]
        num_missed = sum(not run.score.reached for run in others)
        if not num_missed or not all(run.score.reached for run in runs):
            return 0.0
        pooled = (len(others) - num_missed + _PRIOR_REACHED) / (len(others) + _PRIOR_RUNS)
        rate = (len(runs) + _PRIOR_RUNS * pooled) / (len(runs) + _PRIOR_RUNS)
        return (1 - rate) / rate

    def _repeats(self) -> Iterator[list[float]]:
        """Scores of equal configurations: while choosing, with what the search expected; of the claim's pairs, apart from all before."""
        for arm, runs in self._taken.items():
            scores = [run.score.score or 0.0 for run in runs if run.score.reached]
            num_claimed = sum(run.score.reached for run in runs[self._num_chosen_by.get(arm, len(runs)) :])
            yield [self._expected[arm], *scores[: len(scores) - num_claimed]]
            yield scores[len(scores) - num_claimed :]


def _halving_sizes(count: int) -> list[int]:
    """How many race in each round where one round is run before each halving."""
    sizes = []
    while count > 1:
        sizes.append(count)
        count = math.ceil(count / 2)
    return sizes


def _fits(racing: Sequence[Entrant], num_runs: float, seconds: float) -> bool:
    """Whether these can be halved down to one, a round before each halving."""
    sizes = _halving_sizes(len(racing))
    return sum(sizes) <= num_runs and sum(entrant.run_seconds for size in sizes for entrant in racing[:size]) <= seconds


def _reach(num_pairs: int, deviation: float) -> float:
    """Gain, as a logarithm, that so many pairs should tell from none."""
    from scipy.special import stdtrit  # noqa: PLC0415  # a third of a second to import, wanted once a study

    return (float(stdtrit(num_pairs - 1, 0.975)) + _POWER) * deviation / math.sqrt(num_pairs)


def run_race(
    baseline: Entrant, candidates: Sequence[Entrant], limits: RaceLimits, judge: Callable[[tuple[int, int]], Run]
) -> tuple[Standing, dict[tuple[int, int], Run]]:
    """Run a whole race with runs that ``judge`` makes of an arm and a round on the spot, as simulations do.

    Returns:
        Where it ended, and its runs by arm and round.
    """
    runs: dict[tuple[int, int], Run] = {}
    while (now := standing(baseline, candidates, limits, runs)).pending:
        runs[now.pending[0]] = judge(now.pending[0])
    return now, runs
