"""Runs a function on several real ranks: forked processes joined by gloo, each with its own emulated device.

Every run has a deadline; what is left of a run that missed it is killed, so that no process outlives its test.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

__all__ = ["RankFailedError", "errors_of", "run"]


class RankFailedError(AssertionError):
    """A rank raised, died or was late; the message has every traceback."""


def run(function: Callable[..., Any], num_ranks: int = 2, *args: Any, timeout: float = 90.0) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank, in a process group of gloo; the results in rank order.

    Raises:
        RankFailedError: A rank raised, died, or had no result within ``timeout`` seconds.
    """
    outcomes = _outcomes(function, num_ranks, args, timeout)
    failed = [f"rank {rank}: {text}" for rank, (is_ok, text) in enumerate(outcomes) if not is_ok]
    if failed:
        raise RankFailedError("\n".join(failed))
    return [value for _, value in outcomes]


def errors_of(function: Callable[..., Any], num_ranks: int = 2, *args: Any, timeout: float = 90.0) -> list[str]:
    """As :func:`run`, for a function that must fail on every rank: the text of each rank's failure."""
    outcomes = _outcomes(function, num_ranks, args, timeout)
    assert not any(is_ok for is_ok, _ in outcomes), outcomes
    return [str(text) for _, text in outcomes]


def _outcomes(
    function: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], timeout: float
) -> list[tuple[bool, Any]]:
    deadline = time.monotonic() + timeout
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_fork(function, rank, num_ranks, args, Path(folder), timeout) for rank in range(num_ranks)]
        try:
            return [_collected(pid, pipe, deadline, _stack_file(Path(folder), pid)) for pid, pipe in ranks]
        finally:
            for pid, pipe in ranks:
                _end(pid)
                pipe.close()


def _fork(
    function: Callable[..., Any], rank: int, num_ranks: int, args: tuple[Any, ...], folder: Path, timeout: float
) -> tuple[int, Connection]:
    here, there = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        here.close()
        _child(function, rank, num_ranks, args, folder, timeout, there)
    there.close()
    return pid, here


def _child(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
    folder: Path,
    timeout: float,
    pipe: Connection,
) -> NoReturn:
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's alarm is the parent's
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send_bytes(_result(function, rank, num_ranks, args, folder, timeout))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _result(
    function: Callable[..., Any], rank: int, num_ranks: int, args: tuple[Any, ...], folder: Path, timeout: float
) -> bytes:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout * 0.7),
    )
    stacks = _stack_file(folder, os.getpid()).open("w")
    faulthandler.dump_traceback_later(timeout * 0.8, file=stacks)
    try:
        value = function(rank, *args)
        dist.barrier()
        return pickle.dumps((True, value))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _stack_file(folder: Path, pid: int) -> Path:
    return folder / f"stacks-{pid}.txt"


def _collected(pid: int, pipe: Connection, deadline: float, stacks: Path) -> tuple[bool, Any]:
    if not wait([pipe], max(0.0, deadline - time.monotonic())):
        return False, f"no result in time\n{stacks.read_text() if stacks.exists() else ''}"
    try:
        outcome: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())
    except EOFError:
        _, status = os.waitpid(pid, 0)
        return False, f"died with {_words(status)}"
    return outcome


def _words(status: int) -> str:
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {os.WEXITSTATUS(status)}"


def _end(pid: int) -> None:
    """Make sure that a rank is gone: they leave by themselves once they have answered."""
    for _ in range(100):
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
