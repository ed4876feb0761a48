"""Runs one training, by autotune's loop or the user's own, and checks beforehand that it can
run.
"""

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Collection, Generator, Mapping
from typing import Any

import torch

from autotune.config.schema import TrialConfig
from autotune.measurement import Evaluation
from autotune.training.capabilities import cpu_name, driver_version, versions
from autotune.training.components import make_components
from autotune.training.data import load_data
from autotune.training.device import device_kind, gpu_facts, pick_device, seed_everything
from autotune.training.loop import train
from autotune.training.parallel.ranks import ALONE, Ranks
from autotune.training.set_up import num_steps
from autotune.training.user_training import check_function, train_function

_log = logging.getLogger(__name__)


def start_training(
    config: TrialConfig,
    *,
    cap_seconds: float = math.inf,
    num_threads: int = 1,
    score_test: bool = False,
    ranks: Ranks = ALONE,
    **kept: Any,
) -> Generator[Evaluation | None, bool | None, float | None]:
    """Start the configuration's training, by autotune's loop or by the user's training function.

    See ``autotune.training.loop.train``.

    A training function of the user's own scores no test split, which a line in the log says if it
    is asked for. Its other ranks are told what its ``leader`` decides.
    """
    if config.training is None:
        return train(
            config,
            cap_seconds=cap_seconds,
            num_threads=num_threads,
            score_test=score_test,
            ranks=ranks,
            **kept,
        )
    if score_test:
        name = config.training["_target_"]
        _log.info("training: %s is a function of your own: no test split is scored", name)
    return train_function(config, cap_seconds=cap_seconds, num_threads=num_threads, **kept)


def check_training(config: TrialConfig) -> None:
    """Make everything that a training needs once, on the CPU, without training, so that mistakes
    show before a device is taken.

    Raises:
        ConfigError: a component is not allowed, does not exist, or refuses its values.
        DataError: the data set is missing, unreadable or malformed.
    """
    if config.training is not None:
        check_function(config)
        return
    data = load_data(config)
    seed_everything(config.seed)
    make_components(config, data, torch.device("cpu"), num_steps(config, data))


def fingerprint(
    config: TrialConfig, num_threads: int, started: Collection[int] = ()
) -> Mapping[str, Any]:
    """Facts that a trial's measurements depend on besides its configuration: versions, device,
    driver, threads, data.

    Call this after the training, in the process that trained.

    Args:
        started: ids of the processes that this one has started: a training that is a command
            computes in one of them.
    """
    device = pick_device(config.device)
    is_gpu = device.type == "cuda"
    facts = {
        "device": cpu_name() if device.type == "cpu" else device_kind(device),
        "device_type": device.type,
        "driver": driver_version() if is_gpu else None,
        **(gpu_facts(started) if is_gpu else {}),
        "num_threads": config.runtime.num_threads or num_threads,
        "num_cpus": os.cpu_count(),
        "niceness": os.getpriority(os.PRIO_PROCESS, os.getpid()),
        "host": platform.node(),
        "data_checksum": load_data(config).checksum if config.training is None else None,
        "versions": versions(),
    }
    digest = hashlib.sha256(
        json.dumps([facts, config.as_dict()], sort_keys=True, default=str).encode()
    )
    return {**facts, "sha256": digest.hexdigest()[:16]}
