"""Generates `emoji_groups.tsv` from Unicode's emoji-test.txt (in the Debian package
`unicode-data`).

    python -m data.text.emoji_test /usr/share/unicode/emoji/emoji-test.txt

Run this module when a new version of the `emoji` library adds emoji that are missing from the
table.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

import emoji

from data.text.emoji_table import TABLE, fold

_HEAD = """\
# Groups, subgroups and emoji of Unicode's emoji-test.txt, version {version}, without skin tones.
# Copyright © 2026 Unicode, Inc. License: Unicode-3.0, see LICENSE-UNICODE in this folder.
# Converted by python -m data.text.emoji_test without changes to the content.
"""
_HEADING = re.compile(r"# (Version|group|subgroup): (.+)")
_EMOJI = re.compile(r"([0-9A-F ]+?) *; fully-qualified ")


def group_table(emoji_test: str) -> str:
    """Return the table: one line per subgroup with group, subgroup and folded emoji.

    Raises ValueError if the text is not the content of an emoji-test.txt file.
    """
    current = {"Version": "", "group": "", "subgroup": ""}
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for line in emoji_test.splitlines():
        if match := _HEADING.fullmatch(line.strip()):
            current[match[1]] = match[2]
        elif match := _EMOJI.match(line):
            one = "".join(chr(int(code, 16)) for code in match[1].split())
            if not emoji.is_emoji(one) or fold(one) == one:
                found[current["group"], current["subgroup"]].append(one)
    if not current["Version"] or not found or not all(map(all, found)):
        raise ValueError("the file is not Unicode's emoji-test.txt: pass that file")
    rows = ["\t".join((*names, " ".join(those))) for names, those in found.items()]
    return _HEAD.format(version=current["Version"]) + "".join(f"{row}\n" for row in rows)


if __name__ == "__main__":
    TABLE.write_text(group_table(Path(sys.argv[1]).read_text(encoding="utf-8")), encoding="utf-8")
