"""How the weights of every matrix lie: standard deviation and the gamma it stands for, kurtosis, share of weights near zero."""

import argparse
import fnmatch
import math

from gammalm.cli.subject import add_output, add_subject, deliver, describe_subject, load_subject, table
from gammalm.errors import ConfigError

EXAMPLE = "gammalm analyze weights --checkpoint runs/tiny:300"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    add_matrices(parser)
    add_output(parser)


def add_matrices(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the choice of matrices."""
    parser.add_argument("--matrices", default="*", metavar="PATTERN", help="whose path matches, for instance 'layers/attn/*'; default: all")


def chosen(pattern: str, specs) -> list[str]:
    """Paths of the matrices that `pattern` matches. Raises ConfigError for none."""
    from gammalm.analysis.weights import matrix_paths

    paths = matrix_paths(specs)
    found = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
    if not found:
        raise ConfigError(f"--matrices {pattern} matches none of {', '.join(paths)}.")
    return found


def by_layer(rows: list[dict], columns: list[str]) -> list[tuple]:
    """One line of a table per path and layer: means over experts, in `columns`; "-" where nothing is known."""
    grouped: dict[tuple, list[dict]] = {}
    for row in rows:
        grouped.setdefault((row["path"], row["layer"]), []).append(row)
    lines = []
    for (path, layer), group in grouped.items():
        known = [[row[name] for row in group if row[name] is not None] for name in columns]
        lines.append((path, "-" if layer is None else layer, *(sum(values) / len(values) if values else "-" for values in known)))
    return lines


def run(args: argparse.Namespace) -> int:
    from gammalm.analysis.weights import SPARSE, weight_rows

    loaded = load_subject(args)
    rows = weight_rows(loaded.model.specs, loaded.params, chosen(args.matrices, loaded.model.specs))
    result = {"analysis": "weights", **describe_subject(args, loaded), "near_zero": SPARSE, "matrices": rows}
    lines = by_layer(rows, ["std", "gamma", "kurtosis", "sparsity"])
    text = table([("matrix", "layer", "std", "gamma", "kurtosis", "near zero"), *lines])
    normal = math.erf(SPARSE / math.sqrt(2))
    text += f"\nnear zero: at most {SPARSE} std, {normal:.1%} of normal weights, whose kurtosis is 3; means over experts"
    deliver(args, result, text)
    return 0
