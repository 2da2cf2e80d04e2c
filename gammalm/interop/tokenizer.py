"""Our SentencePiece tokenizer written as the `tokenizer.json` that transformers reads: the same ids for every text.

Blanks stay blanks in the pieces of the JSON, so nothing has to be normalized: a blank is not written as U+2581 on the way in, and a
U+2581 of the text has no piece, is spelled in bytes, and comes back as itself, which is what `gammalm.data.tokenizer` does too.
Written by hand because neither `tokenizers` nor protobuf is needed to know ids, pieces, scores and kinds.
V = vocabulary size.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import sentencepiece

from gammalm.errors import ConfigError, DataError
from gammalm.files import write_json_atomic, write_text_atomic

BLANK = "\u2581"  # what SentencePiece writes for a blank
PROBE = "  Ａ  e\u0301 ﬁ\u3000 "  # two blanks at the start, full-width and composed forms: comes back with its blanks alone rewritten

ANYWHERE = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}  # how a token would be found in a text


def read_tokenizer(path: "str | os.PathLike", *, vocab_size: int, sha256: str | None = None) -> tuple[bytes, int]:
    """The SentencePiece model in the file `path` for a language model of `vocab_size` tokens, and the id that ends a document.

    `sha256` is the hash of the tokenizer that the language model was trained with; None: not known. Raises DataError for a file that is
    no such model, ConfigError for one that is not the language model's: of another hash, or with more tokens.
    """
    try:
        model = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"The tokenizer {path} cannot be read ({error.strerror}). Name the file of a SentencePiece model.") from error
    sp = _processor(model, str(path))
    if sha256 is not None and hashlib.sha256(model).hexdigest() != sha256:
        raise ConfigError(
            f"{path} is another tokenizer than that of the model's training (sha256 {sha256}): token numbers would mean other text. "
            "Name the file of that one, or no tokenizer."
        )
    if sp.vocab_size() > vocab_size:
        raise ConfigError(f"{path} has {sp.vocab_size()} tokens, the model {vocab_size}: it is not this model's tokenizer. Name another.")
    return model, sp.eos_id()


def _processor(model: bytes, where: str):
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except Exception as error:  # sentencepiece raises RuntimeError or its own kinds, by version
        raise DataError(f"{where} is no SentencePiece model ({error}). Prepare the data again.") from error


def write_tokenizer(model: bytes, out_dir: "str | os.PathLike", where: str = "tokenizer") -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and the model itself, `tokenizer.model`, into the folder `out_dir` of a new export.

    `model` is a SentencePiece model as `gammalm data prepare` trains it, `where` its name in messages. Special tokens are never found in
    a text: `<eod>` written in it is five characters, as in training (`split_special_tokens`).
    Raises DataError for a model that `tokenizer.json` cannot express exactly, OSError where the files cannot be written.
    """
    sp = _processor(model, where)
    definition = tokenizer_json(sp, where)
    out = Path(out_dir)
    (out / "tokenizer.model").write_bytes(model)
    write_text_atomic(out / "tokenizer.json", json.dumps(definition, ensure_ascii=False))  # on one line: the merges are many
    write_json_atomic(out / "tokenizer_config.json", tokenizer_config(sp))


def tokenizer_config(sp) -> dict[str, Any]:
    """The content of `tokenizer_config.json`: no begin token, no end token added, special tokens not searched for in texts."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": sp.id_to_piece(sp.eos_id()),
        "unk_token": sp.id_to_piece(sp.unk_id()),
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def tokenizer_json(sp, where: str = "tokenizer") -> dict[str, Any]:
    """The content of `tokenizer.json` for the loaded model `sp`. Raises DataError where it would not give the same ids."""
    if sp.normalize(PROBE) != PROBE.replace(" ", BLANK):
        raise DataError(f"{where} rewrites texts before it cuts them (a blank in front, or Unicode forms); such models cannot be exported.")
    controls, vocab, learned, tabs, in_bytes = [], {}, {}, [], 0
    for i in range(sp.vocab_size()):
        piece = sp.id_to_piece(i)
        if sp.is_control(i) or sp.is_unknown(i):
            controls.append({"id": i, "content": piece, "special": True, **ANYWHERE})
        elif sp.is_byte(i):
            in_bytes += 1
        else:
            piece = piece.replace(BLANK, " ")
            if "\t" in piece:
                tabs.append(piece)
            else:
                learned[piece] = sp.get_score(i)
        vocab[piece] = i
    tabs.sort()
    if in_bytes != 256 or sp.eos_id() < 0 or len(vocab) != sp.vocab_size():
        raise DataError(f"{where} lacks byte fallback or an end-of-document token, or holds a piece twice, so it is none of ours.")
    if tabs != ["\t" * n for n in range(1, len(tabs) + 1)]:
        raise DataError(f"{where} has pieces of tabs and other characters, or gaps between its runs of tabs, so it is none of ours.")
    # Runs of tabs are symbols of their own: taken from the left, the longest first, never joined with a neighbour.
    runs = {"type": "Split", "pattern": {"Regex": f"\\t{{1,{len(tabs)}}}"}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": controls,
        "normalizer": None,
        "pre_tokenizer": runs if tabs else None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": sp.id_to_piece(sp.unk_id()),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,  # a word that is a piece may still be cut otherwise: SentencePiece joins from below
            "vocab": vocab,
            "merges": _merges({run: -len(run) for run in tabs}, where) + _merges(learned, where),
        },
    }


def _merges(scores: dict[str, float], where: str) -> list[list[str]]:
    """Every pair of pieces that joins to a piece, best score of the joined piece first: SentencePiece joins whatever gives a piece."""
    joined = sorted((piece for piece in scores if len(piece) > 1), key=scores.get, reverse=True)
    if len({scores[piece] for piece in joined}) < len(joined) or any(scores[piece] % 1 for piece in joined):
        raise DataError(f"{where} is no BPE model (its scores are no ranks); only BPE models can be exported.")
    merges = []
    for piece in joined:
        cuts = [[piece[:i], piece[i:]] for i in range(1, len(piece))]
        pairs = [cut for cut in cuts if cut[0] in scores and cut[1] in scores]
        if not pairs or not all(character in scores for character in piece):
            raise DataError(f"{where}: the piece {piece!r} cannot be joined from its characters, so it is none of ours.")
        merges += pairs
    return merges
