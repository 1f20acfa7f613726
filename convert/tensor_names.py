"""What a tensor of a GGUF is: its place in the weights, and the shape that the keys imply.

The tables of tensors are those of the architectures, in files of their own; here is what a line of
them means. A projection is NumPy [out, in] and applied as `y = x @ W.T`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

type Kind = Literal["packed", "dense", "rows"]
"""A layer of a `Packed`, a float32 array, or a table of packed rows that is mapped, not copied."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """A place in the weights.

    Attributes:
      stack: "global", or the module that holds the field, such as "deltanet" or "mtp.attention".
      field: name in the class of that module in `openjet_jax.weights`.
      slot: position along the stack's layer axis; 0 where there is none.
      kind: what it becomes.
    """

    stack: str
    field: str
    slot: int
    kind: Kind

    @property
    def packed(self) -> bool:
        """Whether it becomes a layer of a `Packed`."""
        return self.kind == "packed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of a larger tensor that hold what another file has in a tensor of its own.

    Attributes:
      name: of the larger tensor, after the block's prefix.
      axes: its shape, by names of sizes.
      before: sizes of what stands before, by name.
    """

    name: str
    axes: tuple[str, ...]
    before: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of a table.

    Attributes:
      suffix: name in the file, after the block's prefix.
      field: in the weights.
      axes: its shape, by names of sizes; that of experts has an axis before rows and inputs.
      kind: what it becomes.
      optional: whether a file may lack it.
      fallback: full name of the tensor that then stands in for it.
      part: where its rows are if the file lacks it.
      also: another shape that the file may give it.
    """

    suffix: str
    field: str
    axes: tuple[str, ...]
    kind: Kind
    optional: bool = False
    fallback: str = ""
    part: Part | None = None
    also: tuple[str, ...] = ()


def vector(suffix: str, field: str, axis: str, fallback: str = "") -> Entry:
    """Returns the entry of a vector."""
    return Entry(
        suffix=suffix,
        field=field,
        axes=(axis,),
        kind="dense",
        optional=bool(fallback),
        fallback=fallback,
    )


def matrix(suffix: str, field: str, rows: str, k: str, optional: bool = False) -> Entry:
    """Returns the entry of a projection."""
    return Entry(suffix=suffix, field=field, axes=(rows, k), kind="packed", optional=optional)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedPart:
    """Rows `start`.. of every group of a tensor `name` of this NumPy `shape`."""

    name: str
    shape: tuple[int, ...]
    start: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedTensor:
    """A tensor that a model of some configuration has.

    Attributes:
      name: full name in the file.
      shape: NumPy shape.
      role: where its values go.
      optional: whether a file may lack it.
      fallback: name of the tensor that then stands in for it; empty if none does.
      part: where its rows are if the file lacks it.
      also: another shape that the file may give it; empty if none.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    optional: bool = False
    fallback: str = ""
    part: ExpectedPart | None = None
    also: tuple[int, ...] = ()

    @property
    def flat_shape(self) -> tuple[int, ...]:
        """Shape of the values in the weights: experts stand one below the other."""
        if len(self.shape) < 3:
            return self.shape
        return math.prod(self.shape[:-1]), self.shape[-1]


def expected(
    prefix: str, stack: str, slot: int, entries: tuple[Entry, ...], sizes: Mapping[str, int]
) -> list[ExpectedTensor]:
    """Returns the tensors of one block's table.

    Args:
      prefix: of the names, such as `blk.3.`.
      stack: module of the weights.
      slot: position along its layer axis.
      entries: the table.
      sizes: length of every axis that the table names.
    """

    def shape(axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(sizes[axis] for axis in axes)

    def part(entry: Entry) -> ExpectedPart | None:
        if entry.part is None:
            return None
        before = sum(sizes[name] for name in entry.part.before)
        return ExpectedPart(
            name=prefix + entry.part.name, shape=shape(entry.part.axes), start=before
        )

    return [
        ExpectedTensor(
            name=prefix + entry.suffix,
            shape=shape(entry.axes),
            role=Role(stack=stack, field=entry.field, slot=slot, kind=entry.kind),
            optional=entry.optional,
            fallback=entry.fallback,
            part=part(entry),
            also=shape(entry.also),
        )
        for entry in entries
    ]


def missing(names: Mapping[str, object], prefix: str, entries: tuple[Entry, ...]) -> list[str]:
    """Returns the names that a block lacks for being whole."""
    return [
        prefix + entry.suffix
        for entry in entries
        if not entry.optional
        and prefix + entry.suffix not in names
        and not (entry.part is not None and prefix + entry.part.name in names)
    ]


DELTANET = (
    matrix("attn_qkv.weight", "qkv", "channels", "hidden"),
    matrix("attn_gate.weight", "gate", "values", "hidden"),
    matrix("ssm_alpha.weight", "alpha", "value_heads", "hidden"),
    matrix("ssm_beta.weight", "beta", "value_heads", "hidden"),
    Entry(suffix="ssm_conv1d.weight", field="conv", axes=("channels", "taps"), kind="dense"),
    vector("ssm_dt.bias", "dt_bias", "value_heads"),
    vector("ssm_a", "decay", "value_heads"),
    vector("ssm_norm.weight", "gate_norm", "gdn_width"),
    matrix("ssm_out.weight", "out", "hidden", "values"),
)
"""A Gated DeltaNet layer's tensors, but for the norm before it, which is each model's own."""
