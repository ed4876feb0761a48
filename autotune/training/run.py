"""Running one training of either kind, and checking beforehand that it can run."""

import contextlib
import hashlib
import json
import math
import os
import platform
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch

from autotune.collector import collect_as_usual
from autotune.config.schema import TrialConfig
from autotune.measurement import Evaluation
from autotune.training.components import make_components
from autotune.training.data import load_data
from autotune.training.device import cpu_name, pick_device
from autotune.training.first_call import how_called
from autotune.training.loop import train
from autotune.training.parallel.ranks import ALONE, Ranks
from autotune.training.seeding import seed_everything
from autotune.training.set_up import num_steps
from autotune.training.user_training import check_own, train_own
from autotune.training.versions import driver_version, versions


def start_training(
    config: TrialConfig,
    *,
    cap_seconds: float = math.inf,
    num_threads: int = 1,
    score_test: bool = False,
    ranks: Ranks = ALONE,
    **kept: Any,
) -> Generator[Evaluation, Path | None, float | None]:
    """The configuration's training, by autotune's loop or by the user's own: see ``autotune.training.loop.train``.

    What else that takes (``state_folder``, ``paused_folder``, ``weights_path``, ``origin``) is for its own loop only, and so are keeping
    a state and several ranks.
    """
    collect_as_usual()
    if config.training is None:
        return train(config, cap_seconds=cap_seconds, num_threads=num_threads, score_test=score_test, ranks=ranks, **kept)
    return _without_test(train_own(config, cap_seconds=cap_seconds, num_threads=num_threads))


def _without_test(evaluations: Generator[Evaluation, None, None]) -> Generator[Evaluation, Path | None, float | None]:
    with contextlib.closing(evaluations):
        for evaluation in evaluations:
            kept_in = yield evaluation
            assert kept_in is None, "a training function of the user's own keeps no state"
    return None


def check_training(config: TrialConfig) -> None:
    """Make everything a training needs once, on the CPU, and train nothing: mistakes show before a device is taken.

    Raises:
        ConfigError: a component is not allowed, not there, or refuses its values.
        DataError: the data set is missing, unreadable or of the wrong form.
    """
    if config.training is not None:
        check_own(config)
        return
    data = load_data(config)
    seed_everything(config.seed)
    make_components(config, data, torch.device("cpu"), num_steps(config, data))


def fingerprint(config: TrialConfig, num_threads: int) -> Mapping[str, Any]:
    """What a trial's numbers depend on besides its configuration: versions, device, driver, threads, data.

    Of a training function of the user's own ``first_call`` says, for a reader, whether it was warmed up. To be taken in the process
    that trained, after it has.
    """
    device = pick_device(config.device)
    cuda = device.type == "cuda"
    facts = {
        "device": torch.cuda.get_device_name(device) if cuda else cpu_name(),
        "device_type": device.type,
        "driver": driver_version() if cuda else None,
        "num_threads": config.runtime.num_threads or num_threads,
        "num_cpus": os.cpu_count(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "host": platform.node(),
        "data_checksum": load_data(config).checksum if config.training is None else None,
        "versions": versions(),
        **({} if config.training is None else {"first_call": how_called(config)}),
    }
    digest = hashlib.sha256(json.dumps([facts, config.as_dict()], sort_keys=True, default=str).encode())
    return {**facts, "sha256": digest.hexdigest()[:16]}
