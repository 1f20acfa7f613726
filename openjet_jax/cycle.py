"""One speculative cycle, the core of the engine, as a pure function of fixed shape.

    verify   fold pending rows, run the trunk on [newest token, drafts], choose a token at every row
    commit   accept the longest agreeing prefix, emit it and one token more; nothing is restored
    draft    the MTP block catches up with the true hidden rows, and proposes the next drafts

Every depth runs the same R padded rows, so a row's numbers do not depend on how many drafts there
were: text is a function of prompt, seed and settings alone. How programs are compiled, what the
host does between dispatches and where weights come from are not known here.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from openjet_jax.architectures import architecture_of
from openjet_jax.config import ROWS, ModelConfig
from openjet_jax.draft_vocabulary import hold
from openjet_jax.head_choice import choose_draft, choose_tokens
from openjet_jax.sampling import accept, observe
from openjet_jax.settings import SamplingKind
from openjet_jax.state import CycleInfo, DecodeState, MtpRows, Request
from openjet_jax.weights import Weights


def cycle(
    weights: Weights,
    state: DecodeState,
    *,
    config: ModelConfig,
    kind: SamplingKind,
    max_depth: int,
) -> tuple[DecodeState, CycleInfo]:
    """Returns the state after one cycle, and what the cycle emitted.

    Args:
      weights: the model.
      state: a conversation with a newest token, `request.remaining` at least 1, not stopped.
      config: the model's sizes.
      kind: the sampling program, fixed when compiling.
      max_depth: most drafts this program makes; the request's depth counts up to it.
    """
    model, start, row = architecture_of(config), state.length, jnp.arange(ROWS)
    rows = jnp.concatenate([state.tokens[start][None], state.drafts])
    with jax.named_scope("verify"):
        num_live, caches = 1 + state.num_drafts, (state.recurrent, state.kv)
        hidden, (recurrent, kv) = model.trunk(
            weights, config, rows, start, num_live, caches, chunked=False
        )
        with jax.named_scope("head"):
            sampling = state.request.sampling
            chosen, logprobs, top = choose_tokens(
                model.features(weights, config, hidden),
                weights.head,
                start + 1 + row,
                sampling,
                kind,
                state.drafts,
                vocab_used=config.vocab_used,
                allowed=state.request.allowed,
            )
    with jax.named_scope("commit"):
        accepted = accept(state.drafts, state.num_drafts, chosen)
        num_tokens, stopped = _cut(chosen, accepted, state.request)
        emitted = jnp.where(row < num_tokens, chosen, 0)
        info = CycleInfo(
            tokens=emitted,
            logprobs=jnp.where(row < num_tokens, logprobs, 0.0),
            top_logprobs=top[0],
            top_ids=top[1],
            num_tokens=num_tokens,
            drafted=state.num_drafts,
            accepted=accepted,
            stopped=stopped,
        )
        before = state.hidden
        state = replace(
            state,
            tokens=_append(state.tokens, start + 1, emitted, num_tokens),
            length=start + num_tokens,
            kv=kv.committed(start + num_tokens),
            recurrent=recurrent.committed(num_tokens),
            hidden=hidden[num_tokens - 1],
            request=replace(
                state.request,
                sampling=observe(sampling, emitted, num_tokens),
                remaining=state.request.remaining - num_tokens,
            ),
            slots=hold(state.slots, weights, emitted, num_tokens),
            stopped=stopped,
        )
    if state.mtp_kv is None:
        return state, info
    with jax.named_scope("draft"):
        true_hidden = jnp.concatenate([before[None], hidden[:-1]])
        caught_up = jnp.concatenate([rows[:1], emitted[:-1]])
        if max_depth == 0:
            entries = MtpRows(
                tokens=caught_up, hidden=true_hidden, start=start, live=row < num_tokens
            )
            mtp_kv = model.mtp_fill(entries, state.mtp_kv, weights, config)
            return replace(state, mtp_kv=mtp_kv, num_drafts=jnp.int32(0)), info
        depth = _next_depth(state.request, info, max_depth)
        state = _draft(weights, state, caught_up, true_hidden, num_tokens, depth, config, kind)
    return state, info


def _cut(
    chosen: Int[Array, " rows"], accepted: Int[Array, ""], request: Request
) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """Returns how many chosen tokens are emitted, and whether the last of them is a stop id."""
    stops = jnp.any(chosen[:, None] == request.stop_ids[None, :], -1)
    first_stop = jnp.argmax(jnp.append(stops, True))
    num_tokens = jnp.minimum(jnp.minimum(accepted, first_stop) + 1, request.remaining)
    return num_tokens.astype(jnp.int32), stops[num_tokens - 1]


def _append(
    tokens: Int[Array, " capacity"], at: Int[Array, ""], new: Int[Array, " rows"], count
) -> Int[Array, " capacity"]:
    """Returns the token ids with `count` new ones from position `at` on."""
    row = jnp.arange(new.shape[0])
    return tokens.at[jnp.where(row < count, at + row, tokens.shape[0])].set(new, mode="drop")


def _next_depth(request: Request, info: CycleInfo, max_depth: int) -> Int[Array, ""]:
    """Returns how many drafts to make: none after the end, fewer after a rejection if asked."""
    rejected = info.accepted < info.drafted
    depth = jnp.where(
        rejected, jnp.minimum(request.depth, request.depth_after_rejection), request.depth
    )
    ended = info.stopped | (request.remaining == 0)
    return jnp.where(ended, 0, jnp.minimum(depth, max_depth))


def _draft(
    weights: Weights,
    state: DecodeState,
    tokens: Int[Array, " rows"],
    hidden: Float[Array, "rows hidden"],
    num_tokens: Int[Array, ""],
    depth: Int[Array, ""],
    config: ModelConfig,
    kind: SamplingKind,
) -> DecodeState:
    """Returns the state with the MTP cache caught up and `depth` new drafts.

    The first pass takes the rows that catch up and, with them, the newest token's own row, whose
    output is the first draft; each later pass takes one row, fed with the block's own output.

    Args:
      weights: the model.
      state: the committed state.
      tokens: the cycle's first token, then the emitted ones: row `num_tokens` is the newest.
      hidden: trunk output of the position before each row.
      num_tokens: emitted tokens.
      depth: drafts to make.
      config: the model's sizes.
      kind: the sampling program.
    """
    assert state.mtp_kv is not None
    model, row, sampling = architecture_of(config), jnp.arange(ROWS), state.request.sampling
    first = state.length - num_tokens

    def step(i, carry):
        tokens, hidden, start, newest, drafts, kv = carry
        live = row < newest + jnp.minimum(depth, 1)
        entries = MtpRows(tokens=tokens, hidden=hidden, start=start, live=live)
        out, kv = model.mtp_block(entries, kv, weights, config, continues=i > 0)
        out = lax.dynamic_index_in_dim(out, newest, keepdims=False)
        with jax.named_scope("draft_head"):
            token = choose_draft(
                model.mtp_features(weights, config, out[None]),
                weights,
                state.slots,
                (state.length + 1 + i)[None],
                sampling,
                kind.draft,
                drafts,
                i[None],
                vocab_used=config.vocab_used,
            )
        drafts = lax.dynamic_update_slice(drafts, token, (i,))
        tokens = jnp.where(row == 0, token, 0)
        hidden = jnp.where(row[:, None] == 0, out, 0.0)
        return tokens, hidden, state.length + 1 + i, jnp.int32(0), drafts, kv

    none = jnp.zeros(ROWS - 1, jnp.int32)
    carry = (tokens, hidden, first, num_tokens, none, state.mtp_kv)
    *_, drafts, mtp_kv = lax.fori_loop(0, jnp.maximum(depth, 1), step, carry)
    return replace(state, mtp_kv=mtp_kv.committed(state.length), drafts=drafts, num_drafts=depth)


def cycles(
    weights: Weights,
    state: DecodeState,
    count: Int[Array, ""],
    *,
    config: ModelConfig,
    kind: SamplingKind,
    max_depth: int,
    most: int,
) -> tuple[DecodeState, CycleInfo, Int[Array, ""]]:
    """Returns the state after up to `count` cycles, their infos in order, and how many ran.

    The device stops by itself at a stop id or when no token remains to be emitted.

    Args:
      weights: the model.
      state: as for `cycle`.
      count: cycles to run, at most `most`.
      config: the model's sizes.
      kind: the sampling program.
      max_depth: most drafts a cycle makes.
      most: leading size of the returned infos.
    """
    specs = jax.eval_shape(
        lambda w, s: cycle(w, s, config=config, kind=kind, max_depth=max_depth), weights, state
    )
    infos = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), specs[1])

    def going(carry):
        i, state, _ = carry
        return (i < count) & ~state.stopped & (state.request.remaining > 0)

    def body(carry):
        i, state, infos = carry
        state, info = cycle(weights, state, config=config, kind=kind, max_depth=max_depth)
        infos = jax.tree.map(lambda a, x: lax.dynamic_update_index_in_dim(a, x, i, 0), infos, info)
        return i + 1, state, infos

    ran, state, infos = lax.while_loop(going, body, (jnp.int32(0), state, infos))
    return state, infos, ran
