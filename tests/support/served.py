"""A web server for tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder, and refuses what lies in folders called secret."""

    def send_head(self):  # type: ignore[no-untyped-def]  # its own type is private
        if "secret" in self.path:
            self.send_error(403)
            return None
        return super().send_head()

    def log_message(self, *_: object) -> None:
        """Keep what was asked for, and print nothing."""
        self.server.asked.append(f"{self.command} {self.path}")  # type: ignore[attr-defined]


class Server(ThreadingHTTPServer):
    """A web server on this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.asked: list[str] = []
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """A folder at a URL while the context lasts."""
    folder.mkdir(exist_ok=True)
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
