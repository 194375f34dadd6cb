"""Invalid input of `kway serve` and `kway query`: one-line errors and exit code 2."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.commands.serve import _curl_line
from launch.main import main
from serving.deploy.haproxy import RoutePaths
from serving.deploy.preparation import Prepared, check
from tests.tiny_bundle import IMAGE, tiny_backbone, write
from trainer.backbone.onnx_backbone import write_onnx

ErrorOf = Callable[..., str]


@pytest.fixture
def error_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> ErrorOf:
    """Run a command, check that it exits with 2, and return its one-line error."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["kway", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        output = capsys.readouterr()
        assert (caught.value.code, output.out, output.err.count("\n")) == (2, "", 1)
        return output.err

    return run


@pytest.mark.parametrize("file", ["none", "folder", "closed", "empty"])
def test_the_error_for_an_unusable_token_file_names_the_option_the_path_and_the_fix(
    error_of: ErrorOf, tmp_path: Path, file: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch(0o600)
    (tmp_path / "closed").touch(0)  # root can read it anyway
    path = tmp_path / file
    line = error_of("serve", tmp_path, "--token-file", path)
    assert line.startswith("error: --token-file")
    assert str(path) in line
    assert "Errno" not in line
    if file != "folder":
        assert "openssl rand -hex 32" in line


@pytest.mark.parametrize("option", ["--token-file", "--texts"])
@pytest.mark.parametrize("file", ["none", "folder", "not-utf-8"])
def test_the_error_for_an_unreadable_query_file_names_its_option(
    error_of: ErrorOf, tmp_path: Path, option: str, file: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "not-utf-8").write_bytes(b"a\xff")
    text = () if option == "--texts" else ("--text", "a")
    path = tmp_path / file
    line = error_of("query", "http://127.0.0.1:1", "--class", "x", *text, option, path)
    assert line.startswith(f"error: {option} {path} ")
    assert ("save it as UTF-8" if file == "not-utf-8" else "pass a readable file") in line
    assert "Errno" not in line


@pytest.mark.parametrize(
    "source", ["localhost:8000", "127.0.0.1:80", "gpu-3.local:8000/", "[::1]:8000", "localhost"]
)
def test_a_server_address_without_http_is_reported(error_of: ErrorOf, source: str) -> None:
    line = error_of("query", source, "--class", "x", "--text", "a")
    assert f"{source} is neither a folder" in line
    assert f"pass http://{source}" in line


@pytest.mark.parametrize("source", ["bundles/glyphs", "glyphs", "a:b", "localhosts"])
def test_any_other_missing_folder_is_reported_as_not_a_bundle(
    error_of: ErrorOf, source: str
) -> None:
    assert f"{source} is no" in error_of("query", source, "--class", "x", "--text", "a")


def test_a_folder_whose_name_looks_like_an_address_is_opened_as_a_bundle(
    error_of: ErrorOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:1").mkdir()
    assert "run:1 is no" in error_of("query", "run:1", "--class", "x", "--text", "a")


def words(line: str) -> list[str]:
    """Split a line into arguments as a shell does."""
    code = "import sys; print(*sys.argv[1:], sep='\\n')"
    shell = ["sh", "-c", f'TOKEN=secret; "$0" -c "$1" {line}', sys.executable, code]
    return subprocess.run(
        shell, capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()


def prepared(name: str, reads: str) -> Prepared:
    return Prepared(first_class=name, reads=reads, routes=RoutePaths(()))


def test_the_curl_line_contains_a_placeholder_image_and_the_token() -> None:
    images = prepared("it's", "images")
    assert words(_curl_line(images, has_tokens=False)) == [
        "--form-string", "classes=it's", "-F", "images=@your-image.png"
    ]  # fmt: skip
    with_token = words(_curl_line(images, has_tokens=True))
    assert with_token[:2] == ["-H", "Authorization: Bearer secret"]
    texts = prepared("a", "texts")
    assert words(_curl_line(texts, has_tokens=False))[-1] == "texts=A text."


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles whose specifications contain a low precision."""
    folder = tmp_path_factory.mktemp("quantized")

    def write_backbone(file: Path) -> None:
        write_onnx(tiny_backbone(), IMAGE, file)

    return {
        "bf16": write(folder / "bf16", changes={"precision": "bf16"}),
        "int8": write(folder / "int8", changes={"precision": "int8"}, write_onnx=write_backbone),
    }


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check bundles in this process, which a test can patch, and fail if Ray is started."""
    monkeypatch.setattr("serving.deploy.preparation.prepare", check)
    monkeypatch.setattr("serving.deploy.server._start_ray", lambda *_: pytest.fail("Ray started"))


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_quantized_bundle_does_not_run_on_gpus(
    error_of: ErrorOf,
    quantized: dict[str, Path],
    glyphs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    has_gpu: bool,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    low = quantized[precision]
    (tmp_path / "images").mkdir()
    index = ("index", low, tmp_path / "images", "-o", tmp_path / "out")
    for arguments in (
        ("serve", low),
        ("serve", low, "--print-config"),
        ("calibrate", low, glyphs),
        index,
        (*index, "--ray", "127.0.0.1:1"),
        ("k8s", "render", "serving", low, "--host", "a.example", "--in-image", "--no-tokens"),
    ):
        line = error_of(*arguments, "--device", "cuda")
        assert f"precision {precision} requires device cpu" in line, arguments


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("command", ["serve", "calibrate"])
def test_a_missing_gpu_is_a_one_line_error(
    error_of: ErrorOf,
    tmp_path: Path,
    glyphs: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shards = (glyphs,) if command == "calibrate" else ()
    line = error_of(command, write(tmp_path / "bundle"), *shards, "--device", "cuda")
    assert "torch cannot find a GPU" in line


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_an_unsupported_processor_is_reported_before_ray_starts(
    error_of: ErrorOf,
    quantized: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    precision: str,
) -> None:
    monkeypatch.setattr("trainer.backbone.precision._flags", lambda: {"avx2"})
    low = quantized[precision]
    for arguments in (("serve", low), ("query", low, "--class", "husky", __file__)):
        line = error_of(*arguments)
        assert f"precision {precision} requires a processor with one of the flags" in line
    # The server's machine may have another processor.
    monkeypatch.setattr(sys, "argv", ["kway", "serve", str(low), "--print-config"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert str(low) in capsys.readouterr().out


@pytest.mark.usefixtures("no_ray")
def test_int8_without_onnxruntime_is_reported_with_its_extra(
    error_of: ErrorOf,
    quantized: dict[str, Path],
    glyphs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.backbone.precision._flags", lambda: {"avx512_vnni"})
    low, out = quantized["int8"], tmp_path / "out"
    quantize = ("quantize", write(tmp_path / "bundle"), glyphs, "-o", out, "--precision", "int8")
    with monkeypatch.context() as patches:
        patches.setitem(sys.modules, "onnxruntime", None)  # as if it were not installed
        for arguments in (("serve", low), ("query", low, "--class", "husky", __file__), quantize):
            line = error_of(*arguments)
            assert "int8 requires onnxruntime, which is not installed: run pip install " in line
    for name in ("onnx", "onnxscript"):
        with monkeypatch.context() as patches:
            patches.setitem(sys.modules, name, None)
            assert f"--precision int8 requires {name}, which is not" in error_of(*quantize)
    assert not out.exists()
