"""Placement of ranks, exit codes of a run, and launcher timeouts."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from launch.commands.train import num_processes
from launch.options import number_range
from launch.ranks import rendezvous as kway_rendezvous
from launch.ranks.agent import (
    is_retryable,
    kill_reason,
    own_exit_codes,
    run_exit_code,
)
from launch.ranks.placement import (
    Placement,
    contradicting_variables,
    parse_conf,
)
from launch.ranks.stop import SignalException, StopRequest, end_processes
from tests.dispositions import default_signals


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([1, 2], 2),
        ([1, 2, -9], 137),
        ([0, 75, 1], 75),
        ([-10], 75),
        ([130, 1], 130),
    ],
)
def test_a_run_exits_with_the_most_specific_code_of_its_ranks(codes, expected):
    assert run_exit_code(codes) == expected
    assert run_exit_code(reversed(codes)) == expected


def test_ranks_terminated_after_a_failure_are_ignored():
    assert own_exit_codes({0: -15, 1: 1, 2: -15}) == {1: 1}
    assert own_exit_codes({0: -15, 1: -15}) == {0: -15, 1: -15}


def test_only_retryable_exit_codes_are_retried():
    assert [code for code in (0, 1, 2, 75, 130, 137) if is_retryable(code)] == [1, 137]


def test_kill_reason_names_the_rank_and_the_signal():
    assert kill_reason({0: 1, 3: -9}) == "rank 3 was killed by SIGKILL (out of memory?)"
    assert kill_reason({2: -11}) == "rank 2 was killed by SIGSEGV"
    assert kill_reason({0: 1, 1: -signal.SIGTERM, 2: 75}) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_nodes": 2}, "--nnodes is 1:2, .* pass --rdzv-endpoint"),
        ({"min_nodes": 3, "max_nodes": 2}, "--nnodes is 3:2: pass MIN:MAX"),
        ({"min_nodes": 0, "max_nodes": 0}, "--nnodes is 0: pass 1 or more"),
        ({"node_rank": 1}, "--node-rank requires --master-addr"),
        ({"master_addr": "a", "rdzv_endpoint": "a:1"}, "mutually exclusive"),
        ({"master_addr": "a", "max_restarts": 1}, "--master-addr supports neither"),
        ({"master_addr": "a", "max_nodes": 2}, "--master-addr supports neither"),
        ({"master_addr": "a", "node_rank": 1}, "--node-rank is 1: pass 0 to 0"),
    ],
)
def test_an_invalid_placement_is_rejected(given, message):
    with pytest.raises(ValueError, match=message):
        Placement(**given)


def test_a_placement_computes_world_size_and_endpoint():
    assert Placement(4).world_size == "4"
    elastic = Placement(2, min_nodes=1, max_nodes=3, rdzv_endpoint="a:1")
    assert elastic.world_size == "2:6"
    assert elastic.trainer_options == ["--world-size", "2:6", "--launcher", str(os.getpid())]
    assert (elastic.run_id, elastic.endpoint) == ("kway", "a:1")
    assert Placement(1).endpoint == "localhost:0"
    assert Placement(1).run_id != Placement(1).run_id
    assert Placement(1, master_addr="a", master_port=7).endpoint == "a:7"


def test_nnodes_and_rdzv_conf_are_parsed_as_in_torchrun():
    assert [number_range("--nnodes", text) for text in ("2", "1:4")] == [(2, 2), (1, 4)]
    assert parse_conf("is_host=1, join_timeout=60") == {"is_host": "1", "join_timeout": "60"}
    for wrong in ("two", "1:", ":2", ""):
        with pytest.raises(ValueError, match="--nnodes is"):
            number_range("--nnodes", wrong)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("join_timout=60", "join_timout is not a known key: choose one of is_host, join_timeout, "),
        ("join_timeout=soon", "join_timeout is 'soon': pass an integer of at least 1"),
        ("close_timeout=0", "close_timeout is '0': pass an integer"),
        ("is_host", "is_host is '': pass an integer"),
    ],
)
def test_unknown_and_invalid_rdzv_conf_keys_are_rejected(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_conf(given)


def test_a_launcher_reports_that_it_waits_for_other_machines(monkeypatch, capfd):
    monkeypatch.setattr(kway_rendezvous, "_REPORT_AFTER_SECONDS", 0.05)
    two = Placement(min_nodes=2, max_nodes=2, rdzv_endpoint="node1:29400")
    with kway_rendezvous.report_waiting(two):
        pass
    with kway_rendezvous.report_waiting(Placement()):
        time.sleep(0.2)
    assert capfd.readouterr().err == ""
    output, deadline = "", time.monotonic() + 60
    with kway_rendezvous.report_waiting(two):
        while ")" not in output and time.monotonic() < deadline:
            time.sleep(0.2)  # output that is written during a read is lost
            output += capfd.readouterr().err
    assert output.rstrip() == "waiting for 2 machines at node1:29400 (join_timeout 600 s)"


def test_variables_of_torchrun_that_contradict_the_placement_are_found():
    placement = Placement(2, 3, 3, master_addr="a", node_rank=0)
    variables = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "auto", "PET_MASTER_ADDR": "a"}
    assert contradicting_variables(placement, variables) == []
    variables |= {"PET_NNODES": "2", "PET_NODE_RANK": "1"}
    found = contradicting_variables(placement, variables)
    assert found == ["PET_NNODES=2", "PET_NODE_RANK=1"]


def test_nproc_counts_devices_as_torchrun_does():
    assert num_processes("3") == 3
    assert num_processes("cpu") == os.cpu_count()
    num_gpus = torch.cuda.device_count()
    assert num_processes("auto") == (num_gpus or os.cpu_count())
    assert num_processes(None) == max(1, num_gpus)
    if not num_gpus:
        with pytest.raises(ValueError, match="torch finds no GPU"):
            num_processes("gpu")
    with pytest.raises(ValueError, match="--nproc is 0: pass a number"):
        num_processes("0")


def stubborn() -> "subprocess.Popen[str]":
    """Start a process that ignores the first SIGTERM."""
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


def test_a_process_that_ignores_the_signal_is_killed_after_the_timeout():
    process = stubborn()
    assert end_processes([process], signal.SIGTERM, 0.5)
    assert process.returncode == -signal.SIGKILL
    process = stubborn()
    assert not end_processes([process], signal.SIGTERM, 60, repeat=True)
    assert process.returncode == -signal.SIGTERM


@default_signals()
def test_ctrl_c_after_another_signal_makes_a_stop_request_urgent():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        with pytest.raises(SignalException):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not stop.is_urgent
        os.kill(os.getpid(), signal.SIGINT)
        process = stubborn()
        assert stop.is_urgent
        assert end_processes([process], signal.SIGTERM, 60, stop=stop)
        assert process.returncode == -signal.SIGKILL
        assert stop.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is before
