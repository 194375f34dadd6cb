"""Makes calls into torch's store, which can block forever, interruptible by signals.

Python runs signal handlers only in the main thread, between two bytecode instructions, so a main
thread that waits in C++ ignores SIGTERM. Here another thread makes the call, and the main thread
waits in Python. A call to a store whose host was stopped never returns, whatever its timeout.
"""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

Answer = TypeVar("Answer")

_CLOSE_SECONDS = 60  # twice torch's own limit


def interruptible(call: Callable[[], Answer], *, seconds: float | None = None) -> Answer:
    """The result of `call`; raises its errors, and TimeoutError if it takes longer than `seconds`.

    After a TimeoutError, or an exception in a signal handler, the call may still be running in its
    thread. The process should then end with `os._exit` and not use the objects of the call.
    """
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # raised again in the thread that waits
            answer.set_exception(error)

    Thread(target=run, name="rendezvous", daemon=True).start()
    return answer.result(seconds)


class InterruptibleRendezvous(RendezvousHandler):
    """Makes the calls interruptible that the agent makes to `handler` while the ranks train.

    They have no timeout, so training continues if only the launcher on the host was stopped.
    `next_rendezvous` is not wrapped: the agent calls it in a thread, with the work that follows.
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
