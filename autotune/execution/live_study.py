"""An open study: its storage, policy, tracker and terminal display."""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from rich.console import Console

from autotune.config.command_line import Interrupt, interruptible
from autotune.confirm.confirmation import PlannedRace, plan_race
from autotune.confirm.race import RaceLimits, RaceState
from autotune.errors import ClusterError
from autotune.execution.cluster import RaySession
from autotune.execution.launcher import Launcher, calling
from autotune.execution.plan import StudyPlan, TrainingPlan
from autotune.execution.study_folder import log_file, sole_user
from autotune.execution.trial_folder import RUNS_FOLDER, delete_files, run_names
from autotune.files import FORMAT, FORMAT_KEY, replace_file
from autotune.measurement import TrialResult
from autotune.outcome import Outcome
from autotune.policy import CONFIRM, SEARCH, Run, confirmation_name, search_name
from autotune.redaction import without_secrets
from autotune.reporting.terminal import StudyDisplay
from autotune.search.samplers import PausingSampler
from autotune.search.scheduler import Scheduler
from autotune.search.storage import DRIVER, sole_driver, told_storage_errors
from autotune.search.study import RACE, Study, confirmations, open_study
from autotune.search.warm_start import first_points
from autotune.space import Suggestion
from autotune.tracking.tracker import FinishedRun, StudyInfo
from autotune.tracking.writer import TrackerWriter
from autotune.training.main_thread import in_thread
from autotune.yaml_files import yaml_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LiveStudy:
    """A planned study with everything that running it needs."""

    plan: StudyPlan
    study: Study
    policy: Scheduler
    tracker: TrackerWriter
    display: StudyDisplay
    console: Console
    connection: RaySession
    launcher: Launcher | None
    """The driver's own launcher, for trainings on this machine."""
    interrupt: Interrupt
    """Set by Ctrl-C, or another signal, once the running trainings are saved."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds of the search's time budget that are left; None means no limit."""
        return _seconds_left(self.plan, self.policy)

    @property
    def has_search(self) -> bool:
        """Whether the search may still start a trial, or has trials to end, which an earlier
        process paused.
        """
        seconds = self.seconds_left
        may_start = self.policy.num_trials_left != 0 and (seconds is None or seconds > 0)
        return (may_start or self.policy.has_unfinished) and self.policy.error is None

    @property
    def needs_confirmation(self) -> bool:
        """Whether the study has a confirmation: some trial has a score, and ``confirm.max_runs``
        is above 0.
        """
        return bool(self.policy.scores) and self.plan.config.confirm.max_runs > 0

    def planned_race(self) -> PlannedRace:
        """The confirmation race, loaded from the storage if it was planned since the last trial
        ended and the target's limit was raised; else planned now, as it continues the stored one,
        and stored.
        """
        plan, policy = self.plan, self.policy
        baseline, limit = plan.baseline or Suggestion({}), plan.trial.target.max_train_seconds
        stored, earlier = self.study.user_attrs.get(RACE), None
        if stored is not None:
            earlier = PlannedRace.from_dict(stored, baseline, policy.results)
            planned_for = earlier.num_trials, earlier.max_train_seconds or limit
            if planned_for == (len(policy.results), limit):
                return earlier
        race = plan_race(
            baseline_trial=policy.baseline_trial,
            baseline=baseline,
            results=policy.results,
            expected_scores=policy.expected_scores,
            objective=plan.objective,
            num_candidates=plan.config.confirm.num_candidates,
            max_train_seconds=limit,
        )
        if earlier is not None:
            limits = self.race_limits(earlier)
            race = race.joining(earlier, confirmations(self.study), limits, plan.objective)
        self.study.set_user_attr(RACE, race.as_dict())
        return race

    @property
    def closest(self) -> TrialResult | None:
        """The trial whose last metric is closest to the target; None if none has a finite one."""
        target = self.plan.trial.target
        measured = [
            (result.last.shortfall(target), result)
            for result in self.policy.results.values()
            if result.last is not None and math.isfinite(result.last.metric)
        ]
        return min(measured, key=itemgetter(0))[1] if measured else None

    def delete_leftovers(
        self,
        runs: Mapping[tuple[int, int], TrialResult] = MappingProxyType({}),
        *,
        winner: int | None = None,
        is_over: bool = False,
    ) -> None:
        """Delete what ended runs left in their folders that can no longer win, unless
        ``trials.keep`` is ``all``.

        What the latest trial left stays until another one ends: its process may be ending still.

        Args:
            runs: the confirmation runs so far, of which each configuration's best is kept.
            winner: trial whose configuration has won; None while any candidate may.
            is_over: whether no run is left; those that were tried again go then, too. If not,
                another thread deletes.
        """
        plan, policy = self.plan, self.policy
        if plan.config.trials.keep == "all" or not (plan.folder / RUNS_FOLDER).is_dir():
            return
        scores, confirmed = policy.scores, dict[int, dict[str, float]]()
        candidates = sorted(scores, key=scores.__getitem__)[: plan.config.confirm.num_candidates]
        if not candidates and (closest := self.closest) is not None:
            candidates = [closest.trial]
        kept = {search_name(number) for number in [policy.baseline_trial, *candidates]}
        for (trial, number), run in runs.items():
            if run.outcome is Outcome.REACHED:
                name, score = confirmation_name(trial, number), plan.objective.score(run)
                confirmed.setdefault(trial, {})[name] = score
        kept |= {min(of_one, key=of_one.__getitem__) for of_one in confirmed.values()}
        if winner is not None:
            best = confirmed.get(winner, {})
            kept = {search_name(policy.baseline_trial), search_name(winner), *(kept & {*best})}
        if is_over:
            delete_files(plan.folder, run_names(plan.folder) - kept)
            return
        ended = {
            *map(search_name, [*policy.results][:-1]),
            *(confirmation_name(*key) for key in runs),
        }
        in_thread("delete", delete_files, plan.folder, ended - kept)

    def race_limits(self, race: PlannedRace) -> RaceLimits:
        """Limits on the runs and the training seconds that a race may take."""
        confirm = self.plan.config.confirm
        fraction = math.inf if confirm.budget_fraction is None else confirm.budget_fraction
        return RaceLimits(
            max_runs=confirm.max_runs,
            max_seconds=fraction * race.train_seconds if race.train_seconds > 0 else math.inf,
            num_pairs=confirm.num_seeds,
            min_reach_rate=confirm.min_reach_rate,
        )

    @property
    def is_work_left(self) -> bool:
        """Whether workers are needed at all.

        A study that already has all its runs is only reported again.
        """
        if self.policy.error is not None:
            return False
        return self.has_search or (self.needs_confirmation and bool(self.race_state().pending))

    def race_state(self) -> RaceState:
        """State of the confirmation race after the runs in the storage."""
        race = self.planned_race()
        return race.state(confirmations(self.study), self.race_limits(race), self.plan.objective)


@contextlib.contextmanager
def opened(
    plan: StudyPlan,
    *,
    console: Console,
    connection: RaySession,
    launcher: Launcher | None = None,
) -> Iterator[LiveStudy]:
    """Open a study, and resume it if an earlier process has begun it.

    Its tracker is closed however the context ends.

    Args:
        launcher: finds out the facts about this machine that are kept with the study.

    Raises:
        StudyError: another process runs the study, the stored study has another definition, or the
            storage failed within the context.
        ConfigError: the sampler, the storage or the tracker cannot be made.
    """
    sampling = {"make_sampler": plan.sampler, "seed": plan.config.study.seed}
    folder = open_folder(plan, console=console, connection=connection, **sampling)
    with folder as (study, sampler, interrupt, is_resumed):
        if not study.metric_names:
            study.set_metric_names([plan.score_format.description])
        policy = _policy(plan, study, sampler)
        tracker = TrackerWriter(
            plan.config.tracking,
            plan.trial.allowed_targets,
            make_info=partial(_tracker_info, plan, launcher, is_resumed=is_resumed),
            ended=partial(_ended_runs, plan, study, policy),
            rest_command=plan.resume_command(),
            say=partial(say, console),
        )
        live = LiveStudy(
            plan=plan,
            study=study,
            policy=policy,
            tracker=tracker,
            display=_display(plan, policy, console),
            console=console,
            connection=connection,
            launcher=launcher,
            interrupt=interrupt,
        )
        with closing_tracker(tracker):
            yield live


@contextlib.contextmanager
def open_folder(
    plan: TrainingPlan, *, console: Console, connection: RaySession, **sampling: Any
) -> Iterator[tuple[Study, PausingSampler | None, Interrupt, bool]]:
    """Open the folder and the storage of a study or a comparison, for this process alone.

    Args:
        sampling: further arguments of ``open_study``.

    Yields:
        The storage, what pauses trials, if anything does, what a signal sets, and whether an
        earlier process had opened it.

    Raises:
        StudyError: another process runs it, the stored one has another definition, or the storage
            failed within the context.
        ConfigError: the sampler or the storage cannot be made.
        ClusterError: Ray was gone within the context.
    """
    with (
        interruptible() as interrupt,
        sole_user(plan.folder),
        log_file(plan.folder / "autotune.log", partial(say, console)),
        told_storage_errors(plan.resume_command()),
    ):
        study, sampler = open_study(
            plan.name,
            plan.folder,
            storage_url=plan.config.search.storage,
            definition=plan.definition(),
            **sampling,
        )
        is_resumed = DRIVER in study.user_attrs
        try:
            with sole_driver(study, interrupt, partial(say, console)):
                yield study, sampler, interrupt, is_resumed
        except ClusterError as error:
            if not connection.is_lost:
                raise
            raise ClusterError(
                f"{error}; what was found is kept, and the study goes on with:"
                f" {plan.resume_command()}"
            ) from error


@contextlib.contextmanager
def closing_tracker(tracker: TrackerWriter) -> Iterator[None]:
    """Context at whose end a tracker is closed, however it ends."""
    try:
        yield
    except BaseException as error:
        # before the connection to a Ray that is gone, which may hang now
        tracker.close_if_open(is_interrupt=isinstance(error, KeyboardInterrupt))
        raise
    tracker.close_if_open(is_interrupt=True)


def say_interrupted(console: Console, plan: TrainingPlan) -> None:
    """Print how a study or a comparison is continued that a signal has ended."""
    said = f"interrupted; the same study goes on with\n  {plan.resume_command()}"
    logger.warning(said)  # where the terminal is gone
    say(console, said)


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print a line as it is, but for passwords."""
    console.print(without_secrets(line), markup=False, highlight=False, soft_wrap=True, style=style)


def busy_seconds(results: Sequence[TrialResult]) -> float:
    """Wall seconds during which at least one of the runs was under way."""
    total, until = 0.0, float("-inf")
    for result in sorted(results, key=lambda run: run.started_at):
        total += max(0.0, result.stopped_at - max(until, result.started_at))
        until = max(until, result.stopped_at)
    return total


def _policy(plan: StudyPlan, study: Study, sampler: PausingSampler | None) -> Scheduler:
    return Scheduler(
        study=study,
        space=plan.space,
        baseline=plan.baseline or Suggestion({}),
        first=first_points(plan.earlier, plan.space, seed=plan.config.study.seed),
        stopping=plan.stopping(),
        objective=plan.objective,
        target=plan.trial.target,
        seed=plan.config.study.seed,
        num_trials=plan.config.search.num_trials,
        expected_trainings=plan.config.search.expected_trainings,
        max_errors_in_a_row=plan.config.search.max_errors_in_a_row,
        sampler=sampler,
        may_repeat=plan.config.search.repeats,
    )


def _ended_runs(plan: StudyPlan, study: Study, policy: Scheduler) -> list[FinishedRun]:
    """The runs in a study's storage that have ended."""
    ended = [
        *((search_name(number), SEARCH, run) for number, run in sorted(policy.results.items())),
        *(
            (confirmation_name(*key), CONFIRM, run)
            for key, run in sorted(confirmations(study).items())
        ),
    ]
    return [
        (
            _ended_run(plan, name, phase, result),
            result,
            plan.objective.score(result) if result.outcome is Outcome.REACHED else None,
        )
        for name, phase, result in ended
    ]


def _ended_run(plan: StudyPlan, name: str, phase: str, result: TrialResult) -> Run:
    suggestion = Suggestion(result.values)

    def make_config() -> Mapping[str, object]:
        return plan.composer.compose_suggestion(suggestion, seed=result.seed).trial.as_dict()

    return Run(
        number=result.trial,
        name=name,
        phase=phase,
        trial=result.trial,
        suggestion=suggestion,
        overrides=tuple(suggestion.as_overrides()),
        make_config=make_config,
        seed=result.seed,
        started_at=result.started_at,
    )


def _tracker_info(plan: StudyPlan, launcher: Launcher | None, *, is_resumed: bool) -> StudyInfo:
    """The facts on a study for its tracker.

    Those about this machine are written to its folder, too.
    """
    with calling(launcher) as call_there:
        facts = call_there("autotune.training.diagnosis:this_machine")
    machine = {FORMAT_KEY: FORMAT, **facts}
    replace_file(plan.folder / "machine.yaml", yaml_text(machine))
    return plan.tracker_info(
        "study",
        parameters=plan.space.keys,
        baseline=plan.baseline.values if plan.baseline is not None else {},
        is_resumed=is_resumed,
    )


def _seconds_left(plan: StudyPlan, policy: Scheduler) -> float | None:
    budget = plan.config.search.time_budget_seconds
    return None if budget is None else budget - busy_seconds(list(policy.results.values()))


def _display(plan: StudyPlan, policy: Scheduler, console: Console) -> StudyDisplay:
    scores = policy.scores
    best = min(scores, key=scores.__getitem__, default=None)
    return StudyDisplay(
        title=f"{plan.experiment} · study {plan.name}",
        target=plan.trial.target,
        objective=plan.objective,
        num_trials=plan.config.search.num_trials,
        time_budget_seconds=_seconds_left(plan, policy),
        outcomes=Counter(result.outcome for result in policy.results.values()),
        train_seconds=sum(run.last.train_seconds for run in policy.results.values() if run.last),
        paused={
            trial.number: (trial.suggestion.as_overrides(), curve.last)
            for trial, curve in policy.begun
        },
        console=console,
        best=(best, scores[best]) if best is not None else None,
    )
