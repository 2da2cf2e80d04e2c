"""Tables as examples: which rows train and test, and by what inputs are scaled."""

import numpy as np
import pytest

from gammalm.data import examples
from gammalm.data.examples import Examples, load_examples
from gammalm.data.tabular import Mnist, Wine


@pytest.fixture
def tables(monkeypatch):
    """Made-up digits and wines in place of the real ones; gives the folders that were asked for."""
    rng, asked = np.random.default_rng(0), []
    digits = Mnist(*(rng.integers(0, n, shape).astype(np.uint8) for n, shape in
                     ((256, (30, 28, 28)), (10, 30), (256, (7, 28, 28)), (10, 7))), "here")  # fmt: skip
    wines = Wine(rng.normal(5, 3, (50, 11)).astype(np.float32), rng.integers(3, 10, 50).astype(np.uint8), rng.random(50) < 0.3, "there")
    monkeypatch.setattr(examples, "mnist", lambda folder, note: asked.append(folder) or digits)
    monkeypatch.setattr(examples, "wine", lambda folder, note: asked.append(folder) or wines)
    return digits, wines, asked


def test_digits_have_their_own_test_set_and_one_scale(tables):
    digits, _, asked = tables
    found = load_examples("mnist", "data/mnist")
    assert asked == ["data/mnist"] and found.x_NI.shape == (37, 784) and found.x_NI.dtype == np.uint8 and found.source == "here"
    one, other = found.split(0, True), found.split(1, True)
    assert one.train_M.tolist() == other.train_M.tolist() == list(range(30)) and one.test_M.tolist() == list(range(30, 37))
    np.testing.assert_allclose(one.mean_I, digits.images.mean(), rtol=1e-6)
    np.testing.assert_allclose(one.scale_I, digits.images.std(), rtol=1e-6)
    np.testing.assert_array_equal(found.y_N, np.concatenate([digits.labels, digits.test_labels]))
    plain = found.split(0, False)
    assert set(plain.mean_I) == {0} and set(plain.scale_I) == {255}


def test_wines_are_split_by_seed_and_scaled_by_what_trains(tables):
    _, wines, asked = tables
    red, good = load_examples("wine-red"), load_examples("wine-quality")
    assert asked == [None, None]
    np.testing.assert_array_equal(red.y_N, wines.red)
    np.testing.assert_array_equal(good.y_N, wines.quality >= 6)
    one, again, other = red.split(4, True), good.split(4, True), red.split(5, True)
    assert sorted([*one.train_M, *one.test_M]) == list(range(50)) and len(one.test_M) == 10
    assert one.test_M.tolist() == again.test_M.tolist() != other.test_M.tolist()
    scaled = (wines.X[one.train_M] - one.mean_I) / one.scale_I
    np.testing.assert_allclose(scaled.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(scaled.std(0), 1, rtol=1e-5)
    assert set(red.split(4, False).scale_I) == {1}


def test_rows_to_test_need_not_be_the_same_in_number():
    split = Examples(np.zeros((8, 2), np.float32), np.zeros(8, np.int32)).split(0, False)
    assert (len(split.train_M), len(split.test_M)) == (6, 2)
