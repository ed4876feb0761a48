"""Check a study that has ended: ``autotune verify study=NAME|FOLDER [folder=outputs] [tracking.uri=URI]``.

Exit code 0: all that could be checked holds; 4: something differs; 2: bad input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.config.command_line import EXIT_DIFFERS, parse_command_line, run_main
from autotune.config.own_keys import own_key, own_keys_help, read_own_keys, refuse_other_keys
from autotune.remote.url import refuse_url, user_path

if TYPE_CHECKING:
    from autotune.execution.verification import Verification

_PURPOSE = (
    "Check that a study's journal, recording, trials.csv, summary.json, best.json, best.yaml and MLflow runs agree, and compute\n"
    "its claim again from the confirmation runs. Nothing is changed. Exit code 0: all holds; 4: something differs."
)
_MAX_SHOWN = 8
"""Differences that are shown of each check."""


@dataclass(kw_only=True)
class VerifyKeys:
    """Keys of ``autotune verify``."""

    study: str = own_key(..., "a study of the folder, or the folder of a study", shown="NAME")
    folder: str = own_key("outputs", "where studies are kept")
    storage: str | None = own_key(None, "the database of a study that has one", name="search.storage", shown="URL")
    tracking_uri: str | None = own_key(
        None,
        "the MLflow store; else MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the working folder",
        name="tracking.uri",
        shown="URI",
    )
    allowed_targets: list[str] = own_key([], "packages of one's own, if the objective is from one", accepted="a list such as [my_package]")


def verify_command(arguments: Sequence[str]) -> int:
    """Run ``autotune verify`` with command-line arguments and return its exit code."""
    line = parse_command_line("autotune verify", _PURPOSE, own_keys_help(VerifyKeys), arguments, takes="study=NAME")
    own, others = read_own_keys(VerifyKeys, line.overrides)
    refuse_other_keys(VerifyKeys, others)
    for key in ("study", "folder"):
        refuse_url(getattr(own, key), key)
    from autotune.execution.verification import verify_study  # noqa: PLC0415  # after --help

    named, given = user_path(own.folder) / own.study, user_path(own.study)
    folder = named if named.is_dir() or not given.is_dir() else given
    verification = verify_study(folder, storage_url=own.storage, tracking_uri=own.tracking_uri, allowed_targets=own.allowed_targets)
    print("\n".join(_lines(verification, folder)))
    return 0 if verification.holds else EXIT_DIFFERS


def _lines(verification: "Verification", folder: Path) -> list[str]:
    """The table: a line for each check, and one for each difference."""
    lines = [
        f"study {verification.study} ({folder}): {verification.num_trials} trials, {verification.num_confirmation_runs} confirmation runs"
    ]
    width = max(len(check.name) for check in verification.checks)
    for check in verification.checks:
        word = "differs" if check.differences else "ok" if check.is_made else "not checked"
        shown = [*check.differences[:_MAX_SHOWN]]
        if len(check.differences) > len(shown):
            shown.append(f"and {len(check.differences) - len(shown)} differences more")
        lines += [f"  {check.name:<{width}}  {word:<11}  {text}" for text in shown or [check.note]]
    num_made = sum(check.is_made for check in verification.checks)
    num_differing = sum(bool(check.differences) for check in verification.checks)
    if not num_differing:
        return [*lines, f"all {num_made} checks hold"]
    return [*lines, f"{num_differing} of {num_made} checks found differences"]


if __name__ == "__main__":
    run_main(verify_command)
