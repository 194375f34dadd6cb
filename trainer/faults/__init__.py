"""Detects and explains faults in a run: hangs and out-of-memory errors."""

from trainer.faults.out_of_memory import advice, is_out_of_memory
from trainer.faults.watchdog import LOST, Watchdog

__all__ = ["LOST", "Watchdog", "advice", "is_out_of_memory"]
