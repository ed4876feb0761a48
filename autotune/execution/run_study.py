"""A whole study: search, confirm, export, report.

``run_study`` passes values on; what must outlive the process is in the study's storage, and every file in the study's folder is
derived from it, so the same command goes on wherever an earlier one stood.
"""

import contextlib
import fcntl
import logging
import shlex
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from rich.console import Console

from autotune.config.build import build, build_partial, call
from autotune.config.command_line import EXIT_INTERRUPTED, EXIT_NOT_REACHED
from autotune.config.compose import Composer, split_overrides
from autotune.config.experiment_file import check_exported, experiment_yaml
from autotune.config.schema import TrialConfig
from autotune.errors import AutotuneError, ConfigError, ExecutionError, InvalidTrialError, StudyError
from autotune.execution.cluster import connected
from autotune.execution.confirmation import Arm, Confirmation, choose_arms, conclude, confirmation_seed, missing_runs
from autotune.execution.plan import StudyPlan
from autotune.measurement import Outcome, TrialResult
from autotune.recording import write_recording
from autotune.report.arms import ArmTimes, ConfirmationFigures
from autotune.report.study_files import TrialsTable, write_json
from autotune.report.terminal import StudyDisplay, Summary, format_metric, print_summary
from autotune.search.policy import SearchPolicy, importances
from autotune.search.study import confirmations, open_study, store_confirmation
from autotune.space import Suggestion
from autotune.tracking.tracker import FinishedRun, StudyInfo, TrackedTrial, Tracker
from autotune.training.device import unsupported
from autotune.training.run import versions


@dataclass(frozen=True, kw_only=True)
class StudyOutcome:
    """How a study ended."""

    exit_code: int
    confirmation: Confirmation | None


def run_study(plan: StudyPlan, *, command: Sequence[str], code_folders: Sequence[str], console: Console) -> StudyOutcome:
    """Run a planned study, or go on with it where an earlier process stood.

    Args:
        command: the arguments that started it, for the command that resumes it.
        code_folders: where modules of the user's own may lie.

    Raises:
        AutotuneError: the study cannot be run, in one line.
        WorkerError: several trials in a row failed in the user's own code.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_sole_user(plan.folder))
        stack.enter_context(_log_file(plan.folder / "autotune.log"))
        study = _open(plan)
        policy = _policy(plan, study)
        tracker = _tracker(plan, study, policy)
        closing = _Closing(tracker, plan)
        stack.push(closing.on_error)
        display = _display(plan, policy)
        resume = _resume_command(plan, command)
        confirmation, interrupted = _search_and_confirm(plan, study, policy, tracker, display, code_folders, console)
        if interrupted:
            closing.close("KILLED", {}, {})
            console.print(f"interrupted; the same study goes on with\n  {resume}", markup=False, highlight=False, soft_wrap=True)
            return StudyOutcome(exit_code=EXIT_INTERRUPTED, confirmation=None)
        if policy.error is not None:
            raise policy.error
        return _finish(plan, study, policy, confirmation, closing, console, resume)


def _search_and_confirm(
    plan: StudyPlan,
    study: optuna.Study,
    policy: SearchPolicy,
    tracker: Tracker,
    display: StudyDisplay,
    code_folders: Sequence[str],
    console: Console,
) -> tuple[Confirmation | None, bool]:
    """Search while there is budget, then confirm; whether an interrupt ended it."""
    from autotune.execution.search import interruptible  # noqa: PLC0415  # imports ray

    with _cluster(plan, needed=_is_work_left(plan, study, policy)), display, interruptible() as interrupt:
        for line in plan.dropped:
            display.note(f"left out of the search space: {line}")
        if _search_budget_left(plan, policy):
            _search(plan, policy, tracker, display, code_folders, interrupt)
        if interrupt.is_set():
            return None, True
        if policy.error is not None or not policy.scores or plan.config.confirm.num_seeds == 0:
            return None, False
        confirmation = _confirm(plan, study, policy, tracker, display, code_folders, interrupt)
        return confirmation, confirmation is None


def _search(
    plan: StudyPlan, policy: SearchPolicy, tracker: Tracker, display: StudyDisplay, code_folders: Sequence[str], interrupt: threading.Event
) -> None:
    from autotune.execution.in_flight import TrialsInFlight  # noqa: PLC0415  # imports ray
    from autotune.execution.search import run_search  # noqa: PLC0415
    from autotune.execution.worker import TrialTask  # noqa: PLC0415

    def make_task(name: str, config: TrialConfig, cap_seconds: float, deadline_seconds: float) -> TrialTask:
        return _task(plan, name, config, code_folders, cap_seconds=cap_seconds, deadline_seconds=deadline_seconds)

    table = TrialsTable(plan.folder / "trials.csv", plan.space, list(policy.results.values()), policy.scores)
    in_flight = TrialsInFlight(
        policy=policy,
        composer=plan.composer,
        tracker=tracker,
        listeners=(table, display),
        make_task=make_task,
        trial_deadline_seconds=plan.trial_deadline_seconds,
        time_budget_seconds=_seconds_left(plan, policy),
        unsupported=lambda config: unsupported(config, plan.capabilities),
        hang_folder=plan.folder,
    )
    run_search(in_flight, max_concurrent_trials=plan.config.search.max_concurrent_trials, interrupt=interrupt)
    if in_flight.refusal is not None:
        raise in_flight.refusal


def _confirm(
    plan: StudyPlan,
    study: optuna.Study,
    policy: SearchPolicy,
    tracker: Tracker,
    display: StudyDisplay,
    code_folders: Sequence[str],
    interrupt: threading.Event,
) -> Confirmation | None:
    """Run what confirmation still lacks; None where an interrupt ended it."""
    from autotune.execution.fresh import train_fresh  # noqa: PLC0415  # imports ray

    arms = _arms(plan, policy)
    runs = confirmations(study)
    missing = missing_runs(arms, plan.config.confirm.num_seeds, runs)
    total = len(arms) * plan.config.confirm.num_seeds
    for done, (arm, index) in enumerate(missing, start=total - len(missing)):
        if interrupt.is_set():
            return None
        display.confirming(done, total, arm.label)
        tracked = _tracked_confirmation(plan, arm, index, started_at=time.time())
        tracker.start(tracked)
        task = _task(
            plan, tracked.name, _arm_config(plan, arm, index), code_folders, deadline_seconds=plan.trial_deadline_seconds, score_test=True
        )
        result = train_fresh(task, trial=arm.trial, suggestion=arm.suggestion)
        store_confirmation(study, arm.trial, index, result)
        tracker.finish(tracked, result, plan.objective.score(result) if result.outcome is Outcome.REACHED else None)
        runs[arm.trial, index] = result
    display.confirming(total, total, "")
    wanted = {(arm.trial, index) for arm in arms for index in range(plan.config.confirm.num_seeds)}
    return conclude(arms, {key: run for key, run in runs.items() if key in wanted}, plan.objective)


def _finish(
    plan: StudyPlan,
    study: optuna.Study,
    policy: SearchPolicy,
    confirmation: Confirmation | None,
    closing: "_Closing",
    console: Console,
    resume: str,
) -> StudyOutcome:
    """Write the study's files, close its run and say what came of it."""
    best = confirmation.best if confirmation else None
    results = list(policy.results.values())
    TrialsTable(plan.folder / "trials.csv", plan.space, results, policy.scores)
    write_recording(
        plan.folder / "recording", results=results, target=plan.trial.target, space=plan.space.as_mapping(), source=f"autotune study {plan.name}"
    )
    if confirmation is not None and best is not None:
        write_json(plan.folder / "best.json", best_json(plan, policy, confirmation))
        (plan.folder / "best.yaml").write_text(best_yaml(plan, policy, confirmation), encoding="utf-8")
    from autotune.report.figures import write_figures  # noqa: PLC0415  # matplotlib is wanted once, at the end

    figures = write_figures(
        plan.folder / "figures",
        results=results,
        scores=policy.scores,
        target=plan.trial.target,
        importances=importances(results, policy.scores, plan.space),
        confirmation=_confirmation_figures(confirmation) if confirmation else None,
    )
    speed_up = confirmation.speed_up if confirmation else None
    closing.close(
        "FINISHED",
        {"speed_up": speed_up.ratio, "speed_up_low": speed_up.low, "speed_up_high": speed_up.high} if speed_up else {},
        {"autotune.best_trial": str(best.trial)} if best else {},
        artifacts=[*(plan.folder / name for name in ("best.yaml", "best.json", "trials.csv") if (plan.folder / name).is_file()), *figures],
    )
    if best is None and (confirmation is not None or not policy.scores):
        _say_nothing_reached(plan, results, confirmation, console, resume)
        return StudyOutcome(exit_code=EXIT_NOT_REACHED, confirmation=confirmation)
    if confirmation is None:
        number = min(policy.scores, key=lambda number: policy.scores[number])
        console.print(f"not confirmed (confirm=none), so nothing is exported; the fastest trial was {number}", markup=False, highlight=False)
        return StudyOutcome(exit_code=0, confirmation=None)
    print_summary(console, _summary(plan, policy, confirmation, resume))
    return StudyOutcome(exit_code=0, confirmation=confirmation)


def best_json(plan: StudyPlan, policy: SearchPolicy, confirmation: Confirmation) -> dict[str, Any]:
    """What a study found, for programs."""
    assert confirmation.best is not None and confirmation.speed_up is not None
    best = confirmation.best
    own_runs = [run for (trial, _), run in sorted(confirmation.runs.items()) if trial == best.trial]
    tests = [run.test_metric for run in own_runs if run.test_metric is not None]
    target = plan.trial.target
    return {
        "study": plan.name,
        "experiment": plan.experiment,
        "target": {"metric": target.metric, "value": target.value, "mode": target.mode, "max_train_seconds": target.max_train_seconds},
        "trial": best.trial,
        "overrides": best.suggestion.as_overrides(),
        "baseline": _arm_json(confirmation.times[confirmation.arms[0].trial]),
        "best": {**_arm_json(confirmation.times[best.trial]), "test_metrics": tests},
        "speed_up": {"ratio": confirmation.speed_up.ratio, "low": confirmation.speed_up.low, "high": confirmation.speed_up.high},
        "outcomes": _outcomes(policy.results.values()),
        "num_trials": len(policy.results),
        "train_seconds_spent": _train_seconds(policy.results.values()),
        "wall_seconds": _wall_seconds([*policy.results.values(), *confirmation.runs.values()]),
        "device": own_runs[0].fingerprint.get("device"),
        "versions": versions(),
    }


def best_yaml(plan: StudyPlan, policy: SearchPolicy, confirmation: Confirmation) -> str:
    """What a study found, as an experiment file; checked to compose to the trial's own configuration.

    Raises:
        ConfigError: the configuration cannot be written as an experiment.
    """
    assert confirmation.best is not None and confirmation.speed_up is not None
    best, composer = confirmation.best, plan.composer
    groups, values = split_overrides(composer, composer.overrides)
    for key, value in best.suggestion.values.items():
        if composer.is_group(key):
            groups[key] = value
        else:
            values[key] = value
    seed = policy.results[best.trial].seed
    exported = {"seed": seed, **values}
    times = confirmation.times[best.trial]
    comments = [
        f"Exported by autotune from study {plan.name}, {best.label}: {plan.trial.target.metric} {plan.trial.target.value:g} in "
        f"{', '.join(f'{each:.3g}' for each in times.times_seconds)} s on fresh seeds,",
        f"{confirmation.speed_up.ratio:.2f} times as fast as the baseline (95% interval {confirmation.speed_up.low:.2f} to "
        f"{confirmation.speed_up.high:.2f}). The seed is the search trial's own.",
    ]
    text = experiment_yaml(base=plan.experiment, groups=groups, values=exported, comments=comments)
    allowed = [f"allowed_targets={list(composer.allowed_targets)}"] if composer.allowed_targets else []
    again = Composer(
        [f"experiment={plan.experiment}", f"seed={seed}", *allowed, *(f"{group}={option}" for group, option in groups.items()),
         *Suggestion(values).as_overrides()],
        [str(folder) for folder in composer.config_dirs],
    )  # fmt: skip
    check_exported(again.compose().trial, composer.compose_suggestion(best.suggestion, seed=seed).trial)
    return text


def _arm_json(times: ArmTimes) -> dict[str, Any]:
    reached = [seconds for seconds, ended in zip(times.times_seconds, times.reached, strict=True) if ended]
    return {"times_seconds": reached, "num_runs": len(times.reached), "num_reached": len(reached)}


def _task(
    plan: StudyPlan,
    name: str,
    config: TrialConfig,
    code_folders: Sequence[str],
    *,
    deadline_seconds: float,
    cap_seconds: float = float("inf"),
    score_test: bool = False,
) -> Any:
    from autotune.execution.worker import TrialTask  # noqa: PLC0415  # imports ray

    num_cpus, num_gpus = plan.resources(config)
    return TrialTask(
        name=name,
        config=config,
        cap_seconds=cap_seconds,
        num_threads=plan.config.cluster.cpus_per_worker,
        deadline_seconds=deadline_seconds,
        code_folders=tuple(code_folders),
        working_folder=str(Path.cwd()),
        hang_folder=str(plan.folder),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        score_test=score_test,
    )


def _arms(plan: StudyPlan, policy: SearchPolicy) -> tuple[Arm, ...]:
    return choose_arms(policy.baseline_trial, plan.baseline or Suggestion({}), policy.results, policy.scores, plan.config.confirm.num_candidates)


def _arm_config(plan: StudyPlan, arm: Arm, index: int) -> TrialConfig:
    seed = confirmation_seed(plan.config.study.seed, index)
    return plan.composer.compose_suggestion(arm.suggestion, seed=seed).trial


def _tracked_confirmation(plan: StudyPlan, arm: Arm, index: int, *, started_at: float) -> TrackedTrial:
    config = _arm_config(plan, arm, index)
    return TrackedTrial(
        name=f"confirm-{arm.trial}-{index}",
        phase="confirm",
        trial=arm.trial,
        values=arm.suggestion.values,
        overrides=tuple(arm.suggestion.as_overrides()),
        config=config.as_dict(),
        seed=config.seed,
        started_at=started_at,
    )


def _open(plan: StudyPlan) -> optuna.Study:
    allowed = plan.trial.allowed_targets
    made = build_partial(plan.config.search.sampler, allowed, "search.sampler")
    study = open_study(
        plan.name,
        plan.folder,
        storage_url=plan.config.search.storage,
        sampler=optuna.samplers.RandomSampler(),
        definition=plan.definition(),
    )
    from autotune.search.policy import derived_seed  # noqa: PLC0415
    from autotune.training.components import accepted_arguments  # noqa: PLC0415

    # A resumed sampler must not draw again what it drew at the start, so its seed counts the trials there are.
    seed = derived_seed(plan.config.study.seed, f"sampler {len(study.get_trials(deepcopy=False))}")
    sampler = call(made, "search.sampler", **accepted_arguments(made, {"seed": seed}))
    if not isinstance(sampler, optuna.samplers.BaseSampler):
        raise ConfigError(f"search.sampler: {plan.config.search.sampler['_target_']} made {type(sampler).__name__}, accepted is an Optuna sampler")
    study.sampler = sampler
    return study


def _policy(plan: StudyPlan, study: optuna.Study) -> SearchPolicy:
    return SearchPolicy(
        study=study,
        space=plan.space,
        baseline=plan.baseline,
        stopping=plan.stopping(),
        objective=plan.objective,
        target=plan.trial.target,
        seed=plan.config.study.seed,
        num_trials=plan.config.search.num_trials,
        max_errors_in_a_row=plan.config.search.max_errors_in_a_row,
    )


def _tracker(plan: StudyPlan, study: optuna.Study, policy: SearchPolicy) -> Tracker:
    scores = policy.scores
    finished: list[FinishedRun] = [
        (_tracked_search(plan, result), result, scores.get(number)) for number, result in sorted(policy.results.items())
    ]
    for (trial, index), result in sorted(confirmations(study).items()):
        arm = Arm(trial=trial, label="", suggestion=Suggestion(result.values))
        score = plan.objective.score(result) if result.outcome is Outcome.REACHED else None
        finished.append((_tracked_confirmation(plan, arm, index, started_at=result.started_at), result, score))
    target = plan.trial.target
    info = StudyInfo(
        name=plan.name,
        workload=plan.workload,
        experiment=plan.experiment,
        folder=str(plan.folder),
        settings={
            "experiment": plan.experiment,
            "target": f"{target.metric} {target.value:g}",
            "max_train_seconds": target.max_train_seconds,
            "sampler": plan.config.search.sampler["_target_"].rpartition(".")[2],
            "stopping": plan.config.stopping["_target_"].rpartition(".")[2],
            "objective": plan.config.objective["_target_"].rpartition(".")[2],
            "num_trials": plan.config.search.num_trials,
            "time_budget_seconds": plan.config.search.time_budget_seconds,
            "seed": plan.config.study.seed,
        },
        tags={"autotune.device": plan.capabilities.device_name},
    )
    made = build_partial(plan.config.tracking, plan.trial.allowed_targets, "tracking")
    return call(made, "tracking", info, finished=finished)  # type: ignore[no-any-return]  # the contract of tracking:


def _tracked_search(plan: StudyPlan, result: TrialResult) -> TrackedTrial:
    config = plan.composer.compose_suggestion(Suggestion(result.values), seed=result.seed).trial
    return TrackedTrial(
        name=f"trial-{result.trial}",
        phase="search",
        trial=result.trial,
        values=result.values,
        overrides=result.overrides,
        config=config.as_dict(),
        seed=result.seed,
        started_at=result.started_at,
    )


class _Closing:
    """Closes the tracker once, however the study ends, so that no run is left open."""

    def __init__(self, tracker: Tracker, plan: StudyPlan) -> None:
        self._tracker = tracker
        self._plan = plan
        self._is_open = True

    def close(self, status: str, metrics: Mapping[str, float], tags: Mapping[str, str], artifacts: Sequence[Path] = ()) -> None:
        """Close it now."""
        self._is_open = False
        self._tracker.close(status=status, metrics=metrics, tags=tags, artifacts=artifacts)

    def on_error(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Close it as failed, or as ended by the user, where the study did not come to close it."""
        if self._is_open:
            self.close("KILLED" if kind is not None and issubclass(kind, KeyboardInterrupt) else "FAILED", {}, {})


def _display(plan: StudyPlan, policy: SearchPolicy) -> StudyDisplay:
    scores = policy.scores
    best = min(scores, key=lambda number: scores[number], default=None)
    return StudyDisplay(
        title=f"{plan.experiment} · study {plan.name}",
        target=plan.trial.target,
        num_trials=plan.config.search.num_trials,
        time_budget_seconds=_seconds_left(plan, policy),
        num_done=len(policy.results),
        best=(best, scores[best]) if best is not None else None,
    )


@contextlib.contextmanager
def _cluster(plan: StudyPlan, *, needed: bool) -> Iterator[None]:
    if not needed:
        yield
        return
    with connected(plan.config.cluster):
        yield


def _is_work_left(plan: StudyPlan, study: optuna.Study, policy: SearchPolicy) -> bool:
    if policy.error is not None:
        return False
    if _search_budget_left(plan, policy):
        return True
    return bool(policy.scores) and bool(missing_runs(_arms(plan, policy), plan.config.confirm.num_seeds, confirmations(study)))


def _search_budget_left(plan: StudyPlan, policy: SearchPolicy) -> bool:
    seconds = _seconds_left(plan, policy)
    return policy.num_trials_left != 0 and (seconds is None or seconds > 0) and policy.error is None


def _seconds_left(plan: StudyPlan, policy: SearchPolicy) -> float | None:
    budget = plan.config.search.time_budget_seconds
    return None if budget is None else budget - _wall_seconds(list(policy.results.values()))


def _wall_seconds(results: Sequence[TrialResult]) -> float:
    """Seconds during which at least one of the runs was under way."""
    total, until = 0.0, float("-inf")
    for result in sorted(results, key=lambda each: each.started_at):
        total += max(0.0, result.stopped_at - max(until, result.started_at))
        until = max(until, result.stopped_at)
    return total


def _train_seconds(results: Any) -> float:
    return sum(result.last.train_seconds for result in results if result.last is not None)


def _outcomes(results: Any) -> dict[str, int]:
    return dict(Counter(result.outcome.value for result in results))


def _confirmation_figures(confirmation: Confirmation) -> ConfirmationFigures:
    baseline, best = confirmation.arms[0], confirmation.best
    first = [baseline] if best in (None, baseline) else [baseline, best]
    ordered = [*first, *(arm for arm in confirmation.arms if arm not in first)]
    ratio = confirmation.speed_up
    return ConfirmationFigures(
        arms=[_labelled(confirmation, arm) for arm in ordered],
        ratio=ratio.ratio if ratio else None,
        low=ratio.low if ratio else None,
        high=ratio.high if ratio else None,
    )


def _labelled(confirmation: Confirmation, arm: Arm) -> ArmTimes:
    times = confirmation.times[arm.trial]
    is_exported = confirmation.best is not None and arm.trial == confirmation.best.trial and arm is not confirmation.arms[0]
    label = f"{arm.label} (exported)" if is_exported else arm.label
    return ArmTimes(label=label, times_seconds=times.times_seconds, reached=times.reached)


def _summary(plan: StudyPlan, policy: SearchPolicy, confirmation: Confirmation, resume: str) -> Summary:
    assert confirmation.best is not None and confirmation.speed_up is not None
    folder = _shown(plan.folder)
    exported = f"{plan.experiment}_best"
    uri = plan.config.tracking.get("uri")
    return Summary(
        study=plan.name,
        experiment=plan.experiment,
        target=plan.trial.target,
        baseline=confirmation.times[confirmation.arms[0].trial],
        best=confirmation.times[confirmation.best.trial],
        best_overrides=confirmation.best.suggestion.as_overrides(),
        ratio=confirmation.speed_up.ratio,
        low=confirmation.speed_up.low,
        high=confirmation.speed_up.high,
        outcomes=_outcomes(policy.results.values()),
        train_seconds_spent=_train_seconds(policy.results.values()),
        wall_seconds=_wall_seconds([*policy.results.values(), *confirmation.runs.values()]),
        folder=folder,
        next_commands=(
            ("browse the runs", "mlflow ui" + (f" --backend-store-uri {shlex.quote(uri)}" if uri else "")),
            ("export the best", f"python -m autotune.export study={plan.name} as={exported} --config-dir my_conf"),
            ("train it again", f"python -m autotune.train experiment={exported} --config-dir my_conf"),
            ("search further", f"{resume} search.num_trials={2 * len(policy.results)}"),
        ),
    )


def _say_nothing_reached(
    plan: StudyPlan, results: Sequence[TrialResult], confirmation: Confirmation | None, console: Console, resume: str
) -> None:
    """What came closest, and what to do about it."""
    target = plan.trial.target
    sign = 1 if target.mode == "max" else -1
    measured = [(each.last.metric * sign, each) for each in results if each.last is not None and each.last.metric == each.last.metric]
    lines = [f"nothing reached {target.metric} {target.value:g}" + (" again on fresh seeds" if confirmation else "")]
    if measured and confirmation is None:
        metric, closest = max(measured, key=lambda each: each[0])
        lines.append(f"closest: trial {closest.trial}, {target.metric} {format_metric(metric * sign)}: {' '.join(closest.overrides)}")
    lines.append(f"search further: {resume} search.num_trials={2 * len(results)}, or set target.value or target.max_train_seconds")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _resume_command(plan: StudyPlan, command: Sequence[str]) -> str:
    kept = [each for each in command if not each.startswith(("study.name=", "dry_run="))]
    return shlex.join(["python", "-m", "autotune", *kept, f"study.name={plan.name}"])


def _shown(folder: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(folder.relative_to(Path.cwd()))
    return str(folder)


@contextlib.contextmanager
def _sole_user(folder: Path) -> Iterator[None]:
    """Hold the study's folder; the lock goes with the process, however that ends.

    Raises:
        StudyError: another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise StudyError(f"study.folder: {folder}: cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StudyError(f"study.name={folder.name}: another process runs this study; accepted is another study.name") from error
        yield


@contextlib.contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Everything that is logged, by autotune and by the libraries, goes to the study's log file."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
