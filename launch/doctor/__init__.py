"""What this machine can run, and what to do about what it cannot: `kway doctor`."""

from launch.doctor.checks import CHECKS, examine
from launch.doctor.finding import Finding, error, ok, warning
from launch.doctor.plans import Plans

__all__ = ["CHECKS", "Finding", "Plans", "error", "examine", "ok", "warning"]
