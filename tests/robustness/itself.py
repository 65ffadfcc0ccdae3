"""A campaign in which everything goes wrong, to see that the harness sees it."""

import ctypes
import os
import time
import weakref

from tests.robustness.harness import Wrong, refusal

__all__ = ["SECONDS", "Campaign"]

SECONDS = 1.0
"""After which a case counts as hung."""


class Campaign:
    """Cases 0 to 10 go wrong, each in its own way; 11 to 13 do not."""

    def __init__(self, place):
        self.place = place

    def case(self, rng, number):
        """Go wrong."""
        self.label = f"number {rng.random()}"
        if number == 0:
            os._exit(0)
        if number == 1:
            ctypes.string_at(0)
        if number == 2:
            time.sleep(600)
        if number == 3:
            raise Wrong("another answer")
        if number == 4:
            raise KeyError("not a kind that is allowed")
        if number == 5:
            return refusal(ValueError(""), ValueError)
        if number == 6:
            return refusal(KeyError("x"), ValueError)
        if number == 7:
            return refusal(ValueError("two\nlines"), ValueError, lines=1)
        if number == 8:
            (self.place.folder / ".." / ".." / "outside" / "escaped").write_text("x")
        if number == 9:
            (self.place.folder / "link").unlink(missing_ok=True)
            (self.place.folder / "link").symlink_to(self.place.outside)
            (self.place.folder / "link" / "folder").mkdir()
        while number == 10:
            pass
        if number == 11:
            (self.place.folder / "inside").write_text("x")
            return refusal(ValueError("it says why"), ValueError, lines=1)
        if number == 12:

            def cycle():
                return cycle

            self.garbage = weakref.ref(cycle)
            begin = time.process_time()
            while time.process_time() - begin < 0.6 * SECONDS:
                time.sleep(0.003)  # as on a machine that is busy with other work
                sum(range(100_000))
        if number == 13 and self.garbage() is not None:
            raise Wrong("what the last case has left is still there")
        return "right"
