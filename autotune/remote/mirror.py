"""A folder of this machine in place of one at a URL, for what is written over and over, such as a training's checkpoint."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.errors import DataError
from autotune.remote.path import RemotePath, located

_PROBE = ".autotune-may-write"


class Mirror:
    """The folder here, whose files are sent when they are whole.

    Args:
        folder: of this machine.
        remote: where its files go; None where they are to stay.
    """

    def __init__(self, folder: Path, remote: RemotePath | None) -> None:
        self.folder = folder
        self._remote = remote
        self._sent: dict[str, int] = {}

    def shown(self, name: str) -> str:
        """Where a file is, as the user named its folder."""
        return str(self.folder / name if self._remote is None else self._remote / name)

    def bring(self, name: str) -> None:
        """Copy a file here, where the URL has it.

        Raises:
            DataError: it cannot be read.
        """
        if self._remote is not None and (self._remote / name).is_file():
            (self._remote / name).copy_to(self.folder / name)
            self._sent[name] = (self.folder / name).stat().st_mtime_ns

    def send(self, name: str) -> None:
        """Write a file at the URL, where it is new or was replaced here since it was last sent.

        Raises:
            DataError: it cannot be written.
        """
        path = self.folder / name
        if self._remote is not None and path.is_file() and self._sent.get(name) != path.stat().st_mtime_ns:
            modified_ns = path.stat().st_mtime_ns
            (self._remote / name).put(path)
            self._sent[name] = modified_ns


@contextmanager
def mirrored(location: str, key: str) -> Iterator[Mirror]:
    """The folder that a path names, or one for as long as the context lasts whose files go to a URL.

    Args:
        location: a path or URL.
        key: of the configuration, for messages.

    Raises:
        DataError: at once, where nothing can be written or looked at there; what is raised within names the URL, not the folder here.
    """
    remote = located(location, key)
    if isinstance(remote, Path):
        yield Mirror(remote, None)
        return
    with tempfile.TemporaryDirectory(prefix="autotune-") as here:
        try:
            _check_usable(remote, Path(here) / _PROBE)
            yield Mirror(Path(here), remote)
        except DataError as error:
            raise DataError(str(error).replace(here, str(remote))) from error


def _check_usable(folder: RemotePath, probe: Path) -> None:
    """Write a file and take it away again, where that is allowed too.

    It is looked at in between: where nothing may be, an earlier state would count as absent, and be written over.
    """
    probe.write_bytes(b"autotune looked whether it may write here\n")
    try:
        (folder / _PROBE).put(probe)
        (folder / _PROBE).version()
    except DataError as error:
        raise DataError(str(error).replace(f"/{_PROBE}", "")) from error
    (folder / _PROBE).remove()
    probe.unlink()
