"""`kway doctor`: checks what this machine can run, and suggests fixes for what it cannot."""

from launch.doctor.check import Finding, Workload, error, ok, warning
from launch.doctor.checks import CHECKS, examine

__all__ = ["CHECKS", "Finding", "Workload", "error", "examine", "ok", "warning"]
