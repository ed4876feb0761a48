"""Confirmation as a race: which configuration runs next, which one wins, and which runs the claim about the winner is computed from.

The candidates race first, and only the winner is compared with the baseline: choosing among candidates needs no baseline, and the runs by
which the winner was chosen flatter it.

* **Choosing**: candidates run in turns, in rounds on common seeds. After some rounds the worse half leaves, and a candidate that is clearly
  behind leaves at once (successive halving), until one is left or the runs for choosing are spent. What the search expected of a
  candidate was picked for its luck: it says who races where the limits do not suffice for all, and nothing of who wins.
* **Claiming**: pairs of runs of the baseline and the winner on seeds that had no part in choosing, as many as should tell the two apart if
  the gain is the one seen while choosing. That gain is fixed before the first pair; only how much the pairs vary is estimated again, after
  the fourth pair and then halfway to those that are still needed, so that the interval of the ratio is honest (an internal pilot study). If
  another candidate is better by all its runs than the winner by all of its own, those of the claim included, the claim is begun again with
  that one, on further seeds.

A race keeps no state: its standing follows from its entrants, its limits and the runs so far, so another process continues it exactly
where it stopped.

Source: Karnin, Koren and Somekh, Almost Optimal Exploration in Multi-Armed Bandits (ICML 2013), sequential halving; Cohen and Sackrowitz
(Statistics and Probability Letters 8, 1989), on claims from the stage that did not choose; Wittes and Brittain, The role of internal pilot
studies (Statistics in Medicine 9, 1990).
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from autotune.comparison import RunScore, deviation_of_pairs, in_turns

MIN_PAIRS = 4
"""Minimum number of pairs that a claim is computed from, unless the user asks for fewer."""
_TRIED_PAIRS = 2
"""Number of pairs after which a winner is first compared with the others, and replaced if it reached the target in none of them."""
_FIRST_ROUNDS = 2
"""Least number of rounds before the worse half leaves for the first time; where the limits leave no room for it, fewer candidates race."""
_TURNED = 1.0
"""Distance of the winner behind another candidate, in standard errors, at which its claim is begun again with that one."""
_CLAIM_SHARE = 0.45
"""Share of the runs, and of their seconds, that is reserved for the claim during choosing."""
_PRIOR_RUNS = 2.0
_PRIOR_REACHED = 1.6
"""Prior of reaching the target, for a configuration that reached it in the search: 1.6 out of two runs."""
_PRIOR_SD = 0.2
_PRIOR_SD_RUNS = 4
"""Prior standard deviation of the logarithm of a configuration's score: ``_PRIOR_SD``, worth ``_PRIOR_SD_RUNS`` runs."""
_BEHIND_AFTER_ONE, _BEHIND = 4.0, 2.0
"""Distances behind the best candidate, in standard errors, at which a candidate leaves at once: after its first run, and later."""
_HOPED_SHARE = 0.75
"""Share of the gain seen while choosing, as a logarithm, that the claim should tell from no gain: the search overestimates it."""
_POWER = 1.28
"""Standard errors by which that gain should exceed the interval's half width, so that the claim shows it nine times out of ten."""
_OVERTIME = 2.0
"""Factor on the limit of seconds for a claim whose first pairs vary more than the runs of choosing did."""
_MAX_PAIRS = 200


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A configuration in the race: a candidate or the baseline."""

    arm: int
    expected_score: float
    """Score that the search expects of the configuration; infinite if it never reached the target. Of a candidate it is an order only."""
    run_seconds: float
    """Seconds of training that a run of the configuration is expected to take."""
    least_score: float = 0.0
    """Lower bound of the score if the configuration never reached the target: what its trial had spent, in the unit of scores."""


@dataclass(frozen=True, kw_only=True)
class RaceLimits:
    """Limits on what a race may cost."""

    max_runs: int
    max_seconds: float = math.inf
    """Seconds of training of all runs together. The fewest pairs that a claim needs are run in any case, and a claim whose first pairs vary
    more than the runs of choosing did may take the race to twice as many seconds."""
    num_pairs: int | None = None
    """Number of pairs of runs for the claim; None means as many as should tell winner and baseline apart."""
    min_reach_rate: float = 0.0
    """Share of a candidate's runs that must reach the target."""


class Run(NamedTuple):
    """Score of one run, and the seconds that count against ``RaceLimits.max_seconds``."""

    score: RunScore
    train_seconds: float


@dataclass(frozen=True, kw_only=True)
class Standing:
    """State of a race after the runs made so far."""

    pending: tuple[tuple[int, int], ...]
    """Arm and round of the next runs, in the order of execution; empty when the race is over."""
    num_runs: int
    """Total number of runs that the race will take, as far as it is known now."""
    winner: int | None
    """The arm that was chosen; None while choosing, or without any candidate."""
    claim_rounds: tuple[int, ...]
    """The rounds whose runs the claim is computed from."""
    look: int = MIN_PAIRS
    """Number of the claim's rounds after which it is next decided how it goes on."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Reason why each candidate left, by arm."""
    is_baseline_better: bool = False
    """Whether the baseline scored better than the winner over all runs of the finished race; False before its end."""

    ahead: tuple[tuple[int, int], ...] = ()
    """Arm and round of the runs that follow while choosing unless a candidate leaves before, whose runs are then not used."""

    def batch(self, num_devices: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The runs to make side by side next, in units that belong on one device: single runs while choosing, pairs in the claim.

        These are the runs of a round, or the pairs of the claim up to its next look, which decide how the race goes on, and others for the
        devices that would be idle meanwhile.
        """
        if self.claim_rounds:
            units = tuple(tuple(pair) for _, pair in groupby(self.pending, key=itemgetter(1)))
            num_needed = sum(unit[0][1] in self.claim_rounds[: self.look] for unit in units)
        else:
            units, num_needed = tuple((run,) for run in (*self.pending, *self.ahead)), len(self.pending)
        return units[: math.ceil(num_needed / num_devices) * num_devices]


def standing(baseline: Entrant, candidates: Sequence[Entrant], limits: RaceLimits, runs: Mapping[tuple[int, int], Run]) -> Standing:
    """Standing of a race after the given runs.

    Args:
        candidates: any number of them, in any order.
        runs: runs made so far, by arm and number of the round, from 0.
    """
    return _Race(baseline, candidates, limits, runs).standing()


class _Race:
    """One pass over the runs of a race, from its start to its present standing."""

    def __init__(self, baseline: Entrant, candidates: Sequence[Entrant], limits: RaceLimits, runs: Mapping[tuple[int, int], Run]) -> None:
        self._baseline = baseline
        self._ordered = sorted(candidates, key=lambda entrant: entrant.expected_score)
        self._limits = limits
        self._known = runs
        self._taken: dict[int, list[Run]] = {entrant.arm: [] for entrant in [baseline, *candidates]}
        self._num_before_claim: dict[int, int] = {}
        """Number of runs of each arm before its claim."""
        self._reasons: dict[int, str] = {}
        self._num_claims = 1
        self._round = 0

    def standing(self) -> Standing:
        """Go through the race as far as its runs are known, and return its standing."""
        chosen = self._choose() if self._ordered else None
        return chosen if isinstance(chosen, Standing) else self._claim(chosen)

    def _choose(self) -> Entrant | Standing:
        """Choose a winner among the candidates; return a standing instead if that needs more runs."""
        limits, pair_seconds = self._limits, self._baseline.run_seconds + self._ordered[0].run_seconds
        num_pairs = limits.num_pairs or max(MIN_PAIRS, round(_CLAIM_SHARE * limits.max_runs / 2))
        claim_seconds = min(num_pairs * pair_seconds, max(_CLAIM_SHARE * limits.max_seconds, MIN_PAIRS * pair_seconds))
        runs_left, seconds_left = limits.max_runs - 2 * num_pairs, limits.max_seconds - claim_seconds
        racing = list(self._ordered)
        while len(racing) > 1 and not _fits(racing, runs_left, seconds_left):
            self._reasons[racing.pop().arm] = "not run: the limits leave no runs for it, and the search expected more of the others"
        while len(racing) > 1:
            halvings = math.ceil(math.log2(len(racing)))
            round_seconds = sum(entrant.run_seconds for entrant in racing)
            affordable = min(runs_left / len(racing), seconds_left / round_seconds if round_seconds > 0 else math.inf)
            num_rounds = max(1, _FIRST_ROUNDS - self._round, int(affordable / halvings))
            for number in range(num_rounds):
                arms = [entrant.arm for entrant in racing]
                pending = self._pending(arms, self._round)
                if pending:
                    following = range(self._round + 1, self._round + num_rounds - number)
                    least_rounds = max(1, _FIRST_ROUNDS - self._round)
                    least = sum(_halving_sizes(len(racing), least_rounds)) - (len(racing) - len(pending)) + 2 * num_pairs
                    return Standing(
                        pending=pending,
                        num_runs=self._num_taken + least,
                        winner=None,
                        claim_rounds=(),
                        reasons=dict(self._reasons),
                        ahead=tuple(run for later in following for run in self._pending(arms, later)),
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
        others = [entrant.arm for entrant in self._ordered if entrant is not racing[0]]
        while any((arm, self._round) in self._known for arm in others):  # a round that was made ahead, and that nobody needed
            self._round += 1
        return racing[0]

    def _claim(self, winner: Entrant | None) -> Standing:
        """Standing of the claim: pairs of the winner and the baseline, or runs of the baseline alone without any candidate."""
        arms = [self._baseline.arm] if winner is None else [self._baseline.arm, winner.arm]
        num_pairs_needed = self._pairs_needed(winner)
        num_pairs, taken, look = num_pairs_needed(1.0, ()), 0, _TRIED_PAIRS
        self._num_before_claim |= {arm: len(self._taken[arm]) for arm in arms}
        while True:
            rounds = tuple(range(self._round, self._round + num_pairs))
            pending = tuple(run for number in rounds for run in self._pending(arms, number))
            self._take(arms, rounds[taken:look])
            taken = min(look, num_pairs)
            if any(number in rounds[:look] for _, number in pending):
                self._take(arms, rounds[look:])
                break
            if winner is not None and (better := self._better(winner, rounds[:taken])) is not None:
                return self._claim_of_another(winner, better, rounds[taken - 1])
            if taken >= MIN_PAIRS:
                num_pairs = max(taken, num_pairs_needed(_OVERTIME, rounds[:taken]))
            if taken == num_pairs:
                rounds, pending = rounds[:taken], ()
                break
            is_fixed = self._limits.num_pairs is not None
            look = MIN_PAIRS if taken < MIN_PAIRS else num_pairs if is_fixed else taken + math.ceil((num_pairs - taken) / 2)
        is_baseline_better = winner is not None and self._rank(self._baseline) < self._rank(winner)
        return Standing(
            pending=pending,
            num_runs=self._num_taken + len(pending),
            winner=None if winner is None else winner.arm,
            claim_rounds=rounds,
            look=max(look, MIN_PAIRS),
            reasons=dict(self._reasons),
            is_baseline_better=is_baseline_better and not pending,
        )

    def _take(self, arms: Sequence[int], rounds: Sequence[int]) -> None:
        for number in rounds:
            for arm in arms:
                if (arm, number) in self._known:
                    self._taken[arm].append(self._known[arm, number])

    def _better(self, winner: Entrant, rounds: Sequence[int]) -> Entrant | None:
        """The candidate that is better by all its runs than the winner, after some pairs of its claim; None if the winner stays."""
        others = [entrant for entrant in self._ordered if entrant is not winner and self._taken[entrant.arm]]
        num_pairs = self._limits.num_pairs or MIN_PAIRS
        seconds = self._spent_seconds + num_pairs * (self._baseline.run_seconds + winner.run_seconds)
        if not others or self._limits.max_runs - self._num_taken < 2 * num_pairs or seconds > _OVERTIME * self._limits.max_seconds:
            return None
        best = min(others, key=self._rank)
        is_short = not any(self._known[winner.arm, number].score.reached for number in rounds)
        is_rare, best_is_rare = self._rank(winner)[0], self._rank(best)[0]
        is_turned = best_is_rare < is_rare or (best_is_rare == is_rare and self._is_behind(winner, best, _TURNED))
        return best if is_short or is_turned else None

    def _claim_of_another(self, winner: Entrant, better: Entrant, last_round: int) -> Standing:
        """Standing of the claim of a better candidate, on the rounds that follow the last one of the former winner's."""
        self._round = last_round + 1
        self._num_claims += 1
        self._reasons[winner.arm] = f"left after round {self._round}: chosen, and behind another one in its claim"
        self._reasons.pop(better.arm)
        return self._claim(better)

    @property
    def _num_taken(self) -> int:
        return sum(map(len, self._taken.values()))

    @property
    def _spent_seconds(self) -> float:
        return math.fsum(run.train_seconds for runs in self._taken.values() for run in runs)

    def _pending(self, arms: Sequence[int], number: int) -> tuple[tuple[int, int], ...]:
        """Arm and round of the runs of one round that were not made yet; each round begins with another arm."""
        ordered_arms = [arms[turn] for turn, at in in_turns(len(arms), number + 1) if at == number]
        return tuple((arm, number) for arm in ordered_arms if (arm, number) not in self._known)

    def _pairs_needed(self, winner: Entrant | None) -> Callable[[float, Sequence[int]], int]:
        """How many pairs should tell winner and baseline apart: a function of a factor on the limit of seconds, and of the claim's rounds.

        The expected gain is fixed here, before the pairs are seen. How much they vary is taken from all runs known at each call, or from
        the pairs themselves where these vary more.
        """
        limits, runs_left = self._limits, self._limits.max_runs - self._num_taken
        if limits.num_pairs is not None or winner is None:
            num_pairs = limits.num_pairs or MIN_PAIRS
            num_pairs = min(num_pairs, runs_left // 2) if self._num_claims > 1 else num_pairs
            return lambda seconds_factor, rounds: num_pairs
        pair_seconds = self._baseline.run_seconds + winner.run_seconds
        spent_seconds = self._spent_seconds
        least = min(MIN_PAIRS, runs_left // 2)
        baseline_score = self._score(self._baseline)
        gain = (baseline_score if math.isfinite(baseline_score) else self._baseline.least_score) / self._score(winner)
        expected_gain = math.log(gain) * _HOPED_SHARE if gain > 1 else 0.0

        def num_pairs_needed(seconds_factor: float, rounds: Sequence[int]) -> int:
            affordable = (seconds_factor * limits.max_seconds - spent_seconds) / pair_seconds if pair_seconds > 0 else math.inf
            most = max(least, int(min(runs_left // 2, affordable, _MAX_PAIRS)))
            variances = (self._variance(entrant) + self._variance_of_future_misses(entrant) for entrant in (self._baseline, winner))
            scores = ([self._known[arm, number].score for number in rounds] for arm in (self._baseline.arm, winner.arm))
            of_pairs = deviation_of_pairs(*scores)
            deviation = max(math.sqrt(sum(variances)), of_pairs)
            return next((count for count in range(least, most) if _detectable_gain(count, deviation) <= expected_gain), most)

        return num_pairs_needed

    def _without_those_behind(self, racing: list[Entrant]) -> list[Entrant]:
        """Entrants that may still be the best; notes the reason for each entrant that is clearly behind."""
        best = min(racing, key=self._rank)
        for entrant in racing:
            distance = _BEHIND if len(self._taken[entrant.arm]) > 1 else _BEHIND_AFTER_ONE
            if entrant is not best and self._is_behind(entrant, best, distance):
                self._reasons[entrant.arm] = f"left after round {self._round}: clearly behind"
        return [entrant for entrant in racing if entrant.arm not in self._reasons]

    def _is_behind(self, entrant: Entrant, best: Entrant, distance: float) -> bool:
        """Whether an entrant's score lies more than a distance, in standard errors, behind another's."""
        score, best_score = self._score(entrant), self._score(best)
        if not (math.isfinite(score) and best_score > 0):
            return best_score < score
        error = math.sqrt(sum(self._variance(either) / len(self._taken[either.arm]) for either in (entrant, best)))
        return score > best_score and math.log(score / best_score) > distance * error

    def _halve(self, racing: list[Entrant]) -> None:
        for entrant in sorted(racing, key=self._rank)[math.ceil(len(racing) / 2) :]:
            is_below, _ = self._rank(entrant)
            why = f"reached too rarely, confirm.min_reach_rate is {self._limits.min_reach_rate:g}" if is_below else "in the slower half"
            self._reasons[entrant.arm] = f"left after round {self._round}: {why}"

    def _rank(self, entrant: Entrant) -> tuple[bool, float]:
        """Sort key of an entrant, lower is better: whether it reaches the target too rarely, then its score."""
        runs = self._taken[entrant.arm]
        rate = sum(run.score.reached for run in runs) / len(runs) if runs else 1.0
        return rate < self._limits.min_reach_rate, self._score(entrant)

    def _score(self, entrant: Entrant) -> float:
        """Expected score of an entrant by its runs and a prior of reaching the target.

        What the search expected counts for the baseline, which nobody picked, and for a candidate without runs.
        """
        runs = self._taken[entrant.arm]
        scores = [run.score.score for run in runs if run.score.score is not None]
        num_runs, num_reached = len(runs), sum(run.score.reached for run in runs)
        if entrant is self._baseline or not runs:
            num_runs += 1
            if math.isfinite(entrant.expected_score):
                scores.append(entrant.expected_score)
                num_reached += 1
        if not scores:
            return math.inf
        return math.fsum(scores) / len(scores) * (num_runs + _PRIOR_RUNS) / (num_reached + _PRIOR_REACHED)

    def _variance(self, entrant: Entrant) -> float:
        """Variance of the logarithm of an entrant's expected score as one run tells it: from the spread of scores and from misses."""
        squares, degrees = _PRIOR_SD**2 * _PRIOR_SD_RUNS, float(_PRIOR_SD_RUNS)
        for scores in self._repeats():
            logarithms = [math.log(score) for score in scores if 0 < score < math.inf]
            if len(logarithms) > 1:
                mean = math.fsum(logarithms) / len(logarithms)
                squares += math.fsum((logarithm - mean) ** 2 for logarithm in logarithms)
                degrees += len(logarithms) - 1
        return squares / degrees + self._variance_of_misses(entrant)

    def _variance_of_misses(self, entrant: Entrant) -> float:
        """Part of the variance due to misses: a miss is one success less, and usually has spent more than a success does."""
        runs = [run.score for run in self._taken[entrant.arm]]
        if all(run.reached for run in runs):
            return 0.0
        rate = (sum(run.reached for run in runs) + _PRIOR_REACHED) / (len(runs) + _PRIOR_RUNS)
        reached, missed = ([run.score for run in runs if run.reached is wanted and run.score is not None] for wanted in (True, False))
        extra_cost = 0.0
        if reached and missed and (mean := statistics.fmean(reached + missed)) > 0:
            extra_cost = (statistics.fmean(missed) - statistics.fmean(reached)) / mean
        return rate * (1 - rate) * (1 / rate + extra_cost) ** 2

    def _variance_of_future_misses(self, entrant: Entrant) -> float:
        """Variance that misses may yet add for an arm without any, if other arms had some: its prior is two runs at the pooled rate."""
        runs, all_runs = self._taken[entrant.arm], [run for taken in self._taken.values() for run in taken]
        num_missed = sum(not run.score.reached for run in all_runs)
        if not num_missed or not all(run.score.reached for run in runs):
            return 0.0
        pooled_rate = (len(all_runs) - num_missed + _PRIOR_REACHED) / (len(all_runs) + _PRIOR_RUNS)
        rate = (len(runs) + _PRIOR_RUNS * pooled_rate) / (len(runs) + _PRIOR_RUNS)
        return (1 - rate) / rate

    def _repeats(self) -> Iterator[list[float]]:
        """Yield lists of scores of one arm each: those of choosing, and those of its claim."""
        for arm, runs in self._taken.items():
            scores = [run.score.score or 0.0 for run in runs if run.score.reached]
            num_claimed = sum(run.score.reached for run in runs[self._num_before_claim.get(arm, len(runs)) :])
            yield scores[: len(scores) - num_claimed]
            yield scores[len(scores) - num_claimed :]


def _halving_sizes(count: int, num_rounds: int = _FIRST_ROUNDS) -> list[int]:
    """Number of entrants in each round, if ``num_rounds`` are run before the first halving and one before each other."""
    sizes = []
    while count > 1:
        sizes += [count] * num_rounds
        count, num_rounds = math.ceil(count / 2), 1
    return sizes


def _fits(racing: Sequence[Entrant], num_runs: float, seconds: float) -> bool:
    """Whether the limits allow halving the entrants down to one, with the fewest rounds."""
    sizes = _halving_sizes(len(racing))
    return sum(sizes) <= num_runs and sum(entrant.run_seconds for size in sizes for entrant in racing[:size]) <= seconds


def _detectable_gain(num_pairs: int, deviation: float) -> float:
    """Smallest gain, as a logarithm, that a number of pairs should tell from no gain."""
    from scipy.special import stdtrit  # noqa: PLC0415  # takes a third of a second to import, used once a study

    return (float(stdtrit(num_pairs - 1, 0.975)) + _POWER) * deviation / math.sqrt(num_pairs)


def run_race(
    baseline: Entrant, candidates: Sequence[Entrant], limits: RaceLimits, judge: Callable[[tuple[int, int]], Run]
) -> tuple[Standing, dict[tuple[int, int], Run]]:
    """Run a whole race at once, as simulations do: ``judge`` makes the run of an arm and a round.

    Returns:
        The final standing, and the runs by arm and round.
    """
    runs: dict[tuple[int, int], Run] = {}
    while (now := standing(baseline, candidates, limits, runs)).pending:
        runs[now.pending[0]] = judge(now.pending[0])
    return now, runs
