"""What goes wrong in a run and what to say about it: hangs, slow ranks, memory that ran out."""

from trainer.faults.out_of_memory import advice, is_out_of_memory
from trainer.faults.stragglers import Stragglers
from trainer.faults.watchdog import LostRankError, Watchdog

__all__ = ["LostRankError", "Stragglers", "Watchdog", "advice", "is_out_of_memory"]
