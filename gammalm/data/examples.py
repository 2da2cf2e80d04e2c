"""The tables that small nets learn, as rows with classes, and which of them train and which test.

Shape legend: N rows, I inputs of a row, M rows of one split.
"""

import dataclasses

import numpy as np

from gammalm.data.tabular import mnist, wine

TEST_SHARE = 0.2  # of the wines; the digits come with a test set of their own
GOOD = 6  # quality of a good wine


@dataclasses.dataclass(frozen=True)
class Split:
    """Rows that train [M] and test [M], and by what inputs are scaled: (x − mean_I) / scale_I."""

    train_M: np.ndarray
    test_M: np.ndarray
    mean_I: np.ndarray
    scale_I: np.ndarray


@dataclasses.dataclass(frozen=True)
class Examples:
    """x_NI as stored, y_N classes as int32. unit: what a stored 1 is divided by where inputs are not standardized.

    tested: the last rows that many are the test set for every seed; 0: TEST_SHARE of the rows, by seed. together: inputs are standardized
    by one mean and one variance for all (pixels, of which some never differ), not each by its own.
    """

    x_NI: np.ndarray
    y_N: np.ndarray
    unit: float = 1.0
    tested: int = 0
    together: bool = False
    source: str = ""

    def split(self, seed: int, standardize: bool) -> Split:
        """What a run with this seed trains and tests on; scaled by its training rows alone."""
        rows_N = np.arange(len(self.y_N))
        if not self.tested:
            rows_N = np.random.default_rng([seed, 1]).permutation(rows_N)
        tested = self.tested or round(TEST_SHARE * len(rows_N))
        train_M, test_M = rows_N[:-tested], rows_N[-tested:]
        inputs = self.x_NI.shape[1]
        mean_I, scale_I = np.zeros(inputs), np.full(inputs, self.unit)
        if standardize:
            axis = None if self.together else 0
            x_MI = self.x_NI[train_M]
            mean_I = np.broadcast_to(x_MI.mean(axis, dtype=np.float64), inputs)
            scale_I = np.broadcast_to(x_MI.std(axis, dtype=np.float64), inputs)
        return Split(train_M, test_M, mean_I.astype(np.float32), scale_I.astype(np.float32))


def load_examples(name: str, path: str = "", note=lambda line: None) -> Examples:
    """mnist, wine-red (red or white) or wine-quality (of at least GOOD), from `path` or the cache; see `tabular`. Raises DataError."""
    if name == "mnist":
        digits = mnist(path or None, note=note)
        x_NI = np.concatenate([digits.images, digits.test_images]).reshape(-1, 784)
        y_N = np.concatenate([digits.labels, digits.test_labels]).astype(np.int32)
        return Examples(x_NI, y_N, 255.0, len(digits.test_labels), together=True, source=digits.source)
    wines = wine(path or None, note=note)
    y_N = (wines.red if name == "wine-red" else wines.quality >= GOOD).astype(np.int32)
    return Examples(wines.X, y_N, source=wines.source)
