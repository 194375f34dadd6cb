"""`kway doctor`: checks whether this machine can run training, and suggests fixes."""

from launch.doctor.check import Finding, Workload, error, ok, warning
from launch.doctor.checks import CHECKS, examine

__all__ = ["CHECKS", "Finding", "Workload", "error", "examine", "ok", "warning"]
