"""Reports progress in the status of a Kubeflow TrainJob, if the run was launched as one.

If the feature gate TrainJobStatus is enabled, Kubeflow Trainer sets three environment variables: a
URL and the paths of a CA certificate and a token, both of which it rotates. The controller accepts
`{"trainerStatus": {…}}` at the URL and shows the status in `kubectl get trainjob`.
"""

import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

_ADDRESS = "KUBEFLOW_TRAINER_SERVER_URL"
_AUTHORITY = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
# Kubeflow requires clients to respect this interval, because each report changes an object in the
# cluster.
_INTERVAL_SECONDS = 5.0
_TIMEOUT_SECONDS = 5.0
_MAX_METRICS = 20  # an evaluation may have hundreds of metrics
_MAX_REASON_CHARACTERS = 300


class TrainJobStatus:
    """Sends the newest report from a separate thread, and the final report at the end.

    Training never waits for a report and never fails because of one. An error is logged once, and
    is logged again only after a report has succeeded.
    """

    def __init__(
        self,
        url: str,
        authority: Path,
        token: Path,
        print_line: Callable[[str], None],
        *,
        interval_seconds: float = _INTERVAL_SECONDS,
    ) -> None:
        self._url, self._authority, self._token = url, authority, token
        self._print_line, self._interval_seconds = print_line, interval_seconds
        self._newest: dict[str, Any] | None = None
        self._changed, self._closed = threading.Event(), threading.Event()
        self._last_succeeded = True
        self._thread = threading.Thread(target=self._run, name="trainjob status", daemon=True)
        self._thread.start()

    @classmethod
    def of_environment(cls, print_line: Callable[[str], None]) -> "TrainJobStatus | None":
        """Return the status of this TrainJob, or None outside a TrainJob or if a variable is
        missing.
        """
        found = [os.environ.get(name) for name in (_ADDRESS, _AUTHORITY, _TOKEN)]
        if found[0] is None:
            return None
        if None in found:
            print_line(
                f"TrainJob progress is not reported: {_ADDRESS} is set, but {_AUTHORITY} or "
                f"{_TOKEN} is not"
            )
            return None
        url, authority, token = map(str, found)
        return cls(url, Path(authority), Path(token), print_line)

    def report(
        self,
        *,
        step: int,
        num_steps: int,
        remaining_seconds: float,
        metrics: Mapping[str, float],
    ) -> None:
        """Report progress after `step` of `num_steps`. Non-finite numbers are omitted."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        status: dict[str, Any] = {
            "progressPercentage": 100 * step // num_steps,
            "metrics": [
                {"name": name, "value": f"{value:.6g}"}
                for name, value in list(finite.items())[:_MAX_METRICS]
            ],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if math.isfinite(remaining_seconds):
            status["estimatedRemainingSeconds"] = max(0, round(remaining_seconds))
        self._newest = status
        self._changed.set()

    def close(self) -> None:
        """Send the last report if it has not been sent yet. Waits at most twice the request
        timeout.
        """
        self._closed.set()
        self._changed.set()
        self._thread.join(2 * _TIMEOUT_SECONDS)

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            status, self._newest = self._newest, None
            if status is not None:
                self._send(status)
            if self._closed.is_set() and self._newest is None:
                return
            self._closed.wait(self._interval_seconds)

    def _send(self, status: dict[str, Any]) -> None:
        start = time.monotonic()
        try:
            token = self._token.read_text(encoding="utf-8").strip()
            # Read the certificate and the token every time, because the controller rotates both.
            context = ssl.create_default_context(cafile=self._authority)
            response = httpx.post(
                self._url,
                json={"trainerStatus": status},
                headers={"Authorization": f"Bearer {token}"},
                verify=context,
                timeout=_TIMEOUT_SECONDS,
                trust_env=False,  # the server is in the same cluster, not behind a proxy
            )
            response.raise_for_status()
        # ValueError means that the token is not a valid header value or the URL is not valid.
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
            if self._last_succeeded:
                seconds = time.monotonic() - start
                reason = (
                    str(error).replace("\n", " ")[:_MAX_REASON_CHARACTERS] or type(error).__name__
                )
                self._print_line(
                    f"TrainJob progress could not be reported after {seconds:.1f} s: {reason}"
                )
            self._last_succeeded = False
        else:
            self._last_succeeded = True
