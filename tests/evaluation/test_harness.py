"""Our models behind lm-evaluation-harness: its requests answered as its definition says, evaluations resumed, its own command line."""

import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("lm_eval")

from gammalm.cli.main import main
from gammalm.data import tokenizer
from gammalm.errors import ConfigError, DataError
from gammalm.evaluation import harness
from gammalm.evaluation.generate import Generator
from gammalm.evaluation.harness import GammaLM, Tasks, named_tasks
from gammalm.evaluation.results import read_results, samples_of
from gammalm.evaluation.scoring import Scorer
from gammalm.models.decoder import Model
from gammalm.training.load import save_model

from ..conftest import WORDS
from ..models.reference import log_softmax, logits_of, random_params, small_config
from ..training.pairs import GAMMALM, Pair
from .toy_tasks import ITEMS, write_tasks

pytestmark = pytest.mark.parity  # runs where the harness is installed
CONTEXT = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(Folder of a run at step 0 with a tokenizer beside it, its config, its parameters, the tokenizer)."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "some.model").write_bytes(tokenizer.train([*WORDS * 50, "小初始化使模型先凝聚再学习" * 5], 600))
    config = small_config(vocab_size=700, data__seq_len=CONTEXT, init__gamma=1.0)
    params = random_params(Model(config.model).specs, seed=3)
    save_model(folder / "run", config, jax.tree.map(jnp.asarray, params), {}, folder / "some.model")
    return folder / "run", config, params, tokenizer.Tokenizer.load(folder / "some.model")


@pytest.fixture
def lm(run):
    _, config, params, words = run
    model, how = Model(config.model), {"eps": config.model.norm_eps, "max_length": CONTEXT}
    return GammaLM(Scorer(model, params, {}, **how), Generator(model, params, {}, words, **how), quiet=True)


def log_probabilities(run, tokens):
    """Of every next token after each of `tokens`, at most CONTEXT: float64 [T, V]."""
    assert 0 < len(tokens) <= CONTEXT
    return log_softmax(logits_of(run[2], run[1].model, np.array(tokens)))


def likelihood(run, before, after, context=CONTEXT):
    """(log-probability, whether greedy) of the tokens `after`, given as many tokens `before` as fit."""
    logp = log_probabilities(run, [*before, *after][-context - 1 : -1])[-len(after) :]
    return logp[np.arange(len(after)), after].sum(), bool((logp.argmax(-1) == after).all())


def asked(*args):
    return types.SimpleNamespace(args=args, task_name="some task", doc_id=7)


def test_likelihoods_are_those_of_the_harness_s_definition(run, lm):
    words = run[3]
    pairs = [
        ("the model", " condense"), ("the model ", "condense"), ("", "the model"), ("  ", "a"), ("小初始化", "使模型"),
        ("every token of a corpus " * 6, "before it learns"), ("the mod", "el"),
    ]  # fmt: skip
    found = lm.loglikelihood([asked(*pair) for pair in pairs])
    for (context, continuation), (logprob, greedy) in zip(pairs, found, strict=True):
        blanks = len(context) - len(context.rstrip())
        context, continuation = context[: len(context) - blanks], context[len(context) - blanks :] + continuation
        before = words.encode(context)
        after = words.encode(context + continuation)[len(before) :]
        if not after:  # "model" is fewer tokens than "mod" and what follows
            after = words.encode(continuation)
        expected = likelihood(run, before or [words.eod_id], after)
        assert logprob == pytest.approx(expected[0], abs=2e-5) and greedy == expected[1]
    assert lm.requests["cut"] == 1 and len(lm.cut) == 1
    with pytest.raises(DataError, match="some task, item 7"):
        lm.loglikelihood([asked("the model", "")])
    with pytest.raises(DataError, match="' every token every .* longer than the 24 that the model reads"):
        lm.loglikelihood([asked("the model", " every token" * 30)])


def test_a_rolling_likelihood_counts_every_token_once(run, lm):
    texts = ["", "the model", "small initialization lets the model condense " * 9]
    kept = {}
    lm.cache_hook.add_partial = lambda name, args, answer: kept.update({(name, *args): answer})
    found = lm.loglikelihood_rolling([asked(text) for text in texts])
    assert kept == {("loglikelihood_rolling", text): total for text, total in zip(texts[1:], found[1:], strict=True)} and found[0] == 0
    for text, logprob in zip(texts, found, strict=True):
        tokens, expected, done = [run[3].eod_id, *run[3].encode(text)], 0.0, 0
        while done < len(tokens) - 1:  # windows of CONTEXT, the last one moved back to be full
            end = min(done + CONTEXT, len(tokens) - 1)
            window = tokens[max(0, end - CONTEXT) : end + 1]
            logp = log_probabilities(run, window[:-1])
            fresh = np.arange(len(window) - 1 - (end - done), len(window) - 1)
            expected += logp[fresh, np.array(window)[fresh + 1]].sum()
            done = end
        assert logprob == pytest.approx(expected, abs=1e-4)
    assert len(tokens) > 2 * CONTEXT


def test_generation_is_greedy_and_ends_before_a_stop(run, lm):
    contexts = ["the model", "token of a corpus " * 8, ""]
    written = lm.generate_until([asked(context, {"until": [], "max_gen_toks": 8}) for context in contexts])
    for context, text in zip(contexts, written, strict=True):
        tokens = (run[3].encode(context) or [run[3].eod_id])[-(CONTEXT - 8) :]
        new = []
        for _ in range(8):
            new.append(int(log_probabilities(run, tokens + new)[-1, : run[3].vocab_size].argmax()))
            if new[-1] == run[3].eod_id:
                break
        assert text == run[3].decode(new)
    assert lm.requests["prompts_cut"] == 1 and lm.requests["written"] >= 8
    stop = next(letter for letter in written[0][::-1] if letter != "\ufffd")
    how = {"until": [stop, ""], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0, "num_beams": 1}
    assert lm.generate_until([asked(contexts[0], how)]) == [written[0].split(stop)[0]]
    for unknown in ({"min_p": 0.1}, {"num_beams": 4}):
        with pytest.raises(ConfigError, match="min_p|beams"):
            lm.generate_until([asked("a", unknown)])
    with pytest.raises(ConfigError, match="no chat template"):
        lm.apply_chat_template([])


def test_draws_are_numbered_among_themselves(lm, monkeypatch):
    """So they stay the same when the greedy texts beside them were written before."""
    seen = []
    monkeypatch.setattr(lm.generator, "stream", lambda prompts, _: seen.append([prompt.index for prompt in prompts]) or [])
    greedy, drawn = (asked("a", {"until": [], "do_sample": sample}) for sample in (False, True))
    lm.generate_until([greedy, drawn, greedy, drawn])
    lm.generate_until([drawn, drawn])
    assert seen == [[None, 0, None, 1], [0, 1]]


@pytest.fixture
def tasks(tmp_path):
    return write_tasks(tmp_path)


@pytest.fixture
def few_tasks(monkeypatch):
    """The harness's own tasks, thousands of files, are left out."""
    monkeypatch.setattr(harness, "Tasks", lambda include_path: Tasks(include_path=include_path, include_defaults=False))


def expected(run, context=CONTEXT):
    """Of each item, whether it is answered rightly, and whether more than `context` tokens had to be read for it."""
    right, cut = [], []
    for item in ITEMS:
        before = run[3].encode(f"Q: {item['question']}\nA:")
        afters = [run[3].encode(f"Q: {item['question']}\nA: {choice}")[len(before) :] for choice in item["choices"]]
        scores = [likelihood(run, before, after, context)[0] for after in afters]
        right.append(int(np.argmax(scores) == item["gold"]))
        cut.append(any(len(before) + len(after) - 1 > context for after in afters))
    return right, cut


def evaluated(run, tasks, out, *options):
    arguments = ["eval", "--checkpoint", str(run[0]), "--include", str(tasks), "--out", str(out), *options]
    return main(arguments)


def test_an_evaluation_is_written_whole(run, tasks, few_tasks, tmp_path, capsys):
    assert evaluated(run, tasks, tmp_path / "out", "--tasks", "tiny_both", "--samples", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    found = read_results(tmp_path / "out")
    assert {name: found[name] for name in ("checkpoint", "data", "rows", "requests")} == {k: v for k, v in said.items() if k != "out"}
    right, cut = expected(run)
    rows = {(row["task"], row["metric"]): row for row in found["rows"]}
    row = rows["tiny_choices", "acc"]
    assert row["value"] == pytest.approx(np.mean(right)) and 0 < sum(right) < len(ITEMS)
    assert row["stderr"] == pytest.approx(np.std(right, ddof=1) / 3)
    assert (row["items"], row["of"], row["num_fewshot"], row["higher_is_better"], row["cut"]) == (9, 9, 0, True, sum(cut))
    assert rows["tiny_answers", "exact_match"]["items"] == 9
    assert [item["acc"] for item in samples_of(tmp_path / "out", "tiny_choices")] == right
    assert found["checkpoint"]["gamma"] == 1.0 and found["checkpoint"]["step"] == 0 and found["data"] == {"source": "harness"}
    assert found["checkpoint"]["mesh"] == {"data": jax.device_count()}
    assert found["harness"]["group_subtasks"] == {"tiny_both": ["tiny_choices", "tiny_answers"]}
    assert any((run[0] / "tensorboard").iterdir())


def test_an_evaluation_goes_on_where_it_was_stopped(run, tasks, few_tasks, tmp_path, capsys, monkeypatch):
    whole, score = Scorer.score, []

    def stopped(self, requests):
        for found in whole(self, requests):
            if len(score) == 10:
                raise KeyboardInterrupt
            score.append(found)
            yield found

    options = ["--tasks", "tiny_choices", "--json", "--batch-tokens", "150", "--max-length", "16"]
    monkeypatch.setattr(Scorer, "score", stopped)
    assert evaluated(run, tasks, tmp_path / "out", *options) == 130
    monkeypatch.setattr(Scorer, "score", whole)
    capsys.readouterr()
    assert evaluated(run, tasks, tmp_path / "out", *options) == 0
    rest = json.loads(capsys.readouterr().out)
    right, cut = expected(run, 16)
    assert rest["requests"]["requests"] == 4 * len(ITEMS) - 10
    assert rest["rows"][0]["value"] == pytest.approx(np.mean(right))
    assert rest["rows"][0]["cut"] == sum(cut) == len(ITEMS)
    assert evaluated(run, tasks, tmp_path / "out", *options) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["requests"]["requests"] == again["requests"]["cut"] == 0 and again["rows"] == rest["rows"]
    assert evaluated(run, tasks, tmp_path / "out", *options, "--max-length", "20") == 2
    assert "answers of another model (max_length differ)" in capsys.readouterr().err
    other = tmp_path / "other"
    shutil.copytree(run[0], other)
    config = json.loads((other / "config.json").read_text())
    config["model"]["dtype"] = "bfloat16"  # which a run may change on its way
    (other / "config.json").write_text(json.dumps(config))
    assert evaluated((other,), tasks, tmp_path / "out", *options) == 2
    assert "answers of another model (model_sha256 differ)" in capsys.readouterr().err


def test_what_cannot_be_evaluated_is_said(run, tasks, few_tasks, tmp_path, capsys):
    def refused(*options):
        status = evaluated(run, tasks, tmp_path / "out", *options)
        return status, capsys.readouterr().err

    status, said = refused("--tasks", "tiny_choises")
    assert status == 2 and "tiny_choices" in said and not (tmp_path / "out").exists()
    assert refused("--tasks", ",")[0] == 2
    status, said = refused("--tasks", "tiny_choices", "--limit", "1.5")
    assert status == 2 and "--limit 1.5" in said
    assert refused("--tasks", "tiny_choices", "--mesh", "rows=2")[0] == 2
    (tasks / "items.json").unlink()
    status, said = refused("--tasks", "tiny_choices")
    assert status == 1 and "items of tiny_choices cannot be loaded" in said and "Traceback" not in said
    bare = tmp_path / "bare"
    shutil.copytree(run[0], bare)
    (bare / "tokenizer.model").unlink()
    status = main(["eval", "--checkpoint", str(bare), "--include", str(tasks), "--tasks", "tiny_choices"])
    assert status == 2 and "--tokenizer" in capsys.readouterr().err


def test_names_of_tasks(tasks):
    manager = Tasks(include_path=str(tasks), include_defaults=False)
    assert named_tasks(manager, ["tiny_both"]) == ["tiny_both"]
    assert named_tasks(manager, ["tiny_a*,tiny_choices", "tiny_choices"]) == ["tiny_answers", "tiny_choices"]
    assert named_tasks(manager, [str(tasks / "group.yaml")]) == [str(tasks / "group.yaml")]
    with pytest.raises(ConfigError, match="no task 'quantum'. `gammalm lm-eval ls tasks`"):
        named_tasks(manager, ["quantum"])


def test_the_harness_s_command_line_knows_our_models_and_its_own(run, tasks, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lm_eval.tasks.TaskManager.__init__.__defaults__", (None, None, False, None))  # not the thousands of its own
    out = tmp_path / "out"
    arguments = ["run", "--tasks", "tiny_choices", "--include_path", str(tasks), "--output_path", str(out), "--batch_size", "3"]
    given = ["--model", "gammalm", "--model_args", f"checkpoint={run[0]},layout=plain"]
    assert main(["lm-eval", *arguments, *given]) == 0
    assert "|tiny_choices|" in capsys.readouterr().out
    (file,) = out.rglob("results_*.json")
    found = json.loads(file.read_text())
    assert found["results"]["tiny_choices"]["acc,none"] == pytest.approx(np.mean(expected(run)[0]))
    assert found["config"]["gamma"] == 1.0 and found["config"]["layout"] == "plain"
    assert main(["lm-eval", *arguments, "--model", "gammalm", "--model_args", f"checkpoint={run[0]},stpe=3"]) == 2
    assert "stpe" in capsys.readouterr().err
    assert main(["lm-eval", *arguments, "--model", "gammalm", "--model_args", f"checkpoint={run[0]},dtype=float16"]) == 2
    assert "choose one of float32, bfloat16" in capsys.readouterr().err
    assert {"hf", "vllm", "gammalm"} <= set(harness.model_registry)
    with pytest.raises(SystemExit) as end:
        main(["lm-eval", "run", "--help"])
    assert end.value.code == 0 and "--hf_hub_log_args" in capsys.readouterr().out
    assert main(["lm-eval"]) == 2


@pytest.mark.full
def test_two_processes_answer_as_one(run, tasks, tmp_path, capsys):
    """Each has four devices and all requests; one has kept fewer answers than the other when they go on, and process 0 alone writes."""
    few = "harness.Tasks = lambda include_path: Tasks(include_path=include_path, include_defaults=False)"
    program = f"from gammalm.evaluation import harness\nfrom gammalm.evaluation.harness import Tasks\n{few}\n{GAMMALM}"
    arguments = ["eval", "--checkpoint", run[0], "--include", tasks, "--tasks", "tiny_both", "--samples", "--mesh", "data=4,fsdp=2"]

    def both(name, out):
        with Pair(tmp_path / name, program, *arguments, "--out", out, JAX_DISABLE_MOST_OPTIMIZATIONS="false") as pair:  # to the last bit
            assert pair.ended() == [0, 0], pair.told()
            assert "tiny_choices" in pair.said(0) and "tiny_choices" not in pair.said(1).replace(str(tasks), "")
        return read_results(out)

    two = both("two", tmp_path / "out")
    assert main(["eval", *map(str, arguments[1:-2]), "--out", str(tmp_path / "one")]) == 0
    one = read_results(tmp_path / "one")
    assert two["rows"] == one["rows"]
    for task in ("tiny_choices", "tiny_answers"):
        for ours, theirs in zip(samples_of(tmp_path / "out", task), samples_of(tmp_path / "one", task), strict=True):
            if task == "tiny_answers":
                assert ours["resps"] == theirs["resps"]
            else:
                np.testing.assert_allclose(*([float(r[0][0]) for r in item["resps"]] for item in (ours, theirs)), atol=2e-5)
    (tmp_path / "out" / "responses_rank1.db").unlink()
    assert both("again", tmp_path / "out")["requests"]["requests"] == 0
