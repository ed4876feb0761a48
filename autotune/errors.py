"""What can go wrong, as one tree.

    AutotuneError
    ├── ConfigError              what the user wrote cannot be run
    │   ├── SearchSpaceError     a search space file, or a parameter of it
    │   ├── InvalidTrialError    one suggested point that no training can run
    │   └── TargetNotAllowedError   a ``_target_`` outside the allow-list
    ├── DataError                a data set that is missing, unreadable or of the wrong form
    ├── StudyError               a study that is not there, or is another one's
    └── ExecutionError           the cluster or its workers
        ├── ClusterError         a cluster that does not answer or cannot hold a trial
        └── WorkerError          trials that fail in the user's own code, with its traceback

How a *trial* ends is not an error but data: see ``autotune.measurement.Outcome``. Every message is one line that says where
(file and dotted key), what was found and what is accepted; entry points print it and exit with 2.
"""


class AutotuneError(Exception):
    """Any failure that autotune explains in one line."""


class ConfigError(AutotuneError):
    """A configuration, a command line or a setting that cannot be run."""


class SearchSpaceError(ConfigError):
    """A search space that cannot be read or makes no sense."""


class InvalidTrialError(ConfigError):
    """A suggested point whose configuration cannot be composed or run."""


class TargetNotAllowedError(ConfigError):
    """A ``_target_`` that the allow-list does not let in."""


class DataError(AutotuneError):
    """A data set that is missing, unreadable or of the wrong form."""


class StudyError(AutotuneError):
    """A study that does not exist, or was made for something else."""


class ExecutionError(AutotuneError):
    """Trials cannot be run."""


class ClusterError(ExecutionError):
    """The cluster does not answer, or cannot hold even one trial."""


class WorkerError(ExecutionError):
    """Several trials in a row failed with an error in the code they train.

    ``traceback_text`` is the first one's traceback, as the worker printed it.
    """

    def __init__(self, message: str, traceback_text: str) -> None:
        super().__init__(message)
        self.traceback_text = traceback_text
