"""A fixed, fine set of buckets for losses, so that quantiles of any number of tokens are exact to a stated tolerance in bounded memory.

The upper bits of a positive fp32 number are an integer that grows with it: exponent and the first 10 bits of the mantissa cut every
octave into 1,024 buckets, each at most 2^-10 of its lower edge wide. Counts per bucket are exact, the buckets are the same for every
shard, and so the counts of shards simply add up. Shapes: n numbers, K buckets.
"""

import numpy as np

MANTISSA = 10  # bits kept
LOWEST, HIGHEST = -20, 6  # octaves: below 2^-20 nats an fp32 loss, a difference of numbers of 8 to 16, is rounding alone
K = (HIGHEST - LOWEST) * 2**MANTISSA + 2  # and one bucket below, one above

_SHIFT = 23 - MANTISSA
_FIRST = (127 + LOWEST) << MANTISSA  # the upper bits of 2^LOWEST


def bucket_of(values_n: np.ndarray) -> np.ndarray:
    """The bucket, 0 to K-1 as int64 [n], of finite fp32 values; all below 2^-20, negative ones too, share bucket 0."""
    positive_n = np.where(values_n > 0, values_n, 0).astype(np.float32)  # no maximum: it may keep the sign bit of -0.0
    bits_n = positive_n.view(np.uint32)
    return np.clip((bits_n >> _SHIFT).astype(np.int64) - _FIRST + 1, 0, K - 1)


def edges() -> np.ndarray:
    """Lower edges of the buckets and an upper one of the last, float64 [K+1]; the last bucket, from 64 on, is given one octave."""
    bits = (np.arange(K - 1, dtype=np.uint32) + np.uint32(_FIRST)) << np.uint32(_SHIFT)
    inner = bits.view(np.float32).astype(np.float64)
    return np.concatenate([[0.0], inner, [2 * inner[-1]]])


def quantiles(count_K: np.ndarray, parts: int) -> np.ndarray:
    """The parts+1 values that cut the counted numbers into `parts` equal counts, float64; interpolated inside a bucket.

    Each lies in the same bucket as the smallest number that at least its share of all numbers does not exceed (the inverted distribution
    function), so it is off by at most 2^-10 of itself, or 2^-20 below that. Raises ValueError without numbers.
    """
    total = int(count_K.sum())
    if not total:
        raise ValueError("quantiles of no numbers")
    low_K = edges()
    after_K = np.cumsum(count_K)
    # Ranks times `parts`, so that whole numbers are compared. The lowest value belongs to the first bucket that holds any.
    wanted = np.maximum(np.arange(parts + 1) * total, 1)
    at = np.searchsorted(after_K * parts, wanted)
    inside = (np.arange(parts + 1) * total / parts - (after_K - count_K)[at]) / count_K[at]
    return low_K[at] + inside * (low_K[at + 1] - low_K[at])
