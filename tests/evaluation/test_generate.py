"""Generation: the tokens of full recomputation, draws with the right probabilities that no neighbour changes, limits, refusals.

Stops and streams of text: test_output.py. In the default tier one model writes, with two programs; the others are in the full tier.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.errors import ConfigError, DataError, TrainingError
from gammalm.evaluation.generate import NOTHING, Generator, Prompt, in_compute_dtype
from gammalm.evaluation.lengths import bucket
from gammalm.evaluation.sampling import Draws, Sampling, draw, first_of_largest
from gammalm.models.decoder import Model
from gammalm.sharding.mesh import make_mesh, parameter_shardings
from gammalm.trees import flat

from ..models.reference import random_buffers, random_params, small_config
from ..models.test_cache import MIXED, VARIANTS
from .test_output import TABLE

CONTEXT = 24
LENGTHS = (5, 1, 14, 9)
NEW = 11
ROWS = 8
KNOWN = 50  # tokens of the tokenizer, fewer than those of the model


class Letters:
    """A tokenizer one of whose letters ends documents."""

    vocab_size = KNOWN

    def __init__(self, eod_id):
        self.eod_id = eod_id

    def to_bytes(self, ids):
        return b"".join(b"" if i == self.eod_id else TABLE[i] for i in ids)


def prompts(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, KNOWN, n).tolist() for n in LENGTHS]


# Fills a batch up and needs the longest rows, the most slots and every kind of draw: so all batches are of one shape.
BESIDE = Prompt(list(range(CONTEXT)), NEW, sampling=Sampling(1.0, top_k=9, top_p=0.9))


class Built:
    def __init__(self, **changes):
        self.config = small_config(vocab_size=KNOWN + 10, **changes)
        self.model = Model(self.config.model)
        self.params, self.buffers = random_params(self.model.specs, scale=1.5), random_buffers(self.model)
        eps = self.config.model.norm_eps
        self._logits = jax.jit(lambda params, tokens: self.model.bind(params, self.buffers).logits(tokens, None, eps))
        self.letters = Letters(None)
        self.letters = Letters(self.recomputed(prompts()[0], NEW)[0][4])  # so that a text ends by itself

    def generator(self, **options):
        options = dict(eps=self.config.model.norm_eps, max_length=CONTEXT, rows=ROWS) | options
        return Generator(self.model, options.pop("params", self.params), self.buffers, self.letters, **options)

    @functools.cached_property
    def usual(self):
        """The generator of most tests: its programs are compiled once."""
        return self.generator()

    def write(self, asked, generator=None):
        """What `asked` got, in a batch of the usual shape."""
        return (generator or self.usual).generate([*asked, *[BESIDE] * (ROWS - len(asked))])[: len(asked)]

    def logits(self, tokens):
        """Of the tokens that the tokenizer knows, after `tokens`, the whole read anew."""
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(self._logits(self.params, padded))[0, len(tokens) - 1, :KNOWN]

    def recomputed(self, prompt, limit):
        """Greedy tokens, each from the whole text before it; and by how much the closest call was won."""
        found, margin = [], np.inf
        while len(found) < limit and self.letters.eod_id not in found:
            z = self.logits([*prompt, *found])
            second, first = np.sort(z)[-2:]
            margin = min(margin, first - second)
            found.append(int(np.argmax(z)))
        return tuple(found), margin


@pytest.fixture(scope="module")
def built():
    return functools.cache(lambda name: Built(**VARIANTS[name]))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "gqa" else pytest.mark.full) for name in VARIANTS])
def test_greedy_equals_full_recomputation(built, name):
    """Prompts of 1 to 14 tokens, beside others that are drawn. One text ends by itself."""
    b = built(name)
    found = b.write([Prompt(prompt, NEW) for prompt in prompts()])
    for prompt, got in zip(prompts(), found, strict=True):
        expected, margin = b.recomputed(prompt, NEW)
        assert margin > 2e-5, "a near tie that rounding could turn"
        assert got.tokens == expected
        assert got.reason == ("end" if expected[-1] == b.letters.eod_id else "length") and got.cut == 0
    few = 1 if name == "fixup" else 5  # without norms two tokens outdo the rest
    assert found[0].reason == "end" and len({token for one in found for token in one.tokens}) > few


def drawn(seed=3, n=NEW, **how):
    return [Prompt(p, n, sampling=Sampling(**dict(temperature=0.9, seed=seed) | how)) for p in prompts()]


def numbered(asked):
    return [Prompt(**vars(prompt) | {"index": i}) for i, prompt in enumerate(asked)]


def test_a_draw_is_its_own(built):
    """With others, in another order, in chunks of one: the same text. Another seed or number: another. Nothing is compiled for it."""
    b = built("gqa")
    found = b.write(drawn())
    three, two, one, zero = b.write(numbered(drawn())[::-1])
    assert [zero, one, two, three] == found
    one_by_one = b.usual.stream([numbered(drawn())[3], *[BESIDE] * (ROWS - 1)])
    assert next(piece.done for piece in one_by_one if piece.done and piece.index == 0) == found[3]
    assert b.write(drawn(seed=4)) != found
    assert len(set(b.write([Prompt(prompts()[2], NEW, sampling=Sampling(1.0))] * 3))) == 3
    assert max(token for one in b.write(drawn(temperature=50.0)) for token in one.tokens) < KNOWN
    assert (b.usual._start._cache_size(), b.usual._go_on._cache_size()) == (1, 1)


@pytest.mark.full
def test_a_draw_is_its_own_in_batches_of_other_sizes(built):
    """Alone, and with programs that draw no more than they have to."""
    b = built("gqa")
    alone = b.generator(rows=1)
    asked = numbered(drawn())
    assert alone.generate([asked[3], asked[0]]) == [b.write(drawn())[i] for i in (3, 0)]
    assert alone.generate([Prompt(prompts()[1], NEW)])[0].tokens == b.recomputed(prompts()[1], NEW)[0]
    assert b.generator(rows=2).generate(asked) == b.write(drawn())


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


def test_the_likeliest_token_is_that_of_argmax():
    """In a loop too, where the compiler treats it otherwise; the first of several that are equally likely, and of -inf alone."""
    x = np.random.default_rng(3).integers(-3, 3, (64, 9)).astype(np.float32)  # three of nine share the largest, in the mean
    x[0], x[1] = -np.inf, 0
    inside = jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, carry: first_of_largest(x + 0 * carry[0]), jnp.zeros(64, jnp.int32)))
    assert (np.asarray(first_of_largest(x)) == np.argmax(x, axis=-1)).all()
    assert (np.asarray(inside(x)) == np.argmax(x, axis=-1)).all()


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


def test_nothing_follows_the_end_of_a_row(built):
    """The device stops by itself: at the token that ends a document, and at the limit."""
    b, seen = built("gqa"), []
    generator = b.generator()
    generator._start = b.usual._start
    generator._go_on = lambda *a, **k: seen.append(b.usual._go_on(*a, **k)) or seen[-1]
    found = b.write([Prompt(prompts()[0], NEW), Prompt(prompts()[2], 3)], generator)
    assert len(seen) == 1
    for row, one in enumerate(found):
        rest = one.tokens[1:]
        assert np.asarray(seen[0][1])[row].tolist() == [*rest, *[NOTHING] * (16 - len(rest))]


def test_a_prompt_that_is_too_long(built):
    b = built("gqa")
    long = np.random.default_rng(5).integers(0, KNOWN, CONTEXT + 5).tolist()
    with pytest.raises(DataError, match=f"Prompt 1 has {CONTEXT + 5} tokens, and the model reads {CONTEXT}"):
        b.usual.stream([Prompt([1], 4), Prompt(long, 4)])
    with pytest.raises(DataError, match=f"{CONTEXT} new tokens leave no room"):
        b.usual.stream([Prompt([1], CONTEXT, long="left")])
    cut, short = b.write([Prompt(long, 8, long="left"), Prompt(long[:9], 8, long="left")])
    assert (cut.cut, short.cut) == (len(long) - (CONTEXT - 8), 0)
    assert cut.tokens == b.recomputed(long[cut.cut :], 8)[0]


def test_a_text_ends_where_the_context_does(built):
    """A prompt of n tokens of T gets T - n + 1 more: the last one is not read."""
    b = built("gqa")
    full = np.random.default_rng(8).integers(0, KNOWN, CONTEXT).tolist()
    found = b.write([Prompt(full, 9), Prompt(full[:-3], 9), Prompt(full[:-8], 9)])
    assert [(len(one.tokens), one.reason) for one in found] == [(1, "context"), (4, "context"), (9, "length")]
    for one, n in zip(found, (CONTEXT, CONTEXT - 3, CONTEXT - 8), strict=True):
        assert one.tokens == b.recomputed(full[:n], len(one.tokens))[0]


@pytest.mark.parametrize(
    "make, error, says",
    [
        (lambda: Prompt([], 4), DataError, "Prompt 0 is empty"), (lambda: Prompt([KNOWN + 10], 4), DataError, "does not know"),
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
        b.write([Prompt(prompts()[2], NEW)], broken)


@pytest.mark.parametrize(
    "worth, batches",
    [
        (10**6, [([40, 5, 17, 90], (4, 96, 100)), ([16, 30, 3, 2], (4, 96, 100)), ([1], (4, 96, 100))]),
        (30, [([90], (1, 96, 100)), ([40, 17, 30], (4, 48, 48)), ([5, 16, 3, 2], (4, 16, 24)), ([1], (4, 16, 24))]),
        (
            0,
            [
                ([90], (1, 96, 100)), ([40], (1, 48, 48)), ([30], (1, 32, 48)), ([17], (1, 24, 32)), ([5, 16, 3, 2], (4, 16, 24)),
                ([1], (4, 16, 24)),
            ],
        ),
    ],
)  # fmt: skip
def test_few_lengths_are_compiled(built, worth, batches):
    """As they pay for themselves, the longest first; each with one number of rows, and of slots, which the last token written does not
    need. Equal limits stand side by side.

    Of rows of 24 tokens and 48, 16 and 48, or 48 alone, the second costs least where a further length costs 60: 80 + 144 + 2 · 60.
    """
    generator = built("gqa").generator(rows=4)
    generator.max_length, generator._worth = 100, worth
    asked = [Prompt([1] * n, 9 if n > 3 else 8) for n in (3, 40, 5, 17, 90, 16, 30, 2, 1)]
    found = generator._batches([generator._job(place, prompt) for place, prompt in enumerate(asked)])
    assert [([len(job.tokens) for job in jobs], shape) for jobs, shape in found] == batches


def test_buckets():
    assert [bucket(n) for n in (1, 16, 17, 24, 25, 33, 49, 1000, 1025, 2048)] == [16, 16, 24, 24, 32, 48, 64, 1024, 1536, 2048]


@pytest.mark.full
@pytest.mark.parametrize("name, other", [("gqa", "data"), (MIXED, "expert")])
def test_eight_devices_write_the_same(built, name, other):
    """Five prompts on four parts of the batch axes: rows are filled up to eight. Greedy and drawn."""
    b = built(name)
    asked = [*drawn(), Prompt([7], NEW)]
    mesh = make_mesh({other: 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8])
    params = jax.tree.map(jax.device_put, b.params, parameter_shardings(b.model.specs, mesh))
    many = b.generator(params=params, mesh=mesh, rows=5)
    assert many.generate(asked) == b.write(asked)
    assert (many._rows, many._start._cache_size(), many._go_on._cache_size()) == (8, 1, 1)


def test_a_mesh_with_context_is_refused_at_once(built):
    with pytest.raises(ConfigError, match="context > 1"):
        built("gqa").generator(mesh=make_mesh(dict(context=2), jax.devices()[:2])).stream([BESIDE])


@pytest.mark.parametrize("residual", ["float32", "bfloat16"])
def test_matrices_are_cast_once(residual):
    """Norms, sinks and routers stay in fp32, the table where the stream is."""
    model = Model(small_config(**VARIANTS[MIXED], dtype="bfloat16", residual_dtype=residual).model)
    for path, a in flat(in_compute_dtype(model, random_params(model.specs))).items():
        stays = path.endswith(("gain", "sink", "router")) or path == "embed/table" and residual == "float32"
        assert str(a.dtype) == ("float32" if stays else "bfloat16"), path


@pytest.mark.full
@pytest.mark.parametrize("residual", ["float32", "bfloat16"])
def test_casting_changes_no_bit(residual):
    b = Built(**VARIANTS[MIXED], dtype="bfloat16", residual_dtype=residual)
    tokens = np.array(prompts()[2:3], np.int32)
    np.testing.assert_array_equal(b._logits(in_compute_dtype(b.model, b.params), tokens), b._logits(b.params, tokens))
