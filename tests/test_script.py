"""Trainings that are commands: each a process that reports through autotune or by lines of JSON."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import autotune
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Target
from autotune.outcome import Outcome
from autotune.session import TrialInfo, in_trial
from autotune.training.run import check_training, start_training
from tests.patience import wait_until

MakeConfig = Callable[..., TrialConfig]

PRINTING = """
import json, sys, time
print("starting", sys.argv[1:])
for epoch in range(1, 5):
    print(json.dumps({"score": epoch * float(sys.argv[2]), "epoch": epoch, "lr": 1}))
    print("not json {")
print("[1, 2]")
"""
REPORTING = """
import os, sys, autotune
assert os.environ["AUTOTUNE_SEED"] == "7"
with autotune.building():
    pass
for epoch in range(1, 5):
    with autotune.evaluating():
        report = autotune.report if epoch > 1 else autotune.session.current().report  # as callbacks do
        report(epoch * float(sys.argv[2]), epoch=epoch)
"""
FAILING = """
import sys
print("reading", sys.argv[2])
sys.exit("there is no such file")
"""
HANGING = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "autotune-test-child"])
time.sleep(1)
print('{"score": 1.0}')
time.sleep(1000)
"""


@pytest.fixture
def own(trial_config: MakeConfig, tmp_path: Path) -> MakeConfig:
    """Makes configurations that run a script with ``--by 0.25``."""

    def make(script: str, *, value: float = 1e9, command: str = "python {file} --by {by}", **arguments: Any) -> TrialConfig:
        (tmp_path / "script.py").write_text(script)
        return trial_config(
            training={
                "_target_": "autotune.script.run",
                "command": command.replace("{file}", str(tmp_path / "script.py")),
                **({"by": 0.25} | arguments),
            },
            target=Target(metric="score", value=value, mode="max", max_train_seconds=1e9),
            allowed_targets=("autotune.script",),
            seed=7,
        )

    return make


@pytest.mark.parametrize("script", [PRINTING, REPORTING])
def test_a_script_reports(own: MakeConfig, script: str) -> None:
    config = own(script)
    check_training(config)
    evaluations = list(start_training(config))
    assert [(evaluation.metric, evaluation.epoch) for evaluation in evaluations] == [(0.25, 1), (0.5, 2), (0.75, 3), (1.0, 4)]
    assert evaluations[-1].outcome is None
    assert evaluations[-1].metrics == ({"lr": 1} if script == PRINTING else {})


@pytest.mark.parametrize("script", [PRINTING, REPORTING])
def test_it_ends_at_the_target(own: MakeConfig, script: str) -> None:
    evaluations = list(start_training(own(script, value=0.5)))
    assert [evaluation.metric for evaluation in evaluations] == [0.25, 0.5]
    assert evaluations[-1].outcome is Outcome.REACHED


def test_a_script_that_fails_is_told_with_the_end_of_its_output(own: MakeConfig) -> None:
    with pytest.raises(RuntimeError, match=r"^there is no such file \(.* ended with exit code 1\)\nreading 0.25\nthere is no such file$"):
        list(start_training(own(FAILING)))


def test_a_script_that_never_reports_is_one_line(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="ended without one evaluation"):
        list(start_training(own("print('hello')")))


def test_a_command_that_is_not_there_is_one_line(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="training: no-such-program: cannot be started: No such file or directory"):
        list(start_training(own("", command="no-such-program {by}")))


def test_nothing_that_a_script_started_outlives_its_trial(own: MakeConfig) -> None:
    training = start_training(own(HANGING))
    assert next(training).metric == 1

    def started() -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True) if "autotune-test-child" in process.cmdline()]

    wait_until(lambda: len(started()) == 1)
    (child,) = started()
    wait_until(lambda: child.status() == psutil.STATUS_STOPPED)  # it stands still while its report is decided upon
    training.close()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_an_experiment_file_runs_no_command_unless_it_is_allowed(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"training._target_: found 'autotune.script.run'.*allowed_targets=\[autotune"):
        check_training(replace(own(PRINTING), allowed_targets=()))


@pytest.mark.parametrize("template", ["", "python train.py", "python 'train.py {lr}", "python train.py {0}", "python train.py {}"])
def test_a_template_without_names_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="command: "):
        autotune.command(template)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            """python train.py --config '{"lr": {lr}}'""",
            r"braces of the command's own are doubled, such as --config '\{\{\"lr\": \{lr\}\}\}'",
        ),
        ("python train.py {lr} }", "Single '}' encountered in format string; braces of the command's own are doubled"),
        ("torchrun --nproc_per_node=2 train.py {lr}", "found torchrun --nproc_per_node=2, accepted is 1: processes that train together"),
        ("torchrun --standalone --nproc-per-node gpu -m train {lr}", "found torchrun --nproc-per-node=gpu, accepted is 1"),
        ("python -m torch.distributed.run --nnodes 1:4 train.py {lr}", "found torch.distributed.run --nnodes=1:4, accepted is 1"),
        ("accelerate launch --num_processes 2 train.py {lr}", "found accelerate --num_processes=2, accepted is 1"),
        ("mpirun -np 2 python train.py {lr}", "found mpirun -np=2, accepted is 1"),
    ],
)
def test_a_command_that_cannot_be_tuned_is_told_before_it_is(own: MakeConfig, template: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"command: .*{said}") as refused:
        autotune.command(template)
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match=f"command: .*{said}"):
        check_training(own("", command=template, lr=0.1))


@pytest.mark.parametrize(
    "template",
    [
        """python train.py --config '{{"lr": {lr}}}' --out {trial_folder}/{trial_number}""",
        "torchrun --standalone --nproc_per_node=1 train.py {lr} -n 8",
        "accelerate launch --num_processes {n} train.py {lr}",
        "python train.py --launcher torchrun -n {n} {lr}",
    ],
)
def test_a_command_of_one_process_and_doubled_braces_are_accepted(own: MakeConfig, template: str) -> None:
    assert "trial_folder" not in autotune.command(template).__signature__.parameters
    check_training(own("", command=template, lr=0.1, n=1))
    if "{n}" in template:
        with pytest.raises(
            ConfigError, match=r"training\.command: n has no value; accepted in braces are by, lr, trial_folder, trial_number"
        ):
            check_training(own("", command=template, lr=0.1))


def test_a_number_of_processes_that_is_searched_is_refused_before_the_command_starts(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="found torchrun --nproc_per_node=2, accepted is 1"):
        list(start_training(own("", command="torchrun --nproc_per_node={n} {file}", n=2)))


@pytest.mark.parametrize("metric", ['"0.95"', "true", "null", "[0.5]"])
def test_text_and_truth_values_in_a_line_of_json_are_no_metrics(own: MakeConfig, metric: str) -> None:
    with pytest.raises(ConfigError, match=r"reported metric as (str|bool|NoneType|list), accepted is a number"):
        list(start_training(own(f"""print('{{"score": {metric}}}')""")))


def test_text_and_truth_values_in_a_report_of_a_script_are_no_metrics(own: MakeConfig) -> None:
    for value in ("'0.95'", "True"):
        with pytest.raises(RuntimeError, match=r"autotune\.errors\.ConfigError: reported metric as (str|bool), accepted is a number"):
            list(start_training(own(f"import autotune\nautotune.report({value})")))


@pytest.mark.parametrize("name", ["d_loss", "my_metric", "n_epoch", "enter", "leave"])
@pytest.mark.parametrize("by", ["print(json.dumps(values))", "autotune.report(values)"])
def test_a_further_metric_of_a_script_keeps_its_name(own: MakeConfig, name: str, by: str) -> None:
    script = f"import json, autotune\nvalues = {{'score': 0.5, {name!r}: 3}}\n{by}"
    config = own(script)
    target = replace(config.target, value=0.5, constraints={name: {"at_most": 3}})
    (evaluation,) = start_training(replace(config, target=target))
    assert (evaluation.metrics, evaluation.outcome) == ({name: 3}, Outcome.REACHED)


def test_lines_of_json_without_the_metric_are_told(own: MakeConfig) -> None:
    script = """print('{"scores": 0.5, "epoch": 1}')"""
    with pytest.raises(ConfigError, match=r"lines of JSON with scores, epoch, accepted is one with score \(did you mean it by scores\?\)"):
        list(start_training(own(script)))


RANKS = """
import os, subprocess, sys, time
if "WORLD_SIZE" not in os.environ:
    ranks = [subprocess.Popen([sys.executable, __file__], env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
    sys.exit(max(rank.wait() for rank in ranks))
time.sleep(float(os.environ["RANK"]))  # else both may print into one line
for epoch in range(3):
"""


@pytest.mark.parametrize(
    "by", ["""print('{"score": 1}')""", "import autotune; autotune.report(1)", "import autotune; autotune.building().__enter__()"]
)
def test_processes_that_train_together_are_refused_at_their_first_word(own: MakeConfig, by: str) -> None:
    with pytest.raises(ConfigError, match=r"the command started 2 processes that train together \(WORLD_SIZE of process \d+\)"):
        list(start_training(own(f"{RANKS}    {by}\n    time.sleep(60)\n", command="python {file}")))


TWO = """
import subprocess, sys, autotune
other = subprocess.Popen([sys.executable, "-c", "input(); import autotune; autotune.report(1); autotune.report(2)"], stdin=subprocess.PIPE)
"""


def test_a_second_process_that_reports_is_refused_unless_the_first_has_ended(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="two processes of the command report, accepted is one"):
        list(start_training(own(f"{TWO}autotune.report(3); other.communicate(b'go')")))
    evaluations = start_training(own(f"{TWO}other.communicate(b'go'); autotune.report(3)"))
    assert [evaluation.metric for evaluation in evaluations] == [1, 2, 3]


def test_a_report_by_both_ways_is_refused(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"reports by autotune\.report and by lines of JSON, accepted is one of both"):
        list(start_training(own("""import autotune\nprint('{"score": 1}')\nautotune.report(1)""")))


FAILED_UNDER_A_LAUNCHER = """
import sys
print('''[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 3, in <module>
[rank0]: ValueError: the data is empty
Traceback (most recent call last):
  File "torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ''')
print("=" * 60)
print("train.py FAILED" + 40 * "\\n------")
sys.exit(1)
"""


def test_a_failed_script_is_told_by_its_exception_not_by_what_a_launcher_prints_after_it(own: MakeConfig) -> None:
    with pytest.raises(RuntimeError) as failed:
        list(start_training(own(FAILED_UNDER_A_LAUNCHER)))
    assert "ended with exit code 1" in str(failed.value).splitlines()[0]
    assert str(failed.value).splitlines()[-1] == "[rank0]: ValueError: the data is empty"


SLOW_TO_START = """
import sys, time
sys.path.insert(0, {folder!r})
if {by_json}:
    time.sleep(1.5)
    import slow_module
    print('{{"score": 1}}')
else:
    import autotune
    with autotune.building():
        import slow_module
    time.sleep(1.5)
    autotune.report(1)
time.sleep(1.5)
import other_slow_module
print('{{"score": 2}}') if {by_json} else autotune.report(2)
"""


@pytest.mark.parametrize("by_json", [True, False])
def test_start_and_imports_up_to_the_first_report_are_building_and_all_else_is_training(
    own: MakeConfig, tmp_path: Path, by_json: bool
) -> None:
    for name in ("slow_module", "other_slow_module"):
        (tmp_path / f"{name}.py").write_text("import time, helper\ntime.sleep(1.5)")
    (tmp_path / "helper.py").write_text("")
    first, second = start_training(own(SLOW_TO_START.format(folder=str(tmp_path), by_json=by_json)))
    assert first.build_seconds >= 1.4, "an import is building, once, though it may be within building()"
    assert first.train_seconds >= 1.4, "what is neither the start nor an import is training, though nothing is printed meanwhile"
    assert second.build_seconds == first.build_seconds
    assert second.train_seconds - first.train_seconds >= 2.0, "an import after the first report is training"


WITH_HELPERS = """
import multiprocessing, subprocess, sys, time
if __name__ == "__main__":
    time.sleep(1.5)
    helper = multiprocessing.get_context("spawn").Process(target=print)  # imports this file, as a worker that gathers batches does
    helper.start()
    helper.join()
    subprocess.run([sys.executable, "-c", "pass"])
    print('{"score": 1}')
else:
    import slow_module
"""


def test_training_is_not_building_since_another_python_starts_meanwhile(own: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(1.5)")
    (evaluation,) = start_training(own(WITH_HELPERS))
    assert evaluation.train_seconds >= 2.8


LEAVING = """
import subprocess, sys
print('{"score": 1}', flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""


def test_a_process_that_a_script_leaves_behind_does_not_keep_its_trial(own: MakeConfig) -> None:
    assert [evaluation.metric for evaluation in start_training(own(LEAVING))] == [1]


GRANDCHILD = """
import os, time
end, other_end = os.pipe()
if os.fork() == 0:
    child = os.getpid()
    if os.fork() == 0:
        while os.getppid() == child:
            time.sleep(0.01)
        os._exit(0)
    time.sleep(600)
os.close(other_end)
print('{"score": 1}', flush=True)
os.read(end, 1)  # until both have ended
print('{"score": 2}', flush=True)
"""


def test_what_a_script_started_is_not_left_stopped_if_its_parent_ends_meanwhile(own: MakeConfig) -> None:
    before = psutil.Process().children()  # such as what multiprocessing keeps for earlier tests
    evaluations = start_training(own(GRANDCHILD))
    assert next(evaluations).metric == 1
    (script,) = (child for child in psutil.Process().children() if child not in before)
    script.children()[0].kill()
    assert [evaluation.metric for evaluation in evaluations] == [2]


SITE = "import sitecustomize, json; print(json.dumps({'score': sitecustomize.MARK}))"


def test_a_sitecustomize_of_ones_own_is_still_imported(own: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("MARK = 7")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert [evaluation.metric for evaluation in start_training(own(SITE))] == [7]


def test_a_trial_is_told_to_a_command(own: MakeConfig, tmp_path: Path) -> None:
    script = "import sys, json, os, autotune; t = autotune.trial(); print(json.dumps({'score': float(sys.argv[1] == str(t.number) == "
    script += (
        "os.environ['AUTOTUNE_TRIAL_NUMBER'] and sys.argv[2] == str(t.folder) == os.environ['AUTOTUNE_TRIAL_FOLDER']), 'seed': t.seed}))"
    )
    config = own(script, command="python {file} {trial_number} {trial_folder}")
    with in_trial(TrialInfo(number=3, name="trial-3", folder=tmp_path / "trial-3", seed=7)):
        (evaluation,) = start_training(config)
    assert (evaluation.metric, evaluation.metrics) == (1.0, {"seed": 7})
