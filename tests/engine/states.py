"""States of conversations, to the bit: what a committed position left behind, and poison."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from openjet_jax.config import ModelConfig, Qwen4ExpConfig
from openjet_jax.sparse_attention import SparseCache
from openjet_jax.state import KVCache, RecurrentState
from pallas_kernels.pooled_keys import POSITIONS


def of_recurrent(recurrent: RecurrentState, config: ModelConfig) -> dict[str, Any]:
    """Returns what the next row reads of the recurrent layers, pending rows aside."""
    start = int(recurrent.start)
    parts = {
        "delta": recurrent.delta,
        "history": recurrent.window[:, start : start + config.history],
    }
    if isinstance(config, Qwen4ExpConfig):
        ngrams: Any = recurrent
        parts["ngrams"] = ngrams.ngrams[start : start + config.ngram_history]
        parts["ids"] = ngrams.ids[start : start + config.ngram - 1]
    return parts


def of_cache(cache: KVCache, length: int) -> dict[str, Any]:
    """Returns the first `length` positions of a cache, and the keys of their complete blocks."""
    parts: dict[str, Any] = {name: plane[:, :length] for name, plane in cache.planes().items()}
    if isinstance(cache, SparseCache):
        parts["pooled"] = cache.pooled[:, : length // POSITIONS]
        parts["retained"] = cache.retained
    return parts


def folded(state, config: ModelConfig) -> dict[str, np.ndarray]:
    """Returns everything a committed position left behind, once nothing is pending before it."""
    n = int(state.length)
    parts = {"hidden": state.hidden, "tokens": state.tokens[: n + 1]}
    parts |= of_recurrent(state.recurrent, config)
    for name, cache in (("", state.kv), ("mtp_", state.mtp_kv)):
        if cache is not None:
            parts |= {f"{name}{part}": array for part, array in of_cache(cache, n).items()}
    return {name: np.array(part) for name, part in parts.items()}


def same_bits(ours, theirs) -> bool:
    """Returns whether two arrays of 4-byte numbers are equal to the bit."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def assert_same_bits(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raises AssertionError naming the first part that differs."""
    assert ours.keys() == theirs.keys()
    for name, part in theirs.items():
        assert same_bits(ours[name], part), name


def poisoned_cache[C: KVCache](cache: C, length: int) -> C:
    """Returns a cache with NaN wherever only rejected or future rows could read."""
    planes = {name: np.array(plane) for name, plane in cache.planes().items()}
    for plane in planes.values():
        plane[:, length:] = np.nan
    spoilt = {name: jnp.asarray(plane) for name, plane in planes.items()}
    if isinstance(cache, SparseCache):
        pooled = np.array(cache.pooled)
        pooled[:, length // POSITIONS :] = np.nan
        spoilt["pooled"] = jnp.asarray(pooled)
    return dataclasses.replace(cache, **spoilt)


def poisoned(state):
    """Returns a state with its caches poisoned beyond their length."""
    n, mtp = int(state.length), state.mtp_kv
    mtp = None if mtp is None else poisoned_cache(mtp, n)
    return dataclasses.replace(state, kv=poisoned_cache(state.kv, n), mtp_kv=mtp)
