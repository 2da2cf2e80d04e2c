"""How far the neurons of every matrix point the same way: stable rank, cosines between rows, clusters of rows."""

import argparse

from gammalm.cli.analyses.weights import add_matrices, by_layer, chosen
from gammalm.cli.subject import add_output, add_subject, deliver, describe_subject, load_subject, table

EXAMPLE = "gammalm analyze condensation --checkpoint runs/tiny --matrices 'layers/attn/*'"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    add_matrices(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    from gammalm.analysis.condensation import ALIKE, condensation_rows

    loaded = load_subject(args)
    specs = loaded.model.specs
    rows = list(condensation_rows(specs, loaded.params, chosen(args.matrices, specs)))
    result = {"analysis": "condensation", **describe_subject(args, loaded), "cluster_cosine": ALIKE, "matrices": rows}
    lines = by_layer(
        rows, ["rows", "stable_rank", "stable_rank_random", "mean_abs_cosine", "mean_abs_cosine_random", "clusters", "largest_cluster"]
    )
    head = ("matrix", "layer", "rows", "stable rank", "(random)", "mean |cos|", "(random)", "clusters", "largest")
    text = table([head, *lines])
    deliver(args, result, text + f"\nclusters: rows whose cosine with the first of them is above {ALIKE}; means over experts")
    return 0
