"""Reports a file or folder that shadows one of kway's packages, before the package is imported.

`python -m` puts the current folder first on `sys.path`, and `data` is a common folder name. This
module is imported first and uses only the standard library.
"""

import importlib.util
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_BAD_INPUT = 2


def check_packages(*names: str) -> None:
    """Exit with code 2 and a one-line error if importing one of kway's packages would import
    another package of the same name.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        found = Path(spec.origin or next(iter(spec.submodule_search_locations or [name])))
        if not found.resolve().is_relative_to(_ROOT / name):
            print(
                f"error: {found} shadows kway's package {name}: rename it or start Python with "
                "PYTHONSAFEPATH=1",
                file=sys.stderr,
            )
            sys.exit(_BAD_INPUT)
