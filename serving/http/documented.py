"""What the OpenAPI document says of all operations alike: their groups, and a line for each."""

from typing import Any

from fastapi import FastAPI

# In the order that /docs shows them in.
TAGS = [
    {"name": "Query", "description": "Is this picture, or text, of class C?"},
    {"name": "Classes", "description": "What can be asked for."},
    {"name": "Watches", "description": "Questions that stand, and feeds of frames that they see."},
    {"name": "Galleries", "description": "Collections that were indexed, searched for any class."},
    {"name": "Open Inference Protocol", "description": "The same questions, asked in tensors."},
    {"name": "Server", "description": "What is served, and how it is doing."},
]


def document_summaries(api: FastAPI) -> None:
    """Make the first paragraph of each operation's docstring its summary, not its name in code."""
    plain = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            for methods in plain()["paths"].values():
                for operation in methods.values():
                    summary, _, rest = operation.pop("description", operation["summary"]).partition(
                        "\n\n"
                    )
                    operation["summary"] = " ".join(summary.split()).removesuffix(".")
                    if rest:
                        operation["description"] = rest
        assert api.openapi_schema is not None
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]
