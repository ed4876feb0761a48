"""A function of a script as other processes load it."""

import json
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import dataclasses, enum, functools, json, sys, threading
from pathlib import Path

import autotune
from autotune import api
from autotune.errors import ConfigError
import beside

@functools.lru_cache(maxsize=4)
def load_data(num):
    return list(range(num))

@dataclasses.dataclass
class Settings:
    scale: float = 2.0

class Mode(enum.Enum):
    FAST = "fast"

class Model:
    @functools.lru_cache
    def times(self, number):
        return number * 3

lock = threading.Lock()

def fit(lr):
    return {
        "data": load_data(3), "hits": [load_data(3), load_data.cache_info().hits > 0],
        "most": load_data.cache_parameters()["maxsize"],
        "times": Model().times(2), "settings": dataclasses.asdict(Settings(lr)),
        "mode": Mode("fast").name, "beside": beside.NUMBER,
    }

@functools.cache
def load():
    with lock:
        return 1

def refused(lr):
    return load()

def write(function):
    target = autotune.target("error", at_most=1, max_seconds=1)
    api._write_function(Path("fit"), function, {"lr": [1, 2]}, target, {"lr": 1})

write(fit)
print(json.dumps(fit(1.0)))
try:
    write(refused)
except ConfigError as error:
    print(error)
"""


def test_a_function_does_in_another_process_what_it_does_in_its_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    (tmp_path / "beside.py").write_text("NUMBER = 7\n")
    ran = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    here, refusal = ran.stdout.splitlines()
    assert (
        refusal
        == "tune(refused): load: cannot be sent to other processes: cannot pickle '_thread.lock'"
        " object; create it inside a function, or in a module that the script imports"
    )
    loads = (
        f"import json, sys; sys.path.append({str(tmp_path / 'fit' / 'function')!r});"
        " import study_fit;"
        " print(json.dumps(study_fit.fit(lr=1.0)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", loads],
        cwd=tmp_path.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == json.loads(here)
