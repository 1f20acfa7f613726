"""Warps of a block that do different work, in NumPy: instructions of `pallas_kernels.ptx`.

A role is some neighbouring warps in step, on a Python thread of its own; roles meet at mbarriers
alone. Copies arrive, and tensor cores read and write, only when a role waits for them: a register
that is looked at too early is NaN. Memory that tensor cores read must be behind a fence, and is not
given back while a product reads it.
"""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
from scipy.special import expit

from tests.kernels.block_model import Threads
from tests.kernels.cluster_model import Grid, Word
from tests.kernels.warp_model import Instructions


class Barriers:
    """The mbarriers of a block: a wait that never ends fails."""

    def __init__(self):
        self.changed = threading.Condition()
        self.states: dict[int, list[int]] = {}
        self.failed = False

    def init(self, place: int, arrivals: int):
        self.states[place] = [arrivals, arrivals, 0]

    def arrive(self, place: int, count: int):
        with self.changed:
            state = self.states[place]
            state[1] -= count
            assert state[1] >= 0, "more arrivals than a phase has"
            if state[1] == 0:
                state[1], state[2] = state[0], state[2] + 1
                self.changed.notify_all()

    def wait(self, place: int, parity: int):
        with self.changed:
            state = self.states[place]
            ended = self.changed.wait_for(lambda: self.failed or state[2] % 2 != parity, 60)
            assert ended and not self.failed, "waited for ever"


class Role(Threads):
    """Some warps of a block.

    Args:
      first: first thread.
      threads: how many.
      shared: the block's shared memory, words.
      barriers: of the block.
      index: of the block.
    """

    def __init__(self, first: int, threads: int, shared: np.ndarray, barriers: Barriers, index=0):
        super().__init__(threads, 0)
        self.first, self.shared, self.barriers, self.index = first, shared, barriers, index
        self.copies: list[list[Callable]] = [[]]
        self.products: list[list[Callable]] = [[]]
        self.read: list[set[int]] = [set()]
        self.unfenced = False
        self.guarded: dict[int, range] = {}
        """What a barrier gives back: addresses of shared memory."""

    permute_bytes = staticmethod(Instructions.permute_bytes)
    pack_bfloats, pack_halves = staticmethod(Grid.pack_bfloats), staticmethod(Grid.pack_halves)
    either = staticmethod(np.logical_or)
    exp2, reciprocal = staticmethod(np.exp2), staticmethod(Grid.reciprocal)
    maximum = staticmethod(np.fmax)

    def Word(self, value):  # noqa: N802 (the name of the instruction set's type)
        return np.full(self.threads, value, np.uint32).view(Word)

    def Float(self, value):  # noqa: N802
        return np.full(self.threads, value, np.float32)

    @staticmethod
    def select(predicate, a, b):
        return Grid.select(predicate, a, b)

    @staticmethod
    def as_word(x):
        return Grid.as_word(x)

    @staticmethod
    def merge(word, mask, pattern):
        return (np.asarray(word) & np.uint32(mask) ^ np.uint32(pattern)).view(Word)

    @staticmethod
    def subtract_bfloats(a, b):
        a, b = (np.ascontiguousarray(x).view(ml_dtypes.bfloat16) for x in (a, b))
        return (a - b).view(np.uint32).view(Word)

    @staticmethod
    def add_halves(a, b):
        b = np.full(a.shape, b, np.uint32).view(np.float16)
        return (np.ascontiguousarray(a).view(np.float16) + b).view(np.uint32).view(Word)

    @staticmethod
    def multiply_bfloats(a, b):
        a, b = (np.ascontiguousarray(x).view(ml_dtypes.bfloat16) for x in (a, b))
        return (a * b).view(np.uint32).view(Word)

    @staticmethod
    def multiply_halves(a, b):
        a, b = (np.ascontiguousarray(x).view(np.float16) for x in (a, b))
        return (a * b).view(np.uint32).view(Word)

    bfloat_to_float = Grid.bfloat_to_float

    @staticmethod
    def sigmoid(value):
        return expit(value)

    # Where a thread is, and control flow.

    def thread_index(self):
        return (self.first + np.arange(self.threads, dtype=np.uint32)).view(Word)

    def block_index(self):
        return self.Word(self.index)

    @staticmethod
    def _one(word) -> int:
        (value,) = set(np.ravel(word).tolist())
        return value

    def uniform(self, word):
        assert np.all(word.reshape(-1, 32) == word.reshape(-1, 32)[:, :1])
        return word

    def any_lane(self, predicate):
        return np.repeat(predicate.reshape(-1, 32).any(1), 32)

    def choose(self, predicate, on_true, otherwise):
        return [np.where(predicate, *pair) for pair in zip(on_true(), otherwise, strict=True)]

    def branch(self, predicate, then, otherwise):
        return then() if self._one(predicate) else otherwise()

    def loop(self, start, stop, step, carry, body):
        if self.active[-1].all():
            for i in range(self._one(start), self._one(stop), step):
                carry = body(self.Word(i), carry)
        return carry

    # Memory.

    def shared_address(self, ref):
        return self.Word(ref)

    def global_address(self, ref):
        return self.place(ref)

    def _at(self, address, offset, wanted=True):
        memory, at = address
        return memory.view(np.uint32), np.where(self.active[-1] & wanted, (at + offset) // 4, 0)

    def load_global(self, address, offset=0, words=1):
        memory, first = self._at(address, offset)
        assert np.all((address[1] + offset) % (4 * words) == 0), "a wide access must be aligned"
        return [memory[first + i].view(Word) for i in range(words)]

    def load_global_floats(self, address, offset=0, words=1):
        return [self.as_float(x) for x in self.load_global(address, offset, words)]

    def store_shared(self, address, values, offset=0):
        super().store_shared(address, [np.asarray(value) for value in values], offset)
        self.unfenced = True

    def load_shared(self, address, offset=0, words=1):
        at = (np.asarray(address, np.int64) + offset) // 4
        return [self.shared[at + i].view(Word) for i in range(words)]

    def copy_async(self, shared, source, num_bytes):
        memory, first = self._at(source, 0, num_bytes > 0)
        assert np.all(np.isin(num_bytes, (0, 16)))
        read = [np.where(num_bytes > 0, memory[first + i], 0).astype(np.uint32) for i in range(4)]
        self.copies[-1].append(lambda: self.store_shared(shared, read))

    def close_copies(self):
        self.copies.append([])

    def wait_copies(self, groups):
        while len(self.copies) > groups + 1:
            for copy in self.copies.pop(0):
                copy()

    # Barriers.

    def fence_shared_writes(self):
        self.unfenced = False

    def fence_barriers(self):
        pass

    sync_warp = wgmma_fence = fence_barriers

    def sync_threads(self, name, num_threads):
        assert num_threads == self.threads and not self.unfenced

    def barrier_init(self, barrier, arrivals):
        self.barriers.init(self._one(barrier), arrivals)

    def barrier_wait(self, barrier, parity):
        self.barriers.wait(self._one(barrier), self._one(parity))

    def barrier_arrive(self, barrier):
        place = self._one(barrier)
        assert not self.unfenced, "written, and not visible to the tensor cores"
        back = self.guarded.get(place, range(0))
        assert not any(at in back for group in self.read for at in group), "still being read"
        self.barriers.arrive(place, int(self.active[-1].sum()))

    # Tensor cores.

    @staticmethod
    def descriptor(address):
        return (address & 0x3FFFF) >> 4

    @classmethod
    def descriptor_of_rows(cls, address, panel_bytes):
        return cls.descriptor(address) | panel_bytes >> 4 << 16

    def _matrix(self, description: int, rows: int, across: bool):
        """Returns [rows, 16] of float16; across, of bfloat16 and the 16 are rows of memory."""
        start, leading = (description & 0x3FFF) * 16, (description >> 16 & 0x3FFF) * 16
        row, k = np.arange(rows)[:, None], np.arange(16)
        if across:
            at = start + row // 64 * leading + row % 64 * 2 + k // 8 * 1024 + k % 8 * 128
        else:
            at = start + row // 8 * 1024 + row % 8 * 128 + 2 * k
        at ^= (at >> 7 & 7) << 4
        kind = ml_dtypes.bfloat16 if across else np.float16
        return self.shared.view(kind)[at // 2].astype(np.float64)

    def _start(self, acc, right, left: Callable, across: bool):
        count = acc if isinstance(acc, int) else len(acc)
        out = [np.full(128, np.nan, np.float32) for _ in range(count)]
        thread = np.arange(128)
        rows, t = thread // 32 * 16 + thread % 32 // 4, thread % 4
        right = self._one(right)

        def run():
            product = left() @ self._matrix(right, 2 * count, across).T
            for i, x in enumerate(out):
                new = product[rows + 8 * (i % 4 // 2), 8 * (i // 4) + 2 * t + i % 2]
                x[:] = new if isinstance(acc, int) else acc[i] + new

        self.products[-1].append(run)
        self.read[-1].add((right & 0x3FFF) * 16)
        return out

    def wgmma_shared(self, acc, left, right):
        left = self._one(left)
        return self._start(acc, right, lambda: self._matrix(left, 64, False), False)

    def wgmma_rows(self, acc, a, matrix):
        def left():
            thread, rows = np.arange(128), np.zeros((64, 16))
            g, t, warp = thread % 32 // 4, thread % 4, thread // 32
            for i, word in enumerate(a):
                pair = np.ascontiguousarray(word).view(ml_dtypes.bfloat16).reshape(-1, 2)
                for o in range(2):
                    rows[16 * warp + g + 8 * (i % 2), 2 * t + o + 8 * (i // 2)] = pair[:, o]
            return rows

        return self._start(acc, matrix, left, True)

    def wgmma_commit(self):
        self.products.append([])
        self.read.append(set())

    def wgmma_wait(self, groups):
        while len(self.products) > groups + 1:
            for run in self.products.pop(0):
                run()
            self.read.pop(0)

    def pin(self, registers):
        return registers


def guard_stages(isa: Role, at, stages: int, stage_bytes: int) -> None:
    """Notes which memory the barriers of empty stages of keys and values give back.

    Args:
      isa: the role.
      at: where a thread of a kernel of attention is.
      stages: of keys, and of values.
      stage_bytes: of each.
    """
    for which in range(2):
        for stage in range(stages):
            place = int(at.tile(which, stage)[0])
            isa.guarded[int(at.empty(which, stage)[0])] = range(place, place + stage_bytes)


def run_roles(barriers: Barriers, roles: Sequence[Callable[[], None]]) -> None:
    """Runs roles side by side; the first one that fails ends the others."""

    def guarded(role):
        try:
            role()
        except BaseException:
            barriers.failed = True
            with barriers.changed:
                barriers.changed.notify_all()
            raise

    with concurrent.futures.ThreadPoolExecutor(len(roles)) as pool:
        running = [pool.submit(guarded, role) for role in roles]
    failures = [failure for job in running if (failure := job.exception())]
    for failure in failures:
        # What made the others give up.
        if "waited for ever" not in str(failure):
            raise failure
    if failures:
        raise failures[0]
