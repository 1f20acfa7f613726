"""Prefill products: many rows of activations times a packed matrix, on the tensor cores.

`y[R, N] = x[R, K] @ W[layer].T`. A block of threads takes 128 outputs and up to 256 rows. Each of
its two consumer warpgroups unpacks 64 rows of W into registers, 32 weights of a row at a time, and
multiplies them (wgmma) with activations in shared memory while it unpacks the next ones; a producer
warp streams both there. W is the one of `decode_product`: nothing is stored a second time. Every
output is one sum over K in order, so a row's bits depend on nothing but that row.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import ptx
from pallas_kernels.decode_cuts import Epilogue
from pallas_kernels.decode_words import ROWS, WEIGHTS, Block
from pallas_kernels.lane_kernel import lane_kernel
from pallas_kernels.prefill_blocks import DENSE_BLOCKS, WEIGHT_SCALE

UNITS = 8
"""Units of 16 outputs of a block of threads: one for each consumer warp."""

SLICE = 64
"""Elements of K that one copy of activations brings."""

_SLICES = WEIGHTS // SLICE
_SHARED_LIMIT = 232448 - 1024
_CONSUMERS, _PRODUCER = 8, 8  # warps; the producer is the ninth


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillActivations:
    """Activations as the tensor cores read them: float16 of rows divided by powers of two.

    Attributes:
      tiles: uint32 [R / tile, K / 64, tile * 32]: an image of shared memory (`ptx.descriptor`). In
        every 16 elements, 4t + 2e + o stands at 8e + 2t + o, as in fragments of `decode_words`.
      scales: float32 [R], the divisors.
    """

    tiles: jax.Array
    scales: jax.Array

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return self.tiles.shape[2] // 32


def prefill_tile(rows: int) -> int:
    """Returns the rows of a tile for this many rows: 64, 128 or 256."""
    return 64 if rows <= 64 else 128 if rows <= 128 else 256


def prefill_activations(x: jax.Array) -> PrefillActivations:
    """Returns activations [R, K] for `prefill_product`; R is padded to whole tiles.

    Raises:
      ValueError: K is not a multiple of 256.
    """
    rows, k = x.shape
    if not k or k % WEIGHTS:
        raise ValueError(f"{k=} must be a positive multiple of {WEIGHTS}")
    tile = prefill_tile(rows)
    x = jnp.pad(x, ((0, -rows % tile), (0, 0)))
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=1))
    half = jnp.ldexp(x, 5 - exponent[:, None]).astype(jnp.float16)
    half = half.reshape(-1, tile, k // 16, 4, 2, 2).transpose(0, 1, 2, 4, 3, 5)
    pieces = half.reshape(-1, tile, k // SLICE, 8, 8)
    row, place = jnp.arange(tile)[:, None], jnp.arange(8)[None]
    pieces = pieces.transpose(0, 2, 1, 3, 4)[:, :, row, place ^ (row & 7)]
    words = jax.lax.bitcast_convert_type(pieces.reshape(*pieces.shape[:2], -1, 2), jnp.uint32)
    return PrefillActivations(tiles=words, scales=jnp.ldexp(jnp.float32(1), exponent - 5))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    """Stages of the two rings.

    Attributes:
      slices: of activations, 64 elements of K each.
      blocks: of weights, 256 elements of K each.
    """

    slices: int = 4
    blocks: int = 2

    def __post_init__(self):
        """Raises ValueError for a ring that cannot be filled ahead."""
        if min(self.slices, self.blocks) < 2:
            raise ValueError(f"{self.slices=} and {self.blocks=} must be at least 2")


@functools.partial(jax.jit, static_argnames=("block", "epilogue", "tiles", "first"))
def prefill_product(
    x: PrefillActivations,
    weights: jax.Array,
    layer: jax.Array,
    block: Block,
    epilogue: Epilogue = "none",
    tiles: PrefillTiles | None = None,
    *,
    first: int = 0,
) -> jax.Array:
    """Returns float32 [R, N]: `x @ W[layer, first:].T`; or [R, N / 2]: `silu(gate) * up`.

    Args:
      x: of `prefill_activations`.
      weights: uint32 [layers, N / 16, K / 256 * block.words], of `block.tile`.
      layer: int32 [1].
      block: kind of block.
      epilogue: as for `decode_product`.
      tiles: stages.
      first: rows of W that are left out, a multiple of 16.

    Raises:
      ValueError: sizes that do not fit each other.
    """
    plan = Plan.of(x, weights, block, epilogue, tiles or PrefillTiles(), first)

    return lane_kernel(
        functools.partial(_kernel, plan),
        jax.ShapeDtypeStruct((plan.rows, plan.outputs), jnp.float32),
        name=f"prefill_product_{block.format.name}_kernel",
        grid=plan.row_tiles * -(-plan.units // UNITS),
        warpgroups=3,
        shared=[4 * size for size in plan.shared_words],
    )(weights, layer, x.tiles, x.scales)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static sizes."""

    block: Block
    epilogue: Epilogue
    tiles: PrefillTiles
    tile: int
    row_tiles: int
    units: int
    first_unit: int
    blocks: int

    @classmethod
    def of(cls, x: PrefillActivations, weights, block, epilogue, tiles, first) -> "Plan":
        """Returns the sizes of a product of these operands; see `prefill_product` for errors."""
        (row_tiles, slices, _), (_, units, words) = x.tiles.shape, weights.shape
        if slices * block.words != words * _SLICES:
            raise ValueError(f"{words=} of a unit do not hold K={slices * SLICE} weights a row")
        if epilogue not in ("none", "silu_gate"):
            raise ValueError(f"{epilogue=} must be 'none' or 'silu_gate'")
        if first % ROWS or not 0 <= first < units * ROWS:
            raise ValueError(f"{first=} must be a multiple of {ROWS} below {units * ROWS}")
        plan = cls(
            block=block,
            epilogue=epilogue,
            tiles=tiles,
            tile=x.tile,
            row_tiles=row_tiles,
            units=units - first // ROWS,
            first_unit=first // ROWS,
            blocks=slices // _SLICES,
        )
        if (size := sum(-(-words // 256) * 1024 for words in plan.shared_words)) > _SHARED_LIMIT:
            raise ValueError(f"{size} bytes of shared memory exceed {_SHARED_LIMIT}; {tiles=}")
        return plan

    @property
    def rows(self) -> int:
        """Rows of activations, padding included."""
        return self.row_tiles * self.tile

    @property
    def outputs(self) -> int:
        """Columns of the result."""
        return self.units * (ROWS if self.epilogue == "none" else ROWS // 2)

    @property
    def slice_bytes(self) -> int:
        """Bytes of a slice of a tile of activations."""
        return self.tile * SLICE * 2

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of weights."""
        return self.block.words * 4

    @property
    def shared_words(self) -> list[int]:
        """Sizes of: activations, weights, barriers."""
        return [
            self.tiles.slices * self.slice_bytes // 4,
            self.tiles.blocks * UNITS * self.block.words,
            4 * (self.tiles.slices + self.tiles.blocks),
        ]


class _Places:
    """Addresses and indices."""

    def __init__(self, plan: Plan, refs):
        """Takes the references of the kernel."""
        weights, layer, tiles, scales, out, *shared = refs
        self.slices, self.blocks, barriers = map(ptx.shared_address, shared)
        self.thread = ptx.thread_index()
        self.warp, self.lane = ptx.uniform(self.thread >> 5), self.thread & 31
        stages = plan.tiles
        self.slice_full = barriers
        self.slice_empty = barriers + 8 * stages.slices
        self.block_full = barriers + 16 * stages.slices
        self.block_empty = self.block_full + 8 * stages.blocks
        # Neighbours share weights, and all row tiles of some weights run together.
        index = ptx.block_index()
        row_tile, column = index % plan.row_tiles, index // plan.row_tiles
        self.first_unit = column * UNITS
        self.tiles = ptx.offset_address(
            ptx.global_address(tiles), row_tile, plan.blocks * _SLICES * plan.slice_bytes
        )
        unit_bytes = plan.blocks * plan.block_bytes
        at = ptx.load_global(ptx.global_address(layer))[0]
        stack_units = plan.units + plan.first_unit
        self.weights = ptx.offset_address(
            ptx.offset_address(ptx.global_address(weights), at, stack_units * unit_bytes),
            ptx.Word(plan.first_unit),
            unit_bytes,
        )
        self.scales = ptx.offset_address(ptx.global_address(scales), row_tile, plan.tile * 4)
        self.out = ptx.offset_address(
            ptx.global_address(out), row_tile, plan.tile * plan.outputs * 4
        )


def _kernel(plan: Plan, *refs) -> None:
    at = _Places(plan, refs)
    with ptx.when(at.thread.equals(0)):
        for stage in range(plan.tiles.slices):
            ptx.barrier_init(at.slice_full + 8 * stage, 1)
            ptx.barrier_init(at.slice_empty + 8 * stage, _CONSUMERS)
        for stage in range(plan.tiles.blocks):
            ptx.barrier_init(at.block_full + 8 * stage, UNITS)
            ptx.barrier_init(at.block_empty + 8 * stage, _CONSUMERS)
        ptx.fence_barriers()
    ptx.sync_threads(0, 384)

    def multiply():
        ptx.set_registers(232, grow=True)
        consume(ptx, plan, at)

    def produce():
        ptx.set_registers(40, grow=False)
        with ptx.when(at.warp.equals(_PRODUCER)), ptx.when(at.lane < UNITS):
            _feed_blocks(plan, at)
        with ptx.when(at.warp.equals(_PRODUCER + 1)), ptx.when(at.lane.equals(0)):
            _feed_slices(plan, at)

    ptx.branch(at.warp < _CONSUMERS, multiply, produce)


def _feed_blocks(plan: Plan, at: _Places) -> None:
    """Streams weights: a lane brings a unit's blocks, for one consumer warp."""
    stages, size = plan.tiles.blocks, plan.block_bytes
    unit = at.first_unit + at.lane
    # The last block of threads may have fewer units: the others repeat the last one.
    unit = ptx.select(unit < plan.units, unit, plan.units - 1)
    source = ptx.offset_address(at.weights, unit, plan.blocks * size)

    def feed(index, carry):
        stage, parity = carry
        ptx.barrier_wait(at.block_empty + stage * 8, parity)
        full = at.block_full + stage * 8
        ptx.barrier_expect(full, size)
        place = at.blocks + (stage * UNITS + at.lane) * size
        ptx.copy_bulk_cached(place, ptx.offset_address(source, index, size), size, full)
        return _advance(ptx, stage, parity, stages)

    # A fresh barrier's phase before the first counts as over.
    ptx.loop(0, plan.blocks, 1, (ptx.Word(0), ptx.Word(1)), feed)


def _feed_slices(plan: Plan, at: _Places) -> None:
    """Streams activations."""
    size = plan.slice_bytes

    def feed(index, carry):
        stage, parity = carry
        ptx.barrier_wait(at.slice_empty + stage * 8, parity)
        full = at.slice_full + stage * 8
        ptx.barrier_expect(full, size)
        source = ptx.offset_address(at.tiles, index, size)
        ptx.copy_bulk_cached(at.slices + stage * size, source, size, full)
        return _advance(ptx, stage, parity, plan.tiles.slices)

    ptx.loop(0, plan.blocks * _SLICES, 1, (ptx.Word(0), ptx.Word(1)), feed)


def _advance(isa, stage, parity, stages: int):
    """Returns the next place in a ring and the parity of its next phase."""
    stays = stage < stages - 1
    return isa.select(stays, stage + 1, 0), isa.select(stays, parity, parity ^ 1)


def consume(isa, plan: Plan, at) -> None:
    """Emits the work of a consumer warpgroup.

    Args:
      isa: `ptx`, or a model of it.
      plan: static sizes.
      at: addresses and indices.
    """
    dense, stages = DENSE_BLOCKS[plan.block.format.name], plan.tiles
    runs = WEIGHTS // 32

    def release(barrier):
        isa.sync_warp()
        with isa.when(at.lane < 1):
            isa.barrier_arrive(barrier)

    def take_block(index, carry):
        (stage, parity), (place, phase, passed), before, acc = carry
        isa.barrier_wait(at.block_full + stage * 8, parity)
        address = at.blocks + (stage * UNITS + at.warp) * plan.block_bytes
        scales = dense.scales(isa, address, at.lane)
        for run in range(runs):
            fragments = dense.weights(isa, address, at.lane, scales, run)
            words = isa.pin([word for fragment in fragments for word in fragment])
            if run == runs - 1:
                release(at.block_empty + stage * 8)
            if run % 2 == 0:
                isa.barrier_wait(at.slice_full + place * 8, phase)
            # The products of the run before end here; until then its weights are held. To let them
            # run on (waiting for all but one) makes ptxas wait after every single one instead.
            isa.wgmma_wait(0)
            isa.pin(before)
            matrix = isa.descriptor(at.slices + place * plan.slice_bytes)
            isa.wgmma_fence()
            for half in (0, 1):
                # A sixteen of a slice is 32 bytes on, two in units of a description.
                step = 2 * (run % 2) + half
                acc = isa.wgmma(acc, words[4 * half : 4 * half + 4], matrix + 2 * step)
            isa.wgmma_commit()
            before = words
            if run % 2:
                passed = place
                place, phase = _advance(isa, place, phase, stages.slices)
            elif run:
                release(at.slice_empty + passed * 8)
            else:
                with isa.when(isa.Word(0) < index):
                    release(at.slice_empty + passed * 8)
        next_block = _advance(isa, stage, parity, stages.blocks)
        return next_block, (place, phase, passed), before, acc

    zero, acc = isa.Word(0), [isa.Float(0.0)] * (plan.tile // 2)
    carry = ((zero, zero), (zero, zero, zero), [zero] * 8, acc)
    *_, before, acc = isa.loop(0, plan.blocks, 1, carry, take_block)
    isa.wgmma_wait(0)
    isa.pin(before)
    unit = at.first_unit + at.warp
    with isa.when(unit < plan.units):
        _store_outputs(isa, plan, at, unit, acc)


def _store_outputs(isa, plan: Plan, at, unit, acc) -> None:
    """Stores a warp's outputs, a unit of W by a tile of rows; acc is as `ptx.wgmma` has it."""
    g, t = at.lane >> 2, at.lane & 3
    gated = plan.epilogue == "silu_gate"
    column = unit * (ROWS // 2 if gated else ROWS) + g
    size = isa.Float(1 / WEIGHT_SCALE)
    for j in range(plan.tile // 8):
        scales = isa.load_global_floats(isa.offset_address(at.scales, t, 8), 32 * j, 2)
        for o, scale in enumerate(scales):
            scale = scale * size
            upper, lower = acc[4 * j + o] * scale, acc[4 * j + 2 + o] * scale
            row = isa.offset_address(at.out, t * 2 + (8 * j + o), plan.outputs * 4)
            place = isa.offset_address(row, column, 4)
            if gated:
                isa.store_global(place, [isa.silu(upper) * lower])
            else:
                isa.store_global(place, [upper])
                isa.store_global(place, [lower], 32)
