"""The end of a study: its result files, its report, its printed summary and the experiment file
that it exports.
"""

import importlib
import logging
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
from autotune.config.experiment_file import check_exported, experiment_yaml, train_command
from autotune.config.schema import TrialConfig
from autotune.confirm.confirmation import Confirmation
from autotune.confirm.race import Configuration
from autotune.errors import FileError, StudyError, WorkerError
from autotune.execution.best_weights import BEST_WEIGHTS, best_model, keep_best
from autotune.execution.exported import ARGUMENTS, SCRIPT, compose_exported, write_program
from autotune.execution.live_study import LiveStudy, busy_seconds
from autotune.execution.study_folder import shown_path
from autotune.files import FORMATS, replace_file
from autotune.hiding import MARK, without_secrets, without_secrets_in
from autotune.measurement import TrialResult, differing_devices
from autotune.objective import Pareto
from autotune.outcome import Outcome
from autotune.recording import write_recording
from autotune.reporting.failures import gathered_failures
from autotune.reporting.scores import (
    describe_ratio,
    describe_reached,
    format_seconds,
)
from autotune.reporting.study_files import (
    REPORT,
    SUMMARY,
    Front,
    arm_json,
    json_text,
    make_front,
    write_trials,
)
from autotune.reporting.terminal import format_metric, print_summary, verdict_rows
from autotune.search.curve_model import wait_for_import
from autotune.space import Suggestion
from autotune.tracking.tracker import StudyEnd, browse_command
from autotune.training.capabilities import versions

logger = logging.getLogger(__name__)

_KEPT = (
    "best.yaml",
    SCRIPT,
    ARGUMENTS,
    "best.json",
    SUMMARY,
    "trials.csv",
    "pareto_front.csv",
    "machine.yaml",
    "recording",
    REPORT,
)
"""What of a study's folder a tracker keeps, besides the figures."""
_ADVICE = (
    "To find a faster one: more trials (search.num_trials), a wider search space, or a longer"
    " schedule where runs fell short of the target (epochs); to tell closer ones apart: more runs"
    " (confirm.max_runs, confirm.budget_fraction)."
)
_PAGE = "the trials, best first"


def conclude_study(live: LiveStudy, confirmation: Confirmation | None) -> int:
    """Write the study's result files and print the result, then draw figures and report and close
    the tracker, which may take seconds.

    Returns:
        The exit code: 0 where a trial reached the target (in confirmation, unless that is off), 3
            where none did.

    Raises:
        WorkerError: every trial failed in the code that it trains.
        StudyError: a file cannot be written, as on a full disk; names the command that writes the
            files once it can.
    """
    plan, folder = live.plan, live.plan.folder
    front = (
        make_front(plan.objective, live.policy.results)
        if isinstance(plan.objective, Pareto)
        else None
    )
    with _told_faults(live):
        no_script = _write_files(live, confirmation, front)
    try:
        return _print_result(live, confirmation, front, no_script)
    finally:
        with _told_faults(live):
            if not (folder / REPORT).exists():
                _draw(live)
        figures = sorted((folder / "figures").glob("*.html"))
        _close_tracker(
            live,
            confirmation,
            [*(path for name in _KEPT if (path := folder / name).exists()), *figures],
        )


def import_for_conclusion() -> None:
    """Import what a conclusion needs, which takes seconds: the exported program's and the report's
    libraries. Beside confirmation runs that leave a CPU idle, nobody waits for it.
    """
    for name in (
        "training.standalone",
        "training.trained_model",
        "reporting.html",
    ):
        with suppress(Exception):  # raised again where it is needed
            importlib.import_module(f"autotune.{name}")


@contextmanager
def _told_faults(live: LiveStudy) -> Iterator[None]:
    """Context in which files are written.

    What goes wrong is raised as a StudyError that says how to write them again.
    """
    try:
        yield
    except (FileError, OSError) as error:
        raise StudyError(
            f"{error}; every run is kept, and the files are written with:"
            f" {live.plan.command_line()}"
        ) from error


def _write_files(
    live: LiveStudy, confirmation: Confirmation | None, front: Front | None
) -> str | None:
    """Write all result files but figures and report; a report of another result is deleted.

    Returns:
        Why there is no script of what is exported; None if there is one or nothing is exported.
    """
    plan, policy, folder, no_script = live.plan, live.policy, live.plan.folder, None
    results = list(policy.results.values())
    wait_for_import()  # what follows imports parts of scikit-learn, too
    summary = json_text("summary", summary_json(live, confirmation))
    report = folder / REPORT
    with suppress(OSError):
        if report.is_symlink() or (folder / SUMMARY).read_text(encoding="utf-8") != summary:
            # it is written last: where there is one, all that was drawn says the same
            report.unlink(missing_ok=True)
    write_trials(
        folder / "trials.csv",
        plan.space,
        results,
        policy.scores,
        plan.score_format.unit,
    )
    write_recording(
        folder / "recording",
        results=results,
        target=plan.trial.target,
        space=plan.space.as_mapping(),
        source=f"autotune study {plan.name}",
        baseline=policy.baseline_trial,
    )
    replace_file(folder / SUMMARY, summary)
    if confirmation is not None and confirmation.best is not None:
        replace_file(folder / "best.json", summary)
        text, trial = best_yaml(live, confirmation, confirmation.best)
        replace_file(folder / "best.yaml", text)
        no_script = write_program(folder, trial, text, num_threads=plan.num_threads(trial))
        keep_best(folder, confirmation.best.trial)
    if front is not None:
        front.write(folder / "pareto_front.csv", policy.results)
    return no_script


def _draw(live: LiveStudy) -> None:
    """Write the charts as pages of their own, and the report.

    What cannot be drawn is told in a line: it is no result.
    """
    # imports Plotly and scikit-learn, needed only at the end
    from autotune.reporting.html import write_study_report  # noqa: PLC0415

    try:
        write_study_report(live.plan.folder)
    except FileError:
        raise
    except Exception as error:  # whatever it is, hours of training must not end in it
        logger.exception("the report was not written")
        _say(live, f"no {REPORT}: {type(error).__name__}: {' '.join(str(error).split())}")


def _close_tracker(
    live: LiveStudy, confirmation: Confirmation | None, artifacts: Sequence[Path]
) -> None:
    plan, results, make_model = live.plan, list(live.policy.results.values()), None
    metrics, tags = {}, {"autotune.description": "Not confirmed."}
    if confirmation is not None:
        arms = {"baseline": confirmation.configurations[0], "best": confirmation.best}
        scores = {
            f"{name}_expected_score": confirmation.scores[arm.trial].expected_score
            for name, arm in arms.items()
            if arm
        }
        metrics = {name: score for name, score in scores.items() if score is not None}
        tags["autotune.description"] = _description(live, confirmation)
        if confirmation.best is not None:
            tags["autotune.best_trial"] = str(confirmation.best.trial)
            if plan.trial.training is None and (plan.folder / BEST_WEIGHTS).is_file():
                make_model = partial(best_model, plan.folder, tuple(plan.composer.allowed_targets))
        speed_up = confirmation.speed_up
        if speed_up is not None and speed_up.is_gain and not confirmation.is_baseline_best:
            metrics |= {
                "speed_up": speed_up.ratio,
                "speed_up_low": speed_up.low,
                "speed_up_high": speed_up.high,
            }
    metrics |= {"num_trials": len(results), "train_seconds_spent": _train_seconds(results)}
    live.tracker.close(
        StudyEnd(
            status="FINISHED",
            metrics=metrics,
            tags=tags,
            artifacts=artifacts,
            make_model=make_model,
        )
    )


def _print_result(
    live: LiveStudy, confirmation: Confirmation | None, front: Front | None, no_script: str | None
) -> int:
    """Print what the study found, and return the exit code.

    What is raised is that of ``conclude_study``.
    """
    plan, policy, results = live.plan, live.policy, list(live.policy.results.values())
    if results and all(result.outcome is Outcome.ERRORED for result in results):
        raise WorkerError(
            f"all {len(results)} trials failed in the code they train; the first:",
            results[0].error or "",
        )
    for line in gathered_failures(results, plan.space.choices):
        _say(live, line, style="yellow")
    if confirmation.best is None if confirmation else not policy.scores:
        _say_nothing_reached(live, results, confirmation)
        return EXIT_NOT_REACHED
    for line in front.lines() if front is not None else ():
        _say(live, line)
    if confirmation is None:
        scores, scale = policy.scores, plan.score_format
        number = min(scores, key=lambda number: scores[number])
        best_word = "fastest" if scale.is_time else "best"
        _say(
            live,
            f"not confirmed (confirm=none), so nothing is exported; the {best_word} trial was"
            f" {number}, {scale.format(scores[number])}",
        )
        _say_page(live)
        return 0
    runs = [*results, *confirmation.runs.values()]
    times = (
        f"{format_seconds(_train_seconds(results))} of training in"
        f" {format_seconds(busy_seconds(runs))} of wall clock"
    )
    scale, is_exported = plan.score_format, _is_exported(confirmation)
    browse = browse_command(plan.config.tracking, shown_path(plan.folder.parent))
    print_summary(
        live.console,
        f"{plan.experiment} · {plan.name}",
        [
            ("target", str(plan.trial.target)),
            *([] if scale.is_time else [("objective", scale.description)]),
            *_verdict(confirmation),
            (
                "trials",
                ", ".join(f"{outcome} {count}" for outcome, count in _outcomes(results).items())
                or "none",
            ),
            ("spent", times),
            *_notes(runs),
            *([("script", f"none: {no_script}")] if no_script else []),
            *_outlook_note(live, confirmation),
            ("report", shown_path(plan.folder / REPORT)),
            ("folder", shown_path(plan.folder)),
        ],
        advice="" if is_exported else _ADVICE,
        commands=[
            *([("browse the runs", browse)] if browse else []),
            *([(f"there, {_PAGE}", live.tracker.page)] if live.tracker.page else []),
            *(_export_commands(live) if is_exported else []),
            ("search further", live.plan.further_command),
        ],
    )
    return 0


def _is_exported(confirmation: Confirmation) -> bool:
    return confirmation.chosen is not None and confirmation.best is confirmation.chosen


def _verdict(confirmation: Confirmation) -> list[tuple[str, str]]:
    chosen, scores = confirmation.chosen, confirmation.scores
    return verdict_rows(
        scores[confirmation.configurations[0].trial],
        None if chosen is None else scores[chosen.trial],
        confirmation.speed_up,
        is_exported=_is_exported(confirmation),
        overrides=[] if chosen is None else chosen.suggestion.as_overrides(),
        others=[
            (scores[arm.trial], confirmation.reasons.get(arm.trial, "interrupted"))
            for arm in confirmation.configurations[1:]
            if arm is not chosen
        ],
    )


def _description(live: LiveStudy, confirmation: Confirmation) -> str:
    """The result in a few lines of Markdown, for a tracker's page of the study."""
    head = f"**{live.plan.experiment}** to {live.plan.trial.target}"
    if confirmation.best is None:
        return f"{head}\n\nNothing reached the target again on fresh seeds."
    gain = live.plan.score_format.gain.capitalize()
    claim = f"{gain} over the baseline: **{describe_ratio(confirmation.speed_up)}**"
    table = "\n".join(
        [
            "| | |",
            "|---|---|",
            *(f"| {name} | `{value}` |" for name, value in _verdict(confirmation)),
        ]
    )
    return (
        f"{head}\n\n{claim}\n\n{table}\n\nFigures, `best.yaml` and `trials.csv` are among the"
        " artifacts."
    )


def summary_json(live: LiveStudy, confirmation: Confirmation | None) -> dict[str, Any]:
    """Content of ``summary.json`` and ``best.json``: the study's result as plain data, for
    programs and for the report.
    """
    plan, results, best = (
        live.plan,
        list(live.policy.results.values()),
        confirmation.best if confirmation else None,
    )
    runs = dict(sorted(confirmation.runs.items())) if confirmation else {}
    best_runs = [
        run for (trial, _), run in runs.items() if best is not None and trial == best.trial
    ]
    scale, everything = plan.score_format, [*results, *runs.values()]
    target = plan.trial.target
    claim: dict[str, Any] = {
        "baseline": None,
        "best": None,
        "speed_up": None,
        "candidates": [],
        "limits": None,
    }
    if confirmation is not None:
        speed_up, scores = (
            (None if confirmation.is_baseline_best else confirmation.speed_up),
            confirmation.scores,
        )
        test_metrics = [run.test_metric for run in best_runs if run.test_metric is not None]
        claim = {
            "baseline": arm_json(scores[confirmation.configurations[0].trial]),
            "best": (
                {**arm_json(scores[best.trial]), "test_metrics": test_metrics} if best else None
            ),
            "speed_up": asdict(speed_up) if speed_up else None,
            "candidates": [
                _candidate_json(confirmation, arm) for arm in confirmation.configurations[1:]
            ],
            "limits": asdict(live.race_limits(live.planned_race())),
        }
    return {
        "study": plan.name,
        "experiment": plan.experiment,
        "target": {
            "metric": target.metric,
            "value": target.value,
            "mode": target.mode,
            "max_train_seconds": target.max_train_seconds,
        },
        "trial": best.trial if best else None,
        "overrides": best.suggestion.as_overrides() if best else None,
        **claim,
        "changes": _changes(live, best),
        "objective": {"quantity": scale.quantity, "unit": scale.unit},
        "num_threads": plan.num_threads(plan.trial),
        "config_dirs": [str(Path(folder).absolute()) for folder in plan.composer.config_dirs],
        "allowed_targets": list(plan.composer.allowed_targets),
        "outcomes": _outcomes(results),
        "failures": gathered_failures(results, plan.space.choices),
        "num_trials": len(results),
        "train_seconds_spent": _train_seconds(results),
        "wall_seconds": busy_seconds(everything),
        "stopped_at": max((run.stopped_at for run in everything), default=None),
        "tracker": plan.config.tracking.get("_target_"),
        "device": next(
            (
                run.fingerprint["device"]
                for run in [*best_runs, *everything]
                if "device" in run.fingerprint
            ),
            None,
        ),
        "versions": versions(),
        "command": live.plan.command_line(),
        "settings": plan.settings(),
        "seeds": {
            "study": plan.config.study.seed,
            "confirmation": list(dict.fromkeys(run.seed for run in runs.values())),
        },
    }


def _candidate_json(confirmation: Confirmation, arm: Configuration) -> dict[str, Any]:
    """One candidate of the confirmation race, as plain data for ``best.json``."""
    default = "chosen" if arm is confirmation.chosen else "the race was interrupted"
    return {
        "trial": arm.trial,
        "overrides": arm.suggestion.as_overrides(),
        "search_expected": arm.expected_score,
        **arm_json(confirmation.scores[arm.trial]),
        "why": confirmation.reasons.get(arm.trial, default),
    }


def _changes(live: LiveStudy, best: Configuration | None) -> list[dict[str, Any]]:
    """The baseline's value and the best configuration's of each key of the space that either
    sets; empty without a configuration.
    """
    plan, policy = live.plan, live.policy
    trial = best.trial if best else min(policy.scores, key=policy.scores.__getitem__, default=None)
    if trial is None or trial == policy.baseline_trial:
        return []
    composed = plan.composer.compose_suggestion(
        Suggestion(policy.results[trial].values), seed=policy.results[trial].seed
    )
    rows = [
        {"key": key, "baseline": plan.composed.lookup(key), "best": composed.lookup(key)}
        for key in plan.space.keys
    ]
    return [row for row in rows if (row["baseline"], row["best"]) != (None, None)]


def best_yaml(
    live: LiveStudy, confirmation: Confirmation, best: Configuration
) -> tuple[str, TrialConfig]:
    """Content of ``best.yaml``, an experiment file, and what it composes to, which is checked to be
    the configuration of the best trial.

    Raises:
        ConfigError: the configuration cannot be written as an experiment.
    """
    plan, composer, scores = live.plan, live.plan.composer, confirmation.scores[best.trial]
    seed = live.policy.results[best.trial].seed
    content = composer.experiment_of(best.suggestion, seed=seed)
    reached = ", ".join(f"{score:.3g}" for score, reached in scores.scored_runs if reached)
    comments = [
        f"Exported by autotune from study {plan.name}, {best.label}: {plan.trial.target} in"
        f" {reached} {scores.scale.unit}".rstrip()
        + f" on fresh seeds, {describe_reached(scores)}."
    ]
    if confirmation.speed_up and not confirmation.is_baseline_best:
        comments.append(
            f"{scores.scale.gain.capitalize()} over the baseline:"
            f" {describe_ratio(confirmation.speed_up)}."
        )
    comments += ["The seed is the search trial's own.", f"Format {FORMATS['experiment']}."]
    text = experiment_yaml(content, comments)
    recomposed = compose_exported(text, [*map(str, composer.config_dirs)], composer.allowed_targets)
    check_exported(recomposed.trial, composer.compose_suggestion(best.suggestion, seed=seed).trial)
    if (shown := without_secrets_in(content)) != content:
        comments.append(f"{MARK} stands for a secret that is kept nowhere: give it in its place")
        text = experiment_yaml(shown, comments)
    return text, recomposed.trial


def _train_seconds(results: Iterable[TrialResult]) -> float:
    return sum(result.last.train_seconds for result in results if result.last is not None)


def _outcomes(results: Iterable[TrialResult]) -> Mapping[str, int]:
    return dict(Counter(result.outcome.value for result in results))


def _outlook_note(live: LiveStudy, confirmation: Confirmation) -> list[tuple[str, str]]:
    """What further trials are expected to bring, as a note for the summary, with what a training
    was confirmed to take now.
    """
    outlook, best = live.policy.outlook, confirmation.best
    score = None if best is None else confirmation.scores[best.trial].expected_score
    if outlook is None or score is None or not math.isfinite(score):
        return []
    better = "faster" if live.plan.score_format.is_time else "better"
    trainings = math.ceil(outlook.cost / (outlook.gain * score))
    text = (
        f"{outlook.num_trials} more trials: expected {outlook.gain:.1%} {better},"
        f" {outlook.device_seconds:.3g} device-seconds"
    )
    return [("further", f"{text}, worth it from {trainings:,} trainings on")]


def _notes(runs: Sequence[TrialResult]) -> list[tuple[str, str]]:
    """Notes for the summary: devices that differ, and how many runs are marked because of spoilt
    times.
    """
    differences, contentions = (
        differing_devices(runs),
        [run.contention for run in runs if run.contention is not None],
    )
    marked = (
        f"{len(contentions)} of {len(runs)} runs, such as: {contentions[-1]}"
        if contentions
        else None
    )
    return [
        (name, note)
        for name, note in (("devices", differences), ("marked", marked))
        if note is not None
    ]


def _export_commands(live: LiveStudy) -> list[tuple[str, str]]:
    """Commands that export the best configuration and train it again, with the study's own
    config folders and allowed targets.
    """
    plan, exported = live.plan, f"{live.plan.experiment}_best"
    folders = [shown_path(Path(folder).absolute()) for folder in plan.composer.config_dirs] or [
        "my_conf"
    ]
    elsewhere = (
        []
        if plan.folder.parent == Path("outputs").absolute()
        else [f"folder={shown_path(plan.folder.parent)}"]
    )
    export = [
        "python",
        "-m",
        "autotune",
        "export",
        f"study={plan.name}",
        f"as={exported}",
        *elsewhere,
        "--config-dir",
        folders[0],
    ]
    return [
        ("export the best", shlex.join(export)),
        ("train it again", train_command(exported, folders, plan.composer.allowed_targets)),
    ]


def _say_nothing_reached(
    live: LiveStudy, results: Sequence[TrialResult], confirmation: Confirmation | None
) -> None:
    """Print that nothing reached the target, the trial that came closest, and what to try next."""
    target = live.plan.trial.target
    _say(live, f"nothing reached {target}" + (" again on fresh seeds" if confirmation else ""))
    measured = [
        (result.last.metric, result)
        for result in results
        if result.last is not None and math.isfinite(result.last.metric)
    ]
    if measured and confirmation is None:
        metric, closest = min(measured, key=lambda pair: target.shortfall(pair[0]))
        what = " ".join(closest.overrides) or "the baseline"
        _say(
            live, f"closest: trial {closest.trial}, {target.metric} {format_metric(metric)}: {what}"
        )
    _say(
        live,
        f"search further: {live.plan.further_command}\nor make it easier: target.value,"
        " target.max_train_seconds (another study.name then)",
    )
    _say_page(live)


def _say_page(live: LiveStudy) -> None:
    if live.tracker.page is not None:  # whose viewStateShareKey= is no secret
        live.console.print(
            f"{live.tracker.name}, {_PAGE}: {live.tracker.page}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _say(live: LiveStudy, line: str, style: str | None = None) -> None:
    live.console.print(
        without_secrets(line), markup=False, highlight=False, soft_wrap=True, style=style
    )
