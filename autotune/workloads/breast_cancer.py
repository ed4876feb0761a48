"""scikit-learn's breast-cancer data set: a real table that comes with a dependency."""

import importlib.util
from pathlib import Path

import numpy as np

from autotune.errors import DataError
from autotune.workloads.splits import Splits
from autotune.workloads.tabular import table_splits

CLASSES = ("malignant", "benign")


def breast_cancer(validation_fraction: float, test_fraction: float) -> Splits:
    """569 tumours, 212 of them malignant, described by 30 measurements of their cells.

    Inputs are float32 ``[samples, 30]``, each measurement standardised by the train split's mean and deviation; targets are int64
    ``[samples]``, 0 malignant and 1 benign.

    Source: Street, Wolberg & Mangasarian, "Nuclear feature extraction for breast tumor diagnosis" (1993), as scikit-learn ships it.

    Raises:
        ConfigError: a fraction is out of range.
        DataError: scikit-learn is not installed, or keeps the file elsewhere.
    """
    table = _read_table()
    columns = {f"measurement {number}": values for number, values in enumerate(table[:, :-1].T)}
    return table_splits(
        columns,
        table[:, -1].astype(np.int64),
        CLASSES,
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
        max_categories=0,
    )


def _read_table() -> np.ndarray:
    """Read the measurements and class of each sample, ``[569, 31]``, from the file of ``sklearn.datasets.load_breast_cancer``.

    The file is read without importing scikit-learn, which in every process would take longer than a whole training on the table.
    """
    package = importlib.util.find_spec("sklearn")
    folders = package.submodule_search_locations if package else None
    path = Path(folders[0]) / "datasets" / "data" / "breast_cancer.csv" if folders else None
    if path is None or not path.is_file():
        raise DataError(f"data: breast_cancer: {path or 'scikit-learn'} is not there; accepted is an installed scikit-learn")
    return np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float64)
