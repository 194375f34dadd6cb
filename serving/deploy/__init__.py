"""How a server is run: Ray Serve with its replicas, and what keeps it on this machine and clean."""
