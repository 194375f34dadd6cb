"""Sources at a URL give the same shards as a local copy of their files."""

import logging
import pickle
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pyarrow as arrow
import pytest
from pyarrow import parquet
from typer.testing import CliRunner, Result

from data.remote.input_path import input_path
from data.remote.path import RemotePath
from data.shards.manifest import Manifest
from data.shards.writing.writer import write_shards
from data.sources import Cifar10, ImageFolder, ImageNet, Mnist, Table, Tweets
from launch.commands.shard import app
from tests.data import ilsvrc, test_cifar, test_mnist
from tests.data.conftest import write_image
from tests.data.file_server import FileServer, serving
from tests.data.killed import contents
from tests.data.s3_server import s3_server

Input = Path | RemotePath


def kway(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with s3_server():
        yield


def upload(folder: Path, scheme: str) -> str:
    """Copy the files below a folder to a new URL whose last part is the name of the folder."""
    url = f"{scheme}://bucket/{secrets.token_hex(4)}/{folder.name}"
    files = fsspec.filesystem(scheme)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files.pipe_file(f"{url}/{path.relative_to(folder)}", path.read_bytes())
    return url


def class_folders(folder: Path) -> None:
    for split, number in (("train", 8), ("val", 3)):
        for i in range(number):
            write_image(folder / split / "aé" / f"{i} #?%.png", i)
            write_image(folder / split / "b" / "deep" / f"{i}.jpg", 50 + i)
    (folder / "train/b/notes.txt").write_text("text")
    (folder / "train/b/bad.jpg").write_bytes(b"")
    write_image(folder / "train/b/.hidden/0.png", 1)
    write_image(folder / "other/0.png", 1)


def images_and_files(folder: Path) -> None:
    """Write images and a table of their paths, one of them without an extension."""
    for i in range(8):
        write_image(folder / "images" / f"{i}.png", i)
    rows = [f"images/{i}{'.png' * (i > 0)},{'ab'[i % 2]}" for i in range(7)]
    (folder / "table.csv").write_text("\n".join(["path,label", *rows]))


def tables(folder: Path) -> None:
    folder.mkdir()
    texts = [f"text {i} ❤ {'long ' * (i * 10)}" for i in range(240)]
    labels = ["x", "y", "z"] * 80
    rows = [f'"{text}",{label}' for text, label in zip(texts, labels, strict=True)]
    (folder / "a.csv").write_text("\n".join(["text,label", *rows]))
    (folder / "tweets.txt").write_text("\n".join(f"{'🔥❤'[i % 2]} {i}" for i in range(200)))
    parquet.write_table(arrow.table({"text": texts, "label": labels}), folder / "a.parquet")
    for i in range(6):
        write_image(folder / "0.png", i)
        (folder / "0.png").rename(folder / f"{i}.bin")
    found = [(folder / f"{i}.bin").read_bytes() for i in range(6)]
    columns = {"jpg": found, "label": ["a", "b"] * 3, "other": [b"x" * 100_000] * 6}
    parquet.write_table(arrow.table(columns), folder / "images.parquet")


def mnist(folder: Path) -> None:
    test_mnist.write_files(folder, test_mnist.files(), compressed=True)


def cifar(folder: Path) -> None:
    folder.mkdir()
    test_cifar.archive(folder / "cifar.tar.gz", "cifar-10-batches-bin", test_cifar.ten())


CASES: dict[str, tuple[Callable[[Path], object], Callable[[Input, Path], object]]] = {
    "class folders": (class_folders, lambda at, _: ImageFolder(at, skip_bad=True)),
    "table": (tables, lambda at, work: Table((at / "a.csv",), work, "label", text="text")),
    "parquet": (tables, lambda at, work: Table((at / "a.parquet",), work, "label", text="text")),
    "parquet images": (
        tables,
        lambda at, work: Table((at / "images.parquet",), work, "label", image="jpg", images=Path()),
    ),
    "image paths": (
        images_and_files,
        lambda at, work: Table((at / "table.csv",), work, "label", image="path"),
    ),
    "tweets": (tables, lambda at, work: Tweets((at / "tweets.txt",), work)),
    "imagenet tars": (ilsvrc.write_tars, lambda at, _: ImageNet(at)),
    "mnist": (mnist, lambda at, _: Mnist(at)),
    "cifar": (cifar, lambda at, _: Cifar10(at / "cifar.tar.gz")),
}


@pytest.mark.parametrize("scheme", ["s3", "memory"])
@pytest.mark.parametrize("case", CASES)
def test_a_source_at_a_url_gives_the_same_shards(case: str, scheme: str, tmp_path: Path) -> None:
    make, source = CASES[case]
    make(tmp_path / "input")
    url = upload(tmp_path / "input", scheme)
    folders = []
    for name, at in (("local", tmp_path / "input"), ("remote", input_path(url))):
        found = source(at, tmp_path / f"{name}.work")
        ignored = found.skipped()
        write_shards(found, tmp_path / name, samples_per_shard=100, workers=0, ignored=ignored)
        folders.append(contents(tmp_path / name))
    local, remote = folders
    if case == "image paths":  # the manifest contains the folder of the images
        assert local.pop("manifest.json") != remote.pop("manifest.json")
    assert local == remote


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    assert input_path(f"file://{tmp_path}/in/") == tmp_path / "in"


def test_a_table_may_list_the_urls_of_the_images(tmp_path: Path) -> None:
    images_and_files(tmp_path / "in")
    url = upload(tmp_path / "in", "s3")
    rows = [f"{url}/images/{i}.png,{'ab'[i % 2]}" for i in range(8)]
    (tmp_path / "urls.csv").write_text("\n".join(["file,class", *rows]))
    root, files = input_path(url), (tmp_path / "urls.csv",)
    table = Table(files, tmp_path / "w", "class", image="file", images=root)
    write_shards(table, tmp_path / "table", workers=0)
    elsewhere = root / "images" / "x"
    table = Table(files, tmp_path / "w2", "class", image="file", images=elsewhere)
    with pytest.raises(ValueError, match=r"URL outside .*/images/x"):
        write_shards(table, tmp_path / "out", workers=0)


def test_worker_processes_read_from_the_url(tmp_path: Path) -> None:
    class_folders(tmp_path / "in")
    url = upload(tmp_path / "in", "s3")
    for name, at in (("local", tmp_path / "in"), ("remote", url)):
        done = kway(
            "imagefolder", at, "-o", tmp_path / name, "--skip-bad", "--workers", 2,
            "--samples-per-shard", 5,
        )  # fmt: skip
        assert done.exit_code == 0, done.exception
    assert contents(tmp_path / "local") == contents(tmp_path / "remote")
    assert f"note: {url}: skipped 'other'" in done.stderr
    tables(tmp_path / "texts")
    done = kway(
        "table", f"{upload(tmp_path / 'texts', 's3')}/a.csv", "--text", "text", "--label", "label",
        "-o", tmp_path / "table", "--workers", 2,
    )  # fmt: skip
    assert done.exit_code == 0, done.exception


def test_the_commands_read_tables_at_urls(tmp_path: Path) -> None:
    images_and_files(tmp_path / "in")
    tables(tmp_path / "tables")
    images, texts = upload(tmp_path / "in", "s3"), upload(tmp_path / "tables", "s3")
    for number, command in enumerate(
        [
            ("table", f"{images}/table.csv", "--image", "path", "--label", "label"),
            ("table", f"{texts}/a.parquet", f"{texts}/a.csv", "--text", "text", "--label", "label"),
            ("tweets", f"{texts}/tweets.txt"),
        ]
    ):
        out = tmp_path / f"out{number}"
        done = kway(*command, "-o", out)
        assert done.exit_code == 0, done.exception
        assert len(Manifest.load(out).classes) >= 2
        assert not out.with_name(f"{out.name}.first-pass").exists()


def test_a_folder_is_listed_with_one_paged_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class_folders(tmp_path / "in")
    url = upload(tmp_path / "in", "s3")
    with caplog.at_level(logging.DEBUG, "s3fs"):
        source = ImageFolder(input_path(url), skip_bad=True)
        splits = source.splits()
        source.describe()
    requests = [record.getMessage() for record in caplog.records]
    assert sum("listing page" in one for one in requests) == 1
    assert not [one for one in requests if "head_object" in one or "get_object" in one]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "s3fs"):
        pickle.loads(pickle.dumps(source)).render(splits["train"][0])
    assert [one for one in caplog.messages if "CALL" in one and "get_object" not in one] == []
    assert sum("get_object" in one for one in caplog.messages) == 1


def requests(caplog: pytest.LogCaptureFixture, run: Callable[[], object]) -> int:
    """Return the number of objects, or parts of objects, that are requested during `run`."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "s3fs"):
        run()
    return sum("CALL: get_object" in message for message in caplog.messages)


def test_the_headers_of_tars_are_read_in_large_ranges(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    classes = {f"n0000000{i}": {f"{j}.JPEG": bytes(10_000) for j in range(300)} for i in range(2)}
    (tmp_path / "in").mkdir()
    (tmp_path / "in/ILSVRC2012_img_train.tar").write_bytes(ilsvrc.training_tar(classes))
    source = ImageNet(input_path(upload(tmp_path / "in", "s3")))
    assert requests(caplog, source.splits) < 30
    task = source.splits()["train"][0]
    with pytest.raises(ValueError, match="not an image"):
        assert requests(caplog, lambda: source.render(task)) == 1


def test_only_the_columns_that_are_used_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in").mkdir()
    columns = {"text": ["a", "b"] * 50, "label": ["x", "y"] * 50, "other": [bytes(10**5)] * 100}
    table = arrow.table(columns)
    parquet.write_table(table, tmp_path / "in/a.parquet", compression="none", use_dictionary=False)
    file = input_path(f"{upload(tmp_path / 'in', 's3')}/a.parquet")
    source = Table((file,), tmp_path / "work", "label", text="text")
    with file.open("rb") as opened:
        assert len(opened.read()) > 10**7
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "s3fs"):
        source.classes()
    ranges = [
        message.rpartition("bytes=")[2].partition("'")[0].split("-")
        for message in caplog.messages
        if "CALL: get_object" in message
    ]
    assert sum(int(last) - int(first) for first, last in ranges) < 2 * 10**6


def test_a_missing_object_is_an_error_that_names_the_url(tmp_path: Path) -> None:
    folders = tmp_path / "folders"
    for name in "ab":
        write_image(folders / name / "0.png", 0)
    images_and_files(tmp_path / "in")
    url = upload(tmp_path / "in", "s3")
    for command, missing in (
        (("table", f"{url}/gone.csv", "--text", "text", "--label", "label"), f"{url}/gone.csv"),
        (("table", f"{url}/gone.parquet", "--text", "t", "--label", "l"), f"{url}/gone.parquet"),
        (("imagefolder", f"{url}/gone"), f"{url}/gone is not a folder"),
        (("imagefolder", "s3://no-bucket-here/x"), "s3://no-bucket-here/x"),
    ):
        failed = kway(*command, "-o", tmp_path / "out")
        assert isinstance(failed.exception, OSError | ValueError), failed.exception
        assert missing in str(failed.exception)
        assert "\n" not in str(failed.exception)
    source = ImageFolder(input_path(upload(folders, "s3")))
    tasks = source.splits()["train"]
    fsspec.filesystem("s3").rm_file(f"{source.folder}/{tasks[0].path}")
    with pytest.raises(FileNotFoundError, match=rf"/{tasks[0].path} does not exist: check"):
        source.render(tasks[0])


def test_an_unsupported_url_is_an_error_that_lists_the_schemes() -> None:
    failed = kway("imagefolder", "ftp://host/images", "-o", "out")
    assert "unsupported URL scheme: use a path, or file://, http://" in str(failed.exception)


@pytest.fixture
def http(tmp_path: Path) -> Iterator[FileServer]:
    tables(tmp_path / "tables")
    with serving(tmp_path / "tables") as server:
        yield server


def test_tables_are_read_over_http_and_failures_are_retried(
    http: FileServer, tmp_path: Path
) -> None:
    http.failures = {"a.csv": [503, "hang up", 500], "a.parquet": ["cut"]}
    local = Table((http.folder / "a.csv",), tmp_path / "work", "label", text="text")
    write_shards(local, tmp_path / "local", workers=0)
    for name in ("a.csv", "a.parquet"):
        file = RemotePath(f"{http.url}/{name}")
        remote = Table((file,), tmp_path / f"{name}.work", "label", text="text")
        write_shards(remote, tmp_path / name, workers=0)
        assert not http.failures[name]
    assert contents(tmp_path / "a.csv") == contents(tmp_path / "local")
    with pytest.raises(FileNotFoundError, match=r"/missing\.csv is not a file"):
        Table((RemotePath(f"{http.url}/missing.csv"),), tmp_path / "w", "label", text="text")


def test_errors_of_the_server_are_not_errors_of_the_table(http: FileServer, tmp_path: Path) -> None:
    file = RemotePath(f"{http.url}/a.parquet")
    table = Table((file,), tmp_path / "work", "label", text="text")
    http.failures = {"a.parquet": [403]}
    with pytest.raises(PermissionError, match=r"/a\.parquet cannot be read \(403"):
        table.classes()
    http.failures = {"x.tar.gz": [403]}
    with pytest.raises(PermissionError, match=r"/x\.tar\.gz cannot be read \(403"):
        Cifar10(RemotePath(f"{http.url}/x.tar.gz"))
    http.failures = {"b.parquet": [403], "c.parquet": [503, "hang up"]}
    with pytest.raises(PermissionError, match=r"/b\.parquet cannot be read \(403"):
        RemotePath(f"{http.url}/b.parquet").is_file()
    assert not RemotePath(f"{http.url}/c.parquet").is_file()
    assert http.requests["c.parquet"] == 3


def test_images_of_a_table_are_read_over_http_and_failures_are_retried(
    http: FileServer, tmp_path: Path
) -> None:
    for i in range(2):
        write_image(http.folder / f"{i}.png", i)
    (http.folder / "paths.csv").write_text("path,label\n0.png,a\n1.png,b\n")
    http.failures = {"0.png": [503, "hang up"], "1.png": ["cut", 429]}
    root = input_path(http.url)
    file = root / "paths.csv"
    table = Table((file,), tmp_path / "work", "label", image="path", test_fraction=0)
    assert write_shards(table, tmp_path / "out", workers=0).manifest.shards[0].samples == 2
    assert http.requests["0.png"] == http.requests["1.png"] == 3


def test_a_folder_over_http_is_an_error_with_the_reason(http: FileServer, tmp_path: Path) -> None:
    failed = kway("imagefolder", http.url, "-o", tmp_path / "out")
    assert "HTTP servers do not list folders: copy the folder, or use s3://" in str(
        failed.exception
    )


@pytest.mark.parametrize("name", ["a//b.png", "a/../b.png", "./b.png"])
def test_names_that_are_not_paths_raise(name: str) -> None:
    url = f"memory://bucket/{secrets.token_hex(4)}"
    store = fsspec.filesystem("memory")
    store.store[f"{url.removeprefix('memory:/')}/{name}"] = store.store.setdefault(
        "/x", fsspec.implementations.memory.MemoryFile(store, "/x", b"")
    )
    with pytest.raises(ValueError, match="is not the path of one file: rename it"):
        ImageFolder(input_path(url)).classes()
