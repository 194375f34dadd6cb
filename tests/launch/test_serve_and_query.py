"""Invalid input of `kway serve` and `kway query`: one-line errors and exit code 2."""

import re
import shlex
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.commands.serve import _curl_line
from tests.serving.started import ask, write_images
from tests.tiny_bundle import IMAGE, classes, tiny_backbone, write
from trainer.backbone.onnx_backbone import write_onnx
from trainer.bundle.bundle import Bundle

ErrorOf = Callable[..., str]


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


@pytest.mark.parametrize(
    ("option", "file"), [("--token-file", "none"), ("--texts", "none"), ("--texts", "not-utf-8")]
)
def test_the_error_for_an_unreadable_query_file_names_its_option(
    error_of: ErrorOf, tmp_path: Path, option: str, file: str
) -> None:
    (tmp_path / "not-utf-8").write_bytes(b"a\xff")
    text = () if option == "--texts" else ("--text", "a")
    path = tmp_path / file
    line = error_of("query", "http://127.0.0.1:1", "--class", "x", *text, option, path)
    assert option in line
    assert str(path) in line
    assert ("save it as UTF-8" if file == "not-utf-8" else "does not exist") in line


@pytest.mark.parametrize("source", ["glyphs", "localhost", "gpu-3.local:8000/"])
def test_a_source_that_is_neither_a_folder_nor_a_url_is_reported(
    error_of: ErrorOf, source: str
) -> None:
    line = error_of("query", source, "--class", "x", "--text", "a")
    assert f"{source} does not exist" in line
    assert "http://" in line


def test_the_curl_line_quotes_the_class(tmp_path: Path) -> None:
    entries = [entry.model_copy(update={"name": "it's"}) for entry in classes()]
    with Bundle.open(write(tmp_path / "images", entries=entries[:1] + classes()[1:])) as bundle:
        assert shlex.split(_curl_line(bundle, has_tokens=False))[:2] == [
            "--form-string",
            "classes=it's",
        ]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_bundle_or_gallery_that_cannot_be_served_is_reported_before_a_server_starts(
    error_of: ErrorOf, tmp_path: Path
) -> None:
    good, empty = write(tmp_path / "good"), tmp_path / "empty"
    empty.mkdir()
    for runner in ((), ("--no-ray",)):
        assert f"{empty}" in error_of("serve", empty, "--port", 0, *runner)
        gallery = ("--gallery", f"pets={empty}")
        assert f"{empty}" in error_of("serve", good, "--port", 0, *gallery, *runner)
    for name in ("class_weights.safetensors", "backbone.safetensors"):
        copy = shutil.copytree(good, tmp_path / name)
        flip(copy / name)
        line = error_of("serve", copy, "--port", 0, "--verify")
        assert re.fullmatch(rf"error: .*{name}.*checksum.*\n", line), line


def test_ports_in_use_and_foreign_addresses_are_reported(error_of: ErrorOf, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option, other in (("--port", ()), ("--grpc-port", ("--port", 0))):
            line = error_of("serve", tmp_path, *other, option, port, "--no-ray")
            assert re.fullmatch(rf"error: .* port {port} .*{option}\n", line), line
    line = error_of("serve", tmp_path, "--host", "192.0.2.1", "--no-tokens", "--no-ray")
    assert "--host" in line
    assert "both 9000" in error_of("serve", tmp_path, "--port", 9000, "--grpc-port", 9000)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (("--no-ray", "--replicas", "1:2"), "omit --no-ray"),
        (("--print-config", "--no-ray"), "--print-config"),
        (("--host", "0.0.0.0"), "--token-file"),
        (("--host", "0.0.0.0", "--no-ray"), "--token-file"),
        (("--grpc-port", 0), "--no-ray"),
        *[((f"--replicas={text}",), "1:4") for text in ("0", "4:1", "two", "1:", "10000")],
    ],
)
def test_options_that_do_not_fit_are_rejected_with_a_fix(
    error_of: ErrorOf, tmp_path: Path, options: tuple[object, ...], fix: str
) -> None:
    assert fix in error_of("serve", tmp_path, *options)


def test_without_ray_the_command_names_the_other_runner_and_the_extra(
    error_of: ErrorOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.commands.serve.find_spec", lambda _: None)
    line = error_of("serve", tmp_path)
    assert "--no-ray" in line
    assert "pip install" in line


def test_a_query_verifies_the_whole_bundle_except_its_class_weights(tmp_path: Path) -> None:
    (image, *_), bundle = write_images(tmp_path), write(tmp_path / "pets")
    flip(bundle / "class_weights.safetensors")  # of the last class, which is not queried
    assert "husky" in ask(bundle, "--class", "husky", image)
    flip(bundle / "backbone.safetensors")
    with pytest.raises(ValueError, match=r"backbone\.safetensors.*checksum"):
        ask(bundle, "--class", "husky", image)


def test_the_table_shows_classes_and_verdicts(tmp_path: Path) -> None:
    (image, *_), bundle = write_images(tmp_path), write(tmp_path / "pets")
    table = ask(bundle, "--class", "husky", "--threshold", "-1000", image)
    assert re.search(r"husky .* -1000\.000 .* yes", table)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{bundle}", "--class", "hsky", "{image}"), "'husky'"),
        (("{bundle}", "--class", "husky", "{bundle}/none.png"), "none.png"),
        (("{bundle}", "--class", "husky", "{bundle}/bundle.json"), "bundle.json"),
        (("{bundle}", "--class", "husky", "--threshold", "nan", "{image}"), "finite"),
        (("http://127.0.0.1:1", "--class", "husky", "{image}"), "http://127.0.0.1:1"),
    ],
)
def test_an_invalid_query_prints_a_one_line_error(
    error_of: ErrorOf, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    values = {"bundle": write(tmp_path / "pets"), "image": write_images(tmp_path)[0]}
    assert message in error_of("query", *(one.format(**values) for one in arguments))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose specification contains a low precision."""

    def write_backbone(file: Path) -> None:
        write_onnx(tiny_backbone(), IMAGE, file)

    path = tmp_path_factory.mktemp("quantized") / "int8"
    return write(path, changes={"precision": "int8"}, write_onnx=write_backbone)


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a server is started."""
    monkeypatch.setattr("serving.on_ray.running", lambda *_: pytest.fail("Ray started"))


def test_a_quantized_bundle_does_not_run_on_gpus(
    error_of: ErrorOf,
    quantized: Path,
    glyphs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    (tmp_path / "images").mkdir()
    for arguments in (
        ("serve", quantized),
        ("serve", quantized, "--print-config"),
        ("calibrate", quantized, glyphs),
        ("index", quantized, tmp_path / "images", "-o", tmp_path / "out"),
        ("k8s", "render", "serving", quantized, "--host", "a.example", "--in-image", "--no-tokens"),
    ):
        line = error_of(*arguments, "--device", "cuda")
        assert "precision int8 requires device cpu" in line, arguments


def test_a_missing_gpu_is_a_one_line_error(
    error_of: ErrorOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    line = error_of("serve", write(tmp_path / "bundle"), "--device", "cuda")
    assert "torch cannot find a GPU" in line


def test_an_unsupported_processor_is_reported_before_ray_starts(
    error_of: ErrorOf,
    kway: Callable[..., int],
    quantized: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("trainer.backbone.precision._flags", lambda: {"avx2"})
    for arguments in (("serve", quantized), ("query", quantized, "--class", "husky", __file__)):
        line = error_of(*arguments)
        assert "precision int8 requires a processor with one of the flags" in line
    # The server's machine may have another processor.
    assert kway("serve", quantized, "--print-config") == 0
    assert str(quantized) in capsys.readouterr().out


def test_int8_without_onnxruntime_is_reported_with_its_extra(
    error_of: ErrorOf,
    quantized: Path,
    glyphs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.backbone.precision._flags", lambda: {"avx512_vnni"})
    out = tmp_path / "out"
    quantize = ("quantize", write(tmp_path / "bundle"), glyphs, "-o", out, "--precision", "int8")
    with monkeypatch.context() as patches:
        patches.setitem(sys.modules, "onnxruntime", None)  # as if it were not installed
        for arguments in (
            ("serve", quantized),
            ("query", quantized, "--class", "husky", __file__),
            quantize,
        ):
            line = error_of(*arguments)
            assert "int8 requires onnxruntime, which is not installed: run pip install " in line
    for name in ("onnx", "onnxscript"):
        with monkeypatch.context() as patches:
            patches.setitem(sys.modules, name, None)
            assert f"--precision int8 requires {name}, which is not" in error_of(*quantize)
    assert not out.exists()
