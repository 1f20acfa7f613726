"""What commands take: options that several of them share, and files that are read for them.

A file that is not what it should be is a ValueError that names it, and so is a wrong command line:
the parser says what is wrong in one line and leaves the list of options to `--help`.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import numpy as np


MODEL = "a checkpoint, a .gguf file, or `tiny`"


class Parser(argparse.ArgumentParser):
    """A parser that raises where `argparse` prints its usage and exits.

    Options have one spelling: no prefix of a name will do.
    """

    def __init__(self, **options: Any):
        """Takes the options of `argparse.ArgumentParser`."""
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises ValueError with the message and where to look."""
        raise ValueError(f"{message}; see `{self.prog} --help`")


def json_object(text: str) -> dict[str, Any]:
    """Returns the JSON object that an option spells."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a JSON object, {{...}}")
    return value


def bias_object(text: str) -> dict[int, float]:
    """Returns the token ids and biases that an option spells; JSON has strings for keys."""
    found = json_object(text)
    if wrong := [key for key in found if not key.isdecimal()]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r:.80} is not a token id")
    return {int(key): value for key, value in found.items()}


def text_of(path: Path) -> str:
    """Returns the text of a UTF-8 file, line ends as they are."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None


def ids_of(path: Path) -> "np.ndarray":
    """Returns the array of a .npy file, mapped; what it must hold is checked by who takes it."""
    import numpy as np

    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is not a .npy file of token ids ({error}); write one with numpy.save"
        ) from None


def conversation_of(path: Path) -> dict[str, Any]:
    """Returns `messages`, `tools` and the template's options of a conversation's JSON file."""
    try:
        found = json.loads(text_of(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict) or "messages" not in found:
        raise ValueError(f'{path} must hold a JSON object with "messages", a list of turns')
    options = found.get("kw") or {}
    if not isinstance(options, Mapping):
        raise ValueError(f'{path}: "kw" is {options!r:.80}; it must be an object of options')
    return {"messages": found["messages"], "tools": found.get("tools"), **options}


def add_model(sub: argparse.ArgumentParser) -> None:
    """Adds the model, what it drafts over, and the shapes of its cache."""
    sub.add_argument("model", help=MODEL)
    sub.add_argument("--context", type=int, help="most positions, prompt and output together")
    sub.add_argument("--kv-dtype", help="format of the key-value cache: float32, bfloat16 or q8_0")
    what = '"full", "default", a size, or a .npy file of ids: the tokens that drafts are made of'
    sub.add_argument("--draft-vocab", help=what)
    sub.add_argument("--draft-head", help='"same" or "q4", a draft head of four bits')
    what = "most of the device's memory to use, 0..1; 0.92 of a GPU by default"
    sub.add_argument("--memory-fraction", type=float, help=what)


def add_sampling(sub: argparse.ArgumentParser) -> None:
    """Adds every field of `Sampling`."""
    sub.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    sub.add_argument("--top-k", type=int, default=0, help="keep this many best tokens; 0: all")
    sub.add_argument("--top-p", type=float, default=1.0, help="keep this much probability")
    sub.add_argument("--min-p", type=float, default=0.0, help="least share of the best token's")
    sub.add_argument("--repetition-penalty", type=float, default=1.0, help="1 is none")
    what = "taken off the logit of every token that was generated; 0 is none"
    sub.add_argument("--presence-penalty", type=float, default=0.0, help=what)
    what = "taken off a token's logit once for each time it was generated; 0 is none"
    sub.add_argument("--frequency-penalty", type=float, default=0.0, help=what)
    sub.add_argument("--logit-bias", type=bias_object, default={}, help='JSON: {"id": bias, ...}')
    sub.add_argument("--seed", type=int, default=0, help="of the sampling noise; 0 unless given")


def add_generation(sub: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """Adds what `stream` takes beside a prompt."""
    what = f"most tokens to generate, {max_new_tokens} unless given"
    sub.add_argument("-n", "--max-new-tokens", type=int, default=max_new_tokens, help=what)
    sub.add_argument("--depth", help='drafts a cycle: 0..5, "4/3" (3 after a rejection), "auto"')
    add_sampling(sub)
    sub.add_argument("--stop", action="append", default=[], help="string that ends the text")
    sub.add_argument("--ignore-eos", action="store_true", help="go on past stop tokens")
    sub.add_argument(
        "--template-options",
        type=json_object,
        help='JSON for the chat template: {"enable_thinking": false, ...}',
    )


def model_of(args: argparse.Namespace, draft_vocab: str | None = None, planned: bool = True) -> Any:
    """Returns the `Model` of options that `add_model` added.

    Args:
      args: the options.
      draft_vocab: what it drafts over unless an option says otherwise.
      planned: whether to print the memory plan of a conversation first, and to refuse to load what
        does not fit.

    Raises:
      ValueError: it does not; nothing was allocated.
    """
    from openjet_jax.loading import load

    if planned:
        _print_plan(args)
    vocab = args.draft_vocab or draft_vocab
    if vocab is not None and vocab.isdecimal():
        vocab = int(vocab)
    elif vocab is not None and vocab.endswith(".npy"):
        vocab = ids_of(Path(vocab))
    backend = vars(args).get("backend", "auto")
    return load(args.model, backend=backend, draft_vocab=vocab, draft_head=args.draft_head)


def sampling_of(args: argparse.Namespace) -> Any:
    """Returns the `Sampling` of options that `add_sampling` added."""
    from openjet_jax.settings import Sampling

    return Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=args.logit_bias,
        seed=args.seed,
    )


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `stream` of options that `add_model` and `add_generation` added."""
    return {
        "sampling": sampling_of(args),
        "max_new_tokens": args.max_new_tokens,
        "depth": args.depth,
        "stop": args.stop,
        "ignore_eos": args.ignore_eos,
        "context": args.context,
        "kv_dtype": args.kv_dtype,
        "template_options": args.template_options,
    }


def _print_plan(args: argparse.Namespace) -> None:
    from openjet_jax.device_memory import device_room
    from openjet_jax.engine import decode_config
    from openjet_jax.loading import contents
    from openjet_jax.memory import check_room, size_text
    from openjet_jax.tiling import resolve_backend

    config, backend = contents(args.model), resolve_backend(vars(args).get("backend", "auto"))
    decode = decode_config(config.model, args.context, args.kv_dtype)
    room = device_room()
    if room is None:
        return
    if args.memory_fraction is not None and room.host:
        free = min(room.free, int(args.memory_fraction * room.total))
        room = dataclasses.replace(room, free=free)
    plan = check_room(config.model, config.tensors, decode, room, backend)
    have = f"{size_text(room.free)} free on {room.device}"
    print(f"openjet-jax: memory: {size_text(plan.total)} of {have}: {plan}", file=sys.stderr)
