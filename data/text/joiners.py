"""Where the joiner U+200D is a letter's: scripts whose letters join or form conjuncts."""

import re
import unicodedata

ZWJ = "\u200d"

# Arabic to Myanmar, Philippine scripts to Vedic extensions, Syloti Nagri to Meetei Mayek, Arabic
# presentation forms, and the Indic scripts and Adlam of the supplementary plane.
_BLOCKS = (
    (0x0600, 0x109F),
    (0x1700, 0x1CFF),
    (0xA800, 0xABFF),
    (0xFB50, 0xFDFF),
    (0xFE70, 0xFEFC),
    (0x10A00, 0x11FFF),
    (0x1E900, 0x1E95F),
)


def _letters() -> str:
    """Ranges for a character class: letters and marks of `_BLOCKS`."""
    codes = [
        code
        for first, last in _BLOCKS
        for code in range(first, last + 1)
        if unicodedata.category(chr(code))[0] in "LM"
    ]
    starts = [code for i, code in enumerate(codes) if i == 0 or codes[i - 1] != code - 1]
    ends = [code for i, code in enumerate(codes) if codes[i + 1 : i + 2] != [code + 1]]
    return "".join(f"{chr(a)}-{chr(b)}" for a, b in zip(starts, ends, strict=True))


_LETTER = _letters()
_AFTER_LETTER = re.compile(f"[{_LETTER}]{ZWJ}*$")
# After a joining letter, or before one, a joiner is the letter's. Elsewhere it is an emoji's.
_STRAY = re.compile(f"(?<![{_LETTER}]){ZWJ}+(?![{_LETTER}{ZWJ}])")
_OF_LETTERS = re.compile(f"(?<=[{_LETTER}]){ZWJ}+|{ZWJ}+(?=[{_LETTER}])")


def follows_a_letter(text: str, position: int) -> bool:
    """Whether what stands before `position` is a joining letter, joiners apart."""
    return _AFTER_LETTER.search(text[max(0, position - 8) : position]) is not None


def without_stray_joiners(text: str) -> str:
    """Without the joiners that no joining letter stands beside."""
    return _STRAY.sub("", text) if ZWJ in text else text


def without_letters_joiners(text: str) -> str:
    """Without the others."""
    return _OF_LETTERS.sub("", text)
