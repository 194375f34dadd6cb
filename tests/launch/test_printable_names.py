"""Commands print names from files without control characters or markup."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from data.messages import printable
from launch.terminal import table_cell
from tests.data.conftest import kway_shard, write_image


def test_control_characters_are_printed_as_code_points() -> None:
    assert printable("a\x1b[31m\nb\u2028c\u202ed\udc80") == (
        "aU+001B[31mU+000AbU+2028cU+202EdU+DC80"
    )
    assert printable("  crème, 東京 [bold]") == "  crème, 東京 [bold]"


def test_a_table_cell_prints_markup_literally() -> None:
    table = Table()
    table.add_row(table_cell("[/red] of [bold]\n\x1b"))
    console = Console(width=60)
    with console.capture() as shown:
        console.print(table)
    assert "[/red] of [bold] U+001B" in shown.get()


def test_escape_sequences_in_a_folder_name_are_not_printed(tmp_path: Path) -> None:
    folder = tmp_path / "red\x1b[31m\nname"
    for i, name in enumerate(("one", "two")):
        write_image(folder / name / "0.png", i)
    write_image(folder / "loose\x1b[31m.png", 2)
    out = tmp_path / "out\x1b[31m"
    arguments = ("imagefolder", folder, "-o", out, "--test-fraction", 0, "--workers", 0)
    done = kway_shard(*arguments)
    assert done.exit_code == 0, done.output
    assert r"skipped 'loose\x1b[31m.png'" in done.stderr
    assert "outU+001B[31m: 2 train samples" in done.stdout
    assert "\x1b" not in done.output


def test_an_error_about_a_name_with_escape_sequences_is_one_line(
    error_of: Callable[..., str], tmp_path: Path
) -> None:
    assert "aU+001B[31m b" in error_of("shard", "verify", tmp_path / "a\x1b[31m\nb")
