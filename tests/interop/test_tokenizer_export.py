"""The exported `tokenizer.json` gives our ids for every text: read by a small interpreter of our own, and by transformers itself."""

import io
import json
import random
import re
import sysconfig
from pathlib import Path

import pytest
import sentencepiece

from gammalm.config import load_config
from gammalm.data.tokenizer import Tokenizer, train
from gammalm.errors import ConfigError, DataError
from gammalm.interop.export import export_hf
from gammalm.interop.tokenizer import read_tokenizer, write_tokenizer

from ..data.test_tokenizer import DIFFICULT, random_text
from .cases import random_model

ENGLISH = "the cat sat on the mat\n    and purred\tloudly;\n\t\tif x == 10:  return  y # --------\n"
CHINESE = "春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。"
TEXTS = [
    *DIFFICULT,
    *("a" + "\t" * n + "b" + " " * n + "c" for n in range(1, 12)),
    "\t \t\t \t\t\t \t\t\t\t\t\t\t\t\t\t",
    "12345 0 007 1e-12 ２０２６",
    "<eod>the cat<eod>",
    "<0x41><0xE2><0x96><0x81>",
    "\u2581the\u2581 \u2581cat\u2581\u2581 sat\u2585",
    ("x = " + "1 + " * 3000 + "the cat sat  \t" * 200) * 2,
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """name -> (our tokenizer, the folder of its export)."""
    models = {
        "mixed": train([ENGLISH * 20, CHINESE * 20], 700),
        "no blank": train([CHINESE * 10], 512),  # a blank has no piece of its own here
        "few letters": train(["".join(random.Random(i).choices("ab ", k=300)) for i in range(60)], 600),  # pieces overlap in every way
    }
    made = {}
    for name, model in models.items():
        folder = tmp_path_factory.mktemp("export")
        write_tokenizer(model, folder)
        made[name] = Tokenizer(model), folder
    return made


def interpreter(folder):
    """`encode` as the format of tokenizer.json describes it: cut out tabs, characters or their bytes, then the best-ranked pair first."""
    definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocab, split = definition["model"]["vocab"], re.compile(f"({definition['pre_tokenizer']['pattern']['Regex']})")
    rank = {tuple(pair): i for i, pair in enumerate(definition["model"]["merges"])}
    assert definition["normalizer"] is None and definition["model"]["byte_fallback"] and not definition["model"]["ignore_merges"]

    def encode(text):
        ids = []
        for word in filter(None, split.split(text)):
            symbols = [s for c in word for s in ([c] if c in vocab else [f"<0x{b:02X}>" for b in c.encode()])]
            while len(symbols) > 1:
                best, at = min((rank.get(pair, len(rank)), i) for i, pair in enumerate(zip(symbols, symbols[1:], strict=False)))
                if best == len(rank):
                    break
                symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            ids += [vocab[s] for s in symbols]
        return ids

    return encode


@pytest.mark.parametrize("name", ["mixed", "no blank", "few letters"])
def test_the_definition_means_our_ids(exported, name):
    ours, folder = exported[name]
    encode, rng = interpreter(folder), random.Random(2)
    texts = [t for t in TEXTS if len(t) < 300] + [random_text(rng) for _ in range(100)]
    texts += ["".join(rng.choices("ab ", k=rng.randrange(40))) for _ in range(300)]
    for text, ids in zip(texts, ours.encode(texts), strict=True):
        assert encode(text) == ids, repr(text)


def test_the_files(exported):
    ours, folder = exported["mixed"]
    assert Tokenizer.load(folder / "tokenizer.model").sha256 == ours.sha256
    definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    assert sorted(definition["model"]["vocab"].values()) == list(range(ours.vocab_size))
    assert [(t["content"], t["id"], t["special"]) for t in definition["added_tokens"]] == [("<unk>", 0, True), ("<eod>", ours.eod_id, True)]


def spm(**changes):
    """A SentencePiece model trained as ours is, but for `changes`."""
    model = io.BytesIO()
    ours = dict(
        model_type="bpe", vocab_size=400, hard_vocab_limit=False, byte_fallback=True, normalization_rule_name="identity",
        add_dummy_prefix=False, remove_extra_whitespaces=False, split_digits=True, unk_id=0, eos_id=1, bos_id=-1, pad_id=-1,
        eos_piece="<eod>", minloglevel=3,
    )  # fmt: skip
    lines = ["the cat sat on the mat and purred", "a man a plan a canal"] * 20
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **ours | changes)
    return model.getvalue()


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(model_type="unigram"), "no BPE"),
        (dict(add_dummy_prefix=True), "rewrites texts"),
        (dict(remove_extra_whitespaces=True), "rewrites texts"),
        (dict(normalization_rule_name="nmt_nfkc"), "rewrites texts"),
        (dict(normalization_rule_name="nfkc"), "rewrites texts"),
        (dict(byte_fallback=False), "byte fallback"),
        (dict(user_defined_symbols=["\t", "\t\t\t"]), "runs of tabs"),
        (dict(user_defined_symbols=["cat sat"]), "no BPE|cannot be joined"),
    ],
)
def test_models_that_would_not_agree_are_refused(tmp_path, changes, reason):
    with pytest.raises(DataError, match=reason):
        write_tokenizer(spm(**changes), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_faults_are_named(tmp_path):
    write_tokenizer(spm(), tmp_path)  # the settings above are those of a model that can be written
    with pytest.raises(DataError, match="no SentencePiece model"):
        write_tokenizer(b"not a model", tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        read_tokenizer(tmp_path / "absent.model", vocab_size=1000)
    (tmp_path / "text.model").write_text("not a model")
    with pytest.raises(DataError, match="text.model is no SentencePiece model"):
        read_tokenizer(tmp_path / "text.model", vocab_size=1000)


def test_a_tokenizer_that_is_not_the_models(tmp_path):
    model = spm(vocab_size=400, eos_id=3, bos_id=-1)
    (tmp_path / "some.model").write_bytes(model)
    size, sha256 = Tokenizer(model).vocab_size, Tokenizer(model).sha256
    assert read_tokenizer(tmp_path / "some.model", vocab_size=size, sha256=sha256) == (model, 3)
    assert read_tokenizer(tmp_path / "some.model", vocab_size=size + 50) == (model, 3)
    with pytest.raises(ConfigError, match=f"some.model has {size} tokens, the model {size - 1}"):
        read_tokenizer(tmp_path / "some.model", vocab_size=size - 1, sha256=sha256)
    with pytest.raises(ConfigError, match="some.model is another tokenizer"):
        read_tokenizer(tmp_path / "some.model", vocab_size=size, sha256=Tokenizer(spm()).sha256)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["mixed", "no blank", "few letters"])
def test_transformers_gives_our_ids_and_the_text_back(exported, name):
    transformers = pytest.importorskip("transformers")
    ours, folder = exported[name]
    theirs, rng = transformers.AutoTokenizer.from_pretrained(folder), random.Random(3)
    texts = TEXTS + [random_text(rng) for _ in range(500)] + ["".join(rng.choices("ab ", k=rng.randrange(80))) for _ in range(1000)]
    library = Path(sysconfig.get_path("stdlib"))
    texts += [line for file in ("ast.py", "heapq.py") for line in (library / file).read_text("utf-8").splitlines(keepends=True)]
    texts.append((library / "ast.py").read_text("utf-8"))
    for text, ids, batched in zip(texts, ours.encode(texts), theirs(texts)["input_ids"], strict=True):
        assert theirs(text)["input_ids"] == batched == ids, repr(text[:200])
        assert theirs.decode(ids) == text
    assert (theirs.eos_token_id, theirs.eos_token, theirs.bos_token, theirs.pad_token) == (ours.eod_id, "<eod>", None, None)
    assert len(theirs) == ours.vocab_size
    assert theirs.decode([ours.eod_id, *ours.encode("the cat")], skip_special_tokens=True) == "the cat"


@pytest.mark.parity
def test_beside_our_own_modelling_file(exported, tmp_path, monkeypatch):
    """transformers reads the model's config first, which is code of the folder: the call of docs/huggingface.md."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = load_config("lm:size=tiny,vocab=1000")
    ours, folder = exported["mixed"]
    export_hf(config, *random_model(config), tmp_path / "out", target="gammalm", tokenizer=folder / "tokenizer.model")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    for text, ids in zip(TEXTS, ours.encode(TEXTS), strict=True):
        assert theirs(text)["input_ids"] == ids, repr(text[:200])


@pytest.mark.parity
@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "glm4_moe", "deepseek_v3", "mistral", "qwen3", "olmo2"])
def test_the_model_beside_it_does_not_change_the_tokenizer(corpus, tmp_path, model_type):
    transformers = pytest.importorskip("transformers")
    write_tokenizer((corpus[0] / "tokenizer.model").read_bytes(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, theirs = Tokenizer.load(corpus[0] / "tokenizer.model"), transformers.AutoTokenizer.from_pretrained(tmp_path)
    saved = theirs.save_pretrained(tmp_path / "again") and transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    texts = [*TEXTS, *(json.loads(line)["text"] for line in (corpus[0].parent / "corpus.jsonl").read_text("utf-8").splitlines()[:200])]
    for text, ids in zip(texts, ours.encode(texts), strict=True):
        assert theirs(text)["input_ids"] == saved(text)["input_ids"] == ids, repr(text[:200])
