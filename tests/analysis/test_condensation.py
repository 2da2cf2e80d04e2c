"""Row cosines, their clusters and orders against naive implementations in float64; the rows of a whole model; closed forms at init."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from gammalm.analysis.condensation import (
    condensation_rows,
    heat_map,
    leader_clusters,
    mean_absolute,
    random_mean_cosine,
    random_stable_rank,
    row_cosines,
    row_order,
    snapshot_steps,
    stable_ranks,
)
from gammalm.analysis.weights import copies_of, matrix_paths
from gammalm.cli.main import main
from gammalm.models.decoder import Model
from gammalm.trees import flat

from ..models.reference import random_params, small_config


def planted(rows=90, inputs=40, directions=4, noise=0.3, seed=0):
    """Rows around a few directions of unequal size, in random order; which direction each row has."""
    rng = np.random.default_rng(seed)
    group = np.sort(rng.integers(0, directions, rows))
    rng.shuffle(group)
    centres = np.linalg.qr(rng.standard_normal((inputs, directions)))[0].T
    return (centres[group] + noise * rng.standard_normal((rows, inputs)) / np.sqrt(inputs)).astype(np.float32), group


def naive_cosines(w):
    w = w.astype(np.float64)
    w = w[np.abs(w).sum(1) > 0]
    return np.array([[a @ b / np.sqrt(a @ a) / np.sqrt(b @ b) for b in w] for a in w])


def naive_clusters(cosines, threshold):
    """Sets, leader by leader: whoever is left and near the first who is left goes with him."""
    left, clusters = list(range(len(cosines))), []
    while left:
        leader = left[0]
        cluster = [i for i in left if i == leader or cosines[leader][i] > threshold]
        clusters.append(cluster)
        left = [i for i in left if i not in cluster]
    return clusters


def test_cosines_without_zero_rows():
    w, _ = planted(30, 12)
    w[[3, 17]] = 0
    w[5] *= 1e-30  # tiny, not zero
    found = row_cosines(w)
    np.testing.assert_allclose(found.cosines_RR, naive_cosines(w), atol=1e-6)
    assert found.kept_R.tolist() == [i for i in range(30) if i not in (3, 17)]
    assert (found.compared, found.zero) == (30, 2)


def test_many_rows_are_thinned_evenly():
    w, _ = planted(100, 12)
    w[0] = 0
    found = row_cosines(w, most_rows=12)
    assert found.kept_R.tolist() == [9, 18, 27, 36, 45, 54, 63, 72, 81, 90, 99] and (found.compared, found.zero) == (12, 1)
    np.testing.assert_allclose(found.cosines_RR, naive_cosines(w[found.kept_R]), atol=1e-6)


def test_mean_cosine():
    w, _ = planted(25, 8)
    cosines = naive_cosines(w)
    pairs = [abs(cosines[i, j]) for i in range(25) for j in range(25) if i != j]
    assert mean_absolute(row_cosines(w).cosines_RR) == pytest.approx(np.mean(pairs), rel=1e-5)
    assert math.isnan(mean_absolute(np.ones((1, 1)))) and math.isnan(mean_absolute(np.zeros((0, 0))))


@pytest.mark.parametrize("noise, threshold", [(0.3, 0.4), (1.0, 0.4), (3.0, 0.4), (3.0, 0.1), (3.0, -0.2)])
def test_clusters_are_those_of_a_naive_reading(noise, threshold):
    """From clear groups to none: also where a row is near two leaders, and where a leader's cosine would not do."""
    cosines = row_cosines(planted(noise=noise, seed=3)[0]).cosines_RR
    clusters = naive_clusters(cosines, threshold)
    found = leader_clusters(cosines, threshold)
    assert [np.flatnonzero(found == c).tolist() for c in range(found.max() + 1)] == clusters
    assert {0.3: len(clusters) == 4, 3.0: len(clusters) > 4 or threshold < 0}.get(noise, True)


def test_opposite_rows_are_two_clusters():
    assert leader_clusters(row_cosines(np.array([[1.0, 0], [-1, 0], [2, 0.1]])).cosines_RR).tolist() == [0, 1, 0]


def test_leader_order_puts_clusters_side_by_side():
    w, group = planted()
    order = row_order(row_cosines(w).cosines_RR, "leader")
    assert sorted(order) == list(range(90))
    assert np.count_nonzero(np.diff(group[order])) == 3
    assert order[0] == 0 and (np.diff(order) < 0).sum() == 3  # the first leader is row 0; within a cluster rows keep their order


def test_eigenvector_order():
    """Sorted by the top eigenvector of the cosines as LAPACK gives it, whose largest entry is positive."""
    rng = np.random.default_rng(5)
    w = rng.standard_normal((60, 20)) + np.where(rng.random(60) < 0.4, -1.0, 1.0)[:, None] * rng.uniform(0.5, 3, 20)
    cosines = row_cosines(w.astype(np.float32)).cosines_RR
    vector = np.linalg.eigh(cosines.astype(np.float64))[1][:, -1]
    vector *= np.sign(vector[np.argmax(np.abs(vector))])
    sorted_by_us = vector[row_order(cosines, "eigenvector")]
    assert np.diff(sorted_by_us).min() > -1e-5 and np.ptp(vector) > 0.1
    with pytest.raises(ValueError, match="leader, eigenvector"):
        row_order(cosines, "size")


@pytest.mark.parametrize("rule", ["leader", "eigenvector"])
def test_heat_maps_are_bounded_and_show_cosines(rule):
    w, _ = planted(90)
    w[7] = 0
    cosines = row_cosines(w)
    whole, rows = heat_map(cosines, rule)
    assert whole.shape == (89, 89) and sorted(rows) == [i for i in range(90) if i != 7]
    small, chosen = heat_map(cosines, rule, size=20)
    assert small.shape == (20, 20)
    np.testing.assert_allclose(small, naive_cosines(w[chosen]), atol=1e-6)
    assert [rows.tolist().index(row) for row in chosen] == np.linspace(0, 88, 20).round().astype(int).tolist()
    assert heat_map(row_cosines(np.zeros((5, 3))), rule)[0].shape == (0, 0)


@pytest.mark.parametrize("last", [1, 2, 5, 24, 100, 500, 10**6])
@pytest.mark.parametrize("points", [2, 5, 24])
def test_snapshots_are_as_many_as_asked_and_log_spaced(last, points):
    steps = snapshot_steps(last, points)
    assert len(steps) == min(points, last) and steps[0] == 1 and steps[-1] == last and sorted(set(steps)) == steps
    ratios = np.divide(steps[1:], steps[:-1])[np.array(steps[:-1]) > 50]
    assert not len(ratios) or ratios.max() / ratios.min() < 1.05
    assert snapshot_steps(0) == []


MIXTURE = {"attention": "mla", "ffn": "moe", "n_layers": 2, "model__moe__first_k_dense": 1}


@pytest.mark.parametrize("model", [{"gate": "headwise"}, pytest.param(MIXTURE, marks=pytest.mark.full)])
def test_every_matrix_of_a_model(model):
    """Each layer and each expert by itself, against the SVD and the naive reading; the rows are JSON."""
    specs = Model(small_config(**model).model).specs
    params = random_params(specs)
    arrays = flat(params)
    rows = json.loads(json.dumps(list(condensation_rows(specs, params))))
    wanted = [(path, index, names) for path in matrix_paths(specs) for index, names in copies_of(specs[path])]
    assert [(row["path"], row["layer"], row["expert"]) for row in rows] == [(path, *names.values()) for path, _, names in wanted]
    for row, (path, index, _) in zip(rows, wanted, strict=True):
        fan_in, fan_out = specs[path].fans()
        w = np.asarray(arrays[path][index], np.float64)
        w = w.reshape(fan_out, fan_in) if path == "embed/table" else w.reshape(fan_in, fan_out).T
        values = np.linalg.svd(w, compute_uv=False)
        assert row["stable_rank"] == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-3) and row["stable_rank_error"] <= 1e-3
        cosines = naive_cosines(w)
        assert (row["rows"], row["fan_in"], row["rows_compared"], row["zero_rows"]) == (fan_out, fan_in, fan_out, 0)
        if fan_out > 1:
            assert row["mean_abs_cosine"] == pytest.approx(mean_absolute(cosines), rel=1e-4)
        clusters = naive_clusters(cosines, 0.4)
        assert row["clusters"] == len(clusters) and row["largest_cluster"] == pytest.approx(max(map(len, clusters)) / fan_out)
    ranks = {path: np.asarray(rank) for path, (rank, _) in stable_ranks(specs, params).items()}
    assert [float(ranks[path][index]) for path, index, _ in wanted] == pytest.approx([row["stable_rank"] for row in rows], rel=1e-4)


def test_a_dead_matrix():
    """Zeros, as some initializers leave a matrix: no rows to compare, rank 0, and JSON all the same."""
    specs = {"up": Model(small_config().model).specs["layers/ffn/up"]}
    rows = list(condensation_rows(specs, {"up": jnp.zeros(specs["up"].shape)}))
    assert [row["layer"] for row in rows] == [0, 1]
    for row in rows:
        assert (row["stable_rank"], row["clusters"], row["largest_cluster"], row["mean_abs_cosine"]) == (0, 0, None, None)
        assert row["zero_rows"] == row["rows_compared"] == row["rows"] and json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("inputs", [64, 512])
def test_closed_forms_of_random_rows(inputs):
    """Mean |cos| √(2/(πd)) within 1/(4d), its next term, and four standard errors; neighbours at 0.4 are rare when d is large."""
    w = np.random.default_rng(0).standard_normal((400, inputs)).astype(np.float32)
    found = row_cosines(w)
    closed = random_mean_cosine(inputs)
    assert mean_absolute(found.cosines_RR) == pytest.approx(closed, rel=1 / (4 * inputs) + 4 * 0.76 / math.sqrt(400 * 399 / 2))
    assert inputs == 64 or leader_clusters(found.cosines_RR).max() == 399
    assert random_stable_rank(1000, 1000) == pytest.approx(250)


def test_the_command(capsys):
    """One row per matrix as JSON, one line per layer in the table."""
    argv = ["analyze", "condensation", "--config", "lm:size=tiny", "--matrices", "layers/attn/k"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["analysis"], found["cluster_cosine"]) == ("condensation", 0.4)
    assert [(row["path"], row["layer"], row["rows"]) for row in found["matrices"]] == [("layers/attn/k", layer, 64) for layer in (0, 1)]
    assert main(argv) == 0
    _, *lines, note = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["layers/attn/k", "0", "64"], ["layers/attn/k", "1", "64"]] and "0.4" in note
    assert float(lines[1].split()[3]) == pytest.approx(found["matrices"][1]["stable_rank"], rel=1e-3)
