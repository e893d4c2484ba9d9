"""How much of one text stands word for word in another, in windows of 50 bytes.

Fifty bytes are a line of code or nine words: too long to be equal by chance, short enough that a copy is
found though a word here and there differs. Windows are compared by a polynomial hash modulo 2^64 (Karp and
Rabin, "Efficient randomized pattern-matching algorithms", 1987).
"""

from collections.abc import Iterator

import numpy as np

WINDOW = 50
CHUNK = 1 << 15  # bytes hashed at a time: 0.25 s for the demo's 40 MB; smaller and larger arrays are slower
TABLE_BITS = 26  # 64 MiB, of which 4 MiB of text fill 6 %: few windows are looked up in vain
TABLE_SHIFT = np.uint64(64 - TABLE_BITS)
BASE = 0x9E3779B97F4A7C15  # any odd number, which has an inverse modulo 2^64
UP = np.cumprod(np.full(CHUNK, BASE, np.uint64))  # its powers, which wrap around
DOWN = np.cumprod(np.full(CHUNK, pow(BASE, -1, 2**64), np.uint64))
LETTERS = np.random.Generator(np.random.Philox(key=1)).integers(0, 2**64, 256, np.uint64)


def window_hashes(text: bytes) -> Iterator[np.ndarray]:
    """Hashes of all windows of a text in order, uint64 arrays of at most CHUNK."""
    letters = np.frombuffer(text, np.uint8)
    for start in range(0, len(text) - WINDOW + 1, CHUNK - WINDOW + 1):
        part = letters[start : start + CHUNK]
        sums = np.zeros(len(part) + 1, np.uint64)
        np.cumsum(LETTERS[part] * DOWN[: len(part)], out=sums[1:])
        hashes = sums[WINDOW:] - sums[:-WINDOW]
        yield hashes * UP[: len(hashes)]


def places_in(known: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of the hashes stand in `known`, which is in order, and where each of these first does."""
    places = np.searchsorted(known[:-1], hashes)
    same = known[places] == hashes
    return np.flatnonzero(same), places[same]


class Search:
    """A text whose windows are looked for in others."""

    def __init__(self, text: bytes):
        self.size = len(text)
        self.windows = np.concatenate([np.zeros(0, np.uint64), *window_hashes(text)])
        self.known = np.sort(self.windows)
        self.found = np.zeros(len(self.known), bool)  # of equal windows the first stands for all
        self.table = np.zeros(1 << TABLE_BITS, bool)  # of the first bits of the hashes
        self.table[self.known >> TABLE_SHIFT] = True

    def look_in(self, other: bytes) -> None:
        """Note which windows stand in another text, too."""
        likely = [hashes[self.table[hashes >> TABLE_SHIFT]] for hashes in window_hashes(other)]
        if likely:  # in order, which makes the search three times as fast
            _, places = places_in(self.known, np.sort(np.concatenate(likely)))
            self.found[places] = True

    def covered(self) -> int:
        """Bytes of the text that lie in a window found so far."""
        if not self.found.any():
            return 0
        starts, _ = places_in(self.known[self.found], self.windows)
        depth = np.zeros(self.size + 1, np.int64)
        depth[starts] += 1
        depth[starts + WINDOW] -= 1
        return int(np.count_nonzero(np.cumsum(depth)))
