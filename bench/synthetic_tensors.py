"""Which tensors a qwen35 file has, which format each gets, and random values for them.

The format table is llama-quantize's own (October 2026), so that byte counts equal stock files'.
"""

import dataclasses
import math
import zlib
from collections.abc import Iterator

import numpy as np
from gguf import GGMLQuantizationType

from bench.synthetic_blocks import FORMATS, fitting, random_blocks
from openjet_jax.config import Qwen35Config

RECIPES = ("Q4_K_M", "Q8_0", "Q6_K")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor to be written.

    Attributes:
      name: as in the file.
      shape: NumPy order, so a matrix is (outputs, inputs).
      form: a key of `FORMATS`, or F32.
      centre, spread: mean and deviation of the values; a matrix has mean zero.
    """

    name: str
    shape: tuple[int, ...]
    form: str = "F32"
    centre: float = 1.0
    spread: float = 0.1

    @property
    def kind(self) -> GGMLQuantizationType:
        """The type as the gguf package names it."""
        return GGMLQuantizationType.F32 if self.form == "F32" else FORMATS[self.form].kind

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        elements, size = (1, 4) if self.form == "F32" else FORMATS[self.form].block
        return math.prod(self.shape) // elements * size


def _matrix(name: str, outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
    """Returns a matrix whose outputs are about `gain` for inputs of about one."""
    spread = gain / math.sqrt(inputs)
    return Tensor(name=f"{name}.weight", shape=(outputs, inputs), centre=0.0, spread=spread)


def _norm(name: str, width: int, centre: float = 1.0) -> Tensor:
    return Tensor(name=f"{name}.weight", shape=(width,), centre=centre)


def _deltanet(config: Qwen35Config, out_gain: float) -> Iterator[Tensor]:
    hidden, heads, inner = config.hidden, config.value_heads, config.value_heads * config.gdn_width
    yield _matrix("attn_qkv", config.conv_channels, hidden)
    yield _matrix("attn_gate", inner, hidden)
    yield _matrix("ssm_alpha", heads, hidden)
    yield _matrix("ssm_beta", heads, hidden)
    taps = (config.conv_channels, config.conv_taps)
    yield Tensor(name="ssm_conv1d.weight", shape=taps, centre=0.0, spread=0.5)
    yield Tensor(name="ssm_dt.bias", shape=(heads,), centre=-1.0, spread=2.0)
    yield Tensor(name="ssm_a", shape=(heads,))
    yield _norm("ssm_norm", config.gdn_width, centre=0.9)
    yield _matrix("ssm_out", hidden, inner, out_gain)


def _attention(config: Qwen35Config, out_gain: float) -> Iterator[Tensor]:
    hidden, width = config.hidden, config.head_width
    yield _matrix("attn_q", 2 * config.heads * width, hidden)
    yield _matrix("attn_k", config.kv_heads * width, hidden)
    yield _matrix("attn_v", config.kv_heads * width, hidden)
    yield _norm("attn_q_norm", width, centre=1.2)
    yield _norm("attn_k_norm", width, centre=1.2)
    yield _matrix("attn_output", hidden, config.heads * width, out_gain)


def _block(config: Qwen35Config, block: int) -> Iterator[Tensor]:
    """Yields the tensors of one block, names and formats still bare."""
    is_mtp = block == config.num_layers
    mixer = _attention if is_mtp or not config.recurrent[block] else _deltanet
    # All blocks together add about as much to the residual stream as the embedding puts there.
    out_gain = 1.0 if is_mtp else 2 / math.sqrt(2 * config.num_layers)
    yield _norm("attn_norm", config.hidden)
    yield from mixer(config, out_gain)
    yield _norm("post_attention_norm", config.hidden)
    yield _matrix("ffn_gate", config.ffn, config.hidden)
    yield _matrix("ffn_up", config.ffn, config.hidden)
    yield _matrix("ffn_down", config.hidden, config.ffn, out_gain)
    if is_mtp:
        yield _matrix("nextn.eh_proj", config.hidden, 2 * config.hidden)
        yield _norm("nextn.enorm", config.hidden)
        yield _norm("nextn.hnorm", config.hidden)
        yield _norm("nextn.shared_head_norm", config.hidden)


def _form(tensor: Tensor, block: int, blocks: int, recipe: str, tied: bool) -> str:
    """Returns the format that llama-quantize (October 2026) gives a tensor with a bare name.

    Q4_K_M puts the head in Q6_K, and ffn_down, attn_v and attn_qkv in Q6_K in the first eighth of
    the blocks, the last eighth, and every third one between; the MTP block counts as a block.
    """
    name = tensor.name.removesuffix(".weight")
    if len(tensor.shape) == 1 or name == "ssm_conv1d":
        return "F32"
    if recipe != "Q4_K_M":
        return fitting(recipe, tensor.shape[1])
    eighth = blocks // 8
    more = block < eighth or block >= 7 * blocks // 8 or (block - eighth) % 3 == 2
    is_head = name == "output" or (name == "token_embd" and tied)
    is_wide = name in ("ffn_down", "attn_v", "attn_qkv") and more
    return fitting("Q6_K" if is_head or is_wide else "Q4_K", tensor.shape[1])


def tensors(config: Qwen35Config, tied: bool, recipe: str = "Q4_K_M") -> Iterator[Tensor]:
    """Yields every tensor of a file, in file order.

    Args:
      config: the model's sizes.
      tied: whether the head is the embedding, so that there is no `output.weight`.
      recipe: one of `RECIPES`; rows that are no whole number of blocks fall back as in
        llama-quantize (Q4_K to Q5_0, Q6_K to Q8_0).

    Raises:
      ValueError: the recipe is unknown, or a row's length is not a multiple of 32.
    """
    if recipe not in RECIPES:
        raise ValueError(f"{recipe=} is not known; use one of {', '.join(RECIPES)}")
    blocks = config.num_layers + config.has_mtp

    def named(tensor: Tensor, block: int, prefix: str = "") -> Tensor:
        form = _form(tensor, block, blocks, recipe, tied)
        return dataclasses.replace(tensor, name=prefix + tensor.name, form=form)

    # The head spreads logits, so that the likeliest token stands out.
    head = _matrix("output", config.vocab, config.hidden, gain=3.0)
    embedding = dataclasses.replace(head, name="token_embd.weight")
    yield named(embedding if tied else dataclasses.replace(embedding, spread=1.0), 0)
    yield _norm("output_norm", config.hidden)
    if not tied:
        yield named(head, 0)
    for block in range(blocks):
        for tensor in _block(config, block):
            yield named(tensor, block, f"blk.{block}.")


def data(tensor: Tensor, seed: int) -> Iterator[np.ndarray]:
    """Yields a tensor's data piece by piece; ssm_a and dt have the ranges of Qwen3.8-27B.

    Args:
      tensor: one of `tensors(...)`.
      seed: the same seed gives the same data, whatever else is in the file.
    """
    key = (seed, zlib.crc32(tensor.name.encode()))
    if tensor.form != "F32":
        rows, row = tensor.shape
        yield from random_blocks(tensor.form, (rows, row), tensor.spread, key)
        return
    rng = np.random.Generator(np.random.SFC64(key))
    values = tensor.centre + tensor.spread * rng.standard_normal(tensor.shape)
    if tensor.name.endswith("ssm_a"):
        values = -np.exp(rng.uniform(math.log(0.0038), math.log(0.338), tensor.shape))
    elif tensor.name.endswith("ssm_dt.bias"):
        values = np.where(rng.random(tensor.shape) < 1 / 16, 18.0, values).clip(-5.7, 19.25)
    yield values.astype(np.float32)
