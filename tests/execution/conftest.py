"""Commands as a user types them, each in a process and a folder of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Commands:
    """Runs autotune's commands; the user's own settings of Ray and MLflow have no part in them."""

    environment: dict[str, str]

    def run(self, *arguments: str, folder: Path, module: str = "autotune", timeout: float = 180) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, *arguments: str, folder: Path) -> "subprocess.Popen[bytes]":
        """Output goes to out.txt and err.txt; a process group of its own, for signals as Ctrl-C in a terminal sends them."""
        with (folder / "out.txt").open("wb") as out, (folder / "err.txt").open("wb") as err:
            return subprocess.Popen(
                [sys.executable, "-m", "autotune", *arguments],
                cwd=folder,
                env=self.environment,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )


@pytest.fixture(scope="session")
def commands() -> Commands:
    kept = {key: value for key, value in os.environ.items() if key not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}
    return Commands({**kept, "MLFLOW_DISABLE_TELEMETRY": "true"})


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    def wait(is_so: Callable[[], bool], *, timeout: float, process: "subprocess.Popen[bytes] | None" = None) -> None:
        until = time.monotonic() + timeout
        while not is_so():
            if process is not None and process.poll() is not None:
                raise AssertionError(f"the process ended with {process.returncode}")
            if time.monotonic() > until:
                if process is not None:
                    os.killpg(process.pid, signal.SIGKILL)
                raise AssertionError(f"not so after {timeout} s")
            time.sleep(0.05)

    return wait
