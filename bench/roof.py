"""The roof of every decode product: how fast one kernel can pull bytes into shared memory.

`copy_only` streams a slab through rings in shared memory, as the products do, and folds what it
read with XOR, so that a wrong or missing byte shows; `load_only` does the same with plain loads to
registers. `python -m bench.roof [--boundary] [--out DIR]` measures, on a card, GB/s of kernel time
beside a plain XLA reduction, or what a launch boundary costs with and without programmatic
dependent launch.
"""

import argparse
import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from bench.manifest import device_folder, manifest
from bench.summary import RESULTS, Figure, record
from bench.timing import kernel_times_us, wall_time_us
from pallas_kernels import ptx

_SMALL, _LARGE = 65536 * 1536, 65536 * 15360
"""Bytes of the slabs: 100 MB and 1 GB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyTiles:
    """How `copy_only` is cut up.

    Attributes:
      stage_bytes: bytes of one copy.
      stages: copies in flight per block.
      blocks: blocks of threads in the grid.
      readers: warpgroups that read what arrives.
      interleaved: neighbouring pieces go to neighbouring blocks; else each block owns a run.
      evict_first: mark lines as first to leave the cache.
      overlap: programmatic dependent launch: fill the rings before the previous kernel has ended.
    """

    stage_bytes: int = 16384
    stages: int = 8
    blocks: int = 132
    readers: int = 2
    interleaved: bool = True
    evict_first: bool = True
    overlap: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block that read."""
        return self.readers * 128


def copy_only(slabs: jax.Array, layer: jax.Array, carry: jax.Array, tiles: CopyTiles) -> jax.Array:
    """Returns `carry` XOR what each thread read of slabs[layer] (uint32[blocks, threads]).

    Args:
      slabs: uint32[layers, words].
      layer: int32[1]; not written by the kernel before this one if tiles.overlap.
      carry: uint32[blocks, threads].
      tiles: cuts.

    Raises:
      ValueError: tiles.stage_bytes does not divide a slab.
    """
    slab_bytes = slabs.shape[1] * 4
    if slab_bytes % tiles.stage_bytes:
        raise ValueError(f"{slab_bytes=} must be a multiple of {tiles.stage_bytes=}")

    def body(*refs):
        inline = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 6)
        inline(functools.partial(_copy_kernel, "fill", tiles, slab_bytes))(*refs)
        if tiles.overlap:
            plgpu.griddepcontrol_wait()
        inline(functools.partial(_copy_kernel, "stream", tiles, slab_bytes))(*refs)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tiles.blocks, tiles.threads), jnp.uint32),
        scratch_types=[
            plgpu.SMEM((tiles.stages * tiles.stage_bytes // 4,), jnp.uint32),
            plgpu.SMEM((2 * tiles.stages, 2), jnp.uint32),
        ],
        grid=(tiles.blocks,),
        grid_names=("block",),
        num_threads=tiles.readers + 1,
        thread_name="warpgroup",
        kernel_name="copy_only_kernel",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(slabs, layer, carry)


def _copy_kernel(part, tiles: CopyTiles, slab_bytes: int, _, *refs):
    slabs_ref, layer_ref, carry_ref, out_ref, ring_ref, barriers_ref = refs
    items = slab_bytes // tiles.stage_bytes
    per_block = -(-items // tiles.blocks)
    thread, block = ptx.thread_index(), ptx.block_index()
    warp = ptx.uniform(thread >> 5)
    ring, full = ptx.shared_address(ring_ref), ptx.shared_address(barriers_ref)
    empty = full + 8 * tiles.stages
    count, first = _share(tiles, items, per_block, block)
    row = ptx.load_global(ptx.global_address(layer_ref))[0]
    slab = ptx.offset_address(ptx.global_address(slabs_ref), row, slab_bytes)
    policy = ptx.evict_first_policy()

    def item_address(item):
        return ptx.offset_address(slab, item, tiles.stage_bytes)

    def fetch(step, stage):
        item = step * tiles.blocks + block if tiles.interleaved else first + step
        ptx.barrier_expect(full + stage * 8, tiles.stage_bytes)
        target, source = ring + stage * tiles.stage_bytes, item_address(item)
        if tiles.evict_first:
            ptx.copy_bulk(target, source, tiles.stage_bytes, full + stage * 8, policy)
        else:
            ptx.copy_bulk_cached(target, source, tiles.stage_bytes, full + stage * 8)

    if part == "fill":
        with ptx.when(thread.equals(tiles.threads)):
            for stage in range(tiles.stages):
                ptx.barrier_init(full + 8 * stage, 1)
                ptx.barrier_init(empty + 8 * stage, tiles.readers * 4)
            ptx.fence_barriers()
            if tiles.overlap:
                ptx.launch_next_kernel()
            for stage in range(tiles.stages):
                with ptx.when(ptx.Word(stage) < count):
                    fetch(ptx.Word(stage), ptx.Word(stage))
        ptx.sync_threads(0, tiles.threads + 128)
        return

    with ptx.when(thread.equals(tiles.threads)):

        def feed(step, place):
            stage, parity = place
            ptx.barrier_wait(empty + stage * 8, parity)
            fetch(step, stage)
            return _advance(stage, parity, tiles.stages)

        ptx.loop(tiles.stages, count, 1, (ptx.Word(0), ptx.Word(0)), feed)

    with ptx.when(warp < tiles.readers * 4):
        slot = block * tiles.threads + thread
        start = ptx.load_global_coherent(ptx.offset_address(ptx.global_address(carry_ref), slot, 4))

        def read(_, place):
            stage, parity, fold = place
            ptx.barrier_wait(full + stage * 8, parity)
            address = ring + stage * tiles.stage_bytes + thread * 16
            for offset in range(0, tiles.stage_bytes, tiles.threads * 16):
                for word in ptx.load_shared(address, offset, 4):
                    fold = fold ^ word
            ptx.sync_warp()
            with ptx.when((thread & 31).equals(0)):
                ptx.barrier_arrive(empty + stage * 8)
            return (*_advance(stage, parity, tiles.stages), fold)

        zero = ptx.Word(0)
        _, _, fold = ptx.loop(0, count, 1, (zero, zero, start), read)
        ptx.store_global(ptx.offset_address(ptx.global_address(out_ref), slot, 4), [fold])


def _share(tiles: CopyTiles, items: int, per_block: int, block):
    """Returns how many pieces a block copies, and its first where it owns a run."""
    if tiles.interleaved:
        return (items - 1 - block + tiles.blocks) // tiles.blocks, None
    first = block * per_block
    rest = ptx.select(ptx.Word(items) < first, 0, ptx.Word(items) - first)
    return ptx.select(rest < per_block, rest, per_block), first


def _advance(stage, parity, stages: int):
    """Returns the next place in a ring and the parity of its next phase."""
    last = stage.equals(stages - 1)
    return ptx.select(last, 0, stage + 1), ptx.select(last, parity ^ 1, parity)


def load_only(
    slabs: jax.Array, layer: jax.Array, warpgroups: int, blocks: int, unroll: int
) -> jax.Array:
    """Returns XORs of slabs[layer] by thread, read with `unroll` independent 16-byte loads."""
    slab_bytes, threads = slabs.shape[1] * 4, warpgroups * 128
    piece = threads * 16 * unroll
    if slab_bytes % piece:
        raise ValueError(f"{slab_bytes=} must be a multiple of {piece=}")

    def kernel(_, slabs_ref, layer_ref, out_ref):
        thread, block = ptx.thread_index(), ptx.block_index()
        row = ptx.load_global(ptx.global_address(layer_ref))[0]
        slab = ptx.offset_address(ptx.global_address(slabs_ref), row, slab_bytes)
        slab = ptx.offset_address(slab, thread, 16)

        def read(item, fold):
            address = ptx.offset_address(slab, item, piece)
            loads = [ptx.load_global(address, i * threads * 16, 4) for i in range(unroll)]
            for word in sum(loads, []):
                fold = fold ^ word
            return fold

        fold = ptx.loop(block, slab_bytes // piece, blocks, ptx.Word(0), read)
        slot = block * threads + thread
        ptx.store_global(ptx.offset_address(ptx.global_address(out_ref), slot, 4), [fold])

    def body(*refs):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)(kernel)(*refs)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((blocks, threads), jnp.uint32),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name="load_only_kernel",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(slabs, layer)


COPIES = [
    CopyTiles(stage_bytes=s, stages=n, interleaved=i)
    for s, n in ((16384, 4), (16384, 8), (16384, 12), (8192, 24), (32768, 6), (4096, 48))
    for i in (True, False)
] + [
    CopyTiles(stage_bytes=16384, stages=12, evict_first=False),
    CopyTiles(stage_bytes=16384, stages=6, blocks=264),
    CopyTiles(stage_bytes=16384, stages=12, readers=4),
    CopyTiles(stage_bytes=65536, stages=3),
    CopyTiles(stage_bytes=2048, stages=64, readers=1),
]
LOADS = [(4, 264, 4), (8, 132, 8), (8, 264, 4), (4, 528, 8)]


def _looped(op, layers: int, start: jax.Array):
    """Returns a jitted function that applies op(layer, carry) to every layer in turn."""
    return jax.jit(
        lambda *args: jax.lax.fori_loop(
            0, layers, lambda i, c: op(*args, jnp.full((1,), i, jnp.int32), c), start
        )
    )


def _slabs(layers: int, slab_bytes: int) -> jax.Array:
    key = jax.random.key(0)
    make = jax.jit(lambda i: jax.random.bits(jax.random.fold_in(key, i), (slab_bytes // 4,)))
    return jnp.stack([make(i) for i in range(layers)])


def _fold(array) -> int:
    return int(np.bitwise_xor.reduce(np.asarray(array), axis=None))


def measure_bandwidth(slab_bytes: int, layers: int) -> list[dict]:
    """Returns GB/s of every variant on slabs of this size, read one after the other."""
    slabs = _slabs(layers, slab_bytes)
    xor = functools.partial(jnp.bitwise_xor.reduce, axis=None)
    expected = _fold(jax.jit(jax.vmap(xor))(slabs))
    rows = []

    def record(name, cut, op, start):
        run = _looped(op, layers, start)
        right = _fold(run(slabs)) == expected
        times = kernel_times_us(run, slabs, name=name)
        best = float(np.median(times))
        rows.append(
            dict(
                kernel=name,
                cut=cut,
                slab_bytes=slab_bytes,
                right=right,
                us=best,
                gb_s=slab_bytes / best / 1e3,
                spread_us=float(np.ptp(times)),
            )
        )
        print(rows[-1], flush=True)

    plain = jax.jit(lambda s: [jnp.bitwise_xor.reduce(s[i]) for i in range(layers)])
    times = kernel_times_us(plain, slabs, name="", per_call=layers)
    rows.append(
        dict(
            kernel="xla_reduction",
            slab_bytes=slab_bytes,
            us=float(np.median(times)),
            gb_s=slab_bytes / float(np.median(times)) / 1e3,
        )
    )
    print(rows[-1], flush=True)
    for tiles in COPIES:
        start = jnp.zeros((tiles.blocks, tiles.threads), jnp.uint32)
        op = functools.partial(_copy_op, tiles)
        record("copy_only_kernel", dataclasses.asdict(tiles), op, start)
    for warpgroups, blocks, unroll in LOADS:
        start = jnp.zeros((blocks, warpgroups * 128), jnp.uint32)
        cut = dict(warpgroups=warpgroups, blocks=blocks, unroll=unroll)
        op = functools.partial(_load_op, warpgroups, blocks, unroll)
        record("load_only_kernel", cut, op, start)
    return rows


def _copy_op(tiles, slabs, layer, carry):
    return copy_only(slabs, layer, carry, tiles)


def _load_op(warpgroups, blocks, unroll, slabs, layer, carry):
    return carry ^ load_only(slabs, layer, warpgroups, blocks, unroll)


def measure_boundary(slab_bytes: int, layers: int, overlap: bool) -> dict:
    """Returns what a kernel in a chain of dependent kernels takes beyond its own time.

    The time of a chain twice as long, less that of the chain, has no share of the dispatch.
    """
    slabs = _slabs(layers, slab_bytes)
    tiles = CopyTiles(stage_bytes=8192, stages=8, overlap=overlap)

    def chain(slabs, kernels):
        carry = jnp.zeros((tiles.blocks, tiles.threads), jnp.uint32)
        for kernel in range(kernels):
            layer = jnp.array([kernel % layers], jnp.int32)
            carry = copy_only(slabs, layer, carry, tiles)
        return carry

    short, long = (jax.jit(functools.partial(chain, kernels=n * layers)) for n in (1, 2))
    xor = functools.partial(jnp.bitwise_xor.reduce, axis=None)
    right = _fold(short(slabs)) == _fold(jax.jit(jax.vmap(xor))(slabs))
    wall = (wall_time_us(long, slabs) - wall_time_us(short, slabs)) / layers
    kernel = float(np.median(kernel_times_us(short, slabs, name="copy_only_kernel")))
    row = dict(
        kernel="boundary",
        overlap=overlap,
        slab_bytes=slab_bytes,
        right=right,
        wall_us=wall,
        kernel_us=kernel,
        boundary_us=wall - kernel,
    )
    print(row, flush=True)
    return row


def figures(rows: list[dict]) -> list[Figure]:
    """Returns the best `copy_only` of each size over the best plain reduction, and the boundary."""
    found = []
    plain = [r["gb_s"] for r in rows if r["kernel"] == "xla_reduction"]
    for name, slab_bytes in (("copy_only_100MB", _SMALL), ("copy_only_1GB", _LARGE)):
        mine = [row for row in rows if row["slab_bytes"] == slab_bytes]
        copies = [r for r in mine if r["kernel"] == "copy_only_kernel" and r["right"]]
        if copies and plain:
            share = max(r["gb_s"] for r in copies) / max(plain)
            found.append(
                Figure(
                    name=name,
                    value=100 * share,
                    unit="% of read bandwidth",
                    better="higher",
                    must=85,
                    aim=92,
                    share_of_limit=share,
                )
            )
    boundaries = [r["boundary_us"] for r in rows if r["kernel"] == "boundary" and r["right"]]
    if boundaries:
        least = min(boundaries)
        found.append(
            Figure(name="boundary_us", value=least, unit="us", better="lower", must=1.5, aim=0.5)
        )
    return found


def main() -> None:
    """Runs the sweep, or measures the boundary; writes rows and figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--boundary", action="store_true", help="only the launch boundary")
    arguments = parser.parse_args()
    rows = []
    if arguments.boundary:
        for slab_bytes in (8192 * 132 * 4, 8192 * 132 * 48):
            rows += [measure_boundary(slab_bytes, 8, overlap) for overlap in (False, True)]
    else:
        rows += measure_bandwidth(_SMALL, 8)
        rows += measure_bandwidth(_LARGE, 3)
    text = json.dumps(dict(manifest=manifest(), rows=rows), indent=1)
    folder = arguments.out / device_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("boundary.json" if arguments.boundary else "bandwidth.json")).write_text(text)
    record("bench/roof.py", figures(rows), results=arguments.out)


if __name__ == "__main__":
    main()
