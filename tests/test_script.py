"""Trainings that are commands: each a process that reports through autotune or by lines of JSON."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import autotune
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError, DataError, DivergedError, TimedOutError
from autotune.failure import FailureKind, ProcessFailedError
from autotune.files import make_folder
from autotune.measurement import Phase, PhaseClock, Target
from autotune.outcome import Outcome
from autotune.session import TrialInfo, in_trial, is_pausable
from autotune.training.checkpoint import read_state
from autotune.training.run import check_training, start_training
from autotune.training.states import TrainingStates
from tests.support.patience import wait_until

MakeConfig = Callable[..., TrialConfig]

PRINTING = """
import json, sys, time
print("starting", sys.argv[1:])
for epoch in range(1, 5):
    print(json.dumps({"score": epoch * float(sys.argv[2]), "epoch": epoch, "lr": 1}))
    print("not json {")
    print("import time: as Python begins what it says of imports")
print("[1, 2]")
"""
REPORTING = """
import os, sys, autotune
assert os.environ["AUTOTUNE_SEED"] == "7"
with autotune.building():
    pass
for epoch in range(1, 5):
    with autotune.evaluating():
        report = autotune.report if epoch > 1 else autotune.session.current().report
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

    def make(
        script: str,
        *,
        value: float = 1e9,
        command: str = "python {file} --by {by}",
        **arguments: Any,
    ) -> TrialConfig:
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
def test_a_script_reports(own: MakeConfig, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setenv("SLURM_PROCID", "3")  # of a Ray worker that srun has started
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    config = own(script)
    check_training(config)
    evaluations = list(start_training(config))
    assert [(evaluation.metric, evaluation.epoch) for evaluation in evaluations] == [
        (0.25, 1),
        (0.5, 2),
        (0.75, 3),
        (1.0, 4),
    ]
    assert evaluations[-1].outcome is None
    assert evaluations[-1].metrics == ({"lr": 1} if script == PRINTING else {})


@pytest.mark.parametrize("script", [PRINTING, REPORTING])
def test_it_ends_at_the_target(own: MakeConfig, script: str) -> None:
    evaluations = list(start_training(own(script, value=0.5)))
    assert [evaluation.metric for evaluation in evaluations] == [0.25, 0.5]
    assert evaluations[-1].outcome is Outcome.REACHED


def test_a_script_that_fails_is_told_with_the_end_of_its_output(own: MakeConfig) -> None:
    with pytest.raises(
        RuntimeError,
        match=(
            r"^there is no such file \(.* ended with exit code 1\)\nreading 0.25\nthere is no such"
            r" file$"
        ),
    ):
        list(start_training(own(FAILING)))


def test_a_command_that_is_not_there_is_one_line(own: MakeConfig) -> None:
    with pytest.raises(
        ConfigError, match="training: no-such-program: cannot be started: No such file or directory"
    ):
        list(start_training(own("", command="no-such-program {by}")))


def test_nothing_that_a_script_started_outlives_its_trial(own: MakeConfig) -> None:
    training = start_training(own(HANGING))
    assert next(training).metric == 1

    def started() -> list[psutil.Process]:
        return [
            process
            for process in psutil.Process().children(recursive=True)
            if "autotune-test-child" in process.cmdline()
        ]

    wait_until(lambda: len(started()) == 1)
    (child,) = started()
    # it stands still while its report is decided upon
    wait_until(lambda: child.status() == psutil.STATUS_STOPPED)
    training.close()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    "template",
    [
        "",
        "python train.py",
        "python 'train.py {lr}",
        "python train.py {0}",
        "python train.py {lr} }",
    ],
)
def test_a_template_without_names_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="command: ") as refused:
        autotune.command(template)
    assert "\n" not in str(refused.value)


def test_a_script_that_is_not_there_is_refused_before_the_command_starts(own: MakeConfig) -> None:
    config = own(PRINTING, command="python {file} --to there.py --by {by}")
    check_training(config)
    command = "python trian.py --by {by}"
    config = replace(config, training={**(config.training or {}), "command": command})
    with pytest.raises(
        ConfigError, match=r"training.command: trian.py: there is no such file in /"
    ):
        check_training(config)


def test_a_field_without_a_value_is_refused_before_the_command_starts(own: MakeConfig) -> None:
    template = (
        """python -m train --config '{{"lr": {lr}}}' --out {trial_folder}/{trial_number} -n {n}"""
    )
    assert "trial_folder" not in autotune.command(template).__signature__.parameters
    check_training(own("", command=template, lr=0.1, n=1))
    with pytest.raises(
        ConfigError,
        match=(
            r"training\.command: n has no value; names in braces can be by, lr, trial_folder,"
            r" trial_number"
        ),
    ):
        check_training(own("", command=template, lr=0.1))


@pytest.mark.parametrize("metric", ['"0.95"', "true", "null", "[0.5]"])
def test_text_and_truth_values_in_a_line_of_json_are_no_metrics(
    own: MakeConfig, metric: str
) -> None:
    with pytest.raises(
        ConfigError, match=r"reported metric as (str|bool|NoneType|list), which is not a number"
    ):
        list(start_training(own(f"""print('{{"score": {metric}}}')""")))


def test_a_script_that_does_not_report_in_time_is_told_what_it_printed(own: MakeConfig) -> None:
    script = """
import time
for number in range(10_000):
    print('{"scores": %d}' % number)
    time.sleep(0.01)
"""
    config = own(script)
    config = replace(config, target=replace(config.target, max_train_seconds=0.3))
    with pytest.raises(
        TimedOutError,
        match=(
            r"no evaluation in time: the command printed lines of JSON with scores; print a line of"
            r" JSON with score \(did you mean it by scores\?\)"
        ),
    ):
        list(start_training(config))


def test_programs_of_an_environment_that_is_not_activated_are_found(
    own: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    script = """
import pathlib, shutil, sys
beside = shutil.which("torchrun") == str(pathlib.Path(sys.executable).parent / "torchrun")
print('{"score": %d}' % beside)
"""
    (evaluation,) = start_training(own(script))
    assert evaluation.metric == 1


def test_a_script_for_torchrun_alone_is_told_so(own: MakeConfig) -> None:
    script = "import torch\ntorch.distributed.init_process_group('gloo')"
    with pytest.raises(RuntimeError, match="RANK expected, but not set; start it by torchrun"):
        list(start_training(own(script)))


@pytest.mark.parametrize("by", ["print(json.dumps(values))", "autotune.report(values)"])
def test_a_further_metric_of_a_script_keeps_its_name(own: MakeConfig, by: str) -> None:
    values = {"score": 0.5, "enter": 3, "d_loss": 4, "metrics": 5}
    config = own(f"import json, autotune\nvalues = {values}\n{by}")
    target = replace(config.target, value=0.5, constraints={"enter": {"at_most": 3}})
    (evaluation,) = start_training(replace(config, target=target))
    assert evaluation.metrics == {"enter": 3, "d_loss": 4, "metrics": 5}
    assert evaluation.outcome is Outcome.REACHED


def test_what_is_no_number_in_a_line_of_json_is_said_and_not_tracked(own: MakeConfig) -> None:
    script = """print('{"score": 0.5, "note": "warm", "f1": 0.2}')"""
    with pytest.warns(UserWarning, match="note is not tracked: str is no number"):
        (evaluation,) = start_training(own(script))
    assert evaluation.metrics == {"f1": 0.2}


def test_a_field_may_have_a_hyphen(own: MakeConfig) -> None:
    template = "python {file} --by {weight-decay}"
    (*_, last) = start_training(own(PRINTING, command=template, **{"weight-decay": 0.5}))
    assert last.metric == 2


TWO = """
import subprocess, sys, autotune
code = "input(); import autotune; autotune.report(1); autotune.report(2)"
other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
"""
SLOW_TO_IMPORT = """
import sys, time
sys.path.insert(0, {folder!r})
import slow_module
import autotune
with autotune.building():
    import other_slow_module
time.sleep(0.6)
autotune.report(1)
"""


def test_imports_up_to_the_first_report_are_building_and_all_else_is_training(
    own: MakeConfig, tmp_path: Path
) -> None:
    for name in ("slow_module", "other_slow_module"):
        (tmp_path / f"{name}.py").write_text("import time\ntime.sleep(0.6)")
    (evaluation,) = start_training(own(SLOW_TO_IMPORT.format(folder=str(tmp_path))))
    assert evaluation.build_seconds >= 1.1
    assert evaluation.train_seconds >= 0.5


def test_reports_from_two_processes_or_in_two_ways_are_refused(own: MakeConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"reports twice, (by autotune.report in process \d+( and )?){2};"
    ):
        list(start_training(own(f"{TWO}autotune.report(3); other.communicate(b'go')")))
    with pytest.raises(ConfigError, match="by lines of JSON and by autotune"):
        list(start_training(own("""import autotune\nprint('{"score": 1}')\nautotune.report(1)""")))
    evaluations = start_training(own(f"{TWO}other.communicate(b'go'); autotune.report(3)"))
    assert [evaluation.metric for evaluation in evaluations] == [1, 2, 3]


OF_EVERY_RANK = """
import os, subprocess, sys, time
if "RANK" not in os.environ:
    ranks = [{**os.environ, "RANK": rank, "WORLD_SIZE": "2"} for rank in "01"]
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=rank) for rank in ranks]
    sys.exit(max(rank.wait() for rank in ranks))
for epoch in range(1, 4):
    print('{"score": %s}' % {"0": epoch, "1": sys.argv[2]}[os.environ["RANK"]])
    time.sleep(0.1)
"""


def test_lines_of_json_of_other_ranks_are_no_evaluations(own: MakeConfig) -> None:
    config = own(OF_EVERY_RANK, by=0.5)
    config = replace(config, parallelism={**config.parallelism, "num_workers": 2})
    with pytest.warns(
        UserWarning, match=r"process \d+, whose RANK is 1, prints lines of JSON, too"
    ):
        evaluations = list(start_training(config))
    assert [evaluation.metric for evaluation in evaluations] == [1, 2, 3]
    config = replace(config, training={**(config.training or {}), "by": "NaN"})
    with (
        pytest.warns(UserWarning, match="RANK is 1"),
        pytest.raises(DivergedError, match="rank 1 reported score=nan"),
    ):
        list(start_training(config))


HANDLING = """
import json, pathlib, signal, sys, time
state = pathlib.Path(sys.argv[4], "state.json")
signal.signal(signal.SIGTERM, lambda *_: HANDLER)
epoch = json.loads(state.read_text()) if state.exists() else 0
last = 4 if epoch else 1000  # a busy machine reads late what this one prints
while epoch < last and not sys.argv[5:]:
    time.sleep(0.05)
    epoch += 1
    print(json.dumps({"score": epoch / 4, "epoch": epoch}))
"""


@pytest.mark.parametrize(
    ("handler", "is_saved", "error"),
    [
        ("(state.write_text(str(epoch)), time.sleep(3), sys.exit(3))", True, None),
        ("(state.write_text(str(epoch)), sys.argv.append('to the end'))", True, None),
        ("(state.with_name('log').touch(), sys.exit())", False, None),
        ("sys.exit()", False, "saved nothing in its folder"),
    ],
)
def test_a_script_that_handles_sigterm_is_paused_by_it(
    own: MakeConfig, tmp_path: Path, handler: str, is_saved: bool, error: str | None
) -> None:
    config = own(
        HANDLING.replace("HANDLER", handler),
        command="sh -c 'python {file} --by {by} --to {trial_folder}; exit $?'",
    )
    folder, paused = make_folder(tmp_path / "trials" / "trial-3"), make_folder(tmp_path / "paused")

    def curve(num_epochs: int) -> list[tuple[float, float]]:
        """The first evaluations, after which the training is paused if it can be."""
        found = []
        with (
            in_trial(TrialInfo(number=3, name="trial-3", folder=folder, seed=7)),
            contextlib.closing(start_training(config, states=TrainingStates(paused))) as training,
        ):
            for evaluation in training:
                found.append((evaluation.epoch, evaluation.metric))
                if len(found) == num_epochs:
                    assert is_pausable()
                    training.send(True)
                    break
        return found

    with pytest.raises(DataError, match=error) if error else contextlib.nullcontext():
        begun = curve(2)
        assert begun == [(1, 0.25), (2, 0.5)]
    if is_saved:
        state = read_state(max(paused.iterdir(), key=lambda path: int(path.name)))
        # what still ends after it has saved does not train
        saved = PhaseClock()
        saved.restore(state["clock"])
        assert saved.seconds(Phase.TRAIN) - state["curve"][1]["train_seconds"] < 3
        assert begun + curve(9) == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1)]
        return
    # only once, since no trial of this command can go on
    evaluations = start_training(config, states=TrainingStates(paused))
    with in_trial(TrialInfo(number=3, name="trial-3", folder=folder, seed=7)):
        assert next(evaluations).epoch == 1
        assert not is_pausable()
        evaluations.close()


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_a_script_saves_where_it_is_ended_lacks_no_evaluation(
    own: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    monkeypatch.setattr("autotune.script.is_owner_gone", lambda: is_gone)
    config = own(
        HANDLING.replace("HANDLER", "(state.write_text(str(epoch)), sys.exit())"),
        command="python {file} --by {by} --to {trial_folder}",
    )
    folder, paused = make_folder(tmp_path / "trials" / "trial-3"), make_folder(tmp_path / "paused")
    for num_epochs in (2, 4):
        states = TrainingStates(paused / "trial-3", every_seconds=0.0)
        with (
            in_trial(TrialInfo(number=3, name="trial-3", folder=folder, seed=7)),
            contextlib.closing(start_training(config, states=states)) as training,
        ):
            assert next(training).epoch == (3 if num_epochs == 4 and not is_gone else 1)
            while states.curve.last is None or states.curve.last.epoch < num_epochs:
                next(training)
        assert (folder / "state.json").exists() is not is_gone
        assert [each.epoch for each in states.curve.numbered.values()] == [1, 2, 3, 4][:num_epochs]


def test_a_script_that_dies_while_it_saves_is_not_waited_for(
    own: MakeConfig, tmp_path: Path
) -> None:
    script = """
import os, autotune
autotune.checkpoint().save({"epoch": 1}, write_files=lambda folder: os._exit(1))
autotune.report(metric=0.5, epoch=1)
"""
    states = TrainingStates(make_folder(tmp_path / "states") / "trial-3")
    training = start_training(own(script), states=states)
    next(training)
    training.send(True)
    assert states.fault is not None
    assert states.fault.endswith("cannot be written: the script has ended")
    with pytest.raises(RuntimeError, match="ended with exit code 1"):
        next(training)


def test_lines_of_json_without_the_metric_are_told(own: MakeConfig) -> None:
    script = """print('{"scores": 0.5, "epoch": 1}')"""
    with pytest.raises(
        ConfigError,
        match=(
            r"lines of JSON with scores, epoch; print a line of JSON with score \(did you mean it"
            r" by scores\?\)"
        ),
    ):
        list(start_training(own(script)))


RANKS = """
import os, subprocess, sys, time
if "WORLD_SIZE" not in os.environ:
    both = {**os.environ, "WORLD_SIZE": "2"}
    me = [sys.executable, __file__]
    ranks = [subprocess.Popen(me, env={**both, "RANK": rank}) for rank in "01"]
    sys.exit(max(rank.wait() for rank in ranks))
time.sleep(float(os.environ["RANK"]))  # else both may print into one line
for epoch in range(3):
"""


@pytest.mark.parametrize(
    "by",
    [
        """print('{"score": 1}')""",
        "import autotune; autotune.report(1)",
        "import autotune; autotune.building().__enter__()",
    ],
)
def test_more_processes_than_devices_are_refused_at_their_first_word(
    own: MakeConfig, by: str
) -> None:
    with pytest.raises(
        ConfigError,
        match="the command started 2 processes that train together, in a trial of 1; tune it with",
    ):
        list(start_training(own(f"{RANKS}    {by}\n    time.sleep(60)\n", command="python {file}")))


def test_trials_side_by_side_have_ports_of_their_own(
    own: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    script = """import os\nprint(f'{{"score": {os.environ["MASTER_PORT"]}}}')"""
    trainings = [start_training(own(script)) for _ in range(2)]
    assert len({29500, *(next(training).metric for training in trainings)}) == 3


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


def test_a_failed_script_is_told_by_its_exception_not_by_what_a_launcher_prints_after_it(
    own: MakeConfig,
) -> None:
    with pytest.raises(RuntimeError) as failed:
        list(start_training(own(FAILED_UNDER_A_LAUNCHER)))
    assert "ended with exit code 1" in str(failed.value).splitlines()[0]
    assert str(failed.value).splitlines()[-1] == "[rank0]: ValueError: the data is empty"


KILLED = """
import os
print({said!r})
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("command", ["python {file}", "sh -c 'python {file}; exit $?'"])
@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("reading", "was ended by SIGKILL"),
        # Lightning kills the process that it began in, where another one has failed
        ("Traceback (most recent call last):\nValueError: it is empty", "ValueError: it is empty"),
    ],
)
def test_a_script_that_was_killed_is_told_as_such_unless_an_error_was_the_cause(
    own: MakeConfig, command: str, said: str, told: str
) -> None:
    with pytest.raises(RuntimeError, match=told):
        list(start_training(own(KILLED.format(said=said), command=command)))


_GLOO = """Traceback (most recent call last):
RuntimeError: [gloo/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. GLHF!
"""
_OF_TORCHRUN = """{error}torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : {others} (pid: 10)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {first} (pid: 11)
=======
"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            _GLOO,
            "a process of the command is gone: another one lost its connection to it",
        ),
        (
            _GLOO + "mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9.",
            "rank 1 of the command was ended by SIGKILL",
        ),
        (
            _OF_TORCHRUN.format(error=_GLOO, others=-15, first=-9),
            "rank 1 of the command was ended by SIGKILL",
        ),
        (
            "ProcessExitedException: process 1 terminated with signal SIGKILL",
            "rank 1 of the command was ended by SIGKILL",
        ),
        (  # torchrun ended the one that did not end
            _OF_TORCHRUN.format(error=_GLOO + "KeyError: 'lr'\n", others=-9, first=1),
            "KeyError: 'lr' (",
        ),
        (
            _OF_TORCHRUN.format(
                error="Traceback (most recent call last):\n",
                others=-15,
                first="-11 (pid: 11)\n  traceback : Signal 11 (SIGSEGV) received by PID 11",
            ),
            "rank 1 of the command was ended by SIGSEGV (",
        ),
    ],
)
def test_a_rank_that_is_gone_is_told_in_one_line_and_is_lost(
    own: MakeConfig, said: str, told: str
) -> None:
    with pytest.raises(ProcessFailedError) as failed:
        list(start_training(own(f"print({said!r})\nraise SystemExit(1)")))
    assert str(failed.value).startswith(told)
    assert failed.value.kind is (None if told.endswith("(") else FailureKind.LOST)
    assert failed.value.is_consequence is told.startswith("a process of the command is gone")


def test_a_report_of_a_data_loaders_worker_is_refused(own: MakeConfig) -> None:
    script = """
import autotune, torch.utils.data as data
class Reporting(data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, index): autotune.report(0.5)
next(iter(data.DataLoader(Reporting(), num_workers=1)))
"""
    with pytest.raises(RuntimeError, match=r"was called in process \d+, which the training in"):
        list(start_training(own(script)))


HYDRA_APP = """
import hydra
@hydra.main(version_base=None, config_path=".")
def main(config): ...
main()
"""


def test_a_mistake_in_a_hydra_apps_overrides_is_told_in_its_first_line(own: MakeConfig) -> None:
    with pytest.raises(RuntimeError, match=r"^[\w.]+Exception: Could not override 'rate'"):
        list(start_training(own(HYDRA_APP, command="python {file} rate={by}")))


def test_a_command_without_a_report_is_told_how_to_report(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="reported nothing; print a line of JSON with score"):
        list(start_training(own("print('done')")))


LEAVING = """
import subprocess, sys
print('{"score": 1}', flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""


def test_a_process_that_a_script_leaves_behind_does_not_keep_its_trial(own: MakeConfig) -> None:
    assert [evaluation.metric for evaluation in start_training(own(LEAVING))] == [1]


FROM_FILES = """
import json, sys, yaml
values = yaml.safe_load(open(sys.argv[1]))
assert values == json.load(open(sys.argv[2])) == {"lr": 1e-05, "model": {"width": 3}, "by": 1}
score = values["model"]["width"] * float(sys.argv[3])
print(json.dumps({"score": score, "width": int(sys.argv[4])}))
"""


def test_keys_may_lie_beneath_others_and_in_files(own: MakeConfig, tmp_path: Path) -> None:
    info = TrialInfo(number=7, name="trial-7", folder=tmp_path, seed=7)
    command = "python {file} {config_file} {config_json} {lr} {model.width}"
    config = own(FROM_FILES, command=command, lr=1e-05, model={"width": 3}, by=1)
    with in_trial(info):
        (evaluation,) = start_training(config)
    assert evaluation.metric == pytest.approx(3e-05)
    assert autotune.command("a --config {config_file}").command_keys is None
    assert autotune.command("a {model.width}").command_keys == ["model.width"]


def test_a_trial_is_told_to_a_command(own: MakeConfig, tmp_path: Path) -> None:
    script = (
        "import sys, json, os, autotune; t = autotune.trial(); print(json.dumps({'score':"
        " float(sys.argv[1] == str(t.number) == "
    )
    script += (
        "os.environ['AUTOTUNE_TRIAL_NUMBER'] and sys.argv[2] == str(t.folder) =="
        " os.environ['AUTOTUNE_TRIAL_FOLDER']), 'seed': t.seed}))"
    )
    config = own(script, command="python {file} {trial_number} {trial_folder}")
    with in_trial(TrialInfo(number=3, name="trial-3", folder=tmp_path / "trial-3", seed=7)):
        (evaluation,) = start_training(config)
    assert (evaluation.metric, evaluation.metrics) == (1.0, {"seed": 7})
