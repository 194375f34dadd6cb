"""Finds errors in manifests that schema validation misses. Does not repeat that validation."""

from collections.abc import Sequence

from launch.kubernetes.job_rules import GROUP_RULES, JOB_RULES
from launch.kubernetes.objects import Manifest, jobs, pods
from launch.kubernetes.pod_rules import POD_RULES
from launch.kubernetes.ray_rules import RAY_RULES
from launch.kubernetes.reference_rules import REFERENCE_RULES
from launch.kubernetes.server_rules import SERVER_RULES

# Rules that check all manifests together.
RULES = (*REFERENCE_RULES, *GROUP_RULES, *RAY_RULES, *SERVER_RULES)


def problems(manifests: Sequence[Manifest]) -> list[str]:
    """Return one line for each problem, including the object's name, in the order of the rules.

    Raises ValueError for an invalid resource quantity.
    """
    found = [
        f"{pod.where}: {line}" for pod in pods(manifests) for r in POD_RULES for line in r(pod)
    ]
    found += [
        f"{job.where}: {line}" for job in jobs(manifests) for r in JOB_RULES for line in r(job)
    ]
    found += [line for rule in RULES for line in rule(manifests)]
    return found
