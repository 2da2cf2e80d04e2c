"""Finds text that holds a piece of a benchmark item: any run of 13 words of a question, a choice or a solution.

Words are runs of letters or digits, folded (NFKC, case); a Chinese or Japanese character is a word. Punctuation and layout do not count, so
an item is found in whatever form it was copied. A question of 8 to 12 words counts where all of it stands in the text; a shorter one, and a
short choice ("the nearest major galaxy to the Milky Way"), is too common to mean anything, and an item of such parts alone is counted as
not checked. The 13 words are GPT-3's (Brown et al. 2020, app. C).
Shapes: W words of a text, G runs of all items.
"""

import collections
import dataclasses
import json
import re
import unicodedata
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gammalm.data import shards
from gammalm.data.benchmarks import benchmarks_folder, named, scored_texts
from gammalm.data.tokenizer import Tokenizer
from gammalm.errors import DataError
from gammalm.progress import Progress

RUN = 13  # words
SHORTEST = 8  # words of a question that counts as a whole
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
LENGTHS = tuple(range(SHORTEST, RUN + 1))
BEGINNING = 24  # bits of a hash by which it is looked up first
_SHIFT = np.uint64(64 - BEGINNING)
EXAMPLES = 5  # runs of words kept for people, per benchmark


def words(text: str) -> list[str]:
    """The words of a text, as they are compared."""
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def run_hashes(found: Sequence[str], lengths: Sequence[int]) -> dict[int, np.ndarray]:
    """{length: uint64 [W − length + 1]} of every run of `length` words, for ascending lengths; empty where the text is shorter.

    A polynomial in the words' CRC-32 plus one, modulo 2^64. Runs that differ in one word share a hash with a chance of 2^-32.
    """
    ids_W = np.fromiter((zlib.crc32(word.encode("utf-8", "replace")) for word in found), np.uint64, len(found))
    hashes, runs, size = {}, np.zeros(len(found) + 1, np.uint64), 0
    for length in lengths:
        while size < length:
            size += 1
            runs = runs[: max(0, len(found) - size + 1)] * _MULTIPLIER + ids_W[size - 1 :] + np.uint64(1)
        hashes[length] = runs
    return hashes


@dataclasses.dataclass
class Contamination:
    """What was found: documents that hold a piece of a benchmark, how often each item was met, and examples of the words.

    documents: {benchmark: documents}. items: {number of an item in the screen: documents}. examples: {benchmark: runs of words}.
    """

    documents: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    items: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    examples: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def add(self, other: "Contamination") -> None:
        self.documents += other.documents
        self.items += other.items
        for benchmark, texts in other.examples.items():
            kept = self.examples.setdefault(benchmark, [])
            kept += [text for text in texts if text not in kept][: EXAMPLES - len(kept)]


class Screen:
    """The runs of all items of some benchmarks: `find` says which items a text holds a piece of.

    hashes_G: uint64, sorted, distinct. owners_G: int32, the first item of each run. begun: bool [2^BEGINNING], beginnings of hashes that
    there are: most runs of a text are done with there. described: {benchmark: {"first": number of its first item, "items",
    "not_checked"}}.
    """

    def __init__(self, hashes_G: np.ndarray, owners_G: np.ndarray, begun: np.ndarray, described: dict[str, dict]):
        self.hashes_G, self.owners_G, self.begun, self.described = hashes_G, owners_G, begun, described

    @classmethod
    def build(cls, benchmarks: Mapping[str, Sequence[Sequence[str]]]) -> "Screen":
        """From {benchmark: [parts of an item, the question first, ...]}."""
        hashes, owners, described, number = [], [], {}, 0
        for name, items in benchmarks.items():
            entry = described[name] = {"first": number, "items": len(items), "not_checked": 0}
            for parts in items:
                checked = False
                for place, found in enumerate(map(words, parts)):
                    if (length := min(len(found), RUN)) >= (RUN if place else SHORTEST):
                        hashes.append(run_hashes(found, [length])[length])
                        owners.append(np.full(len(hashes[-1]), number, np.int32))
                        checked = True
                entry["not_checked"] += not checked
                number += 1
        hashes_G, first_G = np.unique(np.concatenate(hashes or [np.zeros(0, np.uint64)]), return_index=True)
        begun = np.zeros(1 << BEGINNING, bool)
        begun[hashes_G >> _SHIFT] = True
        return cls(hashes_G, np.concatenate(owners or [np.zeros(0, np.int32)])[first_G], begun, described)

    def save(self, folder: Path) -> None:
        """Write it into an existing folder, from which processes share it."""
        np.save(folder / "hashes.npy", self.hashes_G)
        np.save(folder / "owners.npy", self.owners_G)
        np.save(folder / "begun.npy", self.begun)
        (folder / "screen.json").write_text(json.dumps(self.described))

    @classmethod
    def load(cls, folder: Path) -> "Screen":
        """What `save` wrote, mapped and not read: cheap enough for every file of a corpus of many."""
        arrays = (np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ("hashes", "owners", "begun"))
        return cls(*arrays, json.loads((folder / "screen.json").read_text()))

    def benchmark_of(self, item: int) -> str:
        return [name for name, entry in self.described.items() if entry["first"] <= item][-1]

    def find(self, text: str) -> Contamination | None:
        """The items that a text holds a piece of, each run standing for the first item that has it; None where there is none."""
        found = words(text)
        if len(found) < SHORTEST or not len(self.hashes_G):
            return None
        owners: dict[int, str] = {}
        for length, hashes in run_hashes(found, LENGTHS).items():
            places = np.flatnonzero(self.begun[hashes >> _SHIFT])
            at = np.minimum(np.searchsorted(self.hashes_G, hashes[places]), len(self.hashes_G) - 1)
            same = self.hashes_G[at] == hashes[places]
            for place, owner in zip(places[same].tolist(), self.owners_G[at[same]].tolist(), strict=True):
                owners.setdefault(owner, " ".join(found[place : place + length]))
        if not owners:
            return None
        examples: dict[str, list[str]] = {}
        for item, run in owners.items():
            examples.setdefault(self.benchmark_of(item), []).append(run)
        one_each = collections.Counter(dict.fromkeys(examples, 1))
        return Contamination(one_each, collections.Counter(owners.keys()), {name: runs[:1] for name, runs in examples.items()})

    def report(self, found: Contamination) -> dict:
        """{"words", "shortest", "benchmarks": {name: {"items", "not_checked", "items_met", "documents", "examples"}}}, for a manifest."""
        met = collections.Counter(self.benchmark_of(item) for item in found.items)
        entries = {
            name: {
                "items": entry["items"],
                "not_checked": entry["not_checked"],
                "items_met": met[name],
                "documents": found.documents[name],
                "examples": found.examples.get(name, []),
            }
            for name, entry in self.described.items()
        }
        return {"words": RUN, "shortest": SHORTEST, "benchmarks": entries}


def benchmark_screen(names: Sequence[str], note=lambda line: None) -> Screen:
    """The screen of some benchmarks of `data.benchmarks`, `all` for each of them. Fetches them on the first call. Raises DataError."""
    chosen = named(names)
    folder = benchmarks_folder(note)
    return Screen.build({benchmark.name: scored_texts(folder, benchmark.name) for benchmark in chosen})


def corpus_contamination(folder: Path, manifest: dict, screen: Screen) -> dict:
    """`Screen.report` of a prepared corpus as it is, training and validation text alike; progress on stderr.

    Raises DataError for one without text.
    """
    from gammalm.data.load import GroupTokens  # brings Grain, which the workers that only screen do without

    if manifest["tokenizer"]["file"] != shards.TOKENIZER:
        raise DataError(f"{folder} holds numbers and no text: there is nothing to look for.")
    tokenizer = Tokenizer.load(folder / shards.TOKENIZER)
    whole = Contamination()
    total = sum(manifest["groups"][group][split]["tokens"] for group in manifest["groups"] for split in shards.SPLITS)
    progress = Progress("looking for benchmarks", total, "tokens")
    for group in manifest["groups"]:
        for split in shards.SPLITS:
            tokens = GroupTokens(folder, manifest, group, split)
            for start, length in zip(*(a.tolist() for a in tokens.documents()), strict=True):
                if found := screen.find(tokenizer.decode(tokens.read(start, length - 1))):
                    whole.add(found)
                progress.advance(length, group)
    progress.close()
    return screen.report(whole)
