"""The Gated DeltaNet layer of a prompt on the tensor cores, for sm_90 GPUs.

Chunks of 64 rows. What does not depend on the state is made for all of them at once
(`deltanet_rows.py`, `deltanet_chunks.py`), then one kernel goes through them in order. With the
state S before a chunk, exp(G) and exp(G_last - G) of its rows as diagonal matrices D and E, and
d = exp(G_last):

    N = solve (V - D K S)           corrections of all rows
    O = D Q S + scores N            outputs
    S = d S + K^T E N               the state after the chunk

Columns of S do not meet, so a warp takes 16 of them through all chunks, transposed: then S, N and
what they are made of are sums of one product and left-hand operands of the next in the same thread
(`split_tiles.fragment`), and only K, Q, solve and scores come from shared memory, where a block's
four warps share them and the copy engine brings those of the chunk after next.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import ptx
from pallas_kernels.delta_rule import CHUNK
from pallas_kernels.deltanet_chunks import (
    GROWN_AT,
    KEYS,
    KEYS_BYTES,
    MIX,
    MIX_BYTES,
    MOST_GROUPS,
    SCORES_AT,
    SOLVE_AT,
    SPLITS,
    TAIL_AT,
    TAPS,
    THREADS,
    VALUES_BYTES,
    WIDTH,
    MixMemory,
    Plan,
    mix_kernel,
    value_offset,
)
from pallas_kernels.deltanet_decode import Columns
from pallas_kernels.deltanet_layer import Inputs, Memory, Parameters, Sizes
from pallas_kernels.deltanet_rows import gated_rows, prepared_rows
from pallas_kernels.lane_kernel import lane_kernel
from pallas_kernels.split_tiles import RightOfColumns, RightOfRows, fragment, multiply

_STAGES = 2
_STAGE_BYTES = KEYS_BYTES + MIX_BYTES + VALUES_BYTES
_ROW_TILES, _KEY_TILES = CHUNK // 8, WIDTH // 8
_VALUE_ROW = VALUES_BYTES // CHUNK
_TOGETHER = 8  # sums whose products alternate: about as many as the latency of one has room for

SCAN_BYTES = _STAGES * (_STAGE_BYTES + 8)
"""Shared memory of a block of the scan: stages, then a barrier for each."""


def fits(sizes: Sizes) -> bool:
    """Returns whether there is a kernel for a layer of these sizes."""
    groups = sizes.value_heads // sizes.key_heads
    return sizes.width == WIDTH and sizes.taps == TAPS and groups <= MOST_GROUPS


def gdn_prefill(
    x: Inputs,
    parameters: Parameters,
    memory: Memory,
    layer: Int[Array, ""],
    start: Int[Array, ""],
    num_pending: Int[Array, ""],
    num_live: Int[Array, ""],
    sizes: Sizes,
    first: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> tuple[Float[Array, "rows values"], Memory]:
    """Returns the gated outputs of a chunk of a prompt, and the memory after it.

    As `gdn_prefill_reference`, but pending rows are folded as a chunk of their own: states agree
    with one-by-one processing to about 1e-5, not to the bit.

    Args:
      x: the chunk, a multiple of `delta_rule.CHUNK` rows; fields may be one wider matrix.
      parameters: of all layers.
      memory: of all layers; states change in place.
      layer: which.
      start: where the history of the first row begins inside the window.
      num_pending: pending rows that were accepted; the others are forgotten.
      num_live: rows that count; outputs of later ones are zero.
      sizes: of the layer; see `fits`.
      first: the column where u, z, a and b begin in their matrix.

    Raises:
      ValueError: sizes that have no kernel, or rows that do not fill chunks.
    """
    if not fits(sizes):
        raise ValueError(
            f"{sizes=} have no kernel: it needs width {WIDTH}, {TAPS} taps and at most "
            f"{MOST_GROUPS} value heads a key head; use gdn_prefill_reference"
        )
    (rows, _), pending = x.u.shape, memory.pending
    if rows % CHUNK or not rows:
        raise ValueError(f"{rows=} must be a positive multiple of {CHUNK=}; pad the rows")
    if pending.k.shape[1] > CHUNK:
        raise ValueError(f"{pending.k.shape[1]=} pending rows must be at most {CHUNK=}")
    x, columns = _readable(x, Columns.of(x, first), sizes)
    plan = Plan(sizes=sizes, rows=rows, pending_rows=pending.k.shape[1], columns=columns)
    # A gather: a slice would become part of the kernel's launch, with its start read by the host.
    kept = start + jnp.arange(sizes.history)
    history = memory.window.at[layer, kept].get(mode="clip")
    counts = [jnp.reshape(n, 1) for n in (layer, num_pending, num_live)]
    images, values = prepared_rows(plan, x.u, history, parameters.conv, pending, counts)
    mixes = _call(
        functools.partial(mix_kernel, ptx, plan),
        jax.ShapeDtypeStruct((sizes.value_heads, plan.chunks, MIX_BYTES // 4), jnp.uint32),
        name="gdn_prefill_mix_kernel",
        grid=plan.chunks * sizes.key_heads,
        shared=MixMemory(plan.groups).bytes,
    )(images, *_gates(x, parameters, memory, layer, num_pending, num_live))
    # Without pending rows their chunk is left out.
    start_chunk = jnp.reshape((num_pending <= 0).astype(jnp.int32), 1)
    delta = jax.new_ref(memory.delta)
    out = _call(
        functools.partial(scan_kernel, ptx, plan),
        jax.ShapeDtypeStruct((rows, sizes.value_heads * WIDTH), jnp.float32),
        name="gdn_prefill_scan_kernel",
        grid=sizes.value_heads * SPLITS,
        shared=SCAN_BYTES,
    )(images, mixes, values, counts[0], start_chunk, delta)
    gated = gated_rows(plan, out, x.z, parameters.norm, counts[0])
    memory = Memory(
        delta=jax.freeze(delta),
        window=lax.dynamic_update_slice(
            memory.window, _next_history(x.u, columns, history, num_live)[None], (layer, 0, 0)
        ),
        pending=pending,
    )
    return gated, memory


def _call(kernel, out_type, *, name: str, grid: int, shared: int):
    return lane_kernel(
        kernel,
        out_type,
        name=name,
        grid=grid,
        warpgroups=THREADS // 128,
        shared=[shared],
        follows=True,
    )


def _readable(x: Inputs, columns: Columns, sizes: Sizes) -> tuple[Inputs, Columns]:
    """Returns inputs whose u is read by four columns at once, and a and b by themselves."""

    def alone(name: str, width: int):
        _, column = getattr(columns, name)
        return getattr(x, name)[:, column : column + width]

    u, at = x.u, columns.u
    if any(n % 4 for n in at):
        u, at = alone("u", sizes.channels), (sizes.channels, 0)
    a, b = (alone(name, sizes.value_heads) for name in ("a", "b"))
    return Inputs(u=u, z=x.z, a=a, b=b), dataclasses.replace(columns, u=at)


def _gates(x: Inputs, parameters: Parameters, memory: Memory, layer, num_pending, num_live):
    """Returns g and beta [rows, value_heads] of the pending rows' chunk and of the rows after it.

    Padding has zeros: it changes no state.
    """
    g = parameters.decay[layer][None] * jax.nn.softplus(x.a + parameters.dt_bias[layer][None])

    def joined(old, new):
        row = jnp.arange(CHUNK + len(new))
        both = jnp.concatenate([old, jnp.zeros((CHUNK - len(old), new.shape[1])), new])
        live = jnp.where(row < CHUNK, row < num_pending, row - CHUNK < num_live)
        return jnp.where(live[:, None], both, 0.0)

    pending = memory.pending
    return joined(pending.g[layer], g), joined(pending.beta[layer], jax.nn.sigmoid(x.b))


def _next_history(u, columns: Columns, history, num_live):
    """Returns the last rows of the history and the live rows together."""
    (count, channels), (_, column) = history.shape, columns.u
    row = num_live + jnp.arange(count)
    new = u[jnp.maximum(row - count, 0), column : column + channels]
    return jnp.where((row < count)[:, None], history[jnp.minimum(row, count - 1)], new)


class _Scan:
    """Where a thread is: a block takes half of a value head's columns, a warp 16 of them."""

    def __init__(self, isa, plan: Plan, *refs):
        self.isa, self.plan = isa, plan
        *arrays, layer, first, delta, out, shared = refs
        self.images, self.mixes, self.values = (isa.global_address(ref) for ref in arrays)
        layer, self.first = (
            isa.uniform(isa.load_global(isa.global_address(ref))[0]) for ref in (layer, first)
        )
        self.shared = isa.shared_address(shared)
        self.barriers = self.shared + _STAGES * _STAGE_BYTES
        self.thread, self.lane = isa.thread_index(), isa.thread_index() & 31
        warp, self.block = isa.uniform(self.thread >> 5), isa.block_index()
        heads, head = plan.sizes.value_heads, self.block // SPLITS
        self.head, self.key_head = head, head % plan.sizes.key_heads
        # Of a tile of sums [16 columns, 8]: rows g and g + 8, columns 2t and 2t + 1.
        self.pair, self.column = (self.lane & 3) * 2, warp * 16 + (self.lane >> 2)
        column = (self.block % SPLITS) * (WIDTH // SPLITS) + self.column
        self.row_bytes = heads * WIDTH * 4
        out = isa.offset_address(isa.global_address(out), head * WIDTH + column, 4)
        self.out = isa.offset_address(out, self.pair, self.row_bytes)
        row = (layer * heads + head) * WIDTH + self.pair
        delta = isa.offset_address(isa.global_address(delta), row, WIDTH * 4)
        self.state = isa.offset_address(delta, column, 4)

    def fetch(self, chunk, stage) -> None:
        """Starts the copies of a chunk's matrices, if there is one; one thread does."""
        isa, chunks = self.isa, self.plan.chunks
        with isa.when(self.thread.equals(0)), isa.when(chunk < chunks):
            full, place = self.barriers + stage * 8, self.shared + stage * _STAGE_BYTES
            isa.barrier_expect(full, _STAGE_BYTES)
            source = isa.offset_address(self.images, self.key_head * chunks + chunk, KEYS_BYTES)
            isa.copy_bulk_cached(place, source, KEYS_BYTES, full)
            source = isa.offset_address(self.mixes, self.head * chunks + chunk, MIX_BYTES)
            isa.copy_bulk_cached(place + KEYS_BYTES, source, MIX_BYTES, full)
            source = isa.offset_address(self.values, self.block * chunks + chunk, VALUES_BYTES)
            place = place + (KEYS_BYTES + MIX_BYTES)
            isa.copy_bulk_cached(place, source, VALUES_BYTES, full)


def _tile_offsets(row_bytes: int, tile: int) -> list[int]:
    """Returns byte offsets of a thread's four sums of a transposed tile in an array by rows."""
    return [(8 * tile + i % 2) * row_bytes + 32 * (i // 2) for i in range(4)]


def scan_kernel(isa, plan: Plan, *refs) -> None:
    """Runs one thread of the kernel that goes through the chunks.

    Args:
      isa: instructions: `ptx`, or a model of them.
      plan: sizes.
      *refs: images, mixes, values, layer, first chunk, states, outputs and shared memory.
    """
    at = _Scan(isa, plan, *refs)
    with isa.when(at.thread.equals(0)):
        for stage in range(_STAGES):
            isa.barrier_init(at.barriers + 8 * stage, 1)
        isa.fence_barriers()
    isa.sync_threads(0, THREADS)
    for stage in range(_STAGES):
        at.fetch(at.first + stage, isa.Word(stage))
    state = [
        [isa.load_global_floats(at.state, offset)[0] for offset in _tile_offsets(4 * WIDTH, tile)]
        for tile in range(_KEY_TILES)
    ]

    def step(chunk, state):
        index = chunk - at.first
        stage = index & 1
        state = _advance(at, chunk, stage, (index >> 1) & 1, state)
        isa.sync_threads(0, THREADS)
        at.fetch(chunk + _STAGES, stage)
        return state

    state = isa.loop(at.first, plan.chunks, 1, state, step)
    for tile, values in enumerate(state):
        for value, offset in zip(values, _tile_offsets(4 * WIDTH, tile), strict=True):
            isa.store_global(at.state, [value], offset)


def _advance(at: _Scan, chunk, stage, parity, state):
    """Returns the state after a chunk, and stores its outputs."""
    isa = at.isa
    base = at.shared + stage * _STAGE_BYTES
    isa.barrier_wait(at.barriers + stage * 8, parity)
    read, queried = _read_state(at, base, state)
    mix = base + KEYS_BYTES
    grown, tail = (_pairs(at, mix + place) for place in (GROWN_AT, TAIL_AT))
    residual = _residual(at, mix + MIX_BYTES, read, grown)
    nothing = [[isa.Float(0.0)] * 4 for _ in range(_ROW_TILES)]
    corrections = _mixed(at, mix + SOLVE_AT, residual, nothing)
    outs = _mixed(at, mix + SCORES_AT, corrections, _scaled(isa, queried, grown))
    with isa.when(isa.Word(0) < chunk):
        place = isa.offset_address(at.out, chunk - 1, CHUNK * at.row_bytes)
        for tile, sums in enumerate(outs):
            for value, offset in zip(sums, _tile_offsets(at.row_bytes, tile), strict=True):
                isa.store_global(place, [value], offset)
    (decay,) = isa.load_shared_floats(mix + GROWN_AT, 4 * (CHUNK - 1))
    state = [[isa.product_of(value, decay) for value in values] for values in state]
    keys = RightOfColumns(isa, KEYS, base, at.lane)
    written = _scaled(isa, corrections, tail)
    for index in range(CHUNK // 16):
        left = fragment(isa, *written[2 * index : 2 * index + 2])
        for tile in range(0, _KEY_TILES, _TOGETHER):
            pairs = range(tile // 2, (tile + _TOGETHER) // 2)
            rights = [right for pair in pairs for right in keys.load(index, pair)]
            places = slice(tile, tile + _TOGETHER)
            state[places] = multiply(isa, [left] * _TOGETHER, rights, state[places])
    return state


def _residual(at: _Scan, base, read, grown):
    """Returns (V - D K S)^T of values in shared memory."""
    isa = at.isa
    # Rows 8 apart, and columns 32 bytes apart in the swizzle's bits, are far apart alike.
    place = base + value_offset(at.pair, at.column)
    residual = []
    for tile, (found, factor) in enumerate(zip(read, grown, strict=True)):
        values = [
            isa.load_shared_floats(place ^ (32 * (i // 2)), _VALUE_ROW * (8 * tile + i % 2))[0]
            for i in range(4)
        ]
        residual.append([isa.fma(-factor[i % 2], found[i], values[i]) for i in range(4)])
    return residual


def _pairs(at: _Scan, address):
    """Returns factors of the two rows of the chunk that a thread has in each tile."""
    place = address + at.pair * 4
    return [at.isa.load_shared_floats(place, 32 * tile, 2) for tile in range(_ROW_TILES)]


def _scaled(isa, tiles, factors):
    return [
        [isa.product_of(value, factor[i % 2]) for i, value in enumerate(values)]
        for values, factor in zip(tiles, factors, strict=True)
    ]


def _read_state(at: _Scan, base, state):
    """Returns (K S)^T and (Q S)^T of a chunk, in tiles of 8 rows of the chunk."""
    isa = at.isa
    sums = [[[isa.Float(0.0)] * 4 for _ in range(_ROW_TILES)] for _ in range(2)]
    rights = [RightOfRows(isa, KEYS, base + place, at.lane) for place in (0, KEYS.bytes)]
    for step in range(WIDTH // 16):
        left = fragment(isa, *state[2 * step : 2 * step + 2])
        for tiles, right in zip(sums, rights, strict=True):
            columns = [c for pair in range(_ROW_TILES // 2) for c in right.load(step, pair)]
            tiles[:] = multiply(isa, [left] * _ROW_TILES, columns, tiles)
    return sums


def _mixed(at: _Scan, base, tiles, sums):
    """Returns sums + (M X)^T of tiles of X^T and a lower triangular M."""
    isa, sums = at.isa, list(sums)
    right = RightOfRows(isa, MIX, base, at.lane)
    for step in range(CHUNK // 16):
        left = fragment(isa, *tiles[2 * step : 2 * step + 2])
        # Rows of M above the diagonal block have zeros here.
        pairs = range(step, _ROW_TILES // 2)
        columns = [column for pair in pairs for column in right.load(step, pair)]
        sums[2 * step :] = multiply(isa, [left] * len(columns), columns, sums[2 * step :])
    return sums
