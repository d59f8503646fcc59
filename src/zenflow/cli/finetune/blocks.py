"""Cutting running text into blocks, the rows of a text file."""

import re

_MAX_CHARS = 4000
_MIN_CHARS = 200
_WANTED_BLOCKS = 40
_BREAKS = (re.compile(r"\n\s*\n"), re.compile(r"\n"), re.compile(r"\s"))
"""Where a block may end, best first: between paragraphs, lines, words."""


def cut_text(text: str, target: int | None = None) -> list[str]:
    """Cut text into blocks that end between paragraphs where they can; joined they are the text.

    Blocks are what is held out and shuffled, so a short text is cut into shorter ones.

    Args:
        text: the text.
        target: most characters in a block; None for 200 to 4,000, by the text's length.
    """
    if target is None:
        target = min(max(len(text) // _WANTED_BLOCKS, _MIN_CHARS), _MAX_CHARS)
    blocks = []
    start = 0
    while start < len(text):
        end = _next_end(text, start, target)
        blocks.append(text[start:end])
        start = end
    return blocks


def _next_end(text: str, start: int, target: int) -> int:
    if start + target >= len(text):
        return len(text)
    window = text[start + target // 2 : start + target]
    for pattern in _BREAKS:
        ends = [match.end() for match in pattern.finditer(window)]
        if ends:
            return start + target // 2 + ends[-1]
    return start + target
