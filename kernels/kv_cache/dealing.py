"""How the chunks of many equal items are dealt to CTAs and threads; integers alone."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dealing:
    """A CTA has ``threads * per_thread`` chunks of one item, neighbours on neighbouring lanes."""

    threads: int
    per_thread: int  # asked for at once

    def ctas(self, chunks):
        """Return how many CTAs share an item."""
        each = self.threads * self.per_thread
        return (chunks + (each - 1)) // each

    def chunks(self, part, tid):
        """Return the chunks of a thread in the ``part``-th CTA of an item; some past its end."""
        first = part * (self.threads * self.per_thread) + tid
        return [first + i * self.threads for i in range(self.per_thread)]


def dealing(family: str, kv_dtype: str) -> Dealing:
    """Measured on an H200, cold, 8 KV heads of 128.

    Two chunks a thread: copies of 256 pages 72 us, 74 with one, 73 with four; gathering 32 x 1,024
    tokens 70 us, 73, 71. What quantises is longer, and has twice the loads to each store: one
    token for one sequence 1.52 us with one chunk, 1.66 with two.
    """
    if kv_dtype == "e4m3" or family == "kv_append_lengths":
        return Dealing(128, 1)
    return Dealing(128, 2)
