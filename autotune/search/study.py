"""A study in its storage: its definition, its trials and its confirmation runs.

The storage (``storage.py`` opens it) is the only source of truth. All other files in the study's
folder are derived from it.

How outcomes are told to Optuna: REACHED is complete with its score. A censored trial is pruned;
TPE ranks pruned trials by the last report, the one with the highest step first, so there the
distance from the target is the only report: with its seconds slow configurations would look fast.
Under samplers that do not look at reports every evaluation is one. OUT_OF_MEMORY and DIVERGED
violate a constraint: samplers forget failed trials and would propose them for ever. Only ERRORED, a
fault in user code, is a failure.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optuna
from optuna.trial import TrialState

from autotune.config.schema import first_difference, with_raised_limit
from autotune.errors import ConfigError, StudyError, explained
from autotune.files import FORMAT, STUDY_FILES, check_format
from autotune.measurement import Evaluation, LearningCurve, Target, TrialResult
from autotune.objective import Objective
from autotune.outcome import Outcome
from autotune.recording import Recording, read_recording, write_recording
from autotune.redaction import without_secrets, without_secrets_in
from autotune.remote import refuse_url, user_path
from autotune.search.points import derived_seed
from autotune.search.samplers import PausingSampler, optuna_sampler, quiet_optuna
from autotune.search.storage import JOURNAL, open_storage, written_together
from autotune.space import SearchSpace, Suggestion

BASELINE = "autotune:baseline"
REJECTED = "autotune:rejected"
RESULT = "autotune:result"
RETRY_OF = "autotune:retry_of"
"""Attribute of a trial: number of the lost or interrupted trial of the same point."""
PAUSED = "autotune:paused"
"""Attribute of a trial that the search has paused; earlier versions kept its evaluations there."""
NUM_LOST = "autotune:num_lost"
"""Attribute of a trial: how often it was lost, or tried again because of contention, since it last
made progress."""
ENDED_FOR = "autotune:ended_for_trainings"
"""Attribute of a study: number of trainings for which no further trial is worth its cost."""
RACE = "autotune:race"
"""Attribute of a study: the plan of the latest confirmation race, as plain data, so that another
process can continue that race."""
INFEASIBLE = "infeasible"
"""Constraint that a trial violates whose point cannot be trained."""

_EVALUATIONS = "autotune:evaluations:"
"""Attribute of a trial, before a number: its evaluations from that one on, each with its number."""
_MAX_TEXT_BYTES = 60_000
"""Longest value of an attribute: a column of MySQL's holds 65,535 bytes."""
_MAX_ERROR_BYTES = 30_000
"""Longest error text that is stored; of a longer one begin and end are."""
_DEFINITION = "autotune:definition"
_FORMAT = "autotune:format"
_CONFIRMED = "autotune:confirmed:"


Study = optuna.Study
"""Optuna's own study, which ``autotune.search`` and ``autotune.execution`` share."""


def open_study(
    name: str,
    folder: Path,
    *,
    storage_url: str | None,
    definition: Mapping[str, Any],
    make_sampler: Callable[[int], object] | None = None,
    seed: int = 0,
) -> tuple[Study, PausingSampler | None]:
    """Open the study of a name, or create it, and return it with its sampler if that pauses trials,
    else with None.

    Args:
        definition: settings that two runs of one study must have in common; plain data, kept in the
            storage. The ``target.max_train_seconds`` of its ``configuration`` may be raised: the
            stored one is then replaced.
        make_sampler: makes a sampler from a seed: an Optuna sampler or one that pauses trials. A
            resumed sampler must not draw again what it drew at the start, so its seed depends on
            how many trials there are. None for a comparison, which has no trials.
        seed: seed of the study.

    Raises:
        StudyError: the study exists with another definition, and the message names the first
            difference; or its journal is damaged; or the folder has results of a study, and the
            storage has none.
        DataError: a newer autotune made the study.
        ConfigError: the storage cannot be opened, or the sampler is of neither kind.
    """
    quiet_optuna()
    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name=name,
        storage=open_storage(folder, storage_url, is_owner=True),
        sampler=optuna.samplers.RandomSampler(),  # until it is known how many trials there are
        load_if_exists=True,
    )
    if not study.get_trials(deepcopy=False):
        _check_has_no_results(name, folder, storage_url)
    check_format(study.user_attrs.get(_FORMAT), f"study.name={name}")
    stored = study_definition(study)
    # as a storage returns it: tuples are lists, keys are text
    wanted: dict[str, Any] = json.loads(json.dumps(definition))
    if not stored:
        study.set_user_attr(_FORMAT, FORMAT)
    kept = dict(without_secrets_in(stored or wanted))
    if isinstance(kept.get("configuration"), Mapping) and "configuration" in wanted:
        kept["configuration"] = with_raised_limit(kept["configuration"], wanted["configuration"])
    if (difference := first_difference(kept, wanted)) is not None:
        if difference.startswith("configuration.target.max_train_seconds"):
            difference += "; it (max_seconds of autotune.target) may be raised, not lowered"
        learnt = f", with warm_start=[{name}] to learn from the trials of this one"
        raise StudyError(
            f"study.name={name}: was made for something else ({difference}); use the same,"
            f" or another study.name{learnt if 'search_space' in kept else ''}"
        )
    if kept != stored:
        study.set_user_attr(_DEFINITION, kept)
    if make_sampler is None:
        return study, None
    sampler = make_sampler(derived_seed(seed, f"sampler {len(study.get_trials(deepcopy=False))}"))
    study.sampler = optuna_sampler(sampler)
    return study, sampler if isinstance(sampler, PausingSampler) else None


def read_study(name: str, folder: Path, *, storage_url: str | None = None) -> Study:
    """Load an existing study.

    Raises:
        StudyError: no study has that name.
        DataError: a newer autotune made the study.
    """
    quiet_optuna()
    if storage_url is None and not (folder / JOURNAL).is_file():
        studies = sorted(path.parent.name for path in folder.parent.glob(f"*/{JOURNAL}"))
        known = (
            f"use one of {', '.join(studies)}" if studies else f"there is none in {folder.parent}"
        )
        raise StudyError(f"study={name}: no such study; {known}")
    storage = open_storage(folder, storage_url)
    try:
        study = optuna.load_study(study_name=name, storage=storage)
    except KeyError as error:
        names = ", ".join(sorted(optuna.get_all_study_names(storage)))
        known = f"use one of {names}" if names else "there is none"
        raise StudyError(
            f"study={name}: no such study in"
            f" {without_secrets(storage_url or str(folder / JOURNAL))}; {known}"
        ) from error
    check_format(study.user_attrs.get(_FORMAT), f"study.name={name}")
    return study


def study_definition(study: Study) -> dict[str, Any]:
    """The definition that the study was created with: settings that all its runs have in common."""
    return dict(study.user_attrs.get(_DEFINITION, {}))


def earlier_recording(
    entry: str, *, studies: Path, storage_url: str | None
) -> tuple[str, Recording]:
    """Name and recording of the study that an entry of ``warm_start`` names.

    A study that has its storage here has the recording made of that, which has more than its folder
    if the study was interrupted or still runs.

    Args:
        entry: name of the study, its folder, or the folder of a recording.
        studies: folder that contains the studies' folders.

    Raises:
        ConfigError: the entry names neither a study nor a folder with a recording.
        StudyError: the database has no study of that name, or the storage does not hold what a
            study writes.
        AutotuneError: the recording cannot be read, or a newer autotune made the study.
    """
    refuse_url(entry, "warm_start", "a study's name or a folder of this machine")
    places = (user_path(entry), studies / entry)
    folder = next((folder for folder in places if (folder / JOURNAL).is_file()), None)
    if folder is None:
        for found in (path for place in places for path in (place, place / "recording")):
            if (found / "study.yaml").is_file():
                named = found.parent if found.name == "recording" else found
                return named.name, read_recording(found)
        if storage_url is None:
            recorded = studies.glob("*/recording/study.yaml")
            known = sorted(path.parent.parent.name for path in recorded)
            raise ConfigError(
                f"warm_start: {entry}: is no study that has a recording in {studies} (there are"
                f" {', '.join(known) or 'none'}), and no folder with study.yaml; give one of these"
            )
    name = (folder or studies / entry).resolve().name
    study = read_study(name, folder or studies / name, storage_url=None if folder else storage_url)
    definition = study_definition(study)
    with TemporaryDirectory(prefix="autotune-") as recording:
        with explained(f"study={name}: the storage does not hold what a study writes", StudyError):
            write_recording(
                Path(recording),
                results=list(finished_results(study).values()),
                target=Target(**definition["configuration"]["target"]),
                space=definition["search_space"],
                source=f"autotune study {name}",
                baseline=baseline_number(study),
            )
        return name, read_recording(Path(recording))


def store_confirmation(study: Study, arm: int, index: int, result: TrialResult) -> None:
    """Store the result of one confirmation run: ``arm`` is the trial number, ``index`` the
    number of the round, from zero.
    """
    key = f"{_CONFIRMED}{arm}:{index}"
    earlier = [name for name in study.user_attrs if name.startswith(f"{key}:")]
    with written_together(study._storage):  # noqa: SLF001
        for name in earlier:  # of a run that was made before in its place
            study.set_user_attr(name, ())
        for first, evaluations in _in_texts(dict(enumerate(result.evaluations))):
            study.set_user_attr(f"{key}:{first}", evaluations)
        study.set_user_attr(key, _without_evaluations(result))


def confirmations(study: Study) -> dict[tuple[int, int], TrialResult]:
    """Results of all confirmation runs of a study, by arm (trial number) and number of the
    round.
    """
    attributes = study.user_attrs
    results: dict[tuple[int, int], TrialResult] = {}
    for key, value in attributes.items():
        arm, colon, index = key.removeprefix(_CONFIRMED).partition(":")
        if key.startswith(_CONFIRMED) and colon and index.isdigit():
            results[int(arm), int(index)] = _result_from(value, attributes, f"{key}:")
    return results


def store_evaluations(
    trial: optuna.Trial, evaluations: Mapping[int, Evaluation], *, first_to_report: float
) -> None:
    """Append evaluations of a trial, by number, to those that are stored.

    Args:
        first_to_report: number from which on each is an intermediate value for Optuna.
    """
    with written_together(trial.storage):
        for first, stored in _in_texts(evaluations):
            trial.set_user_attr(f"{_EVALUATIONS}{first}", stored)
        for number, evaluation in evaluations.items():
            if number >= first_to_report and math.isfinite(evaluation.metric):
                # Trial.report would keep what was reported before a worker was lost
                trial.storage.set_trial_intermediate_value(
                    trial._trial_id,  # noqa: SLF001
                    number + 1,
                    evaluation.metric,
                )


def cut_evaluations(trial: optuna.Trial, curve: LearningCurve) -> int:
    """Delete the stored evaluations of a trial after those that it continues from; return from
    which number on some of these are not stored: they were left out among later ones.
    """
    num_evaluations = curve.num_evaluations
    stored = _stored_curve(attributes_of(trial)).numbered
    with written_together(trial.storage):
        for key, value in [*attributes_of(trial).items()]:
            if key.startswith(_EVALUATIONS) and value and value[-1][0] >= num_evaluations:
                kept = [numbered for numbered in value if numbered[0] < num_evaluations]
                trial.set_user_attr(key, kept)
            elif key == PAUSED and isinstance(value, list | tuple):
                trial.set_user_attr(key, value[:num_evaluations])
    return next((at for at in curve.numbered if at not in stored), num_evaluations)


def attributes_of(trial: optuna.Trial) -> Mapping[str, Any]:
    """The attributes of a running trial; Optuna's own property copies all evaluations."""
    return trial._cached_frozen_trial.user_attrs  # noqa: SLF001


def _in_texts(evaluations: Mapping[int, Evaluation]) -> Iterator[tuple[str, list[Any]]]:
    """Evaluations with their numbers, in parts that a storage holds as one text each; with each
    part its name, which begins with its first number.
    """
    name, part, size = "", list[Any](), 0
    for number, evaluation in evaluations.items():
        for index, piece in enumerate(_pieces(evaluation.as_dict())):
            num_bytes = len(json.dumps([number, piece])) + 2
            if part and size + num_bytes > _MAX_TEXT_BYTES:
                yield name, part
                part, size = [], 0
            if not part:
                name = f"{number}:{index}" if index else f"{number}"
            part.append([number, piece])
            size += num_bytes
    if part:
        yield name, part


def _pieces(evaluation: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """An evaluation whose further metrics are too many for one text, as several of them."""
    metrics = [*evaluation.get("metrics", {}).items()]
    if len(metrics) < 2 or len(json.dumps(evaluation)) < _MAX_TEXT_BYTES // 2:
        yield evaluation
        return
    half = len(metrics) // 2
    yield from _pieces({**evaluation, "metrics": dict(metrics[:half])})
    yield from _pieces({"metrics": dict(metrics[half:])})


def _stored_curve(attributes: Mapping[str, Any], prefix: str = _EVALUATIONS) -> LearningCurve:
    """The evaluations among the attributes of a trial or a study."""
    earlier = attributes.get(PAUSED)  # of a version that kept them there
    found = dict(enumerate(earlier)) if isinstance(earlier, list | tuple) else {}
    for key, value in attributes.items():
        for number, piece in value if key.startswith(prefix) else ():
            before = found.get(number, {})
            metrics = {**before.get("metrics", {}), **piece.get("metrics", {})}
            found[number] = {**before, **piece, "metrics": metrics}
    return LearningCurve({at: Evaluation.from_dict(each) for at, each in found.items()})


def _without_evaluations(result: TrialResult) -> dict[str, Any]:
    """A result as it is stored, beside its evaluations."""
    error = None if result.error is None else _shortened(result.error)
    return {**result.as_dict(), "evaluations": (), "error": error}


def _shortened(text: str) -> str:
    """A text of which the middle is left out, if it is too long to be stored."""
    while (size := len(json.dumps(text))) > _MAX_ERROR_BYTES:
        half = len(text) * _MAX_ERROR_BYTES // size // 2 - 10
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    return text


def _result_from(
    stored: Mapping[str, Any], attributes: Mapping[str, Any], prefix: str = _EVALUATIONS
) -> TrialResult:
    """A stored result, with its evaluations from where they are: earlier versions kept them in
    it.
    """
    result = TrialResult.from_dict(stored)
    curve = _stored_curve(attributes, prefix)
    return result if result.evaluations else replace(result, evaluations=curve.evaluations)


def _check_has_no_results(name: str, folder: Path, storage_url: str | None) -> None:
    """Raise StudyError if a folder has results of a study whose trials are not in its storage:
    they would be written over.
    """
    results = (file.name for file in STUDY_FILES if file.is_result)
    found = next((name for name in results if (folder / name).exists()), None)
    if found is not None:
        storage = folder / JOURNAL if storage_url is None else without_secrets(storage_url)
        raise StudyError(
            f"study.name={name}: {folder} has {found} of an earlier study, and {storage} has no"
            " trial of it; use the storage with them (restored from a backup, or named by"
            " search.storage), or another study.name"
        )


def finished_results(study: Study) -> dict[int, TrialResult]:
    """The results of all trials of a study that ended, by trial number."""
    return {
        trial.number: _result_from(trial.user_attrs[RESULT], trial.user_attrs)
        for trial in study.get_trials(deepcopy=False)
        if RESULT in trial.user_attrs and trial.state.is_finished()
    }


def end_ended_trials(study: Study, objective: Objective) -> None:
    """Tell the results that an earlier process has stored and did not come to tell."""
    for frozen in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        stored = frozen.user_attrs.get(RESULT)
        if stored is not None:
            tell_result(study, _result_from(stored, frozen.user_attrs), objective)


def try_again(study: Study, number: int, *, num_tried: int) -> None:
    """Fail a trial whose times were spoilt, and enqueue its point, which was tried so often."""
    study.tell(number, state=TrialState.FAIL)
    frozen = study.get_trials(deepcopy=False)[number]
    kept = {BASELINE: True} if BASELINE in frozen.user_attrs else {}
    attributes = {**kept, NUM_LOST: num_tried, RETRY_OF: number}
    study.enqueue_trial(frozen.params, user_attrs=attributes)


def store_result(trial: optuna.Trial, result: TrialResult, target: Target | None) -> None:
    """Store the result of a trial beside its evaluations, with what samplers need of it: a
    constraint if infeasible; the shortfall from the target, where that is given, if censored.
    """
    if result.outcome.is_infeasible:
        trial.set_constraint(INFEASIBLE, 1.0)
    elif (
        target is not None
        and result.outcome.is_censored
        and result.last is not None
        and math.isfinite(result.last.metric)
    ):
        trial.report(result.last.shortfall(target), step=1)
    trial.set_user_attr(RESULT, _without_evaluations(result))


def tell_result(study: Study, result: TrialResult, objective: Objective) -> None:
    """End a trial whose result is stored; if the process dies before, ``end_ended_trials`` does."""
    score = objective.score(result) if result.outcome is Outcome.REACHED else None
    study.tell(result.trial, score, state=TrialState[result.outcome.traits.optuna_state])


def reject_trial(study: Study, trial: optuna.Trial, reason: str) -> None:
    """End a trial whose point no training can run."""
    with written_together(trial.storage):
        trial.set_user_attr(REJECTED, _shortened(reason))
        trial.set_constraint(INFEASIBLE, 1.0)
    study.tell(trial, state=TrialState.PRUNED)


def rejected_points(study: Study, space: SearchSpace) -> Iterator[Suggestion]:
    """The points of rejected trials."""
    for frozen in study.get_trials(deepcopy=False, states=[TrialState.PRUNED]):
        if REJECTED in frozen.user_attrs and frozen.params:
            yield space.suggest(optuna.trial.FixedTrial(frozen.params))


def ask_trial(
    study: Study,
    space: SearchSpace,
    baseline: Suggestion | None,
    place: Callable[[Suggestion], Suggestion | None] | None,
) -> tuple[optuna.Trial, Suggestion, bool] | None:
    """Ask a study for a new trial.

    Return it with its point and whether it trains the baseline, None if no point is left to train.

    Args:
        baseline: point of the baseline, without values if the space does not contain it; None for
            no baseline.
        place: gives the point to train in place of a suggestion, None if no point is left; without
            it suggestions stay as they are.

    Raises:
        ConfigError: the sampler raises an error because of its settings.
    """
    try:
        trial = study.ask()
        is_baseline = BASELINE in trial.user_attrs
        suggestion = (
            baseline if is_baseline and baseline and not baseline.values else space.suggest(trial)
        )
    except (TypeError, ValueError) as error:
        sampler = type(study.sampler).__name__
        raise ConfigError(
            f"search.sampler: {sampler} cannot propose with its settings:"
            f" {' '.join(str(error).split())}"
        ) from error
    placed = suggestion if place is None else place(suggestion)
    if placed is None:
        study.tell(trial, state=TrialState.FAIL)
        return None
    if placed != suggestion:
        study.tell(trial, state=TrialState.FAIL)  # which the sampler then ignores
        trial, suggestion = create_trial_at(study, space, placed)
    return trial, suggestion, is_baseline


def create_trial_at(
    study: Study, space: SearchSpace, point: Suggestion
) -> tuple[optuna.Trial, Suggestion]:
    """Create a trial at a point that no sampler need propose, with all of its parameters in one
    operation of the storage.
    """
    fixed = optuna.trial.FixedTrial(space.params_of(point))
    suggestion = space.suggest(fixed)
    template = optuna.trial.create_trial(
        state=TrialState.RUNNING, params=fixed.params, distributions=fixed.distributions
    )
    # Study.add_trial, which does not return it
    trial_id = study._storage.create_new_trial(study._study_id, template)  # noqa: SLF001
    return optuna.Trial(study, trial_id), suggestion


def baseline_number(study: Study) -> int | None:
    """Number of the baseline's trial: the last one, if an earlier one was interrupted.

    None if there is none.
    """
    return max(
        (
            trial.number
            for trial in study.get_trials(deepcopy=False)
            if BASELINE in trial.user_attrs
        ),
        default=None,
    )


def unfinished_trials(
    study: Study, space: SearchSpace, baseline: Suggestion | None
) -> Iterator[tuple[optuna.Trial, Suggestion, LearningCurve]]:
    """The trials that an earlier process began and did not end, with their points and evaluations.

    Call ``end_ended_trials`` before.

    Args:
        baseline: as of ``ask_trial``.
    """
    for frozen in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        # Optuna has no public way to another process's trial
        trial = optuna.Trial(study, frozen._trial_id)  # noqa: SLF001
        is_outside = BASELINE in frozen.user_attrs and baseline and not baseline.values
        suggestion = baseline if is_outside and baseline else space.suggest(trial)
        yield trial, suggestion, _stored_curve(frozen.user_attrs)
