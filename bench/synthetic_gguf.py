"""Writes a synthetic qwen35 GGUF file: real sizes and format tables, random weights.

    python -m bench.synthetic_gguf 27B OUT.gguf [--recipe Q4_K_M] [--no-mtp] [--seed 0]
    python -m bench.synthetic_gguf 27B OUT.gguf --planted 0.7    drafts are right 7 times of 10
    python -m bench.synthetic_gguf 0.8B OUT.gguf --num-layers 4 --hidden 256 --ffn 512 --vocab 512

Measurements need files of every published size without a download. The bytes read and the formats
met are those of stock files; the text that comes out means nothing and drafts are rarely accepted,
unless both are planted (`bench.planted`).
Activations stay near one through every layer. Equal size, recipe and seed give equal files, which
say in general.name and general.description that they are synthetic.
"""

import argparse
import dataclasses
import pathlib
import time

import numpy as np
from gguf import GGUFWriter

from bench.planted import planted
from bench.synthetic_tensors import RECIPES, data, tensors
from bench.synthetic_tokenizer import add_tokenizer, vocab_parts
from openjet_jax.config import Qwen35Config

VOCAB = 248320
FILE_TYPES = {"Q8_0": 7, "Q4_K_M": 15, "Q6_K": 18}
"""The number that stands for a recipe in `general.file_type`."""

# layers, hidden, ffn, heads, KV heads, GDN value heads, tied head
SIZES = {
    "0.8B": (24, 1024, 3584, 8, 2, 16, True),
    "2B": (24, 2048, 6144, 8, 2, 16, True),
    "4B": (32, 2560, 9216, 16, 4, 32, True),
    "9B": (32, 4096, 12288, 16, 4, 32, False),
    "27B": (64, 5120, 17408, 24, 4, 48, False),
}


def published(size: str, has_mtp: bool = True) -> tuple[Qwen35Config, bool]:
    """Returns the configuration of a size of `SIZES`, and whether its head is tied."""
    layers, hidden, ffn, heads, kv_heads, value_heads, tied = SIZES[size]
    config = Qwen35Config(
        num_layers=layers,
        hidden=hidden,
        ffn=ffn,
        vocab=VOCAB,
        vocab_used=VOCAB - vocab_parts(VOCAB)[2],
        heads=heads,
        kv_heads=kv_heads,
        head_width=256,
        rotary=64,
        rope_theta=1e7,
        key_heads=16,
        value_heads=value_heads,
        gdn_width=128,
        conv_taps=4,
        eps=1e-6,
        recurrent=tuple((layer + 1) % 4 != 0 for layer in range(layers)),
        has_mtp=has_mtp,
        context=262144,
    )
    return config, tied


def resized(config: Qwen35Config, **changes: int) -> Qwen35Config:
    """Returns `config` with some sizes changed; every fourth layer is attention, as published."""
    layers, vocab = changes.get("num_layers", config.num_layers), changes.get("vocab", config.vocab)
    return dataclasses.replace(
        config,
        **changes,
        vocab_used=vocab - vocab_parts(vocab)[2],
        recurrent=tuple((layer + 1) % 4 != 0 for layer in range(layers)),
    )


def _add_metadata(
    writer: GGUFWriter, config: Qwen35Config, recipe: str, seed: int, rate: float | None
) -> None:
    """Writes every key but the tokenizer's."""
    writer.add_name("openjet synthetic qwen35")
    writer.add_description(
        f"Synthetic: random weights, nothing was trained. Made by openjet-jax, {recipe=}, {seed=}"
        + ("." if rate is None else f", drafts right at a planted {rate=}.")
    )
    writer.add_file_type(FILE_TYPES[recipe])
    writer.add_quantization_version(2)
    blocks = config.num_layers + config.has_mtp
    writer.add_block_count(blocks)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_dimension_count(config.rotary)
    writer.add_rope_freq_base(config.rope_theta)
    # Pairs go to time, height and width in turn, so the first sections get what is left over.
    sections = [(config.rotary // 2 + 2 - axis) // 3 for axis in range(3)]
    writer.add_rope_dimension_sections([*sections, 0])
    writer.add_vocab_size(config.vocab)
    writer.add_ssm_conv_kernel(config.conv_taps)
    writer.add_ssm_state_size(config.gdn_width)
    writer.add_ssm_group_count(config.key_heads)
    writer.add_ssm_time_step_rank(config.value_heads)
    writer.add_ssm_inner_size(config.value_heads * config.gdn_width)
    kinds = [*config.recurrent, *([False] * config.has_mtp)]
    writer.add_array("qwen35.attention.recurrent_layers", kinds)
    if config.has_mtp:
        writer.add_uint32("qwen35.nextn_predict_layers", 1)


def write(
    path: str | pathlib.Path,
    config: Qwen35Config,
    *,
    tied: bool,
    recipe: str = "Q4_K_M",
    seed: int = 0,
    rate: float | None = None,
) -> None:
    """Writes a synthetic file; memory stays near 100 MB whatever its size.

    Args:
      path: the file, overwritten where it exists.
      config: the model's sizes, `published(...)` or changed from it; layer kinds may be any.
      tied: whether the head is the embedding.
      recipe: one of `RECIPES`.
      seed: equal arguments give equal files.
      rate: how often a draft is right, where text and drafts are planted.

    Raises:
      ValueError: the recipe is unknown, a size does not fit it, or as `planted`.
    """
    plan = list(tensors(config, tied, recipe))
    text = None if rate is None else planted(config, tied, rate, seed)
    if text is not None:
        plan = [text.fitting(tensor) for tensor in plan]
    writer = GGUFWriter(path, "qwen35")
    _add_metadata(writer, config, recipe, seed, rate)
    add_tokenizer(writer, config.vocab)
    for tensor in plan:
        dtype = np.dtype(np.float32)
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, tensor.num_bytes, tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    # The writer's own write_tensor_data wants a whole tensor in memory.
    for tensor in plan:
        pieces = None if text is None else text.data(tensor)
        for piece in data(tensor, seed) if pieces is None else pieces:
            piece.tofile(file)
        writer.write_padding(file, tensor.num_bytes)
    writer.close()


FLAGS = ("num_layers", "hidden", "ffn", "vocab", "heads", "kv_heads", "head_width", "rotary")
FLAGS += ("key_heads", "value_heads", "gdn_width")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Write a synthetic qwen35 GGUF file.")
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("path", type=pathlib.Path)
    parser.add_argument("--recipe", choices=RECIPES, default="Q4_K_M")
    parser.add_argument("--no-mtp", action="store_true", help="leave the MTP block out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--planted", type=float, metavar="RATE", help="how often a draft is right")
    for flag in FLAGS:
        parser.add_argument(f"--{flag.replace('_', '-')}", type=int, help="in place of the size's")
    args = parser.parse_args()
    config, tied = published(args.size, has_mtp=not args.no_mtp)
    changes = {flag: getattr(args, flag) for flag in FLAGS if getattr(args, flag) is not None}
    config = resized(config, **changes)
    start = time.perf_counter()
    settings = {"recipe": args.recipe, "seed": args.seed, "rate": args.planted}
    write(args.path, config, tied=tied, **settings)
    took, size = time.perf_counter() - start, args.path.stat().st_size
    print(f"{args.path}: {size:,} bytes in {took:.1f} s, {size / took / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
