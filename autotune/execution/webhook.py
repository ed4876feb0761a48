"""Messages about a study to a URL, sent in the background: a webhook that does not answer neither stops the study nor slows it."""

import contextlib
import json
import logging
import queue
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from autotune.hiding import without_secrets

logger = logging.getLogger(__name__)

BEST_SECONDS = 60.0
"""Seconds between two messages of a new best trial, at least."""
_TIMEOUT_SECONDS = 10.0


class Webhook:
    """Sends messages to a URL, as JSON by POST, from a thread of its own.

    Every message has ``event``, one of best, finished, interrupted and failed, and ``text``, a line for people, which chats show.

    Args:
        url: the webhook's URL; null sends nothing.
        study: fields that every message has.
    """

    def __init__(self, url: str | None, study: Mapping[str, Any]) -> None:
        self._url, self._study = url, study
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
        if url is not None:
            self._thread.start()

    def tell(self, event: str, text: str, **fields: Any) -> None:
        """Send a message, without waiting for it; of several new best trials within a minute only the last one is told."""
        self._queue.put({"event": event, "text": f"{self._study['study']}: {text}", **self._study, **fields})

    def close(self) -> None:
        """Wait until everything is sent, but for ten seconds at most."""
        self._queue.put(None)
        if self._url is not None:
            self._thread.join(_TIMEOUT_SECONDS)

    def _work(self) -> None:
        held: dict[str, Any] | None = None
        best_again_at = 0.0
        while True:
            try:
                message = self._queue.get(timeout=None if held is None else max(0.0, best_again_at - time.monotonic()))
            except queue.Empty:
                message = held
            held = None  # what comes later says more
            if message is None:
                return
            if message["event"] == "best":
                if time.monotonic() < best_again_at:
                    held = message
                    continue
                best_again_at = time.monotonic() + BEST_SECONDS
            self._post(message)

    def _post(self, message: Mapping[str, Any]) -> None:
        assert self._url is not None
        headers = {"Content-Type": "application/json", "User-Agent": "autotune"}
        try:
            request = urllib.request.Request(self._url, json.dumps(message).encode(), headers)  # noqa: S310  # http or https: checked
            urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS).close()  # noqa: S310  # as above
        except Exception as error:  # noqa: BLE001  # whatever happens, the study goes on
            if not self._has_failed:
                reason = getattr(error, "reason", None) or type(error).__name__  # its whole text may hold the URL
                logger.warning("notify: %s does not take messages: %s", urlsplit(self._url).hostname, reason)
            self._has_failed = True


@contextlib.contextmanager
def told_end(webhook: Webhook) -> Iterator[None]:
    """Tell a webhook of the error or the second Ctrl-C that ends the context, and close it."""
    try:
        yield
    except KeyboardInterrupt:
        webhook.tell("interrupted", "interrupted")
        raise
    except Exception as error:
        webhook.tell("failed", f"failed: {' '.join(without_secrets(str(error)).split()) or type(error).__name__}")
        raise
    finally:
        webhook.close()
