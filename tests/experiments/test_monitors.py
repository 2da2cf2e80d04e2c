"""Monitors: what they write is what an analysis of the saved checkpoints says, they change nothing, and each step counts once whatever
stops a run; for cells of one program, over meshes, over two processes.

Shapes: S rows of a matrix that are compared; a tiny model (D=16, L=2) on a tiny corpus of three domains.
"""

import contextlib
import json

import jax
import numpy as np
import pytest

from gammalm.analysis.condensation import condensation_rows, heat_map, row_cosines, snapshot
from gammalm.analysis.flow import residual_flow
from gammalm.analysis.norms import norm_regime
from gammalm.analysis.sink import sink_scores
from gammalm.config import apply_overrides, from_json, validate
from gammalm.config_checks import MONITORS
from gammalm.data.load import Split, open_split
from gammalm.errors import ConfigError, DataError
from gammalm.experiments.grid import load_grid
from gammalm.experiments.monitors import MEASURES, Monitor, by_matrix, first_sequences, numbers, read_maps, write_maps
from gammalm.experiments.results import Run as Result
from gammalm.files import append_jsonl, read_jsonl, write_text_atomic
from gammalm.initializers import init_params
from gammalm.models.decoder import Model
from gammalm.training import loop
from gammalm.training.load import load_model
from gammalm.training.loop import Run
from gammalm.training.preemption import Preempted
from gammalm.training.program import Program, Programs

from ..models.reference import random_params, small_config
from ..training.pairs import GAMMALM, Pair
from ..training.test_loop import config, equal, parameters, program_of, programs  # noqa: F401
from ..training.test_preemption import Told
from ..training.test_spikes import BAD, RUN, STEPS, bad  # noqa: F401

ALL = {"monitor.kinds": MONITORS, "monitor.points": 4}
AT = (0, 1, 2, 3, 6)  # of six steps


def train(*runs, on, **how):
    return loop.train([*runs], on, monitor=Monitor, **how)


def rows_of(workdir):
    return read_jsonl(workdir / "monitors.jsonl")


@pytest.fixture(scope="module")
def watched(corpus, programs, tmp_path_factory):  # noqa: F811
    """An undisturbed run of six steps, all of them saved and some of them measured: its folder."""
    workdir = tmp_path_factory.mktemp("watched")
    every = {"train.checkpoint_every": 1, "train.checkpoints_kept": 9}
    (outcome,) = train(Run(config(corpus, **ALL, **every), workdir), on=programs)
    assert outcome.goodput["phases"]["monitor"] > 0
    return workdir


# ---- what is written


def weights_at(workdir, step, specs):
    if step:
        return load_model(workdir, step).params
    c = from_json(workdir / "config.json")
    return init_params(specs, c.init, c.seed, d_model=c.model.d_model, n_layers=c.model.n_layers)


def close(found, expected):
    """Equal in structure, numbers within 1e-5."""
    assert [*numbers(found)] and [name for name, _ in numbers(found)] == [name for name, _ in numbers(expected)]
    np.testing.assert_allclose([x for _, x in numbers(found)], [x for _, x in numbers(expected)], rtol=1e-5, atol=1e-6)


def test_rows_are_what_the_checkpoints_say(watched, programs):  # noqa: F811
    """Over the first sequence of each domain and the second of the first; of the drawn weights at step 0."""
    c = from_json(watched / "config.json")
    how = dict(seq_len=32, packing="documents", mixture="natural", seed=0)
    split = open_split(c.data.path, "validation", batch=1, **how)
    sequences = [next(split.validation(domain)) for domain in split.domains] + [list(split.validation(split.domains[0]))[1]]
    batch = {name: np.concatenate([one[name] for one in sequences]) for name in sequences[0]}
    model = program_of(c, programs).model  # whose measurements are compiled
    rows = rows_of(watched)
    assert [(row["step"], row["kind"]) for row in rows] == [(step, kind) for step in AT for kind in MONITORS]
    of = {(row.pop("kind"), row.pop("step")): row for row in rows}
    for step in AT:
        params = weights_at(watched, step, model.specs)
        for kind, measure in {"sink": sink_scores, "flow": residual_flow, "norm": norm_regime}.items():
            close(of[kind, step], measure(model, params, {}, [batch]).row())
        for row, weights in zip(of["condensation", step]["matrices"], of["weights", step]["matrices"], strict=True):
            assert (row["path"], row["layer"]) == (weights["path"], weights["layer"])
            node = params
            for name in row["path"].split("/"):
                node = node[name]
            w = np.float64(node if row["layer"] is None else node[row["layer"]])
            w = w if row["path"] == "embed/table" else w.reshape(row["fan_in"], row["rows"]).T  # [rows, fan-in]
            singular = np.linalg.svd(w, compute_uv=False)
            assert row["stable_rank"] == pytest.approx((singular**2).sum() / singular[0] ** 2, rel=1e-3)
            assert weights["std"] == pytest.approx(w.std(), rel=1e-4)
            taken = w if len(w) <= 256 else w[np.linspace(0, len(w) - 1, 256).round().astype(int)]
            unit = taken / np.linalg.norm(taken, axis=1, keepdims=True)
            apart = np.abs(unit @ unit.T)[~np.eye(len(unit), dtype=bool)]
            assert row["mean_abs_cosine"] == pytest.approx(apart.mean(), rel=1e-4) and row["rows_compared"] == len(taken)
    stable = [[row["stable_rank"] for row in of["condensation", step]["matrices"]] for step in AT]
    assert len({tuple(ranks) for ranks in stable}) == len(AT), "the weights moved"


def test_snapshots_give_heat_maps_in_both_orders(watched):
    params = weights_at(watched, 6, None)
    maps = read_maps(watched, 6)
    assert set(maps) == {(row["path"], row["layer"]) for row in rows_of(watched)[-1]["matrices"]}
    q = np.asarray(params["layers"]["attn"]["q"])[1].reshape(16, 16).T
    for rule in ("leader", "eigenvector"):
        image, rows = heat_map(maps["layers/attn/q", 1], rule)
        direct, same = heat_map(row_cosines(q), rule)
        np.testing.assert_array_equal(rows, same)
        np.testing.assert_allclose(image, direct, atol=2**-11)
    assert sorted(path.name for path in (watched / "monitors").iterdir()) == sorted(f"{step}.npz" for step in AT)
    with pytest.raises(DataError, match="5.npz is no readable snapshot"):
        read_maps(watched, 5)


@pytest.mark.full
def test_a_snapshot_of_a_mixture(tmp_path):
    """Every expert has its stable rank, rows are compared of the first alone, zero rows dropped; the numbers are those of an analysis."""
    every = Model(small_config(ffn="moe", n_layers=2, model__moe__first_k_dense=1).model).specs
    specs = {path: every[path] for path in ("embed/table", "layers/attn/q", "layers/ffn/experts/up", "layers/ffn/experts/down")}
    params = random_params(specs)
    params["embed"]["table"] = np.array(params["embed"]["table"])
    params["embed"]["table"][3] = 0
    rows, kept = snapshot(specs, params, 256)
    for row, expected in zip(rows, condensation_rows(specs, params), strict=True):
        later = {"rows_compared", "zero_rows", "mean_abs_cosine"} if row["expert"] else set()
        assert set(row) == set(expected) - {"clusters", "largest_cluster"} and all(row[name] is None for name in later)
        assert [row["path"], row["layer"], row["expert"]] == [expected["path"], expected["layer"], expected["expert"]]
        figures = set(row) - later - {"path", "layer", "expert"}
        assert {k: row[k] for k in figures} == pytest.approx({k: expected[k] for k in figures}, rel=1e-5)
    write_maps(tmp_path / "monitors", 7, kept)
    again = read_maps(tmp_path, 7)
    assert set(again) == set(kept) == {(row["path"], row["layer"]) for row in rows}
    assert {layer for path, layer in kept if "experts" in path} == {1}  # layer 0 is dense
    for key, one in kept.items():
        np.testing.assert_allclose(again[key].cosines_RR, one.cosines_RR, atol=2**-11)
        np.testing.assert_array_equal(again[key].kept_R, one.kept_R)
        assert (again[key].compared, again[key].zero) == (one.compared, one.zero)
    assert kept["embed/table", None].zero == 1 and 3 not in kept["embed/table", None].kept_R
    assert by_matrix(rows, "stable_rank")["layers/ffn/experts/up/1"] == pytest.approx(
        np.mean([row["stable_rank"] for row in rows if row["path"] == "layers/ffn/experts/up"])
    )


def test_sequences_are_of_every_domain_in_turn(corpus):
    split = open_split(corpus[0], "validation", seq_len=16, packing="concat", mixture="natural", seed=0, batch=4)
    batch = first_sequences(split, 5)
    each = [next(split.validation(domain)) for domain in split.domains]
    assert len(each) == 3
    for row, (domain, nth) in enumerate([(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]):
        np.testing.assert_array_equal(batch["tokens"][row], each[domain]["tokens"][nth])
        np.testing.assert_array_equal(batch["weights"][row], each[domain]["weights"][nth])
    assert batch["tokens"].shape == (5, 17)


# ---- what is left alone


def test_training_is_the_same_bit_for_bit(corpus, programs, watched, tmp_path):  # noqa: F811
    c = config(corpus)
    loop.train([Run(c, tmp_path)], programs)
    assert not (tmp_path / "monitors.jsonl").exists() and not (tmp_path / "monitors").exists()
    assert equal(parameters(watched, from_json(watched / "config.json"), programs)[1], parameters(tmp_path, c, programs)[1])
    losses = [[row["loss"] for row in read_jsonl(w / "metrics.jsonl") if "loss" in row] for w in (watched, tmp_path)]
    assert losses[0] == losses[1] and len(losses[0]) == 7
    assert len(programs.made) == len({id(p) for p in programs.made.values()}) and program_of(c, programs).cells is None


class Stop(Exception):
    pass


@contextlib.contextmanager
def stopped_at(program, step):
    """Within it, the program dies instead of making the step after `step`."""
    original = Program.step

    def dies(self, state, batch, scalars):
        if int(state["step"]) == step:
            raise Stop
        return original(self, state, batch, scalars)

    program.step = dies.__get__(program)
    with pytest.raises(Stop):
        yield
    del program.step


def test_killed_and_stopped_it_has_every_row_once(corpus, programs, watched, tmp_path):  # noqa: F811
    """Killed after measuring step 3, which was not saved: its row is of a step that runs again. Then told to stop after step 4."""
    c = config(corpus, **ALL)
    with stopped_at(program_of(c, programs), 3):
        train(Run(c, tmp_path), on=programs)
    left = rows_of(tmp_path)
    assert left[-1]["step"] == 3 and not (tmp_path / "checkpoints" / "000000003").exists()
    write_text_atomic(tmp_path / "monitors.jsonl", "".join(json.dumps(row) + "\n" for row in left if row["step"] < 3))
    append_jsonl(tmp_path / "monitors.jsonl", {"kind": "sink", "step": 3, "layers": "of a process that died"})

    with pytest.raises(Preempted, match="after step 4"):
        train(Run(c, tmp_path), on=programs, notice=Told(2))
    train(Run(c, tmp_path), on=programs)
    assert rows_of(tmp_path) == rows_of(watched)


def test_a_row_that_is_lacking_where_it_goes_on_is_made_there(corpus, programs, watched, tmp_path):  # noqa: F811
    """And kinds may be added to a run that is under way."""
    c = config(corpus)
    with stopped_at(program_of(c, programs), 3):
        loop.train([Run(c, tmp_path)], programs)
    train(Run(config(corpus, **ALL), tmp_path), on=programs)
    assert rows_of(tmp_path) == [row for row in rows_of(watched) if row["step"] >= 2]


@pytest.mark.full
def test_a_rollback_measures_again(corpus, programs, bad, tmp_path):  # noqa: F811
    """Steps 11 to 13 are made twice, with other batches: the rows are those of a run whose data never had the bad ones."""
    bad.add(BAD)
    c = config(corpus, STEPS, **RUN, **{"train.spike": "rollback", "monitor.kinds": ("weights",), "monitor.points": 99})
    train(Run(c, tmp_path / "run"), on=programs)
    assert any(row["kind"] == "rollback" for row in read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    bad.clear()
    real = Split.batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Split, "batch", lambda self, index, rows=None: real(self, index + 3 * (index >= 10), rows))
        train(Run(c, tmp_path / "without"), on=programs)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "without")
    assert [row["step"] for row in rows_of(tmp_path / "run")] == list(range(STEPS + 1))


@pytest.mark.full
def test_a_halted_lane_is_measured_no_more(corpus, programs, tmp_path):  # noqa: F811
    asked = {"monitor.kinds": ("weights",), "monitor.points": 99}
    c = config(corpus, **asked, **{"optimizer.learning_rate": 1e30, "train.checkpoint_every": 9})  # no save reads the step before
    (outcome,) = train(Run(c, tmp_path), on=programs)
    halted = int(outcome.error.split()[1].rstrip(":"))
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(halted)) and halted < 6


# ---- cells, meshes, processes


def cells(corpus, tmp_path, **more):
    """Three cells of one program, each with its own ε, γ and monitors."""
    kinds = (MONITORS, ("norm", "weights"), ())
    return [
        Run(config(corpus, **ALL | {"monitor.kinds": own, "model.norm_eps": eps, "init.gamma": gamma, "seed": i} | more), tmp_path / str(i))
        for i, (own, eps, gamma) in enumerate(zip(kinds, (1e-12, 1e-2, 1e-5), (1.0, 0.5, 1.0), strict=True))
    ]


@pytest.fixture(scope="module")
def each_alone(corpus, programs, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("alone")
    for run in cells(corpus, folder):
        train(run, on=programs)
    return folder


def alike(folder, other, at=(0, 1, 2)):
    for i in at:
        pairs = list(zip(rows_of(folder / str(i)), rows_of(other / str(i)), strict=True))
        assert bool(pairs) == (i < 2)
        for a, b in pairs:
            x, y = list(numbers(a)), list(numbers(b))
            assert (a["kind"], a["step"]) == (b["kind"], b["step"]) and [k for k, _ in x] == [k for k, _ in y]
            np.testing.assert_allclose([v for _, v in x], [v for _, v in y], rtol=2e-3, atol=1e-5)


@pytest.mark.full
def test_cells_of_one_program_are_measured_as_alone(corpus, programs, each_alone, tmp_path):  # noqa: F811
    train(*cells(corpus, tmp_path), on=programs, mode="map")
    alike(tmp_path, each_alone)
    ratios = [next(row for row in rows_of(tmp_path / str(i)) if row["kind"] == "norm")["norms"]["final_norm"]["ratio"] for i in (0, 1)]
    assert ratios[1][0] > 1e4 * ratios[0][0], "each cell's own ε"
    assert (tmp_path / "0" / "monitors" / "6.npz").exists() and not (tmp_path / "1" / "monitors").exists()


@pytest.mark.long  # two processes are a mesh too
@pytest.mark.parametrize("mode", ["single", "vmap"])
def test_over_a_mesh(corpus, each_alone, tmp_path, mode):
    """Parameters cut up over fsdp and tensor, batches over data and fsdp; under vmap the cells over two groups of devices."""
    count = 2 if mode == "vmap" else 1
    runs = cells(corpus, tmp_path, **{"mesh.fsdp": 2, "mesh.tensor": 2, "model.n_kv_heads": 2})[:count]
    alone = cells(corpus, tmp_path / "alone", **{"model.n_kv_heads": 2})[:count]
    train(*runs, on=Programs(), mode=mode, cell_devices=len(runs))
    for run in alone:
        train(run, on=Programs(jax.devices()[:1]))
    alike(tmp_path, tmp_path / "alone", range(len(runs)))


@pytest.mark.full
def test_two_processes_measure_as_one(corpus, programs, tmp_path):  # noqa: F811
    changes = ALL | {"model.n_kv_heads": 2, "batch.micro_batches": 1}
    c = config(corpus, **changes, **{"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2})
    (tmp_path / "config.json").write_text(c.to_json_best_effort())
    asked = ["train", "--config", tmp_path / "config.json", "--workdir", tmp_path / "two" / "0"]
    with Pair(tmp_path / "pair", GAMMALM, *asked) as pair:
        assert pair.ended() == [0, 0], pair.told()
    train(Run(config(corpus, **changes), tmp_path / "one" / "0"), on=programs)
    alike(tmp_path / "two", tmp_path / "one", [0])
    assert {(step, *key) for step in AT for key in read_maps(tmp_path / "two" / "0", step)} == {
        (step, *key) for step in AT for key in read_maps(tmp_path / "one" / "0", step)
    }


# ---- asking for it


def test_kinds_that_are_none_are_refused_with_the_nearest(corpus):
    with pytest.raises(ConfigError, match=r"'sinks' is none of sink, flow, norm, condensation, weights. Did you mean sink\?"):
        config(corpus, **{"monitor.kinds": ("norm", "sinks")})
    assert tuple(MEASURES) == MONITORS
    c = apply_overrides(config(corpus), [("monitor.kinds", "sink,norm")])
    assert validate(c).monitor.kinds == ("sink", "norm")


def test_a_loop_that_cannot_measure_says_so(corpus, programs, tmp_path):  # noqa: F811
    with pytest.raises(ConfigError, match="monitor=gammalm.experiments.monitors.Monitor"):
        loop.train([Run(config(corpus, **ALL), tmp_path)], programs)


def test_a_config_saved_before_there_were_monitors_is_read(corpus, tmp_path):
    old = config(corpus).to_dict()
    del old["monitor"]
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert from_json(tmp_path / "config.json") == config(corpus)


def test_what_a_study_reads(watched):
    result = Result(None, watched, "", 1.0, 1e-2, 0, "done", {}, {})
    append = {"kind": "flow", "step": 0, "again": True}
    assert set(result.monitors) == set(MONITORS)
    assert [row["step"] for row in result.monitors["flow"]] == list(AT)
    (copy := watched.parent / "copy").mkdir(exist_ok=True)
    write_text_atomic(copy / "monitors.jsonl", (watched / "monitors.jsonl").read_text())
    append_jsonl(copy / "monitors.jsonl", append)
    again = Result(None, copy, "", 1.0, 1e-2, 0, "done", {}, {}).monitors["flow"]
    assert again[0] == append and again[1:] == result.monitors["flow"][1:]
    assert Result(None, copy / "nowhere", "", 1.0, 1e-2, 0, "done", {}, {}).monitors == {}


def test_tensorboard_has_them_by_layer(corpus, programs, tmp_path, monkeypatch):  # noqa: F811
    shown = {}
    monkeypatch.setattr(loop.Metrics, "show", lambda self, step, found: shown.setdefault(step, {}).update(found))
    train(Run(config(corpus, **ALL, **{"train.log_every": 100}), tmp_path), on=programs)
    names = ("sink/layers/later/1", "flow/ratio", "norm/norms/final_norm/factor/0", "condensation/layers/attn/q/1", "weights/embed/table")
    assert set(names) <= set(shown[0]) and sorted(shown) == list(AT)
    row = next(row for row in rows_of(tmp_path) if row["kind"] == "flow" and row["step"] == 3)
    assert shown[3]["flow/layers/attention/1"] == row["layers"]["attention"][1]


def test_the_figures_measure_the_largest_size_with_the_adjustments():
    grid = load_grid("grids/figures:scale=cpu")
    with_monitors = {cell.name: cell for cell in grid.cells if cell.overrides.get("monitor.kinds")}
    assert set(with_monitors) == {f"nano-384-adjusted-gamma{gamma}-seed{seed}" for gamma in ("0.5", "1") for seed in (0, 1)}
    assert all(set(cell.config().monitor.kinds) == set(MONITORS) for cell in with_monitors.values())
