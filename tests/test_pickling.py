"""A function as other processes load it: with what the script wraps, and with modules that only the script can import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_BEGIN = """
import dataclasses, enum, functools, importlib.util, json, math, operator, sys, threading
from pathlib import Path
from typing import NewType

import autotune
from autotune import api
from autotune.errors import ConfigError
import beside


def write(function):
    target = autotune.target("error", at_most=1, max_seconds=1)
    api._write_function(Path("function"), function, "study_fit", {"lr": [1, 2]}, target, {"lr": 1})
"""

_WRAPPED = """
Rate = NewType("Rate", float)
OFFSET = 1

@functools.lru_cache(maxsize=4)
def load_data(num):
    class Rows:
        offset: int = OFFSET
    return list(range(num + Rows.offset))

@functools.cache
def fibonacci(number):
    return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)

@functools.singledispatch
def describe(value):
    return f"text {value}"

@describe.register
def _(value: int):
    return f"number, {describe(str(value))}"

@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    parts: list = dataclasses.field(default_factory=list)

class Mode(enum.Enum):
    FAST = "fast"

class Model:
    @functools.lru_cache
    def times(self, number):
        return number * self.size

    @functools.cached_property
    def size(self):
        return 3

class Setting:
    def __reduce__(self):
        return Setting, ()

root = functools.lru_cache(math.sqrt)
three = functools.partial(load_data, num=3)
times_two = operator.methodcaller("times", 2)
setting = Setting()

def fit(lr: Rate):
    return {
        "three": three(), "hits": [load_data(3), load_data.cache_info().hits], "most": load_data.cache_parameters()["maxsize"],
        "fibonacci": fibonacci(20), "root": root(16.0), "describe": describe(5), "times": times_two(Model()),
        "settings": dataclasses.asdict(Settings(lr)), "mode": Mode("fast").name, "beside": beside.NUMBER, "type": type(setting).__name__,
    }

write(fit)
print(json.dumps(fit(1.0)))
"""

_LOADED = """
spec = importlib.util.spec_from_file_location("layers", "elsewhere/layers.py")
layers = sys.modules["layers"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layers)
cell = {"__name__": "cell", "layers": layers}
exec("import functools\\n@functools.cache\\ndef data(): return [1]\\ndef fit(lr): return [data(), layers.make(lr).num]", cell)
write(cell["fit"])
print(json.dumps(cell["fit"](lr=1.0)))
"""

_REFUSED = """
lock = threading.Lock()

class Missing:
    def __reduce__(self):
        return "missing"

missing = Missing()

@functools.cache
def load():
    with lock:
        return 1

def fit(lr):
    return load()

def other(lr):
    return missing

for function in (fit, other):
    try:
        write(function)
    except ConfigError as error:
        print(error)
"""


def _ran(folder: Path, script: str) -> str:
    """What a script prints that has a module beside it, and one in a folder that Python does not search."""
    (folder / "script.py").write_text(_BEGIN + script)
    (folder / "beside.py").write_text("NUMBER = 7\n")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "layers.py").write_text("class Layer:\n    num = 9\n\n\ndef make(lr):\n    return Layer()\n")
    ran = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("script", [_WRAPPED, _LOADED], ids=["wrapped", "loaded"])
def test_a_function_does_in_another_process_what_it_does_in_its_script(script: str, tmp_path: Path) -> None:
    here = json.loads(_ran(tmp_path, script))
    loads = f"import json, sys; sys.path.append({str(tmp_path / 'function')!r}); import study_fit; print(json.dumps(study_fit.fit(lr=1.0)))"
    ran = subprocess.run([sys.executable, "-c", loads], cwd=tmp_path.parent, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == here


def test_what_cannot_be_sent_is_one_line_that_names_it(tmp_path: Path) -> None:
    assert _ran(tmp_path, _REFUSED).splitlines() == [
        "tune(fit): load -> lock: cannot be sent to other processes: cannot pickle '_thread.lock' object; make it inside a function, or in "
        "a module that the script imports",
        "tune(other): missing: cannot be sent to other processes: missing, a Missing, pickles as a name of __main__, which only the script "
        "has; make it inside a function, or in a module that the script imports",
    ]
