"""Generation: the tokens of full recomputation, draws with the right probabilities that no neighbour changes, limits, refusals.

Stops and streams of text: test_output.py.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.errors import ConfigError, DataError, TrainingError
from gammalm.evaluation import generate as module
from gammalm.evaluation.generate import Generator, Prompt, in_compute_dtype
from gammalm.evaluation.lengths import bucket
from gammalm.evaluation.sampling import Draws, Sampling, draw
from gammalm.models.decoder import Model
from gammalm.sharding.mesh import make_mesh, parameter_shardings
from gammalm.trees import flat

from ..models.reference import random_buffers, random_params, small_config
from ..models.test_cache import MIXED, VARIANTS
from .test_output import END, to_bytes

CONTEXT = 40
LENGTHS = (5, 1, 14, 9)


class Letters:
    """A tokenizer whose last token ends documents."""

    vocab_size, eod_id = 50, END
    to_bytes = staticmethod(to_bytes)


def prompts(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, END, n).tolist() for n in LENGTHS]


class Built:
    def __init__(self, **changes):
        self.config = small_config(**changes)
        self.model = Model(self.config.model)
        self.params, self.buffers = random_params(self.model.specs, scale=1.5), random_buffers(self.model)
        eps = self.config.model.norm_eps
        self._logits = jax.jit(lambda params, tokens: self.model.bind(params, self.buffers).logits(tokens, None, eps))

    def generator(self, **options):
        options = dict(eps=self.config.model.norm_eps, max_length=CONTEXT, rows=4) | options
        return Generator(self.model, options.pop("params", self.params), self.buffers, options.pop("tokenizer", Letters()), **options)

    @functools.cached_property
    def usual(self):
        """The generator of most tests: its programs are compiled once."""
        return self.generator()

    def logits(self, tokens):
        """Of the token after `tokens`, the whole read anew: [V]."""
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(self._logits(self.params, padded))[0, len(tokens) - 1]

    def recomputed(self, prompt, limit):
        """Greedy tokens, each from the whole text before it; and by how much the closest call was won."""
        found, margin = [], np.inf
        while len(found) < limit and END not in found:
            z = self.logits([*prompt, *found])
            second, first = np.sort(z)[-2:]
            margin = min(margin, first - second)
            found.append(int(np.argmax(z)))
        return tuple(found), margin


@pytest.fixture(scope="module")
def built():
    return functools.cache(lambda name: Built(**VARIANTS[name]))


QUICK = ("gqa", MIXED)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in VARIANTS])
def test_greedy_equals_full_recomputation(built, name):
    """Prompts of 1 to 14 tokens."""
    b = built(name)
    found = b.usual.generate([Prompt(prompt, 14) for prompt in prompts()])
    for prompt, got in zip(prompts(), found, strict=True):
        expected, margin = b.recomputed(prompt, 14)
        assert margin > 2e-5, "a near tie that rounding could turn"
        assert got.tokens == expected
        assert got.reason == ("end" if expected[-1] == END else "length") and got.cut == 0


def test_the_texts_are_worth_comparing(built):
    """Not all the same token, not all the same text."""
    expected = [built(name).recomputed(prompts()[0], 14)[0] for name in QUICK]
    assert len(set(expected)) == len(QUICK)
    assert np.mean([len(set(tokens)) for tokens in expected]) > 4


def drawn(seed=3, n=14, **how):
    return [Prompt(p, n, sampling=Sampling(**dict(temperature=0.9, seed=seed) | how)) for p in prompts()]


def test_a_draw_is_its_own(built):
    """Alone, with others, in another order, after others, in chunks of one: the same text. Another seed or number: another."""
    b = built("gqa")
    found = b.usual.generate(drawn())
    numbered = [Prompt(**vars(p) | {"index": i}) for i, p in enumerate(drawn())]
    assert b.usual.generate(numbered[::-1]) == found[::-1]
    alone = b.generator(rows=1)
    assert alone.generate([numbered[3], numbered[0]]) == [found[3], found[0]]
    assert [piece.done for piece in alone.stream(numbered[3:]) if piece.done] == found[3:]
    greedy, few = Prompt(prompts()[1], 14), Prompt(**vars(numbered[2]) | {"sampling": Sampling(0.9, top_k=3, seed=3)})
    beside = b.usual.generate([few, numbered[0], greedy])
    assert beside[1] == found[0]
    assert beside[2].tokens == b.recomputed(greedy.tokens, 14)[0]
    assert b.usual.generate(drawn(seed=4)) != found
    same_prompt = b.usual.generate([Prompt(prompts()[2], 14, sampling=Sampling(1.0))] * 3)
    assert len(set(same_prompt)) == 3


N = 20_000


def frequencies(logits_V, **how):
    """Of each token in N draws, one for each number."""
    kind = Sampling(**how)
    V = len(logits_V)
    full = lambda value, dtype: np.full(N, value, dtype)  # noqa: E731
    draws = Draws(
        full(kind.temperature, np.float32), full(kind.top_k, np.int32), full(kind.top_p, np.float32), full(kind.seed, np.uint32),
        np.arange(N, dtype=np.uint32),
    )  # fmt: skip
    found = jax.jit(draw, static_argnums=3)(np.tile(logits_V, (N, 1)).astype(np.float32), draws, np.zeros(N, np.int32), kind.kind)
    return np.bincount(found, minlength=V) / N


@pytest.mark.parametrize(
    "how, stays",
    [
        (dict(temperature=1.0), range(8)), (dict(temperature=0.5), range(8)), (dict(temperature=1.0, top_k=3), range(3)),
        (dict(temperature=1.0, top_p=0.8), range(4)), (dict(temperature=2.0, top_p=0.8), range(6)),
        (dict(temperature=1.0, top_k=4, top_p=0.8), range(3)), (dict(temperature=1.0, top_k=100), range(8)),
        (dict(temperature=1.0, top_p=1e-6), range(1)), (dict(temperature=1.0, top_k=5), range(6)),
    ],
)  # fmt: skip
def test_draws_have_the_probabilities_of_the_softmax(how, stays):
    """Within four standard errors for each token. Places of the tokens are shuffled, the fifth and the sixth are equally likely.

    At temperature 2 the shares are .24 .20 .14 .11 .09 .09 .07 .06. The token that reaches top_p stays.
    """
    shares = np.array([0.36, 0.27, 0.13, 0.08, 0.05, 0.05, 0.035, 0.025])
    order = np.random.default_rng(0).permutation(8)
    expected = np.zeros(8)
    kept = shares ** (1 / how["temperature"])
    expected[order[list(stays)]] = kept[list(stays)] / kept[list(stays)].sum()
    logits = np.zeros(8)
    logits[order] = np.log(shares) + 5
    found = frequencies(logits, **how)
    assert (found[expected == 0] == 0).all()
    assert (abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / N) + 1e-9).all(), (found, expected)


def test_draws_of_different_places_are_independent():
    """Pairs of draws over four equally likely tokens, of neighbouring numbers, places in a text, seeds: chi-square of 16 cells."""
    zeros, ones = np.zeros((N, 4), np.float32), np.ones(N, np.float32)
    one = jax.jit(draw, static_argnums=3)

    def at(index, place, seed=0):
        draws = Draws(ones, np.zeros(N, np.int32), ones, np.full(N, seed, np.uint32), np.arange(index, index + N, dtype=np.uint32))
        return np.asarray(one(zeros, draws, np.full(N, place, np.int32), "free"))

    for other in (at(1, 0), at(0, 1), at(0, 0, 1)):
        cells = np.bincount(4 * at(0, 0) + other, minlength=16)
        assert ((cells - N / 16) ** 2 / (N / 16)).sum() < 45  # 15 degrees of freedom: once in 10,000


class Played(Generator):
    """Writes what it is told to, whatever the model says: `script` is a text as token ids, for every row."""

    def __init__(self, b, script):
        super().__init__(b.model, b.params, b.buffers, Letters(), eps=1e-3, max_length=CONTEXT)
        self.script = np.array(script, np.int32)

    def _after(self, decoder, x_B1D, state, draws, limits_B, kind):
        z_BV = jax.nn.one_hot(jnp.asarray(self.script)[state.drawn_B], 50)
        says = types.SimpleNamespace(logits_of=lambda _: z_BV[:, None])
        return super()._after(says, x_B1D, state, draws, limits_B, kind)


def test_a_prompt_that_is_too_long(built):
    b = built("gqa")
    long = np.random.default_rng(5).integers(0, END, CONTEXT + 5).tolist()
    with pytest.raises(DataError, match=f"Prompt 1 has {CONTEXT + 5} tokens, and the model reads {CONTEXT}"):
        b.usual.stream([Prompt([1], 4), Prompt(long, 4)])
    with pytest.raises(DataError, match=f"{CONTEXT} new tokens leave no room"):
        b.usual.stream([Prompt([1], CONTEXT, long="left")])
    cut, short = b.usual.generate([Prompt(long, 8, long="left"), Prompt(long[:20], 8, long="left")])
    assert (cut.cut, short.cut) == (len(long) - (CONTEXT - 8), 0)
    assert cut.tokens == b.recomputed(long[cut.cut :], 8)[0]


def test_a_text_ends_where_the_context_does(built):
    """A prompt of n tokens of T gets T - n + 1 more: the last one is not read."""
    b = built("gqa")
    full = np.random.default_rng(6).integers(0, END, CONTEXT).tolist()
    found = b.usual.generate([Prompt(full, 9), Prompt(full[:-3], 9), Prompt(full[:-8], 9)])
    assert [(len(one.tokens), one.reason) for one in found] == [(1, "context"), (4, "context"), (9, "length")]
    for one, n in zip(found, (CONTEXT, CONTEXT - 3, CONTEXT - 8), strict=True):
        assert one.tokens == b.recomputed(full[:n], len(one.tokens))[0]


@pytest.mark.parametrize(
    "make, error, says",
    [
        (lambda: Prompt([], 4), DataError, "Prompt 0 is empty"), (lambda: Prompt([50], 4), DataError, "does not know"),
        (lambda: Prompt([1], 0), ConfigError, "0 new tokens"), (lambda: Prompt([1], 4, stops=["a", ""]), ConfigError, "empty stop"),
        (lambda: Sampling(-1.0), ConfigError, "temperature"), (lambda: Sampling(float("nan")), ConfigError, "temperature"),
        (lambda: Sampling(1e-9), ConfigError, "choose 0"), (lambda: Sampling(1.0, -1), ConfigError, "top-k"),
        (lambda: Sampling(1.0, top_p=0.0), ConfigError, "top-p"), (lambda: Sampling(1.0, seed=2**32), ConfigError, "seed"),
    ],
)  # fmt: skip
def test_refusals(built, make, error, says):
    with pytest.raises(error, match=says):
        built("gqa").usual.stream([make()])


def test_logits_that_are_no_numbers(built):
    b = built("gqa")
    broken = b.generator(params=b.params | {"final_norm": {"gain": np.full_like(b.params["final_norm"]["gain"], np.nan)}})
    broken._start, broken._go_on = b.usual._start, b.usual._go_on  # compiled already
    with pytest.raises(TrainingError, match="prompt 0 are not finite"):
        broken.generate([Prompt(prompts()[2], 14)] * 4)


class Few(Letters):
    """Of fewer tokens than the model."""

    vocab_size = 7


def test_programs_are_compiled_once_for_a_bucket(built):
    """Twelve prompts of 1 to 11 tokens: one program to start, one to go on; longer ones need another of each. No id without a token."""
    generator = built("gqa").generator(rows=8, tokenizer=Few())
    found = generator.generate([Prompt(list(range(n)), 6, sampling=Sampling(5.0)) for n in (1, 3, 9, 10, 6)])
    found += generator.generate([Prompt(list(range(n)), 3, sampling=Sampling(7.0 * (n > 3), seed=n)) for n in (8, 2, 4, 5, 7, 11, 3)])
    assert (generator._start._cache_size(), generator._go_on._cache_size()) == (1, 1)
    assert {token for one in found for token in one.tokens} == set(range(7))
    generator.generate([Prompt(list(range(20)), 6, sampling=Sampling(0.5))] * 5)
    assert (generator._start._cache_size(), generator._go_on._cache_size()) == (2, 2)


def test_buckets():
    assert [bucket(n) for n in (1, 16, 17, 24, 25, 33, 49, 1000, 1025, 2048)] == [16, 16, 24, 24, 32, 48, 64, 1024, 1536, 2048]


@pytest.mark.full
@pytest.mark.parametrize("name, other", [("gqa", "data"), (MIXED, "expert")])
def test_eight_devices_write_the_same(built, name, other):
    """Five prompts on four parts of the batch axes: rows are filled up to eight. Greedy and drawn."""
    b = built(name)
    asked = drawn() + [Prompt([7], 14)]
    mesh = make_mesh({other: 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8])
    params = jax.tree.map(jax.device_put, b.params, parameter_shardings(b.model.specs, mesh))
    many = b.generator(params=params, mesh=mesh, rows=5)
    found = many.generate(asked)
    assert found == b.generator(rows=8).generate(asked)
    assert (many._rows, many._start._cache_size(), many._go_on._cache_size()) == (8, 1, 1)


@pytest.mark.parametrize("residual", ["float32", "bfloat16"])
def test_matrices_are_cast_once(residual):
    """Norms, sinks and routers stay in fp32, the table where the stream is."""
    b = Built(**VARIANTS[MIXED], dtype="bfloat16", residual_dtype=residual)
    for path, a in flat(in_compute_dtype(b.model, b.params)).items():
        stays = path.endswith(("gain", "sink", "router")) or path == "embed/table" and residual == "float32"
        assert str(a.dtype) == ("float32" if stays else "bfloat16"), path


@pytest.mark.full
@pytest.mark.parametrize("residual", ["float32", "bfloat16"])
def test_casting_changes_no_bit(residual):
    b = Built(**VARIANTS[MIXED], dtype="bfloat16", residual_dtype=residual)
    tokens = np.array(prompts()[2:3], np.int32)
    np.testing.assert_array_equal(b._logits(in_compute_dtype(b.model, b.params), tokens), b._logits(b.params, tokens))


def test_a_chunk_is_cut_short_when_all_are_done(built):
    """The device stops at the end token by itself: nothing is written behind it."""
    player = Played(built("gqa"), [3, 4, END] + [5] * 40)
    seen = []
    go_on = player._go_on
    player._go_on = lambda *a, **k: seen.append(go_on(*a, **k)) or seen[-1]
    (found,) = player.generate([Prompt([1], 24)])
    assert found.tokens == (3, 4, END) and len(seen) == 1
    assert np.asarray(seen[0][1])[0].tolist() == [4, END] + [module.NOTHING] * (module.CHUNK - 2)
