"""What `eval` and `lm-eval` share: a trained model opened for lm-evaluation-harness, over all devices there are."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from gammalm.cli.subject import split_step, tokenizer_of
from gammalm.config import apply_overrides
from gammalm.errors import ConfigError

LAYOUTS = ("packed", "plain")  # those of gammalm.evaluation.scoring, known before it is imported
DTYPES = ("float32", "bfloat16")


@contextlib.contextmanager
def opened_lm(
    checkpoint: str, step: int | None = None, tokenizer: str | None = None, max_length: int | None = None, layout: str = LAYOUTS[0],
    mesh: str | None = None, tokens: int | None = None, rows: int | None = None, dtype: str | None = None,
) -> Iterator:
    """The model of `checkpoint`, WORKDIR[:STEP], as the harness sees it (evaluation.harness.GammaLM), during the block.

    `max_length`: tokens that it reads at most; default: those of a training sequence. `layout`: how sequences share rows. `mesh`: "data=2,
    fsdp=4"; default: every device has the whole model and rows of its own. `tokens` or `rows`: of a batch on each device, or in all.
    `dtype`: that it computes in, one of DTYPES; default: as in training.
    Raises ConfigError, CheckpointError.
    """  # fmt: skip
    import jax

    from gammalm.evaluation.generate import Generator
    from gammalm.evaluation.harness import GammaLM
    from gammalm.evaluation.scoring import TOKENS, Scorer
    from gammalm.models.decoder import Model
    from gammalm.sharding import processes
    from gammalm.sharding.mesh import make_mesh, on_mesh
    from gammalm.training.load import load_model, weights_sha256

    for name, value in (("max_length", max_length), ("tokens", tokens), ("rows", rows)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name}={value}: choose a whole number from 1.")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype}: choose one of {', '.join(DTYPES)}.")
    sizes = mesh_sizes(mesh)
    over = make_mesh(sizes) if mesh or jax.device_count() > 1 else None
    workdir, named = split_step(str(checkpoint))
    loaded = load_model(workdir, named if step is None else step, over)
    # A kernel that was chosen for the type of training may know no other.
    other = {} if dtype is None else {"model.dtype": dtype, "model.residual_dtype": dtype, "model.attention_kernel": "auto"}
    c = apply_overrides(loaded.config, list(other.items()))
    model = Model(c.model)
    how = {"eps": c.model.norm_eps, "max_length": max_length or c.data.seq_len, "mesh": over}
    weights = model, loaded.params, loaded.buffers
    about = {
        "checkpoint": str(workdir), "step": loaded.step, "gamma": c.init.gamma, "preset": c.init.preset, "norm_eps": c.model.norm_eps,
        "gate": c.model.gate, "d_model": c.model.d_model, "packing": c.data.packing, "seq_len": c.data.seq_len,
        "parameters": model.parameter_count, "weights_sha256": weights_sha256(workdir, loaded.step),
        "model_sha256": hashlib.sha256(json.dumps(c.model.to_dict(), sort_keys=True).encode()).hexdigest(),  # its shape, ε, dtypes
        "tokenizer_sha256": loaded.tokenizer_sha256, "max_length": how["max_length"], "dtype": c.model.dtype, "layout": layout,
        "devices": jax.device_count(),
        "mesh": {axis: size for axis, size in over.shape.items() if size > 1} if over else {},
    }  # fmt: skip
    words = tokenizer_of(Path(tokenizer) if tokenizer else None, workdir, loaded)
    with on_mesh(over) if over else contextlib.nullcontext():
        scorer = Scorer(*weights, **how, layout=layout, tokens=tokens or TOKENS, rows=rows)
        generator = Generator(*weights, words, **how, **({"rows": rows} if rows else {}))
        yield GammaLM(scorer, generator, about, quiet=not processes.leads())


def mesh_sizes(text: str | None) -> dict[str, int]:
    """`data=2,fsdp=4` as a dict; None: all devices on `data`. Raises ConfigError for what is no axis or no size."""
    from gammalm.sharding.mesh import AXES

    sizes = {}
    for part in (text or "data=-1").split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES[1:] or not size.removeprefix("-").isdigit() or int(size) < -1 or int(size) == 0:
            raise ConfigError(f"mesh {text!r}: write AXIS=SIZE with commas between, of {', '.join(AXES[1:])}; -1: all that is left.")
        sizes[axis] = int(size)
    return sizes
