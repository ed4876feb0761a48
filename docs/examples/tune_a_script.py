"""Tunes ``a_script.py``, each trial a process of its own."""

import autotune

if __name__ == "__main__":
    result = autotune.tune(
        autotune.command("python a_script.py --lr {lr} --batch-size {batch_size}"),
        space={"lr": autotune.log(1e-4, 1), "batch_size": autotune.power_of_two(16, 256)},
        target=autotune.target("accuracy", at_least=0.9, max_seconds=60),
        baseline={"lr": 1e-3, "batch_size": 32},
        trials=12,
    )
    print(result.best, result.speed_up)
