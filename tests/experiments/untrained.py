"""A workdir of a grid whose cells hold models that were never trained: drawn, then changed as a test wants."""

import json

from gammalm.config import apply_overrides
from gammalm.data.shards import TOKENIZER
from gammalm.experiments.grid import ARMS, Grid, arms, fixed, product, values
from gammalm.experiments.results import append_result, read_study
from gammalm.initializers import init_params
from gammalm.models.decoder import Model, fresh_buffers
from gammalm.training.load import save_model

ALL_ARMS = ARMS | {"eps": {"eps": 1e-12, "gate": "none"}}


def write_untrained(workdir, data, change, names=("plain", "eps", "adjusted"), seeds=2, **overrides):
    """Gives the study of cells of size nano, one per arm, γ .5 and 1, and seed; `change(labels, params)` gives the parameters of each."""
    settings = {f"{key.replace('__', '.')}": value for key, value in overrides.items()}
    cells = product(
        arms("size", nano={"size": "nano"}), arms(**{name: ALL_ARMS[name] for name in names}), values("gamma", [0.5, 1.0]),
        values("seed", range(seeds)), fixed(settings),
    )  # fmt: skip
    grid = Grid("untrained", f"lm:data={data},vocab=600,seq_len=32,steps=2", cells)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "grid.json").write_text(json.dumps(grid.to_json()))
    models = {}
    for cell in grid.cells:
        config = apply_overrides(cell.config(), [("model.dtype", "float32"), ("model.residual_dtype", "float32")])
        model = models.setdefault(cell.labels["arm"], Model(config.model))
        params = init_params(model.specs, config.init, config.seed, d_model=config.model.d_model, n_layers=config.model.n_layers)
        folder = workdir / "cells" / cell.name
        save_model(folder, config, change(cell.labels, params), fresh_buffers(model), data / TOKENIZER)
        row = {"cell": cell.name, "status": "done", "labels": dict(cell.labels), "loss": 5.0, "parameters": 105_000, "tokens": 1024}
        append_result(workdir, row)
    return read_study(workdir)


def pick(rows, quantity, **labels):
    """The rows of a quantity with these labels."""
    return [row for row in rows if row["quantity"] == quantity and labels.items() <= row.items()]


def only(rows, quantity, **labels):
    (row,) = pick(rows, quantity, **labels)
    return row
