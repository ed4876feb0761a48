"""Running a whole study: search, confirmation, export and report.

Everything that must outlive the process is in the study's storage, and every file in the study's
folder is derived from the storage, so the same command resumes a study wherever an earlier process
stopped.
"""

import shutil
from collections.abc import Generator, Iterator
from contextlib import ExitStack

from rich.console import Console

from autotune.confirm.confirmation import Confirmation, conclude, confirmation_seed
from autotune.confirm.race import RaceState
from autotune.confirm.turns import Turns, compiled_anew, num_side_by_side, quiet
from autotune.execution.cluster import ClusterSize, RaySession
from autotune.execution.conclusion import conclude_study, import_for_conclusion
from autotune.execution.devices import Devices
from autotune.execution.exported import keep_first_weights, run_weights_path
from autotune.execution.launcher import Launcher
from autotune.execution.live_study import LiveStudy, opened, say_interrupted
from autotune.execution.plan import StudyPlan
from autotune.execution.task import TrialTask
from autotune.execution.trial_manager import TrialManager
from autotune.files import make_folder
from autotune.measurement import TrialResult
from autotune.outcome import Outcome
from autotune.policy import CONFIRM, Done, Run, confirmation_name
from autotune.reporting.runs_terminal import RunsDisplay
from autotune.reporting.study_files import StudyTables
from autotune.search.outlook import NUM_AHEAD
from autotune.search.points import num_points
from autotune.search.study import confirmations, store_confirmation
from autotune.training.main_thread import in_thread


def run_study(
    plan: StudyPlan,
    *,
    console: Console,
    connection: RaySession,
    launcher: Launcher | None = None,
) -> int:
    """Run a planned study, or resume it where an earlier process stopped.

    Args:
        connection: connection to Ray; closed as soon as no worker is needed any more.
        launcher: the driver's own launcher, for trials and confirmation runs on this machine.

    Returns:
        The exit code: 0 finished, 3 nothing reached the target, 130 interrupted.

    Raises:
        AutotuneError: the study cannot be run; the message is one line.
        WorkerError: several trials in a row failed in the user's own code.
        ConfigError: a worker did not measure a quantity that the objective needs.
    """
    with opened(plan, console=console, connection=connection, launcher=launcher) as live:
        try:
            confirmation = _search_and_confirm(live)
            if not live.interrupt.is_set():
                concluded = in_thread("conclude", conclude_study, live, confirmation)
                connection.close()  # takes a second, and needs the main thread
                return concluded.result()
        except KeyboardInterrupt:  # a second Ctrl-C ends the study at once
            live.interrupt.set()
            live.tracker.close_seconds = 1.0
        say_interrupted(console, plan)
        return live.interrupt.exit_code


def _search_and_confirm(live: LiveStudy) -> Confirmation | None:
    """Search while there is budget, then confirm.

    Return early, with None, once the study is interrupted.
    """
    plan, connection, interrupt = live.plan, live.connection, live.interrupt
    if not live.is_work_left:
        return _conclude_stored(live)
    connection.start()
    try:
        with live.console.status("starting Ray") as status:
            if not plan.config.cluster.is_local:  # Ray must first know whether it needs a token
                connection.size(interrupt)
            from autotune.execution import ray_tune  # noqa: PLC0415  # imports ray, as it starts

            size = connection.size(interrupt)
            if not plan.may_grow:
                size.check_holds("a trial", *plan.placed(plan.trial))
            status.update("opening the tracker, which gets what it lacks of earlier trials")
            live.tracker.wait()  # raises the tracker's errors before anything is trained
        with ExitStack() as shown, plan.saved_on_notice(interrupt):
            phases = _phases(live, size, shown)
            connection.run(
                lambda: ray_tune.make_runs(phases, plan, connection, interrupt), interrupt
            )
        if interrupt.is_set():
            return None
    finally:
        # otherwise it is closed while the study is concluded or, if Ray is gone, last
        if interrupt.is_set() and not connection.is_lost:
            connection.close()
    return _conclude_stored(live)


def _phases(
    live: LiveStudy, size: ClusterSize, shown: ExitStack
) -> Generator[TrialManager, None, None]:
    """Yield the trial manager of the search, and then that of the confirmation, as far as there is
    something left of each.

    Args:
        shown: holds the display of the phase.
    """
    devices = Devices()
    if live.has_search:
        shown.enter_context(live.display)
        yield from _search(live, size, devices)
        shown.close()
    if live.needs_confirmation and live.race_state().pending:
        num_cpus, num_gpus = live.plan.resources(live.plan.trial)
        if num_gpus or num_cpus < live.plan.capabilities.num_cpus:  # the runs leave a CPU idle
            in_thread("import", import_for_conclusion)
        yield from _confirm(live, size, devices, shown)


def _search(live: LiveStudy, size: ClusterSize, devices: Devices) -> Iterator[TrialManager]:
    """Yield the trial manager of the search, and conclude the search once that has finished."""
    plan, policy = live.plan.for_search(), live.policy
    for line in plan.device_lines(plan.trial):
        live.display.note(f"device: {line}")
    for line in plan.dropped:
        live.display.note(f"left out of the search space: {line}")
    for study in plan.earlier:
        live.display.note(f"warm start: {study.summary}")
    tables = StudyTables(
        plan.folder,
        plan.space,
        list(policy.results.values()),
        policy.scores,
        plan.score_format.unit,
    )

    def make_task(run: Run) -> TrialTask:
        config = plan.composer.compose_suggestion(run.suggestion, seed=run.seed).trial
        launcher = live.launcher and live.launcher.address
        return plan.task(run.name, config, number=run.number, launcher=launcher)

    trials = TrialManager.of(
        plan,
        live.connection,
        size,
        policy=policy,
        interrupt=live.interrupt,
        note=live.display.note,
        tracker=live.tracker,
        listeners=(tables, live.display),
        make_task=make_task,
        time_budget_seconds=live.seconds_left,
        max_concurrent_trials=plan.config.search.max_concurrent_trials,
        on_end=live.delete_leftovers,
        devices=devices,
    )
    try:
        yield trials
    finally:
        _tell_why_it_ends(live, trials.done)
    for folder in plan.state_folder("").glob("trial-*"):
        shutil.rmtree(folder, ignore_errors=True)


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


def _confirm(
    live: LiveStudy, size: ClusterSize, devices: Devices, shown: ExitStack
) -> Iterator[TrialManager]:
    """Yield the trial manager of the confirmation runs that the study still lacks."""
    plan, race = live.plan, live.planned_race()
    configurations = {each.trial: each for each in race.configurations}
    order = list(configurations)
    make_folder(run_weights_path(plan.folder, "").parent)
    display = RunsDisplay(
        live.console,
        plan.trial.target,
        plan.objective,
        noun="confirmation run",
        num_ended=len(race.runs(confirmations(live.study))),
    )
    display.note(f"confirmation runs of {', '.join(each.label for each in race.configurations)}")

    def run(now: RaceState, trial: int, race_round: int) -> Run:
        configuration, number = configurations[trial], race_round + race.first_round
        phase = "choosing" if now.winner is None and len(configurations) > 1 else "claim"
        key = number * len(order) + order.index(trial)
        display.labels[key] = f"{configuration.label} ({phase})"
        return Run(
            number=key,
            name=confirmation_name(trial, number),
            suggestion=configuration.suggestion,
            overrides=tuple(configuration.suggestion.as_overrides()),
            seed=confirmation_seed(plan.config.study.seed, number),
            phase=CONFIRM,
            trial=trial,
            round=number,
            may_have_begun=True,
        )

    def make_task(run: Run) -> TrialTask:
        return plan.task(
            run.name,
            plan.composer.compose_suggestion(run.suggestion, seed=run.seed).trial,
            number=run.trial,
            score_test=True,
            weights_path=str(run_weights_path(plan.folder, run.name)),
            launcher=live.launcher and live.launcher.address,
        )

    first_runs = [run(live.race_state(), trial, 0) for trial in configurations]
    first_tasks = [make_task(first) for first in first_runs]
    num_workers, are_alike = num_side_by_side(first_tasks, plan.capabilities, size)

    def batches() -> Iterator[list[list[Run]]]:
        while (now := live.race_state()).pending:
            display.num_runs = now.num_runs
            units = now.batch(num_workers if are_alike or now.claim_rounds else 1)
            yield [[run(now, *key) for key in unit] for unit in units]

    def on_end(run: Run, result: TrialResult) -> float | None:
        store_confirmation(live.study, run.trial, run.round, result)
        keep_first_weights(plan.folder, run.name, result)
        live.delete_leftovers(race.runs(confirmations(live.study)))
        return plan.objective.score(result) if result.outcome is Outcome.REACHED else None

    with compiled_anew(plan.folder) as anew:
        shown.enter_context(display.status)
        shown.enter_context(quiet(live.tracker, plan, first_tasks))
        yield TrialManager.of(
            plan,
            live.connection,
            size,
            policy=Turns(batches(), on_end),
            interrupt=live.interrupt,
            note=display.note,
            tracker=live.tracker,
            listeners=(display,),
            make_task=lambda run: anew(make_task(run)),
            max_concurrent_trials=num_workers,
            devices=devices,
        )


def _conclude_stored(live: LiveStudy) -> Confirmation | None:
    """Conclude the race from the confirmation runs in the storage.

    None if the study has no confirmation.
    """
    if not live.needs_confirmation:
        return None
    race = live.planned_race()
    return conclude(race, confirmations(live.study), live.race_limits(race), live.plan.objective)
