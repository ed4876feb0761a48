"""Stand-alone scripts: they train, without autotune, what ``autotune train`` trains, number by
number.
"""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ruff.__main__ import find_ruff_bin

from autotune.config.compose import Composer
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.outcome import Outcome
from autotune.training.loop import train
from autotune.training.standalone import standalone_script

TEXT = "data.max_characters=40000"
TRAINED = {
    "cnn": "experiment=cnn epochs=12 optimizer.lr=0.03",
    "cnn_adamw": (
        "experiment=cnn optimizer=adamw lr_schedule=one_cycle model.norm=batch epochs=3"
        " model.widths=[8,16]"
    ),
    "cnn_small_batches": (
        "experiment=cnn lr_schedule=cosine model.norm=group epochs=2 batch_size=16"
        " max_grad_norm=0.5 optimizer.lr=0.1"
    ),
    "cnn_large_batches": (
        "experiment=cnn batch_size=4096 epochs=4 optimizer.lr=0.1 evaluate_every_samples=2000"
    ),
    "cnn_in_parts": (
        "experiment=cnn runtime.channels_last=true batch_size=100 runtime.micro_batch_size=32"
        " averaging=ema epochs=2"
    ),
    "cnn_bfloat16": "experiment=cnn precision=bf16 epochs=2",
    "cnn_pure_bfloat16": (
        "experiment=cnn precision=pure_bf16 averaging=ema averaging.start_fraction=0.3 epochs=2"
    ),
    "cnn_recomputed": (
        "experiment=cnn runtime.activation_checkpointing=true model.norm=batch optimizer=muon"
        " epochs=2 lr_schedule=warmup_stable_decay"
    ),
    "cnn_from_host": (
        "experiment=cnn data_path.on_device=false lr_schedule=linear optimizer=sgd_decoupled"
        " epochs=2"
    ),
    "cnn_by_processes": (
        "experiment=cnn data_path.on_device=false data_path.num_workers=1 optimizer=adamw_decoupled"
        " epochs=1"
    ),
    "cnn_schedule_free": (
        "experiment=cnn optimizer=schedule_free_adamw loss.label_smoothing=0.1 epochs=2"
    ),
    "cnn_without_schedules": (
        "experiment=cnn optimizer=muon_sgd optimizer.head_lr=4 optimizer.bias_lr=2 epochs=1"
    ),
    "resnet9": "experiment=cnn model=resnet9 model.widths=[4,4,8,8] epochs=1",
    "mlp_dropout": (
        "experiment=mlp model.norm=batch model.activation=gelu model.dropout=0.2 epochs=3"
        " runtime.optimizer_kernels=for_loop +target.constraints.loss.at_most=0.2"
    ),
    "mlp_fused": (
        "experiment=mlp model.norm=layer model.activation=tanh optimizer=adamw"
        " runtime.optimizer_kernels=fused epochs=3"
    ),
    "speed_cnn_images": (
        "experiment=speed_digits epochs=2 views=six_views augmentation.flip=random"
        " augmentation.cutout=2 augmentation.brightness=0.1 augmentation.shift=1"
        " lr_schedule=constant"
    ),
    "transformer_muon": (
        f"experiment=transformer {TEXT} optimizer=muon model.positions=rotary model.tied_head=true"
        " model.dropout=0.1 runtime.activation_checkpointing=true batch_size=4 epochs=0.3"
    ),
    "transformer_of_files": (
        "experiment=transformer data.root=text.txt data.length=32 batch_size=4 epochs=1"
    ),
    "csv": "experiment=mlp data=csv data.path=table.csv data.target_column=kind epochs=2",
    "memory_mapped": (
        "experiment=cnn data=memory_mapped data.root=. data.mean=[0.4,0.5,0.6]"
        " data.std=[0.2,0.3,0.4] epochs=2"
    ),
    "cifar10": (
        "experiment=cnn data=cifar10 data.root=cifar data.num_train=60 runtime.channels_last=true"
        " epochs=2"
    ),
    "fashion_mnist": "experiment=cnn data=fashion_mnist data.root=fashion epochs=1",
}
"""Overrides by name; values of a target that are reached, and ones that are not."""

RUN_ALL = """
import contextlib, io, json, runpy, sys, warnings
sys.modules["autotune"] = None  # whoever imports it fails
printed = {}
for name in sys.argv[1:]:
    sys.argv = [name]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            runpy.run_path(f"{name}.py", run_name="__main__")
        except SystemExit as ended:
            printed[name] = [ended.code, output.getvalue()]
assert not [name for name in sys.modules if name.startswith("autotune.")]
print(json.dumps(printed))
"""


def config_of(overrides: str) -> TrialConfig:
    return Composer([*overrides.split(), "device=cpu", "seed=5"]).compose().trial


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small data sets of every kind that is read from files."""
    folder, random = tmp_path_factory.mktemp("standalone"), np.random.default_rng(0)
    (folder / "text.txt").write_text(
        "the quick brown fox jumps over the lazy dog, häufig. " * 200, encoding="utf-8"
    )
    rows = [
        f"{number},{'ab'[number % 2]},{random.random():.3f},{'xyz'[number % 3]}"
        for number in range(90)
    ]
    (folder / "table.csv").write_text("\n".join(["number,letter,value,kind", *rows]))
    for split, size in (("train", 96), ("validation", 32)):
        np.save(
            folder / f"{split}_inputs.npy",
            random.integers(0, 256, (size, 3, 12, 12), dtype=np.uint8),
        )
        np.save(folder / f"{split}_targets.npy", np.arange(size) % 4)
    (folder / "cifar").mkdir()
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        records = random.integers(0, 256, (20, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(20) % 10
        (folder / "cifar" / f"{name}.bin").write_bytes(records.tobytes())
    (folder / "fashion").mkdir()
    for name, size in (("train", 120), ("t10k", 20)):
        for kind, array in (
            ("images-idx3", random.integers(0, 256, (size, 28, 28))),
            ("labels-idx1", np.arange(size) % 10),
        ):
            header = b"".join(
                number.to_bytes(4, "big") for number in (0x800 + array.ndim, *array.shape)
            )
            (folder / "fashion" / f"{name}-{kind}-ubyte.gz").write_bytes(
                gzip.compress(header + array.astype(np.uint8).tobytes())
            )
    return folder


@pytest.fixture(scope="module")
def scripts(folder: Path) -> dict[str, str]:
    """The script of every configuration, by name, also written into the folder."""
    texts = {
        name: standalone_script(config_of(overrides), num_threads=1)
        for name, overrides in TRAINED.items()
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return texts


@pytest.fixture(scope="module")
def printed(folder: Path, scripts: dict[str, str]) -> dict[str, tuple[int, str]]:
    """Exit code and output of each script, all run in one process in which autotune cannot be
    imported.
    """
    command = [sys.executable, "-I", "-W", "error", "-c", RUN_ALL, *scripts]
    ran = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return {name: (code, output) for name, (code, output) in json.loads(ran.stdout).items()}


@pytest.mark.parametrize("name", TRAINED)
def test_a_script_trains_what_autotune_trains(
    name: str, folder: Path, printed: dict[str, tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    code, output = printed[name]
    own = list(train(config_of(TRAINED[name])))
    found = [
        (int(step), float(metric), float(loss))
        for step, metric, loss in re.findall(r"step +(\d+) .* (\S+)  loss (\S+)", output)
    ]
    assert found == [
        (one.step, pytest.approx(one.metric, abs=1e-6), pytest.approx(one.loss, abs=1e-6))
        for one in own
    ]
    assert code == (0 if own[-1].outcome is Outcome.REACHED else 3)
    assert ("time to target" in output) is (code == 0)


def assert_is_clean(folder: Path) -> None:
    command = [find_ruff_bin(), "check", "--ignore=I001", "--isolated", "."]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_scripts_are_clean(folder: Path, scripts: dict[str, str]) -> None:
    assert_is_clean(folder)


def test_a_script_imports_no_package_that_it_does_not_need(scripts: dict[str, str]) -> None:
    imported = set(re.findall(r"^(?:import|from) (\w+)", scripts["cnn"], re.MULTILINE))
    assert imported - sys.stdlib_module_names == {"numpy", "torch"}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (
            "experiment=cnn_parallel parallelism=ddp parallelism.num_workers=2",
            "parallelism.num_workers: found 2",
        ),
        ("experiment=prune", "technique: found Pruning"),
        ("experiment=cnn precision=fp8", "precision.float8: found true"),
        ("experiment=cnn data=cifar10 data.root=s3://bucket/cifar", "data.root: found a URL"),
        (
            "experiment=cnn model._target_=my_models.Net allowed_targets=[my_models]",
            "model._target_: found my_models.Net",
        ),
        (
            "experiment=cnn training={_target_:my_fit.train} allowed_targets=[my_fit]",
            "training: found my_fit.train",
        ),
    ],
)
def test_what_a_script_cannot_say_is_refused_by_its_key(overrides: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(key)}") as refused:
        standalone_script(config_of(overrides), num_threads=1)
    assert "a stand-alone script can have" in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            "precision=fp16 runtime.optimizer_kernels=fused",
            ["torch.amp.GradScaler(DEVICE.type)", "fused=True", "torch.float16"],
        ),
        (
            "precision=tf32 runtime.cudnn_benchmark=true",
            ["cudnn.allow_tf32 = True", "cudnn.benchmark = True"],
        ),
        ("runtime.cuda_graph=true", ["class GraphedGradients", "training.restart(splits)"]),
        (
            "runtime.compile=reduce-overhead",
            ["torch.compile(", "mode='reduce-overhead'", "training.restart(splits)"],
        ),
        ("runtime.expandable_segments=true", ['"expandable_segments:True"']),
    ],
)
def test_what_only_a_gpu_runs_is_in_the_script_too(
    overrides: str, said: list[str], tmp_path: Path
) -> None:
    composed = Composer(["experiment=cnn", "device=cuda", *overrides.split()]).compose()
    text = standalone_script(composed.trial, num_threads=1)
    assert all(part in text for part in said)
    (tmp_path / "script.py").write_text(text, encoding="utf-8")
    assert_is_clean(tmp_path)
