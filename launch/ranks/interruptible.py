"""Makes blocking calls into torch's store interruptible by signals.

Python runs signal handlers only in the main thread, between two bytecode instructions, so a main
thread that blocks in C++ ignores SIGTERM. Here a second thread makes the call while the main thread
waits in Python. If the host of the store was suspended, a call to it never returns, whatever its
timeout.
"""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

Answer = TypeVar("Answer")

_CLOSE_SECONDS = 60  # twice torch's own timeout


def interruptible(call: Callable[[], Answer], *, seconds: float | None = None) -> Answer:
    """Return the result of `call`, or raise its exception.

    Raises TimeoutError if the call takes longer than `seconds`. After a TimeoutError, or an
    exception raised by a signal handler, the call may still be running in its thread. The process
    should then exit with `os._exit` and not touch the objects that the call uses.
    """
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # raised again in the waiting thread
            answer.set_exception(error)

    # A daemon thread, because a call that never returns must not keep the process alive.
    Thread(target=run, name="rendezvous", daemon=True).start()
    return answer.result(seconds)


class InterruptibleRendezvous(RendezvousHandler):
    """Makes the calls interruptible that the agent makes to `handler` while the ranks train.

    They have no timeout, so training continues if only the launcher on the host is suspended.
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
