"""Keys of the n-gram embedding, and the derivation that its hash constants are held against.

The constants are read from the file. They are derived from a seed: the sizes of the hashes are
consecutive primes, the offsets their sums, the multipliers odd numbers of a splitmix64 stream
(Steele et al. 2014) small enough that no product with a token id reaches 2**63.
"""

import math
from typing import Any

from openjet_jax.convert.gguf import GGUFError
from openjet_jax.convert.keys import MAX_COUNT, Keys

TABLE = "per_layer_token_embd.weight"
"""The table of embedded n-grams."""

SEED = 1234
"""Of the published models' multipliers."""

MAX_NGRAM = 8
MAX_HEADS = 64

_WORD = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MOST_GAP = 1000
"""Beyond the largest gap between primes of 31 bits."""


def read_ngrams(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields `ngram...` of the configuration.

    Args:
      keys: of the file.
      sizes: fields read before: `vocab`, `hidden`, `recurrent`.

    Raises:
      GGUFError: a key is missing, of the wrong type, or contradicts another or the table.
    """
    ngram, heads = keys.count("ple.ngram_size"), keys.count("ple.heads_per_ngram")
    if not 2 <= ngram <= MAX_NGRAM:
        raise keys.error("ple.ngram_size", f"={ngram} must be in 2..{MAX_NGRAM}")
    hashes = (ngram - 1) * heads
    if hashes > MAX_HEADS:
        raise keys.error(
            "ple.heads_per_ngram", f"={heads} makes {hashes} hashes; at most {MAX_HEADS} are read"
        )
    width, hidden = keys.count("embedding_length_per_layer_input"), sizes["hidden"]
    if hashes * width != hidden:
        raise keys.error(
            "embedding_length_per_layer_input",
            f"={width} times {hashes} hashes must be embedding_length={hidden}",
        )
    end = keys.count("ple.eos_token_id", least=0)
    if end >= sizes["vocab"]:
        raise keys.error("ple.eos_token_id", f"={end} must be below {sizes['vocab']}")
    keys.count("ple.image_token_id", default=end, least=0)
    multipliers = _numbers(keys, "ple.layer_multipliers", ngram)
    if max(multipliers) * (sizes["vocab"] - 1) >= 2**63:
        raise keys.error("ple.layer_multipliers", f"={list(multipliers)} overflow 63 bits")
    head_sizes = _numbers(keys, "ple.head_vocab_sizes", hashes)
    offsets = _numbers(keys, "ple.head_offsets", hashes)
    rows = _table_rows(keys, head_sizes, offsets)
    if not _derived(sizes["vocab"], multipliers, head_sizes, offsets):
        keys.notes.append(
            f"{keys.prefix}ple: the hash constants are not those derived from seed {SEED};"
            " the file's own are used"
        )
    return {
        "ngram_layer": _layer(keys, sizes["recurrent"]),
        "ngram": ngram,
        "ngram_heads": heads,
        "ngram_taps": keys.count("ple.conv_kernel"),
        "ngram_end": end,
        "ngram_multipliers": multipliers,
        "ngram_sizes": head_sizes,
        "ngram_offsets": offsets,
        "ngram_rows": rows,
    }


def _layer(keys: Keys, recurrent: tuple[bool, ...]) -> int:
    layers = keys.array("ple.layers", "iu")
    if layers is None:
        raise keys.error("ple.layers", " is missing")
    if layers.size != 1:
        raise keys.error("ple.layers", f" names {layers.size} layers; exactly one is supported")
    layer = int(layers[0])
    if not 0 <= layer < len(recurrent):
        raise keys.error("ple.layers", f"=[{layer}] is outside the {len(recurrent)} trunk layers")
    if not recurrent[layer]:
        raise keys.error("ple.layers", f"=[{layer}] must be a linear (DeltaNet) layer")
    return layer


def _numbers(keys: Keys, name: str, count: int) -> tuple[int, ...]:
    """Returns the first `count` entries of an array."""
    values = keys.array(name, "iu")
    if values is None:
        raise keys.error(name, " is missing")
    if values.size < count:
        raise keys.error(name, f" has {values.size} entries; {count} are needed by ngram_size")
    if (values[:count] < 0).any():
        raise keys.error(name, f"={values[:count].tolist()} must not be negative")
    return tuple(values[:count].tolist())


def _table_rows(keys: Keys, sizes: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """Returns the rows of the table, which holds every row that a hash can name."""
    for head, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        if size < 1:
            raise keys.error("ple.head_vocab_sizes", f"[{head}]={size} must not be zero")
        if offset + size > MAX_COUNT:
            raise keys.error(
                "ple.head_offsets",
                f"[{head}]={offset} plus head_vocab_sizes={size} is out of range: at most"
                f" {MAX_COUNT} rows",
            )
    record = keys.file.tensors.get(TABLE)
    if record is None:
        raise GGUFError(f"{keys.file.path}: missing tensor {TABLE!r}")
    need = max(size + offset for size, offset in zip(sizes, offsets, strict=True))
    if len(record.shape) != 2 or record.rows < need:
        raise GGUFError(
            f"{keys.file.path}: tensor {TABLE!r} has shape {record.shape}; the hashes name"
            f" {need} rows"
        )
    return record.rows


def derived_multipliers(vocab: int, count: int, seed: int = SEED) -> tuple[int, ...]:
    """Returns the multipliers of a token and its predecessors, newest first."""
    half = max(1, (2**63 - 1) // vocab // 2)
    return tuple(2 * (_mix(seed + _GAMMA * (i + 1)) % half) + 1 for i in range(count))


def derived_sizes(base: int, count: int) -> tuple[int, ...]:
    """Returns the first primes from `base` on; fewer where they lie too far apart."""
    found: list[int] = []
    number = base
    while len(found) < count and number - (found[-1] if found else base) < _MOST_GAP:
        if _is_prime(number):
            found.append(number)
        number += 1
    return tuple(found)


def _derived(vocab: int, multipliers: tuple, sizes: tuple, offsets: tuple) -> bool:
    return (
        multipliers == derived_multipliers(vocab, len(multipliers))
        and sizes == derived_sizes(sizes[0], len(sizes))
        and offsets == tuple(sum(sizes[:i]) for i in range(len(sizes)))
    )


def _mix(value: int) -> int:
    value = value + _GAMMA & _WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _WORD
    return value ^ value >> 31


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % i for i in range(2, math.isqrt(number) + 1))
