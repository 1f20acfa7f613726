"""Tells the trunk layers of a GGUF from its MTP block.

`block_count` counts the MTP block too, and files exist whose keys name an MTP block that is not
there. The tensors have the last word: a block with `nextn` tensors is never a trunk layer.
"""

import dataclasses
import re

from openjet_jax.convert.gguf import GGUFError, GGUFFile
from openjet_jax.convert.keys import Keys
from openjet_jax.convert.layout import Layout
from openjet_jax.convert.tensor_names import missing

_BLOCK = re.compile(r"blk\.(\d{1,6})\.(nextn\.)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Which `blk.N` is what.

    Attributes:
      count: `block_count`: trunk layers and the MTP block, whole or not.
      trunk: trunk layers; they are blocks 0 to trunk - 1.
      has_mtp: whether block `trunk` is a whole MTP block.
      notes: what was disregarded or inferred, one sentence each.
    """

    count: int
    trunk: int
    has_mtp: bool = False
    notes: tuple[str, ...] = ()

    @property
    def disregarded(self) -> int | None:
        """Index of an MTP block that is named or begun but not whole, or None."""
        return self.trunk if self.count > self.trunk and not self.has_mtp else None


def read_blocks(keys: Keys, layout: Layout) -> Blocks:
    """Returns which blocks are trunk layers.

    Raises:
      GGUFError: keys and tensors contradict each other, or the trunk is not here.
    """
    tensors = keys.file.tensors
    count = keys.count("block_count")
    declared = keys.count("nextn_predict_layers", default=0, least=0)
    found = [match for name in tensors if (match := _BLOCK.match(name))]
    present = {int(match[1]) for match in found}
    nextn = {int(match[1]) for match in found if match[2]}
    if declared > 1 or len(nextn) > 1:
        raise keys.error(
            "nextn_predict_layers",
            f"={declared}, block_count={count} and MTP tensors in {len(nextn)} blocks: at most one"
            " MTP block is supported",
        )
    if nextn and f"blk.0.{layout.trunk_tensor}" not in tensors:
        raise GGUFError(
            f"{keys.file.path}: this file holds the MTP block alone, without a trunk"
            f" (blk.0.{layout.trunk_tensor} is missing); use the file of the whole model"
        )
    if nextn and not declared and layout.mtp_key_required:
        raise keys.error(
            "nextn_predict_layers",
            f" is missing, but blk.{min(nextn)} holds the tensors of an MTP (nextn) block; with"
            f" block_count={count} it would run as a layer",
        )
    if nextn and nextn != {count - 1}:
        raise keys.error(
            "block_count",
            f"={count}, but the MTP (nextn) tensors are in blk.{min(nextn)}, not in the last block",
        )
    trunk = count - 1 if declared or nextn else count
    if trunk < 1:
        raise keys.error("block_count", f"={count} leaves no layer beside the MTP (nextn) block")
    if (last := max(present, default=-1)) >= count:
        raise keys.error("block_count", f"={count}, but there is an unexpected block, blk.{last}")
    if (gap := next((i for i in range(trunk) if i not in present), None)) is not None:
        raise keys.error("block_count", f"={count}, but blk.{gap} is missing altogether")
    if declared and not nextn and trunk in present:
        raise keys.error(
            "nextn_predict_layers",
            f"=1, but blk.{trunk} holds no nextn tensors: it may be a layer or half an MTP block",
        )
    if trunk == count:
        return Blocks(count=count, trunk=trunk)
    lacking = missing(tensors, f"blk.{trunk}.", layout.mtp_entries)
    notes = _mtp_notes(keys.file, trunk, bool(declared), lacking, layout.mtp_norm)
    return Blocks(count=count, trunk=trunk, has_mtp=not lacking, notes=notes)


def _mtp_notes(
    file: GGUFFile, block: int, declared: bool, missing: list[str], norm: str | None
) -> tuple[str, ...]:
    notes = []
    if not declared:
        notes.append(
            f"nextn_predict_layers is absent, but blk.{block} holds nextn tensors:"
            " it is taken for the MTP block, not for a layer"
        )
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        notes.append(
            f"the MTP block (blk.{block}) is disregarded and no drafts can be made:"
            f" {missing[0]}{more} missing"
        )
    elif norm is not None and f"blk.{block}.{norm}.weight" not in file.tensors:
        notes.append(f"blk.{block}.{norm} is absent: output_norm stands in for it")
    return tuple(notes)
