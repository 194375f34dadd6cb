"""Shards read from a URL through a bounded cache give the same samples as local shards.

Failures are retried or raise an error.
"""

import logging
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec
import numpy as np
import pytest

from data.config import DataConfig
from data.remote.config import CacheConfig
from data.shards.index import index_path
from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import Manifest
from data.shards.split import Split, open_split
from tests.data.conftest import open_index
from tests.data.file_server import FileServer, serving
from tests.waiting import wait_until

FIRST = "train-000000.tar"


@pytest.fixture
def cache(tmp_path: Path) -> CacheConfig:
    return CacheConfig(folder=tmp_path / "cache", attempts=3)


def contents(split: Split) -> list[tuple[bytes, str, int]]:
    return [split.read(i) for i in range(len(split))]


def local_contents(shards: Path, name: str = "train") -> list[tuple[bytes, str, int]]:
    with open_split(shards, name) as split:
        return contents(split)


def cached_shards(cache: CacheConfig) -> list[Path]:
    return sorted(cache.folder.glob("*.tar"))


def sized_for(config: CacheConfig, split: Split, num_shards: int) -> CacheConfig:
    """Return a cache that can hold the indices of `split` and its `num_shards` largest shards."""
    sizes = sorted((info.bytes for info in split.manifest.of_split(split.name)), reverse=True)
    indices = sum(path.stat().st_size for path in config.folder.glob("*.split-index"))
    return config.model_copy(update={"gigabytes": (indices + sum(sizes[:num_shards]) + 9) / 1e9})


def evicted_and_open(cache: CacheConfig) -> list[str]:
    """Return deleted cache files that this process still has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in found if name.startswith(str(cache.folder)) and "deleted" in name]


# -------------------------------------------------------------------- URLs


def test_every_url_scheme_gives_the_same_samples_as_the_local_folder(
    shards: Path, server: FileServer, cache: CacheConfig
) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(f"{shards}/", "/bucket/set/", recursive=True)
    local = {name: local_contents(shards, name) for name in ("train", "test")}
    urls = [server.url, server.url + "/", "memory://bucket/set", f"file://{shards}"]
    for number, url in enumerate(urls):
        own = cache.model_copy(update={"folder": cache.folder / str(number)})
        for name in ("train", "test"):
            with open_split(url, name, cache=own) as split:
                assert contents(split) == local[name]
        assert Manifest.load(url, own) == Manifest.load(shards)
    memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://host/set", "use a path, or file://, http://, https://, s3://, gs://, memory://"),
        ("simplecache::http://host/set", "use a path, or file://"),
        ("http://host::s3://bucket/set", "use a path, or file://"),
        ("https://host/set?token=1", "has a query or a fragment"),
        ("https://", "does not contain a host or folder"),
    ],
)
def test_only_plain_urls_of_known_schemes_are_accepted(url: str, reason: str) -> None:
    for read in (lambda: DataConfig(shards=url), lambda: Manifest.load(url)):
        with pytest.raises(ValueError, match=reason):
            read()


def test_a_password_in_a_url_raises_and_does_not_appear_in_the_message() -> None:
    with pytest.raises(ValueError, match="contains a user name") as caught:
        open_split("https://me:secret@host/set", "train")
    assert "secret" not in str(caught.value)


def test_label_vectors_are_verified_at_the_source_and_in_the_cache(
    glyphs: Path, cache: CacheConfig, tmp_path: Path
) -> None:
    folder, name = tmp_path / "copy", "label_vectors.safetensors"
    shutil.copytree(glyphs, folder)
    with serving(folder) as server:
        manifest = Manifest.load(server.url, cache)
        expected = load_label_vectors(server.url, manifest, cache)
        cached = cache.folder / f"{manifest.label_vectors_sha256}.safetensors"
        for path in (cached, folder / name):
            content = bytearray(path.read_bytes())
            content[-3] ^= 1
            path.write_bytes(content)
            if path == cached:
                assert np.array_equal(load_label_vectors(server.url, manifest, cache), expected)
                assert server.requests[name] == 2
        cached.unlink()
        with pytest.raises(ValueError, match=f"{server.url}/{name} does not match the manifest"):
            load_label_vectors(server.url, manifest, cache)


# -------------------------------------------------------------------- the cache


def _read_all(url: str, cache: CacheConfig, expected: list[tuple[bytes, str, int]]) -> None:
    with open_split(url, "train", cache=cache) as split:
        assert contents(split) == expected


def test_processes_that_open_a_shard_at_the_same_time_fetch_it_once(
    shards: Path, server: FileServer, cache: CacheConfig
) -> None:
    server.seconds = 0.1
    fork = multiprocessing.get_context("fork")
    job = (server.url, cache, local_contents(shards))
    readers = [fork.Process(target=_read_all, args=job) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert [reader.exitcode for reader in readers] == [0, 0, 0]
    assert server.requests.pop("manifest.json") == 3
    assert set(server.requests.values()) == {1}


def test_a_split_works_after_fork_and_after_unpickling(
    shards: Path, server: FileServer, cache: CacheConfig
) -> None:
    expected = local_contents(shards)
    with open_split(server.url, "train", cache=cache) as split:
        split.read(0)
        split.files.will_read(split.order(seed=0), 0)
        if (child := os.fork()) == 0:
            os._exit(0 if contents(split) == expected else 1)
        assert os.waitpid(child, 0)[1] == 0
        sent = pickle.dumps(split)
        assert split.classes[0].name.encode() not in sent
        with pickle.loads(sent) as again:
            assert contents(again) == expected
            assert again.num_classes == split.num_classes


def test_the_cache_stays_within_its_limit_and_every_sample_is_read(
    shards: Path, server: FileServer, cache: CacheConfig
) -> None:
    with open_split(server.url, "train", cache=cache) as split:
        small = sized_for(cache, split, 1)
    expected = local_contents(shards)
    with open_split(server.url, "train", cache=small) as split:
        for i in (*range(len(split)), 0, len(split) - 1, 0):
            assert split.read(i) == expected[i]
            held = sum(path.stat().st_size for path in cache.folder.rglob("*") if path.is_file())
            assert held <= small.max_bytes
            assert evicted_and_open(cache) == []
        assert server.shards() > len(split.manifest.of_split("train"))


def test_the_least_recently_used_shard_is_evicted_first(
    server: FileServer, cache: CacheConfig
) -> None:
    with open_split(server.url, "train", cache=cache) as split:
        first, second, third, *_ = split.manifest.of_split("train")
        names = [f"{info.sha256}.tar" for info in (first, second, third)]
        two = sized_for(cache, split, 2)
        split.read(0)
        split.read(first.samples)
        os.utime(cache.folder / names[0], (2e9, 2e9))  # used again after the second shard
    with open_split(server.url, "train", cache=two) as split:
        split.read(first.samples + second.samples)
    assert {path.name for path in cached_shards(cache)} == {names[0], names[2]}


def test_files_left_by_killed_processes_are_deleted_without_waiting(
    shards: Path, server: FileServer, cache: CacheConfig
) -> None:
    incoming = cache.folder / "incoming"
    incoming.mkdir(parents=True)
    first = Manifest.read(shards).shards[0]
    for name in (f"{first.sha256}.tar", "of another set.tar"):
        (incoming / name).write_bytes(b"half")
    with open_split(server.url, "train", cache=cache) as split:
        assert contents(split) == local_contents(shards)
    assert list(incoming.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to run a process as another user")
def test_a_cache_filled_by_another_user_is_readable(shards: Path, server: FileServer) -> None:
    expected = local_contents(shards)
    with TemporaryDirectory() as shared:  # not in pytest's folder, which only one user can access
        cache = CacheConfig(folder=Path(shared, "cache"), attempts=3)
        _read_all(server.url, cache, expected)
        for folder in (shared, cache.folder, *cache.folder.glob("[il]*")):
            Path(folder).chmod(0o777)
        if (child := os.fork()) == 0:
            try:
                os.setuid(65534)
                _read_all(server.url, cache, expected)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_flipped_byte_in_the_cache_raises_an_error_that_states_the_fix(
    server: FileServer, cache: CacheConfig
) -> None:
    with open_split(server.url, "train", cache=cache) as split:
        split.read(0)
        (copy,) = cached_shards(cache)
        damaged = bytearray(copy.read_bytes())
        damaged[int(open_index(server.folder / FIRST).blocks[0, 0]) * 512 + 20] ^= 1
        copy.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{server.url}/{FIRST}: .* cached copy {copy}"):
            split.read(0)
        copy.unlink()
        split.close()
        split.read(0)


def test_a_full_disk_raises_and_leaves_no_files(server: FileServer, cache: CacheConfig) -> None:
    """Simulate a full disk with the file size limit of the process."""
    import resource

    with open_split(server.url, "train", cache=cache) as split:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
        try:
            message = r"\.tar cannot be written \(.*\): free up space"
            with pytest.raises(OSError, match=message):
                split.read(0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list((cache.folder / "incoming").iterdir()) == []
        split.read(0)


# -------------------------------------------------------------------- limits that are too small


def test_a_cache_smaller_than_the_largest_shard_raises_an_error_that_states_the_fix(
    server: FileServer, cache: CacheConfig
) -> None:
    tiny = cache.model_copy(update={"gigabytes": 1e-6})
    with pytest.raises(ValueError, match=r"data.cache.gigabytes is 1e-06: raise it to 0.0"):
        open_split(server.url, "train", cache=tiny)


def test_an_order_that_exceeds_the_cache_raises_an_error_that_states_both_fixes(
    server: FileServer, cache: CacheConfig
) -> None:
    with open_split(server.url, "train", cache=cache) as split:
        split.order(seed=0)
        two = sized_for(cache, split, 2)
    with open_split(server.url, "train", cache=two) as split:
        for shuffle, mixed in ((None, "all shards"), (4, "4 shards at a time")):
            with pytest.raises(ValueError, match=rf"{mixed} of {server.url}.*raise it to") as hit:
                split.order(0, shuffle)
            assert "set data.shuffle_shards to 2 or less" in str(hit.value)
        split.order(0, 2)


# -------------------------------------------------------------------- prefetching


def test_the_current_and_the_next_group_are_prefetched(
    server: FileServer, cache: CacheConfig
) -> None:
    with open_split(server.url, "train", cache=cache) as split:
        infos = split.manifest.of_split("train")
        order = split.order(3, 1)
        for group in (0, 1):
            position = group * sum(infos[number].samples for number in order.shards(0))
            split.files.will_read(order, position)
            wanted = {infos[n].sha256 for g in range(group + 2) for n in order.shards(g)}
            wait_until(lambda wanted=wanted: {p.stem for p in cached_shards(cache)} == wanted)
    assert max(server.requests.values()) == 1


def test_a_prefetch_error_is_logged_and_raised_when_reading(
    server: FileServer, cache: CacheConfig, caplog: pytest.LogCaptureFixture
) -> None:
    (server.folder / FIRST).unlink()
    with open_split(server.url, "train", cache=cache) as split:
        split.files.will_read(split.order(0), 0)
        wait_until(lambda: any("prefetch failed" in r.message for r in caplog.records))
        with pytest.raises(FileNotFoundError, match=FIRST):
            split.read(0)


def test_a_process_can_exit_during_downloads(server: FileServer, cache: CacheConfig) -> None:
    with open_split(server.url, "train", cache=cache):
        pass
    server.seconds = 200
    code = (
        "import sys; from pathlib import Path; from data.remote.config import CacheConfig; "
        "from data.shards.split import open_split; from data.shards.manifest import Manifest; "
        "cache = CacheConfig(folder=Path(sys.argv[2])); "
        "manifest = Manifest.read(sys.argv[3]); "
        "split = open_split(sys.argv[1], 'train', cache=cache, manifest=manifest); "
        "split.files.will_read(split.order(0), 0); input(); print('done')"
    )
    command = [sys.executable, "-c", code, server.url, str(cache.folder), str(server.folder)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    wait_until(lambda: server.shards() > 1, possible=lambda: process.poll() is None)
    assert process.communicate("\n", timeout=100) == ("done\n", "")
    assert process.returncode == 0


# -------------------------------------------------------------------- the network


def retries(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if "; attempt " in record.message]
    assert all(record.levelno == logging.WARNING for record in records)
    return [record.message for record in records]


# If the server closes the connection without a response, the HTTP library itself retries once.
@pytest.mark.parametrize(("failure", "requests"), [(503, 1), (429, 1), ("cut", 1), ("hang up", 2)])
def test_transient_failures_are_retried_and_logged(
    failure: int | str,
    requests: int,
    shards: Path,
    server: FileServer,
    cache: CacheConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.failures = {FIRST: [failure] * 2 * requests, "manifest.json": [failure] * requests}
    with open_split(server.url, "train", cache=cache) as split:
        assert split.read(0) == local_contents(shards)[0]
    assert server.requests[FIRST] == 2 * requests + 1
    retried = [line.partition(": ")[0].rpartition("/")[2] for line in retries(caplog)]
    assert retried == ["manifest.json", FIRST, FIRST]


def test_a_file_that_is_damaged_once_is_fetched_again(
    shards: Path, server: FileServer, cache: CacheConfig, caplog: pytest.LogCaptureFixture
) -> None:
    names = FIRST, index_path(server.folder / FIRST).name
    server.failures = {name: ["damage"] for name in names}
    with open_split(server.url, "train", cache=cache) as split:
        assert split.read(0) == local_contents(shards)[0]
    assert [server.requests[name] for name in names] == [2, 2]
    assert len(retries(caplog)) == 2


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (404, FileNotFoundError, "does not exist: check data.shards"),
        (403, PermissionError, r"cannot be read \(403 Forbidden\): check the URL"),
    ],
)
def test_missing_and_forbidden_files_are_not_retried(
    status: int, kind: type[OSError], reason: str, server: FileServer, cache: CacheConfig
) -> None:
    server.failures = {FIRST: [status] * 9, "manifest.json": [status]}
    with pytest.raises(kind, match=f"{server.url}/manifest.json {reason}"):
        open_split(server.url, "train", cache=cache)
    split = open_split(server.url, "train", cache=cache)
    with pytest.raises(kind, match=f"{server.url}/{FIRST} {reason}"):
        split.read(0)
    assert server.requests[FIRST] == 1
    assert not cached_shards(cache)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-600] + b"x" * 600, "SHA-256 of the .* differs"),
        (lambda content: content + b"x", "it has more than"),
    ],
    ids=["replaced", "longer"],
)
def test_a_wrong_shard_at_the_source_raises_an_error_that_names_its_url(
    damage: Callable[[bytes], bytes], reason: str, server: FileServer, cache: CacheConfig
) -> None:
    path = server.folder / FIRST
    path.write_bytes(damage(path.read_bytes()))
    with open_split(server.url, "train", cache=cache) as split:
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{server.url}/{FIRST} does not match .*{reason}"):
                split.read(0)
        assert server.requests[FIRST] == 4  # each time, it is fetched again once
        assert not cached_shards(cache)


def test_a_damaged_or_oversized_index_at_the_source_raises(
    server: FileServer, cache: CacheConfig
) -> None:
    path = index_path(server.folder / FIRST)
    content = path.read_bytes()
    for damaged, reason in ((content[:-9], "damaged"), (bytes(1 << 25), "it has more than")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{server.url}/{path.name} .*{reason}"):
            open_split(server.url, "train", cache=cache)


def test_indices_that_do_not_fit_in_the_cache_are_not_fetched(
    server: FileServer, cache: CacheConfig
) -> None:
    """A hostile manifest, in which each shard claims to be huge, could otherwise fill the disk."""
    manifest = Manifest.read(server.folder)
    large = [
        shard.model_copy(update={"samples": 10**12, "bytes": 10**16}) for shard in manifest.shards
    ]
    hostile = manifest.model_copy(update={"shards": tuple(large)})
    (server.folder / "manifest.json").write_bytes(hostile.to_bytes())
    with pytest.raises(ValueError, match=r"an index of 6.8e\+04 GB.*raise it to"):
        open_split(server.url, "train", cache=cache)
    assert set(server.requests) == {"manifest.json"}


def test_redirects_are_followed_only_within_http(
    shards: Path, server: FileServer, cache: CacheConfig
) -> None:
    with serving(shards) as other:
        other.redirect = server.url
        assert Manifest.load(other.url, cache) == Manifest.load(shards)
        for target in (f"file://{shards}", "ftp://127.0.0.1"):
            other.redirect = target
            other.requests.clear()
            with pytest.raises(PermissionError, match=rf"it redirects from http:// to {target}"):
                Manifest.load(other.url, cache)
            assert other.requests["manifest.json"] == 1


def test_a_missing_package_raises_an_error_that_states_the_install_command(
    cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for scheme, package in (("s3", "s3fs"), ("gs", "gcsfs")):
        monkeypatch.setitem(sys.modules, package, None)
        # Other tests in this process may have loaded the package.
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
        with pytest.raises(ValueError, match=rf"{package}.*run pip install .*\[remote\]"):
            Manifest.load(f"{scheme}://bucket/set", cache)
