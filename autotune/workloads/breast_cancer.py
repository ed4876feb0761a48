"""scikit-learn's breast-cancer data set: a real table that comes with a dependency."""

import numpy as np

from autotune.workloads.splits import Splits, scikit_learn_file, table_splits

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
    table = np.loadtxt(scikit_learn_file("breast_cancer", "breast_cancer.csv"), delimiter=",", skiprows=1, dtype=np.float64)
    columns = {f"measurement {number}": values for number, values in enumerate(table[:, :-1].T)}
    return table_splits(
        columns,
        table[:, -1].astype(np.int64),
        CLASSES,
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
        max_categories=0,
    )
