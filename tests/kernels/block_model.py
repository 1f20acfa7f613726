"""A block of threads in NumPy: instructions of `pallas_kernels.ptx`, all threads in step.

Threads run one instruction at a time together, so a barrier has nothing to do: what a missing one
would break is not seen here.
"""

import contextlib

import numpy as np


class Threads:
    """Registers are arrays over threads; a global address is (memory, byte offsets)."""

    def __init__(self, threads: int, shared_words: int):
        self.threads = threads
        self.shared = np.full(shared_words, 0x7FC00000, np.uint32)  # NaN, until it is written
        self.active = [np.ones(threads, bool)]

    Float = staticmethod(np.float32)
    Word = staticmethod(np.uint32)

    def thread_index(self):
        return np.arange(self.threads, dtype=np.uint32)

    @contextlib.contextmanager
    def when(self, predicate):
        self.active.append(self.active[-1] & predicate)
        yield
        self.active.pop()

    @staticmethod
    def select(predicate, a, b):
        return np.where(predicate, np.uint32(a), np.uint32(b))

    @staticmethod
    def select_float(predicate, a, b):
        return np.where(predicate, a, b).astype(np.float32)

    @staticmethod
    def fma(a, b, c):
        return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)

    maximum = staticmethod(np.fmax)
    magnitude = staticmethod(np.abs)

    @staticmethod
    def rsqrt(x):
        return (1 / np.sqrt(x.astype(np.float64))).astype(np.float32)

    @staticmethod
    def pack_halves(low, high):
        return np.stack([low, high], -1).astype(np.float16).view(np.uint32)[:, 0]

    @staticmethod
    def half_to_float(word, high):
        return word.view(np.float16).reshape(-1, 2)[:, int(high)].astype(np.float32)

    @staticmethod
    def as_word(x):
        return x.view(np.uint32)

    @staticmethod
    def as_float(word):
        return word.view(np.float32)

    def shuffle_xor(self, x, distance):
        x = np.broadcast_to(x, self.threads)
        return x[np.arange(self.threads) ^ distance]

    shuffle_word_xor = shuffle_xor

    @staticmethod
    def exp(x):
        return np.exp(x.astype(np.float64)).astype(np.float32)

    @staticmethod
    def product_of(a, b):
        return a * b

    @staticmethod
    def sum_of(a, b):
        return a + b

    @staticmethod
    def divide(a, b):
        return a / b

    @staticmethod
    def to_float(word):
        return word.astype(np.float32)

    @staticmethod
    def shuffle(x, lane):
        return np.take_along_axis(x.reshape(-1, 32), lane.reshape(-1, 32) & 31, 1).reshape(-1)

    def sync_threads(self, name, num_threads):
        assert num_threads == self.threads

    def store_shared(self, address, values, offset=0):
        on, first = np.flatnonzero(self.active[-1]), np.asarray(address, np.int64) + offset
        for i, value in enumerate(values):
            np.put(self.shared, first[on] // 4 + i, value.view(np.uint32)[on])

    def load_shared_floats(self, address, offset=0, words=1):
        at = (np.int64(address) + offset) // 4
        return [self.shared[at + i].view(np.float32) for i in range(words)]

    def offset_address(self, address, count, stride):
        memory, at = address
        return memory, at + np.broadcast_to(np.int64(count) * stride, self.threads)

    def load_global_floats(self, address, offset=0, words=1):
        memory, at = address
        first = (at + offset) // 4
        return [memory.view(np.float32)[first + i] for i in range(words)]

    def load_global_coherent(self, address, offset=0):
        memory, at = address
        return memory.view(np.uint32)[(at + offset) // 4]

    def store_global(self, address, values, offset=0):
        memory, at = address
        on = self.active[-1]
        for i, value in enumerate(values):
            place = ((at + offset) // 4 + i)[on]
            stored = np.ascontiguousarray(np.broadcast_to(value, self.threads)[on])
            memory.view(np.uint32)[place] = stored.view(np.uint32)

    def place(self, array: np.ndarray):
        """Returns the global address of an array, which stores change."""
        return array.reshape(-1).view(np.uint8), np.zeros(self.threads, np.int64)
