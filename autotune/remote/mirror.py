"""Local copy of a folder at a URL, for files that are written again and again, such as a training's checkpoint."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.errors import DataError
from autotune.remote.path import RemotePath, located

_PROBE = ".autotune-may-write"


class Mirror:
    """A folder of this machine whose files are sent to a remote folder.

    Args:
        folder: the folder of this machine.
        remote: the remote folder; None if the files stay on this machine.
    """

    def __init__(self, folder: Path, remote: RemotePath | None) -> None:
        self.folder = folder
        self._remote = remote
        self._sent: dict[str, int] = {}

    def shown(self, name: str) -> str:
        """Location of a file, in the folder or URL that the user named."""
        return str(self.folder / name if self._remote is None else self._remote / name)

    def bring(self, name: str) -> None:
        """Copy a file from the remote folder to this machine, if it exists there.

        Raises:
            DataError: the file cannot be read.
        """
        if self._remote is not None and (self._remote / name).is_file():
            (self._remote / name).copy_to(self.folder / name)
            self._sent[name] = (self.folder / name).stat().st_mtime_ns

    def send(self, name: str) -> None:
        """Copy a file to the remote folder, if it is new or was replaced on this machine since it was last sent.

        Raises:
            DataError: the file cannot be written.
        """
        path = self.folder / name
        if self._remote is not None and path.is_file() and self._sent.get(name) != (modified_ns := path.stat().st_mtime_ns):
            (self._remote / name).put(path)
            self._sent[name] = modified_ns


@contextmanager
def mirrored(location: str, key: str) -> Iterator[Mirror]:
    """Yield the folder that a path names, or for a URL a temporary folder of this machine whose files can be sent there.

    Args:
        location: path or URL of the folder.
        key: config key of the location, for messages.

    Raises:
        DataError: on entry, files at the URL cannot be written or looked at; errors inside name the URL, not the temporary folder.
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
            raise DataError(str(error).replace(here, str(remote)).replace(f"/{_PROBE}", "")) from error


def _check_usable(folder: RemotePath, probe: Path) -> None:
    """Write a probe file, look at it, and remove it if that is allowed.

    Without permission to look at files, an earlier state would count as absent and be overwritten.
    """
    probe.write_bytes(b"autotune looked whether it may write here\n")
    (folder / _PROBE).put(probe)
    (folder / _PROBE).version()
    (folder / _PROBE).remove()
    probe.unlink()
