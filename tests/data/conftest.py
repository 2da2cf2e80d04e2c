"""A small bilingual corpus of several domains, prepared once, for the tests of the data room. Nothing here needs a network."""

import json
import random

import pytest

from gammalm.data.prepare import Request, prepare

WORDS = "small initialization lets the model condense before it learns to memorise every token of a corpus".split()
HAN = "小初始化使模型先凝聚再学习数据中的规律而不是记忆每个词元天地玄黄宇宙洪荒日月盈昃辰宿列张"


def english(rng, n):
    return " ".join(rng.choice(WORDS) for _ in range(n)) + ".\n"


def chinese(rng, n):
    return "".join(rng.choice(HAN) for _ in range(n)) + "。"


def code(rng, n):
    return "".join(f"def {rng.choice(WORDS)}(x):\n\tif x:\n        return x + {rng.randrange(100)}\n\n" for _ in range(n))


def write_corpus(folder, seed=0, documents=150):
    """Three domains, two languages, one JSON-lines file; returns its path. Document lengths vary from a word to several sequences."""
    rng = random.Random(seed)
    path = folder / "corpus.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for i in range(documents):
            for domain, lang, make in (("web", "en", english), ("web", "zh", chinese), ("code", "en", code)):
                text = make(rng, rng.choice([1, 3, 10, 40, 120])) + f"{i}"
                file.write(json.dumps({"text": text, "domain": domain, "lang": lang}, ensure_ascii=False) + "\n")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """(prepared folder, its manifest)."""
    folder = tmp_path_factory.mktemp("corpus")
    out = folder / "prepared"
    manifest = prepare(Request((str(write_corpus(folder)),), out, vocab_size=600, quiet=True))
    return out, manifest
