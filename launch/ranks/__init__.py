"""Starts, supervises, restarts and stops the ranks of a run on this machine."""
