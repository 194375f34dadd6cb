"""What this machine can run, and what to do about what it cannot: `kway doctor`."""

from launch.doctor.check import Finding, Workload, error, ok, warning
from launch.doctor.checks import CHECKS, examine

__all__ = ["CHECKS", "Finding", "Workload", "error", "examine", "ok", "warning"]
