"""Decode products: a few rows of activations times a packed matrix, near the read bandwidth.

`y[R, N] = x[R, K] @ W[layer].T` for R = 8 or 16. The grid is persistent. Every consumer warpgroup
takes units of 16 outputs; its four warps take turns at the unit's blocks of 256 weights, which a
producer thread streams into the warpgroup's ring. The sums of the four warps, and of the blocks of
threads of a cluster where K is split over one, are added in a fixed order: a row's bits depend on
nothing but that row, and on the cut.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx
from pallas_kernels.decode_activations import Activations
from pallas_kernels.decode_cuts import STAGE_BLOCKS, Cut, Epilogue, Tiles
from pallas_kernels.decode_words import ROWS, Block
from pallas_kernels.lane_kernel import check_capability


@functools.partial(jax.jit, static_argnames=("block", "tiles", "epilogue", "first"))
def decode_product(
    x: Activations,
    weights: jax.Array,
    layer: jax.Array,
    block: Block,
    tiles: Tiles,
    epilogue: Epilogue = "none",
    *,
    first: int = 0,
) -> jax.Array:
    """Returns float32 [R, N]: `x @ W[layer, first:].T`; or [R, N / 2]: `silu(gate) * up`.

    Args:
      x: of `prepare` with the same block.
      weights: uint32 [layers, N / 16, K / 256 * block.words], of `block.tile`.
      layer: int32 [1].
      block: kind of block, of `decode_blocks.BLOCKS`.
      tiles: cuts.
      epilogue: "silu_gate" takes the first 8 rows of every 16 of W as gates of the last 8.
      first: rows of W that are left out, a multiple of 16: the projections before the wanted ones.

    Raises:
      ValueError: sizes that do not fit each other, or tiles that need too much shared memory.
    """
    cut = Cut.of(x, weights, block, tiles, epilogue, first)
    out = jax.ShapeDtypeStruct((cut.rows, cut.outputs), jnp.float32)
    (result,) = launch(cut, x, weights, layer, [], [out], Outputs)
    return result


def launch(
    cut: Cut,
    x: Activations,
    weights: jax.Array,
    layer: jax.Array,
    others: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    outputs: "Callable[[Cut, Places, ptx.Word], Outputs]",
) -> list[jax.Array]:
    """Returns what a product stores.

    Args:
      cut: static sizes.
      x: activations.
      weights: words of all layers.
      layer: int32 [1].
      others: operands of what is made of the outputs.
      results: what it stores.
      outputs: makes it, for one consumer; finds the places of `others` and `results`, in this
        order, in `Places.others`.
    """
    tiles, name = cut.tiles, f"decode_product_{cut.block.format.name}_kernel"
    check_capability(name)

    def body(*refs):
        inline = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        inline(functools.partial(_start_kernel, cut))(*refs)
        if tiles.overlap:
            plgpu.griddepcontrol_wait()
        inline(functools.partial(_stream_kernel, cut, outputs))(*refs)

    clustered = tiles.cluster > 1
    return plgpu.kernel(
        body,
        out_type=list(results),
        scratch_types=[plgpu.SMEM((size,), jnp.uint32) for size in cut.shared_words],
        grid=(tiles.grid // tiles.cluster,),
        grid_names=("block",),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        cluster=(tiles.cluster,) if clustered else (),
        cluster_names=("part",) if clustered else (),
    )(weights, layer, x.blocks, x.scales, *others)


class Places:
    """Addresses and indices that both halves of the kernel use."""

    def __init__(self, cut: Cut, refs):
        """Takes the references of the kernel: operands, results, scratch memory."""
        tiles = cut.tiles
        weights, layer, operand, scales, *others = refs[:-5]
        self.operand_gmem, self.scales = map(ptx.global_address, (operand, scales))
        self.others = [ptx.global_address(ref) for ref in others]
        self.ring, self.operand, self.sums, self.received, self.full = map(
            ptx.shared_address, refs[-5:]
        )
        self.thread = ptx.thread_index()
        self.warp = ptx.uniform(self.thread >> 5)
        self.lane = self.thread & 31
        rank = ptx.cluster_rank() if tiles.cluster > 1 else ptx.Word(0)
        self.part, self.sharer = rank // tiles.sharers, rank % tiles.sharers
        self.group = ptx.block_index() // tiles.cluster * tiles.sharers + self.sharer
        self.empty = self.full + 8 * tiles.warpgroups * tiles.stages
        self.arrived = self.empty + 8 * tiles.warpgroups * tiles.stages
        self.ready = self.arrived + 8 * tiles.warpgroups * cut.turns
        self.evict_first = ptx.evict_first_policy()
        row = ptx.load_global(ptx.global_address(layer))[0]
        self.weights = ptx.offset_address(
            ptx.offset_address(ptx.global_address(weights), row, cut.stack_units * cut.unit_bytes),
            self.part,
            cut.blocks * cut.block_bytes,
        )
        if cut.first_unit:
            skipped = ptx.Word(cut.first_unit)
            self.weights = ptx.offset_address(self.weights, skipped, cut.unit_bytes)

    def turns(self, cut: Cut, worker) -> ptx.Word:
        """Returns how many units consumer `worker` of this block of threads takes."""
        first = worker * cut.groups + self.group
        return (ptx.Word(cut.units - 1 + cut.workers) - first) // cut.workers

    def unit(self, cut: Cut, worker, turn) -> ptx.Word:
        """Returns the unit of a turn: neighbours in memory go to neighbouring blocks."""
        return (turn * cut.tiles.warpgroups + worker) * cut.groups + self.group


def _advance(stage, parity, stages: int):
    """Returns the next place in a ring and the parity of its next phase."""
    last = stage.equals(stages - 1)
    return ptx.select(last, 0, stage + 1), ptx.select(last, parity ^ 1, parity)


def _fetch(cut: Cut, at: Places, worker, turn, step, stage) -> None:
    """Starts the copy of one stage of a consumer's ring."""
    slot, size = worker * cut.tiles.stages + stage, cut.stage_bytes
    if cut.tail_blocks != STAGE_BLOCKS:
        tail = cut.tail_blocks * cut.block_bytes
        size = ptx.select(step.equals(cut.steps - 1), tail, size)
    source = ptx.offset_address(at.weights, at.unit(cut, worker, turn), cut.unit_bytes)
    source = ptx.offset_address(source, step, cut.stage_bytes)
    ptx.barrier_expect(at.full + slot * 8, size)
    ptx.copy_bulk(
        at.ring + slot * cut.stage_bytes, source, size, at.full + slot * 8, at.evict_first
    )


def _fetch_operand(cut: Cut, at: Places, step: int) -> None:
    """Starts the copy of the activations that a step of every unit meets."""
    sharers = cut.tiles.sharers
    blocks = cut.tail_blocks if step == cut.steps - 1 else STAGE_BLOCKS
    offset, size = step * STAGE_BLOCKS * cut.operand_bytes, blocks * cut.operand_bytes
    source = ptx.offset_address(at.operand_gmem, at.part, cut.blocks * cut.operand_bytes)
    source = ptx.offset_address(source, ptx.Word(1), offset)
    ready = at.ready + 8 * step
    ptx.barrier_expect(ready, size)
    if sharers == 1:
        ptx.copy_bulk_cached(at.operand + offset, source, size, ready)
        return
    piece = size // sharers
    source = ptx.offset_address(source, at.sharer, piece)
    blocks_of_part = ptx.Word((1 << sharers) - 1) << (at.part * sharers)
    target = at.operand + offset + at.sharer * piece
    ptx.copy_bulk_multicast(target, source, piece, ready, blocks_of_part)


def _start_kernel(cut: Cut, _, *refs) -> None:
    """Prepares barriers and starts the first copies; with overlap, reads only what is constant.

    One copy costs its thread some 300 cycles, so every ring, and the activations, have their own
    thread, and no consumer waits for these threads to come through.
    """
    tiles, at = cut.tiles, Places(cut, refs)
    feeder, threads = at.warp - 4 * tiles.warpgroups, (tiles.warpgroups + 1) * 128
    with ptx.when(at.warp < 4 * tiles.warpgroups):
        ptx.cluster_arrive() if tiles.cluster > 1 else ptx.sync_threads(0, threads)
    with ptx.when(ptx.Word(4 * tiles.warpgroups - 1) < at.warp):
        with ptx.when(at.lane.equals(0)):
            _prepare_barriers(cut, at, feeder)
        ptx.sync_warp()
        ptx.cluster_arrive() if tiles.cluster > 1 else ptx.arrive_threads(0, threads)
        with ptx.when(feeder < tiles.warpgroups), ptx.when(at.lane.equals(0)):
            turns = at.turns(cut, feeder)
            for place in range(tiles.stages):
                turn, step = (ptx.Word(i) for i in divmod(place, cut.steps))
                with ptx.when(turn < turns):
                    _fetch(cut, at, feeder, turn, step, ptx.Word(place))
        if tiles.sharers == 1 and not tiles.overlap:
            _fetch_operands(cut, at, feeder)
    if tiles.cluster > 1:
        ptx.cluster_wait()
        if tiles.sharers > 1 and not tiles.overlap:
            _fetch_operands(cut, at, feeder)


def _prepare_barriers(cut: Cut, at: Places, feeder) -> None:
    tiles = cut.tiles
    with ptx.when(feeder < tiles.warpgroups):
        for place in range(tiles.stages):
            slot = (feeder * tiles.stages + place) * 8
            ptx.barrier_init(at.full + slot, 1)
            ptx.barrier_init(at.empty + slot, 4)
        for turn in range(cut.turns if tiles.parts > 1 else 0):
            arrived = at.arrived + (feeder * cut.turns + turn) * 8
            ptx.barrier_init(arrived, 1)
            ptx.barrier_expect(arrived, tiles.parts * cut.sums_bytes)
    with ptx.when(feeder.equals(3)):
        for step in range(cut.steps):
            ptx.barrier_init(at.ready + 8 * step, 1)
    ptx.fence_barriers()


def _fetch_operands(cut: Cut, at: Places, feeder) -> None:
    with ptx.when(feeder.equals(3)), ptx.when(at.lane.equals(0)):
        for step in range(cut.steps):
            _fetch_operand(cut, at, step)


def _stream_kernel(cut: Cut, outputs, _, *refs) -> None:
    tiles, at = cut.tiles, Places(cut, refs)
    feeder = at.warp - 4 * tiles.warpgroups
    if tiles.overlap:
        ptx.launch_next_kernel()
        _fetch_operands(cut, at, feeder)
    with ptx.when(feeder < tiles.warpgroups), ptx.when(at.lane.equals(0)):
        _feed(cut, at, feeder)
    with ptx.when(at.warp < 4 * tiles.warpgroups):
        _consume(cut, at, outputs)
    if tiles.sharers > 1:
        # A block must not end while others may still write into it.
        with ptx.when(feeder.equals(3)):
            for step in range(cut.steps):
                ptx.barrier_wait(at.ready + 8 * step, ptx.Word(0))


def _feed(cut: Cut, at: Places, worker) -> None:
    stages, steps = cut.tiles.stages, cut.steps

    def feed(place, carry):
        stage, parity = carry
        turn = place // steps
        ptx.barrier_wait(at.empty + (worker * stages + stage) * 8, parity)
        _fetch(cut, at, worker, turn, place - turn * steps, stage)
        return _advance(stage, parity, stages)

    total = at.turns(cut, worker) * steps
    ptx.loop(stages, total, 1, (ptx.Word(0), ptx.Word(0)), feed)


class _SharedOperand:
    """The activations that block number `index` of a part of K meets."""

    def __init__(self, cut: Cut, at: Places, index: ptx.Word):
        self.tiles, self.num_offsets = cut.rows // 8, cut.block.num_offsets
        base = at.operand + index * cut.operand_bytes
        self.values_at = base + at.lane * 16
        self.offsets_at = base + at.lane * self.num_offsets
        self.sums_at = base + at.lane * 8

    def fragments(self, run: int, tile: int) -> list[ptx.Word]:
        """Returns the two matrix fragments of a run of 32 weights."""
        return ptx.load_shared(self.values_at, (run * self.tiles + tile) * 512, 4)

    def offsets(self, tile: int) -> list[ptx.Word]:
        """Returns the fragments of the block's offsets."""
        offset = self.tiles * 4096 + tile * 32 * self.num_offsets
        return ptx.load_shared(self.offsets_at, offset, self.num_offsets // 4)

    def sums(self, tile: int) -> list[ptx.Word]:
        """Returns the fragment of the sums over runs."""
        offset = self.tiles * (4096 + 32 * self.num_offsets) + tile * 256
        return ptx.load_shared(self.sums_at, offset, 2)


def _consume(cut: Cut, at: Places, make_outputs) -> None:
    tiles = cut.tiles
    worker, quarter = at.warp >> 2, at.warp & 3
    outputs: Outputs = make_outputs(cut, at, worker)
    ragged = cut.tail_blocks != STAGE_BLOCKS

    def take_stage(step, carry):
        stage, parity, totals = carry
        slot, index = worker * tiles.stages + stage, step * STAGE_BLOCKS + quarter
        inside = index < cut.blocks
        ptx.barrier_wait(at.full + slot * 8, parity)
        address = at.ring + slot * cut.stage_bytes + quarter * cut.block_bytes
        loaded = cut.block.load(ptx, address, at.lane)
        ptx.sync_warp()
        with ptx.when(at.lane.equals(0)):
            ptx.barrier_arrive(at.empty + slot * 8)
        ptx.barrier_wait(at.ready + step * 8, ptx.Word(0))
        operand = _SharedOperand(cut, at, ptx.select(inside, index, 0) if ragged else index)
        added = cut.block.product(ptx, loaded, operand, totals)
        if ragged:
            added = [
                [ptx.select_float(inside, new, old) for new, old in zip(*pair, strict=True)]
                for pair in zip(added, totals, strict=True)
            ]
        return (*_advance(stage, parity, tiles.stages), added)

    def take_unit(turn, carry):
        stage, parity, state = carry
        totals = [[ptx.Float(0.0)] * 4 for _ in range(cut.rows // 8)]
        early = outputs.fetch(turn)
        carry = ptx.loop(0, cut.steps, 1, (stage, parity, totals), take_stage)
        stage, parity, totals = carry
        return stage, parity, outputs.add_warps(turn, totals, early, state)

    zero, turns = ptx.Word(0), at.turns(cut, worker)
    *_, state = ptx.loop(0, turns, 1, (zero, zero, outputs.start()), take_unit)
    if tiles.parts > 1:
        ptx.loop(at.part, turns, tiles.parts, zero, outputs.add_parts)
    outputs.finish(state)


class Outputs:
    """Adds sums of a unit in a fixed order and stores what the epilogue makes of them.

    What a consumer keeps from unit to unit is a state; a plain product has none.
    """

    def __init__(self, cut: Cut, at: Places, worker: ptx.Word):
        """Takes the sizes, the places, and which consumer of its block of threads this is."""
        self.cut, self.at, self.worker = cut, at, worker
        self.thread = at.thread & 127
        height = 4 if cut.epilogue == "none" else 3  # log2 of the outputs of a unit
        self.row, self.column = self.thread & (1 << height) - 1, self.thread >> height
        column = self.column & 7
        self.scales = [
            ptx.as_float(
                ptx.load_global_coherent(ptx.offset_address(at.scales, column + 8 * tile, 4))
            )
            for tile in range(cut.rows // 8)
        ]

    def start(self) -> Any:
        """Returns the state before the first unit."""
        return ()

    def fetch(self, turn: ptx.Word) -> Any:
        """Returns what a unit's outputs need from memory, loaded before its weights are there."""
        return ()

    def store(self, turn: ptx.Word, read, early: Any, state: Any) -> Any:
        """Returns the state after a unit, having stored its outputs.

        Args:
          turn: of this consumer.
          read: gives the sum of (row of the unit, column, tile of eight activations).
          early: from `fetch`.
          state: before it.
        """
        del early
        self._store(turn, read)
        return state

    def finish(self, state: Any) -> None:
        """Stores what is made of all units."""

    def add_warps(
        self, turn: ptx.Word, totals: list[list[ptx.Float]], early: Any, state: Any
    ) -> Any:
        """Adds the sums of the four warps; stores outputs, or sends sums on to their part."""
        cut, at = self.cut, self.at
        buffer = at.sums + self.worker * (4 * cut.sums_bytes)
        # The sums of the last unit have been read.
        ptx.sync_threads(self.worker + 1, 128)
        for tile, total in enumerate(totals):
            ptx.store_shared(buffer + self.thread * 16, total, tile * 2048)
        ptx.sync_threads(self.worker + 1, 128)

        def read(row, column, tile):
            # Where `ptx.mma` keeps an output: lane 4 (row % 8) + column / 2.
            place = (row & 7) * 64 + (column >> 1) * 16 + (row >> 3) * 8 + (column & 1) * 4
            first, *rest = (
                ptx.load_shared_floats(buffer + place, tile * 2048 + warp * 512)[0]
                for warp in range(4)
            )
            return functools.reduce(lambda a, b: a + b, rest, first)

        if cut.tiles.parts == 1:
            return self.store(turn, read, early, state)
        target = turn % cut.tiles.parts * cut.tiles.sharers + at.sharer
        place = self._slot(turn) + at.part * cut.sums_bytes + self.thread * 4
        barrier = ptx.remote_address(at.arrived + self._index(turn) * 8, target)
        for tile in range(len(totals)):
            remote = ptx.remote_address(place + tile * 512, target)
            ptx.send(remote, read(self.thread & 15, self.thread >> 4, tile), barrier)
        return state

    def add_parts(self, turn: ptx.Word, carry):
        """Adds the sums that the blocks of all parts sent, and stores outputs."""
        parts, sums_bytes = self.cut.tiles.parts, self.cut.sums_bytes
        ptx.barrier_wait(self.at.arrived + self._index(turn) * 8, ptx.Word(0))

        def read(row, column, tile):
            place = self._slot(turn) + (column * 16 + row) * 4
            first, *rest = (
                ptx.load_shared_floats(place, part * sums_bytes + tile * 512)[0]
                for part in range(parts)
            )
            return functools.reduce(lambda a, b: a + b, rest, first)

        self._store(turn, read)
        return carry

    def _index(self, turn: ptx.Word) -> ptx.Word:
        return self.worker * self.cut.turns + turn

    def _slot(self, turn: ptx.Word) -> ptx.Word:
        """Returns where the part that stores a turn keeps what all parts send for it."""
        cut = self.cut
        index = self.worker * cut.turns_of_part + turn // cut.tiles.parts
        return self.at.received + index * (cut.tiles.parts * cut.sums_bytes)

    def _store(self, turn: ptx.Word, read) -> None:
        cut, at = self.cut, self.at
        unit = at.unit(cut, self.worker, turn)
        for tile, scale in enumerate(self.scales):
            if cut.epilogue == "none":
                self._store_one(unit * ROWS, tile, read(self.row, self.column, tile) * scale)
                continue
            with ptx.when(self.thread < 64):
                gate = read(self.row, self.column, tile) * scale
                up = read(self.row + 8, self.column, tile) * scale
                self._store_one(unit * (ROWS // 2), tile, ptx.silu(gate) * up)

    def _store_one(self, first: ptx.Word, tile: int, value: ptx.Float) -> None:
        index = (self.column + 8 * tile) * self.cut.outputs + first + self.row
        ptx.store_global(ptx.offset_address(self.at.others[0], index, 4), [value])
