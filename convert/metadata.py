"""Reads the keys of a GGUF: its architecture, the model's configuration, what it says of itself.

A key that could change the arithmetic and is not understood is refused by name.
"""

import dataclasses
import math

from gguf.constants import LlamaFileType

from openjet_jax.config import ModelConfig
from openjet_jax.convert.architectures import LAYOUTS
from openjet_jax.convert.gguf import GGUFError, GGUFFile, quoted
from openjet_jax.convert.keys import Keys
from openjet_jax.convert.layer_blocks import read_blocks

_FACTS = (
    "name",
    "basename",
    "finetune",
    "version",
    "size_label",
    "author",
    "organization",
    "license",
    "description",
    "quantized_by",
    "repo_url",
)
_SAMPLING = "sampling."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metadata:
    """What the keys say.

    Attributes:
      config: sizes and constants; `has_mtp` only where the MTP block is whole.
      disregarded_block: index of an MTP block that is named or begun but not whole, or None.
      notes: what was disregarded or inferred, one sentence each.
      facts: scalars about the file for people: name, file type, sampling defaults and so on.
    """

    config: ModelConfig
    disregarded_block: int | None
    notes: tuple[str, ...]
    facts: dict[str, object]


def read_config(file: GGUFFile) -> ModelConfig:
    """Returns the configuration alone; see `read_metadata`."""
    return read_metadata(file).config


def read_metadata(file: GGUFFile) -> Metadata:
    """Returns what the keys and the token tables say, checked against the names of the tensors.

    Raises:
      GGUFError: a key is missing, has the wrong type, contradicts another or the tensors, or asks
        for arithmetic that is not supported. The message names the key and its value.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture is None:
        raise GGUFError(f"{file.path}: general.architecture is missing")
    if not isinstance(architecture, str) or architecture not in LAYOUTS:
        raise GGUFError(
            f"{file.path}: general.architecture={quoted(architecture)} is not supported; only"
            f" {' and '.join(map(repr, LAYOUTS))} are"
        )
    if not file.tensors:
        raise GGUFError(f"{file.path}: no tensors: the file holds a vocabulary or metadata only")
    keys, layout = Keys(file, architecture), LAYOUTS[architecture]
    blocks = read_blocks(keys, layout)
    config = layout.read_config(keys, blocks)
    return Metadata(
        config=config,
        disregarded_block=blocks.disregarded,
        notes=(*blocks.notes, *keys.notes, *keys.judge_others()),
        facts=_read_facts(file),
    )


def _read_facts(file: GGUFFile) -> dict[str, object]:
    """Returns strings, flags and finite numbers by their key without `general.`."""
    general = {
        key.removeprefix("general."): value
        for key, value in file.metadata.items()
        if key.startswith("general.")
        and (isinstance(value, str | int) or isinstance(value, float) and math.isfinite(value))
    }
    facts: dict[str, object] = {name: general[name] for name in _FACTS if name in general}
    if isinstance(number := general.get("file_type"), int):
        known = number in set(LlamaFileType)
        facts["file_type"] = (
            LlamaFileType(number).name.removeprefix("MOSTLY_") if known else f"unknown ({number})"
        )
    sampling = {
        key.removeprefix(_SAMPLING): value
        for key, value in general.items()
        if key.startswith(_SAMPLING)
    }
    return facts | ({"sampling": sampling} if sampling else {})
