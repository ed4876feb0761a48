"""What a study cannot be run with: one line on stderr, exit code 2, nothing trained and nothing run."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.config.command_line import EXIT_BAD_INPUT, run_command
from autotune.config.compose import Composer
from autotune.execution.live_study import opened
from autotune.execution.plan import plan_study
from autotune.export import export_command
from autotune.training.device import local_capabilities
from autotune.tune_study import tune_command

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

Refusal = Callable[..., str]
Write = Callable[[str, str], str]
"""Fixtures of conftest.py."""

_STOP = "study.folder=/dev/null/outputs"
"""Stops a study that passed every check, before Ray is started."""
_SMALL_SPACE = "search_space=[{batch_size:[32,64]}]"
"""Quickly checked; an override that follows replaces it."""


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optimzer.lr=0.1", ["optimzer.lr", "no such key"]),
        ("batch_sise=8", ["batch_sise", "did you mean batch_size?"]),
        ("batch_size=abc", ["batch_size", "abc"]),
        ("epochs=0", ["epochs: found 0.0", "above 0"]),
        ("batch_size=2.5", ["batch_size", "2.5"]),
        ("optimizer.lr=-1", ["optimizer", "lr=-1", "-1"]),
        ("optimizer=lion", ["optimizer=lion", "adamw, "]),
        ("device=tpu", ["device: found 'tpu'", "auto, cpu, cuda"]),
        ("target.value=high", ["target.value", "high"]),
        ("target.value=98", ["target.value: found 98, accepted is 0 to 1: accuracy is a fraction (did you mean 0.98?)"]),
        ("target.value=-1", ["target.value: found -1, accepted is 0 to 1: accuracy is a fraction"]),
        ("target.max_train_seconds=0", ["target.max_train_seconds: found 0"]),
        ("search.num_trials=0", ["search.num_trials: found 0", "above 0"]),
        ("search.num_trials=null", ["search", "both null"]),
        ("search.num_trials=many", ["search.num_trials", "many"]),
        ("search.time_budget_seconds=-5", ["search.time_budget_seconds: found -5"]),
        ("+search.sampler.depth=3", ["search.sampler", "depth"]),
        ("warm_start=[nope]", ["warm_start: nope: is no study", "an MLflow run"]),
        ("warm_start=[s3://bucket/cnn-1]", ["warm_start: found the URL s3://bucket/cnn-1", "a folder of this machine"]),
        ("study.folder=s3://bucket/x", ["study.folder: found the URL s3://bucket/x, accepted is a folder of this machine"]),
        ("study.folder=s3:/bucket", ["study.folder: found the URL s3:/bucket"]),
        ("warm_start=nope", ["warm_start: accepted is a list, such as warm_start=[...]"]),
        ("search.storage=nonsense", ["search.storage: nonsense", "cannot be opened"]),
        ("search.storage=sqlite:////no/such/folder/x.db", ["search.storage", "cannot be opened"]),
        ("confirm.num_seeds=0", ["confirm.num_seeds", "found 0"]),
        ("confirm.max_runs=3", ["confirm.max_runs", "found 3", "from 4"]),
        ("confirm.budget_fraction=0", ["confirm.budget_fraction", "found 0"]),
        ("confirm.min_reach_rate=2", ["confirm.min_reach_rate", "found 2"]),
        ("cluster.cpus_per_worker=0", ["cluster.cpus_per_worker: found 0"]),
        ("cluster.placement=heap", ["cluster.placement: found 'heap', accepted are pack, spread, strict_pack, strict_spread"]),
        ("cluster.accelerator_type=[H100,A100]", ["cluster.accelerator_type"]),
        ("cluster.address=somewhere", ["cluster.address: found 'somewhere'", "HOST:PORT"]),
        ("stopping.cap_margin=0.5", ["cap_margin", "0.5"]),
        ("objective.num_trainings=0", ["objective.num_trainings: found 0"]),
        ("notify=https://hooks.example.org/x", ["notify: there is no such key any more; send the message from what starts the study"]),
        ("study.name=../elsewhere", ["study.name: found '../elsewhere'"]),
        ("search_space=[]", ["search_space: the experiment has none"]),
        ("search_space=[no_such_file.yaml]", ["no_such_file.yaml", "no such file"]),
        ("optimizer.lr=interval(1,0.1)", ["optimizer.lr", "1", "0.1"]),
        ("search.num_trials=choice(1,2)", ["search.num_trials", "setting of the study"]),
        ("=5", ["=5", "accepted is"]),
        ("--no-such-flag", ["--no-such-flag", "--help"]),
        ("experiment=no_such_experiment", ["experiment=no_such_experiment", "cnn_smoke"]),
    ],
)
def test_a_wrong_key_or_value_is_one_line(override: str, parts: list[str], refusal: Refusal) -> None:
    needs_a_folder = override.startswith(("search.storage", "+search.sampler"))
    said = refusal("experiment=cnn_smoke", _SMALL_SPACE, "tracking=none", *([] if needs_a_folder else [_STOP]), override)
    assert [part for part in parts if part not in said] == [], said


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("optimizer.lr: {type: float, low: 0.1, high: 1\n", ["bad.yaml line 2"]),
        ("optimizer.lr: {type: float, low: 0.1, high: 1, lgo: true}\n", ["bad.yaml", "optimizer.lr", "lgo"]),
        ("optimizer.lr: {type: float, low: 1, high: 0.1}\n", ["bad.yaml", "optimizer.lr"]),
        ("optimizer.lr: {type: real, low: 0.1, high: 1}\n", ["bad.yaml", "optimizer.lr", "real"]),
        ("no.such.key: [1, 2]\n", ["bad.yaml", "no.such.key"]),
        ("batch_size: [8, many]\n", ["bad.yaml", "batch_size", "many"]),
        ("optimizer: [sgd, lion]\n", ["bad.yaml", "lion"]),
        ("optimizer: [sgd, adamw]\noptimizer.momentum: [0.8, 0.9]\n", ["bad.yaml", "momentum"]),
        ("just text\n", ["bad.yaml"]),
        ("\x00\x01", ["bad.yaml"]),
    ],
)
def test_a_bad_space_file_is_one_line(content: str, parts: list[str], refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(content)
    said = refusal("experiment=cnn_smoke", "search_space=[bad.yaml]", _STOP)
    assert [part for part in parts if part not in said] == [], said


def test_a_missing_data_set_is_one_line(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = refusal("experiment=cnn_cifar10", "data.root=empty")
    assert "empty" in said
    assert "data.download=true" in said


def test_a_data_set_that_cannot_be_read_is_one_line(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar-10-binary.tar.gz").write_bytes(b"not an archive")
    assert "cifar-10-binary.tar.gz" in refusal("experiment=cnn_cifar10", "data.root=data")


def test_an_experiment_that_cannot_be_read_is_one_line(refusal: Refusal, write: Write, tmp_path: Path) -> None:
    folder = write("mine", "")
    (tmp_path / "my_conf/experiment/mine.yaml").write_bytes(b"\xff\xfe\x00")
    assert "mine.yaml" in refusal("experiment=mine", "--config-dir", folder)


@pytest.mark.parametrize(
    "content",
    [
        "model: {_target_: os.system, command: touch ran}\n",
        "loss: {_target_: torch.nn.CrossEntropyLoss, weight: {_target_: os.system, command: touch ran}}\n",
        "search: {sampler: {_target_: subprocess.run, args: [touch, ran]}}\n",
        "tracking: {_target_: os.system, command: touch ran}\n",
        "training: {_target_: pathlib.Path.touch, self: ran}\n",
        "model: {_target_: torch.nn.modules.module.os.system, command: touch ran}\n",
    ],
)
def test_code_that_is_not_allowed_is_not_run(content: str, refusal: Refusal, write: Write, tmp_path: Path) -> None:
    folder = write("evil", f"defaults: [cnn_smoke]\n{content}")
    said = refusal("experiment=evil", "--config-dir", folder, _STOP)
    assert "_target_" in said
    assert "; accepted " in said
    assert not (tmp_path / "ran").exists()


def test_a_file_cannot_allow_its_own_code(refusal: Refusal, write: Write, tmp_path: Path) -> None:
    folder = write("evil", "allowed_targets: [os]\nmodel: {_target_: os.system, command: touch ran}\n")
    assert "command line only" in refusal("experiment=evil", "--config-dir", folder)
    assert not (tmp_path / "ran").exists()


def test_a_model_that_cannot_be_made_is_refused_before_anything_is_trained(refusal: Refusal, write: Write) -> None:
    folder = write("mine", "defaults: [cnn_smoke]\nmodel: {depth: 3}\n")
    assert "depth" in refusal("experiment=mine", "--config-dir", folder, _STOP)


def test_no_experiment_is_one_line(refusal: Refusal) -> None:
    assert "cnn_smoke" in refusal("epochs=3")


def test_no_arguments_list_the_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(tune_command, []) == EXIT_BAD_INPUT
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) < 30
    assert all(f"  {name} " in said.err for name in ("cnn", "cnn_smoke", "cnn_fashion", "cnn_cifar10"))


@pytest.mark.parametrize("name", ["nope", "../nope"])
def test_exporting_a_study_that_is_not_there_is_one_line(name: str, refusal: Refusal) -> None:
    assert "no such study" in refusal(f"study={name}", "as=mine", "--config-dir", "my_conf", command=export_command)


@pytest.mark.parametrize(
    "line",
    ["study=a", "as=b --config-dir c", "study=a as=../b --config-dir c", "study=a as=b to=d --config-dir c", "study=a as=b",
     "script=b.py", "study=a script=b.py --config-dir c", "study=a script=s3://b.py"],
)  # fmt: skip
def test_an_export_that_says_too_little_is_one_line(line: str, refusal: Refusal) -> None:
    assert "accepted" in refusal(*line.split(), command=export_command)


@pytest.mark.parametrize(("line", "key"), [("--config-dir s3://x", "--config-dir"), ("--config-dir c folder=s3://x", "folder")])
def test_an_export_takes_no_url(line: str, key: str, refusal: Refusal) -> None:
    said = refusal("study=a", "as=b", *line.split(), command=export_command)
    assert said == f"{key}: found the URL s3://x, accepted is a folder of this machine"


def test_a_study_folder_that_cannot_be_written_is_one_line(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "study.folder" in refusal("experiment=cnn_smoke", _SMALL_SPACE, "study.folder=file/outputs")


def test_a_study_of_that_name_with_other_settings_is_one_line(refusal: Refusal, tmp_path: Path) -> None:
    command = ("experiment=cnn_smoke", _SMALL_SPACE, "study.name=mine", "tracking=none")
    for budget in ("search.num_trials=9", "search.num_trials=12"):
        plan = plan_study(Composer([*command, f"study.folder={tmp_path}/outputs", budget]), local_capabilities())
        with opened(plan, command=[], code_folders=[], console=Console()):
            pass  # a budget may change
    said = refusal(*command, "target.value=0.95")
    assert "study.name=mine" in said
    assert "0.9" in said
    assert "0.95" in said


def test_a_cluster_that_is_not_there_is_one_line(refusal: Refusal) -> None:
    said = refusal("experiment=cnn_smoke", _SMALL_SPACE, "cluster.address=127.0.0.1:1")
    assert said.startswith("cluster.address: 127.0.0.1:1 does not answer (")


@pytest.mark.ray
def test_a_cluster_of_this_machine_that_is_gone_is_one_line(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    began = time.monotonic()
    said = refusal("experiment=cnn_smoke", "cluster.address=auto", "cluster.connect_timeout_seconds=3", "tracking=none")
    assert said.startswith("cluster.address: auto")
    assert time.monotonic() - began < 60


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port at which something takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    kept.append(server.accept()[0])
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for each in kept:
            each.close()


@pytest.mark.ray
def test_a_port_without_ray_behind_it_is_one_line_in_time(silent_port: int, refusal: Refusal) -> None:
    began = time.monotonic()
    said = refusal("experiment=cnn_smoke", f"cluster.address=127.0.0.1:{silent_port}", "cluster.connect_timeout_seconds=4", "tracking=none")
    assert said.startswith(f"cluster.address: 127.0.0.1:{silent_port} is no Ray head (no answer in 4 s)")
    assert time.monotonic() - began < 60


@pytest.mark.ray
def test_an_mlflow_server_that_does_not_answer_is_one_line(commands: Any, tmp_path: Path) -> None:
    ended = commands.run("experiment=cnn_smoke", "tracking.uri=http://127.0.0.1:1", folder=tmp_path)
    assert ended.returncode == EXIT_BAD_INPUT
    assert ended.stderr.startswith("autotune: tracking.uri: http://127.0.0.1:1: cannot be used")
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""
    assert not list(tmp_path.glob("**/trials.csv"))
