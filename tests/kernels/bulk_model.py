"""The grid of `cluster_model` with bulk copies that complete on barriers, phase after phase.

A copy's bytes arrive when they are waited for: before, their place holds NaN. What a copy or a
store replaces in shared memory, others must have read before a barrier of the block.
"""

import numpy as np

from tests.kernels.cluster_model import NAN, Buffer, Grid


class BulkGrid(Grid):
    """Instructions of all threads of a grid without clusters."""

    def __init__(self, blocks: int, threads: int, shared_bytes: int):
        super().__init__(blocks, 1, threads, shared_bytes)
        self.last_read = np.full(self.memory.shape, -1)
        self.reader = np.full(self.memory.shape, -1)
        self.phases: dict[tuple[int, int], int] = {}
        self.arriving: dict[tuple[int, int], list] = {}
        self.expected_bytes: dict[tuple[int, int], int] = {}

    def shuffle(self, value, lane):
        lanes = self.active.reshape(-1, 32)
        assert np.all(lanes.all(1) | ~lanes.any(1)), "a warp's lanes would wait for each other"
        return value[self.every // 32 * 32 + (np.asarray(lane) & 31)]

    def branch(self, predicate, then, otherwise):
        for where, body in ((predicate, then), (~predicate, otherwise)):
            with self.when(where):
                if self.active.any():
                    body()

    def loop(self, start, stop, step, carry, body):
        bounds = [np.unique(np.asarray(bound)) for bound in (start, stop)]
        assert all(len(bound) == 1 for bound in bounds), "threads would part"
        first, last = (int(bound[0]) for bound in bounds)
        for i in range(first, last, step):
            carry = body(self.Word(i), carry)
        return carry

    def maximum(self, a, b):
        return np.fmax(a, b)

    # Shared memory.

    def _check_replaced(self, block, index, who):
        fresh = self.last_read[block, index] >= self.epochs[block].max(1)
        assert np.all(~fresh | (self.reader[block, index] == who)), "replaced before all read it"

    def store_shared(self, address, values, offset=0):
        (who,) = np.nonzero(self.active)
        first = (address[who].astype(np.int64) + offset) // 4
        for i in range(len(values)):
            self._check_replaced(self.block[who], first + i, who)
        super().store_shared(address, values, offset)

    def load_shared_floats(self, address, offset=0, words=1):
        loaded = super().load_shared_floats(address, offset, words)
        (who,) = np.nonzero(self.active)
        first = (address[who].astype(np.int64) + offset) // 4
        block = self.block[who]
        for index in (first + i for i in range(words)):
            now = self.epochs[block].max(1)
            again = self.last_read[block, index] == now
            shared = again & (self.reader[block, index] != who)
            self.reader[block, index] = who
            shared |= self.reader[block, index] != who
            self.reader[block[shared], index[shared]] = -2
            self.last_read[block, index] = now
        return loaded

    # Copies.

    def _barriers(self, barrier):
        (who,) = np.nonzero(self.active)
        return who, [(int(self.block[i]), int(barrier[i]) // 4) for i in who]

    def barrier_init(self, barrier, arrivals):
        assert arrivals == 1
        for key in self._barriers(barrier)[1]:
            self.phases[key], self.arriving[key] = 0, []

    def barrier_expect(self, barrier, num_bytes):
        for key in self._barriers(barrier)[1]:
            assert key not in self.expected_bytes, "the phase before has not ended"
            self.expected_bytes[key] = num_bytes

    def copy_bulk_cached(self, shared, source, num_bytes, barrier):
        who, keys = self._barriers(barrier)
        for i, key in zip(who, keys, strict=True):
            block, first = key[0], int(shared[i]) // 4
            assert int(shared[i]) % 16 == num_bytes % 16 == 0
            place = np.arange(first, first + num_bytes // 4)
            # The copying thread's own reads too: it is another unit that writes.
            self._check_replaced(block * np.ones_like(place), place, -3)
            for where, buffer, at in source.choices:
                if where[i]:
                    assert at[i] % 16 == 0
                    words = buffer.words[at[i] // 4 : at[i] // 4 + place.size].copy()
                    assert words.size == place.size, "past the end of the array"
                    self.arriving[key].append((place, words))
            self.memory[block, place], self.writer[block, place] = NAN, -1
            self.sent_by[block, place] = key[1]
            self.waited[block, key[1]] = False

    def barrier_wait(self, barrier, parity):
        who, keys = self._barriers(barrier)
        parities = dict(zip(keys, np.broadcast_to(np.asarray(parity), self.size)[who], strict=True))
        for key, wanted in parities.items():
            assert wanted == self.phases[key] % 2, "a wait for another phase"
            arrived = sum(4 * place.size for place, _ in self.arriving[key])
            assert arrived == self.expected_bytes.pop(key), "some would wait for ever"
            for place, words in self.arriving[key]:
                self.memory[key[0], place] = words
            self.arriving[key] = []
            self.phases[key] += 1
            self.waited[key] = True


def run(kernel, blocks: int, threads: int, shared_bytes: int, *arrays) -> list[np.ndarray]:
    """Returns the arrays after a kernel `kernel(isa, *buffers, shared)` has run on them."""
    buffers = [Buffer(array) for array in arrays]
    with np.errstate(invalid="ignore", over="ignore"):
        kernel(BulkGrid(blocks, threads, shared_bytes), *buffers, None)
    return [buffer.values for buffer in buffers]
