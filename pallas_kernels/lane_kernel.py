"""Launching a kernel that is written lane by lane against `ptx`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx


def lane_kernel(
    run: Callable[..., None],
    out_type: Any,
    *,
    name: str,
    grid: int,
    warpgroups: int,
    shared: Sequence[int] = (),
    cluster: int = 1,
    follows: bool = False,
    portable: bool = False,
) -> Callable[..., Any]:
    """Returns a function from a kernel's operands to its results.

    Args:
      run: emits the work of one thread; takes references of the operands, of those that are
        written in place, of the results and of shared memory, in this order.
      out_type: shapes and dtypes of the results.
      name: of the kernel.
      grid: blocks of threads, or clusters of them.
      warpgroups: of a block.
      shared: bytes of each piece of shared memory.
      cluster: blocks of a cluster.
      follows: whether it is launched before the kernel before has ended, and waits for it; see
        `ptx.follow_previous_kernel`.
      portable: whether all of its instructions exist from sm_80 on; else it is for sm_90 alone.

    Raises:
      ValueError: it is traced for a GPU that lacks its instructions.
    """
    check_capability(name, portable)

    def body(*refs):
        if follows:
            ptx.follow_previous_kernel()
        inline = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        inline(lambda _, *refs: run(*refs))(*refs)

    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[plgpu.SMEM((size // 4,), jnp.uint32) for size in shared],
        grid=(grid,),
        grid_names=("block",),
        cluster=(cluster,) if cluster > 1 else (),
        cluster_names=("part",) if cluster > 1 else (),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )


def check_capability(name: str, portable: bool = False) -> None:
    """Raises ValueError if a kernel is traced for a GPU that lacks its instructions.

    Args:
      name: of the kernel.
      portable: see `lane_kernel`.
    """
    major, minor = found = ptx.capability()
    needed = "compute capability 8.0 or later" if portable else "compute capability 9.0"
    if not (found >= (8, 0) if portable else found == (9, 0)):
        raise ValueError(f"{name} needs {needed}, not {major}.{minor}; use the reference")
