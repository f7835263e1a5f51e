"""assets.py against real pip, real zip files and a real HTTP server, all on this machine; the hub is a stand-in."""

import errno
import hashlib
import http.server
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors
from hypothesis import given, settings
from hypothesis import strategies as st

from elsi_lib import assets
from elsi_lib.assets import Asset, HubRepo, Url, WheelMember
from elsi_lib.errors import AssetError, ElsiError

CONTENT = bytes(range(256)) * 12_000  # more than one piece of 1 MiB


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, n: int, content: bytes, spy: Path | None = None) -> WheelMember:
    """A wheel whose code, were it ever run, would leave ``spy`` behind."""
    package, module, version = f"elsi-toy-part{n}", f"elsi_toy_part{n}", "1.0"
    path = folder / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    betray = f"open({str(spy)!r}, 'w').close()\n" if spy else ""
    members = {
        f"{module}/__init__.py": betray,
        f"{module}/data/part.bin": content,
        "sitecustomize.py": betray,
        "setup.py": betray,
        "elsi_toy.pth": f"import os; {betray}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nRequires-Python: <3\n"
        "Requires-Dist: no-such-dependency-of-elsi\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in members) + f"{info}/RECORD,,\n")
    return WheelMember(package, version, sha(path.read_bytes()), path.stat().st_size, f"{module}/data/part.bin")


def asset_of(source, content: bytes = CONTENT, name: str = "toy", filename: str = "toy.bin") -> Asset:
    return Asset(name, "data", filename, sha(content), len(content), "CC0", "a test", source)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """An empty cache, an index of our own for pip, no proxy; returns a function that registers an asset."""
    for name in ("ELSI_ASSETS", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("ELSI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))

    def register(asset: Asset) -> Asset:
        monkeypatch.setitem(assets.ASSETS, asset.name, asset)
        return asset

    return register


@pytest.fixture
def toy(world, tmp_path) -> Asset:
    return world(asset_of((make_wheel(tmp_path / "index", 1, CONTENT, tmp_path / "spy"),)))


def no_download(*args, **kwargs):
    raise AssertionError("a download was started")


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".part", ".whl") or path.name.startswith("pip-")]


def one_line(caught) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


# The registry


def test_registry_is_pinned_and_named_as_the_rest_of_the_library_expects():
    names = "smollm2-135m-instruct qwen2.5-coder-0.5b-instruct sharegpt spec-bench ultrachat qwen3-4b-instruct"
    assert set(assets.ASSETS) == {*names.split(), "llama-3.1-8b-instruct"}
    for name, asset in assets.ASSETS.items():
        assert asset.name == name == name.lower()
        pins = [asset.sha256]
        if isinstance(asset.source, HubRepo):
            pins = [asset.source.revision]
            assert not asset.sha256
        elif isinstance(asset.source, tuple):
            pins += [member.wheel_sha256 for member in asset.source]
        assert all(len(pin) in (40, 64) and set(pin) <= set("0123456789abcdef") for pin in pins)
    assert set(assets.ALIASES.values()) <= set(assets.ASSETS)
    assert len({member.wheel_sha256 for member in assets.ASSETS["qwen2.5-coder-0.5b-instruct"].source}) == 6
    parts = 5 * 89_128_960 + 45_755_264  # sizes listed in the six archives
    assert assets.ASSETS["qwen2.5-coder-0.5b-instruct"].bytes == parts


@pytest.mark.parametrize("name", ["SmolLM2-135M", " smollm2-135m-instruct "])
def test_alias_and_case(name):
    assert assets.find_asset(name).name == "smollm2-135m-instruct"


@pytest.mark.parametrize(("name", "close"), [("smolm2-135m", "smollm2-135m"), ("share-gpt", "sharegpt"), ("zzz", "")])
def test_unknown_name_lists_names_and_close_ones(name, close):
    for call in (assets.fetch, assets.available):
        with pytest.raises(ElsiError) as caught:
            call(name)
        assert not isinstance(caught.value, AssetError)  # bad usage, not a failed fetch
        message = one_line(caught)
        assert name in message and "llama-3.1-8b-instruct" in message
        assert ("did you mean" in message) == bool(close) and close in message


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("ELSI_CACHE", str(tmp_path))
    assert assets.cache_dir() == tmp_path
    monkeypatch.delenv("ELSI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert assets.cache_dir().name == "elsi" and assets.cache_dir().is_absolute()


# Wheels


def test_wheel_is_fetched_by_pip_verified_and_never_run(toy, tmp_path, capfd):
    assert assets.available("toy") is None
    path = assets.fetch("toy")
    assert path == tmp_path / "cache" / "toy" / "toy.bin"
    assert path.read_bytes() == CONTENT
    assert assets.available("toy") == path
    assert not leftovers(tmp_path / "cache")
    assert not (tmp_path / "spy").exists() and "elsi_toy_part1" not in sys.modules
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.distribution("elsi-toy-part1")
    assert capfd.readouterr() == ("", "")  # standard error is no terminal: no bar, and pip's warnings stay inside


@pytest.mark.parametrize("progress", [True, False])
def test_bar_on_a_terminal(toy, monkeypatch, progress):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assets.fetch("toy", progress=progress)
    assert ("fetching toy" in sys.stderr.getvalue()) == progress


def test_second_fetch_neither_downloads_nor_hashes(toy, monkeypatch):
    path = assets.fetch("toy")
    monkeypatch.setattr(subprocess, "Popen", no_download)
    monkeypatch.setattr(assets, "sha256_file", no_download)
    assert assets.fetch("toy") == path


@pytest.mark.parametrize("damage", ["truncated", "altered", "altered and restored in size", "bad stamp"])
def test_damaged_cache_is_replaced(toy, damage):
    path = assets.fetch("toy")
    stamp = path.with_name("toy.bin.verified.json")
    if damage == "truncated":
        path.write_bytes(CONTENT[:-1])
    elif damage == "altered":
        path.write_bytes(b"x" + CONTENT)
    elif damage == "bad stamp":
        stamp.write_text("{")
    else:
        path.write_bytes(CONTENT[::-1])
        os.utime(path, ns=(1, 1))
    if damage == "bad stamp":
        assert assets.available("toy") == path
    else:
        assert assets.available("toy") is None
    assert assets.fetch("toy") == path
    assert path.read_bytes() == CONTENT
    assert json.loads(stamp.read_text())["sha256"] == toy.sha256


def test_leftovers_of_a_killed_run_are_never_used_and_swept(toy, tmp_path):
    home, downloads = tmp_path / "cache" / "toy", tmp_path / "cache" / "downloads"
    old, fresh, scratch = home / "toy.bin.1-a.part", home / "toy.bin.2-b.part", downloads / "pip-x"
    home.mkdir(parents=True)
    scratch.mkdir(parents=True)
    old.write_bytes(b"old")
    fresh.write_bytes(b"another process writes this")
    (scratch / "half.whl").write_bytes(b"half")
    for path in (old, scratch / "half.whl", scratch):
        os.utime(path, (0, 0))
    assert assets.fetch("toy").read_bytes() == CONTENT
    assert not old.exists() and not scratch.exists()
    assert fresh.read_bytes() == b"another process writes this"


def test_half_a_kept_wheel_is_fetched_again(toy, tmp_path):
    kept = tmp_path / "cache" / "downloads" / "elsi-toy-part1-1.0.whl"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(next((tmp_path / "index").iterdir()).read_bytes()[:1000])
    assert assets.fetch("toy").read_bytes() == CONTENT


def test_parts_are_joined_in_order_and_a_cut_keeps_those_that_are_done(world, tmp_path):
    index, away = tmp_path / "index", tmp_path / "away"
    pieces = [CONTENT[:1_000_000], CONTENT[1_000_000:1_000_001], CONTENT[1_000_001:]]
    world(asset_of(tuple(make_wheel(index, n, piece) for n, piece in enumerate(pieces, start=1))))
    away.mkdir()
    third = next(index.glob("elsi_toy_part3*"))
    shutil.move(third, away)
    with pytest.raises(AssetError, match="elsi-toy-part3 1.0 cannot be fetched"):
        assets.fetch("toy")
    assert not (tmp_path / "cache" / "toy" / "toy.bin").exists()
    for wheel in index.iterdir():
        wheel.unlink()  # the second run must do without them
    shutil.move(away / third.name, index)
    assert assets.fetch("toy").read_bytes() == CONTENT
    assert not leftovers(tmp_path / "cache")


def test_a_wheel_is_read_though_another_process_unlinks_it_at_once(world, tmp_path, monkeypatch):
    pieces = [CONTENT[:1_000_000], CONTENT[1_000_000:]]
    world(asset_of(tuple(make_wheel(tmp_path / "index", n, piece) for n, piece in enumerate(pieces, start=1))))
    replace_file = os.replace

    def replace_and_lose(source, target):
        replace_file(source, target)
        if Path(target).suffix == ".whl":  # the other process has read them all, and tidies up
            Path(target).unlink()

    monkeypatch.setattr(os, "replace", replace_and_lose)
    assert assets.fetch("toy").read_bytes() == CONTENT


def test_the_size_of_a_download_is_read_while_pip_removes_its_folders(tmp_path, monkeypatch):
    (tmp_path / "tracker").mkdir()
    (tmp_path / "tracker" / "entry").write_bytes(b"gone")
    (tmp_path / "half.whl").write_bytes(b"12345")
    scandir = os.scandir

    def vanishing(path):
        if str(path).endswith("tracker"):
            (tmp_path / "tracker" / "entry").unlink()
            (tmp_path / "tracker").rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert assets._size(tmp_path) == 5
    assert not (tmp_path / "tracker").exists()


@settings(max_examples=25, deadline=None)
@given(pieces=st.lists(st.binary(max_size=5000), min_size=1, max_size=4))
def test_joined_members_equal_the_concatenation(tmp_path_factory, pieces):
    folder = tmp_path_factory.mktemp("join")
    content = b"".join(pieces)
    members = [make_wheel(folder / "index", n, piece) for n, piece in enumerate(pieces, start=1)]
    asset = asset_of(tuple(members), content)
    kept = folder / "downloads"
    kept.mkdir(parents=True)
    for member, wheel in zip(members, sorted((folder / "index").iterdir()), strict=True):
        shutil.copy(wheel, kept / f"{member.package}-{member.version}.whl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELSI_CACHE", str(folder))
        patch.delenv("ELSI_ASSETS", raising=False)
        patch.setitem(assets.ASSETS, "toy", asset)
        patch.setattr(subprocess, "Popen", no_download)
        assert assets.fetch("toy").read_bytes() == content


def test_wrong_hash_of_the_wheel(toy, world, tmp_path):
    wrong = "0" * 64
    world(replace(toy, source=(replace(toy.source[0], wheel_sha256=wrong),)))
    with pytest.raises(AssetError) as caught:
        assets.fetch("toy")
    message = one_line(caught)
    assert wrong in message and toy.source[0].wheel_sha256 in message
    assert f"set ELSI_ASSETS to a folder holding toy.bin with sha256 {toy.sha256}" in message
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_wrong_hash_of_the_member(toy, world, tmp_path):
    world(replace(toy, sha256="0" * 64))
    with pytest.raises(AssetError) as caught:
        assets.fetch("toy")
    message = one_line(caught)
    assert "0" * 64 in message and toy.sha256 in message and "elsi_toy_part1/data/part.bin" in message
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_member_larger_than_stated_does_not_fill_the_disk(world, tmp_path):
    member = make_wheel(tmp_path / "index", 1, bytes(30_000_000))  # 30 kB when packed
    world(replace(asset_of((member,)), bytes=1000))
    with pytest.raises(AssetError, match=r"gave sha256 [0-9a-f]{64} \(1048576 bytes\)"):
        assets.fetch("toy")


def test_member_missing_from_the_wheel(toy, world):
    world(replace(toy, source=(replace(toy.source[0], member="elsi_toy_part1/other.bin"),)))
    with pytest.raises(AssetError, match=r"elsi-toy-part1 1\.0 does not hold a readable elsi_toy_part1/other\.bin"):
        assets.fetch("toy")


def test_archive_that_is_no_zip(toy, world, tmp_path):
    kept = tmp_path / "cache" / "downloads" / "elsi-toy-part1-1.0.whl"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"no zip")
    world(replace(toy, source=(replace(toy.source[0], wheel_sha256=sha(b"no zip")),)))
    with pytest.raises(AssetError, match="does not hold a readable"):
        assets.fetch("toy")


def test_no_network(toy, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))
    with pytest.raises(AssetError) as caught:
        assets.fetch("toy")
    message = one_line(caught)
    assert "No matching distribution found for elsi-toy-part1==1.0" in message
    assert "check the network" in message and toy.sha256 in message


def test_index_that_refuses_connections(toy, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(AssetError, match="no connection to the index.*check the network"):
        assets.fetch("toy")


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for Python is a shell script")
@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("/usr/bin/python3: No module named pip", "run `python -m ensurepip --upgrade`"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "MB free"),
        ("", "no message"),
    ],
)
def test_failures_of_pip(toy, tmp_path, monkeypatch, log, said):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho '{log}'\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(AssetError) as caught:
        assets.fetch("toy")
    message = one_line(caught)
    assert said in message and "ELSI_ASSETS" in message
    assert ("ELSI_CACHE" in message) == ("Errno 28" in log)


def test_disk_too_small_is_said_before_anything_is_fetched(toy, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    monkeypatch.setattr(subprocess, "Popen", no_download)
    with pytest.raises(AssetError, match=r"toy needs 4 MB, .* has 1 MB free: set ELSI_CACHE to a disk with 4 MB free"):
        assets.fetch("toy")


def test_disk_that_fills_up(toy, tmp_path, monkeypatch):
    def fill(stream, out, *rest):
        out.write(b"some")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(assets, "_copy", fill)
    with pytest.raises(AssetError) as caught:
        assets.fetch("toy")
    assert "is full: set ELSI_CACHE to a disk with" in one_line(caught)
    assert not list((tmp_path / "cache" / "toy").iterdir())


def test_cache_that_cannot_be_a_folder(toy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ELSI_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(AssetError, match="set ELSI_CACHE to a writable folder"):
        assets.fetch("toy")


def test_several_processes_at_once(toy, tmp_path):
    code = f"from elsi_lib.assets import *; ASSETS['toy'] = {toy!r}; print(fetch('toy'))"
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for run in runs:
        out, err = run.communicate(timeout=120)
        assert run.returncode == 0, err
        assert Path(out.strip()).read_bytes() == CONTENT
    assert not leftovers(tmp_path / "cache")


def test_sha256_file_of_a_known_text(tmp_path):
    path = tmp_path / "abc"
    path.write_bytes(b"abc")  # FIPS 180-2, appendix B.1
    assert assets.sha256_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


# ELSI_ASSETS


@pytest.mark.parametrize("place", ["toy.bin", "toy/toy.bin"])
def test_named_folder_comes_first_and_is_never_written_to(toy, tmp_path, monkeypatch, place):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (second / place).parent.mkdir(parents=True)
    (second / place).write_bytes(CONTENT)
    before = sorted(second.rglob("*"))
    monkeypatch.setenv("ELSI_ASSETS", os.pathsep.join(("", str(first), str(second))))
    monkeypatch.setattr(subprocess, "Popen", no_download)
    assert assets.fetch("toy") == assets.available("toy") == second / place
    assert sorted(second.rglob("*")) == before
    monkeypatch.setattr(assets, "sha256_file", no_download)
    assert assets.fetch("toy") == second / place  # its stamp lies in the cache


def test_named_folder_needs_no_writable_cache(toy, tmp_path, monkeypatch):
    (tmp_path / "toy.bin").write_bytes(CONTENT)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ELSI_ASSETS", str(tmp_path))
    monkeypatch.setenv("ELSI_CACHE", str(tmp_path / "file" / "cache"))
    assert assets.fetch("toy") == tmp_path / "toy.bin"


def test_wrong_file_in_a_named_folder_is_an_error(toy, tmp_path, monkeypatch):
    assets.fetch("toy")  # a good copy in the cache does not hide it
    mine = tmp_path / "mine"
    mine.mkdir()
    monkeypatch.setenv("ELSI_ASSETS", str(mine))
    (mine / "toy.bin").write_bytes(b"other")
    for call in (assets.fetch, assets.available):
        with pytest.raises(AssetError) as caught:
            call("toy")
        message = one_line(caught)
        assert sha(b"other") in message and toy.sha256 in message and str(mine / "toy.bin") in message


def test_named_folder_that_does_not_exist(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("ELSI_ASSETS", str(tmp_path / "nowhere"))
    with pytest.raises(AssetError, match="nowhere, which is not a folder: correct or unset ELSI_ASSETS"):
        assets.fetch("toy")


@pytest.mark.parametrize("place", ["question.jsonl", "spec-bench/question.jsonl", "spec_bench/question.jsonl"])
def test_spec_bench_layouts(world, tmp_path, monkeypatch, place):
    world(replace(assets.ASSETS["spec-bench"], sha256=sha(CONTENT), bytes=len(CONTENT)))
    (tmp_path / "mine" / place).parent.mkdir(parents=True)
    (tmp_path / "mine" / place).write_bytes(CONTENT)
    monkeypatch.setenv("ELSI_ASSETS", str(tmp_path / "mine"))
    assert assets.fetch("spec-bench") == tmp_path / "mine" / place


# URLs


@pytest.fixture
def server():
    """Serves CONTENT; ``cuts`` is how many answers still break off in the middle, ``status`` what others carry."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.requests += 1
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            cut, server.cuts = server.cuts > 0, server.cuts - 1
            with suppress(ConnectionError):  # a client that saw an error status has left
                self.wfile.write(CONTENT[: len(CONTENT) // 2] if cut else CONTENT)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.cuts, server.status = 0, 0, 200
    server.url = f"http://127.0.0.1:{server.server_port}/data"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("cuts", [0, 1, 2])
def test_url_starts_afresh_after_a_cut(world, server, tmp_path, cuts):
    world(asset_of(Url(server.url)))
    server.cuts = cuts
    assert assets.fetch("toy").read_bytes() == CONTENT
    assert server.requests == cuts + 1
    assert not leftovers(tmp_path / "cache")


def test_url_that_is_always_cut(world, server, tmp_path):
    world(asset_of(Url(server.url)))
    server.cuts = 99
    with pytest.raises(AssetError) as caught:
        assets.fetch("toy")
    assert f"cut after {len(CONTENT) // 2} of {len(CONTENT)} bytes" in one_line(caught)
    assert not list((tmp_path / "cache" / "toy").iterdir())
    server.cuts = 0
    assert assets.fetch("toy").read_bytes() == CONTENT


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (503, 3)])
def test_url_with_an_error_status(world, server, status, requests):
    world(asset_of(Url(server.url)))
    server.status = status
    with pytest.raises(AssetError, match=f"HTTP Error {status}.*check the network, or set ELSI_ASSETS"):
        assets.fetch("toy")
    assert server.requests == requests


def test_url_with_another_content(world, server, tmp_path):
    world(replace(asset_of(Url(server.url)), sha256="0" * 64))
    with pytest.raises(AssetError) as caught:
        assets.fetch("toy")
    message = one_line(caught)
    assert sha(CONTENT) in message and "0" * 64 in message and server.url in message
    assert not list((tmp_path / "cache" / "toy").iterdir())


def test_url_without_a_server(world):
    world(asset_of(Url("http://127.0.0.1:9/data")))
    with pytest.raises(AssetError, match="cannot be read .*check the network, or set ELSI_ASSETS"):
        assets.fetch("toy")


def test_url_and_a_disk_that_fills_up(world, server, monkeypatch):
    def fill(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world(asset_of(Url(server.url)))
    monkeypatch.setattr(assets, "_copy", fill)
    with pytest.raises(AssetError, match="is full: set ELSI_CACHE to a disk with 4 MB free"):
        assets.fetch("toy")


# Hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def error_of(kind: type[Exception], text: str = "the hub says\nso") -> Exception:
    """An error of huggingface_hub without the HTTP response that its constructor wants."""
    err = kind.__new__(kind, text)
    Exception.__init__(err, text)
    return err


@pytest.fixture
def hub(world, tmp_path, monkeypatch):
    """A hub of one model whose download can be made to fail; ``calls`` are the arguments it was asked with."""
    folder = tmp_path / "hub" / "snapshots" / COMMIT

    class Hub:
        calls: list[dict] = []
        error: Exception | None = None
        files = {
            "config.json": "{}",
            "model.safetensors.index.json": json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}),
            "a.safetensors": "",
            "b.safetensors": "",
        }

    def snapshot_download(repo, **asked):
        if asked["local_files_only"]:
            if not folder.is_dir():
                raise hub_errors.LocalEntryNotFoundError("nothing here")
            return str(folder)
        Hub.calls.append({"repo": repo, **asked})
        if Hub.error:
            raise Hub.error
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in Hub.files.items():
            (folder / name).write_text(text)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    Hub.calls = []
    Hub.folder = folder
    world(Asset("toy-hub", "target", "", "", 0, "CC0", "a test", HubRepo("org/toy", revision="v1")))
    return Hub


def test_hub_snapshot(hub):
    assert assets.available("toy-hub") is None
    path = assets.fetch("toy-hub")
    assert path == hub.folder == assets.available("toy-hub") == assets.fetch("toy-hub")
    assert assets.hub_commit(path) == COMMIT
    (call,) = hub.calls
    assert (call["repo"], call["revision"], call["repo_type"]) == ("org/toy", "v1", "model")
    assert {"*.safetensors", "*.json", "*.tiktoken"} <= set(call["allow_patterns"])
    assert not any(pattern.endswith((".bin", ".py", ".pth", ".pt")) for pattern in call["allow_patterns"])
    assert not huggingface_hub.utils.are_progress_bars_disabled()  # only while it was fetching


def test_half_a_hub_snapshot_is_completed(hub):
    assets.fetch("toy-hub")
    (hub.folder / "b.safetensors").unlink()
    assert assets.available("toy-hub") is None
    assert assets.fetch("toy-hub") == hub.folder
    assert len(hub.calls) == 2 and (hub.folder / "b.safetensors").exists()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (hub_errors.GatedRepoError, "accept its licence on its hub page and set HF_TOKEN"),
        (hub_errors.RepositoryNotFoundError, "no such repository, or a private one"),
        (hub_errors.RevisionNotFoundError, "no revision v1"),
        (hub_errors.LocalEntryNotFoundError, "no connection to the hub"),
        (hub_errors.OfflineModeIsEnabled, "no connection to the hub"),
        (ConnectionResetError, "no connection to the hub"),
        (RuntimeError, "RuntimeError: the hub says so"),
    ],
)
def test_errors_of_the_hub(hub, kind, said):
    hub.error = error_of(kind)
    with pytest.raises(AssetError) as caught:
        assets.fetch("toy-hub")
    message = one_line(caught)
    assert said in message and "org/toy" in message
    assert "set ELSI_ASSETS to a folder in which toy-hub/ holds the files of org/toy" in message


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "no room"), RuntimeError("IO error: No space left on device (os error 28)")]
)
def test_hub_and_a_full_disk(hub, error):
    hub.error = error
    with pytest.raises(AssetError, match="set HF_HOME to a disk with more space"):
        assets.fetch("toy-hub")


def test_hub_repository_without_safetensors(hub, monkeypatch):
    monkeypatch.setattr(hub, "files", {"config.json": "{}"})
    with pytest.raises(AssetError, match=r"lacks \*\.safetensors"):
        assets.fetch("toy-hub")


def test_bad_hub_id(monkeypatch):
    with pytest.raises(ElsiError, match="'a/b/c' is not the id of a hub repository"):
        assets.fetch_hub(HubRepo("a/b/c"))


def test_hub_folder_that_the_user_names(hub, tmp_path, monkeypatch):
    mine = tmp_path / "mine" / "toy-hub"
    mine.mkdir(parents=True)
    monkeypatch.setenv("ELSI_ASSETS", str(tmp_path / "mine"))
    with pytest.raises(AssetError, match=r"toy-hub lacks config\.json: complete it, or take"):
        assets.fetch("toy-hub")
    (mine / "config.json").write_text("{}")
    with pytest.raises(AssetError, match=r"lacks \*\.safetensors"):
        assets.fetch("toy-hub")
    (mine / "model.safetensors").write_text("")
    assert assets.fetch("toy-hub") == mine and assets.hub_commit(mine) is None
    (mine / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(AssetError, match=r"lacks a readable model\.safetensors\.index\.json"):
        assets.fetch("toy-hub")
    assert not hub.calls


def test_hub_offline_for_real(tmp_path):
    code = "from elsi_lib.assets import fetch; fetch('qwen3-4b-instruct')"
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "ELSI_CACHE": str(tmp_path)}
    env.pop("ELSI_ASSETS", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("elsi_lib.errors.AssetError: Qwen/Qwen3-4B-Instruct-2507: not in the hub's cache")
    assert "in which qwen3-4b-instruct/ holds the files" in last


# The real thing


@pytest.mark.real
def test_smollm2_for_real():
    path = assets.fetch("smollm2-135m-instruct")
    assert path.stat().st_size == 98_362_432
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert assets.available("smollm2-135m") == path
