"""Figures of token gains against plain NumPy over the logits of models that were never trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.analysis.token_text import Piece
from gammalm.errors import ConfigError
from gammalm.experiments.figures import tokens
from gammalm.experiments.figures.catalog import load
from gammalm.training.load import load_model, validation_batches, validation_split

from .untrained import only, pick, write_untrained


def uniform_at_half(labels, params):
    """γ = .5 gives every token the same probability; γ = 1 has large random logits."""
    scale = 0.0 if labels["gamma"] == 0.5 else 30.0
    return params | {"embed": {"table": params["embed"]["table"] * scale}}


@pytest.fixture(scope="module")
def study(tmp_path_factory, corpus):
    return write_untrained(tmp_path_factory.mktemp("tokens") / "w", corpus[0], uniform_at_half, names=("adjusted",))


@pytest.fixture(scope="module")
def drawn(study):
    return {id_: figure.draw(study, "cpu") for id_, figure in load(["fig4a", "fig4b", "fig4c"]).items()}


@pytest.fixture(scope="module")
def reference(study):
    """seed -> (losses of γ = 1, losses of γ = .5) of every validation token, by a softmax over all logits."""
    found: dict = {}
    for run in study.runs:
        loaded = load_model(run.folder)
        eps = loaded.config.model.norm_eps
        logits = jax.jit(lambda params, tokens_BT, model=loaded.model, eps=eps: model.bind(params).logits(tokens_BT, None, eps))
        losses = []
        for batch in validation_batches(validation_split(loaded, 16), 0):
            log_p = jax.nn.log_softmax(logits(loaded.params, jnp.asarray(batch["tokens"][:, :-1])))
            loss_BT = -np.take_along_axis(np.asarray(log_p, np.float64), batch["tokens"][:, 1:, None], axis=-1)[..., 0]
            losses.append(loss_BT[batch["weights"] > 0])
        found.setdefault(run.seed, {})[run.gamma] = np.concatenate(losses)
    return {seed: (of[1.0], of[0.5]) for seed, of in found.items()}


def gain_of(small, standard):
    p, q = np.exp(-small), np.exp(-standard)
    return 2 * (p - q) / (p + q)


def test_shares_and_means(drawn, reference):
    gains = [gain_of(*reference[seed]) for seed in (0, 1)]
    rows = drawn["fig4a"].rows
    assert only(rows, "mean gain")["value"] == pytest.approx(np.mean([g.mean() for g in gains]), abs=1e-4)
    assert only(rows, "median gain")["value"] == pytest.approx(np.mean([np.median(g) for g in gains]), abs=0.02)
    for part, inside in (
        ("improved", lambda g: g > 0.1), ("much worsened", lambda g: g < -0.5), ("unchanged", lambda g: abs(g) <= 0.1),
        ("unchanged or slightly worsened", lambda g: (g >= -0.5) & (g <= 0.1)),
    ):  # fmt: skip
        row = only(rows, "share", part=part)
        assert row["value"] == pytest.approx(np.mean([inside(g).mean() for g in gains]), abs=2e-3) and row["seeds"] == 2
    assert sum(row["value"] for row in pick(rows, "histogram", seed=1)) == pytest.approx(1)


def test_deciles(drawn, reference):
    rows, nats = drawn["fig4b"].rows, {}
    for seed, (small, standard) in reference.items():
        order = np.argsort((small + standard) / 2, kind="stable")
        nats[seed] = [np.mean((standard - small)[part]) for part in np.array_split(order, 10)]
        for decile in (1, 5, 10):
            row = only(rows, "seed nats", seed=seed, decile=decile)
            assert row["value"] == pytest.approx(nats[seed][decile - 1], rel=0.02, abs=0.02)
            assert row["low"] < row["value"] < row["high"]
    assert only(rows, "nats", decile=10)["value"] == pytest.approx(np.mean([of[9] for of in nats.values()]), rel=0.02)
    contrast = np.mean([np.mean(of[5:9]) - of[9] for of in nats.values()])
    assert only(rows, "decile contrast", of="nats", first="10", second="6-9")["value"] == pytest.approx(contrast, rel=0.02, abs=0.02)
    assert only(rows, "peak decile", of="nats")["value"] == np.mean([1 + np.argmax(of) for of in nats.values()])


def test_the_example_is_the_first_sequence_of_its_domain(drawn, reference, study):
    drawing = drawn["fig4c"]
    split = validation_split(load_model(study.runs[0].folder), 16)
    assert split.domains[0] == "code-en" and drawing.rows[0]["domain"] == "code-en"  # no mathematics in this corpus
    small, standard = (of[: split.seq_len] for of in reference[0])  # domains come in order, so it is the first of all
    assert sum(row["small"] for row in drawing.rows) == pytest.approx(small.sum(), rel=1e-4)
    assert sum(row["standard"] for row in drawing.rows) == pytest.approx(standard.sum(), rel=1e-4)
    assert "background:#" in drawing.html and "whatever it shows" in drawing.caption


def test_text_is_laid_out_in_lines():
    placed = tokens.laid_out([Piece(text, 0.0, 0.0, gain) for text, gain in (("abc", 0.1), ("de\n\nf", 0.2), ("\t字", 0.3))], columns=4)
    assert placed == [(0, 0, "abc", 0.1), (0, 3, "d", 0.2), (1, 0, "e", 0.2), (3, 0, "f", 0.2), (3, 1, "  □", 0.3)]


def test_a_seed_with_one_side_is_not_compared(study, tmp_path):
    import dataclasses

    half = dataclasses.replace(study, runs=tuple(run for run in study.runs if (run.gamma, run.seed) != (0.5, 1)))
    assert set(tokens.pairs_of(half)[0]) == {0}
    with pytest.raises(ConfigError, match="no seed has finished"):
        tokens.pairs_of(dataclasses.replace(study, runs=tuple(run for run in study.runs if run.gamma == 1.0)))
