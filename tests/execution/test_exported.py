"""What a study's folder holds of its winner besides ``best.yaml``."""

from pathlib import Path

from autotune.config.compose import Composer
from autotune.execution.exported import write_program


def test_a_winner_that_no_script_can_say_leaves_none_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "best.py").write_text("of an earlier end of the study")
    config = Composer(["experiment=prune"]).compose().trial
    reason = write_program(tmp_path, config, "", num_threads=1)
    assert reason == "technique: found Pruning; accepted in a stand-alone script is none"
    assert [*tmp_path.iterdir()] == []


def test_a_winner_of_a_function_leaves_its_arguments_and_its_call(tmp_path: Path) -> None:
    training = "{_target_: my_fit.train, lr: 0.03, widths: [8, 16], name: plain, _warm_up_: false}"
    config = Composer(["experiment=cnn", f"training={training}", "allowed_targets=[my_fit]"]).compose().trial
    assert write_program(tmp_path, config, "", num_threads=1) is None
    assert [path.name for path in tmp_path.iterdir()] == ["best_arguments.yaml"]
    assert (tmp_path / "best_arguments.yaml").read_text() == (
        f"# Best of study {tmp_path.name}: train(lr=0.03, widths=[8, 16], name='plain')\nlr: 0.03\nwidths:\n- 8\n- 16\nname: plain\n"
    )
