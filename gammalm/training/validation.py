"""One pass over the validation split for the runs of a group: token-weighted losses by domain and over all.

Sums are fp32 within a batch, double between batches. As in training, results are read a batch late.
"""

import itertools
import math

import jax
import numpy as np

SUMS = ("nats", "tokens", "bytes")


def batches_of(split, limit: int) -> dict[str, int]:
    """Batches to go through of each domain, at most `limit` (0: all); a domain of single tokens has none: nothing to predict."""
    counts = {domain: min(split.validation_batches(domain), limit or 10**9) for domain in split.domains}
    return {domain: count for domain, count in counts.items() if count}


def run(program, sums_of, split, batches: dict[str, int], size: int, before, after) -> list[dict]:
    """Per run of the program: domain -> summed nats, targets, bytes of text.

    `sums_of`: a device batch of `size` sequences -> its sums (`make_validation`). `before()` is called before each batch, `after(domain)`
    when one is done; either may raise to end it.
    """
    rows = program.rows(size)
    count = program.cells or 1
    tables: list[dict] = [{} for _ in range(count)]
    for domain, number in batches.items():
        sums = [dict.fromkeys(SUMS, 0.0) for _ in range(count)]
        pending = None

        def read(found, sums=sums, domain=domain):
            for name, values in jax.device_get(found).items():
                for total, value in zip(sums, np.atleast_1d(values), strict=True):
                    total[name] += float(value)
            after(domain)

        for batch in itertools.islice(split.validation(domain, rows), number):
            before()
            found = sums_of(program.put([batch] * count, size))
            if pending is not None:
                read(pending)
            pending = found
        read(pending)
        for table, total in zip(tables, sums, strict=True):
            table[domain] = total
    return tables


def summary(table: dict) -> dict:
    """Of one run's table: loss and bits per byte over all domains, and by domain with the number of targets."""
    whole = {name: sum(sums[name] for sums in table.values()) for name in SUMS}
    domains = {domain: {**_losses(sums), "tokens": int(sums["tokens"])} for domain, sums in table.items()}
    return {**_losses(whole), "domains": domains}


def _losses(total: dict) -> dict:
    """Mean loss in nats per token and bits per byte of text."""
    return {
        "loss": total["nats"] / max(total["tokens"], 1),
        "bits_per_byte": total["nats"] / math.log(2) / max(total["bytes"], 1),
    }
