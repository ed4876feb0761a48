"""Hosts that are namespaces of this machine: each with a network address and folders of its own."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass(frozen=True, kw_only=True)
class Host:
    """One of them, joined to the others by a bridge."""

    name: str
    """Of its network namespace."""
    address: str
    first: int
    """Process id of its first process, which keeps its namespaces: with it go all others here."""
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(
        self, *command: str, log: Path, folder: Path = Path("/")
    ) -> "subprocess.Popen[bytes]":
        """Start a command here; what it says goes to ``log``."""
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")
        }
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*self._inside, f"--wd={folder}", *command],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        self.started.append(process)
        return process

    def hide(self, folder: Path) -> None:
        """Have an empty folder in its place here: other hosts' files are not seen, and theirs
        are not from here.
        """
        folder.mkdir(parents=True, exist_ok=True)
        _run(*self._inside, "mount", "-t", "tmpfs", "none", str(folder))

    def end(self) -> None:
        """Kill all that runs here."""
        os.kill(self.first, signal.SIGKILL)
        for process in self.started:
            process.wait(10)

    @property
    def _inside(self) -> list[str]:
        return ["nsenter", f"--target={self.first}", "--pid", "--mount", "--net"]


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts, while the context lasts.

    The test is skipped, and says why, where namespaces cannot be made.
    """
    missing = [each for each in ("ip", "unshare", "nsenter", "mount") if shutil.which(each) is None]
    if missing:
        pytest.skip(f"needs the commands {', '.join(missing)}")
    tag, number = f"at{os.getpid()}", os.getpid()
    network = f"10.{200 + number % 50}.{number // 50 % 250}"
    with contextlib.ExitStack() as stack:
        try:
            _run("ip", "link", "add", f"{tag}br", "type", "bridge")
            stack.callback(_run, "ip", "link", "del", f"{tag}br")
            _run("ip", "link", "set", f"{tag}br", "up")
            made = [
                _host(
                    f"{tag}n{place}", f"{tag}c{place}", f"{tag}br", f"{network}.{place + 1}", stack
                )
                for place in range(count)
            ]
        except subprocess.CalledProcessError as error:
            pytest.skip(f"namespaces cannot be made here: {error.stderr.strip()}")
        yield made


def _host(name: str, cable: str, bridge: str, address: str, stack: contextlib.ExitStack) -> Host:
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "del", name)
    _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
    _run("ip", "link", "set", cable, "master", bridge, "up")
    _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
    _run("ip", "-n", name, "link", "set", "eth0", "up")
    _run("ip", "-n", name, "link", "set", "lo", "up")
    keep = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", "echo; exec sleep infinity"]
    holder = subprocess.Popen(["ip", "netns", "exec", name, *keep], stdout=subprocess.PIPE)
    stack.callback(holder.wait, 10)
    assert holder.stdout is not None
    with holder.stdout as said:
        said.readline()  # it is in its namespaces
    first = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text())
    host = Host(name=name, address=address, first=first)
    stack.callback(host.end)
    return host


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
