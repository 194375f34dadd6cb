"""The private name of Ray that `data` uses still exists and works."""

import os
import subprocess
import sys

import pytest

# Other modules import Ray first, as `launch/ranks/on_ray.py` does.
CODE = """
import ray
from data.ray_pool import ray_cluster
from ray._private import ray_constants

try:
    with ray_cluster("127.0.0.1:9"):
        pass
except ValueError:
    print(ray_constants.NUM_REDIS_GET_RETRIES)
"""


@pytest.mark.parametrize(("variable", "expected"), [("", 2), ("7", 7)])
def test_ray_tries_twice_to_connect_even_if_it_was_imported_before(
    variable: str, expected: int
) -> None:
    name = "RAY_NUM_REDIS_GET_RETRIES"
    environment = {key: value for key, value in os.environ.items() if key != name}
    if variable:
        environment[name] = variable
    command = [sys.executable, "-c", CODE]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.stdout == f"{expected}\n", ran.stderr
