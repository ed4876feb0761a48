"""Reads search spaces: files and mappings in the experiment's ``search_space`` list, and sweeps on
the command line.

Hydra's sweep functions are accepted as domains, so that existing sweeps can be pasted:
``choice(a,b)``, ``interval(1e-4,1e-1)``, ``range(1,10)`` (its end excluded, as in Hydra),
``int(interval(1,8))`` and ``tag(log, interval(1e-4,1e-1))``. A shipped space is chosen by its name,
as an option of a group is: ``search_space=[cnn,precision]``.
"""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, QuotedString, RangeSweep

from autotune.config.compose import Composer
from autotune.config.experiments import shipped_folder
from autotune.config.overrides import parse_override, read_value
from autotune.config.schema import FIXED_KEYS
from autotune.errors import ConfigError, InvalidTrialError, SearchSpaceError, did_you_mean
from autotune.redaction import without_secrets_in
from autotune.remote import refuse_url, user_path
from autotune.space import Choice, Parameter, SearchSpace, Suggestion, override_text, short
from autotune.yaml_files import read_yaml


def read_search_space(entries: Sequence[Any], composer: Composer) -> SearchSpace:
    """Read an experiment's search space: its ``search_space`` list, in which sweeps of the command
    line replace domains of the same key.

    Raises:
        SearchSpaceError: a file, key or domain is wrong; names the file, the key, what was found
            and what to do.
    """
    space = SearchSpace()
    for index, entry in enumerate(entries):
        if isinstance(entry, str):
            source = entry if "/" in entry or Path(entry).suffix else f"search_spaces/{entry}.yaml"
            mapping = _load(entry, source, composer.config_dirs)
        else:
            mapping, source = entry, f"search_space[{index}]"
        space = space.merged_with(
            SearchSpace.from_mapping(_without_sweeps(mapping, source), source)
        )
    if composer.sweeps:
        sweeps = SearchSpace.from_mapping(
            _without_sweeps(composer.sweeps, "command line"), "command line"
        )
        known = {key for _, key, _ in space.items()}
        added = {key: parameter for key, parameter in sweeps.parameters.items() if key not in known}
        space = _with_domains(space, sweeps).merged_with(
            SearchSpace(added, dict.fromkeys(added, "command line"))
        )
    _check_searchable(space)
    return space


def _with_domains(space: SearchSpace, sweeps: SearchSpace) -> SearchSpace:
    """Replace domains of a space, at any depth, by those of ``sweeps``.

    The values of a choice open the same subspaces as before.
    """
    parameters: dict[str, Parameter] = {}
    for key, parameter in space.parameters.items():
        domain = sweeps.parameters.get(key, parameter)
        if isinstance(parameter, Choice) and isinstance(domain, Choice):
            options = [
                (value, _with_domains(beneath, sweeps)) for value, beneath in parameter.options
            ]
            domain = Choice(
                options=tuple((value, _opened_by(value, options)) for value, _ in domain.options)
            )
        parameters[key] = domain
    replaced = {key: sweeps.sources[key] for key in parameters if key in sweeps.parameters}
    return SearchSpace(parameters, {**space.sources, **replaced}, space.gpu_only - set(replaced))


def _opened_by(value: Any, options: Sequence[tuple[Any, SearchSpace]]) -> SearchSpace:
    return next(
        (beneath for option, beneath in options if override_text(option) == override_text(value)),
        SearchSpace(),
    )


def check_space(space: SearchSpace, composer: Composer) -> list[tuple[str, Any, Suggestion]]:
    """Compose a point of every branch of the space, so that none of its keys and values fails
    later.

    Returns:
        The composed points, each with the qualified name and the value of the option that it opens.

    Raises:
        SearchSpaceError: a key is in no configuration, or the schema refuses a value.
    """
    probes = list(space.probes())
    for name, value, point in probes:
        try:
            composer.compose_suggestion(point, seed=0)
        except InvalidTrialError as error:
            key = name.rpartition("/")[2]
            opened = (
                ""
                if not name or str(error).startswith((f"{key}:", f"{key}="))
                else f"{name}={value}: "
            )
            raise SearchSpaceError(f"{_source(space)}: {opened}{error}") from error
    return probes


def _source(space: SearchSpace) -> str:
    return ", ".join(dict.fromkeys(space.sources.values())) or "search_space"


def _check_searchable(space: SearchSpace) -> None:
    for _, key, parameter in space.items():
        root = key.replace("/", ".").split(".")[0]
        if root in FIXED_KEYS:
            raise SearchSpaceError(
                f"{_source(space)}: {key}: is a setting of the study, the same for all its trials;"
                " search keys of a training"
            )
        if not isinstance(parameter, Choice):
            continue
        options = [value for value, _ in parameter.options]
        if any(isinstance(value, Mapping) for value in options):
            raise SearchSpaceError(
                f"{_source(space)}: {key}: a choice is a mapping; give scalars or lists"
            )
        for text in map(override_text, options):
            if text[0] == "[" and "{" in text and not _is_value(text):
                raise SearchSpaceError(
                    f"{_source(space)}: {key}: found {short(text)}; in a list, mappings need keys"
                    " that are plain names"
                )
        _check_without_secrets(space, key, options)
        source = space.sources.get(key, "")
        # what OmegaConf has resolved, for the user's own function
        is_plain = source.startswith("search_space[") and root == "training"
        if (
            source != "command line"
            and not is_plain
            and any("${" in str(value) for value in options)
        ):
            raise SearchSpaceError(
                f"{_source(space)}: {key}: a choice has ${{ in it; give plain values"
            )


def _is_value(text: str) -> bool:
    try:
        read_value(text)
    except ConfigError:
        return False
    return True


def _check_without_secrets(space: SearchSpace, key: str, options: Sequence[Any]) -> None:
    """Raise SearchSpaceError if an option has a secret: options are written to a study's files
    as they are, to be trained again.
    """
    for option in options:
        shown = without_secrets_in(option)
        if override_text(shown) != override_text(option):
            raise SearchSpaceError(
                f"{_source(space)}: {key}: the option {override_text(shown)} has a secret in it; on"
                f" the command line, {key}=choice('${{oc.env:NAME}}',...) reads it from the"
                " environment"
            )


def _load(entry: str, file: str, config_dirs: Sequence[Path]) -> Any:
    """Content of a search space's file, looked for in the working folder, in and beside
    --config-dir, and among the shipped spaces.
    """
    refuse_url(entry, "search_space", "a file of this machine")
    relative = user_path(file)
    if relative.suffix not in (".yaml", ".yml"):
        raise SearchSpaceError(f"search_space: {entry}: is no search space, which is a .yaml file")
    folders = [
        Path(),
        *config_dirs,
        *(folder.parent for folder in config_dirs),
        shipped_folder("search_spaces").parent,
    ]
    path = next((folder / relative for folder in folders if _is_file(folder / relative)), None)
    if path is None:
        shipped = sorted(path.stem for path in shipped_folder("search_spaces").glob("*.yaml"))
        raise SearchSpaceError(
            f"search_space: {entry}: no such file{did_you_mean(relative.stem, shipped)}; there are"
            f" {', '.join(shipped)}; a file of your own has a path from here or --config-dir, as in"
            " my_spaces/net.yaml"
        )
    try:
        content = read_yaml(path, file) or {}
    except ConfigError as error:
        raise SearchSpaceError(str(error)) from error
    if not isinstance(content, Mapping):
        raise SearchSpaceError(
            f"{file}: found a {type(content).__name__}; write config key: domain"
        )
    return content


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _without_sweeps(mapping: Any, source: str) -> Any:
    """Replace every domain written as a Hydra sweep, at any depth, by the plain data that
    ``SearchSpace.from_mapping`` reads.
    """
    if not isinstance(mapping, Mapping):
        return mapping
    return {
        key: (
            _without_sweeps(domain, source) if key == "_gpu_" else _domain(domain, source, str(key))
        )
        for key, domain in mapping.items()
    }


def _domain(domain: Any, source: str, key: str) -> Any:
    if isinstance(domain, str):
        return _parse_sweep(domain, source, key)
    if isinstance(domain, Mapping) and isinstance(domain.get("choices"), Mapping):
        opened = {
            value: _without_sweeps(beneath, source) for value, beneath in domain["choices"].items()
        }
        return {**domain, "choices": opened}
    return domain


def _parse_sweep(text: str, source: str, key: str) -> Any:
    refusal = SearchSpaceError(
        f"{source}: {key}: found {text!r}; give a list of values, a mapping with type:"
        " float, int, power_of_two or choice, or one of choice(a,b), interval(low,high),"
        " range(start,stop), tag(log, interval(low,high))"
    )
    try:
        sweep = parse_override(f"key={text}").value()
    except ConfigError as error:
        raise refusal from error
    if isinstance(sweep, ChoiceSweep):
        return _unquoted(sweep.list)
    if isinstance(sweep, IntervalSweep) and sweep.start is not None and sweep.end is not None:
        is_int = isinstance(sweep.start, int) and isinstance(sweep.end, int)
        return {
            "type": "int" if is_int else "float",
            "low": sweep.start,
            "high": sweep.end,
            "log": "log" in sweep.tags,
        }
    if isinstance(sweep, RangeSweep) and _are_numbers(sweep.start, sweep.stop, sweep.step):
        return _range(sweep, refusal)
    raise refusal


def _are_numbers(*values: Any) -> bool:
    """Whether all values are finite numbers; Hydra takes true and false for whole numbers."""
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        for value in values
    )


def _unquoted(value: Any) -> Any:
    if isinstance(value, list):
        return [_unquoted(item) for item in value]
    return value.text if isinstance(value, QuotedString) else value


def _range(sweep: RangeSweep, refusal: SearchSpaceError) -> dict[str, Any]:
    """Domain of a range, whose values are start + n * step below stop."""
    start, stop, step = (Decimal(str(number)) for number in (sweep.start, sweep.stop, sweep.step))
    if step <= 0 or stop <= start:
        raise refusal
    try:
        count = int((stop - start) / step) + bool((stop - start) % step)
    except InvalidOperation as error:  # of more values than a number can tell
        raise refusal from error
    is_int = all(isinstance(number, int) for number in (sweep.start, sweep.stop, sweep.step))
    kind = int if is_int else float
    settings: dict[str, Any] = {
        "type": kind.__name__,
        "low": kind(start),
        "high": kind(start + (count - 1) * step),
    }
    if "log" in sweep.tags:
        settings["log"] = True
    return {**settings, "step": kind(step)} if count > 1 and (step != 1 or not is_int) else settings
