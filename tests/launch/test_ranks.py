"""Where ranks are placed, which exit code counts, and how long a launcher is patient."""

import os
import signal
import subprocess
import sys

import pytest

from launch.ranks.codes import code_that_counts, is_mended_by_another_try, reason
from launch.ranks.ending import end
from launch.ranks.placement import Placement, parse_conf, parse_nodes
from launch.ranks.stop import SignalException, StopRequest
from tests.system.processes import kway


@pytest.mark.parametrize(
    ("codes", "counts"),
    [
        ([0, 0], 0),
        ([1, 0], 1),
        ([1, 2], 2),
        ([1, 2, -9], 137),
        ([1, -11], 139),
        ([0, 75, 1], 75),
        ([75, -15], 75),
        ([-10], 75),
        ([130, 1], 130),
        ([1, 7], 7),
    ],
)
def test_the_code_that_tells_most_counts(codes, counts):
    assert code_that_counts(codes) == counts
    assert code_that_counts(reversed(codes)) == counts


def test_only_what_another_try_may_mend_is_tried_again():
    assert [code for code in (0, 1, 2, 75, 130, 137) if is_mended_by_another_try(code)] == [1, 137]


def test_a_rank_that_could_not_speak_is_named():
    assert reason({0: 1, 3: -9}) == "rank 3 was ended by SIGKILL: out of memory?"
    assert reason({2: -11}) == "rank 2 was ended by SIGSEGV"
    assert reason({0: 1, 1: -signal.SIGTERM, 2: 75}) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_nodes": 2}, "--nnodes is 2 and no machine is named for them to meet at"),
        ({"min_nodes": 3, "max_nodes": 2}, "--nnodes is 3:2: give 1 <= MIN <= MAX"),
        ({"node_rank": 1}, "--node-rank goes with --master-addr"),
        ({"master_addr": "a", "rdzv_endpoint": "a:1"}, "two ways to meet: give one"),
        ({"master_addr": "a", "max_restarts": 1}, "--master-addr fixes every rank once"),
        ({"master_addr": "a", "max_nodes": 2}, "--master-addr fixes every rank once"),
        ({"master_addr": "a", "node_rank": 1}, "--node-rank is 1: give 0 to 0"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Placement(**given)


def test_a_placement_says_how_many_ranks_there_have_to_be():
    assert Placement(4).world_size == "4"
    elastic = Placement(2, min_nodes=1, max_nodes=3, rdzv_endpoint="a:1")
    assert elastic.world_size == "2:6"
    assert elastic.trainer_options == ["--world-size", "2:6", "--launcher", str(os.getpid())]
    assert (elastic.run_id, elastic.endpoint) == ("kway", "a:1")
    assert Placement(1).endpoint == "localhost:0"
    assert Placement(1).run_id != Placement(1).run_id
    assert Placement(1, master_addr="a", master_port=7).endpoint == "a:7"


def test_machines_and_settings_are_read_as_torchrun_reads_them():
    assert [parse_nodes(text) for text in ("2", "1:4")] == [(2, 2), (1, 4)]
    assert parse_conf("is_host=1, join_timeout=60") == {"is_host": "1", "join_timeout": "60"}
    for wrong in ("two", "1:", ":2", ""):
        with pytest.raises(ValueError, match="--nnodes is"):
            parse_nodes(wrong)
    with pytest.raises(ValueError, match="--rdzv-conf is is_host: give key=value"):
        parse_conf("is_host")


def test_options_that_do_not_go_together_end_with_one_line_and_code_2(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "run: here\ndata: {shards: there}\nbackbone: {config: {model_type: resnet}}\n"
    )
    answer = kway("train", recipe, "--nnodes", "2", "--nproc", "1")
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: --nnodes is 2 and no machine is named")
    assert answer.stderr.count("\n") == 1


def stubborn() -> "subprocess.Popen[str]":
    """A process that only counts its first signal to end."""
    code = (
        "import signal, time\n"
        "note = lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "signal.signal(signal.SIGTERM, note); print('ready', flush=True)\n"
        "while True: time.sleep(0.01)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    return process


def test_what_does_not_end_when_asked_is_killed_after_its_time():
    process = stubborn()
    assert end([process], signal.SIGTERM, 0.5)
    assert process.returncode == -signal.SIGKILL
    process = stubborn()
    assert not end([process], signal.SIGTERM, 60, again=True)
    assert process.returncode == -signal.SIGTERM


def test_the_first_signal_is_obeyed_and_a_later_ctrl_c_is_haste():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        with pytest.raises(SignalException):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not stop.in_a_hurry
        os.kill(os.getpid(), signal.SIGINT)
        process = stubborn()
        assert stop.in_a_hurry
        assert end([process], signal.SIGTERM, 60, stop=stop)
        assert process.returncode == -signal.SIGKILL
        assert stop.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is before
