"""A lossless SentencePiece tokenizer: BPE with byte fallback, under which every text comes back exactly.

SentencePiece alone loses three things: it writes a blank as U+2581, so a U+2581 of the text would come back as a blank; it skips
training sentences with a tab; and a blank it never saw in training falls back to the bytes of U+2581. So tabs are symbols of their own,
the few characters it cannot carry are written as byte tokens by us, and ids are turned back into bytes by our own table.
V = vocabulary size.
"""

import collections
import hashlib
import io
import re

import numpy as np
import sentencepiece

from gammalm.errors import DataError

BLANK = "\u2581"  # what SentencePiece writes for a blank
TABS = ["\t" * n for n in (1, 2, 3, 4)]
RESERVED = "\t\x00\u2581\u2585"  # the trainer drops every sentence that holds one of these
CHUNK = 1000  # characters per training sentence
MIN_VOCAB = 512  # 256 bytes, the controls and tabs, and room for the letters
CHARACTER_SHARE = 0.5  # of the free vocabulary at most may be single characters; rarer ones are spelled in bytes
CHARACTER_COVERAGE = 0.9995  # of the sample's characters, where there is room


class Tokenizer:
    """A trained model. `vocab_size` = V; `eod_id` ends every document; `sha256` identifies the model.

    Source: Kudo & Richardson 2018 (arXiv:1808.06226). Raises DataError where the bytes are no such model.
    """

    def __init__(self, model: bytes, where: str = "tokenizer"):
        try:
            self._sp = sentencepiece.SentencePieceProcessor(model_proto=model)
        except Exception as error:  # sentencepiece raises RuntimeError or its own kinds, by version
            raise DataError(f"{where} is no SentencePiece model ({error}). Prepare the data again.") from error
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.vocab_size = self._sp.vocab_size()
        self.eod_id = self._sp.eos_id()
        self._bytes = [self._piece_bytes(i) for i in range(self.vocab_size)]
        self._byte_ids = {self._bytes[i][0]: i for i in range(self.vocab_size) if self._sp.is_byte(i)}
        if len(self._byte_ids) != 256 or self.eod_id < 0:
            raise DataError(
                f"{where} lacks byte fallback or an end-of-document token, so text would not survive it. Prepare the data again."
            )
        knows_blank = BLANK in (self._sp.id_to_piece(i) for i in range(self.vocab_size))
        self._unsafe = re.compile(f"([{BLANK}]+)" if knows_blank else f"([{BLANK} ]+)")

    @classmethod
    def load(cls, path) -> "Tokenizer":
        """The model in file `path`. Raises DataError where it is missing or damaged."""
        try:
            with open(path, "rb") as file:
                return cls(file.read(), str(path))
        except OSError as error:
            raise DataError(f"The tokenizer {path} cannot be read ({error.strerror}). Prepare the data again.") from error

    def _piece_bytes(self, i: int) -> bytes:
        if self._sp.is_control(i) or self._sp.is_unknown(i):
            return b""
        piece = self._sp.id_to_piece(i)
        return bytes([int(piece[3:5], 16)]) if self._sp.is_byte(i) else piece.replace(BLANK, " ").encode()

    def encode(self, text: "str | list[str]") -> "list[int] | list[list[int]]":
        """Token ids of a text, or of each text of a list. `decode` gives the text back exactly; no control token is ever added."""
        if isinstance(text, str):
            return self._encode_unsafe(text) if self._unsafe.search(text) else self._sp.encode(text)
        unsafe = {i for i, t in enumerate(text) if self._unsafe.search(t)}
        ids = self._sp.encode(["" if i in unsafe else t for i, t in enumerate(text)])
        for i in unsafe:
            ids[i] = self._encode_unsafe(text[i])
        return ids

    def _encode_unsafe(self, text: str) -> list[int]:
        ids = []
        for i, part in enumerate(self._unsafe.split(text)):
            ids += [self._byte_ids[b] for b in part.encode()] if i % 2 else self._sp.encode(part)
        return ids

    def decode(self, ids) -> str:
        """The text of token ids; control tokens stand for nothing, and bytes that are no UTF-8 (a character cut in two) become U+FFFD."""
        return self.to_bytes(ids).decode("utf-8", errors="replace")

    def to_bytes(self, ids) -> bytes:
        """The UTF-8 of the text of token ids, of which a character may be cut in two; control tokens stand for nothing."""
        return b"".join(self._bytes[int(i)] for i in ids)

    def token_bytes(self) -> np.ndarray:
        """int32 [V]: bytes of text that each token id stands for; 0 for control tokens. The denominator of bits per byte."""
        return np.array([len(b) for b in self._bytes], np.int32)


def train(texts, vocab_size: int, *, threads: int = 2) -> bytes:
    """Train a model on `texts` (an iterable of str) and return its bytes.

    A corpus too small for `vocab_size` pieces gives fewer. Character coverage is chosen so that single characters take at most half of
    the vocabulary: with 1,024 pieces and Chinese text the rare characters are spelled in bytes.
    Raises DataError for a vocabulary below 512 or where there is no text.
    """
    if vocab_size < MIN_VOCAB:
        raise DataError(f"A vocabulary of {vocab_size} is too small: 256 bytes and the letters need at least {MIN_VOCAB}.")
    texts = list(texts)
    counts = collections.Counter()
    for text in texts:
        counts.update(text)
    if not counts:
        raise DataError("There is no text to train a tokenizer on.")
    free = vocab_size - 256 - len(TABS) - 2
    room, total, kept = int(CHARACTER_SHARE * free), sum(counts.values()), 0
    characters = []
    for character, n in counts.most_common(room):
        if kept >= CHARACTER_COVERAGE * total:
            break
        characters.append(character)
        kept += n
    sentences = re.findall(f"[^{RESERVED}]{{1,{CHUNK}}}", "\n".join(texts))
    cut = re.compile("[^" + re.escape("".join(characters)) + "]+")  # at the characters that will be spelled in bytes
    sentences = [part for sentence in sentences for part in cut.split(sentence) if part]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=TABS,
        max_sentence_length=CHUNK * 4 + 1,  # in bytes
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        pad_id=-1,
        eos_piece="<eod>",
        num_threads=threads,
        minloglevel=3,
    )
    return model.getvalue()
