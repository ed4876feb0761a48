"""Confirmation as a race: which configuration runs next, which one wins, and which runs the claim
about the winner is computed from.

The candidates race first, and only the winner is compared with the baseline: choosing among
candidates needs no baseline, and the runs by which the winner was chosen flatter it.

* **Choosing**: candidates run in turns, in rounds on common seeds. After some rounds the worse half
  leaves, and a candidate that is clearly behind leaves at once (successive halving), until one is
  left or the runs for choosing are spent. What the search expected of a candidate was picked for
  its luck: it says who races where the limits do not suffice for all, and nothing of who wins.
* **Claiming**: pairs of runs of the baseline and the winner on seeds that had no part in choosing.
  They are looked at again and again, and end as soon as they tell the two apart, or as soon as it
  is plain that those to come will not (``autotune.confirm.sequential``). Planned are as many as
  should tell the two apart if the gain is the one seen while choosing; that gain is fixed before
  the first pair, and only how much the pairs vary is estimated again. Few pairs tell little of
  that: so all runs of the race and of the search do, and from ``_FEWEST_OF_PAIRS`` pairs on the
  pairs first of all. If another candidate is better by all its runs than the winner by all of its
  own, those of the claim included, the claim is begun again with that one, on further seeds.

A race keeps nothing: its state follows from its configurations, its limits and the runs so far, so
another process continues it exactly where it stopped. Candidates that the search finds later join
it: the race is passed through again from its first round, where only they have runs to make, on the
seeds of the others. A claim takes neither rounds by which its winner was chosen before, nor runs of
the baseline that were not made in turns with the winner's.

Source: Karnin, Koren and Somekh, Almost Optimal Exploration in Multi-Armed Bandits (ICML 2013),
sequential halving; Cohen and Sackrowitz (Statistics and Probability Letters 8, 1989), on claims
from the stage that did not choose.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby, islice, takewhile
from operator import itemgetter

import numpy as np

from autotune.confirm.sequential import Estimate, Looks
from autotune.confirm.statistics import (
    Claim,
    Ratio,
    RunScore,
    deviation_of_pairs,
    ratio_of_expected_scores,
    student,
)
from autotune.space import Suggestion

MIN_PAIRS = 4
"""Number of pairs that the limits of seconds always allow for, and after which a claim is first
looked at, unless the user asks for fewer."""
_TRIED_PAIRS = 2
"""Number of pairs after which a winner is first compared with the others, and replaced if it
reached the target in none of them; the claim is first looked at then, too, where pairs are dear."""
_DEAR_SHARE = 0.5
"""Share of the limit of seconds above which ``MIN_PAIRS`` pairs are dear."""
_BETWEEN_LOOKS = 4 / 3
"""Factor from the pairs of one look to those of the next."""
_DECIDING = 2.8
"""Standard errors that a true gain should have to be shown four times out of five."""
_HOPELESS = 0.1
"""Chance that the pairs to come decide a claim, below which it is given up."""
_FEWEST_OF_PAIRS = 5
"""Number of pairs from which on the pairs themselves tell how much they vary."""
_MOST_FREEDOM = 8
"""Degrees of freedom that the runs of choosing add to them at most; none where pairs missed the
target, of which those runs say nothing."""
_LEAST_SD = 0.01
"""Least standard deviation of the logarithm of a run's score that is believed."""
_FIRST_ROUNDS = 2
"""Least number of rounds before the worse half leaves for the first time; where the limits leave
no room for it, fewer candidates race."""
_TURNED = 1.0
"""Distance of the winner behind another candidate, in standard errors, at which its claim is
begun again with that one."""
_CLAIM_SHARE = 0.45
"""Share of the runs, and of their seconds, that is reserved for the claim during choosing."""
_PRIOR_RUNS = 2.0
_PRIOR_REACHED = 1.6
"""Prior of reaching the target, for a configuration that reached it in the search: 1.6 out of
two runs."""
_PRIOR_SD = 0.2
_PRIOR_SD_RUNS = 4
"""Prior standard deviation of the logarithm of a configuration's score: ``_PRIOR_SD``, worth
``_PRIOR_SD_RUNS`` runs."""
_BEHIND_AFTER_ONE, _BEHIND = 4.0, 2.0
"""Distances behind the best candidate, in standard errors, at which a candidate leaves at once:
after its first run, and later."""
_HOPED_SHARE = 0.75
"""Share of the gain seen while choosing, as a logarithm, that the claim should tell from no
gain: the search overestimates it."""
_POWER = 1.8
"""Standard errors by which that gain should exceed the interval's half width, so that the claim
shows it nine times out of ten though it is looked at again and again."""
_OVERTIME = 2.0
"""Factor on the limit of seconds for a claim whose first pairs vary more than the runs of
choosing did."""
_MAX_PAIRS = 200


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A configuration that is confirmed: the baseline or a candidate."""

    trial: int
    """Number of the search trial that the configuration comes from."""
    label: str
    suggestion: Suggestion
    expected_score: float | None
    """Score that the search expects of the configuration; None if it never reached the target.
    Of a candidate it is an order only."""
    run_seconds: float
    """Seconds of training that a run of the configuration is expected to take."""
    search_runs: tuple[RunScore, ...] = ()
    """The search's own runs of the configuration: they tell how much runs vary."""
    least_score: float = 0.0
    """Lower bound of the score if the configuration never reached the target: what its trial had
    spent, in the unit of scores."""
    claim_round: int = 0
    """Number of the first round that a claim about the configuration may take. Runs of earlier
    rounds had a part in choosing before others joined the race, or are the baseline's and were
    made at another time than those of the configuration would be."""


@dataclass(frozen=True, kw_only=True)
class RaceLimits:
    """Limits on what a race may cost."""

    max_runs: int
    max_seconds: float = math.inf
    """Seconds of training of all runs together. A claim that is not decided takes ``MIN_PAIRS``
    pairs in any case, and one whose first pairs vary more than the runs of choosing did may take
    the race to twice as many seconds."""
    num_pairs: int | None = None
    """Number of pairs of runs for the claim; None means as many as tell the two apart."""
    min_reach_rate: float = 0.0
    """Share of a candidate's runs that must reach the target."""


@dataclass(frozen=True, kw_only=True)
class RaceState:
    """State of a race after the runs made so far."""

    pending: tuple[tuple[int, int], ...]
    """Trial and round of the next runs, in the order of execution; empty when the race is over."""
    num_runs: int
    """Total number of runs that the race will take, as far as it is known now."""
    winner: int | None = None
    """Trial of the candidate that was chosen; None while choosing, or without any candidate."""
    claim_rounds: tuple[int, ...] = ()
    """The rounds whose runs the claim is computed from."""
    first_claim_rounds: Mapping[int, int] = field(default_factory=dict)
    """First round of each claim that was begun, by the trial of its winner, or of the baseline if
    it ran alone."""
    look: int = MIN_PAIRS
    """Number of the claim's rounds after which the race next decides how to continue."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Reason why each candidate left, by trial."""
    speed_up: Ratio | None = None
    """The baseline's expected score over the winner's, when the claim is over."""
    is_baseline_better: bool = False
    """Whether the baseline scored better than the winner over all runs of the finished race."""

    def batch(self, num_devices: int) -> list[tuple[tuple[int, int], ...]]:
        """The runs to make side by side next, in units that belong on one device.

        While choosing these are the single runs of a round. In the claim they are the pairs up to
        its next look, and further pairs for the devices that would be idle meanwhile.
        """
        if not self.claim_rounds:
            return [(run,) for run in self.pending]
        pairs = [tuple(pair) for _, pair in groupby(self.pending, key=itemgetter(1))]
        num_needed = sum(pair[0][1] in self.claim_rounds[: self.look] for pair in pairs)
        return pairs[: math.ceil(num_needed / num_devices) * num_devices]


def race_state(
    configurations: Sequence[Configuration],
    limits: RaceLimits,
    runs: Mapping[tuple[int, int], RunScore],
) -> RaceState:
    """State of a race after the given runs.

    Args:
        configurations: the baseline, then any number of candidates in any order.
        runs: runs made so far, by trial and number of the round, from 0.
    """
    race = _Race(configurations, limits, runs)
    state = race.choose()
    while not isinstance(state, RaceState):
        state = race.claim(state)
    return state


class _Race:
    """One pass over the runs of a race, from its start to its present state."""

    def __init__(
        self,
        configurations: Sequence[Configuration],
        limits: RaceLimits,
        runs: Mapping[tuple[int, int], RunScore],
    ) -> None:
        self._baseline = configurations[0]
        self._candidates = sorted(configurations[1:], key=lambda each: each.expected_score or 0.0)
        self._limits = limits
        self._known = runs
        self._estimates = _Estimates(configurations, limits.min_reach_rate)
        self._reasons: dict[int, str] = {}
        self._first_claim_rounds: dict[int, int] = {}
        self._round = 0

    def choose(self) -> Configuration | RaceState | None:
        """The winner among the candidates, None without any; a state if that needs more runs."""
        if not self._candidates:
            return None
        limits, racing = self._limits, list(self._candidates)
        pair_seconds = self._baseline.run_seconds + racing[0].run_seconds
        num_pairs = limits.num_pairs or max(MIN_PAIRS, round(_CLAIM_SHARE * limits.max_runs / 2))
        claim_seconds = min(
            num_pairs * pair_seconds,
            max(_CLAIM_SHARE * limits.max_seconds, MIN_PAIRS * pair_seconds),
        )
        runs_left = limits.max_runs - 2 * num_pairs
        seconds_left = limits.max_seconds - claim_seconds
        while len(racing) > 1 and not _fits(racing, runs_left, seconds_left):
            trial = racing.pop().trial
            has_run = any(trial == known for known, _ in self._known)
            self._reasons[trial] = (
                f"{'left out' if has_run else 'not run'}: the limits leave no runs for it, and the"
                " search expected more of the others"
            )
        while len(racing) > 1:
            num_first = max(1, _FIRST_ROUNDS - self._round)
            round_seconds = sum(each.run_seconds for each in racing)
            affordable = min(
                runs_left / len(racing),
                seconds_left / round_seconds if round_seconds > 0 else math.inf,
            )
            num_halvings = math.ceil(math.log2(len(racing)))
            for _ in range(max(num_first, int(affordable / num_halvings))):
                if pending := self._pending(racing, self._round):
                    num_first = max(1, _FIRST_ROUNDS - self._round)
                    num_to_come = sum(_halving_sizes(len(racing), num_first)) + 2 * num_pairs
                    return RaceState(
                        pending=pending,
                        num_runs=self._estimates.num_runs + num_to_come,
                        reasons=self._reasons,
                    )
                self._take(racing, [self._round])
                self._estimates.chose(
                    self._round,
                    {each.trial: self._known[each.trial, self._round] for each in racing},
                )
                runs_left -= len(racing)
                for each in racing:
                    seconds_left -= self._known[each.trial, self._round].seconds
                self._round += 1
                racing = self._without_those_behind(racing)
                if len(racing) == 1:
                    break
            racing = self._faster_half(racing)
        return racing[0]

    def claim(self, winner: Configuration | None) -> Configuration | RaceState:
        """State of the claim: pairs of winner and baseline, or the baseline alone if none won.

        A claim that goes on after another one was begun leaves out the rounds of that one, whose
        runs of the baseline were not made in turns with its winner's.

        Returns:
            The state; or another candidate that the claim is begun again with.
        """
        pair = [self._baseline] if winner is None else [self._baseline, winner]
        # the baseline's first run ended choosing, though it might end earlier within other limits
        of_baseline = (number for trial, number in self._known if trial == self._baseline.trial)
        first_of_any = min(of_baseline, default=0)
        self._round = max(self._round, pair[-1].claim_round, first_of_any)
        self._first_claim_rounds[pair[-1].trial] = self._round
        trials = {each.trial for each in pair}
        of_others = {number for trial, number in self._known if trial not in trials}
        numbers = (number for number in count(self._round) if number not in of_others)
        free = list(islice(numbers, max(_MAX_PAIRS, self._limits.num_pairs or 0)))
        num_pairs_needed, looks = self._pairs_needed(winner), Looks()
        num_planned, taken, look = num_pairs_needed(1.0, ()), 0, _TRIED_PAIRS
        self._estimates.begin_claim(pair)
        while True:
            rounds, look = free[:num_planned], min(look, num_planned)
            pending = tuple(run for number in rounds for run in self._pending(pair, number))
            self._take(pair, rounds[taken:look])
            taken = look
            if any(number in rounds[:look] for _, number in pending):
                self._take(pair, rounds[look:])
                speed_up = None
                break
            if winner and (better := self._better(winner, rounds[:taken])) is not None:
                self._round = rounds[taken - 1] + 1
                self._reasons[winner.trial] = (
                    f"left after round {self._round}: chosen, and behind another one in its claim"
                )
                self._reasons.pop(better.trial)
                return better
            if taken >= MIN_PAIRS:
                num_planned = max(taken, num_pairs_needed(_OVERTIME, rounds[:taken]))
            if self._ends(looks, winner, rounds[:taken], num_planned):
                for number in takewhile(lambda each: not self._pending(pair, each), free[taken:]):
                    self._take(pair, [number])  # made at the same time
                    taken += 1
                rounds, pending = free[:taken], ()
                speed_up = None if winner is None else self._claimed(looks, winner, rounds)
                break
            look = MIN_PAIRS if taken < MIN_PAIRS else math.ceil(taken * _BETWEEN_LOOKS)
            if taken < MIN_PAIRS and self._is_dear(pair):
                look = taken + 1
        rank = self._estimates.rank
        return RaceState(
            pending=pending,
            num_runs=len(self._known) + len(pending),
            winner=None if winner is None else winner.trial,
            claim_rounds=tuple(rounds),
            first_claim_rounds=self._first_claim_rounds,
            look=look,
            reasons=self._reasons,
            speed_up=speed_up,
            is_baseline_better=winner is not None
            and not pending
            and rank(self._baseline) < rank(winner),
        )

    def _is_dear(self, pair: Sequence[Configuration]) -> bool:
        """Whether the fewest pairs would take much of the race's seconds."""
        pair_seconds = sum(each.run_seconds for each in pair)
        return MIN_PAIRS * pair_seconds > _DEAR_SHARE * self._limits.max_seconds

    def _ends(
        self, looks: Looks, winner: Configuration | None, rounds: Sequence[int], num_planned: int
    ) -> bool:
        """Look at a claim after some rounds, and return whether it ends with them."""
        num_pairs = len(rounds)
        is_last = num_pairs >= num_planned
        if winner is None:
            return is_last
        is_named = self._limits.num_pairs is not None
        is_too_early = num_pairs < MIN_PAIRS and not self._is_dear((self._baseline, winner))
        estimate = self._estimate(winner, rounds)
        if estimate is None or ((is_named or is_too_early) and not is_last):
            return is_last
        if looks.decides(num_pairs, num_planned, estimate.z_score()) or is_last:
            return True
        chance = estimate.chance_of_decision(num_pairs, num_planned)
        return num_pairs >= _FEWEST_OF_PAIRS and chance < _HOPELESS

    def _claimed(self, looks: Looks, winner: Configuration, rounds: Sequence[int]) -> Ratio | None:
        """What is claimed of a winner after the last look; None without any look."""
        plain = ratio_of_expected_scores(*self._sides(winner, rounds))
        estimate = self._estimate(winner, rounds)
        if plain is None or estimate is None or not looks.num_pairs:
            return plain
        low, middle, high = looks.interval(estimate, len(rounds))
        speed_up = Ratio(
            ratio=math.exp(min(max(middle, low), high)),
            low=0.0 if plain.claim is Claim.AT_MOST else math.exp(low),
            high=math.inf if plain.claim is Claim.AT_LEAST else float(np.exp(high)),
            num_pairs=len(rounds),
            claim=plain.claim,
        )
        if speed_up.is_resolved or not estimate.mean:
            return speed_up
        num_needed = len(rounds) * (_DECIDING * estimate.error / estimate.mean) ** 2
        num_lacking = max(math.ceil(num_needed) - len(rounds), 1)
        return replace(
            speed_up, num_pairs_lacking=num_lacking if num_needed <= _MAX_PAIRS else None
        )

    def _sides(
        self, winner: Configuration, rounds: Sequence[int]
    ) -> tuple[list[RunScore], list[RunScore]]:
        """The runs of baseline and winner in some rounds."""
        of_baseline, of_winner = (
            [self._known[each.trial, number] for number in rounds]
            for each in (self._baseline, winner)
        )
        return of_baseline, of_winner

    def _estimate(self, winner: Configuration, rounds: Sequence[int]) -> Estimate | None:
        """The logarithm of the ratio of two expected scores, as some pairs tell it.

        None if they do not tell how much they vary.
        """
        sides, num_pairs = self._sides(winner, rounds), len(rounds)
        plain = ratio_of_expected_scores(*sides)
        if plain is None or num_pairs < 2:
            return None
        if num_pairs < _FEWEST_OF_PAIRS:
            if any(0 < sum(run.reached for run in side) < num_pairs for side in sides):
                return None
            squares, freedom = self._estimates.spread_with_search()
            variance = 2 * squares / freedom
        else:
            # a side that never reached the target is judged by what its runs spent
            judged = [
                side
                if any(run.reached for run in side)
                else [run._replace(reached=True) for run in side]
                for side in sides
            ]
            squares, freedom = self._estimates.spread_in_rounds()
            has_misses = not all(run.reached for side in judged for run in side)
            weight = 0.0 if has_misses else min(freedom, _MOST_FREEDOM)
            of_pairs = num_pairs - 1.0
            variance = of_pairs * deviation_of_pairs(*judged) ** 2
            if weight:
                variance += weight * 2 * squares / freedom
            freedom = of_pairs + weight
            variance /= freedom
        error = math.sqrt(max(variance, 2 * _LEAST_SD**2) / num_pairs)
        return Estimate(math.log(plain.ratio), error, freedom)

    def _pending(self, racing: Sequence[Configuration], number: int) -> tuple[tuple[int, int], ...]:
        """Trial and round of the runs of one round not made yet.

        Each round begins with another configuration.
        """
        first = number % len(racing)
        turns = ((each.trial, number) for each in (*racing[first:], *racing[:first]))
        return tuple(run for run in turns if run not in self._known)

    def _take(self, racing: Sequence[Configuration], rounds: Sequence[int]) -> None:
        """Take the known runs of some rounds into account."""
        for number in rounds:
            for each in racing:
                if (each.trial, number) in self._known:
                    self._estimates.runs[each.trial].append(self._known[each.trial, number])

    def _without_those_behind(self, racing: list[Configuration]) -> list[Configuration]:
        """The candidates that may still be the best.

        Notes the reason for each that is clearly behind.
        """
        estimates = self._estimates
        best = min(racing, key=estimates.rank)
        for each in racing:
            distance = _BEHIND if len(estimates.runs[each.trial]) > 1 else _BEHIND_AFTER_ONE
            if each is not best and estimates.is_behind(each, best, distance):
                self._reasons[each.trial] = f"left after round {self._round}: clearly behind"
        return [each for each in racing if each.trial not in self._reasons]

    def _faster_half(self, racing: list[Configuration]) -> list[Configuration]:
        """The candidates without the worse half; notes the reason for each that leaves."""
        for each in sorted(racing, key=self._estimates.rank)[math.ceil(len(racing) / 2) :]:
            is_rare, _ = self._estimates.rank(each)
            rate = f"reached too rarely, confirm.min_reach_rate is {self._limits.min_reach_rate:g}"
            why = rate if is_rare else "in the slower half"
            self._reasons[each.trial] = f"left after round {self._round}: {why}"
        return [each for each in racing if each.trial not in self._reasons]

    def _better(self, winner: Configuration, rounds: Sequence[int]) -> Configuration | None:
        """The candidate that is better by all its runs than the winner, after some pairs of its
        claim.

        None if the winner stays.
        """
        estimates, limits = self._estimates, self._limits
        others = [
            each for each in self._candidates if each is not winner and estimates.runs[each.trial]
        ]
        num_pairs = limits.num_pairs or MIN_PAIRS
        seconds = num_pairs * (self._baseline.run_seconds + winner.run_seconds)
        if (
            not others
            or estimates.num_runs + 2 * num_pairs > limits.max_runs
            or estimates.seconds + seconds > _OVERTIME * limits.max_seconds
        ):
            return None
        best = min(others, key=estimates.rank)
        if not any(self._known[winner.trial, number].reached for number in rounds):
            return best
        is_rare, best_is_rare = estimates.rank(winner)[0], estimates.rank(best)[0]
        if is_rare == best_is_rare:
            return best if estimates.is_behind(winner, best, _TURNED) else None
        return best if is_rare else None

    def _pairs_needed(self, winner: Configuration | None) -> Callable[[float, Sequence[int]], int]:
        """A function that says how many pairs should tell winner and baseline apart.

        It takes a factor on the limit of seconds, and the claim's rounds so far. The expected gain
        is fixed here, before the pairs are seen. How much they vary is taken from all runs known at
        each call, or from the pairs themselves where these vary more.
        """
        estimates, limits = self._estimates, self._limits
        runs_left = limits.max_runs - estimates.num_runs
        if limits.num_pairs is not None or winner is None:
            num_pairs = min(limits.num_pairs or MIN_PAIRS, runs_left // 2)
            return lambda seconds_factor, rounds: num_pairs
        pair = (self._baseline, winner)
        pair_seconds, spent_seconds = sum(each.run_seconds for each in pair), estimates.seconds
        least = min(MIN_PAIRS, runs_left // 2)
        baseline_score = estimates.score(self._baseline)
        if not math.isfinite(baseline_score):
            baseline_score = self._baseline.least_score
        gain = baseline_score / estimates.score(winner)
        expected_gain = math.log(gain) * _HOPED_SHARE if gain > 1 else 0.0

        def num_pairs_needed(seconds_factor: float, rounds: Sequence[int]) -> int:
            affordable = math.inf
            if pair_seconds > 0:
                affordable = (seconds_factor * limits.max_seconds - spent_seconds) / pair_seconds
            most = max(least, int(min(runs_left // 2, affordable, _MAX_PAIRS)))
            scores = ([self._known[each.trial, number] for number in rounds] for each in pair)
            deviation = max(estimates.deviation(pair), deviation_of_pairs(*scores))
            enough = (
                n for n in range(least, most) if _detectable_gain(n, deviation) <= expected_gain
            )
            return next(enough, most)

        return num_pairs_needed


class _Estimates:
    """What the runs taken into account so far say of the configurations of a race."""

    def __init__(self, configurations: Sequence[Configuration], min_reach_rate: float) -> None:
        self._baseline = configurations[0]
        self._min_reach_rate = min_reach_rate
        self.runs: dict[int, list[RunScore]] = {each.trial: [] for each in configurations}
        """The runs of each configuration, by its trial."""
        self._search_runs = {each.trial: each.search_runs for each in configurations}
        self._chosen_in_rounds: list[tuple[int, int, float]] = []
        """Trial, round and logarithm of the score of each run of choosing that reached."""
        self._num_before_claim: dict[int, int] = {}

    @property
    def num_runs(self) -> int:
        """Number of runs of all configurations."""
        return sum(map(len, self.runs.values()))

    @property
    def seconds(self) -> float:
        """Seconds that the runs of all configurations took from the budget."""
        return math.fsum(run.seconds for runs in self.runs.values() for run in runs)

    def chose(self, number: int, runs: Mapping[int, RunScore]) -> None:
        """Note the runs of a round of choosing, by trial."""
        for trial, run in runs.items():
            self._chosen_in_rounds += [(trial, number, each) for each in _log_scores([run])]

    def begin_claim(self, pair: Sequence[Configuration]) -> None:
        """Note that further runs of some configurations belong to a claim."""
        self._num_before_claim |= {each.trial: len(self.runs[each.trial]) for each in pair}

    def rank(self, configuration: Configuration) -> tuple[bool, float]:
        """Sort key, lower is better: whether it reaches the target too rarely, then its score."""
        runs = self.runs[configuration.trial]
        rate = sum(run.reached for run in runs) / len(runs) if runs else 1.0
        return rate < self._min_reach_rate, self.score(configuration)

    def score(self, configuration: Configuration) -> float:
        """Expected score by the runs of a configuration and a prior of reaching the target.

        What the search expected counts for the baseline, which nobody picked, and for a candidate
        without runs.
        """
        runs = self.runs[configuration.trial]
        scores = [run.score for run in runs if run.score is not None]
        num_runs, num_reached = len(runs), sum(run.reached for run in runs)
        if configuration is self._baseline or not runs:
            num_runs += 1
            if configuration.expected_score is not None:
                scores.append(configuration.expected_score)
                num_reached += 1
        if not scores:
            return math.inf
        mean = math.fsum(scores) / len(scores)
        return mean * (num_runs + _PRIOR_RUNS) / (num_reached + _PRIOR_REACHED)

    def is_behind(self, behind: Configuration, best: Configuration, distance: float) -> bool:
        """Whether a score lies more than a distance, in standard errors, behind another."""
        score, best_score = self.score(behind), self.score(best)
        if not (math.isfinite(score) and best_score > 0):
            return best_score < score
        error = math.sqrt(
            sum(self._variance(each) / len(self.runs[each.trial]) for each in (behind, best))
        )
        return score > best_score and math.log(score / best_score) > distance * error

    def deviation(self, pair: Sequence[Configuration]) -> float:
        """Standard deviation of the logarithm of the ratio of two scores as one pair tells it."""
        return math.sqrt(
            sum(self._variance(each) + self._variance_of_future_misses(each) for each in pair)
        )

    def spread_with_search(self) -> tuple[float, float]:
        """Sum of the squared distances of all runs' logarithms, those of the search included, from
        their configuration's mean, and its degrees of freedom.

        Where the machine drifts, or the search picked lucky runs, that is more than pairs vary.
        """
        squares, freedom = 0.0, 0.0
        for trial, runs in self.runs.items():
            logarithms = _log_scores([*self._search_runs[trial], *runs])
            if len(logarithms) > 1:
                squares += float(np.var(logarithms)) * len(logarithms)
                freedom += len(logarithms) - 1
        return squares, freedom

    def spread_in_rounds(self) -> tuple[float, float]:
        """The same of the runs of choosing only, without what the runs of a round have in common
        (two-way analysis of variance).
        """
        if not self._chosen_in_rounds:
            return 0.0, 0.0
        trials, rounds, logarithms = map(np.array, zip(*self._chosen_in_rounds, strict=True))
        design = np.hstack(
            [trials[:, None] == np.unique(trials), rounds[:, None] == np.unique(rounds)]
        ).astype(np.float64)
        fitted, _, rank, _ = np.linalg.lstsq(design, logarithms)
        squares = float(((logarithms - design @ fitted) ** 2).sum())
        return squares, float(len(logarithms) - rank)

    def _variance(self, configuration: Configuration) -> float:
        """Variance of the logarithm of an expected score as one run tells it.

        The spread of scores is pooled over all configurations, between the runs of choosing and
        between those of a claim; misses are the configuration's.
        """
        squares, degrees = _PRIOR_SD**2 * _PRIOR_SD_RUNS, float(_PRIOR_SD_RUNS)
        for trial, runs in self.runs.items():
            num_chosen = self._num_before_claim.get(trial, len(runs))
            for part in (runs[:num_chosen], runs[num_chosen:]):
                logarithms = _log_scores(part)
                if len(logarithms) > 1:
                    mean = math.fsum(logarithms) / len(logarithms)
                    squares += math.fsum((logarithm - mean) ** 2 for logarithm in logarithms)
                    degrees += len(logarithms) - 1
        return squares / degrees + self._variance_of_misses(self.runs[configuration.trial])

    def _variance_of_misses(self, runs: Sequence[RunScore]) -> float:
        """Part of the variance due to misses.

        A miss is one success less, and usually has spent more than a success does.
        """
        num_reached = sum(run.reached for run in runs)
        if num_reached == len(runs):
            return 0.0
        rate = (num_reached + _PRIOR_REACHED) / (len(runs) + _PRIOR_RUNS)
        reached = [run.score for run in runs if run.score is not None and run.reached]
        missed = [run.score for run in runs if run.score is not None and not run.reached]
        extra_cost = 0.0
        if reached and missed and (mean := statistics.fmean(reached + missed)) > 0:
            extra_cost = (statistics.fmean(missed) - statistics.fmean(reached)) / mean
        return rate * (1 - rate) * (1 / rate + extra_cost) ** 2

    def _variance_of_future_misses(self, configuration: Configuration) -> float:
        """Variance that misses may yet add for a configuration without any, if others had some.

        Its prior is two runs at the pooled rate.
        """
        runs = self.runs[configuration.trial]
        num_missed = sum(not run.reached for taken in self.runs.values() for run in taken)
        if not num_missed or not all(run.reached for run in runs):
            return 0.0
        num_reached = self.num_runs - num_missed
        pooled_rate = (num_reached + _PRIOR_REACHED) / (self.num_runs + _PRIOR_RUNS)
        rate = (len(runs) + _PRIOR_RUNS * pooled_rate) / (len(runs) + _PRIOR_RUNS)
        return (1 - rate) / rate


def _log_scores(runs: Sequence[RunScore]) -> list[float]:
    """Logarithms of the scores of the runs that reached the target."""
    scores = [run.score or 0.0 for run in runs if run.reached]
    return [math.log(score) for score in scores if 0 < score < math.inf]


def _halving_sizes(num_racing: int, num_rounds: int = _FIRST_ROUNDS) -> list[int]:
    """Number of candidates in each round, if the first halving follows ``num_rounds`` rounds and
    each further one a single round.
    """
    sizes = []
    while num_racing > 1:
        sizes += [num_racing] * num_rounds
        num_racing, num_rounds = math.ceil(num_racing / 2), 1
    return sizes


def _fits(racing: Sequence[Configuration], num_runs: float, seconds: float) -> bool:
    """Whether the limits allow halving the candidates down to one, with the fewest rounds."""
    sizes = _halving_sizes(len(racing))
    total_seconds = sum(each.run_seconds for size in sizes for each in racing[:size])
    return sum(sizes) <= num_runs and total_seconds <= seconds


def _detectable_gain(num_pairs: int, deviation: float) -> float:
    """Smallest gain, as a logarithm, that a number of pairs should tell from no gain."""
    return (student(num_pairs) + _POWER) * deviation / math.sqrt(num_pairs)
