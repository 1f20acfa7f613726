"""Device time: what CUPTI says of each kernel, and what a chain of kernels takes end to end."""

import time

import jax
import numpy as np
from jax.experimental.mosaic.gpu import profiler


def kernel_times_us(run, *args, name: str, per_call: int = 0, repeats: int = 5) -> list[float]:
    """Returns microseconds of each kernel whose name contains `name`, over some calls of `run`.

    Args:
      run: a jitted function.
      *args: its arguments.
      name: part of the kernels' names.
      per_call: where several kernels make up one step, how many steps a call has: the result is
        then the whole call's kernel time over this count.
      repeats: calls.
    """
    profile = profiler.Cupti(finalize=False).measure(run, aggregate=False)
    times, kernels = [], []
    for _ in range(repeats):
        _, timings = profile(*args)
        kernels = [(str(kernel), float(ms)) for kernel, ms in timings or []]  # pyright: ignore
        mine = [1e3 * ms for kernel, ms in kernels if name in kernel]
        times += [sum(mine) / per_call] if per_call else mine
    if not times:
        raise ValueError(
            f"no kernel is called {name!r}; there were {sorted({k for k, _ in kernels})}"
        )
    return times


def wall_time_us(run, *args, repeats: int = 7, calls: int = 20) -> float:
    """Returns microseconds of one call, the median of `repeats` trains of `calls` calls."""
    jax.block_until_ready(run(*args))
    trains = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            result = run(*args)
        jax.block_until_ready(result)
        trains.append((time.perf_counter() - start) / calls * 1e6)
    return float(np.median(trains))
