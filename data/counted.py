"""A number of things in words, as notes and messages say it."""


def counted(number: int, what: str) -> str:
    """`1 shard`, `2,000 shards`."""
    return f"{number:,} {what}{'s' if number != 1 else ''}"
