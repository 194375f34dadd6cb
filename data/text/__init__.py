"""Texts: emoji found in them and removed, names and addresses hidden, records read from files."""

from data.text.clean import Cleaning
from data.text.emoji_table import english_name, find_emoji, fold
from data.text.policy import POLICIES, chosen
from data.text.removal import leftovers, remove_emoji

__all__ = [
    "POLICIES",
    "Cleaning",
    "chosen",
    "english_name",
    "find_emoji",
    "fold",
    "leftovers",
    "remove_emoji",
]
