"""Tunes ``train_hugging_face.py``, which torchrun starts on two devices."""

import autotune

if __name__ == "__main__":
    result = autotune.tune(
        autotune.command(
            "torchrun --nproc_per_node={devices} train_hugging_face.py"
            " --lr {lr} --batch-size {batch_size}"
        ),
        space={"lr": autotune.log(1e-4, 1e-1), "batch_size": autotune.power_of_two(16, 128)},
        target=autotune.target("accuracy", at_least=0.9, max_seconds=120),
        baseline={"lr": 1e-3, "batch_size": 32},
        devices=2,
        trials=12,
    )
    print(result.best, result.speed_up)
