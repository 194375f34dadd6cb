"""The limits of the guarded server that the tests in this folder share."""

REPLICAS = 2  # with Ray
TOKEN, OTHER_TOKEN = "a1b2c3d4" * 8, "0f1e2d3c" * 8
MAX_REQUESTS, MAX_INPUTS, MAX_BODY, TIMEOUT = 8, 4, 2**19, 5
BATCH_WAIT = 0.3
# A class that only one test queries. Replicas cache the class weights that they have read.
NEVER_QUERIED = 5
