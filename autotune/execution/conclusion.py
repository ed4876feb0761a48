"""The end of a study: its result files, its report, its printed summary and the experiment file that it exports."""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from autotune.config.command_line import EXIT_NOT_REACHED
from autotune.config.compose import split_overrides
from autotune.config.experiment_file import check_exported, experiment_yaml, train_command
from autotune.config.schema import TrialConfig
from autotune.errors import FileError, StudyError, WorkerError
from autotune.execution.best_weights import BEST_WEIGHTS, best_model, keep_best
from autotune.execution.confirmation import Confirmation
from autotune.execution.exported import ARGUMENTS, SCRIPT, compose_exported, write_program
from autotune.execution.live_study import LiveStudy, busy_seconds, study_settings
from autotune.execution.plan import StudyPlan
from autotune.execution.study_folder import shown_path
from autotune.files import FORMATS, replace_file
from autotune.hiding import MARK, without_secrets, without_secrets_in
from autotune.measurement import Target, TrialResult, differing_devices
from autotune.objective import Pareto
from autotune.outcome import Outcome
from autotune.race import Arm
from autotune.reporting.failures import EndedTrial, gathered_failures
from autotune.reporting.scores import describe_arm, describe_ratio, describe_reached, score_format_of
from autotune.reporting.study_files import (
    REPORT,
    SUMMARY,
    Front,
    TrialsTable,
    arm_json,
    describe_front,
    json_text,
    make_front,
    write_front,
    write_json,
)
from autotune.reporting.terminal import Summary, format_metric, print_summary
from autotune.search.curve_model import wait_for_import
from autotune.search.policy import SearchPolicy
from autotune.space import Suggestion, override_text
from autotune.tracking.tracker import browse_command
from autotune.training.capabilities import versions


def conclude_study(live: LiveStudy, confirmation: Confirmation | None) -> int:
    """Write the study's result files and print the result, then draw figures and report and close the tracker, which may take seconds.

    Returns:
        The exit code: 0 where a trial reached the target (in confirmation, unless that is off), 3 where none did.

    Raises:
        WorkerError: every trial failed in the code that it trains.
        StudyError: a file cannot be written, as on a full disk; names the command that writes the files once it can.
    """
    plan, results = live.plan, list(live.policy.results.values())
    front = make_front(plan.objective, results) if isinstance(plan.objective, Pareto) else None
    with _told_faults(live):
        figures, no_script = _write_files(live, confirmation, front)
    try:
        return _print_result(live, confirmation, front, no_script)
    finally:
        _log_model(live, confirmation)
        with _told_faults(live):
            figures = figures or live.pictures.draw()
        kept = ("best.yaml", SCRIPT, ARGUMENTS, "best.json", SUMMARY, "trials.csv", "pareto_front.csv", "recording", REPORT)
        _close_tracker(live, confirmation, [*(path for name in kept if (path := plan.folder / name).exists()), *figures])


@contextmanager
def _told_faults(live: LiveStudy) -> Iterator[None]:
    """Context in which files are written; what goes wrong is raised as a StudyError that says how to write them again."""
    try:
        yield
    except (FileError, OSError) as error:
        raise StudyError(f"{error}; every run is kept, and the files are written with: {live.resume_command}") from error


def _log_model(live: LiveStudy, confirmation: Confirmation | None) -> None:
    """Have the tracker keep the trained model of what is exported, unless only a function of the user's own can make it."""
    plan = live.plan
    if confirmation and confirmation.best and plan.trial.training is None and (plan.folder / BEST_WEIGHTS).is_file():
        live.tracker.log_model(partial(best_model, plan.folder, tuple(plan.composer.allowed_targets)))


def _close_tracker(live: LiveStudy, confirmation: Confirmation | None, artifacts: Sequence[Path]) -> None:
    plan, results = live.plan, list(live.policy.results.values())
    best = confirmation.best if confirmation else None
    speed_up = confirmation.speed_up if confirmation and not confirmation.is_baseline_best else None
    ratio = (
        {"speed_up": speed_up.ratio, "speed_up_low": speed_up.low, "speed_up_high": speed_up.high} if speed_up and speed_up.is_gain else {}
    )
    expected = {} if confirmation is None else _expected_scores(confirmation)
    live.tracker.close(
        status="FINISHED",
        metrics={**expected, **ratio, "num_trials": len(results), "train_seconds_spent": _train_seconds(results)},
        tags={
            **({"autotune.best_trial": str(best.trial)} if best else {}),
            "autotune.description": _description(plan, confirmation) if confirmation else "Not confirmed.",
        },
        artifacts=artifacts,
    )


def _print_result(live: LiveStudy, confirmation: Confirmation | None, front: Front | None, no_script: str | None) -> int:
    """Print what the study found, and return the exit code; what is raised is that of ``conclude_study``."""
    plan, policy = live.plan, live.policy
    best, results = confirmation.best if confirmation else None, list(policy.results.values())
    if results and all(result.outcome is Outcome.ERRORED for result in results):
        raise WorkerError(f"all {len(results)} trials failed in the code they train; the first:", results[0].error or "")
    for line in _gathered_failures(plan, results):
        live.console.print(without_secrets(line), markup=False, highlight=False, soft_wrap=True, style="yellow")
    if best is None and (confirmation is not None or not policy.scores):
        _say_nothing_reached(live, results, confirmation)
        return EXIT_NOT_REACHED
    for line in describe_front(front) if front is not None else ():
        _say(live, line)
    if confirmation is None:
        scores, scale = policy.scores, score_format_of(plan.objective)
        number = min(scores, key=lambda number: scores[number])
        best_word, score = "fastest" if scale.is_time else "best", scale.format(scores[number])
        _say(live, f"not confirmed (confirm=none), so nothing is exported; the {best_word} trial was {number}, {score}")
        _say_page(live)
        return 0
    print_summary(live.console, _summary(live, confirmation, no_script))
    return 0


def _gathered_failures(plan: StudyPlan, results: Sequence[TrialResult]) -> list[str]:
    """Options of choices that failures gather on, a line for each."""
    ended = [
        EndedTrial({key: override_text(value) for key, value in result.values.items()}, result.outcome, result.error_line)
        for result in results
    ]
    return gathered_failures(ended, plan.space.choices)


def _expected_scores(confirmation: Confirmation) -> dict[str, float]:
    """Expected scores of the baseline and of what is exported, on fresh seeds; infinite for one that never reached the target."""
    trials = {"baseline": confirmation.arms[0].trial, **({"best": confirmation.best.trial} if confirmation.best is not None else {})}
    scores = {f"{name}_expected_score": confirmation.scores[trial].expected_score for name, trial in trials.items()}
    return {name: score for name, score in scores.items() if score is not None}


def _description(plan: StudyPlan, confirmation: Confirmation) -> str:
    """The result in a few lines of Markdown, for a tracker's page of the study."""
    best, target, speed_up = confirmation.best, plan.trial.target, confirmation.speed_up
    scale, baseline = score_format_of(plan.objective), confirmation.scores[confirmation.arms[0].trial]
    lines = [f"**{plan.experiment}** to {target}"]
    if best is None:
        return "\n\n".join([*lines, "Nothing reached the target again on fresh seeds."])
    if confirmation.is_baseline_best or speed_up is None:
        lines.append("No configuration was confirmed to be better than the baseline.")
    else:
        lines.append(f"{scale.gain.capitalize()} over the baseline: **{describe_ratio(speed_up)}**")
    arms = [("baseline", baseline), *([] if confirmation.is_baseline_best else [(best.label, confirmation.scores[best.trial])])]
    lines.append("\n".join(["| | |", "|---|---|", *(f"| {label} | {describe_arm(arm)} |" for label, arm in arms)]))
    lines.append("\n".join(f"    {override}" for override in best.suggestion.as_overrides()))
    lines.append("Figures, `best.yaml` and `trials.csv` are among the artifacts.")
    return "\n\n".join(lines)


def _write_files(live: LiveStudy, confirmation: Confirmation | None, front: Front | None) -> tuple[list[Path], str | None]:
    """Write all result files but figures and report into the study's folder.

    Returns:
        The figures of an earlier end of the study, if they show the same result; and why there is no script of what is exported, None if
        there is one or nothing is exported.
    """
    plan, policy = live.plan, live.policy
    folder, results = plan.folder, list(policy.results.values())
    wait_for_import()  # what follows imports parts of scikit-learn, too
    summary, no_script = summary_json(live, confirmation), None
    figures = _figures_of(folder, summary)
    if not figures:
        with suppress(OSError):
            (folder / REPORT).unlink(missing_ok=True)  # it is written last: where there is one, all that was drawn says the same
    TrialsTable(folder / "trials.csv", plan.space, results, policy.scores, score_format_of(plan.objective).unit)
    live.pictures.write_recording()
    write_json(folder / SUMMARY, "summary", summary)
    if confirmation is not None and confirmation.best is not None:
        write_json(folder / "best.json", "summary", summary)
        text, trial = best_yaml(plan, policy, confirmation)
        replace_file(folder / "best.yaml", text)
        no_script = write_program(folder, trial, text, num_threads=plan.num_threads(trial))
        keep_best(folder, confirmation.best.trial)
    if front is not None:
        write_front(folder / "pareto_front.csv", front, policy.results)
    return figures, no_script


def _figures_of(folder: Path, summary: Mapping[str, Any]) -> list[Path]:
    """The figures of an earlier end of the study, if that had the same summary and drew all, its report included; else none."""
    report, figures = folder / REPORT, sorted((folder / "figures").glob("*.html"))
    if any(path.is_symlink() or not path.is_file() for path in (report, *figures)):
        return []
    with suppress(FileNotFoundError):
        return figures if (folder / SUMMARY).read_bytes() == json_text("summary", summary).encode() else []
    return []


def summary_json(live: LiveStudy, confirmation: Confirmation | None) -> dict[str, Any]:
    """Content of ``summary.json`` and ``best.json``: the study's result as plain data, for programs and for the report."""
    plan, policy = live.plan, live.policy
    best = confirmation.best if confirmation else None
    limits = live.race_limits(live.planned_race()) if confirmation else None
    runs = dict(sorted(confirmation.runs.items())) if confirmation else {}
    best_runs = [run for (trial, _), run in runs.items() if best is not None and trial == best.trial]
    target, scale, everything = plan.trial.target, score_format_of(plan.objective), [*policy.results.values(), *runs.values()]
    return {
        "study": plan.name,
        "experiment": plan.experiment,
        "target": {"metric": target.metric, "value": target.value, "mode": target.mode, "max_train_seconds": target.max_train_seconds},
        **claim_json(confirmation),
        "limits": asdict(limits) if limits else None,
        "changes": _changes(plan, policy, confirmation),
        "objective": {"quantity": scale.quantity, "unit": scale.unit},
        "num_threads": plan.num_threads(plan.trial),
        "config_dirs": [str(Path(folder).absolute()) for folder in plan.composer.config_dirs],
        "allowed_targets": list(plan.composer.allowed_targets),
        **counts_json(list(policy.results.values()), list(runs.values())),
        "tracker": plan.config.tracking.get("_target_"),
        "device": next((run.fingerprint["device"] for run in [*best_runs, *everything] if "device" in run.fingerprint), None),
        "versions": versions(),
        "command": live.resume_command,
        "settings": study_settings(plan),
        "seeds": {"study": plan.config.study.seed, "confirmation": list(dict.fromkeys(run.seed for run in runs.values()))},
    }


def claim_json(confirmation: Confirmation | None) -> dict[str, Any]:
    """What ``summary.json`` says of the confirmation: what is exported, its runs, the baseline's and the candidates', and the speed-up."""
    if confirmation is None:
        return {"trial": None, "overrides": None, "baseline": None, "best": None, "speed_up": None, "candidates": []}
    best, scores = confirmation.best, confirmation.scores
    best_runs = [run for (trial, _), run in sorted(confirmation.runs.items()) if best is not None and trial == best.trial]
    test_metrics = [run.test_metric for run in best_runs if run.test_metric is not None]
    speed_up = None if confirmation.is_baseline_best else confirmation.speed_up
    return {
        "trial": best.trial if best else None,
        "overrides": best.suggestion.as_overrides() if best else None,
        "baseline": arm_json(scores[confirmation.arms[0].trial]),
        "best": {**arm_json(scores[best.trial]), "test_metrics": test_metrics} if best else None,
        "speed_up": asdict(speed_up) if speed_up else None,
        "candidates": [_candidate_json(confirmation, arm) for arm in confirmation.arms[1:]],
    }


def counts_json(results: Sequence[TrialResult], confirmation_runs: Sequence[TrialResult]) -> dict[str, Any]:
    """What ``summary.json`` says of all trials together, and of the time that they and the confirmation runs took."""
    everything = [*results, *confirmation_runs]
    return {
        "outcomes": _outcomes(results),
        "num_trials": len(results),
        "train_seconds_spent": _train_seconds(results),
        "wall_seconds": busy_seconds(everything),
        "stopped_at": max((run.stopped_at for run in everything), default=None),
    }


def _changes(plan: StudyPlan, policy: SearchPolicy, confirmation: Confirmation | None) -> list[dict[str, Any]]:
    """The baseline's value and the best configuration's of each key of the space that either sets; empty without a configuration."""
    trial = (
        confirmation.best.trial if confirmation and confirmation.best else min(policy.scores, key=policy.scores.__getitem__, default=None)
    )
    if trial is None or trial == policy.baseline_trial:
        return []
    best = plan.composer.compose_suggestion(Suggestion(policy.results[trial].values), seed=policy.results[trial].seed)
    rows = [(key, plan.composed.lookup(key), best.lookup(key)) for key in plan.space.keys]
    return [{"key": key, "baseline": before, "best": after} for key, before, after in rows if (before, after) != (None, None)]


def best_yaml(plan: StudyPlan, policy: SearchPolicy, confirmation: Confirmation) -> tuple[str, TrialConfig]:
    """Content of ``best.yaml``, an experiment file, and what it composes to, which is checked to be the configuration of the best trial.

    Raises:
        ConfigError: the configuration cannot be written as an experiment.
    """
    assert confirmation.best is not None
    best, composer = confirmation.best, plan.composer
    groups, values = split_overrides(composer, composer.overrides)
    best_groups, best_values = composer.split(best.suggestion)
    groups, values = groups | best_groups, values | best_values
    seed = policy.results[best.trial].seed
    exported = {"seed": seed, **values}
    comments = [
        *claim_comments(plan.name, plan.trial.target, confirmation),
        "The seed is the search trial's own.",
        f"Format {FORMATS['experiment']}.",
    ]
    content = composer.files.content("experiment", plan.experiment)
    write = partial(experiment_yaml, base=plan.experiment, base_content=content, groups=groups)
    text = write(values=exported, comments=comments)
    recomposed = compose_exported(text, [*map(str, composer.config_dirs)], composer.allowed_targets)
    check_exported(recomposed.trial, composer.compose_suggestion(best.suggestion, seed=seed).trial)
    if (shown := without_secrets_in(exported)) != exported:
        keys = ", ".join(f"{key}=..." for key, value in exported.items() if shown[key] != value)
        text = write(values=shown, comments=[*comments, f"{MARK} stands for a secret that is kept nowhere: give {keys}"])
    return text, recomposed.trial


def claim_comments(study: str, target: Target, confirmation: Confirmation) -> list[str]:
    """The comments of ``best.yaml`` that say what was confirmed; empty without anything to export."""
    best, speed_up = confirmation.best, None if confirmation.is_baseline_best else confirmation.speed_up
    if best is None:
        return []
    scores = confirmation.scores[best.trial]
    return [
        f"Exported by autotune from study {study}, {best.label}: {target} in "
        f"{', '.join(f'{score:.3g}' for score, reached in scores.scored_runs if reached)} {scores.scale.unit}".rstrip()
        + f" on fresh seeds, {describe_reached(scores)}.",
        *([f"{scores.scale.gain.capitalize()} over the baseline: {describe_ratio(speed_up)}."] if speed_up else []),
    ]


def _train_seconds(results: Iterable[TrialResult]) -> float:
    return sum(result.last.train_seconds for result in results if result.last is not None)


def _outcomes(results: Iterable[TrialResult]) -> dict[str, int]:
    return dict(Counter(result.outcome.value for result in results))


def _candidate_json(confirmation: Confirmation, arm: Arm) -> dict[str, Any]:
    """One candidate of the confirmation race, as plain data for ``best.json``."""
    why = "chosen" if arm is confirmation.chosen and arm.trial not in confirmation.reasons else None
    return {
        "trial": arm.trial,
        "overrides": arm.suggestion.as_overrides(),
        "search_expected": arm.expected_score,
        **arm_json(confirmation.scores[arm.trial]),
        "why": why or confirmation.reasons.get(arm.trial, "the race was interrupted"),
    }


def _summary(live: LiveStudy, confirmation: Confirmation, no_script: str | None) -> Summary:
    plan, policy, chosen = live.plan, live.policy, confirmation.chosen
    is_exported = chosen is not None and confirmation.best is chosen
    browse = browse_command(plan.config.tracking, shown_path(plan.folder.parent))
    others = [arm for arm in confirmation.arms[1:] if arm is not chosen]
    return Summary(
        study=plan.name,
        experiment=plan.experiment,
        target=plan.trial.target,
        baseline=confirmation.scores[confirmation.arms[0].trial],
        chosen=None if chosen is None else confirmation.scores[chosen.trial],
        chosen_overrides=() if chosen is None else chosen.suggestion.as_overrides(),
        is_exported=is_exported,
        speed_up=confirmation.speed_up,
        others=[(confirmation.scores[arm.trial], confirmation.reasons.get(arm.trial, "interrupted")) for arm in others],
        outcomes=_outcomes(policy.results.values()),
        train_seconds_spent=_train_seconds(policy.results.values()),
        wall_seconds=busy_seconds([*policy.results.values(), *confirmation.runs.values()]),
        folder=shown_path(plan.folder),
        next_commands=(
            *([("browse the runs", browse)] if browse else []),
            *([(f"there, {_PAGE}", live.tracker.page)] if live.tracker.page else []),
            *(_export_commands(plan) if is_exported else []),
            ("search further", live.further_command),
        ),
        notes=[
            *_notes([*policy.results.values(), *confirmation.runs.values()]),
            *([("script", f"none: {no_script}")] if no_script else []),
            *_outlook_note(live, confirmation),
            ("report", shown_path(plan.folder / REPORT)),
        ],
        advice=None if is_exported else _ADVICE,
    )


def _outlook_note(live: LiveStudy, confirmation: Confirmation) -> list[tuple[str, str]]:
    """What further trials are expected to bring, as a note for the summary, with what a training was confirmed to take now."""
    outlook, best = live.policy.outlook, confirmation.best
    score = None if best is None else confirmation.scores[best.trial].expected_score
    if outlook is None or score is None or not math.isfinite(score):
        return []
    scale = score_format_of(live.plan.objective)
    better, trainings = "faster" if scale.is_time else "better", math.ceil(outlook.cost / (outlook.gain * score))
    text = f"{outlook.num_trials} more trials: expected {outlook.gain:.1%} {better}, {outlook.device_seconds:.3g} device-seconds"
    return [("further", f"{text}, worth it from {trainings:,} trainings on")]


def _notes(runs: Sequence[TrialResult]) -> list[tuple[str, str]]:
    """Notes for the summary: differing devices, how many runs are marked because of spoilt times, reports that come too often."""
    notes = []
    if (differences := differing_devices(runs)) is not None:
        notes.append(("devices", differences))
    contentions = [run.contention for run in runs if run.contention is not None]
    if contentions:
        notes.append(("marked", f"{len(contentions)} of {len(runs)} runs, such as: {contentions[-1]}"))
    seconds = sum(run.last.train_seconds for run in runs if run.last is not None)
    if (num_evaluations := sum(len(run.evaluations) for run in runs)) * _REPORT_SECONDS > seconds:
        notes.append(("reports", f"one every {seconds / num_evaluations * 1e3:.2g} ms of training: rarer ones make the search faster"))
    return notes


_REPORT_SECONDS = 0.02
"""Seconds between two evaluations below which handling them takes longer than the training between them."""


_ADVICE = (
    "To find a faster one: more trials (search.num_trials), a wider search space, or a longer schedule where runs fell short of the "
    "target (epochs); to tell closer ones apart: more runs (confirm.max_runs, confirm.budget_fraction)."
)


def _export_commands(plan: StudyPlan) -> list[tuple[str, str]]:
    """Commands that export the best configuration and train it again, with the study's own config folders and allowed targets."""
    exported = f"{plan.experiment}_best"
    folders = [shown_path(Path(folder).absolute()) for folder in plan.composer.config_dirs] or ["my_conf"]
    elsewhere = [] if plan.folder.parent == Path("outputs").absolute() else [f"folder={shown_path(plan.folder.parent)}"]
    export = ["python", "-m", "autotune", "export", f"study={plan.name}", f"as={exported}", *elsewhere, "--config-dir", folders[0]]
    return [
        ("export the best", shlex.join(export)),
        ("train it again", train_command(exported, folders, plan.composer.allowed_targets)),
    ]


def _say_nothing_reached(live: LiveStudy, results: Sequence[TrialResult], confirmation: Confirmation | None) -> None:
    """Print that nothing reached the target, the trial that came closest, and what to try next."""
    target = live.plan.trial.target
    sign = 1 if target.mode == "max" else -1
    measured = [(result.last.metric * sign, result) for result in results if result.last is not None and math.isfinite(result.last.metric)]
    _say(live, f"nothing reached {target}" + (" again on fresh seeds" if confirmation else ""))
    if measured and confirmation is None:
        metric, closest = max(measured, key=lambda pair: pair[0])
        what = " ".join(closest.overrides) or "the baseline"
        _say(live, f"closest: trial {closest.trial}, {target.metric} {format_metric(metric * sign)}: {what}")
    _say(
        live,
        f"search further: {live.further_command}\nor make it easier: target.value, target.max_train_seconds (another study.name then)",
    )
    _say_page(live)


def _say_page(live: LiveStudy) -> None:
    if live.tracker.page is not None:
        _print(live, f"{live.tracker.name}, {_PAGE}: {live.tracker.page}")  # whose viewStateShareKey= is no secret


_PAGE = "the trials, best first"


def _say(live: LiveStudy, line: str) -> None:
    _print(live, without_secrets(line))


def _print(live: LiveStudy, line: str) -> None:
    live.console.print(line, markup=False, highlight=False, soft_wrap=True)
