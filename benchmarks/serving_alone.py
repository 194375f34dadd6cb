"""Applications on uvicorn with which `kway serve` is compared. Arguments: KIND BUNDLE PORT.

`plain` is FastAPI with a single path; `application` is kway's application without Ray.
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
