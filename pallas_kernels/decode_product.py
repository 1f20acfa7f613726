"""Decode products: a few rows of activations times a packed matrix, near the read bandwidth.

`y[R, N] = x[R, K] @ W[layer].T` for R = 8 or 16. The grid is persistent. Every consumer warpgroup
takes units of 16 outputs; its four warps take turns at the unit's blocks of 256 weights, which a
producer thread streams into the warpgroup's ring. The sums of the four warps, and of the blocks of
threads of a cluster where K is split over one, are added in a fixed order: a row's bits depend on
nothing but that row, and on the cut.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx
from pallas_kernels.decode_blocks import ROWS, WEIGHTS

_RUN = 32
_STAGE_BLOCKS = 4  # one for each warp of a warpgroup
_SHARED_LIMIT = 232448 - 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a decode product is cut up.

    Attributes:
      warpgroups: consumers in a block of threads, 1 to 4.
      stages: stages of each consumer's ring, of four blocks of weights each.
      cluster: blocks of threads that share a unit, each with a part of K.
      grid: blocks of threads, a multiple of `cluster`.
      overlap: fill the rings before the previous kernel has ended (programmatic dependent
        launch); then no kernel may write the layer index.
    """

    warpgroups: int = 3
    stages: int = 4
    cluster: int = 1
    grid: int = 132
    overlap: bool = False

    def __post_init__(self):
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"{self.warpgroups=} must be 1 to 4: one producer warp feeds each")
        if self.grid % self.cluster:
            raise ValueError(f"{self.grid=} must be a multiple of {self.cluster=}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Activations:
    """Activations as the kernels read them: float16, with what the accumulators start from.

    Row r is divided by scales[r], a power of two that brings its largest magnitude to 256..512, so
    nothing overflows and rounding is 2^-12 of a value. In every run of 32, quad lane t holds
    elements 4t..4t+3 and 16+4t..16+4t+3; elements 2 and 3 of each four are divided by 16 (see
    `decode_blocks`).

    Attributes:
      values: float16 [K / 32, R, 32].
      starts: float32 [K / 16 or K / 32, R / 8, 4, 4], accumulator starts of a quad's lanes.
      sums: uint32 [K / 256, R / 8, 32, 2], fragments of the sums over runs (high, low float16).
      scales: float32 [R].
    """

    values: jax.Array
    starts: jax.Array
    sums: jax.Array
    scales: jax.Array


def prepare(x: jax.Array, block) -> Activations:
    """Returns activations [R, K] (R = 8 or 16) as products with this kind of block read them."""
    rows, k = x.shape
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=1))
    scaled = jnp.ldexp(x, 9 - exponent[:, None]).reshape(rows, k // _RUN, 2, 4, 2, 2)
    # Dims: row, run, half s, lane t, e, o; the pairs e = 1 meet codes four bits higher.
    divisor = jnp.array([1, 1 / 16], jnp.float32).reshape(1, 1, 1, 1, 2, 1)
    stored = (scaled * divisor).astype(jnp.float16)
    kept = stored.astype(jnp.float32)
    halves = kept.sum(axis=(3, 5))  # [row, run, s, e]
    values = stored.transpose(1, 0, 3, 2, 4, 5).reshape(k // _RUN, rows, _RUN)
    starts = block.starts(halves)  # [row, runs or half runs]
    starts = starts.reshape(rows // 8, 4, 2, -1).transpose(3, 0, 1, 2)  # lane t: columns 2t, 2t+1
    sums = (halves * jnp.array([1, 16], jnp.float32).reshape(1, 1, 1, 2)).sum(axis=(2, 3))
    high = sums.astype(jnp.float16)
    low = (sums - high.astype(jnp.float32)).astype(jnp.float16)
    both = jnp.stack([high, low], -1).reshape(rows // 8, 8, k // WEIGHTS, 4, 2, 2)
    both = both.transpose(2, 0, 1, 3, 5, 4)  # [block, tile, g, t, part, pair]
    words = jax.lax.bitcast_convert_type(both, jnp.uint32).reshape(-1, rows // 8, 32, 2)
    return Activations(
        values=values,
        starts=jnp.concatenate([starts, starts], -1),
        sums=words,
        scales=jnp.ldexp(jnp.float32(1), exponent - 9),
    )


def decode_product(
    x: Activations, tiles_of_weights: jax.Array, layer: jax.Array, block, tiles: Tiles
) -> jax.Array:
    """Returns float32 [R, N]: `x @ W[layer].T`.

    Args:
      x: of `prepare` with the same block.
      tiles_of_weights: uint32 [layers, N / 16, K / 256 * block.words], of `block.tile`.
      layer: int32 [1].
      block: kind of block, an object of `decode_blocks`.
      tiles: cuts.

    Raises:
      ValueError: sizes that do not fit each other, or tiles that need too much shared memory.
    """
    cut = _Cut.of(x, tiles_of_weights, block, tiles)

    def body(*refs):
        inline = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        inline(functools.partial(_start_kernel, cut))(*refs)
        if tiles.overlap:
            plgpu.griddepcontrol_wait()
        inline(functools.partial(_stream_kernel, cut))(*refs)

    cluster = dict(cluster=(tiles.cluster,), cluster_names=("part",)) if tiles.cluster > 1 else {}
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((cut.rows, cut.units * ROWS), jnp.float32),
        scratch_types=[plgpu.SMEM((size,), jnp.uint32) for size in cut.shared_words],
        grid=(tiles.grid // tiles.cluster,),
        grid_names=("block",),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="decode_product_kernel",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **cluster,
    )(tiles_of_weights, layer, x.values, x.starts, x.sums, x.scales)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """Static sizes of one product; `blocks` and the activation sizes are of one part of K."""

    tiles: Tiles
    block: Any
    rows: int
    units: int
    blocks: int
    start_words: int

    @classmethod
    def of(cls, x: Activations, weights: jax.Array, block, tiles: Tiles) -> "_Cut":
        runs, rows, _ = x.values.shape
        _, units, words = weights.shape
        if runs * _RUN // WEIGHTS * block.words != words:
            raise ValueError(f"{words=} of a unit do not hold K={runs * _RUN} weights a row")
        if rows not in (8, 16):
            raise ValueError(f"{rows=} must be 8 or 16; pad the activations")
        if runs * _RUN % (WEIGHTS * tiles.cluster):
            raise ValueError(f"{runs=} of 32 must split into {tiles.cluster=} parts of blocks")
        cut = cls(
            tiles=tiles,
            block=block,
            rows=rows,
            units=units,
            blocks=runs * _RUN // WEIGHTS // tiles.cluster,
            start_words=x.starts.size // runs * 8,
        )
        if (size := sum(cut.shared_words) * 4) > _SHARED_LIMIT:
            raise ValueError(f"{size} bytes of shared memory exceed {_SHARED_LIMIT}; cut {tiles=}")
        return cut

    @property
    def stages_per_unit(self) -> int:
        return -(-self.blocks // _STAGE_BLOCKS)

    @property
    def stage_bytes(self) -> int:
        return _STAGE_BLOCKS * self.block.words * 4

    @property
    def tail_bytes(self) -> int:
        return ((self.blocks - 1) % _STAGE_BLOCKS + 1) * self.block.words * 4

    @property
    def unit_bytes(self) -> int:
        return self.blocks * self.tiles.cluster * self.block.words * 4

    @property
    def value_bytes(self) -> int:
        return self.blocks * WEIGHTS * self.rows * 2

    @property
    def start_bytes(self) -> int:
        return self.blocks * self.start_words * 4

    @property
    def sum_bytes(self) -> int:
        return self.blocks * self.rows // 8 * 256

    @property
    def workers(self) -> int:
        return self.tiles.grid // self.tiles.cluster * self.tiles.warpgroups

    @property
    def turns(self) -> int:
        """The most units that one consumer takes."""
        return -(-self.units // self.workers)

    @property
    def shared_words(self) -> list[int]:
        """Sizes of: ring, values, starts, sums, partial sums, received sums, barriers."""
        tiles = self.tiles
        received = self.turns * (tiles.cluster - 1) * 128 * (self.rows // 8)
        return [
            tiles.warpgroups * tiles.stages * self.stage_bytes // 4,
            self.value_bytes // 4,
            self.start_bytes // 4,
            self.sum_bytes // 4,
            tiles.warpgroups * 2 * 4 * 128 * (self.rows // 8),
            max(1, tiles.warpgroups * received),
            2 * (tiles.warpgroups * (2 * tiles.stages + self.turns) + 1),
        ]


class _Places:
    """Addresses and indices that both halves of the kernel use."""

    def __init__(self, cut: _Cut, refs):
        tiles = cut.tiles
        weights, layer, values, starts, sums, scales, out, *shared = refs
        self.gmem = [ptx.global_address(ref) for ref in (values, starts, sums)]
        self.scales, self.out = ptx.global_address(scales), ptx.global_address(out)
        (self.ring, *self.smem, self.partial, self.received, self.full) = (
            ptx.shared_address(ref) for ref in shared
        )
        self.thread = ptx.thread_index()
        self.warp = ptx.uniform(self.thread >> 5)
        self.lane = self.thread & 31
        self.part = ptx.cluster_rank() if tiles.cluster > 1 else ptx.Word(0)
        self.group = ptx.block_index() // tiles.cluster
        self.empty = self.full + 8 * tiles.warpgroups * tiles.stages
        self.arrived = self.empty + 8 * tiles.warpgroups * tiles.stages
        self.ready = self.arrived + 8 * tiles.warpgroups * cut.turns
        row = ptx.load_global(ptx.global_address(layer))[0]
        self.weights = ptx.offset_address(
            ptx.offset_address(ptx.global_address(weights), row, cut.units * cut.unit_bytes),
            self.part,
            cut.blocks * cut.block.words * 4,
        )
        self.clusters = tiles.grid // tiles.cluster

    def turns(self, cut: _Cut, worker) -> ptx.Word:
        """Returns how many units consumer `worker` of this block takes."""
        first = worker * self.clusters + self.group
        return (ptx.Word(cut.units - 1 + cut.workers) - first) // cut.workers

    def unit(self, cut: _Cut, worker, turn) -> ptx.Word:
        return (turn * cut.tiles.warpgroups + worker) * self.clusters + self.group


def _advance(stage, parity, stages: int):
    """Returns the next place in a ring and the parity of its next phase."""
    last = stage.equals(stages - 1)
    return ptx.select(last, 0, stage + 1), ptx.select(last, parity ^ 1, parity)


def _fetch(cut: _Cut, at: _Places, worker, turn, step, stage) -> None:
    """Starts the copy of one stage of a consumer's ring."""
    slot = worker * cut.tiles.stages + stage
    size = cut.stage_bytes
    if cut.tail_bytes != size:
        size = ptx.select(step.equals(cut.stages_per_unit - 1), cut.tail_bytes, size)
    source = ptx.offset_address(at.weights, at.unit(cut, worker, turn), cut.unit_bytes)
    source = ptx.offset_address(source, step, cut.stage_bytes)
    ptx.barrier_expect(at.full + slot * 8, size)
    ptx.copy_bulk(at.ring + slot * cut.stage_bytes, source, size, at.full + slot * 8)


def _start_kernel(cut: _Cut, _, *refs) -> None:
    """Prepares barriers and fills the rings: nothing here reads what another kernel wrote."""
    tiles, at = cut.tiles, _Places(cut, refs)
    with ptx.when(at.thread.equals(0)):
        for slot in range(tiles.warpgroups * tiles.stages):
            ptx.barrier_init(at.full + 8 * slot, 1)
            ptx.barrier_init(at.empty + 8 * slot, 4)
        for slot in range(tiles.warpgroups * cut.turns):
            ptx.barrier_init(at.arrived + 8 * slot, 1)
        ptx.barrier_init(at.ready, 1)
        ptx.fence_barriers()
    if tiles.cluster > 1:
        ptx.sync_cluster()
    else:
        ptx.sync_threads(0, (tiles.warpgroups + 1) * 128)
    worker = at.warp - 4 * tiles.warpgroups
    with ptx.when(worker < tiles.warpgroups), ptx.when(at.lane.equals(0)):
        if tiles.overlap:
            ptx.launch_next_kernel()
        total = at.turns(cut, worker) * cut.stages_per_unit
        for place in range(tiles.stages):
            turn, step = divmod(place, cut.stages_per_unit)
            with ptx.when(ptx.Word(place) < total):
                _fetch(cut, at, worker, ptx.Word(turn), ptx.Word(step), ptx.Word(place))


def _stream_kernel(cut: _Cut, _, *refs) -> None:
    tiles, at = cut.tiles, _Places(cut, refs)
    feeder = at.warp - 4 * tiles.warpgroups
    with ptx.when(feeder < tiles.warpgroups), ptx.when(at.lane.equals(0)):
        with ptx.when(feeder.equals(0)):
            _copy_activations(cut, at)
        _feed(cut, at, feeder)
    with ptx.when(at.warp < 4 * tiles.warpgroups):
        _consume(cut, at)


def _copy_activations(cut: _Cut, at: _Places) -> None:
    sizes = (cut.value_bytes, cut.start_bytes, cut.sum_bytes)
    ptx.barrier_expect(at.ready, sum(sizes))
    for source, target, size in zip(at.gmem, at.smem, sizes, strict=True):
        ptx.copy_bulk_cached(target, ptx.offset_address(source, at.part, size), size, at.ready)


def _feed(cut: _Cut, at: _Places, worker) -> None:
    stages, per_unit = cut.tiles.stages, cut.stages_per_unit

    def feed(place, carry):
        stage, parity = carry
        turn = place // per_unit
        ptx.barrier_wait(at.empty + (worker * stages + stage) * 8, parity)
        _fetch(cut, at, worker, turn, place - turn * per_unit, stage)
        return _advance(stage, parity, stages)

    total = at.turns(cut, worker) * per_unit
    ptx.loop(stages, total, 1, (ptx.Word(0), ptx.Word(0)), feed)


class _SharedOperand:
    """The activations that block number `index` of a part of K meets."""

    def __init__(self, cut: _Cut, at: _Places, index: ptx.Word):
        values, starts, sums = at.smem
        self.cut = cut
        self.values = values + index * (cut.value_bytes // cut.blocks) + at.lane * 16
        self.starts_at = starts + index * (cut.start_bytes // cut.blocks) + (at.lane & 3) * 16
        self.sums_at = sums + index * (cut.sum_bytes // cut.blocks) + at.lane * 8

    def fragments(self, run: int, tile: int) -> list[ptx.Word]:
        """Returns the two matrix fragments of a run of 32 weights."""
        return ptx.load_shared(self.values, run * self.cut.rows * 64 + tile * 512, 4)

    def start(self, run: int, tile: int) -> list[ptx.Float]:
        """Returns what an accumulator starts from."""
        return ptx.load_shared_floats(self.starts_at, (run * (self.cut.rows // 8) + tile) * 64, 4)

    def sums(self, tile: int) -> list[ptx.Word]:
        """Returns the fragment of the sums over runs."""
        return ptx.load_shared(self.sums_at, tile * 256, 2)


def _consume(cut: _Cut, at: _Places) -> None:
    tiles, num_tiles = cut.tiles, cut.rows // 8
    worker, quarter = at.warp >> 2, at.warp & 3
    ptx.barrier_wait(at.ready, ptx.Word(0))

    def take_unit(turn, place):
        totals = [[ptx.Float(0.0)] * 4 for _ in range(num_tiles)]

        def take_stage(step, carry):
            stage, parity, totals = carry
            slot = worker * tiles.stages + stage
            index = step * _STAGE_BLOCKS + quarter
            partial = cut.blocks % _STAGE_BLOCKS != 0
            inside = index < cut.blocks
            ptx.barrier_wait(at.full + slot * 8, parity)
            address = at.ring + slot * cut.stage_bytes + quarter * (cut.block.words * 4)
            loaded = cut.block.load(ptx, address, at.lane)
            ptx.sync_warp()
            with ptx.when(at.lane.equals(0)):
                ptx.barrier_arrive(at.empty + slot * 8)
            operand = _SharedOperand(cut, at, ptx.select(inside, index, 0) if partial else index)
            added = cut.block.product(ptx, loaded, operand, totals)
            if partial:
                added = jax.tree.map(
                    lambda new, old: ptx.select_float(inside, new, old),
                    added,
                    totals,
                    is_leaf=lambda leaf: isinstance(leaf, ptx.Float),
                )
            return (*_advance(stage, parity, tiles.stages), added)

        *place, totals = ptx.loop(0, cut.stages_per_unit, 1, (*place, totals), take_stage)
        _finish_unit(cut, at, worker, turn, totals)
        return tuple(place)

    zero = ptx.Word(0)
    ptx.loop(0, at.turns(cut, worker), 1, (zero, zero), take_unit)


def _finish_unit(cut: _Cut, at: _Places, worker, turn, totals) -> None:
    """Adds the four warps' sums, then the cluster's, in a fixed order, and stores the outputs."""
    tiles, thread = cut.tiles, at.thread & 127
    num_tiles = cut.rows // 8
    # Two buffers in turn: a warp that is ahead writes the other one.
    buffer = at.partial + (worker * 2 + (turn & 1)) * (4 * num_tiles * 512)
    for tile in range(num_tiles):
        ptx.store_shared(buffer + thread * 16, totals[tile], tile * 2048)
    ptx.sync_threads(worker + 1, 128)
    # Thread (column, row) of 8 x 16 outputs; see `ptx.mma` for where a lane keeps which.
    row, column = thread & 15, thread >> 4
    place = (row & 7) * 64 + (column >> 1) * 16 + (row >> 3) * 8 + (column & 1) * 4
    unit = at.unit(cut, worker, turn)
    for tile in range(num_tiles):
        parts = [
            ptx.load_shared_floats(buffer + place, tile * 2048 + warp * 512)[0] for warp in range(4)
        ]
        total = ((parts[0] + parts[1]) + parts[2]) + parts[3]
        if tiles.cluster > 1:
            total = _gather_cluster(cut, at, worker, turn, tile, thread, total)
        column_at = column + 8 * tile
        scale = ptx.as_float(ptx.load_global_coherent(ptx.offset_address(at.scales, column_at, 4)))
        target = ptx.offset_address(at.out, column_at * (cut.units * ROWS) + unit * ROWS + row, 4)
        if tiles.cluster > 1:
            with ptx.when(at.part.equals(0)):
                ptx.store_global(target, total * scale)
        else:
            ptx.store_global(target, total * scale)


def _gather_cluster(cut: _Cut, at: _Places, worker, turn, tile, thread, total):
    """Returns, in the first block of a cluster, the sum over its blocks; others send theirs."""
    others, num_tiles = cut.tiles.cluster - 1, cut.rows // 8
    barrier = at.arrived + (worker * cut.turns + turn) * 8
    slot = ((worker * cut.turns + turn) * num_tiles + tile) * (others * 512)
    received = at.received + slot + thread * 4
    with ptx.when(at.part.differs(0)):
        mine = ptx.remote_address(received + (at.part - 1) * 512, 0)
        ptx.send(mine, total, ptx.remote_address(barrier, 0))
    if tile == 0:
        with ptx.when(at.part.equals(0)), ptx.when(thread.equals(0)):
            ptx.barrier_expect(barrier, others * num_tiles * 512)
    with ptx.when(at.part.equals(0)):
        ptx.barrier_wait(barrier, ptx.Word(0))
    for other in range(others):
        total = total + ptx.load_shared_floats(received, other * 512)[0]
    return total


def default_tiles(block, outputs: int, k: int, rows: int) -> Tiles:
    """Returns the cut that the rule of thumb gives: deep rings, the fewest parts of K that fit."""
    del outputs
    for cluster, grid in ((1, 132), (2, 132), (4, 128), (8, 128)):
        for warpgroups, stages in ((3, 4), (4, 3), (3, 3), (2, 4), (2, 3), (2, 2)):
            # For 8 rows: 16 bytes of values, 2 for each start of a run of 32, and 1 of sums.
            held = k // cluster * rows // 8 * (17 + 2 * block.starts_per_run)
            ring = warpgroups * stages * _STAGE_BLOCKS * block.words * 4
            if k % (WEIGHTS * cluster) == 0 and held + ring < _SHARED_LIMIT - 16384:
                return Tiles(warpgroups=warpgroups, stages=stages, cluster=cluster, grid=grid)
    raise ValueError(f"{k=} with {rows=} fits no cut; split the matrix along k")
