"""Query a running server from Python: `Client("http://127.0.0.1:8000").query(["husky"],
[Path(…)])`.

Does not import torch or Ray. Idempotent requests, which include all queries, are retried if the
server is busy or a replica dies.
"""

from serving.client.client import Client, joined
from serving.client.transport import RejectedError

__all__ = ["Client", "RejectedError", "joined"]
