"""The Gated DeltaNet layer of a cycle in one kernel, for sm_90 GPUs: every state is read once.

A cluster of blocks of threads takes one key head, a warpgroup in each of its blocks one of the
value heads that read it, and a block an equal share of their columns. The columns of a state do not
meet before the norm, so they stay in registers from the first pending row to the last live one.

    each block        reads states and pending rows; convolves columns of v, and rows of q and k
    send q, k         to the whole cluster, which has by then read what the rows replace
    fold              pending rows into the states; store these
    run               live rows on the states in registers
    send squares      of the outputs to the whole cluster; norm, gate, store

A step is the same sequence of rounded operations whether its row is pending or live, so states do
not depend, to the bit, on how many rows a cycle accepts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import ptx
from pallas_kernels.deltanet_layer import Inputs, Memory, Parameters, Sizes
from pallas_kernels.lane_kernel import lane_kernel

ROWS = 8
"""Rows of a cycle, as many as may be pending."""

WIDTH = 128
TAPS = 4
LANES = 128
"""Threads of a warpgroup."""

_MOST_GROUPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a layer is cut up.

    Attributes:
      splits: blocks of threads, a cluster, that share the columns of a key head's states: 4 or 8.
    """

    splits: int = 4

    def __post_init__(self):
        if self.splits not in (4, 8):
            raise ValueError(f"{self.splits=} must be 4 or 8: a row's columns fill lanes of a warp")

    @property
    def columns(self) -> int:
        """Columns of each state that a block keeps."""
        return WIDTH // self.splits

    @property
    def rows(self) -> int:
        """Rows whose queries and keys a block convolves."""
        return ROWS // self.splits

    @property
    def items(self) -> int:
        """Pairs of row and column that a thread convolves, and writes in the end."""
        return ROWS * self.columns // LANES


def fits(sizes: Sizes) -> bool:
    """Returns whether there is a kernel for a layer of these sizes."""
    groups = sizes.value_heads // sizes.key_heads
    return sizes.width == WIDTH and sizes.taps == TAPS and groups <= _MOST_GROUPS


@functools.partial(jax.jit, static_argnames=("sizes", "tiles", "first"))
def gdn_decode(
    x: Inputs,
    parameters: Parameters,
    memory: Memory,
    layer: Int[Array, ""],
    start: Int[Array, ""],
    num_pending: Int[Array, ""],
    num_live: Int[Array, ""],
    sizes: Sizes,
    tiles: Tiles | None = None,
    first: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> tuple[Float[Array, "rows values"], Memory]:
    """Returns a cycle's gated outputs, and the memory with this layer's part advanced in place.

    Args:
      x: the cycle's rows, `ROWS` of them; fields may be one wider matrix, see `first`.
      parameters: of all layers.
      memory: of all layers.
      layer: which.
      start: where the history of the first row begins inside the window.
      num_pending: pending rows that were accepted; the others are forgotten.
      num_live: rows that count; outputs of later ones are zero.
      sizes: of the layer; see `fits`.
      tiles: cuts.
      first: the column where u, z, a and b begin in their matrix.

    Raises:
      ValueError: sizes that have no kernel, or another number of rows.
    """
    if not fits(sizes):
        raise ValueError(
            f"{sizes=} have no kernel: it needs width {WIDTH}, {TAPS} taps and at most "
            f"{_MOST_GROUPS} value heads a key head; use gdn_decode_reference"
        )
    if x.u.shape[0] != ROWS:
        raise ValueError(f"{x.u.shape[0]=} rows must be {ROWS}; pad the rows")
    tiles, columns = tiles or Tiles(), Columns.of(x, first)
    groups = sizes.value_heads // sizes.key_heads
    shared = Shared(groups, tiles)

    def run(*refs):
        layer_kernel(ptx, sizes, tiles, columns, Operands(*refs))

    counts = [jnp.reshape(n, 1) for n in (layer, start, num_pending, num_live)]
    remembered, tree = jax.tree.flatten(memory)
    stacks = [jax.new_ref(stack) for stack in remembered]
    out = lane_kernel(
        run,
        jax.ShapeDtypeStruct((ROWS, sizes.value_heads * WIDTH), jnp.float32),
        name="gdn_decode_kernel",
        grid=sizes.key_heads,
        warpgroups=groups,
        shared=[shared.bytes],
        cluster=tiles.splits,
        follows=True,
    )(*jax.tree.leaves((x, parameters)), *counts, *stacks)
    return out, jax.tree.unflatten(tree, [jax.freeze(stack) for stack in stacks])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """Where u, z, a and b are in their matrices: of each, the row's length and the first column."""

    u: tuple[int, int]
    z: tuple[int, int]
    a: tuple[int, int]
    b: tuple[int, int]

    @classmethod
    def of(cls, x: Inputs, first: tuple[int, int, int, int]) -> "Columns":
        """Returns those of some inputs."""
        fields = ("u", "z", "a", "b")
        lengths = (getattr(x, name).shape[1] for name in fields)
        return cls(**dict(zip(fields, zip(lengths, first, strict=True), strict=True)))


class Shared:
    """Byte offsets in a block's shared memory."""

    def __init__(self, groups: int, tiles: Tiles):
        """Lays buffers out one after the other."""
        row, pairs = WIDTH * 4, groups * ROWS * tiles.columns * 4
        sizes = dict(
            pending_k=ROWS * row,
            live_k=ROWS * row,
            live_q=ROWS * row,
            pending_v=pairs,
            live_v=pairs,
            out=pairs,
            pending_gates=groups * ROWS * 8,
            live_gates=groups * ROWS * 8,
            squares=groups * ROWS * tiles.splits * 4,
            qk=ROWS * 4,
            sums=tiles.rows * 4 * 16,
            ready=8,
            normed=8,
        )
        self.at, self.bytes = {}, 0
        for name, size in sizes.items():
            self.at[name] = self.bytes
            self.bytes += -(-size // 16) * 16
        self.ready_bytes = ROWS * (2 * WIDTH + 1) * 4
        self.normed_bytes = sizes["squares"]


class Operands:
    """The kernel's references, by name."""

    names = (
        *("u", "z", "a", "b", "conv", "dt_bias", "decay", "norm"),
        *("layer", "start", "num_pending", "num_live"),
        *("delta", "window", "q", "k", "v", "g", "beta"),
        *("out", "shared"),
    )

    def __init__(self, *refs):
        """Takes references in the order of `names`."""
        self.refs = refs

    def __getattr__(self, name: str):
        """Returns the reference of a name."""
        return self.refs[self.names.index(name)]


class _Places:
    """Where a thread is and what it points to, for all phases of the kernel."""

    def __init__(self, isa, sizes: Sizes, tiles: Tiles, columns: Columns, operands):
        self.isa, self.sizes, self.tiles, self.columns = isa, sizes, tiles, columns
        self.groups = sizes.value_heads // sizes.key_heads
        self.threads = self.groups * LANES
        self.shared = Shared(self.groups, tiles)
        base = isa.shared_address(operands.shared)
        self.at = {name: base + offset for name, offset in self.shared.at.items()}
        self.gmem = {
            name: isa.global_address(getattr(operands, name))
            for name in operands.names
            if name != "shared"
        }
        self.layer, self.start, self.num_pending, self.num_live = (
            isa.uniform(isa.load_global(self.gmem[name])[0])
            for name in ("layer", "start", "num_pending", "num_live")
        )
        self.thread = isa.thread_index()
        self.group = isa.uniform(self.thread >> 7)
        self.own = self.thread & 127
        self.rank = isa.cluster_rank()
        self.key_head = isa.block_index() // tiles.splits
        self.value_head = self.group * sizes.key_heads + self.key_head
        self.value_row = self.layer * ROWS
        # The thread's part of the key axis, and its column.
        self.part, self.column = self.own % tiles.splits, self.own // tiles.splits

    def item(self, index: int):
        """Returns row and column of a pair that this thread convolves and writes."""
        place = self.own + index * LANES
        return place // self.tiles.columns, place % self.tiles.columns

    def pair(self, name: str, row, column):
        """Returns the shared address of a value of this warpgroup's head."""
        return self.at[name] + ((self.group * ROWS + row) * self.tiles.columns + column) * 4

    def value(self, name: str, row, column):
        """Returns the global address of a value of this warpgroup's head, in a stack of rows."""
        index = (row * self.sizes.value_heads + self.value_head) * WIDTH
        return self.isa.offset_address(self.gmem[name], index + self.channel_of(column), 4)

    def projected(self, name: str, row, column):
        """Returns the global address of a value of u, z, a or b."""
        length, first = getattr(self.columns, name)
        return self.isa.offset_address(self.gmem[name], row * length + column + first, 4)

    def channel_of(self, column):
        """Returns the index inside its head of a column of this block."""
        return self.rank * self.tiles.columns + column

    def window(self, row, channel):
        """Returns the global address of an entry of the layer's window."""
        rows, channels = self.sizes.history + ROWS, self.sizes.channels
        address = self.isa.offset_address(
            self.gmem["window"], self.layer * rows + row, 4 * channels
        )
        return self.isa.offset_address(address, channel, 4)


def layer_kernel(isa, sizes: Sizes, tiles: Tiles, columns: Columns, operands) -> None:
    """Runs one thread of the kernel.

    Args:
      isa: instructions: `ptx`, or a model of them.
      sizes: of the layer.
      tiles: cuts.
      columns: where the projections are in their matrices.
      operands: references, by name.
    """
    at = _Places(isa, sizes, tiles, columns, operands)
    _prepare_barriers(at)
    state = _State(at)
    values = _Values(at)
    _load_pending_keys(at)
    gates = _Gates(at)
    keys = _Keys(at)
    # Nothing of what the rows replace is read by this block from here on.
    isa.sync_threads(0, at.threads)
    isa.cluster_wait()
    keys.send()
    state.run("pending", at.num_pending)
    with isa.when(at.num_pending.differs(0)):
        state.store()
    isa.barrier_wait(at.at["ready"], isa.Word(0))
    keys.store()
    values.store()
    gates.store()
    state.run("live", at.num_live)
    _write_outputs(at, values)


def _prepare_barriers(at: _Places) -> None:
    isa = at.isa
    with isa.when(at.thread.equals(0)):
        for name, size in (("ready", at.shared.ready_bytes), ("normed", at.shared.normed_bytes)):
            isa.barrier_init(at.at[name], 1)
            isa.barrier_expect(at.at[name], size)
        isa.fence_barriers()
    isa.sync_warp()
    isa.cluster_arrive()


def _reduced(isa, value, lanes: int):
    """Returns the sum over groups of `lanes` lanes, the same in each of them."""
    distance = lanes // 2
    while distance:
        value = isa.sum_of(value, isa.shuffle_xor(value, distance))
        distance //= 2
    return value


def _convolved(at: _Places, row, channel, beyond: tuple[int, ...] = (0,)):
    """Returns activated convolutions at a row, with the window's entries, of some channels.

    The window gets the row itself, and from the first rows the history before them.

    Args:
      at: places.
      row: live row.
      channel: first channel.
      beyond: distances of the channels from the first.
    """
    isa, sizes = at.isa, at.sizes
    stack = at.layer * sizes.channels + channel
    taps_at = isa.offset_address(at.gmem["conv"], stack, 4 * TAPS)
    places = []
    for tap in range(TAPS):
        index = row + tap
        old = at.window(at.start + index, channel)
        new = at.projected("u", index - sizes.history, channel)
        places.append(isa.select_address(index < sizes.history, old, new))
    results = []
    for distance in beyond:
        taps = isa.load_global(taps_at, 4 * TAPS * distance, TAPS)
        inputs = [isa.load_global_floats(place, 4 * distance)[0] for place in places]
        total = isa.product_of(isa.as_float(taps[0]), inputs[0])
        for tap in range(1, TAPS):
            total = isa.fma(isa.as_float(taps[tap]), inputs[tap], total)
        results.append((isa.silu(total), inputs[0], inputs[-1]))
    return results


def _store_window(at: _Places, row, channel, entries, distance: int = 0) -> None:
    isa, history = at.isa, at.sizes.history
    oldest, newest = entries
    isa.store_global(at.window(row + history, channel), [newest], 4 * distance)
    with isa.when(row < history):
        isa.store_global(at.window(row, channel), [oldest], 4 * distance)


def _load_pending_keys(at: _Places) -> None:
    isa = at.isa
    # The last warpgroup: the first one has the convolution of q and k to do.
    with isa.when(at.group.equals(at.groups - 1)):
        for turn in range(ROWS * WIDTH // (4 * LANES)):
            index = at.own + turn * LANES
            row, quad = index >> 5, index & 31
            head = (at.value_row + row) * at.sizes.key_heads + at.key_head
            address = isa.offset_address(at.gmem["k"], head, 4 * WIDTH)
            keys = isa.load_global_floats(isa.offset_address(address, quad, 16), 0, 4)
            isa.store_shared(at.at["pending_k"] + index * 16, keys)


class _Values:
    """Values of this warpgroup's head: pending ones loaded, live ones convolved; gates of z."""

    def __init__(self, at: _Places):
        self.at, self.items = at, []
        isa, sizes = at.isa, at.sizes
        first = 2 * sizes.key_heads * WIDTH
        for index in range(at.tiles.items):
            row, column = at.item(index)
            channel = first + at.value_head * WIDTH + at.channel_of(column)
            (pending,) = isa.load_global_floats(at.value("v", at.value_row + row, column))
            head = at.value_head * WIDTH + at.channel_of(column)
            (z,) = isa.load_global_floats(at.projected("z", row, head))
            ((live, *entries),) = _convolved(at, row, channel)
            isa.store_shared(at.pair("pending_v", row, column), [pending])
            isa.store_shared(at.pair("live_v", row, column), [live])
            gate = isa.silu(z) if sizes.gate == "silu" else isa.sigmoid(z)
            self.items.append((row, column, channel, live, entries, gate))

    def store(self) -> None:
        """Makes the live rows pending, and moves the window."""
        at = self.at
        for row, column, channel, live, entries, _ in self.items:
            at.isa.store_global(at.value("v", at.value_row + row, column), [live])
            _store_window(at, row, channel, entries)


class _Gates:
    """Decay and write strength of this warpgroup's head, at pending and at live rows."""

    def __init__(self, at: _Places):
        self.at, isa = at, at.isa
        self.row, warp = at.own & 7, at.own >> 5
        rows = at.group * ROWS + self.row
        self.writes = at.own < ROWS
        with isa.when(self.writes):
            (g,), (beta,) = (isa.load_global_floats(self._address(name)) for name in ("g", "beta"))
            isa.store_shared(at.at["pending_gates"] + rows * 8, [isa.exp(g), beta])
        # All lanes: who stores them is only known later.
        self.g, self.beta = self._live()
        with isa.when(warp.equals(1)):
            isa.store_shared(at.at["live_gates"] + rows * 8, [isa.exp(self.g), self.beta])

    def _address(self, name: str):
        at = self.at
        index = (at.value_row + self.row) * at.sizes.value_heads + at.value_head
        return at.isa.offset_address(at.gmem[name], index, 4)

    def _live(self):
        at, isa = self.at, self.at.isa
        heads = at.sizes.value_heads
        head = at.layer * heads + at.value_head
        a, b = (
            isa.load_global_floats(at.projected(name, self.row, at.value_head))[0]
            for name in ("a", "b")
        )
        decay, dt_bias = (
            isa.load_global_floats(isa.offset_address(at.gmem[name], head, 4))[0]
            for name in ("decay", "dt_bias")
        )
        return isa.product_of(decay, _softplus(isa, isa.sum_of(a, dt_bias))), isa.sigmoid(b)

    def store(self) -> None:
        """Makes the live rows pending."""
        isa = self.at.isa
        with isa.when(self.at.rank.equals(0)), isa.when(self.writes):
            isa.store_global(self._address("g"), [self.g])
            isa.store_global(self._address("beta"), [self.beta])


def _softplus(isa, x):
    """Returns log(1 + exp(x)), good to a few ulp: log1p(t) = 2 artanh(t / (2 + t)) for t <= 1."""
    largest = isa.maximum(x, isa.Float(0.0))
    t = isa.exp(-isa.maximum(x, -x))
    s = isa.product_of(t, isa.reciprocal(isa.sum_of(t, isa.Float(2.0))))
    square, series = isa.product_of(s, s), isa.Float(1 / 17)
    # s <= 1/3: the first term left out is below 2e-9 of the sum.
    for power in range(15, 0, -2):
        series = isa.fma(series, square, isa.Float(1 / power))
    return isa.fma(isa.product_of(s, isa.Float(2.0)), series, largest)


class _Keys:
    """Queries and keys of this block's live rows: convolved, normed, sent to the cluster."""

    def __init__(self, at: _Places):
        self.at, self.first = at, at.group.equals(0)
        # Of q; k's is as far from it as there are channels of q.
        self.channel, self.distance = at.key_head * WIDTH + at.own, at.sizes.key_heads * WIDTH
        nothing = [[at.isa.Float(0.0)] * 7 for _ in range(at.tiles.rows)]
        self.held = at.isa.choose(self.first, self._convolve, nothing)

    def _convolve(self):
        at, isa = self.at, self.at.isa
        held, eps = [], isa.Float(at.sizes.eps)
        for turn in range(at.tiles.rows):
            (q, *q_entries), (k, *k_entries) = _convolved(
                at, self.row(turn), self.channel, (0, self.distance)
            )
            products = [isa.product_of(a, b) for a, b in ((q, q), (k, k), (q, k))]
            sums = [_reduced(isa, value, 32) for value in products]
            place = at.at["sums"] + turn * 64
            with isa.when((at.own & 31).equals(0)):
                isa.store_shared(place + (at.own >> 5) * 16, [*sums, isa.Float(0.0)])
            isa.sync_threads(1, LANES)
            warps = [isa.load_shared_floats(place, 16 * warp, 4) for warp in range(4)]
            qq, kk, qk = (
                functools.reduce(isa.sum_of, [sums[i] for sums in warps]) for i in range(3)
            )
            q_scale = isa.rsqrt(isa.sum_of(qq, eps))
            q_scale = isa.product_of(q_scale, isa.Float(WIDTH**-0.5))
            k_scale = isa.rsqrt(isa.sum_of(kk, eps))
            qk = isa.product_of(isa.product_of(qk, q_scale), k_scale)
            q, k = isa.product_of(q, q_scale), isa.product_of(k, k_scale)
            held.append([q, k, qk, *q_entries, *k_entries])
        return held

    def row(self, turn: int):
        """Returns which live row this block has in a turn."""
        return self.at.rank * self.at.tiles.rows + turn

    def send(self) -> None:
        """Sends rows to every block of the cluster."""
        at, isa = self.at, self.at.isa
        with isa.when(self.first):
            for target in range(at.tiles.splits):
                rank = isa.Word(target)
                ready = isa.remote_address(at.at["ready"], rank)
                for turn, (q, k, qk, *_) in enumerate(self.held):
                    place = (self.row(turn) * WIDTH + at.own) * 4
                    isa.send(isa.remote_address(at.at["live_q"] + place, rank), q, ready)
                    isa.send(isa.remote_address(at.at["live_k"] + place, rank), k, ready)
                    with isa.when(at.own.equals(0)):
                        place = at.at["qk"] + self.row(turn) * 4
                        isa.send(isa.remote_address(place, rank), qk, ready)

    def store(self) -> None:
        """Makes the live rows pending, and moves the window."""
        at, isa = self.at, self.at.isa
        with isa.when(self.first):
            for turn, (q, k, _, *entries) in enumerate(self.held):
                row = self.row(turn)
                head = (at.value_row + row) * at.sizes.key_heads + at.key_head
                for name, value in (("q", q), ("k", k)):
                    address = isa.offset_address(at.gmem[name], head, 4 * WIDTH)
                    isa.store_global(isa.offset_address(address, at.own, 4), [value])
                _store_window(at, row, self.channel, entries[:2])
                _store_window(at, row, self.channel, entries[2:], self.distance)


class _State:
    """A thread's part of one column: runs of four along the key axis, one in `splits` of them."""

    def __init__(self, at: _Places):
        self.at, isa = at, at.isa
        head = at.layer * at.sizes.value_heads + at.value_head
        first = head * WIDTH + at.part * 4
        self.address = isa.offset_address(
            isa.offset_address(at.gmem["delta"], first, 4 * WIDTH), at.channel_of(at.column), 4
        )
        self.runs = range(WIDTH // (4 * at.tiles.splits))
        self.values = [
            [isa.load_global_floats(self.address, self._offset(run, i))[0] for i in range(4)]
            for run in self.runs
        ]

    def _offset(self, run: int, i: int) -> int:
        return (run * 4 * self.at.tiles.splits + i) * WIDTH * 4

    def store(self) -> None:
        """Writes the state back."""
        for run, values in zip(self.runs, self.values, strict=True):
            for i, value in enumerate(values):
                self.at.isa.store_global(self.address, [value], self._offset(run, i))

    def run(self, kind: str, count) -> None:
        """Advances the state by some rows; live ones leave their outputs in shared memory."""
        self.values = self.at.isa.loop(
            0, count, 1, self.values, functools.partial(self._step, kind)
        )

    def _step(self, kind: str, row, values):
        at, isa = self.at, self.at.isa
        decay, beta = isa.load_shared_floats(
            at.at[f"{kind}_gates"] + (at.group * ROWS + row) * 8, 0, 2
        )
        (v,) = isa.load_shared_floats(at.pair(f"{kind}_v", row, at.column))
        keys = self._row(f"{kind}_k", row)
        read = self._dot(keys, values)
        correction = isa.product_of(beta, isa.fma(-decay, read, v))
        if kind == "live":
            queried = self._dot(self._row("live_q", row), values)
            (qk,) = isa.load_shared_floats(at.at["qk"] + row * 4)
            out = isa.fma(qk, correction, isa.product_of(decay, queried))
            with isa.when(at.part.equals(0)):
                isa.store_shared(at.pair("out", row, at.column), [out])
        return [
            [
                isa.fma(key, correction, isa.product_of(decay, value))
                for key, value in zip(*run, strict=True)
            ]
            for run in zip(keys, values, strict=True)
        ]

    def _row(self, name: str, row):
        address = self.at.at[name] + row * (4 * WIDTH) + self.at.part * 16
        stride = 16 * self.at.tiles.splits
        return [self.at.isa.load_shared_floats(address, run * stride, 4) for run in self.runs]

    def _dot(self, vector, values):
        isa = self.at.isa
        totals = [isa.product_of(a, b) for a, b in zip(vector[0], values[0], strict=True)]
        for run in self.runs[1:]:
            totals = [
                isa.fma(a, b, total)
                for a, b, total in zip(vector[run], values[run], totals, strict=True)
            ]
        total = isa.sum_of(isa.sum_of(*totals[:2]), isa.sum_of(*totals[2:]))
        return _reduced(isa, total, self.at.tiles.splits)


def _write_outputs(at: _Places, values: _Values) -> None:
    """Norms each head's outputs over the cluster, gates and stores them; dead rows are zero."""
    isa, columns, splits = at.isa, at.tiles.columns, at.tiles.splits
    isa.sync_threads(0, at.threads)
    outs = []
    for row, column, *_ in values.items:
        (out,) = isa.load_shared_floats(at.pair("out", row, column))
        out = isa.select_float(row < at.num_live, out, isa.Float(0.0))
        square = _reduced(isa, isa.product_of(out, out), columns)
        with isa.when(column < splits):
            place = ((at.group * ROWS + row) * splits + at.rank) * 4
            isa.send(
                isa.remote_address(at.at["squares"] + place, column),
                square,
                isa.remote_address(at.at["normed"], column),
            )
        outs.append(out)
    isa.barrier_wait(at.at["normed"], isa.Word(0))
    for out, (row, column, _, _, _, gate) in zip(outs, values.items, strict=True):
        place = at.at["squares"] + (at.group * ROWS + row) * (4 * splits)
        parts = [
            part
            for offset in range(0, 4 * splits, 16)
            for part in isa.load_shared_floats(place, offset, 4)
        ]
        mean = isa.product_of(functools.reduce(isa.sum_of, parts), isa.Float(1 / WIDTH))
        scale = isa.rsqrt(isa.sum_of(mean, isa.Float(at.sizes.eps)))
        weight_at = at.layer * WIDTH + at.channel_of(column)
        (weight,) = isa.load_global_floats(isa.offset_address(at.gmem["norm"], weight_at, 4))
        normed = isa.product_of(isa.product_of(out, scale), weight)
        isa.store_global(at.value("out", row, column), [isa.product_of(normed, gate)])
