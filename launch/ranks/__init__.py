"""The ranks of a run: how they find each other, start, are watched, stopped and restarted."""
