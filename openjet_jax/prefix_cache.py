"""Prefixes shared between sessions: keys and values by blocks, recurrent state where texts part."""


class PrefixCache:
    """Prefixes of sessions, in host memory, found by isolation key and token ids.

    A lookup under one key never depends on what was stored under another. Entries belong to a
    model and a cache format too, so one cache may serve several models.

    Attributes:
      max_bytes: most bytes it keeps.
      nbytes: bytes it keeps now.
    """

    max_bytes: int
    nbytes: int

    def __init__(self, max_bytes: int = 4 << 30):
        """Starts empty.

        Raises:
          ValueError: `max_bytes` is negative.
        """
        raise NotImplementedError
