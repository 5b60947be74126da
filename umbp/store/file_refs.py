"""References to pages in files of this machine: all that is needed to read and verify them, for whoever has the descriptors.

A reference says: `pages.size` bytes at block `pages.block` of the file behind a descriptor, whose check (`umbp.store.ssd_format`) is
`pages.checks`. Offsets are multiples of 4096 bytes, and with ``direct`` the descriptor goes past the page cache; so the same reference
serves a `preadv` into host memory (`read_run` of `umbp.store.ssd_reads`) and a device's own file interface (hipFile, cuFile), which takes
descriptor, offset, length and an address in device memory. Whoever reads must verify what came, by the check of the whole page, or in
parts by the sums in the record's head, which lies ``back`` blocks before the body in the file of this ``number``; and must ask
whoever gave the reference, when it has read, whether it held all the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from umbp.store.ssd_reads import Pages
from umbp.types import I64, U64


@dataclass(frozen=True, slots=True, eq=False)
class FileRefs:
    """References to m pages of one size. ``pages.files`` (m,) are indices of ``fds``; ``until``: on the clock of `time.monotonic`."""

    pages: Pages
    back: I64
    fds: tuple[int, ...]
    direct: tuple[bool, ...]
    numbers: U64
    until: float

    def only(self, which: I64) -> FileRefs:
        """Those of them, in the same files."""
        return FileRefs(self.pages.only(which), self.back[which], self.fds, self.direct, self.numbers, self.until)
