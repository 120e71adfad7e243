"""Cuts long texts where their parts tokenize to what the whole would."""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Tokenizer

# Small enough that a batch of pieces keeps every core busy.
PIECE_CHARACTERS = 1 << 17
REACH = 512
"""Characters on either side of a place that are looked at."""
_TRIES, _CANDIDATES, _SHIFTS = 8, 4, 4


class TextCutter:
    """Finds places to cut for one tokenizer.

    Before it looks tokens up, a tokenizer splits text at added tokens and by the pattern of its pre-tokenizer. A place
    to cut is where it splits in several windows whose ends differ by a few characters: groups of three digits, say, or
    of four spaces are counted from somewhere, so windows split a long run of them at different places. On either side
    of the place the text must also give the tokens that it gives as part of the window: some tokenizers put a space
    before every text, or trim it.

    Args:
        tokenizer: loaded, set for special tokens as it is used. Its post-processor is removed: it falsifies the places
            of tokens, and adds nothing where special tokens are not added.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.post_processor = None
        self._tokenizer = tokenizer

    def pieces(self, text: str) -> Iterator[str]:
        """Yields a text in pieces of about PIECE_CHARACTERS; a text without places to cut is one piece."""
        begin = 0
        for end in range(PIECE_CHARACTERS, len(text) - REACH, PIECE_CHARACTERS):
            cut = self.last_cut(text, max(begin, end - PIECE_CHARACTERS), end)
            if cut is not None:
                yield text[begin:cut]
                begin = cut
        yield text[begin:]

    def last_cut(self, text: str, begin: int, end: int) -> int | None:
        """Returns a place between two positions, near the later one if there is one; None where none is found.

        Args:
            text: which begins where a document or a piece of it does.
            begin: the first position.
            end: the last one.
        """
        last = min(end, len(text)) - REACH
        step = max(2 * REACH, (last - begin) // _TRIES)
        for middle in range(last, begin, -step):
            cut = self._cut_near(text, middle)
            if cut is not None and cut > begin:
                return cut
        return None

    def _cut_near(self, text: str, middle: int) -> int | None:
        start, stop = max(0, middle - REACH), middle + REACH
        whole = self._ids(text[start:stop])
        places = set(range(middle - REACH // 2, middle + REACH // 2))
        for shift in range(_SHIFTS):
            # A document or a piece always begins at its first character.
            first = start + shift if start else 0
            places &= {first + split for split in self._splits(text[first : stop - shift])}
        for place in sorted(places)[: -_CANDIDATES - 1 : -1]:
            before, after = text[start:place], text[place:stop]
            # An added token may take all white space beside it, and stand beyond the window or across its end.
            known = not after[: REACH // 4].isspace() and not before[-REACH // 4 :].isspace()
            if place and known and self._ids(before) + self._ids(after) == whole:
                return place
        return None

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _splits(self, text: str) -> set[int]:
        """Positions at which the tokenizer splits before it looks tokens up."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        words, offsets = encoding.word_ids, encoding.offsets
        return {
            offsets[token][0]
            for token in range(1, len(words))
            # A character that is normalized to several can be split within.
            if words[token] != words[token - 1] and offsets[token - 1][1] <= offsets[token][0]
        }
