"""Table 1: gains, errors and tests against SciPy and closed forms, the colours of the caption, and refusals to compare what differs."""

import json
import math
import random

import numpy as np
import pytest
from scipy import stats

from gammalm.cli.main import main
from gammalm.errors import DataError
from gammalm.evaluation.results import write_results
from gammalm.experiments import table1


def items(task, scores, metric="acc_norm", filter_name="none"):
    """Items as the harness logs them."""
    return [
        {"doc_id": i, "filter": filter_name, "doc_hash": f"{task}{i}", "prompt_hash": "p", "target_hash": "t", metric: s}
        for i, s in enumerate(scores)
    ]


def results(scores, *, gamma, shots=0, of=None, groups=None, **about):
    """(results.json, samples) of {task: scores}; `groups`: {group: tasks}."""
    metric_of = {c.task: c for c in table1.COLUMNS}
    groups, rows, samples = groups or {}, [], {}
    for task, values in scores.items():
        column = next((metric_of[g] for g, below in groups.items() if task in below), metric_of.get(task))
        samples[task] = items(task, values, column.metric, column.filter)
    for name in [*scores, *groups]:
        column = metric_of.get(name)
        if column:
            values = np.concatenate([np.array(scores[t], float) for t in groups.get(name, [name])])
            row = {"task": name, "group": name in groups, "metric": column.metric, "filter": column.filter, "value": float(values.mean())}
            row |= {"stderr": float(values.std(ddof=1) / math.sqrt(len(values))), "num_fewshot": shots, "items": len(values)}
            rows.append(row | {"of": of or len(values), "version": 1.0, "higher_is_better": True})
    checkpoint = {"checkpoint": f"runs/{gamma}", "step": 10, "gamma": gamma, "norm_eps": 1e-12} | about
    return {"checkpoint": checkpoint, "rows": rows, "requests": {}, "harness": {"group_subtasks": groups}}, samples


def compared(small, standard):
    return table1.compare(small[0], standard[0], lambda t: small[1].get(t, []), lambda t: standard[1].get(t, []))


def draw(seed, n, p):
    rng = random.Random(seed)
    return [float(rng.random() < p) for _ in range(n)]


def test_gain_error_and_mcnemar():
    small, standard = draw(0, 300, 0.4), draw(1, 300, 0.3)
    (row,) = compared(results({"arc_challenge": small}, gamma=1.0), results({"arc_challenge": standard}, gamma=0.5))["rows"]
    difference = np.array(small) - np.array(standard)
    assert row["gain"] == pytest.approx(100 * difference.mean()) and row["paired"]
    assert row["stderr"] == pytest.approx(100 * stats.sem(difference))
    wins, losses = (difference > 0).sum(), (difference < 0).sum()
    expected = min(1.0, 2 * stats.binom.cdf(min(wins, losses), wins + losses, 0.5))  # the exact test of McNemar
    assert row["p"] == pytest.approx(expected) and 0 < row["p"] < 1
    expected = stats.ttest_1samp(100 * difference, 0).confidence_interval(0.95)
    assert (row["low"], row["high"]) == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_pairing_sharpens_what_independent_errors_blur():
    standard = draw(2, 400, 0.3)
    small = [1.0 if i % 20 == 0 else s for i, s in enumerate(standard)]  # the same model, better on a twentieth
    both = results({"arc_challenge": small}, gamma=1.0), results({"arc_challenge": standard}, gamma=0.5)
    (paired,) = compared(*both)["rows"]
    kept = compared(both[0], (both[1][0], {}))
    (loose,) = kept["rows"]
    assert loose["stderr"] == pytest.approx(math.hypot(loose["small_stderr"], loose["standard_stderr"]))
    assert loose["p"] == pytest.approx(2 * stats.norm.sf(loose["gain"] / loose["stderr"]))
    assert loose["high"] - loose["gain"] == pytest.approx(1.959964 * loose["stderr"], rel=1e-5)
    assert paired["gain"] == loose["gain"] and paired["p"] < 0.01 < 0.05 < loose["p"]
    assert not loose["paired"] and any("unpaired" in note for note in kept["notes"])


def test_scores_between_0_and_1_take_a_t_test():
    first, second = np.random.default_rng(0).random((2, 50))
    stderr, p = table1.paired_test(first - second)
    assert (stderr, p) == pytest.approx((stats.sem(first - second), stats.ttest_rel(first, second).pvalue))
    assert table1.paired_test(np.zeros(5)) == (0.0, 1.0)


def test_of_several_filters_the_benchmark_s_counts():
    sides = results({"gsm8k": draw(0, 40, 0.5)}, gamma=1.0), results({"gsm8k": draw(1, 40, 0.5)}, gamma=0.5)
    (alone,) = compared(*sides)["rows"]
    for _, samples in sides:
        samples["gsm8k"] += items("gsm8k", [0.0] * 40, "exact_match", "strict-match")
    assert compared(*sides)["rows"] == [alone] and alone["stderr"] > 1


def test_a_group_is_all_of_its_items():
    groups = {"mmlu": ["mmlu_anatomy", "mmlu_astronomy"]}
    small, standard = (
        results({"mmlu_anatomy": draw(s, 60, 0.3), "mmlu_astronomy": draw(s + 1, 140, 0.3)}, gamma=g, groups=groups)
        for s, g in ((3, 1.0), (7, 0.5))
    )
    (row,) = compared(small, standard)["rows"]
    difference = np.concatenate([[a["acc"] - b["acc"] for a, b in zip(small[1][t], standard[1][t], strict=True)] for t in groups["mmlu"]])
    assert row["benchmark"] == "MMLU" and row["items"] == 200 and row["paired"]
    assert (row["gain"], row["stderr"]) == pytest.approx((100 * difference.mean(), 100 * stats.sem(difference)))


def test_models_that_answer_alike_have_no_interval():
    answers = results({"arc_challenge": [0.0] * 30}, gamma=1.0), results({"arc_challenge": [0.0] * 30}, gamma=0.5)
    (row,) = compared(*answers)["rows"]
    assert (row["gain"], row["p"], row["low"], row["high"]) == (0.0, 1.0, None, None)


def test_holm_is_the_step_down_of_the_textbook():
    assert table1.holm([0.01, 0.04, None, 0.03]) == pytest.approx([0.03, 0.06, None, 0.06])
    assert table1.holm([0.5, 0.9]) == [1.0, 1.0] and table1.holm([]) == []


def test_gains_are_rows_of_a_figure_for_the_pair_they_are_of():
    def labels(small, standard):
        table = compared(results({"arc_challenge": [0.0, 1.0]}, **small), results({"arc_challenge": [1.0, 1.0]}, **standard))
        (row,) = table1.numbers(table)
        return row["quantity"], row["gamma"], row["standard"], row["arm"], row["parameters"], row["seeds"], table["notes"]

    small, standard = ({"gamma": g, "gate": "elementwise", "parameters": 10, "step": 5} for g in (1.0, 0.5))
    assert labels(small, standard)[:-1] == ("gain", 1.0, 0.5, "adjusted", 10, 1)
    assert labels(small | {"layout": "plain", "devices": 8}, standard | {"layout": "packed", "devices": 1})[3] == "adjusted"
    plain = {"gate": "none", "norm_eps": 1e-5}
    assert labels(small | plain, standard | plain)[3] == "plain"
    assert labels(small | plain, standard)[3] is None and labels(small | {"step": 6}, standard)[3] is None
    assert labels(small | {"gate": "none"}, standard | {"gate": "none"})[3] is None


def test_gains_are_printed_without_a_negative_zero():
    assert [table1._signed(points) for points in (-0.04, 0.04, -0.06, 12.34)] == ["+0.0", "+0.0", "−0.1", "+12.3"]


@pytest.mark.parametrize("gain, colour", [(3.94, "red"), (3.96, "green"), (4.0, "green"), (-5.0, "red")])
def test_colours_follow_what_is_printed(gain, colour):
    assert table1.colour(gain) == colour


def test_chance_is_called_chance():
    guessing, knowing = draw(4, 400, 0.25), draw(5, 400, 0.6)
    table = compared(results({"arc_challenge": knowing}, gamma=1.0), results({"arc_challenge": guessing}, gamma=0.5))
    assert table["rows"][0]["at_chance"] == ["standard"]
    assert any("No better than guessing" in note and "standard initialization: ARC-C" in note for note in table["notes"])


def test_notes_tell_what_limits_the_comparison():
    one = results({"arc_challenge": draw(0, 50, 0.5)}, gamma=0.5, of=1172, norm_eps=1e-5)
    other = results({"arc_challenge": draw(1, 50, 0.5), "social_iqa": draw(1, 50, 0.5)}, gamma=1.0, of=1172)
    one[0]["data"] = {"differences": {"arc_challenge": {"items": "half of the items", "examples": "from elsewhere"}}}
    one[0]["requests"] = {"cut": 1200, "prompts_cut": 34}
    notes = " ".join(compared(one, other)["notes"])
    limits = ("1,234 contexts were longer than the model with small",)
    limits += "exchanged?", "Only a part of the items was scored: ARC-C", "SocialIQA", "more than γ: norm_eps (1e-05 and 1e-12)"
    for told in (*limits, "ARC-C: half of the items."):
        assert told in notes, told
    assert "elsewhere" not in notes  # where no examples are given


def test_what_differs_is_not_compared():
    base = {"arc_challenge": [0.0, 1.0, 1.0]}
    with pytest.raises(DataError, match="examples 5, the other 0"):
        compared(results(base, gamma=1.0, shots=5), results(base, gamma=0.5))
    with pytest.raises(DataError, match="items 3, the other 2"):
        compared(results(base, gamma=1.0), results({"arc_challenge": [0.0, 1.0]}, gamma=0.5))
    other = results(base, gamma=0.5)
    other[1]["arc_challenge"][1]["prompt_hash"] = "another"
    with pytest.raises(DataError, match="item 1 of arc_challenge is not the same"):
        compared(results(base, gamma=1.0), other)
    other = results(base, gamma=0.5)
    other[0]["harness"]["config"] = {"gen_kwargs": {"max_gen_toks": 16}}
    with pytest.raises(DataError, match="written under {} and {'max_gen_toks': 16}"):
        compared(results(base, gamma=1.0), other)
    with pytest.raises(DataError, match="No benchmark of table 1"):
        compared(results(base, gamma=1.0), results({"social_iqa": [1.0, 0.0]}, gamma=0.5))


@pytest.fixture
def evaluated(tmp_path):
    """Two folders as `gammalm eval --samples` leaves them."""
    folders = {}
    for name, gamma, seed in (("small", 1.0, 0), ("standard", 0.5, 1)):
        found, samples = results({"arc_challenge": draw(seed, 200, 0.3 + gamma / 10), "hellaswag": draw(seed + 2, 200, 0.3)}, gamma=gamma)
        (folder := tmp_path / name).mkdir()
        write_results(folder, found, samples)
        folders[name] = str(folder)
    return folders


def test_one_command_makes_the_table(evaluated, tmp_path, capsys):
    command = ["figure", "table1", "--small", evaluated["small"], "--standard", evaluated["standard"], "--workdir", str(tmp_path / "w")]
    assert main([*command, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["benchmark"] for row in table["rows"]] == ["ARC-C", "HellaSwag"]
    folder = tmp_path / "w/figures/table1"
    assert json.loads((folder / "table1.json").read_text()) == table
    for html in (folder / "table1.html", folder.parent / "index.html"):
        for row in table["rows"]:
            gain = f"{row['gain']:+.1f}".replace("-", "−")
            assert f'color:{table1.COLOURS[row["colour"]]};font-weight:650">{gain}<' in html.read_text()
    assert (folder / "caption.txt").read_text().splitlines()[1:] == table["notes"]
    rows = [json.loads(line) for line in (folder / "numbers.jsonl").read_text().splitlines()]
    assert [(r["benchmark"], r["value"], r["low"]) for r in rows] == [(r["benchmark"], r["gain"], r["low"]) for r in table["rows"]]
    assert main(command) == 0
    assert "| ARC-C " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["table1"], "needs --small and --standard"),
        (["table1", "--small", "SMALL"], "needs --standard"),
        (["table1", "--small", "SMALL", "--standard", "STANDARD", "--offline"], "has been evaluated: --offline, --limit"),
        (["table1", "--small", "SMALL", "--standard", "STANDARD", "--scale", "cpu"], "reach nothing"),
        (["table1", "--small", "SMALL", "--standard", "STANDARD", "--limit", "0"], "has been evaluated: --offline, --limit"),
        (["table1", "--small", "runs/none:3", "--standard", "STANDARD"], "--small runs/none:3: there is no such run"),
        (["fig1c", "--limit", "0"], "--limit is for table1"),
        (["table1", "--small", "SMALL", "--standard", "STANDARD", "--processes", "2"], "one process"),
        (["fig1c", "--small", "SMALL"], "--small is for table1"),
    ],
)
def test_refusals(evaluated, arguments, told, capsys):
    arguments = [{"SMALL": evaluated["small"], "STANDARD": evaluated["standard"]}.get(a, a) for a in arguments]
    assert main(["figure", *arguments]) == 2
    assert told in capsys.readouterr().err
