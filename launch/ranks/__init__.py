"""Rendezvous, start, supervision, shutdown and restart of a run's ranks."""
