"""Fetching with clients that we play ourselves: hash checks, the cache, and clients that are absent, fail or hang."""

import hashlib
import io
import os
import sys
import tarfile
import time
import zipfile

import pytest

from gammalm.data import fetch as fetching
from gammalm.data.fetch import Package, cache_folder, extract, fetch
from gammalm.errors import DataError

CONTENT = b"the archive's bytes"
SHA = hashlib.sha256(CONTENT).hexdigest()
NPM = Package("npm", "@scope/text@1.0.0", SHA)


@pytest.fixture(autouse=True)
def world(tmp_path, monkeypatch):
    """An empty cache, and a PATH with nothing but the clients a test puts there."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("GAMMALM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def client(tmp_path, name, body):
    path = tmp_path / "bin" / name
    path.write_text(f"#!{sys.executable}\nimport sys, os, time\n{body}\n")
    path.chmod(0o755)
    return path


def calls(tmp_path):
    log = tmp_path / "log"
    return log.read_text().splitlines() if log.exists() else []


def npm_that_works(tmp_path, content=CONTENT):
    client(
        tmp_path,
        "npm",
        f"open({str(tmp_path / 'log')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\nopen('text-1.0.0.tgz', 'wb').write({content!r})",
    )


def test_fetched_once_then_from_the_cache(tmp_path):
    npm_that_works(tmp_path)
    notes = []
    archive = fetch([NPM], note=notes.append)[NPM].archive
    assert archive.read_bytes() == CONTENT and archive.is_relative_to(cache_folder())
    assert "--ignore-scripts" in calls(tmp_path)[0] and calls(tmp_path)[0].endswith("@scope/text@1.0.0")
    os.remove(tmp_path / "bin" / "npm")  # offline from here
    assert fetch([NPM], note=notes.append)[NPM].archive == archive
    assert notes == ["fetched @scope/text@1.0.0"]


def test_a_wrong_hash_is_refused_and_not_kept(tmp_path):
    npm_that_works(tmp_path, b"something else")
    result = fetch([NPM])[NPM]
    assert result.archive is None and "SHA-256" in result.problem
    assert not (cache_folder() / "packages" / NPM.key).exists()


def test_damage_in_the_cache_is_noticed_and_fetched_again(tmp_path):
    npm_that_works(tmp_path)
    archive = fetch([NPM])[NPM].archive
    archive.write_bytes(b"damaged")
    assert fetch([NPM])[NPM].archive.read_bytes() == CONTENT
    assert len(calls(tmp_path)) == 2


def test_leavings_of_killed_fetches_go_once_they_are_old(tmp_path):
    packages = cache_folder() / "packages"
    for name in (".fetch-old", ".keep-old", ".fetch-new"):
        (packages / name).mkdir(parents=True)
        (packages / name / "part").write_text("half")
        if name.endswith("old"):
            os.utime(packages / name, (1e9, 1e9))
    fetch([])
    assert [p.name for p in packages.iterdir()] == [".fetch-new"]


def test_clients_that_are_not_there(tmp_path):
    debian = Package("debian", "some-doc")
    results = fetch([NPM, debian])
    assert results[NPM].problem == "there is no npm here"
    assert results[debian].problem == "there is no apt-get here"


def test_a_client_that_fails_is_quoted(tmp_path):
    client(tmp_path, "npm", "print('npm error network unreachable', file=sys.stderr); sys.exit(7)")
    assert fetch([NPM])[NPM].problem == "npm failed with status 7 (npm error network unreachable)"


def test_a_proxy_that_refuses_is_the_reason(tmp_path):
    """pip ends with "No matching distribution found", as if there were no such package."""
    said = ["WARNING: Retrying (Retry(total=0)) after connection broken by 'ProxyError('Cannot connect to proxy.')': /simple/x/"]
    said += ["ERROR: Could not find a version that satisfies the requirement x", "ERROR: No matching distribution found for x"]
    client(tmp_path, "npm", f"print({chr(10).join(said)!r}, file=sys.stderr); sys.exit(1)")
    assert fetch([NPM])[NPM].problem == "npm failed with status 1 ('ProxyError('Cannot connect to proxy.')': /simple/x/)"


def test_a_connection_that_came_back_is_not_the_reason(tmp_path):
    said = "WARNING: Retrying (Retry(total=0)) after connection broken by 'ReadTimeoutError': /simple/x/\nERROR: the hashes do not match"
    client(tmp_path, "npm", f"print({said!r}, file=sys.stderr); sys.exit(1)")
    assert fetch([NPM])[NPM].problem == "npm failed with status 1 (ERROR: the hashes do not match)"


def test_a_client_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "CLIENT_SECONDS", 0.7)
    client(tmp_path, "npm", f"pid = os.fork()\nif pid: open({str(tmp_path / 'child')!r}, 'w').write(str(pid))\ntime.sleep(60)")
    begin = time.monotonic()
    assert "no answer within" in fetch([NPM])[NPM].problem
    assert time.monotonic() - begin < 10
    child = int((tmp_path / "child").read_text())
    for _ in range(50):
        try:
            with open(f"/proc/{child}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":  # ended, and not yet collected by init
                    return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    pytest.fail("the child of the hanging client lives on")


def test_pip_is_asked_with_the_hash(tmp_path, monkeypatch):
    body = "a = sys.argv\nwanted = open(a[a.index('-r') + 1]).read()\nout = a[a.index('-d') + 1]\nos.makedirs(out)\n"
    body += "open(out + '/p-1.whl', 'w').write(wanted)"
    monkeypatch.setattr(sys, "executable", str(client(tmp_path, "python", body)))
    package = Package("pypi", "p==1", "0" * 64)
    problem = fetch([package])[package].problem  # our pip wrote down what it was asked for, which cannot have the hash 0…
    assert hashlib.sha256(f"p==1 --hash=sha256:{'0' * 64}\n".encode()).hexdigest() in problem


def test_debian_names_are_resolved_and_one_unknown_does_not_cost_the_others(tmp_path):
    policy = "names = sys.argv[2:]\nif sys.argv[1] == 'depends': print(names[0], '\\n  Depends: go-1.19-src')\nelse:\n"
    policy += "  for n in names:\n    print(f'{n}:\\n  Installed: (none)\\n  Candidate:', '(none)' if n == 'removed' else '1.0')\n"
    client(tmp_path, "apt-cache", policy.replace("for n in names:", "for n in set(names) - {'unknown'}:"))
    body = "for n in sys.argv[sys.argv.index('download') + 1 :]:\n  if n == 'gone': continue\n  open(n + '_1.0_all.deb', 'w').write(n)\n"
    client(tmp_path, "apt-get", body + "sys.exit('E: one is gone from the archive')")
    client(tmp_path, "dpkg-deb", "")
    packages = [Package("debian", "go-src", depends=True), *(Package("debian", n) for n in ("unknown", "removed", "words", "gone"))]
    results = fetch(packages)
    assert [results[p].archive and results[p].archive.read_text() for p in packages] == ["go-1.19-src", None, None, "words", None]
    assert "apt-get update" in results[packages[1]].problem and "gone from the archive" in results[packages[4]].problem


def test_an_unusable_cache_is_a_data_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GAMMALM_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="GAMMALM_CACHE"):
        fetch([NPM])


def tgz(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_extract_takes_what_matches_and_stays_inside(tmp_path):
    members = {"package/a.txt": b"a", "package/sub/b.txt": b"b", "package/c.js": b"c", "../outside.txt": b"x", "/rooted.txt": b"r"}
    extract(tgz(tmp_path / "p.tgz", members), tmp_path / "out", ("*.txt",))
    found = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert found == ["package/a.txt", "package/sub/b.txt", "rooted.txt"]
    assert not (tmp_path / "outside.txt").exists()
    with zipfile.ZipFile(tmp_path / "p.whl", "w") as wheel:
        wheel.writestr("pkg/data.json", "{}")
        wheel.writestr("pkg/code.py", "")
    extract(tmp_path / "p.whl", tmp_path / "out2", ("*.json",))
    assert [p.name for p in (tmp_path / "out2").rglob("*") if p.is_file()] == ["data.json"]


def test_a_broken_archive_is_a_data_error(tmp_path):
    for name in ("p.tgz", "p.whl"):
        (tmp_path / name).write_bytes(b"no archive")
        with pytest.raises(DataError, match="does not unpack"):
            extract(tmp_path / name, tmp_path / "out", ("*",))
