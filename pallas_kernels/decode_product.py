"""Decode products: a few rows of activations times a packed matrix, near the read bandwidth.

`y[R, N] = x[R, K] @ W[layer].T` for R = 8 or 16. The grid is persistent, and a block of threads
takes one unit of 16 outputs after the other. A producer thread streams the unit's blocks of 256
weights through a ring of stages, one block for each warp of a consumer warpgroup; the warpgroups
take stages in turn, so that all of them end together. Two more warps add the consumers' sums, and
those of the blocks of threads of a cluster where K is split over one, in a fixed order: a row's
bits depend on nothing but that row, and on the cut.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx
from pallas_kernels.decode_blocks import ROWS, WEIGHTS, Block

type Epilogue = Literal["none", "silu_gate"]

_RUN = 32
_STAGE_BLOCKS = 4  # one for each warp of a warpgroup
_SUM_BUFFERS = 2
_FINISHERS = 64  # threads that add sums: two warps of the producer's warpgroup
_SHARED_LIMIT = 232448 - 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a decode product is cut up.

    Attributes:
      warpgroups: consumers in a block of threads, 1 to 4.
      stages: stages of the ring, of four blocks of weights each; at least `warpgroups`.
      cluster: blocks of threads that share a unit, each with a part of K.
      grid: blocks of threads, a multiple of `cluster`.
      prefetch: stages beyond the ring whose bytes are called into the cache at the start.
      overlap: fill the ring before the previous kernel has ended (programmatic dependent
        launch); then no kernel may write the layer index.
    """

    warpgroups: int = 3
    stages: int = 9
    cluster: int = 1
    grid: int = 132
    prefetch: int = 0
    overlap: bool = False

    def __post_init__(self):
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"{self.warpgroups=} must be 1 to 4: registers hold no more")
        if not self.warpgroups <= self.stages <= 32:
            raise ValueError(f"{self.stages=} must be {self.warpgroups=} to 32")
        if self.grid % self.cluster:
            raise ValueError(f"{self.grid=} must be a multiple of {self.cluster=}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Activations:
    """Activations as the kernels read them: float16, with what the accumulators start from.

    Row r is divided by scales[r], a power of two that brings its largest magnitude to 256..512, so
    nothing overflows and rounding is 2^-12 of a value.

    Attributes:
      blocks: uint32 [K / 256, words]: for each run of 32, row and quad lane t, the eight float16
        of elements 4t..4t+3 and 16+4t..16+4t+3, elements 2 and 3 of each four divided by 16 (see
        `decode_blocks`); then float32 accumulator starts [run, R / 8, t, 2 starts, 2 columns];
        then, for blocks with mins, fragments of the sums over runs [R / 8, 32 lanes, 2], as high
        and low float16.
      scales: float32 [R].
    """

    blocks: jax.Array
    scales: jax.Array


def prepare(x: jax.Array, block: Block) -> Activations:
    """Returns activations [R, K] (R = 8 or 16) as products with this kind of block read them."""
    rows, k = x.shape
    tiles, blocks = rows // 8, k // WEIGHTS
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=1))
    scaled = jnp.ldexp(x, 9 - exponent[:, None]).reshape(rows, k // _RUN, 2, 4, 2, 2)
    # Dims: row, run, half s, lane t, e, o; the pairs e = 1 meet codes four bits higher.
    divided = scaled * jnp.array([1, 1 / 16], jnp.float32).reshape(1, 1, 1, 1, 2, 1)
    stored = divided.astype(jnp.float16)
    halves = stored.astype(jnp.float32).sum(axis=(3, 5))  # row, run, s, e
    # A lane's columns are 2t and 2t + 1.
    starts = block.starts(halves).reshape(tiles, 4, 2, -1, 2).transpose(3, 0, 1, 4, 2)
    parts = [_words(stored.transpose(1, 0, 3, 2, 4, 5).reshape(-1, 2)), _words(starts)]
    if block.has_mins:
        sums = (halves * jnp.array([1, 16], jnp.float32).reshape(1, 1, 1, 2)).sum(axis=(2, 3))
        high = sums.astype(jnp.float16)
        low = (sums - high.astype(jnp.float32)).astype(jnp.float16)
        both = jnp.stack([high, low], -1).reshape(tiles, 8, blocks, 4, 2, 2)
        # Dims become block, tile, g, t, part, pair.
        parts.append(_words(both.transpose(2, 0, 1, 3, 5, 4).reshape(-1, 2)))
    words = jnp.concatenate([part.reshape(blocks, -1) for part in parts], axis=1)
    return Activations(blocks=words, scales=jnp.ldexp(jnp.float32(1), exponent - 9))


def _words(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint32)


def default_tiles(block: Block, outputs: int, k: int, rows: int = 8) -> Tiles:
    """Returns the cut that the rule of thumb gives: the fewest parts of K that fit, deep rings."""
    # An H200 has room for 66 clusters of two, 30 of four, 15 of eight.
    for cluster, grid in ((1, 132), (2, 132), (4, 120), (8, 120)):
        for stages in (9, 8, 7, 6, 5, 4, 3):
            tiles = Tiles(stages=stages, cluster=cluster, grid=grid)
            if k % (WEIGHTS * cluster) == 0 and (
                _Cut.sized(block, tiles, "none", rows, outputs // ROWS, k).shared_bytes
                <= _SHARED_LIMIT
            ):
                return tiles
    raise ValueError(f"{k=} with {rows=} fits no cut; split the matrix along k")


def decode_product(
    x: Activations,
    weights: jax.Array,
    layer: jax.Array,
    block: Block,
    tiles: Tiles,
    epilogue: Epilogue = "none",
) -> jax.Array:
    """Returns float32 [R, N]: `x @ W[layer].T`; or [R, N / 2]: `silu(gate) * up`.

    Args:
      x: of `prepare` with the same block.
      weights: uint32 [layers, N / 16, K / 256 * block.words], of `block.tile`.
      layer: int32 [1].
      block: kind of block, of `decode_blocks.BLOCKS`.
      tiles: cuts.
      epilogue: "silu_gate" takes the first 8 rows of every 16 of W as gates of the last 8.

    Raises:
      ValueError: sizes that do not fit each other, or tiles that need too much shared memory.
    """
    cut = _Cut.of(x, weights, block, tiles, epilogue)

    def body(*refs):
        inline = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        inline(functools.partial(_start_kernel, cut))(*refs)
        if tiles.overlap:
            plgpu.griddepcontrol_wait()
        inline(functools.partial(_stream_kernel, cut))(*refs)

    cluster = dict(cluster=(tiles.cluster,), cluster_names=("part",)) if tiles.cluster > 1 else {}
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((cut.rows, cut.outputs), jnp.float32),
        scratch_types=[plgpu.SMEM((size,), jnp.uint32) for size in cut.shared_words],
        grid=(tiles.grid // tiles.cluster,),
        grid_names=("block",),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=f"decode_product_{block.format.name}_kernel",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **cluster,
    )(weights, layer, x.blocks, x.scales)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """Static sizes of one product; `blocks` are those of one part of K of a unit."""

    tiles: Tiles
    block: Any
    epilogue: Epilogue
    rows: int
    units: int
    blocks: int
    operand_bytes: int

    @classmethod
    def sized(cls, block: Block, tiles: Tiles, epilogue: Epilogue, rows, units, k) -> "_Cut":
        words = 1024 + 128 + (64 if block.has_mins else 0)
        return cls(
            tiles=tiles,
            block=block,
            epilogue=epilogue,
            rows=rows,
            units=units,
            blocks=k // WEIGHTS // tiles.cluster,
            operand_bytes=words * 4 * (rows // 8),
        )

    @classmethod
    def of(cls, x: Activations, weights, block: Block, tiles: Tiles, epilogue) -> "_Cut":
        (blocks, _), (rows,), (_, units, words) = x.blocks.shape, x.scales.shape, weights.shape
        if rows not in (8, 16):
            raise ValueError(f"{rows=} must be 8 or 16; pad the activations")
        if blocks * block.words != words:
            raise ValueError(f"{words=} of a unit do not hold K={blocks * WEIGHTS} weights a row")
        if blocks % tiles.cluster:
            raise ValueError(f"{blocks=} of 256 weights must split into {tiles.cluster=} parts")
        if epilogue not in ("none", "silu_gate"):
            raise ValueError(f"{epilogue=} must be 'none' or 'silu_gate'")
        cut = cls.sized(block, tiles, epilogue, rows, units, blocks * WEIGHTS)
        if x.blocks.shape[1] * 4 != cut.operand_bytes:
            raise ValueError(f"activations were not prepared for {block.format.name!r} blocks")
        if cut.shared_bytes > _SHARED_LIMIT:
            raise ValueError(
                f"{cut.shared_bytes} bytes of shared memory exceed {_SHARED_LIMIT}; "
                f"take fewer stages or a larger cluster than {tiles=}"
            )
        return cut

    @property
    def outputs(self) -> int:
        return self.units * (ROWS if self.epilogue == "none" else ROWS // 2)

    @property
    def block_bytes(self) -> int:
        return self.block.words * 4

    @property
    def steps(self) -> int:
        """Stages that a part of a unit takes."""
        return -(-self.blocks // _STAGE_BLOCKS)

    @property
    def tail_blocks(self) -> int:
        """Blocks in the last of those stages."""
        return (self.blocks - 1) % _STAGE_BLOCKS + 1

    @property
    def stage_bytes(self) -> int:
        return _STAGE_BLOCKS * self.block_bytes

    @property
    def unit_bytes(self) -> int:
        return self.blocks * self.tiles.cluster * self.block_bytes

    @property
    def groups(self) -> int:
        """Clusters, or blocks of threads that stand alone."""
        return self.tiles.grid // self.tiles.cluster

    @property
    def turns(self) -> int:
        """The most units that one of them takes."""
        return -(-self.units // self.groups)

    @property
    def sums_bytes(self) -> int:
        """The sums of a unit: float32 [R / 8, 128]."""
        return self.rows // 8 * 512

    @property
    def consumers(self) -> int:
        """Warps that multiply."""
        return 4 * self.tiles.warpgroups

    @property
    def shared_bytes(self) -> int:
        # Every buffer starts on 1,024 bytes.
        return sum(-(-words // 256) * 1024 for words in self.shared_words)

    @property
    def shared_words(self) -> list[int]:
        """Sizes of: ring, activations, warps' sums, sums of a cluster, barriers."""
        tiles = self.tiles
        received = self.turns * tiles.cluster if tiles.cluster > 1 else 0
        barriers = 2 * tiles.stages + self.steps + 2 * _SUM_BUFFERS + self.turns
        return [
            tiles.stages * self.stage_bytes // 4,
            self.blocks * self.operand_bytes // 4,
            _SUM_BUFFERS * self.consumers * self.sums_bytes // 4,
            max(1, received * self.sums_bytes // 4),
            2 * barriers,
        ]


class _Places:
    """Addresses and indices that both halves of the kernel use."""

    def __init__(self, cut: _Cut, refs):
        tiles = cut.tiles
        weights, layer, operand, scales, out, *shared = refs
        self.operand_gmem, self.scales, self.out = map(ptx.global_address, (operand, scales, out))
        self.ring, self.operand, self.sums, self.received, self.full = map(
            ptx.shared_address, shared
        )
        self.thread = ptx.thread_index()
        self.warp = ptx.uniform(self.thread >> 5)
        self.lane = self.thread & 31
        self.part = ptx.cluster_rank() if tiles.cluster > 1 else ptx.Word(0)
        self.group = ptx.block_index() // tiles.cluster
        self.turns = (ptx.Word(cut.units - 1 + cut.groups) - self.group) // cut.groups
        self.empty = self.full + 8 * tiles.stages
        self.ready = self.empty + 8 * tiles.stages
        self.summed = self.ready + 8 * cut.steps
        self.added = self.summed + 8 * _SUM_BUFFERS
        self.arrived = self.added + 8 * _SUM_BUFFERS
        row = ptx.load_global(ptx.global_address(layer))[0]
        self.weights = ptx.offset_address(
            ptx.offset_address(ptx.global_address(weights), row, cut.units * cut.unit_bytes),
            self.part,
            cut.blocks * cut.block_bytes,
        )

    def unit(self, cut: _Cut, turn) -> ptx.Word:
        """Returns the unit of a turn: neighbours in memory go to neighbouring blocks."""
        return turn * cut.groups + self.group


def _advance(stage, parity, stages: int, by: int = 1):
    """Returns a later place in a ring and the parity of its next phase; `by` is at most a round."""
    later = stage + by
    inside = later < stages
    return ptx.select(inside, later, later - stages), ptx.select(inside, parity, parity ^ 1)


def _source(cut: _Cut, at: _Places, turn, step) -> tuple[Any, ptx.Word | int]:
    """Returns where the weights of a step of a unit are, and their bytes."""
    size = cut.stage_bytes
    if cut.tail_blocks != _STAGE_BLOCKS:
        tail = cut.tail_blocks * cut.block_bytes
        size = ptx.select(step.equals(cut.steps - 1), tail, size)
    source = ptx.offset_address(at.weights, at.unit(cut, turn), cut.unit_bytes)
    return ptx.offset_address(source, step, cut.stage_bytes), size


def _fetch(cut: _Cut, at: _Places, turn, step, stage) -> None:
    """Starts the copy of one stage."""
    source, size = _source(cut, at, turn, step)
    ptx.barrier_expect(at.full + stage * 8, size)
    ptx.copy_bulk(at.ring + stage * cut.stage_bytes, source, size, at.full + stage * 8)


def _fetch_operand(cut: _Cut, at: _Places, step: int) -> None:
    """Starts the copy of the activations that a step of every unit meets."""
    blocks = cut.tail_blocks if step == cut.steps - 1 else _STAGE_BLOCKS
    offset, size = step * _STAGE_BLOCKS * cut.operand_bytes, blocks * cut.operand_bytes
    source = ptx.offset_address(at.operand_gmem, at.part, cut.blocks * cut.operand_bytes)
    source = ptx.offset_address(source, ptx.Word(1), offset)
    ptx.barrier_expect(at.ready + 8 * step, size)
    ptx.copy_bulk_cached(at.operand + offset, source, size, at.ready + 8 * step)


def _start_kernel(cut: _Cut, _, *refs) -> None:
    """Prepares barriers and starts the first copies, step by step as consumers will want them.

    With overlap, nothing here reads what another kernel may have written.
    """
    tiles, at = cut.tiles, _Places(cut, refs)
    counts = [(at.full, tiles.stages, 1), (at.empty, tiles.stages, 4), (at.ready, cut.steps, 1)]
    counts += [(at.summed, _SUM_BUFFERS, cut.consumers), (at.added, _SUM_BUFFERS, _FINISHERS // 32)]
    counts += [(at.arrived, cut.turns, 1)] if tiles.cluster > 1 else []
    with ptx.when(at.thread.equals(cut.consumers * 32)):
        for first, number, arrivals in counts:
            for index in range(number):
                ptx.barrier_init(first + 8 * index, arrivals)
        ptx.fence_barriers()
        if tiles.cluster > 1:
            for turn in range(cut.turns):
                ptx.barrier_expect(at.arrived + 8 * turn, tiles.cluster * cut.sums_bytes)
        if tiles.overlap:
            ptx.launch_next_kernel()
        for place in range(max(tiles.stages + tiles.prefetch, cut.steps)):
            if place < cut.steps and not tiles.overlap:
                _fetch_operand(cut, at, place)
            turn, step = (ptx.Word(i) for i in divmod(place, cut.steps))
            with ptx.when(turn < at.turns):
                if place < tiles.stages:
                    _fetch(cut, at, turn, step, ptx.Word(place))
                elif place < tiles.stages + tiles.prefetch:
                    ptx.prefetch_bulk(*_source(cut, at, turn, step))
    if tiles.cluster > 1:
        ptx.sync_cluster()
    else:
        ptx.sync_threads(0, cut.consumers * 32 + 128)


def _stream_kernel(cut: _Cut, _, *refs) -> None:
    tiles, at = cut.tiles, _Places(cut, refs)
    role = at.warp - cut.consumers
    with ptx.when(at.thread.equals(cut.consumers * 32)):
        if tiles.overlap:
            for step in range(cut.steps):
                _fetch_operand(cut, at, step)
        _feed(cut, at)
    with ptx.when(at.warp < cut.consumers):
        _consume(cut, at)
    with ptx.when(role - 1 < _FINISHERS // 32):
        _finish(cut, at)


def _feed(cut: _Cut, at: _Places) -> None:
    stages, steps = cut.tiles.stages, cut.steps

    def feed(place, carry):
        stage, parity = carry
        turn = place // steps
        ptx.barrier_wait(at.empty + stage * 8, parity)
        _fetch(cut, at, turn, place - turn * steps, stage)
        return _advance(stage, parity, stages)

    ptx.loop(stages, at.turns * steps, 1, (ptx.Word(0), ptx.Word(0)), feed)


class _SharedOperand:
    """The activations that block number `index` of a part of K meets."""

    def __init__(self, cut: _Cut, at: _Places, index: ptx.Word):
        self.tiles = cut.rows // 8
        base = at.operand + index * cut.operand_bytes
        self.lane_at, self.quad_at = base + at.lane * 16, base + (at.lane & 3) * 16
        self.sums_at = base + at.lane * 8
        self.values_bytes, self.starts_bytes = WEIGHTS * cut.rows * 2, 8 * self.tiles * 64

    def fragments(self, run: int, tile: int) -> list[ptx.Word]:
        """Returns the two matrix fragments of a run of 32 weights."""
        return ptx.load_shared(self.lane_at, (run * self.tiles + tile) * 512, 4)

    def starts(self, run: int, tile: int) -> list[ptx.Float]:
        """Returns what two accumulators start from."""
        offset = self.values_bytes + (run * self.tiles + tile) * 64
        return ptx.load_shared_floats(self.quad_at, offset, 4)

    def sums(self, tile: int) -> list[ptx.Word]:
        """Returns the fragment of the sums over runs."""
        offset = self.values_bytes + self.starts_bytes + tile * 256
        return ptx.load_shared(self.sums_at, offset, 2)


def _consume(cut: _Cut, at: _Places) -> None:
    """Multiplies every so many-th stage; leaves each unit's sums in shared memory."""
    tiles = cut.tiles
    worker, quarter = at.warp >> 2, at.warp & 3
    ragged = cut.tail_blocks != _STAGE_BLOCKS

    def take_stage(step, carry):
        stage, parity, totals = carry
        index = step * _STAGE_BLOCKS + quarter
        inside = index < cut.blocks
        ptx.barrier_wait(at.full + stage * 8, parity)
        address = at.ring + stage * cut.stage_bytes + quarter * cut.block_bytes
        loaded = cut.block.load(ptx, address, at.lane)
        ptx.sync_warp()
        with ptx.when(at.lane.equals(0)):
            ptx.barrier_arrive(at.empty + stage * 8)
        ptx.barrier_wait(at.ready + step * 8, ptx.Word(0))
        operand = _SharedOperand(cut, at, ptx.select(inside, index, 0) if ragged else index)
        added = cut.block.product(ptx, loaded, operand, totals)
        if ragged:
            added = [
                [ptx.select_float(inside, new, old) for new, old in zip(*pair, strict=True)]
                for pair in zip(added, totals, strict=True)
            ]
        return (*_advance(stage, parity, tiles.stages, tiles.warpgroups), added)

    def take_unit(turn, carry):
        first, *place = carry
        totals = [[ptx.Float(0.0)] * 4 for _ in range(cut.rows // 8)]
        *place, totals = ptx.loop(first, cut.steps, tiles.warpgroups, (*place, totals), take_stage)
        buffer = turn % _SUM_BUFFERS
        ptx.barrier_wait(at.added + buffer * 8, (turn // _SUM_BUFFERS & 1) ^ 1)
        slot = at.sums + (buffer * cut.consumers + at.warp) * cut.sums_bytes
        for tile, total in enumerate(totals):
            ptx.store_shared(slot + at.lane * 16, total, tile * 512)
        ptx.sync_warp()
        with ptx.when(at.lane.equals(0)):
            ptx.barrier_arrive(at.summed + buffer * 8)
        taken = (ptx.Word(cut.steps + tiles.warpgroups - 1) - first) // tiles.warpgroups
        return (first + taken * tiles.warpgroups - cut.steps, *place)

    ptx.loop(0, at.turns, 1, (worker, worker, ptx.Word(0)), take_unit)


def _finish(cut: _Cut, at: _Places) -> None:
    """Adds the sums of the warps, then of the cluster, and stores outputs."""
    tiles, num_tiles = cut.tiles, cut.rows // 8
    thread = at.thread - (cut.consumers * 32 + 32)
    outputs = _Outputs(cut, at, thread)

    def add(turn, carry):
        buffer = turn % _SUM_BUFFERS
        ptx.barrier_wait(at.summed + buffer * 8, turn // _SUM_BUFFERS & 1)
        first = at.sums + buffer * (cut.consumers * cut.sums_bytes)

        def read(row, column, tile):
            # Where `ptx.mma` keeps an output: lane 4 (row % 8) + column / 2.
            place = (row & 7) * 64 + (column >> 1) * 16 + (row >> 3) * 8 + (column & 1) * 4
            return _sum(first + place, tile * 512, cut.sums_bytes, cut.consumers)

        if tiles.cluster == 1:
            outputs.store(turn, read)
        else:
            target = turn % tiles.cluster
            barrier = ptx.remote_address(at.arrived + turn * 8, target)
            slot = at.received + (turn * tiles.cluster + at.part) * cut.sums_bytes
            for tile in range(num_tiles):
                for half in range(2):
                    row, column = thread & 15, (thread >> 4) + 4 * half
                    remote = ptx.remote_address(slot + (column * 16 + row) * 4 + tile * 512, target)
                    ptx.send(remote, read(row, column, tile), barrier)
        ptx.sync_warp()
        with ptx.when(at.lane.equals(0)):
            ptx.barrier_arrive(at.added + buffer * 8)
        return carry

    def add_cluster(turn, carry):
        ptx.barrier_wait(at.arrived + turn * 8, ptx.Word(0))
        first = at.received + turn * (tiles.cluster * cut.sums_bytes)
        outputs.store(
            turn,
            lambda row, column, tile: _sum(
                first + (column * 16 + row) * 4, tile * 512, cut.sums_bytes, tiles.cluster
            ),
        )
        return carry

    ptx.loop(0, at.turns, 1, ptx.Word(0), add)
    if tiles.cluster > 1:
        ptx.loop(at.part, at.turns, tiles.cluster, ptx.Word(0), add_cluster)


def _sum(address: ptx.Word, offset: int, stride: int, number: int) -> ptx.Float:
    """Returns the sum of floats a stride apart in shared memory, first to last."""
    values = [ptx.load_shared_floats(address, offset + i * stride)[0] for i in range(number)]
    return functools.reduce(lambda a, b: a + b, values[1:], values[0])


class _Outputs:
    """Scales the sums of a unit and stores what the epilogue makes of them."""

    def __init__(self, cut: _Cut, at: _Places, thread: ptx.Word):
        self.cut, self.at = cut, at
        height = 4 if cut.epilogue == "none" else 3  # log2 of the outputs of a unit
        self.row, first = thread & (1 << height) - 1, thread >> height
        columns = [first, first + 4] if cut.epilogue == "none" else [first]
        self.places = [(c, tile) for tile in range(cut.rows // 8) for c in columns]
        self.scales = [
            ptx.as_float(
                ptx.load_global_coherent(ptx.offset_address(at.scales, column + 8 * tile, 4))
            )
            for column, tile in self.places
        ]

    def store(self, turn: ptx.Word, read: Callable[..., ptx.Float]) -> None:
        """Stores the unit of a turn from its sums `read(row, column, tile)`."""
        cut, unit = self.cut, self.at.unit(self.cut, turn)
        for (column, tile), scale in zip(self.places, self.scales, strict=True):
            value = read(self.row, column, tile) * scale
            if cut.epilogue == "silu_gate":
                value = ptx.silu(value) * (read(self.row + 8, column, tile) * scale)
            index = (column + 8 * tile) * cut.outputs + unit * (cut.outputs // cut.units) + self.row
            ptx.store_global(ptx.offset_address(self.at.out, index, 4), value)
