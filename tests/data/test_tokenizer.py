"""Every text comes back exactly, whatever the tokenizer was trained on; byte counts add up to the text's own."""

import random
import sys

import numpy as np
import pytest

from gammalm.data.tokenizer import Tokenizer, train
from gammalm.errors import DataError

DIFFICULT = [
    "",
    " ",
    "   leading and trailing   ",
    "\n\n\n\ttabs\t\tand \n  blanks\t\t\t\t\t\t\n",
    "windows\r\nline\r\nends\r",
    "def f(x):\n    if x:\n\t\treturn  x  # ok\n",
    "全角标点：“你好”，（世界）！　全角空格。",
    "中" * 30_000,
    "emoji 👩‍👩‍👧‍👦 🇨🇳 🏴‍☠️ e\u0301 \u200b\ufeff",
    "\u2581 the meta symbol \u2581\u2581 itself \u2585 and U+2585",
    "\x00\x01\x1b[0m\x7f control \x85 \u2028 \u2029 characters",
    "<unk><eod></s><s><0x0A><0xE4> look like control tokens",
    "\U0010ffff\U0001f9ff\ufffe\ufffd",
    "0123456789 3.14159 1,000,000",
]


def random_text(rng):
    """Characters drawn from all of Unicode (no surrogates), from ASCII, and from the troublesome few."""
    anything = lambda: chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, sys.maxunicode + 1)]))  # noqa: E731
    ascii_ = lambda: chr(rng.randrange(128))  # noqa: E731
    troublesome = lambda: rng.choice("\u2581\u2585 \t\n\r\x00<>一")  # noqa: E731
    return "".join(rng.choice([anything, ascii_, troublesome])() for _ in range(rng.randrange(200)))


@pytest.fixture(scope="module")
def bilingual():
    texts = ["the cat sat on the mat\n    and purred\tloudly; " * 20, "春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。" * 20]
    return Tokenizer(train(texts, 700))


@pytest.fixture(scope="module")
def no_blank():
    return Tokenizer(train(["春眠不觉晓处处闻啼鸟" * 10], 512))  # a blank has no piece of its own here


@pytest.mark.parametrize("name", ["bilingual", "no_blank"])
def test_difficult_and_random_text_survives(name, request):
    tok = request.getfixturevalue(name)
    rng = random.Random(1)
    texts = DIFFICULT + [random_text(rng) for _ in range(300)]
    for text, ids in zip(texts, tok.encode(texts), strict=True):
        assert tok.decode(ids) == text
        assert tok.encode(text) == ids  # alone or in a list: the same
        assert tok.eod_id not in ids


def test_token_bytes_count_the_text(bilingual):
    table = bilingual.token_bytes()
    assert table.shape == (bilingual.vocab_size,) and table[bilingual.eod_id] == 0
    for text in DIFFICULT:
        assert table[np.array(bilingual.encode(text), int)].sum() == len(text.encode())


def test_ids_fit_the_vocabulary_and_merges_are_learned(bilingual):
    ids = bilingual.encode("the cat sat on the mat")
    assert max(ids) < bilingual.vocab_size <= 700
    assert len(ids) < 10  # 22 characters


def test_rare_characters_do_not_crowd_out_a_small_vocabulary():
    rare = "".join(chr(0x4E00 + i) for i in range(5000))  # 5,000 distinct characters, 512 pieces
    tok = Tokenizer(train([rare + "the model learns " * 3000], 512))
    assert tok.vocab_size <= 512
    assert tok.decode(tok.encode(rare)) == rare
    assert len(tok.encode("the model learns")) <= 6


def test_a_long_line_is_part_of_the_training():
    tok = Tokenizer(train(["凝聚现象" * 20_000], 512))
    assert len(tok.encode("凝聚现象" * 8)) <= 8


def test_faults_are_named():
    with pytest.raises(DataError, match="at least 512"):
        train(["text"], 300)
    with pytest.raises(DataError, match="no text"):
        train([], 512)
    with pytest.raises(DataError, match="no SentencePiece model"):
        Tokenizer(b"not a model")
    with pytest.raises(DataError, match="cannot be read"):
        Tokenizer.load("/nowhere/tokenizer.model")
