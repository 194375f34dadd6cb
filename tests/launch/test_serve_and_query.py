"""Invalid input of `kway serve` and `kway query`: one-line errors and exit code 2."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.commands.serve import _curl_line
from launch.main import main
from serving.deploy.haproxy import RoutePaths
from serving.deploy.preparation import Prepared

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


@pytest.mark.parametrize("option", ["--token-file", "--admin-token-file"])
@pytest.mark.parametrize("file", ["none", "folder", "closed", "empty"])
def test_the_error_for_an_unusable_token_file_names_the_option_the_path_and_the_fix(
    error_of: ErrorOf, tmp_path: Path, file: str, option: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch(0o600)
    (tmp_path / "closed").touch(0)  # root can read it anyway
    path = tmp_path / file
    line = error_of("serve", tmp_path, option, path)
    assert line.startswith(f"error: {option}")
    assert str(path) in line
    assert "Errno" not in line
    if file != "folder":
        assert "openssl rand -hex 32" in line


def test_the_error_for_an_invalid_webhook_host_names_the_option_and_the_form(
    error_of: ErrorOf, tmp_path: Path
) -> None:
    hosts = ("--webhook-host", "hooks.example.com", "--webhook-host", "https://a.b/")
    line = error_of("serve", tmp_path, *hosts)
    assert "--webhook-host" in line
    assert "'https://a.b/' is not HOST or HOST:PORT" in line


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
    return subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines()


def prepared(name: str, reads: str) -> Prepared:
    return Prepared(versions={}, first_class=name, reads=reads, routes=RoutePaths((), ()))


def test_the_curl_line_contains_a_placeholder_image_and_the_token() -> None:
    images = prepared("it's", "images")
    assert words(_curl_line(images, has_tokens=False)) == [
        "--form-string", "classes=it's", "-F", "images=@your-image.png"
    ]  # fmt: skip
    with_token = words(_curl_line(images, has_tokens=True))
    assert with_token[:2] == ["-H", "Authorization: Bearer secret"]
    assert words(_curl_line(prepared("a", "texts"), has_tokens=False))[-1] == "texts=A text."
