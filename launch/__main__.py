"""The `kway` command, also as `python -m launch`."""

from trainer.process.shadowed import check_packages


def main() -> None:
    """Run `kway` with the packages that belong to it."""
    check_packages("data", "heads", "serving")
    from launch.main import main as kway  # imports them

    kway()


if __name__ == "__main__":
    main()
