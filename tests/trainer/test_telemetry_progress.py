"""The console output of a run, on terminals of common widths and in a log."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import threading
from pathlib import Path

from tests.ranks import forked
from tests.trainer.telemetry_reports import NUM_STEPS, NUMBERS, telemetry


def test_output_to_a_file_is_plain_unwrapped_lines(tmp_path, capsys, monkeypatch):
    """FORCE_COLOR, which is often set in CI, makes rich treat a file as a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    long = "[bold]not markup[/bold] :smile: " + 60 * "word "
    with telemetry(tmp_path) as report:
        report.step(1, **NUMBERS)
        report.print_line(long)
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"step 1/{NUM_STEPS}  loss 1\.2500  lr 5\.00e-02  \d+(\.\d\d)? samples/s  data wait 0%  "
        r"[\d.]+ [MG]iB  ETA \d+:\d\d:\d\d",
        first,
    )
    assert second.rstrip() == long.rstrip()


def report_on_terminal(terminal: str, folder: Path) -> None:
    """Report a run of 100 steps from a process whose standard streams are `terminal`."""
    opened = os.open(terminal, os.O_RDWR)
    for stream in range(3):
        os.dup2(opened, stream)
    os.environ["TERM"] = "xterm-256color"
    os.environ.pop("COLUMNS", None)
    with telemetry(folder, log_every=30) as report:
        for step in range(1, 101):
            report.beat(step)
            if report.is_due(step):
                report.step(step, **NUMBERS)
            if step == 60:
                report.event("checkpoint", 60, f"checkpoint {folder / 'step-00000060'}")


def shown_on_a_terminal(columns: int, folder: Path) -> tuple[int | None, str]:
    """Run `report_on_terminal` on a terminal of 40 rows. Return its exit code and all output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = forked(report_on_terminal, os.ttyname(theirs), folder)
    sent: list[str] = []
    reader = threading.Thread(target=lambda: sent.append(read_all(ours)))
    process.start()
    reader.start()
    process.join(60)
    process.kill()
    process.join(60)
    os.close(theirs)
    reader.join(60)
    return process.exitcode, sent[0]


def read_all(terminal: int) -> str:
    """Return everything written to a terminal before the last process closes the other end."""
    sent = b""
    with contextlib.suppress(OSError):  # Linux reports the end as an OSError
        while chunk := os.read(terminal, 65536):
            sent += chunk
    os.close(terminal)
    return sent.decode()


def test_a_terminal_shows_unwrapped_lines_above_a_bar_that_fits_its_width(tmp_path: Path):
    columns, numbers = 80, r"loss 1\.250  [\d.]+ samples/s  wait 0%  ETA 0:00:00"
    folder = tmp_path / ("long-name-" * 8)
    folder.mkdir()
    code, sent = shown_on_a_terminal(columns, folder)
    assert code == 0, sent
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent)
    bars = [line.strip() for line in re.split(r"[\r\n]+", shown) if "━" in line]
    assert any(line.startswith("step   0/100") for line in bars), shown
    assert re.fullmatch(rf"step 100/100 ━+ {numbers}", bars[-1])
    assert max(len(line) for line in bars) <= columns
    assert "…" not in shown
    # A long path may be on its own line, but is never split.
    lines = [line.removeprefix("checkpoint ") for line in shown.splitlines()]
    assert [line for line in lines if "step-0" in line] == [str(folder / "step-00000060")]
    # The cursor stays visible: a killed rank could not show it again.
    assert sent.rfind("\x1b[?25h") > sent.rfind("\x1b[?25l")
    assert sent.index("\x1b[?25h") < sent.index("━")
