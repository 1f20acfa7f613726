"""What packed formats share: fields of a few bits inside bytes, and checks of parts and sizes.

A field plane is written in chunks of `lanes` bytes. Byte j of a chunk holds, from its low bits up,
the weights j, j + lanes, j + 2 lanes, ... of the run of `lanes * 8 / width` weights that the chunk
covers, so one shift and one mask of a whole chunk give `lanes` consecutive weights.
Codes wider than four bits are split into a nibble plane, "codes", and the bits above it, "high".
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packed import Parts

type Groups = Mapping[str, tuple[int, np.dtype]]
"""For each part of a format, the weights that an element covers and its dtype; codes come first."""

_WIDTHS = {2: {"codes": 2}, 4: {"codes": 4}, 5: {"codes": 4, "high": 1}, 6: {"codes": 4, "high": 2}}


def check_k(name: str, k: int, multiple: int) -> None:
    """Raises ValueError unless k is a positive multiple of the weights a format handles at once."""
    if k <= 0 or k % multiple:
        raise ValueError(
            f"{k=} must be a positive multiple of {multiple} for packed format {name!r}; "
            "store this matrix in a format with shorter groups, or dense (f16, bf16, f32)"
        )


def check_parts(name: str, parts: Parts, groups: Groups) -> int:
    """Returns k, having checked names, dtypes and shapes of a format's parts.

    Args:
      name: the format, for messages.
      parts: arrays [rows, k / group].
      groups: what the format is made of.

    Raises:
      ValueError: a part is missing, unknown, or of another dtype or shape.
    """
    if parts.keys() != groups.keys():
        raise ValueError(f"packed format {name!r} is made of {list(groups)}, not {list(parts)}")
    rows, k = parts[next(iter(groups))].shape
    for part, (group, dtype) in groups.items():
        array, shape = parts[part], (rows, k // group)
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"part {part!r} of packed format {name!r} must be {np.dtype(dtype)}{list(shape)}, "
                f"not {array.dtype}{list(array.shape)}"
            )
    return k


def pack_fields(fields: np.ndarray, width: int, lanes: int) -> np.ndarray:
    """Returns uint8 [n, m * width / 8] of fields [n, m], each below 2**width."""
    # Chunks move as one element each, and bits shift in whole words: NumPy is slow on short axes.
    per_byte, chunk = 8 // width, f"V{lanes}"
    runs = fields.reshape(-1, lanes).view(chunk).reshape(-1, per_byte)
    split = np.empty((per_byte, len(runs)), chunk)
    split[:] = runs.T
    words = _words(split)
    plane = words[0]
    for i in range(1, per_byte):
        plane |= words[i] << words.dtype.type(width * i)
    return plane.view(np.uint8).reshape(len(fields), -1)


def unpack_fields(plane: np.ndarray, width: int, lanes: int) -> np.ndarray:
    """Returns the uint8 fields [n, m * 8 / width] of a plane [n, m] (NumPy, not JAX)."""
    per_byte, chunk = 8 // width, f"V{lanes}"
    words = _words(np.ascontiguousarray(plane).reshape(1, -1))[0]
    mask = words.dtype.type(int.from_bytes(bytes([2**width - 1] * words.itemsize)))
    runs = np.empty((plane.size // lanes, per_byte), chunk)
    for i in range(per_byte):
        runs[:, i] = ((words >> words.dtype.type(width * i)) & mask).view(chunk)
    return runs.view(np.uint8).reshape(len(plane), -1)


def _words(rows: np.ndarray) -> np.ndarray:
    """Returns bytes [n, m] as words of eight, or as they are where m is not a multiple of that.

    Fields never leave their byte when shifted and masked, so the bytes of a word do not mix.
    """
    rows = rows.view(np.uint8)
    return rows.view(np.uint64) if rows.shape[1] % 8 == 0 else rows


def coded_specs(rows: int, k: int, bits: int, groups: Groups) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the planes of parts: codes [rows, k] of `bits` bits are packed, the rest stay."""
    codes = {
        plane: jax.ShapeDtypeStruct((rows, k * width // 8), np.uint8)
        for plane, width in _WIDTHS[bits].items()
    }
    rest = {
        name: jax.ShapeDtypeStruct((rows, k // group), dtype)
        for name, (group, dtype) in groups.items()
        if name != "codes"
    }
    return {**codes, **rest}


def pack_coded(parts: Parts, bits: int, lanes: int, groups: Groups) -> dict[str, np.ndarray]:
    """Returns the planes of `coded_specs`; raises as `pack_codes`."""
    rest = {name: parts[name] for name in groups if name != "codes"}
    return {**pack_codes(parts["codes"], bits, lanes), **rest}


def pack_codes(codes: np.ndarray, bits: int, lanes: int) -> dict[str, np.ndarray]:
    """Returns the planes of uint8 codes [rows, k].

    Raises:
      ValueError: a code does not fit its bits.
    """
    if codes.size and (largest := int(codes.max())) >= 2**bits:
        raise ValueError(f"code {largest} does not fit {bits=}; codes must be below {2**bits}")
    planes, rest = {}, codes
    for plane, width in _WIDTHS[bits].items():
        planes[plane] = pack_fields(rest & (2**width - 1), width, lanes)
        rest = rest >> width
    return planes


def unpack_codes(planes: Mapping[str, jax.Array], bits: int, lanes: int) -> jax.Array:
    """Returns the int32 codes [..., k] of the planes that `pack_codes` wrote (JAX)."""
    codes, below = None, 0
    for plane, width in _WIDTHS[bits].items():
        *leading, size = planes[plane].shape
        chunks = planes[plane].reshape(*leading, size // lanes, 1, lanes).astype(jnp.int32)
        shifts = jax.lax.broadcasted_iota(
            jnp.int32, (*(1,) * len(leading), 1, 8 // width, 1), chunks.ndim - 2
        )
        fields = (chunks >> (shifts * width)) & (2**width - 1)
        fields = fields.reshape(*leading, size * 8 // width)
        codes = fields if codes is None else codes | (fields << below)
        below += width
    assert codes is not None
    return codes


def scale_groups(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns float32 [..., k]: values times the scales [..., k / group] of their groups."""
    grouped = values.reshape(*scales.shape, values.shape[-1] // scales.shape[-1])
    return (grouped * scales[..., None]).reshape(values.shape)


def spread(values: jax.Array, groups: int) -> jax.Array:
    """Returns float32 [..., groups]: each value of a longer block repeated for its groups."""
    return jnp.repeat(values.astype(jnp.float32), groups // values.shape[-1], axis=-1)
