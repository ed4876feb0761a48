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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from autotune.config.build import accepts_name, build_partial, resolve_target
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.remote import is_url
from autotune.training import components, data, runtime
from autotune.training.set_up import EVALUATION_BATCH
from autotune.training.source_code import SourceCode

_TEMPLATE = Path(__file__).with_suffix(".py.jinja")
_COMPONENTS = (
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
_IMPORTS = (
    *(f"import {name}" for name in ("argparse", "gc", "math", "sys", "time", "torch", "warnings")),
    "from functools import partial",
    "from pathlib import Path",
    "from torch import Tensor",
    "from torch import nn",
    "from typing import Any",
)
"""Import statements that the template may need."""
_GIVEN = (
    "ConfigError",
    "DataError",
    "download_files",
    "fetched",
    "is_file",
    "is_remote",
)
"""Names that the template defines by itself: errors, and what reads files of this machine alone."""
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
    for key, found, accepted in _what_cannot_be_said(config):
        raise ConfigError(f"{key}: found {found}; a stand-alone script can have {accepted}")
    code = SourceCode(_GIVEN)
    parts = _Writer(config, code).parts()
    for module, name in _loop_parts(config):
        code.add(module.__name__, name)
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701  # no HTML
    )
    environment.filters["literal"] = _literal
    sources = str(code)
    program = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        {
            **parts,
            "config": config,
            # a line break would end the comment
            "comments": [" ".join(line.split()) for line in comments],
            "metric_name": re.sub(r"[^\w .-]", "_", config.target.metric),  # it stands in texts
            "num_threads": config.runtime.num_threads or num_threads,
            "evaluation_batches": EVALUATION_BATCH.items(),
            "is_resident": _is_resident(config),
            "is_mapped": _is_mapped(config),
            "has_transform": '"transform"' in sources,
            "initialise_samples": components.INITIALISE_SAMPLES,
            "sources": sources,
            "imports": _PLACE_OF_IMPORTS,
        }
    )
    program = program.replace(_PLACE_OF_IMPORTS, _imports({*code.imports, *_IMPORTS}, program))
    return re.sub(r"\n{4,}", "\n\n\n", program)


def _what_cannot_be_said(config: TrialConfig) -> Iterator[tuple[str, object, str]]:
    """Key, value and what is accepted, of each setting that a script does not have."""
    if config.training is not None:
        yield (
            "training",
            config.training["_target_"],
            "autotune's own loop; the arguments of a function are exported by arguments=FILE",
        )
    if config.num_workers > 1:
        yield "parallelism.num_workers", config.num_workers, "1"
    if (technique := _short(config.technique)) != "NoTechnique":
        yield "technique", technique, "none"
    if config.precision.float8:
        yield "precision.float8", "true", "false"
    written = {"num_threads", "optimizer_kernels"} | {
        *re.findall(r"\bruntime\.(\w+)", _TEMPLATE.read_text(encoding="utf-8"))
    }
    for key, value in vars(config.runtime).items():
        if key not in written and value:
            yield f"runtime.{key}", value, "the value that it has where nobody sets it"
    for key in _COMPONENTS:
        node = getattr(config, key)
        if not accepts_name(node["_target_"], key):
            yield f"{key}._target_", node["_target_"], "a part of autotune's or torch's"
        for name, value in node.items():
            if not name.isidentifier() or keyword.iskeyword(name):
                yield key, f"the argument {name!r}", "the name of a Python variable"
            if isinstance(value, str) and is_url(value):
                yield f"{key}.{name}", "a URL", "a path of this machine"
            if isinstance(value, Mapping) and "_target_" in value:
                yield f"{key}.{name}", value["_target_"], "a plain value"


def _loop_parts(config: TrialConfig) -> Iterator[tuple[Any, str]]:
    """Modules and names of the parts of autotune's loop that the template uses."""
    yield data, "Split"
    yield data, "sample_order"
    yield data, "resident_batches" if _is_resident(config) else "host_batches"
    if _is_mapped(config):
        yield data, "_tensor"
    if config.runtime.activation_checkpointing:
        yield runtime, "checkpoint_activations"
    if config.runtime.cuda_graph:
        yield runtime, "GraphedGradients"
    if config.runtime.cuda_graph or config.runtime.compile is not None:
        yield components, "reset_model"


def _is_mapped(config: TrialConfig) -> bool:
    return _short(config.data) == "memory_mapped"


def _is_resident(config: TrialConfig) -> bool:
    """Whether the training split is on the device.

    One that nobody chose a place for is, unless it is mapped from a file.
    """
    on_device = config.data_path.on_device
    return not _is_mapped(config) if on_device is None else on_device


class _Writer:
    """Writes the calls that make a configuration's components, and collects their source."""

    def __init__(self, config: TrialConfig, code: SourceCode) -> None:
        self._config, self._code = config, code

    def parts(self) -> dict[str, Any]:
        """The components as the template takes them: expressions, or None for a component that
        does nothing.
        """
        config = self._config
        is_constant = _short(config.lr_schedule) == "constant"
        # of some parameters, if the model has these
        has_own_schedules = "whitening_bias_fraction" in config.optimizer
        taken = inspect.signature(self._callable("model")).parameters
        return {
            "title": f"Train {_short(config.model)} on {_short(config.data)}",
            "data": self._call("data"),
            "model": self._call("model", input_shape="input_shape", num_classes="num_classes"),
            "uses_input_shape": "input_shape" in taken,
            "uses_num_classes": "num_classes" in taken,
            "initialises": hasattr(self._callable("model"), "initialise_from"),
            "optimizer": self._optimizer(),
            "schedule": (
                self._call("lr_schedule", "self.optimizer", "self.total_steps")
                if has_own_schedules or not is_constant
                else None
            ),
            "schedule_may_be_none": is_constant,
            "average": (
                self._call("averaging", "model", "self.total_steps")
                if _short(config.averaging) != "none"
                else None
            ),
            "augment": (
                self._part("augmentation", num_samples="self.num_samples", device="DEVICE")
                if _short(config.augmentation) != "unchanged"
                else None
            ),
            "loss": self._part("loss"),
            "metric": self._part("metric"),
            "views": self._part("views") if _short(config.views) != "plain" else None,
        }

    def _optimizer(self) -> str:
        config = self._config
        factory = build_partial(config.optimizer, config.allowed_targets, "optimizer")
        kernels = components.kernel_arguments(config, factory)
        takes_model = "model" in inspect.signature(factory.func).parameters
        return self._call(
            "optimizer",
            *(() if takes_model else ("model.parameters()",)),
            model="model",
            batch_size="self.batch_size",
            total_steps="self.total_steps",
            **{name: repr(value) for name, value in kernels.items()},
        )

    def _call(self, key: str, *positional: str, **offered: str) -> str:
        """The call of a component's target with the configuration's values, and with what is
        offered and its signature names.
        """
        taken = inspect.signature(self._callable(key)).parameters
        arguments = {name: value for name, value in offered.items() if name in taken}
        named = [f"{name}={value}" for name, value in {**arguments, **self._values(key)}.items()]
        return f"{self._name(key)}({', '.join([*positional, *named])})"

    def _part(self, key: str, **offered: str) -> str:
        """A component that the training calls: an object of a class, or a function with the
        configuration's values bound.
        """
        if inspect.isclass(self._callable(key)):
            return self._call(key, **offered)
        values = [f"{name}={value}" for name, value in self._values(key).items()]
        return f"partial({', '.join([self._name(key), *values])})" if values else self._name(key)

    def _values(self, key: str) -> dict[str, str]:
        """The configuration's values of a component as Python source, by argument."""
        node = getattr(self._config, key)
        return {name: _literal(value) for name, value in node.items() if name != "_target_"}

    def _callable(self, key: str) -> Callable[..., Any]:
        target = getattr(self._config, key)["_target_"]
        return resolve_target(target, self._config.allowed_targets, f"{key}._target_")

    def _name(self, key: str) -> str:
        """The name of a component's target in the script, after collecting its source or its
        import.
        """
        target = str(getattr(self._config, key)["_target_"])
        if target.startswith("autotune."):
            found = self._callable(key)
            self._code.add(found.__module__, found.__qualname__)
            return found.__qualname__
        self._code.imports.add(f"import {target.partition('.')[0]}")
        return target


def _literal(value: Any) -> str:
    is_number = not isinstance(value, float) or math.isfinite(value)
    return repr(value) if is_number else f'float("{value}")'


def _short(node: Mapping[str, Any]) -> str:
    return str(node["_target_"]).rpartition(".")[2]


def _imports(statements: set[str], program: str) -> str:
    """The import statements whose names a program uses."""
    used = {node.id for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Name)}
    return "\n".join(
        statement
        for statement in sorted(statements)
        # import a.b | import a as b | from a import b | from a import b as c
        if statement.split()[-1].partition(".")[0] in used
    )
