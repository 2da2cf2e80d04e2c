"""Plain text from the formats that packages carry: HTML, man pages, dictionaries, tagged corpora, Metamath databases.

Each function takes the text of a file and returns clean text or documents; none reads files. Regular expressions suffice because the
sources are known and machine-written.
"""

import html
import re

MAX_DOCUMENT = 64 * 1024  # characters; longer files are cut where it hurts least
PAGE = 2000  # characters of a page of dictionary entries or of a newspaper article at which a new one may begin

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\ufeff\ufffe\uffff]")
EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
TRAILING = re.compile(r"[ \t]+$", re.MULTILINE)
BLANK_LINES = re.compile(r"\n{4,}")


def tidy(text: str) -> str:
    """Unix line ends, no control characters, no blanks at line ends, at most two empty lines; e-mail addresses masked (personal data)."""
    text = CONTROLS.sub("", text.replace("\r\n", "\n").replace("\f", "\n").replace("\xa0", " "))
    if "@" in text:
        text = EMAIL.sub("name@example.org", text)
    return BLANK_LINES.sub("\n\n\n", TRAILING.sub("", text)).strip("\n")


def split_long(text: str, limit: int = MAX_DOCUMENT) -> list[str]:
    """Cut a text into parts of at most `limit` characters: at an empty line, else a line end, else a blank, else anywhere.

    The parts joined are the text.
    """
    parts, start = [], 0
    while len(text) - start > limit:
        low, high = start + limit // 2, start + limit
        for mark in ("\n\n", "\n", " ", "。"):
            cut = text.rfind(mark, low, high)
            if cut >= 0:
                high = cut + len(mark)
                break
        parts.append(text[start:high])
        start = high
    return [*parts, text[start:]] if start < len(text) else parts


def pages(entries, size: int = PAGE) -> list[str]:
    """Neighbouring short entries joined, an empty line between, into documents of about `size` characters."""
    documents, page, length = [], [], 0
    for entry in entries:
        page.append(entry)
        length += len(entry)
        if length >= size:
            documents.append("\n\n".join(page))
            page, length = [], 0
    return [*documents, "\n\n".join(page)] if page else documents


DROPPED = re.compile(r"<(script|style|head|noscript|footer|nav|header|aside)\b.*?</\1>|<!--.*?-->", re.DOTALL | re.IGNORECASE)
NAVIGATION = re.compile(
    r'<div class="(?:chlink\w*|header|nav-panel)">.*?</div>|<div class="?categorybox"?>.*?</div>'
    r'|<p id="mathjaxlink".*?</p>|<p class="foot">.*?</p>'
    r'|<span hidden="true" id="MAC[^>]*>(?:<span[^>]*>[^<]*</span>|[^<])*</span>'
    r"|<a [^>]*copiable-anchor[^>]*>.*?</a>|<div class=\"ChapSects\">.*?(?=<h3)|<label\b.*?</label>",
    re.DOTALL,
)
BLOCK = re.compile(
    r"</?(?:p|div|h[1-6]|ul|ol|dl|dd|dt|table|tr|pre|blockquote|section|hr|form|thead|tbody|caption|center)\b[^>]*>|<br\b[^>]*>",
    re.IGNORECASE,
)
TAG = re.compile(r"</?[a-zA-Z!?][^>]*>")


def from_html(page: str) -> str:
    """Visible text: blocks on lines of their own, list items dashed, cells tabbed, preformatted blocks as they stand."""
    body = re.search(r'<div id="DisplayArea".*?(?=<div id="SearchFrame"|<footer|$)', page, re.DOTALL)
    page = NAVIGATION.sub("", DROPPED.sub("", body[0] if body else page))
    out = []
    for i, part in enumerate(re.split(r"<pre\b[^>]*>(.*?)</pre>", page, flags=re.DOTALL | re.IGNORECASE)):
        if i % 2:
            out.append("\n\n" + html.unescape(TAG.sub("", part)).strip("\n") + "\n\n")
            continue
        part = re.sub(r"\s+", " ", part)
        part = re.sub(r"<li\b[^>]*>(?:\s*<p\b[^>]*>)?", "\n- ", part, flags=re.IGNORECASE)
        part = re.sub(r"(?:\s*</p>)*\s*</t[dh]>\s*<t[dh]\b[^>]*>(?:\s*<p\b[^>]*>)?", "\t", part, flags=re.IGNORECASE)
        part = html.unescape(TAG.sub("", BLOCK.sub("\n", part)))
        lines = (re.sub(r"[ \xa0]+", " ", line).strip() for line in part.split("\n"))
        out.append("\n".join(line for line in lines if line and line != "-"))
    return tidy("\n".join(out))


ROFF_TEXT = {"SH", "SS", "Sh", "Ss", "B", "I", "BR", "BI", "IR", "IB", "RB", "RI", "SM", "SB", "IP", "Ip", "TQ"}
ROFF_CHARACTERS = {
    "co": "©",
    "bu": "•",
    "em": "—",
    "en": "–",
    "lq": "“",
    "rq": "”",
    "oq": "‘",
    "cq": "’",
    "aq": "'",
    "dq": '"',
    "hy": "-",
    "ti": "~",
}
ROFF_ESCAPE = re.compile(
    r"\\(?:f(?:\(..|\[[^]]*\]|.)|s(?:[+-]?\d{1,2}|\[[^]]*\])|\*(?:\(..|\[[^]]*\]|.)|n[+-]?(?:\(..|\[[^]]*\]|.)|m\[[^]]*\]|[hvwlLbo]'[^']*'|\((..)|\[([^]]*)\]|(.)|$)"
)
ROFF_PLAIN = {"e": "\\", "\\": "\\", "-": "-", " ": " ", "~": " ", "0": " ", "'": "'", "`": "`", ".": ".", "t": "\t", "E": "\\"}


def from_man(page: str) -> str:
    """The text of a man page: headings, paragraphs and verbatim blocks without roff requests."""
    out, verbatim, skip_until = [], False, None
    for line in page.splitlines():
        if skip_until:
            skip_until = None if line.startswith(skip_until) else skip_until
            continue
        if not line.startswith((".", "'")):
            out.append(_roff_inline(line))
            continue
        request = re.match(r"[.'][ \t]*(\S*)[ \t]*(.*)", line)
        name, rest = request[1], request[2]
        if name in ("de", "ig", "am", "de1"):
            skip_until = ".."
        elif name in ("nf", "EX", "Vb", "Bd"):
            verbatim = True
        elif name in ("fi", "EE", "Ve", "Ed"):
            verbatim = False
        elif name in ROFF_TEXT:
            words = re.findall(r'"((?:[^"]|"")*)"?|(\S+)', rest)
            words = [_roff_inline(quoted or bare) for quoted, bare in words]
            if name in ("IP", "Ip"):
                out += ["", *words[:1]]
            elif name.lower() in ("sh", "ss"):
                out += ["", " ".join(words)]
            else:
                out.append(("" if len(name) == 2 and name not in ("SM", "SB") else " ").join(words))
        elif name in ("PP", "P", "LP", "TP", "HP", "sp", "Pp") and not verbatim:
            out.append("")
    return tidy("\n".join(out))


def _roff_inline(text: str) -> str:
    if "\\" not in text:
        return text
    text = re.sub(r'\\["#].*', "", text)

    def plain(match):
        code = match[1] or match[2]
        if code:
            return chr(int(code[1:], 16)) if re.fullmatch("u[0-9A-Fa-f]{4,5}", code) else ROFF_CHARACTERS.get(code, "")
        return ROFF_PLAIN.get(match[3] or "", "")

    return ROFF_ESCAPE.sub(plain, text)


def dictd_pages(index: str, size: int = PAGE) -> list[list[tuple[int, int]]]:
    """Neighbouring entries of a dictd dictionary in pages of about `size` bytes: (offset, length) of each entry, in bytes.

    An index line holds headword, offset and length, the numbers in base 64.
    """
    digits = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}

    def number(code):
        value = 0
        for c in code:
            value = value * 64 + digits[c]
        return value

    lines = (line.split("\t") for line in index.splitlines() if not line.startswith("00"))  # 00-database-...: about the file itself
    spans = {(number(fields[1]), number(fields[2])) for fields in lines if len(fields) >= 3}
    found, length = [[]], 0
    for start, n in sorted(spans):
        if length >= size:
            found.append([])
            length = 0
        found[-1].append((start, n))
        length += n
    return found


def from_dictd(entries: list[bytes]) -> str:
    """A page of dictd entries without markup, indent and source marks; entries with broken characters are left out."""
    kept = []
    for entry in entries:
        text = entry.decode("utf-8", errors="replace")
        text = re.sub(r"\s*\[(?:1913 Webster|WordNet 1\.5|PJC|Webster 1913 Suppl\.)\]", "", text)
        text = tidy(re.sub(r"(?m)^ {3}", "", re.sub(r"[{}]", "", text)))
        if len(text) > 20 and "\ufffd" not in text:
            kept.append(text)
    return "\n\n".join(kept)


def from_wordnet(data: str) -> list[str]:
    """`words: gloss; "example"` of each synonym set of a WordNet data file."""
    entries = []
    for line in data.splitlines():
        head, bar, gloss = line.partition(" | ")
        fields = head.split(" ")
        if line.startswith(" ") or not bar or len(fields) < 6:
            continue
        words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
        entries.append(", ".join(re.sub(r"\(\w+\)$", "", w).replace("_", " ") for w in words) + ": " + gloss.strip())
    return entries


def from_metamath(database: str) -> str:
    """A Metamath database without proofs (between `$=` and `$.`) and without who contributed what when."""
    database = re.sub(r"\$=.*?\$\.", "$.", database, flags=re.DOTALL)
    return tidy(re.sub(r"\s*\((?:Contributed|Revised|Proof\s+shortened|Proposed)\s+by\s[^()]*\)", "", database))


TAGGED = re.compile(r"/[A-Za-z]{1,4}(?: +|$)")
FULL_STOP = tuple("。！？”’）』」…；：，—")


def from_tagged_news(corpus: str) -> list[str]:
    """Articles of a newspaper whose words carry `/tag`: tags and word spacing go. A line without a full stop is a headline and may begin
    an article once the current one has a body."""
    articles, lines, has_body = [], [], False
    for line in corpus.splitlines():
        line = TAGGED.sub("", line).strip()
        if not line:
            continue
        headline = not line.endswith(FULL_STOP) and len(line) < 60
        if headline and has_body:
            articles.append("\n".join(lines))
            lines, has_body = [], False
        lines.append(line)
        has_body = has_body or (not headline and len(line) > 40)
    return [tidy(a) for a in [*articles, "\n".join(lines)] if len(a) > 40]
