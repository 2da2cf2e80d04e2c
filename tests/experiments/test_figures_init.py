"""Figures before training: numbers of the science page, and measured points beside the theory that they are drawn with."""

import numpy as np
import pytest

from gammalm.experiments.figures import init
from gammalm.experiments.figures.catalog import load
from gammalm.theory import norm_factor
from gammalm.theory.branches import EXPONENTS, GAMMAS, branch_ratio

from .untrained import only, pick


def test_norm_factor():
    rows = load(["fig1c"])["fig1c"].draw(None, "init").rows
    halves = [only(rows, "half point", eps=eps)["value"] for eps in (1e-5, 1e-6, 1e-8, 1e-12)]
    assert halves == pytest.approx([0.755, 0.906, 1.21, 1.81], rel=3e-3)  # science.md, section 2
    measured = pick(rows, "measured norm factor")
    assert len(measured) == 4 * 15
    wanted = [float(norm_factor(row["x"], row["eps"], 2048)) for row in measured]
    assert [row["value"] for row in measured] == pytest.approx(wanted, rel=0.02)
    assert only(rows, "variance", gamma=0.5)["value"] == pytest.approx(4.88e-4, rel=1e-3)
    assert only(rows, "sensitivity", eps=1e-5, gamma=1.0)["value"] == pytest.approx(0.153**2, rel=0.01)


def test_measured_flows_are_those_of_the_recursion():
    found = init.measured_flows(128, gammas=(1.0,), epsilons=(1e-5,), draws=2)
    for branch in ("two-linear", "swiglu", "attention"):
        ratios = found[branch, 1e-5, 1.0]
        assert len(ratios) == 2 and ratios[0] != ratios[1]
        assert np.mean(ratios) == pytest.approx(branch_ratio(branch, 128, 1.0, 1e-5), rel=0.05)


@pytest.mark.full
def test_exponents_are_those_of_the_table():
    drawing = load(["fig3a"])["fig3a"].draw(None, "init")
    for (branch, eps), table in EXPONENTS.items():
        found = [only(drawing.rows, "exponent", branch=branch, eps=eps, gamma=gamma)["value"] for gamma in GAMMAS]
        assert found == pytest.approx(table, abs=0.02)
    for row in pick(drawing.rows, "flow"):
        labels = {key: row[key] for key in ("branch", "eps", "gamma", "d")}
        assert row["value"] == pytest.approx(only(drawing.rows, "predicted flow", **labels)["value"], rel=0.06)
