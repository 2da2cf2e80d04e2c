"""What each branch adds to the residual stream, by layer, in units of the embedding output e, and how far the stream has moved from it."""

import argparse

from gammalm.cli.subject import add_measured, batches_of, deliver, describe_subject, load_subject, table

EXAMPLE = "gammalm analyze flow --config lm:size=tiny,gamma=0.5 --data data/open-mix"
add_options = add_measured


def run(args: argparse.Namespace) -> int:
    from gammalm.analysis.flow import residual_flow

    loaded = load_subject(args)
    found = residual_flow(loaded.model, loaded.params, loaded.buffers, batches_of(args, loaded))
    result = {"analysis": "flow", **describe_subject(args, loaded), **found.row()}
    rows = [(layer, *values) for layer, values in enumerate(zip(*result["layers"].values(), strict=True))]
    text = table([("layer", "attention/e", "ffn/e", "(h - e)/e"), *rows])
    text += f"\nsize of e {found.embedding:.4g} (root mean square); whole model |h - e|/|e| = {found.ratio:.4g}; {found.tokens:,} tokens"
    deliver(args, result, text)
    return 0
