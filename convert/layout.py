"""What the reader of GGUF files must know of an architecture."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from openjet_jax.config import ModelConfig
from openjet_jax.convert.keys import Keys
from openjet_jax.convert.tensor_names import Entry, ExpectedTensor

if TYPE_CHECKING:
    from openjet_jax.convert.layer_blocks import Blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How the files of one architecture are laid out.

    Attributes:
      architecture: its name in `general.architecture`.
      read_config: keys and blocks to the model's configuration.
      expected_tensors: every tensor that a model of some configuration has.
      trunk_tensor: a tensor of every trunk layer, after the prefix: without it there is no trunk.
      mtp_entries: tensors that make an MTP block whole.
      mtp_norm: a tensor of the MTP block that `output_norm` stands in for, or None.
      mtp_key_required: whether a file that holds an MTP block must say so in its keys.
      disregarded_tensors: names that a model of some configuration may hold and does not use.
    """

    architecture: str
    read_config: "Callable[[Keys, Blocks], ModelConfig]"
    expected_tensors: Callable[[ModelConfig], tuple[ExpectedTensor, ...]]
    trunk_tensor: str
    mtp_entries: tuple[Entry, ...]
    mtp_norm: str | None = None
    mtp_key_required: bool = False
    disregarded_tensors: Callable[[ModelConfig], frozenset[str]] = lambda _: frozenset()
