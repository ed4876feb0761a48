"""Reads search spaces: files and mappings in the experiment's ``search_space`` list, and sweeps on
the command line.

Hydra's sweep functions are accepted as domains, so that existing sweeps can be pasted:
``choice(a,b)``, ``interval(1e-4,1e-1)``, ``range(1,10)`` (its end excluded, as in Hydra),
``int(interval(1,8))`` and ``tag(log, interval(1e-4,1e-1))``. A shipped space is chosen by its name,
as an option of a group is: ``search_space=[cnn,precision]``.
"""

import math
import os
from collections.abc import Mapping, Sequence
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
from autotune.space import Choice, Parameter, SearchSpace, Suggestion, override_text
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
        added = {
            key: parameter for key, parameter in sweeps.parameters.items() if key not in space.keys
        }
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
            options = []
            for value, _ in domain.options:
                index = parameter.index_of(value)
                beneath = SearchSpace() if index is None else parameter.options[index][1]
                options.append((value, _with_domains(beneath, sweeps)))
            domain = Choice(options=tuple(options))
        parameters[key] = domain
    replaced = {key: sweeps.sources[key] for key in parameters if key in sweeps.parameters}
    return SearchSpace(parameters, {**space.sources, **replaced}, space.gpu_only - set(replaced))


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
            raise SearchSpaceError(f"{space.source}: {opened}{error}") from error
    return probes


def _check_searchable(space: SearchSpace) -> None:
    for _, key, parameter, _ in space.walk():
        where, root = f"{space.source}: {key}", key.replace("/", ".").split(".")[0]
        if root in FIXED_KEYS:
            raise SearchSpaceError(
                f"{where}: is a setting of the study, the same for all its trials; search keys of a"
                " training"
            )
        source = space.sources.get(key, "")
        # what OmegaConf has resolved, for the user's own function
        is_plain = source.startswith("search_space[") and root == "training"
        for option, _ in parameter.options if isinstance(parameter, Choice) else ():
            if isinstance(option, Mapping):
                raise SearchSpaceError(f"{where}: a choice is a mapping; give scalars or lists")
            text, shown = override_text(option), override_text(without_secrets_in(option))
            if text[0] == "[" and "{" in text:
                try:
                    read_value(text)
                except ConfigError as error:
                    raise SearchSpaceError(f"{where}: {error}") from error
            # options are written to a study's files as they are, to be trained again
            if shown != text:
                raise SearchSpaceError(
                    f"{where}: the option {shown} has a secret in it; on the command line,"
                    f" {key}=choice('${{oc.env:NAME}}',...) reads it from the environment"
                )
            if source != "command line" and not is_plain and "${" in str(option):
                raise SearchSpaceError(f"{where}: a choice has ${{ in it; give plain values")


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
    files = (folder / relative for folder in folders)
    path = next((path for path in files if os.path.isfile(path)), None)  # noqa: PTH113  # any name
    if path is None:
        shipped = sorted(path.stem for path in shipped_folder("search_spaces").glob("*.yaml"))
        raise SearchSpaceError(
            f"search_space: {entry}: no such file{did_you_mean(relative.stem, shipped)}; there are"
            f" {', '.join(shipped)}; a file of your own has a path from here or --config-dir, as in"
            " my_spaces/net.yaml"
        )
    return read_yaml(path, file) or {}


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
        sweep: Any = parse_override(f"key={text}").value()
    except ConfigError as error:
        raise refusal from error
    if isinstance(sweep, ChoiceSweep):
        return _unquoted(sweep.list)
    numbers: Sequence[Any] = ()
    if isinstance(sweep, IntervalSweep):
        numbers = (sweep.start, sweep.end)
    elif isinstance(sweep, RangeSweep):
        numbers = (sweep.start, sweep.stop, sweep.step)
    # Hydra takes true and false for whole numbers
    are_finite = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
    if not numbers or not are_finite:
        raise refusal
    low, high, *step = numbers
    is_int = all(isinstance(number, int) for number in numbers)
    domain = {"type": "int" if is_int else "float", "low": low, "high": high}
    if step:
        if step[0] <= 0 or high <= low:
            raise refusal
        # a range is without its end; the domain's own is lowered to a value that the steps meet
        domain |= {"high": high - 1 if is_int else math.nextafter(high, low), "step": step[0]}
    return domain | {"log": "log" in sweep.tags}


def _unquoted(value: Any) -> Any:
    if isinstance(value, list):
        return [_unquoted(item) for item in value]
    return value.text if isinstance(value, QuotedString) else value
