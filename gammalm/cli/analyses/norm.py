"""The regime of every norm: eps next to the variance of what it normalises, and how far eps pulls the output below unit size."""

import argparse

from gammalm.cli.subject import add_measured, batches_of, deliver, describe_subject, load_subject, table

EXAMPLE = "gammalm analyze norm --config lm:size=tiny,gamma=1.25,eps=1e-5 --data data/open-mix"
add_options = add_measured


def run(args: argparse.Namespace) -> int:
    from gammalm.analysis.norms import norm_regime

    loaded = load_subject(args)
    found = norm_regime(loaded.model, loaded.params, loaded.buffers, batches_of(args, loaded))
    result = {"analysis": "norm", **describe_subject(args, loaded), **found.row()}
    rows = [
        (name, layer if len(columns["variance"]) > 1 else "-", *values)
        for name, columns in result["norms"].items()
        for layer, values in enumerate(zip(*columns.values(), strict=True))
    ]
    text = table([("norm", "layer", "variance", "eps/variance", "factor", "tokens below eps"), *rows])
    deliver(args, result, text + f"\neps {found.eps:g}; factor 1: eps does nothing; {found.tokens:,} tokens")
    return 0
