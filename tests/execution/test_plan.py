"""What a study is going to do: printed by a dry run, less what the machine cannot run, with the
resources of each trial.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.config.command_line import run_command
from autotune.config.compose import Composer
from autotune.errors import ConfigError, SearchSpaceError
from autotune.execution.plan import StudyPlan, check_plan, describe_plan, plan_study
from autotune.outcome import Outcome
from autotune.recording import write_recording
from autotune.training.capabilities import Capabilities
from autotune.training.run import check_training
from autotune.tune_study import tune_command
from tests.support.records import make_evaluation, make_result

_CPU = Capabilities(
    num_cpus=8,
    num_gpus=0,
    gpu_name=None,
    compute_capability=None,
    has_compiler=True,
    has_torchao=False,
)
_GPUS = Capabilities(
    num_cpus=64,
    num_gpus=4,
    gpu_name="NVIDIA H200",
    compute_capability=(9, 0),
    has_compiler=True,
    has_torchao=True,
)
_OLD_GPUS = Capabilities(
    num_cpus=64,
    num_gpus=4,
    gpu_name="Tesla V100",
    compute_capability=(7, 0),
    has_compiler=True,
    has_torchao=True,
)


_SPACE = "search_space=[{device:[cpu,cuda]},{precision:[fp32,bf16]}]"


def make_plan(*overrides: str, on: Capabilities = _CPU) -> StudyPlan:
    """A plan with a small search space, which is quickly checked."""
    return plan_study(
        Composer(
            [
                "experiment=cnn",
                "search_space=[{optimizer.lr:{type:float,low:0.01,high:1.0}}]",
                *overrides,
            ]
        ),
        on,
    )


def options_of(plan: StudyPlan, name: str) -> list[Any]:
    found = {each: domain for each, _, domain, _ in plan.space.walk()}
    return [value for value, _ in found[name].options]


def test_a_dry_run_says_what_would_be_done_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        run_command(
            tune_command,
            ["experiment=cnn", "dry_run=true", "study.name=mine", "search.time_budget_seconds=60"],
        )
        == 0
    )
    said = capsys.readouterr()
    assert said.err == ""
    lines = {line.split()[0]: line for line in said.out.splitlines()}
    assert lines["study"].split()[1:] == ["mine", "->", str(tmp_path / "outputs/mine")]
    assert "accuracy >= 0.98" in lines["target"]
    assert lines["objective"] == "objective time to target (s)"
    assert "0.001 to 1.0, log" in lines["optimizer=sgd/optimizer.lr"]
    assert "16 to 512, powers of two" in lines["batch_size"]
    assert "[8,16], [16,32], [32,64]" in lines["model.widths"]
    assert lines["baseline"].split()[1:4] == [
        "optimizer=sgd",
        "optimizer.lr=0.01",
        "optimizer.momentum=0.9",
    ]
    assert "150 trials, 60 s" in lines["budget"]
    assert "at most 60 runs of the best 8 and the baseline" in lines["budget"]
    assert "1 CPU and" in lines["resources"]
    assert not list(tmp_path.iterdir())


def test_what_an_earlier_study_tells_is_said(tmp_path: Path) -> None:
    tried = make_result(
        0, Outcome.REACHED, make_evaluation(metric=0.99), values={"optimizer.lr": 0.1, "depth": 2}
    )
    space = {"optimizer.lr": {"type": "float", "low": 0.01, "high": 1.0}, "depth": [1, 2]}
    plan = make_plan()
    write_recording(
        tmp_path / "old" / "recording",
        results=[tried],
        target=plan.trial.target,
        space=space,
        source="a test",
    )
    warm = make_plan("warm_start=[old]", f"study.folder={tmp_path}")
    (line,) = [line for line in describe_plan(warm) if line.startswith("earlier ")]
    assert line == "earlier   old: 1 of 1 trials; left out: depth, not in this search space"
    assert warm.definition() == plan.definition()  # a study may go on with more to learn from


@pytest.mark.parametrize(
    ("on", "offered", "left_out"),
    [
        (replace(_CPU, num_cpus=2), [2], "4, 8, 16, 32: do not divide the 2 CPUs"),
        (replace(_GPUS, num_gpus=6), [2], "4, 8, 16, 32: do not divide the 6 GPUs"),
        (replace(_GPUS, num_gpus=32), [2, 4, 8, 16, 32], None),
    ],
)
def test_numbers_of_workers_divide_the_devices_that_are_there(
    on: Capabilities, offered: list[int], left_out: str | None
) -> None:
    plan = make_plan("search_space=[parallelism]", on=on)
    for strategy in ("ddp", "fsdp"):
        assert options_of(plan, f"parallelism={strategy}/parallelism.num_workers") == offered
    assert plan.dropped == (() if left_out is None else (f"parallelism.num_workers={left_out}",))


def test_what_the_machine_cannot_run_is_left_out_and_said() -> None:
    plan = make_plan(_SPACE)
    assert options_of(plan, "device") == ["cpu"]
    assert options_of(plan, "precision") == ["fp32", "bf16"]
    [dropped] = plan.dropped
    assert "device=cuda" in dropped
    assert f"  left out: {dropped}" in describe_plan(plan)


def test_an_experiment_searches_what_makes_steps_faster_where_there_is_a_gpu() -> None:
    keys = {"precision", "runtime.cuda_graph", "runtime.optimizer_kernels"}
    on_gpus = plan_study(Composer(["experiment=cnn"]), _GPUS)
    assert keys <= set(on_gpus.space.parameters)
    assert on_gpus.baseline is not None
    for machine, overrides in ((_CPU, []), (_GPUS, ["device=cpu"])):
        plan = plan_study(Composer(["experiment=cnn", *overrides]), machine)
        assert not any(key.startswith(("precision", "runtime")) for key in plan.space.parameters)
        assert plan.dropped[-1].endswith(": for trainings on GPUs")
    asked = plan_study(
        Composer(
            ["experiment=cnn", "runtime.cuda_graph=choice(false)", "precision=choice(default,bf16)"]
        ),
        _CPU,
    )
    assert options_of(asked, "precision") == [
        "default",
        "bf16",
    ], "what the command line asks for is searched anywhere"


@pytest.mark.parametrize(
    ("override", "on", "message"),
    [
        ("device=cuda", _CPU, "needs a GPU, and there is none"),
        ("precision=bf16", _OLD_GPUS, "Tesla V100 has 7.0"),
        ("parallelism.num_workers=8", _GPUS, "there are 4"),
        (
            "cluster.num_gpus=1 parallelism=ddp",
            _GPUS,
            r"it takes 128 CPU and 2 GPU in 2 workers \(pack\), and Ray has 64 CPU and 1 GPU"
            r" \(cluster.num_cpus, cluster.num_gpus\)",
        ),
        (
            "objective=cost",
            _CPU,
            "trains on 'cpu', and cluster.price_per_hour has no price",
        ),
    ],
)
def test_a_baseline_that_cannot_run_here_is_refused(
    override: str, on: Capabilities, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(*override.split(), on=on)


@pytest.mark.parametrize(
    ("overrides", "on", "wanted"),
    [
        ([], _CPU, (1, 0)),
        ([], _GPUS, (16, 1)),
        (["cluster.num_gpus=2", "cluster.num_cpus=8"], _GPUS, (4, 1)),
        (["cluster.address=auto"], _GPUS, (1, 1)),
        (["parallelism.num_workers=4"], _GPUS, (64, 4)),
        (["parallelism.num_workers=4", "cluster.cpus_per_worker=2"], _GPUS, (8, 4)),
    ],
)
def test_a_trial_gets_whole_gpus_and_its_workers_cpus(
    overrides: list[str], on: Capabilities, wanted: tuple[int, int]
) -> None:
    plan = make_plan(*overrides, on=on)
    assert plan.resources(plan.trial) == wanted
    assert any(
        f"resources {wanted[0]} CPU and {wanted[1]} GPU a trial, of {on.num_cpus} CPU" in line
        for line in describe_plan(plan)
    )


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    return make_plan().definition()


@pytest.mark.parametrize(
    ("override", "is_same"),
    [
        ("search.num_trials=9", True),
        ("search=random", True),
        ("confirm=none", True),
        ("seed=4", True),
        ("cluster.cpus_per_worker=2", True),
        ("target.value=0.97", False),
        ("study.seed=1", False),
        ("batch_size=32", False),
        ("batch_size=choice(32,64)", False),
        ("objective.num_trainings=1", False),
        ("search_space=[runtime]", False),
    ],
)
def test_a_study_is_the_same_while_what_it_measures_is(
    override: str, is_same: bool, usual: dict[str, Any]
) -> None:
    assert (make_plan(override).definition() == usual) == is_same


def test_every_option_is_made_once_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text("model.widths: [[8, 16], [-1, 16]]\n")
    plan = make_plan("search_space=[space.yaml]")
    with pytest.raises(SearchSpaceError, match=r"space\.yaml: model\.widths=\[-1, 16\]: model"):
        check_plan(plan, check_training)
