"""Which of a text's emoji is its label, where there are several."""

from collections import Counter
from collections.abc import Callable, Sequence

POLICIES: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "first": lambda found: list(found[:1]),
    "each": lambda found: list(dict.fromkeys(found)),
    # One kind of emoji, however often it is repeated.
    "only-if-single": lambda found: list(found[:1]) if len(set(found)) == 1 else [],
    # Of equally frequent ones the first that stands in the text: a Counter keeps their order.
    "most-frequent": lambda found: [one for one, _ in Counter(found).most_common(1)],
}


def chosen(policy: str, found: Sequence[str]) -> list[str]:
    """Labels of a text whose emoji are `found`, in order; empty where the policy takes none."""
    return POLICIES[policy](found)
