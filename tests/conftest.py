"""Settings of every test, made before JAX is imported: CPU only, eight host devices, strict ranks, a shared compilation cache.

And `corpus`: a small bilingual corpus of several domains, prepared once per worker, that needs no network.
"""

import json
import os
import random
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # gammalm and configs, installed or not

os.environ |= {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),  # the same for programs that tests start
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip(),
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
# Programs compile once for all tests, workers and runs: a second run of the suite spends its time on the tests.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPO / ".cache" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

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
    from gammalm.data.prepare import Request, prepare

    folder = tmp_path_factory.mktemp("corpus")
    out = folder / "prepared"
    manifest = prepare(Request((str(write_corpus(folder)),), out, vocab_size=600, quiet=True))
    return out, manifest
