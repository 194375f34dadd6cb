"""The `kway` command: its output, exit codes and one-line errors."""

import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from heads.losses import LOSSES
from launch.main import main
from tests.dispositions import default_signals
from tests.process_tree import processes_of
from tests.ranks import rank_world
from tests.shards import glyph_recipe
from tests.system.processes import KWAY, ROOT, environment
from tests.tiny_bundle import write as write_bundle
from trainer.bundle.bundle import Bundle
from trainer.run.folder import RunFolder
from trainer.train import train


@pytest.fixture(scope="module")
def trained(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Copy it before changing it."""
    recipe = glyph_recipe(glyphs, tmp_path_factory.mktemp("trained") / "run")
    train(recipe, rank_world())
    return recipe.run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_kway_losses_lists_every_loss_and_its_alignment(kway, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # without a terminal each loss is one line
    assert kway("losses") == 0
    table, _ = capsys.readouterr().out.split("\n\n")
    rows = {line.split()[0]: line.split() for line in table.splitlines()[1:]}
    assert rows.keys() == LOSSES.keys()
    aligned = [rows[kind][1] for kind in ("batch_ce", "max_margin", "ce")]
    assert aligned == ["yes", "no", "depends"]


def test_kway_eval_reproduces_the_evaluation_of_training(kway, run, capsys):
    folder = RunFolder(run).evaluations
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)
    assert kway("eval", run) == 0
    shown, error = capsys.readouterr()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert shown.startswith(f"{run} at step 4: 57 samples of test\n")
    assert {"top1", "top5", "sa", "auprc"} <= set(shown.split())
    assert error == ""  # no progress bar without a terminal


# The arguments, and a part of the message. {run} is a finished run and {out} an empty folder.
INVALID = [
    ("train nothing.yaml", "recipe nothing.yaml does not exist"),
    ("train .", "recipe . is a folder"),
    ("train {run}/recipe.yaml optimizer.lrr=1", "optimizer.lrr is not a known key: did you mean"),
    ("train {run}/recipe.yaml --nnodes 2 --nproc 1", "--nnodes is 2,"),
    ("train {run}/recipe.yaml --rdzv-conf is_host=x", "'--rdzv-conf': is_host is 'x'"),
    ("trian", "No such command 'trian'"),
    ("eval {out}", "{out} is not a run"),
    ("eval {run} --checkpoint 7", "step 7"),
    ("eval {run} --classes {out}/none/a.csv", "a.csv cannot be written (No such file"),
    ("eval {run} --classes .", ". is a folder: pass"),
    ("export {run} -o {out}", "or pass --force"),
    ("calibrate {out} {out} --recall 1.5", "Invalid value for '--recall'"),
    ("query {out} {run}/recipe.yaml --class x", "bundle.json"),
    ("query {out} none.png --class x", "none.png is not a file"),
    ("shard imagefolder {out}/none -o {out}/shards", "{out}/none"),
    ("serve {out} --timeout nan", "--timeout"),
    ("report {run} -o {out}/none/a.html", "a.html cannot be written (No such file"),
]


@pytest.mark.parametrize(("line", "message"), INVALID, ids=[line for line, _ in INVALID])
def test_invalid_input_exits_with_2_and_a_one_line_error(line, message, error_of, run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    error = error_of(*(word.format(run=run, out=out) for word in line.split()))
    assert message.format(out=out) in error
    assert list(out.iterdir()) == []  # the command leaves no files behind


@pytest.mark.parametrize("damage", ["no checkpoint", "checkpoint"])
def test_a_damaged_run_exits_with_2_and_a_one_line_error(damage, error_of, run):
    (weights,) = run.glob("checkpoints/*/*.safetensors")
    if damage == "checkpoint":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        shutil.rmtree(run / "checkpoints")
    message = weights.name if damage == "checkpoint" else "has no checkpoint"
    assert message in error_of("eval", run)


def test_kway_without_a_command_prints_help_and_exits_with_2(kway, capsys):
    assert kway() == 2
    out, error = capsys.readouterr()
    assert "Usage:" in out
    assert "error:" not in error


def test_traceback_shows_where_an_error_came_from(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["kway", "--traceback", "eval", str(tmp_path)])
    with pytest.raises(FileNotFoundError) as caught:
        main()
    assert caught.traceback[-1].path == ROOT / "trainer/run/folder.py"


MARK = "KWAY_TEST_MARK"  # an environment variable of all processes of a demo


@pytest.mark.slow
@default_signals()
def test_a_signal_to_the_demo_stops_its_server(tmp_path):
    mark, bundle = uuid.uuid4().hex, write_bundle(tmp_path / "bundle")
    code = (
        "import sys, time; from pathlib import Path\n"
        "from launch.commands.demo import exit_on_signals, served\n"
        "exit_on_signals()\n"
        "with served(Path(sys.argv[1])) as url:\n"
        "    print(url, flush=True); time.sleep(100)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(bundle)],
        cwd=ROOT,
        env=environment() | {MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://")
        assert len(processes_of(mark, MARK)) > 2
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=600)
    assert process.returncode == 143
    assert "Traceback" not in error
    assert processes_of(mark, MARK) == []


@pytest.mark.slow
def test_the_demo_completes_twice_and_leaves_no_process(tmp_path):
    """The second time, the runs are already finished, so no step runs again."""
    out, mark = tmp_path / "demo", uuid.uuid4().hex
    command = [*KWAY, "demo", "--classes", "40", "--epochs", "0.5", "-o", str(out)]
    for time in ("first", "second"):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=850,
            cwd=ROOT,
            env=environment() | {MARK: mark},
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert processes_of(mark, MARK) == []
        assert ("is already complete" in done.stdout) is (time == "second")
        assert done.stdout.count("The true class is ") == 3
        runs = sorted(path.name for path in (out / "runs").iterdir())
        assert runs == ["dense-batch_ce", "dense-ce", "vtree-ce"]
        # A finished run prints no step lines.
        assert ("  loss " in done.stdout) is (time == "first")
        assert (out / "report.html").stat().st_size > 10_000
        with Bundle.open(out / "bundle") as bundle:
            bundle.verify()
