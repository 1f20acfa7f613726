"""A GGUF as a model: its configuration and, leaf by leaf, where the weights come from."""

import dataclasses
import os
from pathlib import Path

from openjet_jax.config import ModelConfig
from openjet_jax.convert.gguf import GGUFFile, open_gguf
from openjet_jax.convert.metadata import read_metadata
from openjet_jax.convert.tensor_sources import TensorSource, match_tensors


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelFile:
    """A checked model file. Nothing of its tensors has been read.

    Attributes:
      file: the container; its metadata holds the tokenizer's tables and the chat template.
      config: the model's configuration.
      sources: one for each leaf of the weights: globals, then layer by layer, then the MTP block.
      notes: what was disregarded or inferred, one sentence each. Where `config.has_mtp` is false
        although the file names an MTP block, a note says why.
      facts: what the file says of itself: name, file type, sampling defaults.
    """

    file: GGUFFile
    config: ModelConfig
    sources: tuple[TensorSource, ...]
    notes: tuple[str, ...]
    facts: dict[str, object]

    @property
    def parts(self) -> tuple[Path, ...]:
        """All files of the model, in order."""
        return self.file.parts

    @property
    def tied_head(self) -> bool:
        """Whether the head is the embedding."""
        return not any(s.role.stack == "global" and s.role.field == "head" for s in self.sources)


def read_model(path: str | os.PathLike[str]) -> ModelFile:
    """Returns a model file with every key, name, shape and type checked.

    Args:
      path: a GGUF file of a supported architecture, or any part of a split one.

    Raises:
      GGUFError: the file is not sound, or not a whole model of a supported kind.
      OSError: the system cannot open it.
    """
    file = open_gguf(path)
    metadata = read_metadata(file)
    sources = match_tensors(file, metadata.config, metadata.disregarded_block)
    return ModelFile(
        file=file,
        config=metadata.config,
        sources=sources,
        notes=metadata.notes,
        facts=metadata.facts,
    )
