"""Running a whole study: search, confirmation, export and report.

Everything that must outlive the process is in the study's storage, and every file in the study's
folder is derived from the storage, so the same command resumes a study wherever an earlier process
stopped.
"""

import logging
import shutil
import threading
from collections.abc import Iterator, Sequence
from functools import partial

from rich.console import Console

from autotune.config.command_line import EXIT_WORKER_ERROR
from autotune.config.schema import TrialConfig
from autotune.confirm.confirmation import Confirmation, conclude, confirmation_seed
from autotune.confirm.race import RaceState
from autotune.confirm.runs import Lanes, Run, RunsInTurns
from autotune.errors import ClusterError
from autotune.execution.cluster import ClusterSize, RaySession
from autotune.execution.conclusion import conclude_study, import_for_conclusion
from autotune.execution.exported import keep_first_weights, run_weights_path
from autotune.execution.launcher import Launcher
from autotune.execution.live_study import (
    LiveStudy,
    opened,
    say,
    tracked_run,
)
from autotune.execution.plan import StudyPlan
from autotune.execution.task import TrialTask
from autotune.files import make_folder
from autotune.measurement import TrialResult
from autotune.reporting.runs_terminal import RunsDisplay
from autotune.reporting.study_files import StudyTables
from autotune.search.outlook import NUM_AHEAD
from autotune.search.points import num_points
from autotune.search.scheduler import Done
from autotune.search.study import confirmations, store_confirmation
from autotune.tracking.tracker import StudyEnd, confirmation_name

logger = logging.getLogger(__name__)


def run_study(
    plan: StudyPlan,
    *,
    console: Console,
    connection: RaySession,
    launcher: Launcher | None = None,
    trains: bool = True,
) -> int:
    """Run a planned study, or resume it where an earlier process stopped.

    Args:
        connection: connection to Ray; closed as soon as no worker is needed any more.
        launcher: the driver's own launcher, for trials and confirmation runs on this machine.
        trains: whether anything is trained; if not, the tracker is only given what it lacks of the
            study.

    Returns:
        The exit code: 0 finished, 3 nothing reached the target, 130 interrupted; 1, without
            ``trains``, if the tracker lacks something.

    Raises:
        AutotuneError: the study cannot be run; the message is one line.
        WorkerError: several trials in a row failed in the user's own code.
        ConfigError: a worker did not measure a quantity that the objective needs.
    """
    with opened(plan, console=console, connection=connection, launcher=launcher) as live:
        if not trains:
            return _push(live)
        try:
            confirmation = _search_and_confirm(live)
            if not live.interrupt.is_set():
                if live.policy.error is not None:
                    raise live.policy.error
                return conclude_study(live, confirmation)
        except ClusterError as error:
            if not connection.is_lost:
                raise
            raise ClusterError(
                f"{error}; what was found is kept, and the study goes on with:"
                f" {plan.command_line()}"
            ) from error
        except KeyboardInterrupt:  # a second Ctrl-C ends the study at once
            live.interrupt.set()
            live.tracker.close_seconds = 1.0
        said = f"interrupted; the same study goes on with\n  {plan.command_line()}"
        logger.warning(said)  # where the terminal is gone
        say(console, said)
        return live.interrupt.exit_code


def _push(live: LiveStudy) -> int:
    """Give the tracker what it lacks of a study, conclude the study again if it has ended, and
    return the exit code.
    """
    live.tracker.wait()
    if live.is_work_left:
        live.tracker.close(StudyEnd(status="KILLED"))
    else:
        conclude_study(live, _conclude_stored(live))
    if not live.tracker.is_complete:
        return EXIT_WORKER_ERROR
    say(
        live.console,
        f"{live.tracker.name} holds all runs of study {live.plan.name} that have ended",
    )
    return 0


def _search_and_confirm(live: LiveStudy) -> Confirmation | None:
    """Search while there is budget, then confirm.

    Return early, with None, once the study is interrupted.
    """
    plan, policy = live.plan, live.policy
    connection, interrupt = live.connection, live.interrupt
    if not live.is_work_left:
        return _conclude_stored(live)
    connection.start()
    try:
        with live.console.status("starting Ray") as status:
            if plan.config.cluster.is_local:  # else Ray must first know whether it needs a token
                # imports ray.tune while Ray starts
                import autotune.execution.search  # noqa: F401, PLC0415

            size = connection.size(interrupt)
            if not plan.may_grow:
                size.check_holds("a trial", *plan.placed(plan.trial))
            status.update("opening the tracker, which gets what it lacks of earlier trials")
            live.tracker.wait()  # raises the tracker's errors before anything is trained
        with live.display, plan.saved_on_notice(interrupt):
            for line in plan.device_lines(plan.trial):
                live.display.note(f"device: {line}")
            for line in plan.dropped:
                live.display.note(f"left out of the search space: {line}")
            for study in plan.earlier:
                live.display.note(f"warm start: {study.summary}")
            if live.has_search and not interrupt.is_set():
                connection.run(lambda: _search(live, size), interrupt)
        if interrupt.is_set() or policy.error is not None or not live.needs_confirmation:
            return None
        num_cpus, num_gpus = plan.resources(plan.trial)
        if num_gpus or num_cpus < plan.capabilities.num_cpus:  # the runs leave a CPU idle
            threading.Thread(target=import_for_conclusion, name="import", daemon=True).start()
        with plan.saved_on_notice(interrupt):
            connection.run(lambda: _confirm(live, size), interrupt)
    finally:
        if not connection.is_lost:  # otherwise it is closed last: what Ray does then is uncertain
            connection.close()
    return _conclude_stored(live)


def _search(live: LiveStudy, size: ClusterSize) -> None:
    from autotune.execution import search, trial_manager  # noqa: PLC0415  # imports ray

    plan, policy = live.plan.for_search(), live.policy
    size = size.split(plan.trials_per_gpu)
    tables = StudyTables(
        plan.folder,
        plan.space,
        list(policy.results.values()),
        policy.scores,
        plan.score_format.unit,
    )

    def size_now() -> ClusterSize:
        return live.connection.size_now().split(plan.trials_per_gpu)

    def has_room(tasks: Sequence[TrialTask]) -> bool:
        if not tasks:
            return True
        return plan.may_grow or size_now().has_room(tasks, *plan.resources(plan.trial))

    def unsuitable(config: TrialConfig) -> str | None:
        shortage = None if plan.may_grow else size.shortage(*plan.placed(config))
        return plan.unsuitable(config) or shortage

    def tell_of_waiting(task: TrialTask) -> None:
        if (shortage := size_now().shortage(*plan.placed(task.config))) is not None:
            live.display.note(f"{task.name} waits for machines: {shortage}")

    trials = trial_manager.TrialManager(
        policy=policy,
        composer=plan.composer,
        tracker=live.tracker,
        listeners=(tables, live.display),
        make_task=partial(plan.task, launcher=live.launcher and live.launcher.address),
        has_room=has_room,
        state_folder=plan.state_folder,
        max_retries=plan.config.search.max_retries,
        max_retakes=plan.config.search.max_retakes,
        time_budget_seconds=live.seconds_left,
        unsuitable=unsuitable,
        max_concurrent_trials=plan.config.search.max_concurrent_trials,
        on_waiting=tell_of_waiting,
        has_notice=live.interrupt.notice.is_set,
        on_end=live.delete_leftovers,
    )
    search.run_search(
        trials,
        folder=plan.folder / ".ray",
        interrupt=live.interrupt,
        check_ray=live.connection.check,
    )
    _tell_why_it_ends(live, trials.done)
    if trials.is_finished:  # otherwise the states of paused trials are still needed
        for folder in plan.state_folder("").glob("trial-*"):
            shutil.rmtree(folder, ignore_errors=True)
    if trials.refusal is not None:
        raise trials.refusal


def _tell_why_it_ends(live: LiveStudy, done: Done | None) -> None:
    """Show why a search ends before its budget is spent."""
    plan, policy = live.plan, live.policy
    if done == Done("not worth") and policy.outlook is not None:
        outlook, scale = policy.outlook, plan.score_format
        trainings = plan.config.search.expected_trainings or 0
        saved = scale.format(trainings * outlook.saving)
        live.display.note(
            f"the search ends: {NUM_AHEAD} more trials cost {scale.format(outlook.cost)}"
            f" and are expected to save {saved} over {trainings:,} trainings"
        )
    if done == Done("exhausted"):
        live.display.note(
            f"the search ends: all {num_points(plan.space):,.0f} points of the search space have"
            " been tried (search.repeats=true lets a sampler of Optuna's try them again)"
        )


def _confirm(live: LiveStudy, size: ClusterSize) -> None:
    """Make the confirmation runs that the study still lacks."""
    plan, race = live.plan, live.planned_race()
    configurations = {each.trial: each for each in race.configurations}
    make_folder(run_weights_path(plan.folder, "").parent)

    def run(now: RaceState, trial: int, race_round: int) -> Run:
        configuration, number = configurations[trial], race_round + race.first_round
        suggestion, name = configuration.suggestion, confirmation_name(trial, number)
        seed = confirmation_seed(plan.config.study.seed, number)
        phase = "choosing" if now.winner is None and len(configurations) > 1 else "claim"
        task = plan.task(
            name,
            plan.composer.compose_suggestion(suggestion, seed=seed).trial,
            number=trial,
            score_test=True,
            weights_path=str(run_weights_path(plan.folder, name)),
        )
        return Run(
            configuration=trial,
            number=number,
            label=f"{configuration.label} ({phase})",
            num_runs=now.num_runs,
            task=task,
            tracked=tracked_run(
                plan, name, "confirm", trial=trial, suggestion=suggestion, seed=seed
            ),
        )

    first_runs = [run(live.race_state(), trial, 0) for trial in configurations]
    lanes = Lanes.of([first.task for first in first_runs], plan.capabilities, size)

    def batches() -> Iterator[list[list[Run]]]:
        while (now := live.race_state()).pending:
            goes_side_by_side = lanes.are_alike or now.claim_rounds
            for_lanes = now.batch(lanes.number if goes_side_by_side else 1)
            yield [[run(now, *key) for key in unit] for unit in for_lanes]

    def on_end(run: Run, result: TrialResult) -> None:
        store_confirmation(live.study, run.configuration, run.number, result)
        keep_first_weights(plan.folder, run.tracked.name, result)
        live.delete_leftovers(race.runs(confirmations(live.study)))

    display = RunsDisplay(
        live.console,
        plan.trial.target,
        plan.score_format,
        noun="confirmation run",
        num_ended=len(race.runs(confirmations(live.study))),
    )
    display.note(f"confirmation runs of {', '.join(each.label for each in race.configurations)}")
    with display.status:
        RunsInTurns(
            plan=plan,
            connection=live.connection,
            tracker=live.tracker,
            display=display,
            interrupt=live.interrupt,
            launcher=live.launcher,
        ).make(batches(), lanes=lanes, on_end=on_end)


def _conclude_stored(live: LiveStudy) -> Confirmation | None:
    """Conclude the race from the confirmation runs in the storage.

    None if the study has no confirmation.
    """
    if not live.needs_confirmation:
        return None
    race = live.planned_race()
    return conclude(race, confirmations(live.study), live.race_limits(race), live.plan.objective)
