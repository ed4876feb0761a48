"""Reading search spaces: files in the experiment's list, mappings in it, and sweeps on the command line.

Hydra's own sweep words are read too, so that what people already have can be pasted:
``choice(a,b)``, ``interval(1e-4,1e-1)``, ``range(1,10)`` (its end excluded, as in Hydra), ``int(interval(1,8))`` and
``tag(log, interval(1e-4,1e-1))``. A shipped space is picked by its name, as an option of a group is: ``search_space=[cnn,precision]``.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, QuotedString, RangeSweep
from hydra.errors import HydraException

from autotune.config.compose import Composer, did_you_mean
from autotune.config.paths import shipped_folder
from autotune.config.schema import FIXED_KEYS
from autotune.errors import ConfigError, InvalidTrialError, SearchSpaceError
from autotune.space import Choice, Parameter, SearchSpace, Suggestion, override_text


def read_search_space(entries: Sequence[Any], composer: Composer) -> SearchSpace:
    """The search space of an experiment: its ``search_space`` list, and the command line's sweeps in place of equal keys.

    Raises:
        SearchSpaceError: with file, key, what was found and what is accepted.
    """
    space = SearchSpace()
    for index, entry in enumerate(entries):
        if isinstance(entry, str):
            source = entry if "/" in entry or Path(entry).suffix else f"search_spaces/{entry}.yaml"
            mapping = _load(entry, source, composer.config_dirs)
        else:
            mapping, source = entry, f"search_space[{index}]"
        space = space.merged_with(SearchSpace.from_mapping(_without_sweep_words(mapping, source), source))
    if composer.sweeps:
        narrowed = SearchSpace.from_mapping(_without_sweep_words(composer.sweeps, "command line"), "command line")
        known = {key for _, key, _ in space.items()}
        added = {key: each for key, each in narrowed.parameters.items() if key not in known}
        space = _narrowed(space, narrowed).merged_with(SearchSpace(added, dict.fromkeys(added, "command line")))
    _check_searchable(space)
    return space


def _narrowed(space: SearchSpace, to: SearchSpace) -> SearchSpace:
    """The space with the domains of ``to`` wherever their keys stand; a choice's values open what they opened."""
    parameters: dict[str, Parameter] = {}
    for key, parameter in space.parameters.items():
        given = to.parameters.get(key, parameter)
        if isinstance(parameter, Choice) and isinstance(given, Choice):
            opened = [(value, _narrowed(beneath, to)) for value, beneath in parameter.options]
            given = Choice(options=tuple((value, _opened_by(value, opened)) for value, _ in given.options))
        parameters[key] = given
    return SearchSpace(parameters, {**space.sources, **{key: to.sources[key] for key in parameters if key in to.parameters}})


def _opened_by(value: Any, options: Sequence[tuple[Any, SearchSpace]]) -> SearchSpace:
    return next((beneath for each, beneath in options if override_text(each) == override_text(value)), SearchSpace())


def check_space(space: SearchSpace, composer: Composer) -> list[tuple[str, Any, Suggestion]]:
    """Compose a point of every branch of the space, so that no key or value of it fails later.

    Returns:
        The points that were composed: the option each one opens (its qualified name and value), and the point.

    Raises:
        SearchSpaceError: a key that no configuration has, or a value that the schema does not take.
    """
    probes = list(space.probes())
    for name, value, point in probes:
        try:
            composer.compose_suggestion(point, seed=0)
        except InvalidTrialError as error:
            _check_keys_exist(space, point, composer)
            key = name.rpartition("/")[2]
            opened = "" if not name or str(error).startswith((f"{key}:", f"{key}=")) else f"{name}={value}: "
            raise SearchSpaceError(f"{_source(space)}: {opened}{error}") from error
    return probes


def _check_keys_exist(space: SearchSpace, point: Suggestion, composer: Composer) -> None:
    """Say of a point that does not compose which of its keys is missing, and what is there instead."""
    groups = [f"{key}={override_text(value)}" for key, value in point.values.items() if composer.is_group(key)]
    try:
        plain = composer.compose(groups).plain
    except ConfigError:
        return
    for key in point.values:
        parent, _, last = key.rpartition(".")
        holder: Any = plain
        for part in parent.split(".") if parent else ():
            holder = holder.get(part) if isinstance(holder, Mapping) else None
        if composer.is_group(key) or (isinstance(holder, Mapping) and last in holder):
            continue
        has = f"{parent} has {', '.join(map(str, holder))}" if parent and isinstance(holder, Mapping) else f"there is no {parent or key}"
        raise SearchSpaceError(f"{_source(space)}: {key}: no config has this key; {has}")


def _source(space: SearchSpace) -> str:
    return ", ".join(dict.fromkeys(space.sources.values())) or "search_space"


def _check_searchable(space: SearchSpace) -> None:
    for _, key, parameter in space.items():
        root = key.replace("/", ".").split(".")[0]
        if root in FIXED_KEYS:
            raise SearchSpaceError(
                f"{_source(space)}: {key}: is a setting of the study, the same for all its trials; accepted are keys of a training"
            )
        if isinstance(parameter, Choice) and any(isinstance(value, Mapping) for value, _ in parameter.options):
            raise SearchSpaceError(f"{_source(space)}: {key}: a choice is a mapping; accepted are scalars and lists")


def _load(entry: str, file: str, config_dirs: Sequence[Path]) -> Any:
    """The content of a search space's file: in the working folder, in or beside --config-dir, or among the shipped ones."""
    relative = Path(file).expanduser()
    folders = [Path(), *config_dirs, *(each.parent for each in config_dirs), shipped_folder("search_spaces").parent]
    path = next((folder / relative for folder in folders if (folder / relative).is_file()), None)
    if path is None:
        shipped = sorted(each.stem for each in shipped_folder("search_spaces").glob("*.yaml"))
        raise SearchSpaceError(
            f"search_space: {entry}: no such file{did_you_mean(relative.stem, shipped)}; accepted are {', '.join(shipped)}, and a path "
            f"from here or --config-dir, as in my_spaces/net.yaml"
        )
    try:
        return yaml.load(path.read_text(), Loader=_UniqueKeyLoader) or {}  # noqa: S506  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SearchSpaceError(f"{file}{line}: {error.problem}") from error
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise SearchSpaceError(f"{file}: cannot be read: {' '.join(str(error).split())}") from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, which alone would let the second of two equal keys win in silence and read 1e-2 as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key}: stands twice; accepted is each key once", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+"), list("-+0123456789.")
)


def _without_sweep_words(mapping: Any, source: str) -> Any:
    """The mapping with every domain that is a sweep word, at any depth, as the domain it stands for."""
    if not isinstance(mapping, Mapping):
        return mapping
    return {key: _domain(domain, source, str(key)) for key, domain in mapping.items()}


def _domain(domain: Any, source: str, key: str) -> Any:
    if isinstance(domain, str):
        return _parse_sweep(domain, source, key)
    if isinstance(domain, Mapping) and isinstance(domain.get("choices"), Mapping):
        opened = {value: _without_sweep_words(beneath, source) for value, beneath in domain["choices"].items()}
        return {**domain, "choices": opened}
    return domain


def _parse_sweep(text: str, source: str, key: str) -> Any:
    refusal = SearchSpaceError(
        f"{source}: {key}: found {text!r}, accepted is a list of values, a mapping with type: float, int, power_of_two or choice, "
        f"or one of choice(a,b), interval(low,high), range(start,stop), tag(log, interval(low,high))"
    )
    try:
        override = OverridesParser.create().parse_override(f"key={text}")
    except HydraException as error:
        raise refusal from error
    sweep = override.value()
    if isinstance(sweep, ChoiceSweep):
        return _unquoted(sweep.list)
    if isinstance(sweep, IntervalSweep) and sweep.start is not None and sweep.end is not None:
        whole = isinstance(sweep.start, int) and isinstance(sweep.end, int)
        return {"type": "int" if whole else "float", "low": sweep.start, "high": sweep.end, "log": "log" in sweep.tags}
    if isinstance(sweep, RangeSweep) and sweep.start is not None and sweep.stop is not None:
        return _range(sweep, refusal)
    raise refusal


def _unquoted(value: Any) -> Any:
    if isinstance(value, list):
        return [_unquoted(each) for each in value]
    return value.text if isinstance(value, QuotedString) else value


def _range(sweep: RangeSweep, refusal: SearchSpaceError) -> dict[str, Any]:
    """A range's values lie at start + n * step below stop."""
    start, stop, step = (Decimal(str(each)) for each in (sweep.start, sweep.stop, sweep.step))
    if step <= 0 or stop <= start:
        raise refusal
    count = int((stop - start) / step) + bool((stop - start) % step)
    whole = all(isinstance(each, int) for each in (sweep.start, sweep.stop, sweep.step))
    number = int if whole else float
    settings: dict[str, Any] = {"type": number.__name__, "low": number(start), "high": number(start + (count - 1) * step)}
    if "log" in sweep.tags:
        settings["log"] = True
    return {**settings, "step": number(step)} if count > 1 and (step != 1 or not whole) else settings
