"""Update lists of block keys where cells are not positions: the general form of `pooled_keys`.

A cache whose cells are recycled, shared between sequences or shuffled cannot tell from a length
which block keys are valid. Each block then has a descriptor of what its key was made from, and a
rollback keeps the leading descriptors that the surviving cells still bear out. The engine's caches
are contiguous and need none of this; it is here, in NumPy, as the method states it, and tests hold
the contiguous form against it.

Method: "Over 107tok/s Qwen3.8-Flash-Next on M3 Ultra" (2026), Algorithms 1, 2 and 3.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

PADDED_TOKENS = 16
"""Most tokens of a forward whose update list is padded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Descriptor:
    """What a block's key was made from, and where it is stored.

    Attributes:
      stream: of the index cache.
      start: position of the block's first token.
      cells: the block's cells, in order of position.
      key_cell: the one of them that its key is stored with.
      positions: the four components of the position that its key is rotated to.
    """

    stream: int
    start: int
    cells: tuple[int, ...]
    key_cell: int
    positions: tuple[int, int, int, int]

    def destination(self, cache_size: int) -> int:
        """Returns the row of the pooled keys that it is stored in."""
        return self.stream * cache_size + self.key_cell


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cells:
    """What the cache says of its cells after a removal.

    Attributes:
      live: whether a cell holds a token.
      positions: of that token.
      owners: the sequences that it belongs to.
    """

    live: np.ndarray
    positions: np.ndarray
    owners: Sequence[frozenset[int]]


def is_valid(block: Descriptor, ratio: int, length: int, cells: Cells, sequence: int = 0) -> bool:
    """Returns whether a block's key still holds once positions from `length` on are removed."""
    return (
        len(block.cells) == ratio
        and block.stream == 0
        and block.start >= 0
        and block.start + ratio <= length
        and block.key_cell in block.cells
        and all(position == block.start for position in block.positions)
        and all(
            0 <= cell < len(cells.live)
            and bool(cells.live[cell])
            and cells.owners[cell] == frozenset({sequence})
            and int(cells.positions[cell]) == block.start + i
            for i, cell in enumerate(block.cells)
        )
    )


def retained_prefixes(
    entries: dict[int, list[list[Descriptor]]],
    cells: Cells,
    *,
    start: int,
    stop: int,
    sequence: int = 0,
    streams: int = 1,
    preserve: bool = True,
    indexer: bool = True,
    recurrent_accepted: bool = True,
) -> dict[int, list[list[Descriptor]]]:
    """Returns, for each pooling ratio, the descriptors that outlive a removal (Algorithm 1).

    Descriptors are kept up to the first that is not valid: what is kept is a prefix.

    Args:
      entries: for each ratio, the descriptors of each stream.
      cells: after the removal.
      start: first removed position.
      stop: the position after the last removed; negative for all from `start` on.
      sequence: that positions are removed from.
      streams: of the index cache.
      preserve: whether anything is to be kept.
      indexer: whether there is an indexer.
      recurrent_accepted: whether the recurrent state could be taken back; it is asked first.

    Raises:
      ValueError: the recurrent state refused; nothing may have changed.
    """
    if not recurrent_accepted:
        raise ValueError(
            f"the recurrent state cannot go back to {start=}; read the text again from a checkpoint"
        )
    suffix = start >= 0 and stop < 0
    if not (preserve and indexer and streams == 1 and sequence == 0 and suffix):
        return {}
    kept = {}
    for ratio, of_streams in entries.items():
        if len(of_streams) != 1:
            kept[ratio] = []
            continue
        blocks, count = of_streams[0], 0
        while count < len(blocks) and is_valid(blocks[count], ratio, start, cells, sequence):
            count += 1
        kept[ratio] = [blocks[:count]]
    return kept


def changed_blocks(current: Sequence[Descriptor], retained: Sequence[Descriptor]) -> list[int]:
    """Returns the blocks whose keys have to be pooled: new ones and others than before."""
    return [i for i, block in enumerate(current) if i >= len(retained) or retained[i] != block]


def padded_list(
    changed: Sequence[int],
    current: Sequence[Descriptor],
    *,
    target: int,
    tokens: int,
    cache_size: int,
    streams: int = 1,
    padding: bool = True,
    fallback: Descriptor | None = None,
) -> list[Descriptor]:
    """Returns the update list (Algorithm 3): real blocks, then blocks that are pooled again.

    Args:
      changed: blocks that have to be pooled.
      current: complete blocks, in order.
      target: rows of a padded list.
      tokens: of the forward.
      cache_size: cells of a stream.
      streams: of the index cache.
      padding: whether small updates are padded.
      fallback: what the ordinary path pools where there is no complete block.

    Raises:
      ValueError: there is neither a complete block nor a fallback.
    """
    rows = max(1, len(changed))
    listed = [current[i] for i in changed]
    small = tokens <= PADDED_TOKENS and rows <= target and len(current) >= target
    if padding and streams == 1 and small:
        rows = target
    if not listed:
        if not current and fallback is None:
            raise ValueError("an update without a complete block needs a fallback descriptor")
        listed.append(current[0] if current else fallback)  # pyright: ignore
    if padding and streams == 1:
        used = {block.destination(cache_size) for block in listed}
        for block in current:
            if len(listed) == rows:
                break
            if block.destination(cache_size) not in used:
                listed.append(block)
                used.add(block.destination(cache_size))
        assert len(listed) == rows
        return listed
    return listed + listed[:1] * (rows - len(listed))
