"""The HTTP API of a replica: routes, request bodies and error responses."""
