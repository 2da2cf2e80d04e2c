"""What mkdocs does not know of these pages: which there are, the generated ones, and links that leave docs/.

The navigation is docs/index.md: its sections, and in each the pages of its table. README.md, CHANGELOG.md and notebooks/README.md are pages
too. A link to any other file of the repository becomes the file's name, since the site does not hold it.
"""

import os
import posixpath
import re
from pathlib import Path

import reference
from mkdocs.structure.files import File

REPO = Path(__file__).resolve().parents[2]
OUTSIDE = {"README.md": "overview.md", "notebooks/README.md": "notebooks.md", "CHANGELOG.md": "changelog.md"}  # file -> page
# Page -> its name in the navigation, and what makes it.
GENERATED = {
    "reference/config.md": ("every config value", reference.config_page),
    "reference/cli.md": ("every command", reference.cli_page),
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def sections(index: str) -> list[dict]:
    """The navigation that the text of docs/index.md describes, as mkdocs.yml would have it."""
    nav: list[dict] = [{"Home": [{"contents": "index.md"}, {"README": "overview.md"}, {"what has changed": "changelog.md"}]}]
    for section in index.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        links = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\)", body, re.MULTILINE)
        pages = [{text: OUTSIDE[link.removeprefix("../")] if link.startswith("../") else link} for text, link in links]
        nav.append({title: pages + [{text: page} for page, (text, _) in GENERATED.items()] * (title == "Reference")})
    return nav


def on_config(config):
    config.nav = sections((REPO / "docs" / "index.md").read_text("utf-8"))
    return config


def on_files(files, config):
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(REPO / source).read_text("utf-8")))
    for page, (_, make) in GENERATED.items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    source = next((file for file, of in OUTSIDE.items() if of == uri), f"docs/{uri}")

    def moved(match) -> str:
        mark, text, target, anchor = match.groups()
        if ":" in target:
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        to = OUTSIDE.get(file) or file.removeprefix("docs/")
        if files.get_file_from_path(to):
            return f"{mark}[{text}]({os.path.relpath(to, posixpath.dirname(uri) or '.')}{anchor or ''})"
        return f"{text} (`{file}`)" if (REPO / file).exists() else match[0]

    return LINK.sub(moved, markdown)
