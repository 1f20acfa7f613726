"""The command line: convert, inspect, generate, chat, and the machine interfaces beside them.

Every expected failure ends in one line on stderr and exit code 2 (bad input) or 1 (could not be
done). What only one command needs is imported inside it.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

import openjet_jax as oj
from openjet_jax import startup
from openjet_jax.arguments import (
    MODEL,
    Parser,
    add_generation,
    add_model,
    add_sampling,
    conversation_of,
    ids_of,
    model_of,
    sampling_of,
    settings_of,
    text_of,
)
from openjet_jax.evaluate_command import add_evaluation, run_evaluation

_WITHOUT_DEVICE = ("convert", "inspect", "tokenize", "render", "draft-vocab")
"""Commands that compute nothing, and so leave GPUs alone."""

_OUT_OF_MEMORY = (
    "out of memory; ask for a smaller --context, or free what other programs hold; "
    "`openjet-jax inspect MODEL --context N` says what is needed"
)

_BAD_PATHS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = Parser(
        prog="openjet-jax", description="Exact, speculative decoding of GGUF models in JAX."
    )
    parser.add_argument("--version", action="version", version=oj.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    sub = command("convert", _convert, "convert a GGUF file into a checkpoint")
    sub.add_argument("source", type=Path, help="a .gguf file; of a split file, any part")
    sub.add_argument("-o", "--output", type=Path, help="directory to write")
    sub.add_argument("--force", action="store_true", help="replace what is there")

    sub = command("inspect", _inspect, "print a model's tensors, formats and memory plan")
    sub.add_argument("model", help="a .gguf file or a checkpoint")
    sub.add_argument("--context", type=int, default=4096, help="positions to plan for")
    sub.add_argument("--kv-dtype", default="bfloat16", help="format of the key-value cache")
    sub.add_argument("--device", help="a GPU to plan for: rtx3090, rtx4090 or h200")
    what = "compile the largest programs to see what they need; minutes for a large model"
    sub.add_argument("--compile", action="store_true", help=what)
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument("--verify", action="store_true", help="read and check every byte of weights")

    sub = command("generate", _generate, "generate text from a prompt")
    add_model(sub)
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to continue; \\n and \\t stand for line end and tab")
    source.add_argument("--prompt-file", type=Path, help="file that holds the text")
    source.add_argument("--message", help="a user message, rendered by the chat template")
    source.add_argument("--tokens", type=Path, help=".npy file of token ids")
    add_generation(sub, max_new_tokens=256)
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub.add_argument("--profile", type=Path, help="write a JAX profiler trace to a directory")

    sub = command("chat", _chat, "talk to a model")
    add_model(sub)
    sub.add_argument("--system", help="system message")
    add_generation(sub, max_new_tokens=1024)

    sub = command("serve", _serve, "serve OpenAI's interface and a chat page over HTTP")
    add_model(sub)
    sub.add_argument("--host", default="127.0.0.1", help="address to listen on")
    sub.add_argument("--port", type=int, default=8000)
    sub.add_argument("--name", help="what clients call the model")
    sub.add_argument("--agents", type=int, default=4, help="conversations on the device, 1..8")
    sub.add_argument("--queue", type=int, default=32, help="requests that may wait for a place")
    sub.add_argument("--depth", help='drafts a cycle: 0..5, "4/3" (3 after a rejection), "auto"')
    sub.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    sub.add_argument("--request-timeout", type=float, help="most seconds of a request")
    sub.add_argument("--prefix-mib", type=int, default=4096, help="host memory for prefixes")
    sub.add_argument("--api-key-file", type=Path, help="file of keys, one a line")
    sub.add_argument("--session-dir", type=Path, help="keep conversations here across restarts")

    sub = command("logits", _logits, "write logits at every position of a token sequence")
    sub.add_argument("model", help=MODEL)
    sub.add_argument("--tokens", type=Path, required=True, help=".npy file of token ids")
    sub.add_argument("--out", type=Path, required=True, help=".npz file to write")
    sub.add_argument("--mtp", action="store_true", help="also the MTP block's logits")

    evaluate = command(
        "evaluate", run_evaluation, "measure how far a model is from another engine's"
    )
    add_evaluation(evaluate)

    sub = command("tokenize", _tokenize, "print the token ids of a file's text")
    sub.add_argument(
        "model", help="a checkpoint, a .gguf file (vocabulary only will do), or `tiny`"
    )
    sub.add_argument("--file", type=Path, required=True, help="UTF-8 text")
    sub.add_argument("--special", action="store_true", help="read control tokens from the text")
    sub.add_argument("--json", action="store_true", help="print a JSON list")

    sub = command("render", _render, "print the prompt that a conversation renders to")
    sub.add_argument("model", help=MODEL)
    sub.add_argument("--conversation", type=Path, required=True, help="JSON: messages, tools, kw")
    sub.add_argument("--template", type=Path, help="a chat template in place of the model's")

    sub = command("compile", _compile, "make programs ready before the first request")
    add_model(sub)
    sub.add_argument("--depths", help='comma-separated depths, such as "0,4,auto"')
    add_sampling(sub)

    sub = command(
        "draft-vocab",
        _draft_vocab,
        "draft over the frequent tokens of your own text",
    )
    sub.add_argument("model", help=MODEL)
    what = "UTF-8 text, .npy token ids, or what `generate --json` printed"
    sub.add_argument("files", type=Path, nargs="*", help=what)
    sub.add_argument("--size", type=int, help="tokens in the list; 32768 by default")
    sub.add_argument("--draft-head", default="same", help='"same" or "q4", rows of four bits')
    sub.add_argument("--reset", action="store_true", help="go back to the default list")

    sub = command("doctor", _doctor, "show devices, versions, and what will be used and why")
    sub.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _convert(args: argparse.Namespace) -> None:
    from openjet_jax.convert.pipeline import convert_gguf

    if str(args.source) == "tiny" and not args.source.exists():
        raise ValueError("`tiny` needs no conversion; give a .gguf file")
    print(convert_gguf(args.source, args.output, force=args.force))


def _inspect(args: argparse.Namespace) -> None:
    from openjet_jax.inspection import inspect, render

    facts = inspect(
        args.model,
        context=args.context,
        kv_dtype=args.kv_dtype,
        verify=args.verify,
        device=args.device,
        compiling=args.compile,
    )
    print(json.dumps(facts, indent=1) if args.json else render(facts))


def _generate(args: argparse.Namespace) -> None:
    settings = settings_of(args)
    if args.message is not None:
        settings["messages"] = [{"role": "user", "content": args.message}]
    elif args.tokens is not None:
        settings["prompt"] = ids_of(args.tokens)
    elif args.prompt_file is not None:
        settings["prompt"] = text_of(args.prompt_file)
    else:
        settings["prompt"] = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    # What reads the JSON gets accepted counts that the list of a checkpoint does not change.
    model = model_of(args, "full" if args.json else None)
    if args.profile is not None:
        from openjet_jax.profiling import profiled

        out = profiled(model, args.profile, settings)
        print(f"trace written to {args.profile}", file=sys.stderr)
    elif args.json:
        out = oj.generate(model, **settings)
    else:
        pieces, stats, reason = oj.stream(model, **settings), None, None
        if isinstance(settings.get("prompt"), str):
            print(settings["prompt"], end="", flush=True)
        for piece in pieces:
            print(piece.text, end="", flush=True)
            stats, reason = piece.stats, piece.finish_reason
        print(flush=True)
        print(f"\n{stats}", file=sys.stderr)
        if reason == "length" and stats and stats.new_tokens < args.max_new_tokens:
            print("the context is full; --context asks for a larger one", file=sys.stderr)
        return
    print(json.dumps(out.as_dict()) if args.json else out.text)


def _chat(args: argparse.Namespace) -> None:
    from openjet_jax.chat_loop import chat_loop

    chat_loop(model_of(args), args.system, settings_of(args))


def _serve(args: argparse.Namespace) -> None:
    from openjet_jax.loading import contents

    try:
        from openjet_jax.server.capacity import serving_plan
        from openjet_jax.server.config import ServerConfig
        from openjet_jax.server.serve import serve
    except ModuleNotFoundError as error:
        raise ValueError(
            f"serving needs {error.name}; install the extra: pip install 'openjet-jax[server]'"
        ) from None
    keys = args.api_key_file.read_text(encoding="utf-8").split() if args.api_key_file else ()
    config = ServerConfig(
        host=args.host,
        port=args.port,
        name=args.name,
        api_keys=tuple(keys),
        agents=args.agents,
        queue_len=args.queue,
        max_tokens=args.max_tokens,
        context=args.context,
        kv_dtype=args.kv_dtype,
        depth=args.depth,
        request_timeout_s=args.request_timeout,
        prefix_bytes=args.prefix_mib << 20,
        session_dir=args.session_dir,
    )
    plan = serving_plan(contents(args.model), config)
    plan.check()
    config = plan.fitted(config)
    print(plan.text(config), flush=True)
    serve(model_of(args, planned=False), config)


def _logits(args: argparse.Namespace) -> None:
    import numpy as np

    if not args.out.parent.is_dir():
        raise ValueError(f"{args.out}: there is no directory {args.out.parent}; make it first")
    ids = ids_of(args.tokens)
    arrays = oj.score(oj.load(args.model), ids, mtp=args.mtp)
    with open(args.out, "wb") as file:
        np.savez(file, **arrays)


def _tokenize(args: argparse.Namespace) -> None:
    from openjet_jax.loading import load_tokenizer

    ids = load_tokenizer(args.model).encode(text_of(args.file), special=args.special)
    print(json.dumps(ids) if args.json else " ".join(map(str, ids)))


def _render(args: argparse.Namespace) -> None:
    from openjet_jax.chat import ChatTemplate
    from openjet_jax.loading import load_template

    conversation = conversation_of(args.conversation)
    if args.template is not None:
        template = ChatTemplate(text_of(args.template))
    else:
        template = load_template(args.model)
    sys.stdout.write(template.render(**conversation))


def _compile(args: argparse.Namespace) -> None:
    from openjet_jax.answers import depth_policy
    from openjet_jax.engine import programs_for

    kind = sampling_of(args).kind
    model = model_of(args)
    depths = [None] if args.depths is None else args.depths.split(",")
    policies = [depth_policy(model, depth) for depth in depths]
    programs = programs_for(model, args.context, args.kv_dtype)
    programs.prepare(
        programs.start,
        *(partial(programs.prefill, rows) for rows in programs.decode.chunks),
        *(partial(programs.cycles, kind, most) for most in {p.max_depth for p in policies}),
    )
    for event in programs.events:
        print(f"{event.name:32} {event.seconds:6.2f} s {'compiled' if event.compiled else 'found'}")


def _draft_vocab(args: argparse.Namespace) -> None:
    from openjet_jax.checkpoint import read_config
    from openjet_jax.draft_list import DEFAULT_SIZE, counted_list, remove_list, write_list
    from openjet_jax.loading import checkpoint_of, load_tokenizer

    if args.reset == bool(args.files):
        raise ValueError("give either files to count or --reset")
    directory = checkpoint_of(args.model)
    config = read_config(directory)
    if not config.model.has_mtp:
        raise ValueError(f"{directory} has no MTP block and makes no drafts")
    if args.reset:
        print("removed" if remove_list(directory) else "there was no list")
        return
    size = DEFAULT_SIZE if args.size is None else args.size
    draft = counted_list(load_tokenizer(directory), args.files, size, args.draft_head)
    print(f"{write_list(directory, config.hash, draft)}: {draft}")


def _doctor(args: argparse.Namespace) -> None:
    from openjet_jax.doctor import examine, render

    facts = examine()
    print(json.dumps(facts, indent=1) if args.json else render(facts))


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code.

    Args:
      argv: arguments without the program's name; those of the process by default.
    """
    try:
        args = _parser().parse_args(argv)
        here = args.command == "inspect" and args.device is None
        if args.command in _WITHOUT_DEVICE and not here:
            startup.use_cpu()
        startup.share_memory(getattr(args, "memory_fraction", None))
        args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, *_BAD_PATHS) as error:
        print(f"openjet-jax: {_reason(error)}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"openjet-jax: {_reason(error)}", file=sys.stderr)
        return 1
    except (RuntimeError, MemoryError) as error:
        if not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
            raise
        print(f"openjet-jax: {_OUT_OF_MEMORY} ({_reason(error):.200})", file=sys.stderr)
        return 1
    return 0


def _reason(error: Exception) -> str:
    """Returns an error in one line, a file's name before what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
