"""A grid of thread block clusters in NumPy, all threads in step: `pallas_kernels.ptx` over arrays.

Every register is an array over all threads of the grid. Beside computing, the model holds a kernel
to what lockstep would hide: a thread may read what another wrote to shared memory only behind a
barrier that orders the two, and replace what another read of global memory only likewise; a wait
must find all the bytes it expects. Shared memory and what idle threads load are NaN.
"""

import contextlib
import dataclasses

import ml_dtypes
import numpy as np

from tests.kernels.warp_model import Instructions

NAN = 0x7FC00001


class Word(np.ndarray):
    """uint32 of every thread."""

    def equals(self, other):
        return np.asarray(self == other)

    def differs(self, other):
        return np.asarray(self != other)


class Buffer:
    """An array in global memory, and who read each word of it how long ago."""

    FRESH, SETTLED, ANNOUNCED = 1, 2, 3

    def __init__(self, values):
        self.values = np.array(values)
        self.words = self.values.reshape(-1).view(np.uint32)
        self.thread = np.full(self.words.size, -1)
        self.block = np.full(self.words.size, -1)
        self.stage = np.zeros(self.words.size, int)

    def read(self, index, thread, block):
        for known, mine in ((self.thread, thread), (self.block, block)):
            others = (self.stage[index] > 0) & (known[index] != mine)
            known[index] = mine
            # A word of several readers has none in particular.
            known[index[others | (known[index] != mine)]] = -2
        self.stage[index] = self.FRESH
        return self.words[index]

    def write(self, index, values, thread, block):
        assert len(np.unique(index)) == len(index), "two threads store to one place"
        own = self.thread[index] == thread
        near = (self.block[index] == block) & (self.stage[index] >= self.SETTLED)
        assert np.all((self.stage[index] == 0) | own | near), "replaced before all have read it"
        self.words[index] = values


@dataclasses.dataclass
class Address:
    """Bytes in global memory, in one of several buffers for each thread."""

    choices: list[tuple[np.ndarray, Buffer, np.ndarray]]

    def moved(self, count):
        return Address([(where, buffer, at + count) for where, buffer, at in self.choices])


def _pick(predicate, a, b):
    """Returns one of two trees for each thread."""
    if isinstance(a, list | tuple):
        return type(a)(_pick(predicate, *pair) for pair in zip(a, b, strict=True))
    return np.where(predicate, a, b).view(type(a))


class Grid(Instructions):
    """Instructions of all threads of a grid.

    Args:
      blocks: blocks of threads of the grid.
      splits: blocks of a cluster.
      threads: threads of a block.
      shared_bytes: shared memory of a block.
    """

    def __init__(self, blocks: int, splits: int, threads: int, shared_bytes: int):
        self.blocks, self.splits, self.threads = blocks, splits, threads
        self.size = blocks * threads
        self.every = np.arange(self.size)
        self.block = self.every // threads
        self.group = self.every % threads // 128
        self.active = np.ones(self.size, bool)
        words = shared_bytes // 4
        self.memory = np.full((blocks, words), NAN, np.uint32)
        self.writer = np.full((blocks, words), -1)
        self.epoch = np.zeros((blocks, words), int)
        self.sent_by = np.full((blocks, words), -1)
        self.epochs = np.zeros((blocks, threads // 128), int)
        self.expected, self.received = (np.zeros((blocks, words), int) for _ in range(2))
        self.waited = np.zeros((blocks, words), bool)
        self.buffers: list[Buffer] = []

    # Registers.

    def Word(self, value):  # noqa: N802 (the name of the instruction set's type)
        return np.full(self.size, value, np.uint32).view(Word)

    def Float(self, value):  # noqa: N802
        return np.full(self.size, value, np.float32)

    def thread_index(self):
        return (self.every % self.threads).astype(np.uint32).view(Word)

    def block_index(self):
        return self.block.astype(np.uint32).view(Word)

    def cluster_rank(self):
        return (self.block % self.splits).astype(np.uint32).view(Word)

    def uniform(self, word):
        assert np.all(word.reshape(-1, 32) == word.reshape(-1, 32)[:, :1])
        return word

    # Control flow.

    @contextlib.contextmanager
    def when(self, predicate):
        before = self.active
        self.active = before & predicate
        yield
        self.active = before

    def choose(self, predicate, on_true, otherwise):
        with self.when(predicate):
            chosen = on_true()

        return _pick(predicate, chosen, otherwise)

    @staticmethod
    def select(predicate, on_true, on_false):
        return np.where(predicate, on_true, on_false).astype(np.uint32).view(Word)

    def loop(self, start, stop, step, carry, body):
        stop = np.broadcast_to(np.asarray(stop), self.size)
        by_block = stop.reshape(self.blocks, -1)
        assert np.all(by_block == by_block[:, :1]), "threads of a block would part"
        for i in range(start, int(stop[self.active].max(initial=0)), step):
            with self.when(i < stop):
                new = body(self.Word(i), carry)
            carry = _pick(i < stop, new, carry)
        return carry

    # Arithmetic.

    @staticmethod
    def product_of(a, b):
        return a * b

    @staticmethod
    def sum_of(a, b):
        return a + b

    @staticmethod
    def divide(a, b):
        return a / b

    maximum = staticmethod(np.maximum)
    magnitude = staticmethod(np.abs)
    exp = staticmethod(np.exp)
    exp2 = staticmethod(np.exp2)

    @staticmethod
    def pack_bfloats(low, high):
        halves = [
            x.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for x in (low, high)
        ]
        return (halves[0] | halves[1] << np.uint32(16)).view(Word)

    @staticmethod
    def pack_halves(low, high):
        halves = [x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in (low, high)]
        return (halves[0] | halves[1] << np.uint32(16)).view(Word)

    @staticmethod
    def as_word(value):
        return np.ascontiguousarray(value).view(np.uint32).view(Word)

    def bfloat_to_float(self, pair, high):
        return self.as_float(pair & np.uint32(0xFFFF0000) if high else pair << np.uint32(16))

    @staticmethod
    def mma(a, b, c, kind):
        dtype = ml_dtypes.bfloat16 if kind == "bf16" else np.float16
        g, t = np.arange(32) // 4, np.arange(32) % 4
        warps = len(c[0]) // 32
        left, right = np.zeros((warps, 16, 16), np.float32), np.zeros((warps, 16, 8), np.float32)
        for i, word in enumerate(a):
            pair = np.ascontiguousarray(word).view(dtype).reshape(warps, 32, 2)
            for o in range(2):
                left[:, g + 8 * (i % 2), 2 * t + o + 8 * (i // 2)] = pair[:, :, o]
        for i, word in enumerate(b):
            pair = np.ascontiguousarray(word).view(dtype).reshape(warps, 32, 2)
            for o in range(2):
                right[:, 2 * t + o + 8 * i, g] = pair[:, :, o]
        product = left @ right
        return [product[:, g + 8 * (i // 2), 2 * t + i % 2].reshape(-1) + c[i] for i in range(4)]

    @staticmethod
    def reciprocal(value):
        return np.float32(1) / value

    @staticmethod
    def rsqrt(value):
        return np.float32(1) / np.sqrt(value)

    @staticmethod
    def sigmoid(value):
        with np.errstate(over="ignore"):
            return np.float32(1) / (np.float32(1) + np.exp(-value))

    def silu(self, value):
        return value * self.sigmoid(value)

    @staticmethod
    def as_float(word):
        return np.asarray(word).view(np.float32)

    @staticmethod
    def select_float(predicate, on_true, on_false):
        return np.where(predicate, on_true, on_false)

    def shuffle_xor(self, value, distance):
        lanes = self.active.reshape(-1, 32)
        assert np.all(lanes.all(1) | ~lanes.any(1)), "a warp's lanes would wait for each other"
        return value[self.every ^ distance]

    # Global memory.

    def global_address(self, buffer: Buffer):
        if not any(buffer is known for known in self.buffers):
            self.buffers.append(buffer)
        everywhere = np.ones(self.size, bool)
        return Address([(everywhere, buffer, np.zeros(self.size, np.int64))])

    @staticmethod
    def offset_address(address, count, stride):
        return address.moved(np.asarray(count).astype(np.int64) * stride)

    @staticmethod
    def select_address(predicate, on_true, on_false):
        return Address(
            [(where & predicate, *rest) for where, *rest in on_true.choices]
            + [(where & ~predicate, *rest) for where, *rest in on_false.choices]
        )

    def load_global(self, address, offset=0, words=1):
        loaded = [self.Word(NAN) for _ in range(words)]
        for where, buffer, at in address.choices:
            (who,) = np.nonzero(where & self.active)
            first = at[who] + offset
            assert np.all(first % (4 * words) == 0), "a wide access must be aligned"
            assert np.all((first >= 0) & (first + 4 * words <= 4 * buffer.words.size))
            for i, word in enumerate(loaded):
                word[who] = buffer.read(first // 4 + i, who, self.block[who])
        return loaded

    def load_global_floats(self, address, offset=0, words=1):
        return [self.as_float(word) for word in self.load_global(address, offset, words)]

    def store_global(self, address, values, offset=0):
        for where, buffer, at in address.choices:
            (who,) = np.nonzero(where & self.active)
            first = at[who] + offset
            assert np.all(first % (4 * len(values)) == 0), "a wide access must be aligned"
            for i, value in enumerate(values):
                bits = np.asarray(value).view(np.uint32)[who]
                buffer.write(first // 4 + i, bits, who, self.block[who])

    # Shared memory.

    def shared_address(self, ref):
        return self.Word(0)

    def _write(self, block, index, values, who, sent_by):
        assert np.all(index < self.memory.shape[1])
        self.memory[block, index] = values
        self.writer[block, index] = who
        self.epoch[block, index] = self.epochs[self.block[who], self.group[who]]
        self.sent_by[block, index] = sent_by

    def store_shared(self, address, values, offset=0):
        (who,) = np.nonzero(self.active)
        index = (address[who].astype(np.int64) + offset) // 4
        for i, value in enumerate(values):
            words = np.asarray(value).view(np.uint32)[who]
            self._write(self.block[who], index + i, words, who, -1)

    def load_shared_floats(self, address, offset=0, words=1):
        (who,) = np.nonzero(self.active)
        first = address[who].astype(np.int64) + offset
        assert np.all(first % (4 * words) == 0), "a wide access must be aligned"
        loaded = []
        for index in (first // 4 + i for i in range(words)):
            block, value = self.block[who], self.Word(NAN)
            writer, barrier = self.writer[block, index], self.sent_by[block, index]
            later = self.epochs[block, self.group[who]] > self.epoch[block, index]
            arrived = (barrier >= 0) & self.waited[block, barrier]
            ordered = (writer == who) | ((barrier < 0) & later) | arrived
            assert np.all(ordered), "read without a barrier behind the write"
            value[who] = self.memory[block, index]
            loaded.append(self.as_float(value))
        return loaded

    def load_matrices(self, address, offset=0, transposed=False):
        rows = self.load_shared_floats(address, offset, 4)
        # [warp, matrix, row, value]
        values = np.stack([np.asarray(row).view(np.uint32) for row in rows], -1)
        values = values.view(np.uint16).reshape(-1, 4, 8, 8)
        g, t = np.arange(32) // 4, np.arange(32) % 4
        loaded = []
        for i in range(4):
            if transposed:
                low, high = values[:, i, 2 * t, g], values[:, i, 2 * t + 1, g]
            else:
                low, high = values[:, i, g, 2 * t], values[:, i, g, 2 * t + 1]
            word = low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)
            loaded.append(word.reshape(-1).view(Word))
        return loaded

    # Barriers.

    def sync_warp(self):
        pass

    def fence_barriers(self):
        pass

    cluster_arrive = cluster_wait = fence_barriers

    def sync_threads(self, name, num_threads):
        del name
        active = self.active.reshape(self.blocks, -1, 128)
        counts = active.sum((1, 2))
        assert np.all((counts == 0) | (counts == num_threads)), "some would wait for ever"
        whole = counts == self.threads
        # Epochs of a block's barriers are even more recent than those of a warpgroup's.
        self.epochs[whole] = self.epochs.max() + 1
        part = active.all(2) & ~whole[:, None]
        self.epochs[part] += 1
        for buffer in self.buffers:
            settled = (buffer.stage == buffer.FRESH) & (
                (buffer.block < 0) | whole[np.maximum(buffer.block, 0)]
            )
            buffer.stage[settled] = buffer.SETTLED

    def barrier_init(self, barrier, arrivals):
        assert arrivals == 1

    def barrier_expect(self, barrier, num_bytes):
        who = self.active
        self.expected[self.block[who], barrier[who] // 4] += num_bytes

    def barrier_wait(self, barrier, parity):
        assert np.all(parity == 0)
        block, index = self.block[self.active], barrier[self.active] // 4
        assert np.all(self.expected[block, index] > 0)
        assert np.array_equal(self.received[block, index], self.expected[block, index])
        self.waited[block, index] = True
        for buffer in self.buffers:
            buffer.stage[buffer.stage == buffer.ANNOUNCED] = 0

    def remote_address(self, address, rank):
        block = self.block // self.splits * self.splits + np.asarray(rank)
        return block.astype(np.int64) << 32 | np.asarray(address)

    def send(self, remote, value, remote_barrier):
        (who,) = np.nonzero(self.active)
        block, index = remote[who] >> 32, (remote[who] & 0xFFFFFFFF) // 4
        barrier = (remote_barrier[who] & 0xFFFFFFFF) // 4
        assert np.array_equal(block, remote_barrier[who] >> 32)
        words = np.asarray(value).view(np.uint32)[who]
        self._write(block, index, words, who, barrier)
        np.add.at(self.received, (block, barrier), 4)
        for buffer in self.buffers:
            buffer.stage[buffer.stage == buffer.SETTLED] = buffer.ANNOUNCED
