"""Sets a container's environment variables and expands them in its command, as the kubelet does."""

import re
from collections.abc import Mapping
from typing import Any

_REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Expand `$(NAME)` if the variable is defined, and `$$` to `$`."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return _REFERENCE.sub(value, text)


def environment(
    container: Mapping[str, Any], given: Mapping[str, str], fields: Mapping[str, str]
) -> dict[str, str]:
    """Return `given` and the container's `env`, with field references resolved.

    `fields` maps field paths to their values for the pod. Raises ValueError for a source that is
    not emulated, and KeyError for an unknown field.
    """
    if "envFrom" in container:
        raise ValueError(f"container {container['name']}: envFrom is not emulated")
    variables = dict(given)
    for variable in container.get("env", ()):
        match variable:
            case {"valueFrom": {"fieldRef": {"fieldPath": path}}}:
                variables[variable["name"]] = fields[path]
            case {"valueFrom": source}:
                raise ValueError(f"{variable['name']}: {list(source)} is not emulated")
            case _:
                variables[variable["name"]] = expanded(variable.get("value", ""), variables)
    return variables


def command(container: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
    words = [*container["command"], *container.get("args", ())]
    return [expanded(word, variables) for word in words]
