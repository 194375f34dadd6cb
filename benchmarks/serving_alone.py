"""The applications on uvicorn that `kway serve` is compared with. Arguments: KIND BUNDLE PORT.

`plain` is a FastAPI application with a single route; `application` is kway's without Ray.
"""

import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from tests.serving.in_process import application


class Hello(BaseModel):
    status: str


def plain() -> FastAPI:
    api = FastAPI()

    @api.get("/health")
    async def health() -> Hello:
        return Hello(status="ready")

    return api


if __name__ == "__main__":
    kind, bundle, port = sys.argv[1:]
    api = plain() if kind == "plain" else application(Path(bundle))
    uvicorn.run(api, port=int(port), log_level="error", access_log=False)
