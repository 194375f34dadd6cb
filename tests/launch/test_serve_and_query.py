"""What `kway serve` and `kway query` say of what cannot work: one line, and code 2."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.commands.serve import _curl_line
from launch.main import main
from tests.tiny_bundle import write, write_of_texts
from trainer.bundle.bundle import Bundle

Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """The line that a command ends with, its code being 2."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["kway", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        assert (caught.value.code, said.out, said.err.count("\n")) == (2, "", 1)
        return said.err

    return run


@pytest.mark.parametrize("file", ["none", "folder", "closed", "empty"])
def test_a_token_file_that_is_of_no_use_is_told_with_its_option_path_and_remedy(
    refused: Refused, tmp_path: Path, file: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch(0o600)
    (tmp_path / "closed").touch(0)  # which root can read all the same
    path = tmp_path / file
    line = refused("serve", tmp_path, "--token-file", path)
    assert line.startswith("error: --token-file")
    assert str(path) in line
    assert "Errno" not in line
    remedies = {"none": "name a file", "folder": "name one"}
    assert remedies.get(file, "openssl rand -hex 32 makes one") in line


@pytest.mark.parametrize("option", ["--token-file", "--texts"])
@pytest.mark.parametrize("file", ["none", "folder", "not-utf-8"])
def test_a_file_of_a_question_that_cannot_be_read_is_told_with_its_option(
    refused: Refused, tmp_path: Path, option: str, file: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "not-utf-8").write_bytes(b"a\xff")
    text = () if option == "--texts" else ("--text", "a")
    path = tmp_path / file
    line = refused("query", "http://127.0.0.1:1", "--class", "x", *text, option, path)
    assert line.startswith(f"error: {option} {path} ")
    assert ("save it as UTF-8" if file == "not-utf-8" else "name a file that you may read") in line
    assert "Errno" not in line


@pytest.mark.parametrize(
    "source", ["localhost:8000", "127.0.0.1:80", "gpu-3.local:8000/", "[::1]:8000", "localhost"]
)
def test_a_servers_address_without_http_is_told_as_such(refused: Refused, source: str) -> None:
    line = refused("query", source, "--class", "x", "--text", "a")
    assert f"there is no folder {source}, and a server's address starts with http://" in line
    assert f"give http://{source}" in line


@pytest.mark.parametrize("source", ["bundles/glyphs", "glyphs", "a:b", "localhosts"])
def test_any_other_missing_folder_is_no_bundle(refused: Refused, source: str) -> None:
    assert f"{source} is not a bundle" in refused("query", source, "--class", "x", "--text", "a")


def test_a_bundle_may_be_named_like_a_server(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:1").mkdir()
    assert "run:1 is not a bundle" in refused("query", "run:1", "--class", "x", "--text", "a")


def words(line: str) -> list[str]:
    """What a shell makes of a line."""
    code = "import sys; print(*sys.argv[1:], sep='\\n')"
    shell = ["sh", "-c", f'TOKEN=secret; "$0" -c "$1" {line}', sys.executable, code]
    return subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_line_to_paste_names_an_image_of_yours_and_sends_the_token(tmp_path: Path) -> None:
    with Bundle.open(write(tmp_path / "pets")) as pets:
        assert words(_curl_line(pets, has_tokens=False)) == [
            "--form-string", "classes=husky", "-F", "images=@your-image.png"
        ]  # fmt: skip
        with_token = words(_curl_line(pets, has_tokens=True))
    assert with_token[:2] == ["-H", "Authorization: Bearer secret"]
    with Bundle.open(write_of_texts(tmp_path / "texts")) as texts:
        assert words(_curl_line(texts, has_tokens=False))[-1] == "texts=A text."
