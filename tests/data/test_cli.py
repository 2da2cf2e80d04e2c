"""`gammalm data` as the command line runs it: exit status, what is printed, and an example in every --help."""

import argparse
import json
import sys

import pytest

from gammalm.cli import data
from gammalm.data import shards


def run(*argv):
    parser = argparse.ArgumentParser()
    data.add_parser(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["data", *map(str, argv)])
    return args.run(args)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i}\n\twith a tab and 中文"}) + "\n" for i in range(30)), encoding="utf-8")
    return path


def test_prepare_then_inspect(source, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ("prepare", "--source", f"notes-en={source}", "--out", out, "--vocab-size", 512)
    assert run(*arguments) == 0
    printed = capsys.readouterr()
    assert "notes-en" in printed.out and str(out) in printed.out and "encoding: done" in printed.err
    assert run(*arguments) == 0
    assert "already prepared" in capsys.readouterr().out
    assert run("inspect", out, "--verify") == 0
    printed = capsys.readouterr().out
    manifest = shards.read_manifest(out)
    assert "verified" in printed and f"{manifest['groups']['notes-en']['train']['tokens']:,}" in printed


def test_json_is_all_there_is_on_stdout(source, tmp_path, capsys):
    assert run("prepare", "--source", source, "--out", tmp_path / "out", "--vocab-size", 512, "--json") == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["sources"][0]["documents"] == 30
    assert run("inspect", tmp_path / "out", "--verify", "--show", "text-und", "--documents", 2, "--json") == 0
    inspected = json.loads(capsys.readouterr().out)
    assert inspected["groups"] == manifest["groups"] and inspected["verified_bytes"] > 0
    assert len(inspected["shown"]) == 2 and all(t.endswith("\n\twith a tab and 中文") for t in inspected["shown"])


@pytest.mark.parametrize("action", ["prepare", "inspect"])
def test_help_has_an_example(action, capsys):
    with pytest.raises(SystemExit) as ended:
        run(action, "--help")
    assert ended.value.code == 0 and f"gammalm data {action} " in capsys.readouterr().out.split("examples:")[1]


def test_help_imports_nothing_heavy():
    import subprocess

    code = "import argparse, sys\nfrom gammalm.cli import data\np = argparse.ArgumentParser()\ndata.add_parser(p.add_subparsers())\n"
    code += "print([m for m in ('numpy', 'grain', 'jax', 'sentencepiece', 'pyarrow', 'tensorflow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
