"""The architectures whose files are read."""

from openjet_jax.config import ModelConfig
from openjet_jax.convert import qwen4exp, qwen35
from openjet_jax.convert.layout import Layout
from openjet_jax.convert.tensor_names import ExpectedTensor

LAYOUTS: dict[str, Layout] = {
    module.LAYOUT.architecture: module.LAYOUT for module in (qwen35, qwen4exp)
}
"""The layout of each architecture's files by its name in GGUF."""


def expected_tensors(config: ModelConfig) -> tuple[ExpectedTensor, ...]:
    """Returns every tensor of a model, globals first, then block by block, the MTP block last."""
    return LAYOUTS[config.architecture].expected_tensors(config)
