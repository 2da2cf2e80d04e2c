"""Every command that README and docs show is run, word for word, on models that are small: in a folder whose `lm.py` stands before ours.

What a page needs and does not make (a run, an exported model, texts) is put there. Commands of launch/ are run dry by test_docs.py.
"""

import contextlib
import dataclasses
import functools
import gzip
import json
import re
import shlex
import shutil
from pathlib import Path

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from gammalm.analysis import scaling
from gammalm.cli.main import main
from gammalm.data import tokenizer
from gammalm.data.examples import Examples
from gammalm.data.prepare import Request, prepare
from gammalm.experiments import grid as grids
from gammalm.experiments import nets
from gammalm.experiments.figures import losses

from ..conftest import write_corpus
from ..data import benchmark_package
from ..experiments.study import write_study
from .docs_pages import PAGES, files_of, marked_commands

# Pages that go on with what an earlier one made: their commands are run in one folder, each once.
TOGETHER = ("README.md", "claims.md", "results.md", "figures.md")
GROUPS = [[page for page in PAGES if page.name in TOGETHER], *([page] for page in PAGES if page.name not in TOGETHER)]

LM = '''"""Stands before the config `lm`: the same, made small. Steps that are asked for are kept, since other commands name them."""
from gammalm.config import apply_overrides, call, configs_folder, leaves


def get_config(arg=""):
    config = call(f"{configs_folder() / 'lm.py'}:{arg}", "get_config")
    known, steps = leaves(config), config.train.steps
    steps = steps if "steps=" in arg else 4
    width = min(64, max(8, config.model.d_model // 48 * 8))
    small = {
        "model.vocab_size": 1024, "model.d_model": width, "model.d_ff": 2 * width, "model.n_layers": 2, "model.n_heads": 2,
        "model.n_kv_heads": 2, "model.head_dim": 4, "model.mla.kv_rank": 8, "model.mla.nope_dim": 4, "model.mla.rope_dim": 4,
        "model.mla.v_dim": 4, "model.moe.n_experts": 8, "model.moe.top_k": 2, "model.moe.d_expert": 8,
        "data.seq_len": min(32, config.data.seq_len), "data.mixture": "natural", "batch.sequences": 8,
        "optimizer.warmup_steps": min(2, config.optimizer.warmup_steps), "train.steps": steps,
        "train.checkpoint_every": max(1, steps // 2), "train.validation_batches": 1,
    }
    return apply_overrides(config, [(name, value) for name, value in small.items() if name in known])
'''


def thinned(load_grid):
    """`load_grid`, after whose checks some cells are kept, for a few steps each: one seed, of nets two and every eighth std; of the
    figures' grid γ ½ and 1 at one rate, of others the first six."""

    def load(spec, overrides=()):
        grid = load_grid(spec, overrides)
        net = grid.base.startswith("mlp")
        few = {"train.epochs": 1} if net else {"train.steps": 4, "optimizer.warmup_steps": 1}
        cells = [cell for cell in grid.cells if cell.labels.get("seed", 0) <= net]
        stds = sorted({cell.labels["std"] for cell in cells if "std" in cell.labels})[::8]
        cells = [cell for cell in cells if not stds or cell.labels["std"] in stds]
        if grid.name == "figures":
            cells = [c for c in cells if c.labels["gamma"] in (0.5, 1.0) and "lr" not in c.labels]
        elif not net:
            cells = cells[:6]
        return grids.Grid(grid.name, grid.base, [dataclasses.replace(c, overrides={**c.overrides, **few}) for c in cells])

    return load


@contextlib.contextmanager
def quick(devices=1):
    """JAX on so many devices, compiling with hardly any optimization: what these models take is compiling."""
    known, before = jax.devices, jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "devices", lambda *which: known(*which)[:devices])
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with what commands read: a corpus under several names, texts, a run with checkpoints at 100, 200 and 300."""
    folder = tmp_path_factory.mktemp("docs")
    texts = write_corpus(folder)
    prepare(Request((str(texts),), folder / "data" / "open-mix", vocab_size=600, quiet=True))
    (folder / "lm.py").write_text(LM)
    (folder / "configs").mkdir()
    shutil.copy(folder / "lm.py", folder / "configs")
    shutil.copy(texts, folder / "my.jsonl")
    (folder / "pages.jsonl.gz").write_bytes(gzip.compress(texts.read_bytes()))
    rows = [{"text": json.loads(line)["text"]} for line in texts.read_text("utf-8").splitlines()[:100]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "src.parquet")
    (folder / "notes.txt").write_text("Some notes of one's own.\n\nAnd more of them.\n" * 20)
    (folder / "prompts.txt").write_text("The model\nA small start\n")
    with pytest.MonkeyPatch.context() as patch, quick():
        patch.chdir(folder)
        kept = ["--config.train.checkpoint_every=100", "--config.train.checkpoints_kept=3"]
        assert main(["train", "--config", "lm:size=tiny,steps=300", "--workdir", "base/run", *kept]) == 0
        assert main(["export", "hf", "--checkpoint", "base/run", "--out", "base/exported"]) == 0
        sizes = {"nano": 1e5, "nano-96": 3e5, "nano-192": 1e6, "nano-384": 4e6}
        write_study(folder / "base" / "grid", "grids/figures:scale=cpu", parameters=sizes)
    return folder


@pytest.fixture
def room(base, tmp_path, monkeypatch):
    """A copy of it to work in, without a network: tables and benchmarks are made up, Python's own library is three modules.

    Tokenizers have at most 600 pieces, and the intervals of scaling laws come from five resamples.
    """

    def made_up(name, path, note):
        rng, (inputs, classes) = np.random.default_rng(0), {"mnist": (784, 10)}.get(name, (11, 2))
        x = rng.normal(size=(256, inputs)).astype(np.float32)
        return Examples(x, rng.integers(0, classes, 256).astype(np.int32), source="made up")

    room = tmp_path / "room"
    shutil.copytree(base, room, ignore=shutil.ignore_patterns("base"))
    library = tmp_path / "library"
    library.mkdir()
    for name in ("argparse", "ast", "tokenize"):
        shutil.copy(__import__(name).__file__, library)
    benchmark_package.use(monkeypatch, tmp_path)
    monkeypatch.setattr("gammalm.data.open_mix.sysconfig.get_paths", lambda: {"stdlib": str(library)})
    monkeypatch.setattr(nets, "load_examples", made_up)
    few, train = functools.partial(scaling.fit_scaling, resamples=5), tokenizer.train
    monkeypatch.setattr(scaling, "fit_scaling", few)
    monkeypatch.setattr(losses, "fit_scaling", few)
    monkeypatch.setattr(tokenizer, "train", lambda texts, vocab_size, **how: train(texts, min(vocab_size, 600), **how))
    monkeypatch.setattr(grids, "load_grid", thinned(grids.load_grid))
    monkeypatch.chdir(room)
    return room


def provide(room: Path, base: Path, words: list[str]) -> None:
    """What the command reads and nothing has made: runs, an exported model, a grid, corpora."""
    for option, word in zip(["", *words], words, strict=False):
        path = word.removeprefix("checkpoint=").partition(",")[0] if option == "--model_args" else re.sub(r":\d+$", "", word)
        kind = "exported" if path.startswith("exported/") else "run" if path.startswith("runs/") else None
        if option in ("--out", "--html", "--plot", "--state") or (option == "--workdir" and words[1:3] != ["analyze", "scaling"]):
            continue
        if kind and not (room / path).exists():
            shutil.copytree(base / "base" / ("grid" if option == "--workdir" else kind), room / path)
    for name in re.findall(r"data/[\w-]+", " ".join(words)):
        if not (room / name).exists() and words[1:3] != ["data", "prepare"]:
            (room / name).symlink_to(room / "data/open-mix")


def run_commands(pages, room, base, capsys, mark):
    """Runs those commands of `pages` that have `mark`, each once; returns them."""
    done, writer = [], {}
    marked = [words for page in pages for words, of in marked_commands(page) if of]
    for page in pages:
        for name, text in files_of(page).items():
            (room / name).write_text(text)
            (room.parent / name).write_text(text)
        for words, of in marked_commands(page):
            if of != mark or words[0] != "gammalm" or words in done or (mark is None and words in marked) or "--help" in words:
                continue
            provide(room, base, words)
            if words[1] in ("train", "grid", "import") and "--workdir" in words:
                workdir = words[words.index("--workdir") + 1]
                if writer.setdefault(workdir, words) != words:  # another example of the same name
                    shutil.rmtree(room / workdir, ignore_errors=True)
            with quick(8 if "mesh." in shlex.join(words) else 1):
                status = main(words[1:])
            told = capsys.readouterr()
            assert status == 0, f"{page.name}: {shlex.join(words)}\n{told.out[-2000:]}{told.err[-2000:]}"
            done.append(words)
    return done


@pytest.mark.full
@pytest.mark.parametrize("pages", GROUPS, ids=lambda pages: pages[0].name)
def test_the_commands_of_a_page_run(pages, room, base, capsys):
    done = run_commands(pages, room, base, capsys, None)
    assert len(done) > 25 or pages[0].name != "README.md"


@pytest.mark.long
def test_commands_that_take_minutes_run(room, base, capsys):
    assert run_commands(PAGES, room, base, capsys, "minutes")
