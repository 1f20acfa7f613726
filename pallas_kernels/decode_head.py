"""The vocabulary head: a decode product whose outputs are chosen from as they are made.

One pass over the weights gives what a cycle needs of the logits: the best token, or the best value
of every 16 tokens; and the log-sum-exp. Penalties, bias and masks are applied before anything is
compared. A greedy choice writes no logits; a choice among the best candidates writes them once, and
reads back those of a few units.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import ptx
from pallas_kernels.decode_activations import Activations
from pallas_kernels.decode_cuts import Cut, Tiles
from pallas_kernels.decode_product import Outputs, launch
from pallas_kernels.decode_words import ROWS, Block

PREFIX = 8
"""Drafted tokens that a row's prefix may hold, at most."""

_LOWEST = -3.0e38
_FIELDS = 5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adjustments:
    """Penalties and bias; a column is a token, or one of a list.

    Attributes:
      settings: float32 [4]: repetition, frequency and presence penalties, and nothing.
      bias: float32 [N], of each column.
      history: uint32 [N]: times the column's token was generated, 2^31 more if it stands before.
      prefix: int32 [R, 8]: drafted tokens in each row's prefix, -1 elsewhere.
    """

    settings: jax.Array
    bias: jax.Array
    history: jax.Array
    prefix: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadOperands:
    """What the head's outputs are chosen by, beside them; None where there is none.

    Attributes:
      adjustments: penalties and bias.
      allowed: uint32 [R, N / 32], one bit a column, lowest first: those a row may choose.
      tokens: int32 [N]: token of each column; None where columns are tokens.
    """

    adjustments: Adjustments | None = None
    allowed: jax.Array | None = None
    tokens: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """A row's best column.

    Attributes:
      value: float32 [R], adjusted; -inf where no column may be chosen.
      column: int32 [R], the lowest among equals; 0 where no column may be chosen.
      logit: float32 [R], of that column, not adjusted; of no meaning where none may be chosen.
      log_sum: float32 [R], the log-sum-exp of the row's logits, not adjusted.
    """

    value: jax.Array
    column: jax.Array
    logit: jax.Array
    log_sum: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """What the best columns of a row are found from.

    Attributes:
      maxima: float32 [R, units], the best adjusted value of every 16 columns.
      logits: float32 [units, R, 16], not adjusted.
      log_sum: float32 [R], as in `Best`.
    """

    maxima: jax.Array
    logits: jax.Array
    log_sum: jax.Array


def decode_head_reference(
    logits: jax.Array, operands: HeadOperands, *, used: int, candidates: bool
) -> Best | Candidates:
    """Returns what `decode_head` does of logits [R, N], in plain JAX."""
    rows, columns = logits.shape
    column = jnp.arange(columns, dtype=jnp.int32)
    tokens = column if operands.tokens is None else operands.tokens
    exists = ((tokens >= 0) & (tokens < used))[None]
    log_sum = jax.nn.logsumexp(jnp.where(exists, logits, -jnp.inf), axis=1)
    value = logits
    if (given := operands.adjustments) is not None:
        repetition, frequency, presence, _ = given.settings
        drafted = (given.prefix[:, :, None] == tokens[None, None]).sum(1, dtype=jnp.uint32)
        counts = (given.history & 0x7FFFFFFF)[None] + drafted
        seen = (given.history >> 31 != 0)[None] | (counts > 0)
        penalised = jnp.where(value > 0, value / repetition, value * repetition)
        value = jnp.where(seen, penalised, value) - frequency * counts.astype(jnp.float32)
        value = value - jnp.where(counts > 0, presence, 0) + given.bias[None]
    if operands.allowed is not None:
        bits = jnp.repeat(operands.allowed, 32, axis=1)[:, :columns]
        exists = exists & (bits >> (column % 32).astype(jnp.uint32)[None] & 1 != 0)
    value = jnp.where(exists & ~jnp.isnan(value), value, -jnp.inf)
    if candidates:
        return Candidates(
            maxima=value.reshape(rows, -1, ROWS).max(-1),
            logits=logits.reshape(rows, -1, ROWS).transpose(1, 0, 2),
            log_sum=log_sum,
        )
    top = value.max(1)
    best = jnp.where(value == top[:, None], column[None], columns).min(1)
    best = jnp.where(top > -jnp.inf, best, 0)
    logit = jnp.take_along_axis(logits, best[:, None], 1)[:, 0]
    return Best(value=top, column=best, logit=logit, log_sum=log_sum)


def decode_head(
    x: Activations,
    weights: jax.Array,
    layer: jax.Array,
    block: Block,
    tiles: Tiles,
    operands: HeadOperands,
    *,
    used: int,
    candidates: bool,
) -> Best | Candidates:
    """Returns each row's best column, or what its best 64 are found from, in one pass over W.

    Args:
      x: of `prepare` with the same block.
      weights: uint32 [layers, N / 16, words], of `block.tile`.
      layer: int32 [1].
      block: kind of block.
      tiles: cuts, K in one part.
      operands: what columns are chosen by.
      used: tokens at and above it do not exist.
      candidates: whether several columns of a row will be looked at.

    Raises:
      ValueError: as `decode_product`; or K is in several parts.
    """
    if tiles.parts != 1:
        raise ValueError(f"{tiles.parts=} must be 1: a choice needs whole sums")
    cut = Cut.of(x, weights, block, tiles, "none")
    plan = Choice(
        used=used,
        rows=cut.rows,
        adjusted=operands.adjustments is not None,
        masked=0 if operands.allowed is None else operands.allowed.shape[1],
        listed=operands.tokens is not None,
        candidates=candidates,
    )
    results = [jax.ShapeDtypeStruct((cut.workers, _FIELDS, cut.rows), jnp.uint32)]
    if candidates:
        results.append(jax.ShapeDtypeStruct((cut.units, cut.rows), jnp.float32))
        results.append(jax.ShapeDtypeStruct((cut.units, cut.rows, ROWS), jnp.float32))
    given = operands.adjustments
    arrays = {
        "settings": given and given.settings,
        "bias": given and given.bias,
        "history": given and given.history,
        "prefix": given and given.prefix,
        "allowed": operands.allowed,
        "tokens": operands.tokens,
    }
    names = [name for name, array in arrays.items() if array is not None]
    others = [array for array in arrays.values() if array is not None]
    make = functools.partial(_Choosing, plan, (*names, "best", "maxima", "logits"))
    found, *rest = launch(cut, x, weights, layer, others, results, make)
    best = _over_workers(found)
    if not candidates:
        return best
    maxima, logits = rest
    return Candidates(maxima=maxima.T, logits=logits, log_sum=best.log_sum)


def _over_workers(found: jax.Array) -> Best:
    """Returns the best of what all consumers found: uint32 [workers, 5, R]."""
    value, logit, largest, total = (
        jax.lax.bitcast_convert_type(found[:, i], jnp.float32) for i in (0, 2, 3, 4)
    )
    column = found[:, 1].astype(jnp.int32)
    top, most = value.max(0), largest.max(0)
    winner = jnp.where(value == top[None], column, jnp.iinfo(jnp.int32).max).min(0)
    here = (value == top[None]) & (column == winner[None])
    sums = (total * jnp.exp(largest - most[None])).sum(0)
    best = Best(
        value=top,
        column=winner,
        logit=jnp.where(here, logit, -jnp.inf).max(0),
        log_sum=most + jnp.log(sums),
    )
    # Without it XLA would make every use of a field go through all workers again.
    return jax.lax.optimization_barrier(best)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What is static of a choice; `masked` is the number of words of a row's mask."""

    used: int
    rows: int
    adjusted: bool
    masked: int
    listed: bool
    candidates: bool

    @property
    def has_best(self) -> bool:
        """Whether consumers keep their best columns."""
        return not self.candidates

    def start(self, isa) -> list[Any]:
        """Returns a consumer's state before its first unit, for each tile of eight rows."""
        one = [isa.Float(_LOWEST), isa.Float(0.0)]
        if self.has_best:
            one += [isa.Float(-np.inf), isa.Word(0), isa.Float(0.0)]
        return [list(one) for _ in range(self.rows // 8)]

    def fetch(self, isa, places: dict[str, Any], unit, thread) -> dict[str, Any]:
        """Returns what memory holds of this thread's column of a unit."""
        column = unit * ROWS + (thread & 15)
        at = {
            name: isa.offset_address(places[name], column, 4)
            for name in ("tokens", "bias", "history")
            if name in places
        }
        return {name: isa.load_global_coherent(address) for name, address in at.items()}

    def take(self, isa, places, unit, thread, tile: int, logit, early, state) -> list[Any]:
        """Returns the state after one output of this thread, and stores what is to be stored.

        Args:
          isa: `ptx`, or a model of it.
          places: global addresses by name.
          unit: 16 columns.
          thread: of its warpgroup; column `thread % 16` of the unit, row `thread / 16` of the tile.
          tile: eight rows.
          logit: the output.
          early: of `fetch`.
          state: of the tile.
        """
        column = unit * ROWS + (thread & 15)
        token = early["tokens"] if self.listed else column
        row = (thread >> 4) + 8 * tile
        exists = token < self.used
        lowest = isa.Float(-np.inf)
        largest, total = state[:2]
        counted = isa.select_float(exists, logit, lowest)
        most = isa.maximum(largest, counted)
        total = isa.fma(total, isa.exp(largest - most), isa.exp(counted - most))
        value = self._adjusted(isa, places, row, token, logit, early) if self.adjusted else logit
        value = isa.select_float(exists, value, lowest)
        if self.masked:
            at = isa.offset_address(places["allowed"], row * self.masked + (column >> 5), 4)
            bit = (isa.load_global_coherent(at) >> (column & 31)) & 1
            value = isa.select_float(bit < 1, lowest, value)
        if self.candidates:
            # A NaN is no maximum.
            best = isa.maximum(value, lowest)
            for distance in (1, 2, 4, 8):
                best = isa.maximum(best, isa.shuffle_xor(best, distance))
            at = unit * self.rows + row
            isa.store_global(
                isa.offset_address(places["logits"], at * ROWS + (thread & 15), 4), [logit]
            )
            with isa.when((thread & 15) < 1):
                isa.store_global(isa.offset_address(places["maxima"], at, 4), [best])
            return [most, total]
        better = state[2] < value
        return [
            most,
            total,
            isa.select_float(better, value, state[2]),
            isa.select(better, column, state[3]),
            isa.select_float(better, logit, state[4]),
        ]

    def _adjusted(self, isa, places, row, token, logit, early):
        prefix_at = isa.offset_address(places["prefix"], row, 4 * PREFIX)
        prefix = [
            isa.as_word(value)
            for half in (0, 16)
            for value in isa.load_global_floats(prefix_at, half, 4)
        ]
        settings = isa.load_global_floats(places["settings"], 0, 4)
        repetition, frequency, presence, _ = settings
        count = early["history"] & 0x7FFFFFFF
        for drafted in prefix:
            count = count + isa.select((drafted ^ token) < 1, 1, 0)
        zero, is_new = isa.Float(0.0), count < 1
        never_seen = (count | early["history"]) < 1
        divided = isa.divide(logit, repetition)
        multiplied = isa.product_of(logit, repetition)
        penalised = isa.select_float(zero < logit, divided, multiplied)
        value = isa.select_float(never_seen, logit, penalised)
        value = isa.sum_of(value, -isa.product_of(frequency, isa.to_float(count)))
        value = isa.sum_of(value, -isa.select_float(is_new, zero, presence))
        return isa.sum_of(value, isa.as_float(early["bias"]))

    def finish(self, isa, places, worker, thread, state) -> None:
        """Stores what a consumer found: for each row, of the 16 threads that have it."""
        for tile, (largest, total, *best) in enumerate(state):
            if not best:
                best = [isa.Float(-np.inf), isa.Word(0), isa.Float(0.0)]
            value, column, logit = best
            for distance in (1, 2, 4, 8):
                other = isa.shuffle_xor(largest, distance)
                other_total = isa.shuffle_xor(total, distance)
                most = isa.maximum(largest, other)
                total = total * isa.exp(largest - most) + (other_total * isa.exp(other - most))
                largest = most
                if self.has_best:
                    theirs = isa.shuffle_xor(value, distance)
                    at = isa.shuffle_word_xor(column, distance)
                    raw = isa.shuffle_xor(logit, distance)
                    lower = isa.select(at < column, 1, 0)
                    loses = isa.select(value < theirs, 1, isa.select(theirs < value, 0, lower))
                    stays = loses < 1
                    value = isa.select_float(stays, value, theirs)
                    column = isa.select(stays, column, at)
                    logit = isa.select_float(stays, logit, raw)
            row = (thread >> 4) + 8 * tile
            with isa.when((thread & 15) < 1):
                fields = [isa.as_word(value), column, *map(isa.as_word, (logit, largest, total))]
                for i, field in enumerate(fields):
                    at = worker * (_FIELDS * self.rows) + i * self.rows + row
                    isa.store_global(isa.offset_address(places["best"], at, 4), [field])


class _Choosing(Outputs):
    """A head's outputs, chosen from."""

    def __init__(self, plan: Choice, names: tuple[str, ...], cut: Cut, at, worker: ptx.Word):
        """Takes what is chosen, and the names of the operands and results, in their order."""
        super().__init__(cut, at, worker)
        self.plan = plan
        self.places = dict(zip(names, at.others, strict=False))

    def start(self) -> Any:
        """Returns a state for each tile."""
        return self.plan.start(ptx)

    def fetch(self, turn: ptx.Word) -> Any:
        """Returns what memory holds of this thread's column."""
        unit = self.at.unit(self.cut, self.worker, turn)
        return self.plan.fetch(ptx, self.places, unit, self.thread)

    def store(self, turn: ptx.Word, read, early: Any, state: Any) -> Any:
        """Returns the state with a unit's outputs."""
        unit = self.at.unit(self.cut, self.worker, turn)
        return [
            self.plan.take(
                ptx,
                self.places,
                unit,
                self.thread,
                tile,
                read(self.row, self.column, tile) * scale,
                early,
                state[tile],
            )
            for tile, scale in enumerate(self.scales)
        ]

    def finish(self, state: Any) -> None:
        """Stores what this consumer found."""
        index = self.worker * self.cut.groups + self.at.group
        self.plan.finish(ptx, self.places, index, self.thread, state)
