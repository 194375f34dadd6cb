"""The `kway` command, also available as `python -m launch`."""

from trainer.process.shadowed import check_packages


def main() -> None:
    """Run `kway`, after checking that its packages are not shadowed by others."""
    check_packages("data", "heads", "serving")
    from launch.main import main as kway  # imports the packages checked above

    kway()


if __name__ == "__main__":
    main()
