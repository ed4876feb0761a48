"""Tunes ``hydra_app.py``, which torchrun starts on two devices."""

import autotune

if __name__ == "__main__":
    result = autotune.tune(
        autotune.command(
            "torchrun --nproc_per_node={devices} hydra_app.py"
            " lr={lr} model.width={model.width} hydra.run.dir={trial_folder}"
        ),
        space={"lr": autotune.log(1e-4, 1e-1), "model.width": [32, 64, 128]},
        target=autotune.target("accuracy", at_least=0.9, max_seconds=120),
        baseline={"lr": 1e-3, "model.width": 64},
        devices=2,
        trials=12,
    )
    print(result.best, result.speed_up)
