"""`generate` and `stream`: from a prompt to text, with everything a user may ask for."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import jax
import numpy as np

from openjet_jax.answers import Generation, Piece, answer, answer_settings, joined
from openjet_jax.compiled import Programs
from openjet_jax.config import DecodeConfig, ModelConfig
from openjet_jax.constraint import Constraint
from openjet_jax.conversation import Conversation
from openjet_jax.device_memory import device_room
from openjet_jax.dispatches import checked_ids, chunk_sizes, cycles_of
from openjet_jax.loading import Model
from openjet_jax.memory import check_room
from openjet_jax.settings import Sampling
from openjet_jax.stats import Stats

type Prompt = str | Sequence[int] | np.ndarray | jax.Array

DEFAULT_CONTEXT = 4096


def decode_config(
    config: ModelConfig, context: int | None = None, kv_dtype: str | None = None
) -> DecodeConfig:
    """Returns the shapes a conversation lives in.

    Args:
      config: the model's sizes.
      context: most positions; by default what the model was trained for, at most 4,096.
      kv_dtype: cache format; by default float32 on a CPU and bfloat16 elsewhere.

    Raises:
      ValueError: a context beyond the model's, or an unknown format.
    """
    if context is None:
        context = min(DEFAULT_CONTEXT, config.context)
    if context > config.context:
        raise ValueError(f"{context=} is more than the {config.context} positions the model knows")
    if kv_dtype is None:
        kv_dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return DecodeConfig(context=context, kv_dtype=kv_dtype)


def programs_for(model: Model, context: int | None = None, kv_dtype: str | None = None) -> Programs:
    """Returns the model's programs in the shapes of `decode_config`, kept with the model.

    Raises:
      ValueError: as `decode_config`; or a conversation of these shapes does not fit the device.
    """
    decode = decode_config(model.config, context, kv_dtype).on(model.backend)
    if decode not in model.programs:
        if room := device_room():
            check_room(
                model.config, model.tensors, decode, room, backend=model.backend, loaded=True
            )
        model.programs[decode] = Programs(model.config, decode, model.weights, model.store)
    return model.programs[decode]


def prompt_ids(model: Model, prompt, messages=None, template_options=None) -> list[int]:
    """Returns the ids of a prompt or of a rendered conversation."""
    if (prompt is None) == (messages is None):
        raise ValueError("give either a prompt or messages")
    if messages is not None:
        return model.render(messages, **_checked_options(template_options))
    if template_options:
        raise ValueError(f"{template_options=} has a meaning for messages only")
    if not prompt if isinstance(prompt, str) else np.size(prompt) == 0:
        raise ValueError("the prompt is empty; give at least one token")
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt)
    return checked_ids(prompt, model.config.vocab).tolist()


def _checked_options(options) -> dict:
    """Returns a template's options as keyword arguments."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or "messages" in options:
        raise ValueError(
            f"template_options={options!r:.80} must map the template's own variables to values, "
            "such as {'enable_thinking': False}"
        )
    return dict(options)


def stream(
    model: Model,
    prompt: Prompt | None = None,
    *,
    messages: Sequence[Mapping] | None = None,
    template_options: Mapping | None = None,
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    depth: int | str | None = None,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    context: int | None = None,
    kv_dtype: str | None = None,
    cycles_per_dispatch: int | None = None,
    conversation: Conversation | None = None,
    constraint: Constraint | None = None,
    top_logprobs: int = 0,
    deadline: float | None = None,
) -> Iterator[Piece]:
    """Yields text as it is generated, in bursts of one dispatch.

    Args:
      model: from `load`.
      prompt: text (control tokens in it are plain text), or token ids of any integer array type.
      messages: a conversation in place of a prompt, rendered by the model's own chat template.
      template_options: for the template: `tools`, `enable_thinking`, `reasoning_effort`, ...
      max_new_tokens: most tokens to generate; also limited by the context.
      sampling: how tokens are chosen; greedy by default.
      depth: drafts a cycle, 0..5, "4/3", or "auto"; by default automatic, or 0 without MTP. Text
        does not depend on it.
      stop: strings that end the text; they are not part of it.
      stop_ids: ids that end it, in place of the model's own.
      ignore_eos: goes on past every stop id.
      context: most positions, prompt and output together.
      kv_dtype: format of the key-value cache.
      cycles_per_dispatch: cycles between two looks of the host.
      conversation: continues this one: the prompt is appended to it.
      constraint: restricts every token, whatever the depth; see `Constraint`.
      top_logprobs: how many of the likeliest tokens to report beside each, 0..20. Programs that
        report them are compiled on first use and take a little longer.
      deadline: when the answer ends, by `time.monotonic`; the dispatch that runs then is the last.

    Raises:
      ValueError: a setting is off; the message names it, its limit and the way out.
    """
    settings = answer_settings(
        model,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        depth=depth,
        stop=stop,
        stop_ids=stop_ids,
        ignore_eos=ignore_eos,
        cycles_per_dispatch=cycles_per_dispatch,
        constraint=constraint,
        top_logprobs=top_logprobs,
        deadline=deadline,
    )
    ids = prompt_ids(model, prompt, messages, template_options)
    if conversation is None:
        conversation = Conversation(model.weights, programs_for(model, context, kv_dtype))
    elif context is not None or kv_dtype is not None:
        raise ValueError(f"{context=} and {kv_dtype=} are the conversation's own; leave them out")
    conversation.check_room(len(ids))
    cycles_of(conversation.decode, cycles_per_dispatch)
    conversation.stats = Stats(ready_s=conversation.stats.ready_s)
    programs, sizes = conversation.programs, chunk_sizes(conversation.decode.chunks, len(ids))
    conversation.begin(
        *(partial(programs.prefill, rows) for rows in sorted(set(sizes))),
        partial(programs.cycles, settings.kind, settings.depth.max_depth),
    )
    conversation.read(ids)
    return answer(model, conversation, settings)


def generate(model: Model, prompt: Prompt | None = None, **settings) -> Generation:
    """Returns the whole generation at once; arguments are those of `stream`."""
    return joined(stream(model, prompt, **settings))
