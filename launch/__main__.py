"""The `kway` command, also available as `python -m launch`."""

import gc

from trainer.process.shadowed import check_packages


def main() -> None:
    """Run `kway`, after checking that its packages are not shadowed by others."""
    check_packages("data", "heads", "serving")
    # The imports of a command create half a million objects. With Python's threshold of 700, its
    # collections would take a fifth of their time.
    gc.set_threshold(10_000)
    from launch.main import main as kway  # imports the packages checked above

    kway()


if __name__ == "__main__":
    main()
