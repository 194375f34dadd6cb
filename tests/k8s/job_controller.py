"""Emulates the Job controller of Kubernetes: starts pods, and handles their success and failure.

Follows https://kubernetes.io/docs/concepts/workloads/controllers/job/ for restartPolicy Never. Not
emulated: suspend, deadlines, success policies.
"""

import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.k8s.cluster import Cluster
from tests.k8s.pods import Pod

_FIELDS = {
    "backoffLimit",
    "backoffLimitPerIndex",
    "completionMode",
    "completions",
    "maxFailedIndexes",
    "parallelism",
    "podFailurePolicy",
    "podReplacementPolicy",
    "template",
}
_LONGEST_DELAY_SECONDS = 360


@dataclass
class Job:
    """A Job. `step` advances it. At the end, `condition` is Complete or Failed.

    `first_delay_seconds` is the backoff after the first failure. It doubles with each further
    failure.
    """

    cluster: Cluster
    manifest: Mapping[str, Any]
    first_delay_seconds: float = 10
    condition: str = ""
    reason: str = ""
    # All pods of each index, in the order in which they were started.
    pods: dict[int, list[Pod]] = field(default_factory=dict)
    # (name, action of the policy) of each failed pod.
    verdicts: list[tuple[str, str]] = field(default_factory=list)
    failures: Counter[int] = field(default_factory=Counter)
    _judged: set[str] = field(default_factory=set)
    _failed: set[int] = field(default_factory=set)
    _consecutive_failures: int = 0
    _last_failure: float = -math.inf

    def __post_init__(self) -> None:
        assert not (unknown := self.spec.keys() - _FIELDS), f"not emulated: {unknown}"
        policy = self.spec["template"]["spec"].get("restartPolicy")
        if policy != "Never":
            raise ValueError(f"restartPolicy {policy} is not emulated: use Never")

    # ------------------------------------------------------------------ the manifest
    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def spec(self) -> Mapping[str, Any]:
        spec = self.manifest["spec"]
        assert isinstance(spec, Mapping)
        return spec

    @property
    def _indexed(self) -> bool:
        return bool(self.spec.get("completionMode") == "Indexed")

    @property
    def _replaces_while_terminating(self) -> bool:
        default = "Failed" if "podFailurePolicy" in self.spec else "TerminatingOrFailed"
        return bool(self.spec.get("podReplacementPolicy", default) == "TerminatingOrFailed")

    # ------------------------------------------------------------------ the loop
    def step(self) -> None:
        """Handle the pods that have exited, then start missing pods."""
        everything = [pod for several in self.pods.values() for pod in several]
        for index, several in list(self.pods.items()):
            for pod in several:
                if pod.look() is not None and pod.name not in self._judged:
                    self._judged.add(pod.name)
                    self._judge(index, pod)
        if self.condition:
            for pod in everything:
                pod.delete()
            return
        self._start_missing()

    def until(self, holds: Callable[[], bool], what: str, *, seconds: float) -> None:
        """Run the Job until `holds` returns True.

        Raises AssertionError with all logs if the Job ends first or `seconds` pass.
        """
        deadline = time.monotonic() + seconds
        while not holds():
            late = time.monotonic() > deadline
            assert not late, f"no {what} in {seconds} s: {self}\n{self.cluster.logs}"
            assert not self._over, f"ended before {what}: {self}\n{self.cluster.logs}"
            self.step()
            time.sleep(0.05)

    def run_to_end(self, *, seconds: float = 600) -> None:
        """Run the Job until it has a condition and none of its pods are running."""
        deadline = time.monotonic() + seconds
        while not self._over:
            late = time.monotonic() > deadline
            assert not late, f"not ended after {seconds} s: {self}\n{self.cluster.logs}"
            self.step()
            time.sleep(0.05)

    @property
    def _over(self) -> bool:
        running = any(pod.exit_code is None for several in self.pods.values() for pod in several)
        return bool(self.condition) and not running

    def __str__(self) -> str:
        state = " ".join(word for word in (self.condition, self.reason) if word) or "active"
        return f"Job {self.name} {state}, {sum(self.failures.values())} failures, {self.verdicts}"

    # ------------------------------------------------------------------ pods that have exited
    def _judge(self, index: int, pod: Pod) -> None:
        if self.condition:
            return
        if pod.exit_code == 0:
            self._consecutive_failures = 0
            self._decide()
            return
        action = _action(self.spec.get("podFailurePolicy", {}), pod)
        self.verdicts.append((pod.name, action))
        if action == "FailJob":
            self._end("Failed", "PodFailurePolicy")
        elif action == "FailIndex":
            self._failed.add(index)
        elif action == "Count":
            self._count(index)
        self._decide()

    def _count(self, index: int) -> None:
        self.failures[index] += 1
        self._consecutive_failures += 1
        self._last_failure = time.monotonic()
        per_index = self.spec.get("backoffLimitPerIndex")
        limit = self.spec.get("backoffLimit", 6 if per_index is None else math.inf)
        if self.failures.total() > limit:
            self._end("Failed", "BackoffLimitExceeded")
        elif per_index is not None and self.failures[index] > per_index:
            self._failed.add(index)

    def _decide(self) -> None:
        indexes = set(range(self.spec.get("completions", 1)))
        done = {i for i in indexes if any(pod.exit_code == 0 for pod in self.pods.get(i, ()))}
        if self.condition:
            return
        if len(self._failed) > self.spec.get("maxFailedIndexes", math.inf):
            self._end("Failed", "MaxFailedIndexesExceeded")
        elif indexes == done:
            self._end("Complete")
        elif indexes == done | self._failed:
            self._end("Failed", "FailedIndexes")

    def _end(self, condition: str, reason: str = "") -> None:
        self.condition, self.reason = condition, reason

    # ------------------------------------------------------------------ pods that are missing
    def _start_missing(self) -> None:
        active = sum(pod.exit_code is None for several in self.pods.values() for pod in several)
        delay = self.first_delay_seconds * 2 ** max(0, self._consecutive_failures - 1)
        if time.monotonic() < self._last_failure + min(delay, _LONGEST_DELAY_SECONDS):
            return
        for index in range(self.spec.get("completions", 1)):
            several = self.pods.setdefault(index, [])
            if active < self.spec.get("parallelism", 1) and self._missing(index, several):
                several.append(self._start(index))
                active += 1

    def _missing(self, index: int, several: list[Pod]) -> bool:
        def blocks(pod: Pod) -> bool:
            if pod.exit_code is None:
                return not (pod.terminating and self._replaces_while_terminating)
            return pod.exit_code == 0

        return index not in self._failed and not any(map(blocks, several))

    def _start(self, index: int) -> Pod:
        mark, template = uuid.uuid4().hex[:5], self.spec["template"]
        if not self._indexed:
            return self.cluster.start(f"{self.name}-{mark}", template)
        return self.cluster.start(
            f"{self.name}-{index}-{mark}",
            template,
            host_name=f"{self.name}-{index}",
            annotations={"batch.kubernetes.io/job-completion-index": str(index)},
            variables={"JOB_COMPLETION_INDEX": str(index)},
        )


def _action(policy: Mapping[str, Any], pod: Pod) -> str:
    """Return the action of the first rule that matches a failed pod, or Count."""
    for rule in policy.get("rules", ()):
        if "onExitCodes" in rule:
            about = rule["onExitCodes"]
            if about.get("containerName", pod.container["name"]) != pod.container["name"]:
                continue
            if (pod.exit_code in about["values"]) == (about["operator"] == "In"):
                return str(rule["action"])
        elif any(_holds(condition, pod) for condition in rule["onPodConditions"]):
            return str(rule["action"])
    return "Count"


def _holds(condition: Mapping[str, str], pod: Pod) -> bool:
    disrupted = condition["type"] == "DisruptionTarget" and pod.disrupted
    return disrupted == (condition.get("status", "True") == "True")
