"""Scores of continuations against the decoder written out in float64, in every layout, cut, merged, and over devices."""

import jax
import numpy as np
import pytest

from gammalm.cli import harness
from gammalm.errors import ConfigError, DataError, TrainingError
from gammalm.evaluation.batching import Request, reads_of
from gammalm.evaluation.scoring import LAYOUTS, Scorer
from gammalm.models.decoder import Model
from gammalm.sharding.mesh import make_mesh, on_mesh, parameter_shardings

from ..models.reference import log_softmax, logits_of, random_buffers, random_params, small_config

LONGEST = 24
KINDS = {
    "gated, grouped": dict(gate="elementwise", qk_norm=True, logit_softcap=5.0),
    "latent, mixture": dict(attention="mla", ffn="moe", softmax_sink="learned", tie_embeddings=False),
}


def build(kind):
    config = small_config(**KINDS[kind]).model
    model = Model(config)
    return model, random_params(model.specs), random_buffers(model)


def questions(seed=0, count=4):
    """Choices after questions, one-token choices, the beginning of another request, and two that are too long."""
    rng = np.random.default_rng(seed)
    draw = lambda n: rng.integers(50, size=n).tolist()  # noqa: E731
    found = []
    for number in range(count):
        question = draw(rng.integers(8, 15))
        found += [Request(question, draw(rng.integers(1, 6))) for _ in range(3 if number else 1)]
        found += [Request(question, [choice]) for choice in draw(3)]
    found += [Request(found[0].context[:-2], found[0].context[-2:]), Request(draw(1), draw(LONGEST)), Request(draw(30), draw(3))]
    order = rng.permutation(len(found))
    return [found[i] for i in order]


def reference(model, params, buffers, requests):
    """(log-probability, greedy) of each, one by one in float64."""
    found = []
    for context, continuation in requests:
        kept = [*context, *continuation][-LONGEST - 1 :]
        logp = log_softmax(logits_of(params, model.config, np.array(kept[:-1]), buffers=buffers))[-len(continuation) :]
        found.append((logp[np.arange(len(continuation)), continuation].sum(), (logp.argmax(-1) == continuation).all()))
    return found


def scorer_of(built, **how):
    model, params, buffers = built
    return Scorer(model, params, buffers, eps=model.config.norm_eps, max_length=LONGEST, **how)


def test_more_tokens_than_learned_positions_are_refused():
    """Not when they are read: those that go on from a cache would take the last position, all of them."""
    c = small_config(style="gpt2", n_kv_heads=4, max_positions=LONGEST - 1).model
    with pytest.raises(ConfigError, match="max_length=24, but model.max_positions=23"):
        scorer_of((Model(c), {}, {}))


def scores_in_order(scorer, requests):
    found = {score.index: score for score in scorer.score(requests)}
    assert sorted(found) == list(range(len(requests)))
    return [(found[i].logprob, found[i].greedy) for i in range(len(requests))]


def with_greedy(built, requests):
    """The same, and for some of them what greedy decoding writes instead."""
    model, params, buffers = built
    for context, continuation in requests[:4]:
        written = list(context)
        for _ in continuation:
            written.append(int(logits_of(params, model.config, np.array(written), buffers=buffers)[-1].argmax()))
        requests = [*requests, Request(context, written[len(context) :])]
    return requests


@pytest.mark.parametrize("kind", ["gated, grouped", pytest.param("latent, mixture", marks=pytest.mark.full)])
@pytest.mark.parametrize("layout", ["packed", pytest.param("plain", marks=pytest.mark.full)])
def test_scores_are_those_of_each_request_by_itself(kind, layout):
    built = build(kind)
    requests = with_greedy(built, questions())
    wanted = reference(*built, requests)
    scorer = scorer_of(built, layout=layout, tokens=200)
    found = scores_in_order(scorer, requests)
    np.testing.assert_allclose([one[0] for one in found], [one[0] for one in wanted], rtol=0, atol=2e-5)
    assert [one[1] for one in found] == [one[1] for one in wanted]
    assert 3 <= sum(one[1] for one in found) < len(found)
    counts = scorer.counts
    assert (counts.requests, counts.cut, counts.cut_tokens) == (len(requests), 1, 33 - LONGEST - 1)
    assert counts.sequences < counts.requests and counts.tokens < counts.computed


def test_the_command_line_knows_the_layouts():
    assert LAYOUTS == harness.LAYOUTS


def test_packing_saves_work():
    requests = questions(count=12)
    scorers = {layout: scorer_of(build("gated, grouped"), layout=layout, tokens=150) for layout in LAYOUTS}
    for scorer in scorers.values():
        scorer._program = lambda *arrays: (np.zeros(arrays[-1].shape),) * 2  # the model is left out
        assert sorted(score.index for score in scorer.score(requests)) == list(range(len(requests)))
    tokens = {layout: scorer.counts.tokens for layout, scorer in scorers.items()}
    assert tokens["plain"] > 1.5 * tokens["packed"]
    assert scorers["plain"].counts.computed > 1.9 * scorers["packed"].counts.computed


@pytest.mark.parametrize("shared", [True, False])
def test_rows_are_as_long_as_costs_least(shared):
    """Long ones read examples before 30 questions few times; where nothing is shared, short ones attend to less."""
    texts = [[*range(20), n] if shared else [n, *range(20)] for n in range(20, 50)]
    reads, _ = reads_of([Request(text, [choice, 2, 3]) for text in texts for choice in (1, 3)], LONGEST)
    [(length, rows)] = scorer_of(build("gated, grouped"))._packed(reads).items()
    assert (length >= 96 and len(rows) < 4) if shared else (length, len(rows)) == (32, 30)


@pytest.mark.parametrize(
    "layout, sizes",
    [
        ("packed", {"data": 2, "fsdp": 2, "tensor": 2}),
        pytest.param("packed", {"fsdp": 4, "context": 2}, marks=pytest.mark.full),
        pytest.param("plain", {"data": 8}, marks=pytest.mark.full),
    ],
)
def test_eight_devices_agree_with_one(layout, sizes):
    """Some rows of every batch are padding: 8 parts, few requests."""
    model, params, buffers = built = build("gated, grouped")
    requests = questions()
    one = scores_in_order(scorer_of(built, layout=layout), requests)
    mesh = make_mesh(sizes)
    with on_mesh(mesh):
        placed = jax.device_put(params, parameter_shardings(model.specs, mesh))
        eight = scores_in_order(scorer_of((model, placed, buffers), layout=layout, mesh=mesh, tokens=50), requests)
    np.testing.assert_allclose([s[0] for s in eight], [s[0] for s in one], rtol=0, atol=2e-5)
    assert [s[1] for s in eight] == [s[1] for s in one]


def test_faults_come_before_work_and_say_which():
    model, params, buffers = built = build("gated, grouped")
    with pytest.raises(DataError, match="Request 1 "):
        list(scorer_of(built).score([Request([1], [2]), Request([], [2])]))
    with pytest.raises(ConfigError, match="packed, plain"):
        scorer_of(built, layout="wide")
    broken = jax.tree.map(lambda a: a * np.float32("nan"), params)
    with pytest.raises(TrainingError, match="request 0 is nan"):
        list(scorer_of((model, broken, buffers)).score([Request([1], [2])]))
    assert list(scorer_of(built).score([])) == []
