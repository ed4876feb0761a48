"""A configuration's training as a plain PyTorch program that does not need autotune.

The program's parts (data set, model, optimizer, schedule and others) are autotune's own source text
(``source_code.py``); its loop is ``standalone.py.jinja``, which says the few things that one
configuration does instead of asking for each. With the same seed it draws the same numbers in the
same order as ``autotune train``, so its evaluations are the same. What the program cannot say is
refused.
"""

import ast
import inspect
import keyword
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from autotune.config.build import accepts_name, build_partial, resolve_target
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.remote import is_url
from autotune.training import averaging, components, data, runtime, schedules, views
from autotune.training.set_up import EVALUATION_BATCH
from autotune.training.source_code import SourceCode
from autotune.training.techniques.technique import NoTechnique
from autotune.workloads.splits import memory_mapped, scikit_learn_file

_TEMPLATE = Path(__file__).with_suffix(".py.jinja")
_IMPORTS = ("argparse", "gc", "math", "sys", "time", "torch", "warnings")
"""Modules that the template uses."""
_NEEDS = "PACKAGES_THAT_ARE_NEEDED"
_PLACE_OF_IMPORTS = "# IMPORTS_THAT_ARE_USED"


def standalone_script(
    config: TrialConfig, *, num_threads: int, comments: Sequence[str] = ()
) -> str:
    """Write a configuration's training as a Python program that needs torch and what its data set
    needs.

    Args:
        config: configuration of the training.
        num_threads: number of CPU threads, unless the configuration sets one.
        comments: lines on where the configuration comes from.

    Raises:
        ConfigError: the program cannot express the configuration; names the key.
    """
    _refuse_what_cannot_be_said(config)
    code = SourceCode()
    writer = _Writer(config, code)
    parts = writer.parts()
    has_transform = '"transform"' in str(code)
    for module, name in _own_parts(config):
        code.add(module.__name__, name)
    # no HTML
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701
    )
    environment.filters["literal"] = _literal
    metric = re.sub(r"[^\w .-]", "_", config.target.metric)  # it stands in texts of the program
    limits = [
        (side, limit)
        for limits in config.target.constraints.values()
        for side, limit in limits.items()
    ]
    context = {
        "title": (
            f"Train {_short(config.model)} on {_short(config.data)} until {metric} is"
            f" {config.target.value:g}."
        ),
        # a line break would end the comment
        "comments": [" ".join(line.split()) for line in comments],
        "needs": _NEEDS,
        "metric_name": metric,
        "config": config,
        "runtime": config.runtime,
        "data_path": config.data_path,
        "num_threads": config.runtime.num_threads or num_threads,
        "device": (
            '"cuda" if torch.cuda.is_available() else "cpu"'
            if config.device == "auto"
            else repr(config.device)
        ),
        "evaluation_batch": config.evaluation_batch_size or f"{EVALUATION_BATCH}[DEVICE.type]",
        "sum_dtype": "float32" if config.device == "mps" else "float64",  # which MPS has not
        "autocast": config.precision.autocast_dtype,
        "weights_dtype": config.precision.weights_dtype,
        "micro_batch_size": config.runtime.micro_batch_size,
        "is_bound": config.runtime.compile is not None or config.runtime.cuda_graph,
        "is_resident": _is_resident(config),
        "is_mapped": _is_mapped(config),
        "has_transform": has_transform,
        "prepares": (
            has_transform
            or config.runtime.channels_last
            or config.precision.weights_dtype != "float32"
        ),
        "initialise_samples": components.INITIALISE_SAMPLES,
        "constraints": "".join(
            f" and loss {'<=' if side == 'at_most' else '>='} {limit!r}" for side, limit in limits
        ),
        **parts,
    }
    code.imports |= {f"import {name}" for name in _IMPORTS} | {
        "from torch import Tensor, nn",
        "from typing import Any",
    }
    code.imports.add("from functools import partial")
    program = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        context, imports=_PLACE_OF_IMPORTS, sources=str(code)
    )
    text = re.sub(
        r"\n{4,}", "\n\n\n", program.replace(_PLACE_OF_IMPORTS, _imports(code.imports, program))
    )
    return text.replace(_NEEDS, _needed_packages(text))


def _refuse_what_cannot_be_said(config: TrialConfig) -> None:
    def refuse(key: str, found: object, accepted: str) -> None:
        raise ConfigError(f"{key}: found {found}; accepted in a stand-alone script is {accepted}")

    if config.training is not None:
        refuse(
            "training",
            config.training["_target_"],
            "autotune's own loop; the arguments of a function are exported by arguments=FILE",
        )
    if config.num_workers > 1:
        refuse("parallelism.num_workers", config.num_workers, "1")
    if config.technique["_target_"] != f"{NoTechnique.__module__}.{NoTechnique.__name__}":
        refuse("technique", _short(config.technique), "none")
    if config.precision.float8:
        refuse("precision.float8", "true", "false")
    for key, node in _nodes(config).items():
        if not accepts_name(node["_target_"], key):
            refuse(f"{key}._target_", node["_target_"], "a part of autotune's or torch's")
        for name, value in node.items():
            if isinstance(value, str) and is_url(value):
                refuse(f"{key}.{name}", "a URL", "a path of this machine")


def _nodes(config: TrialConfig) -> dict[str, Mapping[str, Any]]:
    """The components of a configuration that a script is made of, by key."""
    keys = (
        "data",
        "model",
        "loss",
        "metric",
        "optimizer",
        "lr_schedule",
        "averaging",
        "augmentation",
        "views",
    )
    return {key: getattr(config, key) for key in keys}


def _own_parts(config: TrialConfig) -> list[tuple[Any, str]]:
    """Modules and names of the parts of autotune's loop that the template uses."""
    wanted = [
        (data, "Split"),
        (data, "sample_order"),
        (data, "resident_batches" if _is_resident(config) else "host_batches"),
    ]
    if _is_mapped(config):
        wanted.append((data, "_tensor"))
    if config.runtime.activation_checkpointing:
        wanted.append((runtime, "checkpoint_activations"))
    if config.runtime.cuda_graph:
        wanted.append((runtime, "GraphedGradients"))
    if config.runtime.cuda_graph or config.runtime.compile is not None:
        wanted.append((components, "reset_model"))
    return wanted


def _is_mapped(config: TrialConfig) -> bool:
    return bool(config.data["_target_"] == _name_of(memory_mapped))


def _is_resident(config: TrialConfig) -> bool:
    """Whether the training split is on the device.

    One that nobody chose a place for is, unless it is mapped from a file.
    """
    return (
        not _is_mapped(config) if config.data_path.on_device is None else config.data_path.on_device
    )


class _Writer:
    """Writes the calls that make a configuration's components, and collects their source."""

    def __init__(self, config: TrialConfig, code: SourceCode) -> None:
        self._config, self._code = config, code
        self._nodes = _nodes(config)

    def parts(self) -> dict[str, Any]:
        """The components as the template takes them: expressions, or None for a component that
        does nothing.
        """
        config = self._config
        is_constant = config.lr_schedule["_target_"] == _name_of(schedules.constant)
        # of some parameters, if the model has these
        has_own_schedules = "whitening_bias_fraction" in config.optimizer
        is_averaged = config.averaging["_target_"] != _name_of(averaging.none)
        taken = inspect.signature(self._callable("model")).parameters
        return {
            "data": self.call("data"),
            "model": self.call("model", input_shape="input_shape", num_classes="num_classes"),
            "uses_input_shape": "input_shape" in taken,
            "uses_num_classes": "num_classes" in taken,
            "initialises": hasattr(self._callable("model"), "initialise_from"),
            "optimizer": self._optimizer(),
            "schedule_free": "schedule_free" in config.optimizer["_target_"].lower(),
            "schedule": (
                self.call("lr_schedule", "self.optimizer", "self.total_steps")
                if has_own_schedules or not is_constant
                else None
            ),
            "schedule_may_be_none": is_constant,
            "average": self.call("averaging", "model", "self.total_steps") if is_averaged else None,
            "augment": self._augmentation(),
            "loss": self._part("loss"),
            "metric": self._part("metric"),
            "scored_outputs": self._scored_outputs(),
        }

    def _optimizer(self) -> str:
        kernels = components.kernel_arguments(
            self._config,
            build_partial(self._config.optimizer, self._config.allowed_targets, "optimizer"),
        )
        offered = {
            "model": "model",
            "batch_size": "self.batch_size",
            "total_steps": "self.total_steps",
        }
        positional = (
            ()
            if "model" in inspect.signature(self._callable("optimizer")).parameters
            else ("model.parameters()",)
        )
        return self.call(
            "optimizer",
            *positional,
            **offered,
            **{name: repr(value) for name, value in kernels.items()},
        )

    def _arguments(self, key: str) -> dict[str, str]:
        """The configuration's values of a component as Python source, by argument."""
        node = self._nodes[key]
        for name in node:
            if not name.isidentifier() or keyword.iskeyword(name):
                raise ConfigError(
                    f"{key}: found the argument {name!r}; accepted in a stand-alone script is the"
                    " name of a Python variable"
                )
        return {name: self._value(value) for name, value in node.items() if name != "_target_"}

    def call(self, key: str, *positional: str, **offered: str) -> str:
        """The call of a component's target with the configuration's values, and with what is
        offered and its signature names.
        """
        node, taken = self._nodes[key], inspect.signature(self._callable(key)).parameters
        arguments = self._arguments(key)
        arguments |= {
            name: value for name, value in offered.items() if name in taken and name not in node
        }
        named = [f"{name}={value}" for name, value in arguments.items()]
        return f"{self._name(key)}({', '.join([*positional, *named])})"

    def _callable(self, key: str) -> Callable[..., Any]:
        return resolve_target(
            self._nodes[key]["_target_"], self._config.allowed_targets, f"{key}._target_"
        )

    def _part(self, key: str, **offered: str) -> str:
        """A component that the training calls: an object of a class, or a function with the
        configuration's values bound.
        """
        if inspect.isclass(self._callable(key)):
            return self.call(key, **offered)
        name = self._name(key)
        values = [f"{argument}={value}" for argument, value in self._arguments(key).items()]
        return f"partial({', '.join([name, *values])})" if values else name

    def _augmentation(self) -> str | None:
        if self._config.augmentation["_target_"].endswith(".augmentation.unchanged"):
            return None
        return self._part("augmentation", num_samples="self.num_samples", device="DEVICE")

    def _scored_outputs(self) -> str:
        """The model's outputs for ``inputs``, as an evaluation scores them."""
        is_plain, inputs = self._config.views["_target_"] == _name_of(views.plain), "inputs"
        outputs = f"model({inputs})" if is_plain else f"{self._part('views')}(model, {inputs})"
        return outputs + (".float()" if self._config.precision.weights_dtype != "float32" else "")

    def _name(self, key: str) -> str:
        """The name of a component's target in the script, after collecting its source or its
        import.
        """
        target = str(self._nodes[key]["_target_"])
        if target.startswith("autotune."):
            found = self._callable(key)
            self._code.add(found.__module__, found.__qualname__)
            return found.__qualname__
        self._code.imports.add(f"import {target.partition('.')[0]}")
        return target

    def _value(self, value: Any) -> str:
        if isinstance(value, Mapping) and "_target_" in value:
            raise ConfigError(
                f"_target_: found {value['_target_']} in a component; accepted in a stand-alone"
                " script are plain values"
            )
        return _literal(value)


def _literal(value: Any) -> str:
    return (
        f'float("{value}")'
        if isinstance(value, float) and not math.isfinite(value)
        else repr(value)
    )


def _name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _short(node: Mapping[str, Any]) -> str:
    return str(node["_target_"]).rpartition(".")[2]


def _imports(statements: Iterable[str], program: str) -> str:
    """The statements, of one name each, whose name a program uses: Python's own modules first,
    and one line for each module.
    """
    used = {node.id for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Name)}
    lines: dict[str, list[str]] = {}
    for statement in sorted(statements):
        begin, name = statement.rsplit("import ", 1)
        if name.rpartition(" as ")[2].partition(".")[0] in used:
            lines.setdefault(f"{begin}import " if begin else statement, []).append(
                name if begin else ""
            )
    groups: dict[bool, list[str]] = {False: [], True: []}
    for line in sorted(
        (begin + ", ".join(names) for begin, names in lines.items()),
        key=lambda line: (line.startswith("from"), line),
    ):
        groups[line.split()[1].partition(".")[0] not in sys.stdlib_module_names].append(line)
    return "\n\n".join("\n".join(group) for group in groups.values() if group)


def _needed_packages(program: str) -> str:
    """The packages that a program imports, in words."""
    modules: set[str] = {"sklearn"} if scikit_learn_file.__name__ in program else set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    packages = {
        name.partition(".")[0].replace("sklearn", "scikit-learn") for name in modules
    } - sys.stdlib_module_names
    *others, last = sorted(packages)
    return f"{', '.join(others)} and {last}" if others else last
