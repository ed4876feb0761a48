"""Commands as a user types them: each in a process and a folder of its own, or refused in one
line before anything runs.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.config.command_line import EXIT_BAD_INPUT, run_command
from autotune.config.compose import Composer
from autotune.execution.cluster import ClusterSize
from autotune.execution.launcher import Launcher
from autotune.execution.process_group import ProcessGroup
from autotune.execution.ray_cluster import connected
from autotune.tune_study import tune_command
from tests.support.patience import PATIENCE_SECONDS

Refusal = Callable[..., str]
Write = Callable[[str, str], str]


@dataclass(frozen=True)
class Commands:
    """Runs autotune's commands; the user's own settings of Ray and MLflow have no part in them."""

    environment: dict[str, str]

    def run(self, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "autotune", *arguments, folder=folder)

    def succeed(self, *arguments: str, folder: Path) -> str:
        """Run a command that ends well without a word on stderr, and return what it prints."""
        ran = self.run(*arguments, folder=folder)
        assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
        return ran.stdout

    def python(self, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    def start(self, *arguments: str, folder: Path) -> "subprocess.Popen[bytes]":
        """Output goes to out.txt and err.txt.

        A process group of its own, for signals as Ctrl-C in a terminal sends them.
        """
        with (folder / "out.txt").open("wb") as out, (folder / "err.txt").open("wb") as err:
            return subprocess.Popen(
                [sys.executable, "-m", "autotune", *arguments],
                cwd=folder,
                env=self.environment,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with contextlib.closing(Launcher()) as launcher:
        yield launcher


@pytest.fixture
def group(launcher: Launcher) -> Iterator[ProcessGroup]:
    with contextlib.closing(ProcessGroup(launcher=launcher.address)) as group:
        yield group


@pytest.fixture(scope="session")
def commands() -> Commands:
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")
    }
    return Commands({**kept, "MLFLOW_DISABLE_TELEMETRY": "true"})


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterSize]:
    """Ray in this process, with three CPUs."""
    with connected(
        Composer(["experiment=cnn_smoke", "cluster.num_cpus=3"]).compose().config.cluster
    ) as size:
        yield size


@pytest.fixture
def refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refusal:
    """Runs a command in an empty folder and returns the one line it is refused with."""
    monkeypatch.chdir(tmp_path)
    for variable in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)

    def refuse(*arguments: str, command: Callable[[Sequence[str]], int] = tune_command) -> str:
        code = run_command(command, arguments)
        said = capsys.readouterr()
        assert code == EXIT_BAD_INPUT, said.err
        assert said.err.startswith("autotune: ")
        assert said.err.count("\n") == 1, said.err
        assert said.out == ""
        assert not [*tmp_path.glob("**/trials.csv"), *tmp_path.glob("**/compare.json")]
        assert "RUNNING" not in _statuses(tmp_path)
        return said.err.removeprefix("autotune: ").rstrip()

    return refuse


def _statuses(folder: Path) -> list[str]:
    if not (folder / "mlflow.db").is_file():
        return []
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    return [
        run.info.status
        for run in client.search_runs([each.experiment_id for each in client.search_experiments()])
    ]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes an experiment of the user's own and returns the folder to give as --config-dir."""

    def write(name: str, content: str) -> str:
        path = tmp_path / "my_conf" / "experiment" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# @package _global_\n{content}")
        return "my_conf"

    return write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The folder for studies, on a file system of 16 megabytes."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    mount = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder],
        check=False,
        capture_output=True,
    )
    if not mount or mount.returncode:
        pytest.skip("needs to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk with a file, and return its path."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler
