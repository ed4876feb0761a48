"""What an experiment, a search space or a folder from someone else cannot do: run code, write or
read elsewhere, send what it finds.
"""

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autotune.training.checkpoint import save_state

Refusal = Callable[..., str]
Write = Callable[[str, str], str]
"""Fixtures of conftest.py."""


_SAVE = """
model:
  _target_: autotune.training.checkpoint.save_weights
  path: {_target_: autotune.training.techniques.transfer.checkpoint_path, checkpoint: victim.pth}
  weights: WEIGHTS
  metadata: {}
"""


def crafted(path: Path) -> None:
    """A state whose one tensor is what Python would run if its bytes became a .pth file."""
    path.mkdir()
    code = b"\nimport os; os.system('touch ran')\n"
    save_state(path, {"x": torch.frombuffer(bytearray(code), dtype=torch.uint8)})


@pytest.mark.parametrize("dry_run", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "content",
    [
        _SAVE.replace("WEIGHTS", "{}"),
        _SAVE.replace(
            "WEIGHTS", "{_target_: autotune.training.checkpoint.read_state, folder: crafted}"
        ),
        "stopping: {_target_: autotune.search.study._drop_torn_line, journal: victim.pth}\n",
        (
            "search: {sampler: {_target_: autotune.search.storage._open_database, url:"
            " 'sqlite:///made.db'}}\n"
        ),
        (
            "search: {sampler: {_target_: autotune.search.storage.open_storage, url:"
            " 'sqlite:///made.db'}}\n"
        ),
        "tracking: {_target_: autotune.files.replacing, path: victim.pth}\n",
        "model: {_target_: torch.nn.Module._call_impl}\n",
        (
            "model: {_target_: torch.nn.Sequential, _args_: [{_target_: torch.save, obj: {}, f:"
            " made.db}]}\n"
        ),
        "model: {_target_: torch.nn.Module.register_module}\n",
        "optimizer: {_target_: torch.optim.swa_utils.update_bn}\n",
        "loss: {_target_: torch.nn.functional.torch.load, f: crafted}\n",
        "lr_schedule: {_target_: torch.optim.lr_scheduler.LRScheduler.load_state_dict}\n",
        "model: {_target_: autotune.config.build.build, node: {}}\n",
        "model: {inner: {_target_: autotune.script.run, command: touch ran}}\n",
        "training: {_target_: autotune.script.run, command: touch ran}\n",
        (
            "objective: {_target_: autotune.training.checkpoint.save_state, folder: made.db, state:"
            " {}}\n"
        ),
    ],
)
def test_only_components_of_their_key_are_built(
    content: str, dry_run: bool, refusal: Refusal, write: Write, tmp_path: Path
) -> None:
    victim = tmp_path / "victim.pth"
    victim.write_bytes(b"kept {half a line")
    crafted(tmp_path / "crafted")
    folder = write("evil", f"defaults: [cnn_smoke]\n{content}")
    before = sorted(tmp_path.rglob("*"))
    line = ["experiment=evil", "search_space=[{batch_size: [32]}]", "--config-dir", folder]
    said = refusal(*line, f"dry_run={str(dry_run).lower()}")
    assert "_target_: found '" in said
    assert victim.read_bytes() == b"kept {half a line"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("content", "part"),
    [
        # Hydra's own settings.
        (
            "hydra: {callbacks: {evil: {_target_: os.system}}}\n",
            "hydra: a file cannot change Hydra's own settings",
        ),
        (
            "hydra: {searchpath: ['file:///etc']}\n",
            "hydra: a file cannot change Hydra's own settings",
        ),
        (
            "defaults: [cnn_smoke, override hydra/launcher: basic]\n",
            "a file cannot change Hydra's own settings",
        ),
        (
            "defaults: [cnn_smoke, override /hydra/sweeper: basic]\n",
            "a file cannot change Hydra's own settings",
        ),
        (
            "defaults: [cnn_smoke, /model@hydra.callbacks: mlp]\n",
            "a file cannot change Hydra's own settings",
        ),
        # Files of other folders.
        (
            "defaults: [cnn_smoke, override /model: ../../../secret]\n",
            "name a file in the folder of its group",
        ),
        ("defaults: [../../secret]\n", "name a file in the folder of its group"),
        ("defaults: [/../../secret]\n", "name a file in the folder of its group"),
        (
            (
                "technique: {_target_: autotune.training.techniques.transfer.Transfer, source:"
                " ../../secret}\n"
            ),
            "experiment=../../secret: there is no such file",
        ),
        (
            "search_space: [/etc/passwd]\n",
            "search_space: /etc/passwd: is no search space, which is a .yaml file",
        ),
        (
            "search_space: [secret.txt]\n",
            "search_space: secret.txt: is no search space, which is a .yaml file",
        ),
        (
            "search_space: ['http://localhost/x.yaml']\n",
            "search_space: found the URL http://localhost/x.yaml, use a file of this",
        ),
        (
            "search_space: [{optimizer: [../../secret, sgd]}]\n",
            "optimizer='../../secret': there is no such file",
        ),
        # The environment, and values that are made while others are read.
        ("study: {name: '${oc.env:HOME}'}\n", "study.name: found ${ with more than a key"),
        ("model: {_target_: '${oc.env:UNSET}'}\n", "model._target_: found ${ with more than a key"),
        ("model: '${oc.create:{_target_: os.system}}'\n", "model: found ${ with more than a key"),
        ("model: {width: '${oc.${lr}:HOME}'}\n", "model.width: found ${ with more than a key"),
        ("model: {width: '${hydra:runtime.cwd}'}\n", "model.width: found ${ with more than a key"),
        ("search_space: [{model.norm: ['${oc.env:HOME}']}]\n", "found ${ with more than a key"),
        # Where files are written, and who is sent what.
        (
            "study: {folder: /tmp/elsewhere}\n",
            "study.folder: found a value in an experiment's files",
        ),
        (
            "study: {folder: '${study.name}/../..'}\n",
            "study.folder: found a value in an experiment's files",
        ),
        (
            "study: {name: ../../elsewhere}\n",
            "study.name: found '../../elsewhere', use letters",
        ),
        (
            "checkpoint: {folder: /tmp/elsewhere}\n",
            "checkpoint.folder: found a value in an experiment's files",
        ),
        (
            "search: {storage: 'sqlite:///made.db'}\n",
            "search.storage: found a value in an experiment's files",
        ),
        (
            "tracking: {uri: 'sqlite:////tmp/made.db'}\n",
            "tracking.uri: found a value in an experiment's files",
        ),
        (
            "cluster: {address: 'attacker:6379'}\n",
            "cluster.address: found a value in an experiment's files",
        ),
        (
            "allowed_targets: [os]\n",
            "allowed_targets: found ['os'] in a file; it is read from the command line only",
        ),
        # Objects of Python's, and files that are more than they seem.
        (
            "model: !!python/object/apply:os.system [touch ran]\n",
            "could not determine a constructor for the tag",
        ),
        ("model: !!python/name:os.system\n", "could not determine a constructor for the tag"),
        ("model: &a {inner: *a}\n", "line 2: found aliases that stand for too many values"),
        (f"model: {'[' * 3000}{']' * 3000}\n", "is nested too deeply"),
    ],
)
def test_an_experiment_stays_within_its_configuration(
    content: str,
    part: str,
    refusal: Refusal,
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "s3cret"))
    for name in ("secret.yaml", "secret.txt"):
        (tmp_path / name).write_text("s3cret: s3cret\n")
    content = content if "defaults" in content else f"defaults: [cnn_smoke]\n{content}"
    folder = write("evil", content.replace("line 2", "line 3"))
    before = sorted(tmp_path.rglob("*"))
    said = refusal("experiment=evil", "--config-dir", folder, "dry_run=true")
    assert part.replace("line 2", "line 3") in said
    assert "s3cret" not in said
    assert sorted(tmp_path.rglob("*")) == before


def laughs(levels: int) -> str:
    """A file of a few lines in which each line has nine aliases of the line before."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return f"a: &a [{', '.join('x' * 9)}]\n" + "".join(
        f"{letters[i]}: &{letters[i]} [{', '.join([f'*{letters[i - 1]}'] * 9)}]\n"
        for i in range(1, levels)
    )


def test_a_file_of_aliases_of_aliases_is_refused_at_once(
    refusal: Refusal, write: Write, tmp_path: Path
) -> None:
    folder = write("laughs", laughs(20))
    said = refusal("experiment=laughs", "--config-dir", folder, "dry_run=true")
    assert "experiment/laughs.yaml line" in said
    assert "found aliases that stand for too many values" in said
    (tmp_path / "laughs.yaml").write_text(laughs(20))
    said = refusal("experiment=cnn_smoke", "search_space=[laughs.yaml]", "dry_run=true")
    assert said.endswith("found aliases that stand for too many values")


def test_a_space_is_not_told_of_what_is_no_space(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text("s3cret\n")
    (tmp_path / "broken.yaml").write_text("password: 's3cret\nuser: root\n")
    for entry in ("/etc/passwd", "secret.yaml", "broken.yaml", "http://localhost/s.yaml"):
        said = refusal("experiment=cnn_smoke", f"search_space=['{entry}']", "dry_run=true")
        assert entry in said
        assert "root" not in said
        assert "s3cret" not in said


@pytest.mark.parametrize(
    "module", ["hydra_plugins/evil.py", "wandb_that_is_not_installed.py", "my_net.py"]
)
def test_modules_beside_a_folder_are_not_importable_unless_some_are_let_in(
    module: str, refusal: Refusal, write: Write, tmp_path: Path
) -> None:
    folder = write("evil", "defaults: [cnn_smoke]\nmodel: {_target_: my_net.Net}\n")
    path = tmp_path / folder / module
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent("from pathlib import Path\nPath('ran').touch()\n"))
    before = list(sys.path)
    said = refusal("experiment=evil", "--config-dir", folder, "dry_run=true")
    assert "model._target_: found 'my_net.Net'; accepted here: " in said
    assert sys.path == before
    assert not (tmp_path / "ran").exists()


def test_what_the_command_line_says_is_the_users_own(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.config.compose import Composer

    monkeypatch.chdir(tmp_path)
    folder = write("mine", "defaults: [cnn_smoke]\nstudy: {folder: there}\n")
    (tmp_path / folder / "tracking").mkdir()
    (tmp_path / folder / "tracking/ours.yaml").write_text(
        "_target_: autotune.tracking.mlflow_tracker.MlflowTracker\nuri:"
        " http://mlflow.example\nlog_model: true\n"
    )
    said = (
        Composer(["experiment=mine", "study.folder=here", "tracking=ours"], [folder])
        .compose()
        .config
    )
    assert (said.study.folder, said.tracking["uri"]) == ("here", "http://mlflow.example")
