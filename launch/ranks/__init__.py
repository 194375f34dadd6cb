"""The ranks of a run: where they are, how they are started, watched, stopped and started anew."""

from launch.ranks.placement import Placement

__all__ = ["Placement"]
