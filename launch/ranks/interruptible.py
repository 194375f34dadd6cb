"""Blocking calls into torch's store that signals can interrupt.

Python runs signal handlers only in the main thread, between two bytecode instructions, so a main
thread that is blocked in C++ does not respond to SIGTERM. Therefore a second thread makes the call
while the main thread waits in Python. If the host of the store is suspended, a call to the store
never returns, regardless of the timeout.
"""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

T = TypeVar("T")

_CLOSE_SECONDS = 60  # twice torch's own timeout


def interruptible(call: Callable[[], T], *, seconds: float | None = None) -> T:
    """Return the result of `call`, or raise its exception.

    Raises TimeoutError if the call takes longer than `seconds`. After a TimeoutError, or an
    exception raised by a signal handler, the call may still be running in its thread. The process
    should then exit with `os._exit` and not touch the objects that the call uses.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # raised again in the waiting thread
            future.set_exception(error)

    # A daemon thread, because a call that never returns must not keep the process alive.
    Thread(target=run, name="rendezvous", daemon=True).start()
    return future.result(seconds)


class InterruptibleRendezvous(RendezvousHandler):
    """A rendezvous handler whose calls to `handler` during training can be interrupted.

    The calls have no timeout, so training continues if only the launcher on the host is suspended.
    `next_rendezvous` is not wrapped, because the agent already calls it in a second thread.
    """

    def __init__(self, handler: RendezvousHandler) -> None:
        self._handler = handler

    def get_backend(self) -> str:
        return self._handler.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return self._handler.use_agent_store

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    def next_rendezvous(self) -> RendezvousInfo:
        return self._handler.next_rendezvous()

    def is_closed(self) -> bool:
        return interruptible(self._handler.is_closed)

    def set_closed(self) -> None:
        interruptible(self._handler.set_closed)

    def num_nodes_waiting(self) -> int:
        return interruptible(self._handler.num_nodes_waiting)

    def shutdown(self) -> bool:
        try:
            return interruptible(self._handler.shutdown, seconds=_CLOSE_SECONDS)
        except TimeoutError:
            return False
