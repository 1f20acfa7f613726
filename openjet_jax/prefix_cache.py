"""Prefixes shared between sessions: keys and values by blocks, recurrent state where texts part.

Keys and values are kept once for each block of positions, however many prefixes hold it. Recurrent
state is kept where it is likely to be asked for again (Pan et al. 2024, "Marconi"): at the position
where a second text parts from one seen before, which is where system prompts and tools end, and
where a session was published. Adopting a prefix copies its blocks into the session's own cache;
nothing that a session writes is ever seen by another.

Blocks and entries are found by a chain of SHA-256 over token ids that starts at the isolation key,
the model and the cache format: without the key there is nothing to find, and a lookup under one key
takes the same steps whatever was stored under another. Room is shared, so a full cache may drop one
key's prefixes for another's; that tells of activity, never of text.
"""

import dataclasses
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import jax
import numpy as np

from openjet_jax.checkpoint_store import nbytes_of, usefulness
from openjet_jax.state_checkpoints import KVBlock, StateCheckpoint
from pallas_kernels.attention import BLOCK

GRAIN = 64
"""Positions between two links of a chain, so between two positions where texts are seen to part."""

MAX_SEEN = 1 << 18
"""Most links of texts seen that are remembered; 16 million tokens."""


def chain(root: bytes, ids: Sequence[int] | np.ndarray) -> list[bytes]:
    """Returns a digest for each whole grain of the ids: item i stands for the first i grains."""
    array, links = np.asarray(ids, np.int32), [hashlib.sha256(root).digest()]
    for end in range(GRAIN, len(array) + 1, GRAIN):
        links.append(hashlib.sha256(links[-1] + array[end - GRAIN : end].tobytes()).digest())
    return links


@dataclasses.dataclass(eq=False, kw_only=True)
class Prefix:
    """A stored prefix.

    Attributes:
      position: tokens it covers.
      checkpoint: recurrent state there, in host memory.
      blocks: keys and values from position 0 on, the last block perhaps not whole.
      link: of its whole grains.
      rest: tokens behind them.
      used: when it was last stored or used, on the cache's own clock.
    """

    position: int
    checkpoint: StateCheckpoint
    blocks: tuple[KVBlock, ...]
    link: bytes
    rest: tuple[int, ...]
    used: int


class PrefixCache:
    """Prefixes of sessions, in host memory, found by isolation key and token ids.

    A lookup under one key never depends on what was stored under another. Entries belong to a
    model and a cache format too, so one cache may serve several models. Not safe to use from two
    threads at once.

    Attributes:
      max_bytes: most bytes it keeps.
      nbytes: bytes it keeps now; a block that several prefixes hold counts once.
    """

    max_bytes: int
    nbytes: int

    def __init__(self, max_bytes: int = 4 << 30):
        """Starts empty.

        Raises:
          ValueError: `max_bytes` is negative.
        """
        if max_bytes < 0:
            raise ValueError(f"{max_bytes=} must be at least 0")
        self.max_bytes, self.nbytes = max_bytes, 0
        self._holders: Counter[int] = Counter()
        self._entries: dict[bytes, list[Prefix]] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._clock = 0

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def find(self, root: bytes, ids: Sequence[int], limit: int) -> Prefix | None:
        """Returns the longest stored prefix of `ids` of at most `limit` tokens, or None.

        Args:
          root: from `root_of`.
          ids: a text.
          limit: most tokens.
        """
        for grains, link in reversed(list(enumerate(chain(root, ids[:limit])))):
            start = grains * GRAIN
            fitting = [
                prefix
                for prefix in self._entries.get(link, ())
                if prefix.position <= limit
                and prefix.rest == tuple(ids[start : start + len(prefix.rest)])
            ]
            if fitting:
                return max(fitting, key=lambda prefix: prefix.position)
        return None

    def use(self, prefix: Prefix) -> None:
        """Counts a prefix as used."""
        self._clock += 1
        prefix.used = self._clock

    def parting(self, root: bytes, ids: Sequence[int]) -> int:
        """Returns how far this text goes along with one seen before, and remembers it.

        A multiple of `GRAIN`; 0 where it shares nothing.
        """
        links = chain(root, ids)
        known = [i for i, link in enumerate(links) if i and link in self._seen]
        for link in links[1:]:
            self._seen[link] = None
            self._seen.move_to_end(link)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return GRAIN * max(known, default=0)

    def put(
        self,
        root: bytes,
        ids: Sequence[int],
        checkpoint: StateCheckpoint,
        read_block: Callable[[int], KVBlock],
    ) -> None:
        """Keeps a prefix, and drops those worth least until all fit.

        Args:
          root: from `root_of`.
          ids: the prefix's tokens.
          checkpoint: recurrent state behind them.
          read_block: gives the block of an index, in host memory.
        """
        links = chain(root, ids)
        rest = tuple(ids[(len(links) - 1) * GRAIN :])
        self._clock += 1
        for prefix in self._entries.get(links[-1], ()):
            if prefix.rest == rest:
                prefix.used = self._clock
                return
        known, count = self._blocks_along(links), -(-len(ids) // BLOCK)
        blocks = [known[0] if known else read_block(0)]
        if nbytes_of(checkpoint) + count * nbytes_of(blocks[0]) > self.max_bytes:
            return
        blocks += [known[i] if i in known else read_block(i) for i in range(1, count)]
        prefix = Prefix(
            position=len(ids),
            checkpoint=jax.device_get(checkpoint),
            blocks=tuple(blocks),
            link=links[-1],
            rest=rest,
            used=self._clock,
        )
        self._entries.setdefault(prefix.link, []).append(prefix)
        self._count(prefix, 1)
        while self.nbytes > self.max_bytes:
            every = (prefix for entries in self._entries.values() for prefix in entries)
            self._drop(min(every, key=self._worth))

    def _count(self, prefix: Prefix, sign: int) -> None:
        """Adds or takes away what a prefix holds that no other does."""
        self.nbytes += sign * nbytes_of(prefix.checkpoint)
        for block in prefix.blocks:
            before = self._holders[id(block)]
            self._holders[id(block)] = before + sign
            if 0 in (before, before + sign):
                self.nbytes += sign * nbytes_of(block)
            if before + sign == 0:
                del self._holders[id(block)]

    def _blocks_along(self, links: list[bytes]) -> dict[int, KVBlock]:
        """Returns whole blocks by index that prefixes ending along a chain hold."""
        found: dict[int, KVBlock] = {}
        for link in links:
            for prefix in self._entries.get(link, ()):
                found |= dict(enumerate(prefix.blocks[: prefix.position // BLOCK]))
        return found

    def _worth(self, prefix: Prefix) -> float:
        return usefulness(prefix.position, self._clock - prefix.used)

    def _drop(self, prefix: Prefix) -> None:
        self._count(prefix, -1)
        self._entries[prefix.link].remove(prefix)
        if not self._entries[prefix.link]:
            del self._entries[prefix.link]


def root_of(isolation_key: str, model_hash: str, kv_dtype: str) -> bytes:
    """Returns where the chains of a key, a model and a cache format begin."""
    parts = (isolation_key, model_hash, kv_dtype)
    return b"".join(hashlib.sha256(part.encode()).digest() for part in parts)
