"""Messages to a webhook: what is sent and when, and that nothing about it stops or slows a study."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import StudyError
from autotune.execution import webhook
from autotune.execution.webhook import Webhook, told_end
from autotune.hiding import without_secrets
from tests.patience import wait_until

STUDY = {"study": "cnn-1", "experiment": "cnn", "folder": "/outputs/cnn-1"}


class Receiver(ThreadingHTTPServer):
    """A webhook on this machine that keeps what it is sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.messages: list[dict[str, Any]] = []
        self.answer, self.wait_seconds = 200, 0.0
        self.url = f"http://127.0.0.1:{self.server_port}/hooks/s3cret"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        self.server.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        time.sleep(self.server.wait_seconds)
        self.send_response(self.server.answer)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def received() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_of_new_best_trials_within_a_minute_the_last_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "BEST_SECONDS", 0.5)
    with received() as receiver:
        hook = Webhook(receiver.url, STUDY)
        for trial in range(4):
            hook.tell("best", f"trial {trial}", trial=trial)
        wait_until(lambda: len(receiver.messages) == 1)
        monkeypatch.setattr(webhook, "BEST_SECONDS", 3600.0)
        wait_until(lambda: len(receiver.messages) == 2)
        hook.tell("best", "trial 4", trial=4)
        hook.tell("finished", "finished", exit_code=0)
        hook.close()
    assert [(each["event"], each.get("trial")) for each in receiver.messages] == [("best", 0), ("best", 3), ("finished", None)]
    assert receiver.messages[0] == {"event": "best", "text": "cnn-1: trial 0", **STUDY, "trial": 0}


def test_what_fails_is_one_warning_without_the_secret(caplog: pytest.LogCaptureFixture) -> None:
    with received() as receiver:
        receiver.answer = 404
        hook = Webhook(receiver.url, STUDY)
        hook.tell("failed", "one")
        hook.tell("failed", "two")
        hook.close()
    hook = Webhook(receiver.url, STUDY)  # nobody listens any more
    hook.tell("failed", "three")
    hook.close()
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [
        "notify: 127.0.0.1 does not take messages: Not Found",
        "notify: 127.0.0.1 does not take messages: [Errno 111] Connection refused",
    ]


def test_a_webhook_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_TIMEOUT_SECONDS", 0.3)
    with received() as receiver:
        receiver.wait_seconds = 3.0
        began = time.monotonic()
        hook = Webhook(receiver.url, STUDY)
        hook.tell("finished", "finished")
        assert time.monotonic() - began < 0.2
        hook.close()
        assert time.monotonic() - began < 2


def test_without_a_url_nothing_is_done() -> None:
    threads = threading.active_count()
    hook = Webhook(None, STUDY)
    hook.tell("best", "trial 0")
    assert threading.active_count() == threads
    hook.close()


@pytest.mark.parametrize(
    ("error", "event", "text"),
    [
        (StudyError("no room at postgresql://me:pw@host/db"), "failed", "cnn-1: failed: no room at postgresql://me:***@host/db"),
        (KeyboardInterrupt(), "interrupted", "cnn-1: interrupted"),
    ],
)
def test_a_study_that_fails_or_is_ended_at_once_is_told(error: BaseException, event: str, text: str) -> None:
    with received() as receiver, pytest.raises(type(error)), told_end(Webhook(receiver.url, STUDY)):
        raise error
    assert [(each["event"], each["text"]) for each in receiver.messages] == [(event, text)]


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("notify=https://hooks.slack.com/services/T0/B0/secret", "notify=https://hooks.slack.com/***"),
        ("notify='https://me:pw@host:8080?token=secret'", "notify='https://host:8080/***'"),
        ("notify=${oc.env:AUTOTUNE_NOTIFY}", "notify=${oc.env:AUTOTUNE_NOTIFY}"),
        ("notify=null", "notify=null"),
    ],
)
def test_the_url_is_printed_up_to_its_host_only(argument: str, shown: str) -> None:
    assert without_secrets(argument) == shown


def test_a_study_tells_its_webhook_how_it_goes(commands: Any, tmp_path: Path) -> None:
    with received() as receiver:
        done = commands.run(
            "experiment=cnn_smoke", "study.name=told", "search.num_trials=3", "tracking=none", f"notify={receiver.url}", folder=tmp_path
        )
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in done.stdout + done.stderr + (tmp_path / "outputs/told/autotune.log").read_text()
    best = json.loads((tmp_path / "outputs/told/best.json").read_text())
    *before, last = receiver.messages
    assert {each["event"] for each in before} == {"best"}
    assert last["event"] == "finished"
    assert {key: last[key] for key in ("trial", "overrides", "best", "baseline", "num_trials")} == {
        key: best[key] for key in ("trial", "overrides", "best", "baseline", "num_trials")
    }
