"""What the cleaners take off and what they must leave, on small pieces of each format; and the open mix with no registry at all."""

import gzip
import json

import pytest

from gammalm.data import clean, open_mix


def test_html():
    page = """<html><head><title>no</title></head><body><header>menu</header><div id="DisplayArea"><h1>Rank &amp; file</h1>
      <p>One <b>bold</b>
      line.</p><ul><li><p>first</p></li><li>second</li></ul><table><tr><td><p>a</p></td><td>b</td></tr></table>
      <span hidden="true" id="MACx" class="MAC"><span class="emph">Preferences</span></span><span id="d">Options</span>
      <pre>if x &lt; 1:
          <b>y</b> = 2</pre></div><div id="SearchFrame"></div><footer>debug</footer></body></html>"""
    assert clean.from_html(page) == "Rank & file\nOne bold line.\n- first\n- second\na\tb\nOptions\n\n\nif x < 1:\n          y = 2"


def test_man_page():
    page = r""".\" comment
.TH LS 1
.SH 名称
ls \- 列出目录
.de XX
hidden
..
.TP
\fB\-a\fP, \fI\,全部\/\fP
不要忽略以 \(lq.\(rq 起始的条目
.BR cat (1),
.nf
  x\ey
.fi"""
    assert clean.from_man(page) == "名称\nls - 列出目录\n\n-a, 全部\n不要忽略以 “.” 起始的条目\ncat(1),\n  x\\y"


def test_dictionary_wordnet_metamath_and_news():
    entry = b"Dog \\Dog\\, n.\n   A {quadruped} of the genus Canis.\n   [1913 Webster]\n"
    assert len(entry) == 69
    page = clean.dictd_pages("00-database-url\tA\tB\nDog\tA\tBF\nsame again\tA\tBF\n")  # B = 1, F = 5: 69
    assert page == [[(0, 69)]]
    assert clean.from_dictd([entry, b"broken \xff and long enough to count"]) == "Dog \\Dog\\, n.\nA quadruped of the genus Canis."
    line = '00016380 29 v 02 drowse 0 nod_off(a) 0 004 @ 1 | be on the verge of sleeping; "x"  '
    assert clean.from_wordnet("  1 licence | text\n" + line) == ['drowse, nod off: be on the verge of sleeping; "x"']
    assert clean.from_metamath("a $p |- x $= ( b c ) ABC $. $( Text. (Contributed by NM, 5-Aug-1993.) $)") == "a $p |- x $. $( Text. $)"
    head, body = "迈向/v  新/a  世纪/n", "同胞/n  们/k  ，/w  " * 20 + "你/r  好/a  。/w"
    articles = clean.from_tagged_news("\n".join([head, body, head, body]))
    assert articles == ["迈向新世纪\n" + "同胞们，" * 20 + "你好。"] * 2


def test_tidy_keeps_layout_and_masks_addresses():
    text = "def f():\r\n\tx  = 1   \r\n\n\n\n\n    y\x00\ufeff\n# mail jo.doe@mail.example.com now\n@decorator"
    assert clean.tidy(text) == "def f():\n\tx  = 1\n\n\n    y\n# mail name@example.org now\n@decorator"


@pytest.mark.parametrize("text", ["", "short", "x" * 1000, "line\n" * 300, "para\n\n" * 200, "word " * 300, "一二三。" * 250])
def test_split_long_loses_nothing(text):
    parts = clean.split_long(text, 100)
    assert "".join(parts) == text and all(0 < len(p) <= 100 for p in parts)
    if "\n\n" in text:
        assert all(p.endswith("\n\n") for p in parts)


def test_poems_with_unwritable_characters_are_left_out():
    poems = [
        {"title": "春曉", "author": "孟浩然", "paragraphs": ["春眠不覺曉。", "處處聞啼鳥。"]},
        {"title": "x", "author": "y", "paragraphs": ["{上休下鳥}"]},
        {"rhythmic": "导引", "author": "和岘", "paragraphs": ["气和玉烛，睿化著鸿明。"]},
        {"title": "empty", "author": "z", "paragraphs": []},
    ]
    assert open_mix.poems(json.dumps(poems)) == ["春曉\n孟浩然\n春眠不覺曉。\n處處聞啼鳥。", "导引\n和岘\n气和玉烛，睿化著鸿明。"]


def test_sources_are_pinned_and_hold_no_evaluation():
    for source in open_mix.SOURCES:
        assert source.licence and source.domain in ("web", "encyclopaedia", "code", "math") and source.lang in ("en", "zh")
        package = source.package
        if package is None:
            continue
        assert "olmo" not in package.name and "eval" not in package.name and "bench" not in package.name
        if package.registry == "debian":
            assert not package.sha256 and "=" not in package.name
        else:
            assert len(package.sha256) == 64 and ("==" in package.name or "@" in package.name[1:])
        assert not any("spam" in pattern for pattern in source.patterns)


def test_shares_are_even_over_domains_then_languages_then_sources():
    shares = open_mix.shares(40, list(open_mix.SOURCES))
    by = lambda key: {k: sum(v for s, v in shares.items() if getattr(s, key) == k) for k in {getattr(s, key) for s in shares}}  # noqa: E731
    assert by("domain") == pytest.approx({"web": 10, "encyclopaedia": 10, "code": 10, "math": 10})
    assert by("group")["web-en"] == pytest.approx(5) and by("group")["encyclopaedia-zh"] == pytest.approx(3.3)
    assert open_mix.shares(0, list(open_mix.SOURCES)) == {s: s.megabytes for s in open_mix.SOURCES}


def test_units_are_taken_in_an_order_of_their_own(tmp_path):
    """A small share is a sample of the whole, not its beginning; and files that are no UTF-8 are counted."""
    import collections

    for i in range(40):
        (tmp_path / f"{i:02d}.py").write_text(f"# file {i}\n" * 10)
    (tmp_path / "bad.py").write_bytes(b"\xff\xfe" * 40)
    (tmp_path / "zipped.py.gz").write_bytes(gzip.compress(b"# in gzip\n" * 10))
    source = open_mix.Source("s", "code", "en", 1, "-", None, (), lambda _: open_mix.files("*.py", "*.gz")(tmp_path))
    skipped = collections.Counter()
    found = [text.split("\n")[0] for _, text in open_mix.SourceTask(source, None, 0).documents(skipped, tmp_path)]
    assert sorted(found) == sorted([f"# file {i}" for i in range(40)] + ["# in gzip"]) and found != sorted(found)
    assert skipped == {"undecodable": 1}
