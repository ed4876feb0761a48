import pytest

from benchmarks.clock import measure_pair


@pytest.mark.slow
def test_bare_loop_and_autotune_do_the_same_training(trial_config):
    config = trial_config(
        "model.norm=batch",
        "lr_schedule=cosine",
        "epochs=1",
        "batch_size=128",
        "evaluate_every_samples=500",
        "target.value=2",
    )

    pair = measure_pair(config, bare_first=True)  # raises where they do not

    assert pair.train_seconds > 0
    assert pair.bare_train_seconds > 0
    assert 0 < pair.phase_seconds <= pair.wall_seconds
