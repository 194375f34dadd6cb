"""Re-runs of published experiments. kway does not import this folder, and the wheel excludes it."""
