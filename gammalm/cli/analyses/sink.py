"""How much attention goes to the first token, of the sequence or the document as packing has it: three definitions, by layer and head."""

import argparse

from gammalm.cli.subject import add_measured, batches_of, deliver, describe_subject, load_subject, table

EXAMPLE = "gammalm analyze sink --checkpoint runs/tiny --batches 8 --json"
add_options = add_measured


def run(args: argparse.Namespace) -> int:
    from gammalm.analysis.sink import THRESHOLD, sink_scores

    loaded = load_subject(args)
    found = sink_scores(loaded.model, loaded.params, loaded.buffers, batches_of(args, loaded))
    layers = found.by_layer()
    heads = {name: getattr(found, f"{name}_LH").tolist() for name in layers}
    result = {"analysis": "sink", **describe_subject(args, loaded), **found.row(), "heads": heads}
    rows = [(layer, *map(float, values)) for layer, values in enumerate(zip(*layers.values(), strict=True))]
    text = table([
        ("layer", "t >= 2", "alpha", f"alpha > {THRESHOLD}", "last query"), *rows,
        ("mean", *result["mean"].values()), ("uniform", *found.uniform.values()),
    ])  # fmt: skip
    text += f"\nweight on the first token of the {found.unit}, mean over heads; {found.units:,} of them, {found.queries:,} queries"
    deliver(args, result, text)
    return 0
