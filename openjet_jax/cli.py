"""The command line: convert, inspect, generate, chat, and the machine interfaces beside them.

Heavy imports stand inside the commands, so that `--help` and bad arguments answer at once. Every
expected failure ends in one line on stderr and exit code 2 (bad input) or 1 (could not be done).
"""

import argparse
import json
import os
import sys
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="openjet-jax", description="Exact, speculative decoding of GGUF models in JAX."
    )
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
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("generate", _generate, "generate text from a prompt")
    _model_arguments(sub)
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to continue; \\n and \\t are taken as written")
    source.add_argument("--prompt-file", type=Path, help="file that holds the text")
    source.add_argument("--message", help="a user message, rendered by the chat template")
    source.add_argument("--tokens", type=Path, help=".npy file of token ids")
    _generation_arguments(sub, max_new_tokens=256)
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub.add_argument("--profile", type=Path, help="write a JAX profiler trace to a directory")

    sub = command("chat", _chat, "talk to a model")
    _model_arguments(sub)
    sub.add_argument("--system", help="system message")
    _generation_arguments(sub, max_new_tokens=1024)

    sub = command("serve", _serve, "serve OpenAI's interface and a chat page over HTTP")
    _model_arguments(sub)
    sub.add_argument("--host", default="127.0.0.1", help="address to listen on")
    sub.add_argument("--port", type=int, default=8000)
    sub.add_argument("--name", help="what clients call the model")
    sub.add_argument("--agents", type=int, default=1, help="conversations on the device, 1..8")
    sub.add_argument("--queue", type=int, default=32, help="requests that may wait for a place")
    sub.add_argument("--depth", help='drafts a cycle: 0..5, "4/3" (3 after a rejection), "auto"')
    sub.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    sub.add_argument("--api-key-file", type=Path, help="file of keys, one a line")
    sub.add_argument("--session-dir", type=Path, help="keep conversations here across restarts")

    sub = command("logits", _logits, "write logits at every position of a token sequence")
    sub.add_argument("model", help="a checkpoint, a .gguf file, or `tiny`")
    sub.add_argument("--tokens", type=Path, required=True, help=".npy file of token ids")
    sub.add_argument("--out", type=Path, required=True, help=".npz file to write")
    sub.add_argument("--mtp", action="store_true", help="also the MTP block's logits")

    sub = command("tokenize", _tokenize, "print the token ids of a file's text")
    sub.add_argument(
        "model", help="a checkpoint, a .gguf file (vocabulary only will do), or `tiny`"
    )
    sub.add_argument("--file", type=Path, required=True, help="UTF-8 text")
    sub.add_argument("--special", action="store_true", help="read control tokens from the text")
    sub.add_argument("--json", action="store_true", help="print a JSON list")

    sub = command("render", _render, "print the prompt that a conversation renders to")
    sub.add_argument("model", help="a checkpoint, a .gguf file, or `tiny`")
    sub.add_argument("--conversation", type=Path, required=True, help="JSON: messages, tools, kw")
    sub.add_argument("--template", type=Path, help="a chat template in place of the model's")

    sub = command("compile", _compile, "make programs ready before the first request")
    _model_arguments(sub)
    sub.add_argument("--depths", default="auto", help='comma-separated depths, such as "0,4,auto"')
    sub.add_argument("--temperature", type=float, default=0.0, help="0 or above: greedy or sampled")

    sub = command("doctor", _doctor, "show devices, versions, and what will be used and why")
    sub.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _model_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", help="a checkpoint, a .gguf file, or `tiny`")
    sub.add_argument("--context", type=int, help="most positions, prompt and output together")
    sub.add_argument("--kv-dtype", help="format of the key-value cache: float32 or bfloat16")


def _generation_arguments(sub: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    sub.add_argument("-n", "--max-new-tokens", type=int, default=max_new_tokens)
    sub.add_argument("--depth", help='drafts a cycle: 0..5, "4/3" (3 after a rejection), "auto"')
    sub.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    sub.add_argument("--top-k", type=int, default=0)
    sub.add_argument("--top-p", type=float, default=1.0)
    sub.add_argument("--min-p", type=float, default=0.0)
    sub.add_argument("--repetition-penalty", type=float, default=1.0)
    sub.add_argument("--presence-penalty", type=float, default=0.0)
    sub.add_argument("--frequency-penalty", type=float, default=0.0)
    sub.add_argument("--logit-bias", type=json.loads, default={}, help='JSON: {"id": bias, ...}')
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--stop", action="append", default=[], help="string that ends the text")
    sub.add_argument("--ignore-eos", action="store_true", help="go on past stop tokens")
    sub.add_argument(
        "--template-options", type=json.loads, help='JSON: {"enable_thinking": false, ...}'
    )


def _settings(args: argparse.Namespace) -> dict[str, object]:
    """Returns the arguments of `stream` that options stand for."""
    from openjet_jax.settings import Sampling

    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias={int(token): bias for token, bias in args.logit_bias.items()},
        seed=args.seed,
    )
    return {
        "sampling": sampling,
        "max_new_tokens": args.max_new_tokens,
        "depth": args.depth,
        "stop": args.stop,
        "ignore_eos": args.ignore_eos,
        "context": args.context,
        "kv_dtype": args.kv_dtype,
    }


def _convert(args: argparse.Namespace) -> None:
    from openjet_jax.convert.pipeline import convert_gguf

    print(convert_gguf(args.source, args.output, force=args.force))


def _inspect(args: argparse.Namespace) -> None:
    from openjet_jax.inspection import inspect, render

    facts = inspect(args.model, context=args.context, kv_dtype=args.kv_dtype)
    print(json.dumps(facts, indent=1) if args.json else render(facts))


def _generate(args: argparse.Namespace) -> None:
    import numpy as np

    import openjet_jax as oj

    settings = _settings(args)
    if args.message is not None:
        settings |= {
            "messages": [{"role": "user", "content": args.message}],
            "template_options": args.template_options,
        }
    elif args.tokens is not None:
        settings["prompt"] = np.load(args.tokens)
    elif args.prompt_file is not None:
        settings["prompt"] = args.prompt_file.read_bytes().decode("utf-8")
    else:
        settings["prompt"] = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    model = oj.load(args.model)
    if args.profile is not None:
        from openjet_jax.profiling import profiled

        out = profiled(model, args.profile, settings)
        print(f"trace written to {args.profile}", file=sys.stderr)
    elif args.json:
        out = oj.generate(model, **settings)
    else:
        if isinstance(settings.get("prompt"), str):
            print(settings["prompt"], end="", flush=True)
        stats = None
        for piece in oj.stream(model, **settings):
            print(piece.text, end="", flush=True)
            stats = piece.stats
        print(f"\n\n{stats}", flush=True)
        return
    print(json.dumps(out.as_dict()) if args.json else out.text)


def _chat(args: argparse.Namespace) -> None:
    import openjet_jax as oj
    from openjet_jax.chat_loop import chat_loop

    settings = _settings(args) | {"template_options": args.template_options}
    chat_loop(oj.load(args.model), args.system, settings)


def _serve(args: argparse.Namespace) -> None:
    try:
        from openjet_jax.server.config import ServerConfig
        from openjet_jax.server.serve import serve
    except ModuleNotFoundError as error:
        raise ValueError(
            f"serving needs {error.name}; install the extra: pip install 'openjet-jax[server]'"
        ) from None
    import openjet_jax as oj

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
        session_dir=args.session_dir,
    )
    serve(oj.load(args.model), config)


def _logits(args: argparse.Namespace) -> None:
    import numpy as np

    import openjet_jax as oj
    from openjet_jax.scoring import score

    model = oj.load(args.model)
    arrays = score(model, np.load(args.tokens), mtp=args.mtp)
    np.savez(args.out, **arrays)


def _tokenize(args: argparse.Namespace) -> None:
    from openjet_jax.loading import load_tokenizer

    text = args.file.read_bytes().decode("utf-8")  # line ends as they are
    ids = load_tokenizer(args.model).encode(text, special=args.special)
    print(json.dumps(ids) if args.json else " ".join(map(str, ids)))


def _render(args: argparse.Namespace) -> None:
    from openjet_jax.chat import ChatTemplate
    from openjet_jax.loading import load_template

    conversation = json.loads(args.conversation.read_text(encoding="utf-8"))
    if args.template is not None:
        template = ChatTemplate(args.template.read_text(encoding="utf-8"))
    else:
        template = load_template(args.model)
    options = dict(conversation.get("kw") or {})
    sys.stdout.write(
        template.render(conversation["messages"], tools=conversation.get("tools"), **options)
    )


def _compile(args: argparse.Namespace) -> None:
    import openjet_jax as oj
    from openjet_jax.depth import parse_depth
    from openjet_jax.engine import programs_for
    from openjet_jax.settings import Sampling

    model = oj.load(args.model)
    programs = programs_for(model, args.context, args.kv_dtype)
    programs.start()
    for rows in programs.decode.chunks:
        programs.prefill(rows)
    kinds = [Sampling().kind]
    if args.temperature:
        kinds = [Sampling(temperature=args.temperature, top_k=20).kind]
    for depth in args.depths.split(","):
        policy = parse_depth(depth if model.config.has_mtp else 0)
        for kind in kinds:
            programs.cycles(kind, policy.max_depth)
    for event in programs.events:
        print(f"{event.name:32} {event.seconds:6.2f} s {'compiled' * event.compiled or 'found'}")


def _doctor(args: argparse.Namespace) -> None:
    from openjet_jax.doctor import examine, render

    facts = examine()
    print(json.dumps(facts, indent=1) if args.json else render(facts))


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code.

    Args:
      argv: arguments without the program's name; those of the process by default.
    """
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ValueError as error:
        print(f"openjet-jax: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"openjet-jax: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
