"""The end of a study: its result files, its report, its printed summary and the experiment file
that it exports.
"""

import contextlib
import importlib
import logging
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

from autotune.config.command_line import EXIT_NOT_REACHED
from autotune.confirm.confirmation import Confirmation
from autotune.confirm.race import Configuration
from autotune.errors import FileError, StudyError, WorkerError, one_line
from autotune.execution.exported import (
    WEIGHTS,
    exported_experiment,
    exported_model,
    keep_best_weights,
    write_arguments,
)
from autotune.execution.live_study import LiveStudy, busy_seconds, say
from autotune.execution.plan import StudyPlan
from autotune.execution.study_folder import shown_path
from autotune.files import STUDY_FILES, replace_file
from autotune.measurement import differing_devices
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
    json_text,
    make_front,
    scores_json,
    write_csv,
    write_trials,
)
from autotune.reporting.terminal import print_summary, verdict_rows, words_of_result
from autotune.search.outlook import NUM_AHEAD
from autotune.tracking.tracker import StudyEnd
from autotune.training.capabilities import versions

logger = logging.getLogger(__name__)

_ADVICE = (
    "To find a faster one: more trials (search.num_trials), a wider search space, or a longer"
    " schedule where runs fell short of the target (epochs); to tell closer ones apart: more runs"
    " (confirm.max_runs, confirm.budget_fraction)."
)


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
    end, folder = _Conclusion(live, confirmation), live.plan.folder
    try:
        end.write_files()
    except (FileError, OSError) as error:
        command = live.plan.command_line()
        raise StudyError(
            f"{error}; every run is kept, and the files are written with: {command}"
        ) from error
    try:
        exit_code = end.print()
        live.delete_leftovers(
            confirmation.runs if confirmation else {},
            winner=end.best.trial if end.best else None,
            is_over=True,
        )
        return exit_code
    finally:
        _draw(live)
        results = [folder / file.name for file in STUDY_FILES if file.is_result]
        kept = [path for path in [*results, folder / "machine.yaml"] if path.exists()]
        live.tracker.close(end.for_tracker([*kept, *sorted((folder / "figures").glob("*.html"))]))


def import_for_conclusion() -> None:
    """Import what a conclusion needs, which takes seconds: the report's libraries, and what MLflow
    exports a model by.
    """
    for name in ("autotune.training.trained_model", "autotune.reporting.html", "torch.export"):
        with contextlib.suppress(Exception):  # raised again where it is needed
            importlib.import_module(name)


def _draw(live: LiveStudy) -> None:
    """Write the charts as pages of their own, and the report.

    What cannot be drawn is told in a line: it is no result.
    """
    # imports Plotly and scikit-learn, needed only at the end
    from autotune.reporting.html import write_study_report  # noqa: PLC0415

    try:
        write_study_report(live.plan.folder)
    except Exception as error:  # whatever it is, hours of training must not end in it
        logger.exception("the report was not written")
        say(live.console, f"no {REPORT}: {type(error).__name__}: {one_line(error)}")


class _Conclusion:
    """What a study found, as its files, the terminal and its tracker tell it."""

    def __init__(self, live: LiveStudy, confirmation: Confirmation | None) -> None:
        self.live, self.plan, self.policy = live, live.plan, live.policy
        self.say = partial(say, live.console)
        self.confirmation = confirmation
        self.results = list(live.policy.results.values())
        self.runs = [*self.results, *(confirmation.runs.values() if confirmation else ())]
        self.best = confirmation.best if confirmation else None
        """The configuration to export; None if nothing is confirmed."""
        objective = live.plan.objective
        self.front = (
            make_front(objective, live.policy.results) if isinstance(objective, Pareto) else None
        )
        self.outcomes = dict(Counter(result.outcome.value for result in self.results))
        self.train_seconds = sum(
            result.last.train_seconds for result in self.results if result.last
        )

    def write_files(self) -> None:
        """Write all result files but figures and report; an earlier report is deleted."""
        plan, policy, folder = self.plan, self.policy, self.plan.folder
        (folder / REPORT).unlink(missing_ok=True)
        summary, unit = json_text(self.summary()), plan.score_format.unit
        write_trials(folder / "trials.csv", plan.space, self.results, policy.scores, unit)
        write_recording(
            folder / "recording",
            results=self.results,
            target=plan.trial.target,
            space=plan.space.as_mapping(),
            source=f"autotune study {plan.name}",
            baseline=policy.baseline_trial,
        )
        replace_file(folder / SUMMARY, summary)
        if self.front is not None:
            write_csv(folder / "pareto_front.csv", self.front.header, self.front.rows)
        if self.confirmation is None or self.best is None:
            return
        replace_file(folder / "best.json", summary)
        comments = _origin(plan, self.confirmation, self.best)
        seed = policy.results[self.best.trial].seed
        text, trial = exported_experiment(plan.composer, self.best.suggestion, seed, comments)
        replace_file(folder / "best.yaml", text)
        keep_best_weights(folder, self.best.trial)
        write_arguments(folder, trial, number=self.best.trial, searched=plan.space.keys)

    def summary(self) -> dict[str, Any]:
        """Content of ``summary.json`` and ``best.json``: the study's result as plain data, for
        programs and for the report.
        """
        plan, best, target = self.plan, self.best, self.plan.trial.target
        runs = dict(sorted(self.confirmation.runs.items())) if self.confirmation else {}
        best_runs = [run for (trial, _), run in runs.items() if best and trial == best.trial]
        devices = [run.fingerprint.get("device") for run in (*best_runs, *self.runs)]
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
            **self._claim([run.test_metric for run in best_runs if run.test_metric is not None]),
            "changes": self._changes(),
            "objective": {
                "quantity": plan.score_format.quantity,
                "unit": plan.score_format.unit,
            },
            "num_threads": plan.num_threads(plan.trial),
            "config_dirs": [str(Path(folder).absolute()) for folder in plan.composer.config_dirs],
            "allowed_targets": list(plan.composer.allowed_targets),
            "outcomes": self.outcomes,
            "failures": gathered_failures(self.results, plan.space.choices),
            "num_trials": len(self.results),
            "train_seconds_spent": self.train_seconds,
            "lost_seconds": math.fsum(run.lost_seconds for run in self.runs),
            "checkpoint_seconds": math.fsum(run.checkpoint_seconds for run in self.runs),
            "wall_seconds": busy_seconds(self.runs),
            "stopped_at": max((run.stopped_at for run in self.runs), default=None),
            "tracker": plan.config.tracking.get("_target_"),
            "device": next(filter(None, devices), None),
            "versions": versions(),
            "command": plan.command_line(),
            "settings": plan.settings(),
            "seeds": {
                "study": plan.config.study.seed,
                "confirmation": list(dict.fromkeys(run.seed for run in runs.values())),
            },
        }

    def _claim(self, test_metrics: list[float]) -> dict[str, Any]:
        """What was confirmed of the configurations that raced, as plain data."""
        confirmation, best = self.confirmation, self.best
        if confirmation is None:
            keys = {"baseline": None, "best": None, "speed_up": None}
            return {**keys, "candidates": [], "limits": None}
        scores, speed_up = confirmation.scores, confirmation.speed_up
        baseline, *candidates = confirmation.configurations
        return {
            "baseline": scores_json(scores[baseline.trial]),
            "best": best and {**scores_json(scores[best.trial]), "test_metrics": test_metrics},
            "speed_up": asdict(speed_up) if speed_up and best is not baseline else None,
            "candidates": [
                {
                    "trial": each.trial,
                    "overrides": each.suggestion.as_overrides(),
                    "search_expected": each.expected_score,
                    **scores_json(scores[each.trial]),
                    "why": confirmation.reasons.get(
                        each.trial,
                        "chosen" if each is confirmation.chosen else "the race was interrupted",
                    ),
                }
                for each in candidates
            ],
            "limits": asdict(self.live.race_limits(self.live.planned_race())),
        }

    def _changes(self) -> list[dict[str, Any]]:
        """The baseline's value and the best configuration's of each key of the space that either
        sets; empty if nothing better was confirmed.
        """
        plan, best = self.plan, self.best
        if best is None or best.trial == self.policy.baseline_trial:
            return []
        composed = plan.composer.compose_suggestion(best.suggestion, seed=plan.trial.seed)
        rows = [
            {"key": key, "baseline": plan.composed.lookup(key), "best": composed.lookup(key)}
            for key in plan.space.keys
        ]
        return [row for row in rows if (row["baseline"], row["best"]) != (None, None)]

    def for_tracker(self, artifacts: Sequence[Path]) -> StudyEnd:
        """The study's end as its tracker is told it."""
        plan, confirmation, best = self.plan, self.confirmation, self.best
        metrics = {"num_trials": len(self.results), "train_seconds_spent": self.train_seconds}
        tags, make_model = {"autotune.description": "Not confirmed."}, None
        if confirmation is not None:
            for name, each in (("baseline", confirmation.configurations[0]), ("best", best)):
                score = confirmation.scores[each.trial].expected_score if each else None
                if score is not None:
                    metrics[f"{name}_expected_score"] = score
            rows = [f"- {name} `{value}`" for name, value in _verdict(confirmation)]
            head = f"**{plan.experiment}** to {plan.trial.target}\n"
            tags["autotune.description"] = "\n".join([head, *rows])
            speed_up = confirmation.speed_up
            if speed_up and speed_up.is_gain and not confirmation.is_baseline_best:
                metrics |= {
                    "speed_up": speed_up.ratio,
                    "speed_up_low": speed_up.low,
                    "speed_up_high": speed_up.high,
                }
        if best is not None:
            tags["autotune.best_trial"] = str(best.trial)
            if plan.trial.training is None and (plan.folder / WEIGHTS).is_file():
                allowed_targets = tuple(plan.composer.allowed_targets)
                make_model = partial(exported_model, plan.folder, allowed_targets)
        return StudyEnd(
            status="FINISHED",
            metrics=metrics,
            tags=tags,
            artifacts=artifacts,
            make_model=make_model,
        )

    def print(self) -> int:
        """Print what the study found, and return the exit code.

        What is raised is that of ``conclude_study``.
        """
        plan, results = self.plan, self.results
        if results and all(result.outcome is Outcome.ERRORED for result in results):
            raise WorkerError(
                f"all {len(results)} trials failed in the code they train; the first:"
                f" {results[0].error_line}",
                results[0].error or "",
            )
        for line in gathered_failures(results, plan.space.choices):
            self.say(line, style="yellow")
        if self.best is None if self.confirmation else not self.policy.scores:
            self._print_nothing_reached()
            _say_page(self.live)
            return EXIT_NOT_REACHED
        for line in self.front.lines if self.front is not None else ():
            self.say(line)
        if self.confirmation is None:
            score, trial = min((score, trial) for trial, score in self.policy.scores.items())
            self.say(
                "not confirmed (confirm=none), so nothing is exported; the"
                f" {'fastest' if plan.score_format.is_time else 'best'} trial was {trial},"
                f" {plan.score_format.format(score)}"
            )
            _say_page(self.live)
        else:
            self._print_confirmed(self.confirmation)
        return 0

    def _lost(self) -> str | None:
        """What was trained in vain since a worker was lost, and what saving took, in words."""
        lost = math.fsum(run.lost_seconds for run in self.runs)
        saving = math.fsum(run.checkpoint_seconds for run in self.runs)
        if not lost and not saving:
            return None
        spent = f"{format_seconds(lost)} of training, after the last states of lost workers"
        return f"{spent}; saving took {format_seconds(saving)}"

    def _print_confirmed(self, confirmation: Confirmation) -> None:
        plan, is_exported = self.plan, _is_exported(confirmation)
        contentions = [run.contention for run in self.runs if run.contention is not None]
        marked = (
            f"{len(contentions)} of {len(self.runs)} runs, such as: {contentions[-1]}"
            if contentions
            else None
        )
        rows = [
            ("target", str(plan.trial.target)),
            ("objective", "" if plan.score_format.is_time else plan.score_format.description),
            *_verdict(confirmation),
            ("trials", ", ".join(starmap(_outcome_text, self.outcomes.items()))),
            (
                "spent",
                f"{format_seconds(self.train_seconds)} of training in"
                f" {format_seconds(busy_seconds(self.runs))} of wall clock",
            ),
            ("lost", self._lost()),
            ("devices", differing_devices(self.runs)),
            ("marked", marked),
            ("further", self._outlook(confirmation)),
            ("report", shown_path(plan.folder / REPORT)),
            ("folder", shown_path(plan.folder)),
        ]
        commands = [
            ("browse the runs", self.live.tracker.browse),
            ("there, the trials, best first", self.live.tracker.page),
            ("export the best", _export_command(plan) if is_exported else None),
            ("search further", plan.further_command),
        ]
        print_summary(
            self.live.console,
            f"{plan.experiment} · {plan.name}",
            [(name, text) for name, text in rows if text],
            advice="" if is_exported else _ADVICE,
            commands=[(purpose, command) for purpose, command in commands if command],
        )

    def _outlook(self, confirmation: Confirmation) -> str | None:
        """What further trials are expected to bring, with what a training was confirmed to take."""
        outlook, best = self.policy.outlook, self.best
        score = confirmation.scores[best.trial].expected_score if best else None
        if outlook is None or score is None or not math.isfinite(score):
            return None
        better = "faster" if self.plan.score_format.is_time else "better"
        trainings = math.ceil(outlook.cost / (outlook.gain * score))
        return (
            f"{NUM_AHEAD} more trials: expected {outlook.gain:.1%} {better},"
            f" {outlook.device_seconds:.3g} device-seconds, worth it from {trainings:,} trainings"
            " on"
        )

    def _print_nothing_reached(self) -> None:
        """Print that nothing reached the target, the trial that came closest, and what to try."""
        target, is_confirmed = self.plan.trial.target, self.confirmation is not None
        self.say(f"nothing reached {target}" + (" again on fresh seeds" if is_confirmed else ""))
        closest = self.live.closest
        if closest is not None and not is_confirmed:
            _, _, *reached = words_of_result(closest, None, target, self.plan.score_format)
            what = " ".join(closest.overrides) or "the baseline"
            self.say(f"closest: trial {closest.trial}, {', '.join(reached)}: {what}")
        self.say(
            f"search further: {self.plan.further_command}\nor make it easier: a higher"
            " target.max_train_seconds, or another target.value (another study.name then)"
        )


def _outcome_text(outcome: str, count: int) -> str:
    return f"{outcome} {count}" + " (never finished)" * (outcome == Outcome.STOPPED)


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
            (scores[each.trial], confirmation.reasons.get(each.trial, "interrupted"))
            for each in confirmation.configurations[1:]
            if each is not chosen
        ],
    )


def _origin(plan: StudyPlan, confirmation: Confirmation, best: Configuration) -> list[str]:
    """Lines on where the exported configuration comes from, for comments."""
    scores, speed_up = confirmation.scores[best.trial], confirmation.speed_up
    reached = ", ".join(f"{score:.3g}" for score, reached in scores.scored_runs if reached)
    lines = [
        f"Exported by autotune from study {plan.name}, {best.label}:"
        f" {plan.trial.target} in {reached} {scores.scale.unit}".rstrip()
        + f" on fresh seeds, {describe_reached(scores)}."
    ]
    if speed_up and not confirmation.is_baseline_best:
        gain = scores.scale.gain.capitalize()
        lines.append(f"{gain} over the baseline: {describe_ratio(speed_up)}.")
    return [*lines, "The seed is the search trial's own."]


def _export_command(plan: StudyPlan) -> str:
    """Command that exports the best configuration, into the study's own config folder if it has
    one.
    """
    folder, studies = next(iter(plan.composer.config_dirs), None), plan.folder.parent
    words = [f"study={plan.name}", f"as={plan.experiment}_best"]
    if studies != Path("outputs").absolute():
        words.append(f"folder={shown_path(studies)}")
    config_dir = "my_conf" if folder is None else shown_path(Path(folder).absolute())
    return f"python -m autotune export {shlex.join([*words, '--config-dir', config_dir])}"


def _say_page(live: LiveStudy) -> None:
    """Print where the tracker shows the trials."""
    if (page := live.tracker.page) is not None:
        say(live.console, f"{live.tracker.name}, the trials, best first: {page}")
