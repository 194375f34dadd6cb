"""`python -m launch`: the `kway` command without its script."""

from launch.main import main

main()
