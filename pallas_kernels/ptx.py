"""Instructions of an NVIDIA thread that Pallas does not name, for kernels written lane by lane.

Mosaic GPU's arrays are spread over a warpgroup by layouts it knows; a quantised product wants
layouts of its own: each thread loads exactly the bits of its matrix fragment. Such kernels run
inside `plgpu.inline_mgpu` and use this file: `Word` and `Float` are one register of every thread,
functions are one instruction, or a few. Register arithmetic is written with operators, so that the
same Python runs on NumPy arrays of 32 lanes in tests.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

_LESS = 4  # ordered: a NaN is less than nothing
_PREDICATES = {"eq": 0, "ne": 1, "slt": 2, "sle": 3, "sgt": 4, "sge": 5, "ult": 6}


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _f32() -> ir.Type:
    return ir.F32Type.get()


@jax.tree_util.register_pytree_node_class
class Word:
    """A 32-bit register; arithmetic is modulo 2**32, `>>` and comparisons other than < signed."""

    def __init__(self, value: Any):
        """Takes an MLIR value, or a constant."""
        if isinstance(value, int):
            value = arith.constant(_i32(), ir.IntegerAttr.get(_i32(), _signed(value)))
        self.value = value

    def tree_flatten(self):
        """Returns the register, so that loops can carry words."""
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        """Returns the word of a flattened register."""
        self = object.__new__(cls)
        (self.value,) = leaves
        return self

    def _with(self, operation: Callable, other: "Word | int", flip: bool = False) -> "Word":
        a, b = self.value, _word(other).value
        return Word(operation(b, a) if flip else operation(a, b))

    def __add__(self, other):
        return self._with(arith.addi, other)

    def __radd__(self, other):
        return self._with(arith.addi, other)

    def __sub__(self, other):
        return self._with(arith.subi, other)

    def __rsub__(self, other):
        return self._with(arith.subi, other, flip=True)

    def __mul__(self, other):
        return self._with(arith.muli, other)

    def __rmul__(self, other):
        return self._with(arith.muli, other)

    def __and__(self, other):
        return self._with(arith.andi, other)

    def __or__(self, other):
        return self._with(arith.ori, other)

    def __xor__(self, other):
        return self._with(arith.xori, other)

    def __lshift__(self, other):
        return self._with(arith.shli, other)

    def __rshift__(self, other):
        return self._with(arith.shrui, other)

    def __floordiv__(self, other):
        return self._with(arith.divui, other)

    def __mod__(self, other):
        return self._with(arith.remui, other)

    def _compare(self, predicate: str, other) -> ir.Value:
        return arith.cmpi(_PREDICATES[predicate], self.value, _word(other).value)

    def __lt__(self, other):
        return self._compare("ult", other)

    def equals(self, other: "Word | int") -> ir.Value:
        """Returns the predicate `self == other`."""
        return self._compare("eq", other)

    def differs(self, other: "Word | int") -> ir.Value:
        """Returns the predicate `self != other`."""
        return self._compare("ne", other)


@jax.tree_util.register_pytree_node_class
class Float:
    """A float32 register."""

    def __init__(self, value: Any):
        """Takes an MLIR value, or a constant."""
        if isinstance(value, float | int):
            value = arith.constant(_f32(), ir.FloatAttr.get(_f32(), float(value)))
        self.value = value

    def tree_flatten(self):
        """Returns the register, so that loops can carry floats."""
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        """Returns the float of a flattened register."""
        self = object.__new__(cls)
        (self.value,) = leaves
        return self

    def __add__(self, other):
        return Float(arith.addf(self.value, _float(other).value))

    def __sub__(self, other):
        return Float(arith.subf(self.value, _float(other).value))

    def __lt__(self, other):
        return arith.cmpf(_LESS, self.value, _float(other).value)

    def __mul__(self, other):
        return Float(arith.mulf(self.value, _float(other).value))

    def __neg__(self):
        return Float(arith.negf(self.value))


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _word(value: "Word | int") -> Word:
    return value if isinstance(value, Word) else Word(value)


def _float(value: "Float | float") -> Float:
    return value if isinstance(value, Float) else Float(value)


def _asm(text: str, *operands, results: Sequence[ir.Type] = (), effects: bool = True) -> list:
    """Returns the registers that a line of PTX writes."""
    values = [o.value if isinstance(o, Word | Float) else o for o in operands]
    if not results:
        mosaic.inline_ptx(text, *values, has_side_effects=True, convergent=True)
        return []
    written = mosaic.inline_ptx(
        text,
        *values,
        result_types=tuple(results),
        has_side_effects=effects,
        convergent=effects,
    )
    return list(written)


def _pure(text: str, *operands, result: Callable[[], ir.Type]) -> ir.Value:
    (value,) = _asm(text, *operands, results=[result()], effects=False)
    return value


# Where a thread is, and control flow.


def thread_index() -> Word:
    """Returns this thread's index in its block."""
    return Word(mosaic.thread_idx())


def uniform(word: Word) -> Word:
    """Returns lane 0's value in every lane, which tells the compiler that a warp does not split."""
    (value,) = _asm("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", word, results=[_i32()])
    return Word(value)


def block_index() -> Word:
    """Returns this block's index in a one-dimensional grid."""
    return Word(_pure("mov.u32 $0, %ctaid.x;", result=_i32))


def cluster_rank() -> Word:
    """Returns this block's index in its cluster."""
    return Word(_pure("mov.u32 $0, %cluster_ctarank;", result=_i32))


def select(predicate: ir.Value, on_true: Word | int, on_false: Word | int) -> Word:
    """Returns one of two words."""
    return Word(arith.select(predicate, _word(on_true).value, _word(on_false).value))


def select_float(predicate: ir.Value, on_true: Float, on_false: Float) -> Float:
    """Returns one of two floats."""
    return Float(arith.select(predicate, on_true.value, on_false.value))


def either(a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns whether one of two predicates holds, or both."""
    return arith.ori(a, b)


def any_lane(predicate: ir.Value) -> ir.Value:
    """Returns whether a predicate holds in any lane of the warp, the same in all of them."""
    flag = select(predicate, 1, 0)
    text = (
        "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.any.pred p, p, -1; selp.u32 $0, 1, 0, p; }"
    )
    (found,) = _asm(text, flag, results=[_i32()])
    return Word(found).differs(0)


def select_address(predicate: ir.Value, on_true: ir.Value, on_false: ir.Value) -> ir.Value:
    """Returns one of two global addresses."""
    return arith.select(predicate, on_true, on_false)


def choose(predicate: ir.Value, on_true: Callable, otherwise: Any) -> Any:
    """Returns `on_true()` for threads whose predicate holds, which alone run it, or `otherwise`."""
    leaves, tree = jax.tree.flatten(otherwise)
    branch = scf.IfOp(predicate, [leaf.type for leaf in leaves], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        result, result_tree = jax.tree.flatten(on_true())
        if result_tree != tree:
            raise ValueError(f"both outcomes must be alike: {tree} became {result_tree}")
        scf.yield_(result)
    with ir.InsertionPoint(branch.elseRegion.blocks[0]):
        scf.yield_(leaves)
    return jax.tree.unflatten(tree, list(branch.results))


@contextlib.contextmanager
def when(predicate: ir.Value) -> Iterator[None]:
    """Runs the statements inside for threads whose predicate holds."""
    branch = scf.IfOp(predicate)
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


def branch(predicate: ir.Value, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Runs one of two bodies: the roles of warpgroups, which may then differ in registers."""
    branch = scf.IfOp(predicate, has_else=True)
    for block, body in ((branch.then_block, then), (branch.else_block, otherwise)):
        assert block is not None
        with ir.InsertionPoint(block):
            body()
            scf.yield_([])


def set_registers(count: int, grow: bool) -> None:
    """Gives registers of this warpgroup's threads back, or takes more, up to a count."""
    _asm(f"setmaxnreg.{'inc' if grow else 'dec'}.sync.aligned.u32 {count};")


def loop(start: Word | int, stop: Word | int, step: Word | int, carry: Any, body: Callable) -> Any:
    """Returns the carry after `carry = body(index, carry)` for each index of a range."""
    leaves, tree = jax.tree.flatten(carry)
    operation = scf.ForOp(_word(start).value, _word(stop).value, _word(step).value, leaves)
    with ir.InsertionPoint(operation.body):
        inner = jax.tree.unflatten(tree, list(operation.inner_iter_args))
        result, result_tree = jax.tree.flatten(body(Word(operation.induction_variable), inner))
        if result_tree != tree:
            raise ValueError(f"a loop's body must keep its carry: {tree} became {result_tree}")
        scf.yield_(result)
    return jax.tree.unflatten(tree, list(operation.results))


# Arithmetic.


def fma(a: Float, b: Float, c: Float) -> Float:
    """Returns `a * b + c`, rounded once."""
    return Float(_pure("fma.rn.f32 $0, $1, $2, $3;", a, b, c, result=_f32))


def permute_bytes(low: Word, high: Word | int, selector: Word | int) -> Word:
    """Returns four bytes picked from eight (low's are 0-3), one selector nibble each."""
    text = "prmt.b32 $0, $1, $2, $3;"
    return Word(_pure(text, low, _word(high), _word(selector), result=_i32))


def merge(word: Word, mask: int, pattern: int | Word) -> Word:
    """Returns `word & mask ^ pattern`, one instruction."""
    return Word(
        _pure("lop3.b32 $0, $1, $2, $3, 0x6a;", word, Word(mask), _word(pattern), result=_i32)
    )


def multiply_bfloats(a: Word, b: Word) -> Word:
    """Returns the products of two pairs of bfloat16."""
    return Word(_pure("mul.rn.bf16x2 $0, $1, $2;", a, b, result=_i32))


def add_halves(a: Word, b: Word | int) -> Word:
    """Returns the sums of two pairs of float16."""
    return Word(_pure("add.rn.f16x2 $0, $1, $2;", a, _word(b), result=_i32))


def multiply_add_halves(a: Word, b: Word, c: Word) -> Word:
    """Returns `a * b + c` of pairs of float16, each rounded once."""
    return Word(_pure("fma.rn.f16x2 $0, $1, $2, $3;", a, b, c, result=_i32))


def multiply_halves(a: Word, b: Word | int) -> Word:
    """Returns the products of two pairs of float16."""
    return Word(_pure("mul.rn.f16x2 $0, $1, $2;", a, _word(b), result=_i32))


def half_to_float(word: Word, high: bool) -> Float:
    """Returns one float16 of a pair as float32."""
    pair = "_, h" if high else "h, _"
    text = f"{{ .reg .b16 h; mov.b32 {{{pair}}}, $1; cvt.f32.f16 $0, h; }}"
    return Float(_pure(text, word, result=_f32))


def byte_to_float(word: Word, index: int, signed: bool = False) -> Float:
    """Returns byte `index` of a word as float32."""
    kind = "s" if signed else "u"
    text = f"{{ .reg .b32 b; bfe.{kind}32 b, $1, {8 * index}, 8; cvt.rn.f32.{kind}32 $0, b; }}"
    return Float(_pure(text, word, result=_f32))


def product_of(a: Float, b: Float) -> Float:
    """Returns `a * b`, rounded: the compiler may not make it part of an `fma`."""
    return Float(_pure("mul.rn.f32 $0, $1, $2;", a, b, result=_f32))


def sum_of(a: Float, b: Float) -> Float:
    """Returns `a + b`, rounded: the compiler may not make it part of an `fma`."""
    return Float(_pure("add.rn.f32 $0, $1, $2;", a, b, result=_f32))


def maximum(a: Float, b: Float) -> Float:
    """Returns the larger of two floats."""
    return Float(_pure("max.f32 $0, $1, $2;", a, b, result=_f32))


def exp2(value: Float) -> Float:
    """Returns 2 to the power of a float, good to 2 ulp; 0 at minus infinity."""
    return Float(_pure("ex2.approx.ftz.f32 $0, $1;", value, result=_f32))


def pack_bfloats(low: Float, high: Float) -> Word:
    """Returns a pair of floats rounded to bfloat16."""
    return Word(_pure("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, result=_i32))


def pack_halves(low: Float, high: Float) -> Word:
    """Returns a pair of floats rounded to float16."""
    return Word(_pure("cvt.rn.f16x2.f32 $0, $1, $2;", high, low, result=_i32))


def subtract_bfloats(a: Word, b: Word) -> Word:
    """Returns the differences of two pairs of bfloat16."""
    return Word(_pure("sub.rn.bf16x2 $0, $1, $2;", a, b, result=_i32))


def as_word(value: Float) -> Word:
    """Returns the bits of a float32."""
    return Word(arith.bitcast(_i32(), value.value))


def bfloat_to_float(pair: Word, high: bool) -> Float:
    """Returns one bfloat16 of a pair as float32."""
    return as_float(pair & 0xFFFF0000 if high else pair << 16)


def exp(value: Float) -> Float:
    """Returns the exponential, good to 2 ulp near zero; the error grows with the argument."""
    text = "{ .reg .f32 e; mul.rn.f32 e, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, e; }"
    return Float(_pure(text, value, result=_f32))


def reciprocal(value: Float) -> Float:
    """Returns `1 / x`, good to 1 ulp."""
    return Float(_pure("rcp.approx.ftz.f32 $0, $1;", value, result=_f32))


def magnitude(value: Float) -> Float:
    """Returns the absolute value."""
    return Float(_pure("abs.f32 $0, $1;", value, result=_f32))


def divide(a: Float, b: Float) -> Float:
    """Returns `a / b`, correctly rounded."""
    return Float(_pure("div.rn.f32 $0, $1, $2;", a, b, result=_f32))


def to_float(word: Word) -> Float:
    """Returns an unsigned word as float32."""
    return Float(_pure("cvt.rn.f32.u32 $0, $1;", word, result=_f32))


def rsqrt(value: Float) -> Float:
    """Returns `1 / sqrt(x)`, good to 2 ulp."""
    return Float(_pure("rsqrt.approx.f32 $0, $1;", value, result=_f32))


def sigmoid(value: Float) -> Float:
    """Returns `1 / (1 + exp(-x))`, the exponential and the quotient good to 2 ulp."""
    text = (
        "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e,"
        " 0f3F800000; rcp.approx.ftz.f32 $0, e; }"
    )
    return Float(_pure(text, value, result=_f32))


def silu(value: Float) -> Float:
    """Returns `x / (1 + exp(-x))`."""
    return product_of(value, sigmoid(value))


def shuffle_xor(value: Float, distance: int) -> Float:
    """Returns the float of the lane whose index differs by this bit."""
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"
    (found,) = _asm(text, value, results=[_f32()])
    return Float(found)


def as_float(word: Word) -> Float:
    """Returns the float32 of the same bits."""
    return Float(arith.bitcast(_f32(), word.value))


def shuffle_word_xor(word: Word, distance: int) -> Word:
    """Returns the word of the lane whose index differs by these bits."""
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"
    (result,) = _asm(text, word, results=[_i32()])
    return Word(result)


def shuffle(value: Float, lane: Word) -> Float:
    """Returns the value of another lane of the warp."""
    (result,) = _asm("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", value, lane, results=[_f32()])
    return Float(result)


def mma(
    a: Sequence[Word], b: Sequence[Word], c: Sequence[Float], kind: Literal["f16", "bf16"] = "f16"
) -> list[Float]:
    """Returns this thread's part of `A @ B + C`: A [16, 16] and B [16, 8] of a kind, float32 C.

    Lane 4 g + t holds A[g, 2t:2t+2], A[g+8, ...], A[g, 2t+8:2t+10], A[g+8, ...] in four words,
    B[2t:2t+2, g], B[2t+8:2t+10, g] in two, and C[g, 2t:2t+2], C[g+8, 2t:2t+2] in four floats.
    """
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}},"
        " {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    values = mosaic.inline_ptx(
        text,
        *(register.value for register in (*a, *b, *c)),
        result_types=(_f32(),) * 4,
        has_side_effects=False,
        convergent=True,
    )
    return [Float(value) for value in values]


def descriptor(address: Word) -> Word:
    """Returns the low word of the description of a right-hand matrix in shared memory.

    The matrix is [columns, 64] float16, a column 128 bytes, eight columns 1,024; the 16-byte piece
    c of column n stands at place c ^ (n % 8). The address is a multiple of 1,024, or 32 bytes more
    for each 16 of the 64 that are passed over.
    """
    return (address & 0x3FFFF) >> 4


def descriptor_of_rows(address: Word, panel_bytes: int) -> Word:
    """Returns the low word of the description of a right-hand matrix whose rows lie in memory.

    The matrix is [k, columns] of 16 bits in panels [k, 64], a row 128 bytes; the 16-byte piece c of
    row n stands at place c ^ (n % 8). The address is a multiple of 1,024; sixteen rows are 2,048.
    """
    return descriptor(address) | panel_bytes >> 4 << 16


def _wgmma(
    acc: Sequence[Float] | int, left: Sequence[Word], matrix: Word, kind: str, turned: bool
) -> list[Float]:
    """Emits a product: acc may be a number of new sums; left is a fragment, or a `descriptor`."""
    old = [] if isinstance(acc, int) else list(acc)
    count = acc if isinstance(acc, int) else len(acc)
    sums = ", ".join(f"${i}" for i in range(count))
    words = [f"${count + len(old) + i}" for i in range(len(left) + 1)]
    # In the high word: eight rows are 64 times 16 bytes, and the swizzle is that of 128 bytes.
    high, flags = 0x40000040, f"p, 1, 1, {int(turned)}"
    setup = f"mov.b64 d, {{{words[-1]}, {high}}};"
    operand = f"{{{', '.join(words[:-1])}}}"
    if len(left) == 1:
        setup += f" mov.b64 e, {{{words[0]}, {high}}};"
        operand, flags = "e", f"p, 1, 1, 0, {int(turned)}"
    text = (
        f"{{ .reg .b64 d, e; .reg .pred p; setp.{'eq' if old else 'ne'}.b32 p, 0, 0; {setup}"
        f" wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.{kind}.{kind} {{{sums}}}, {operand},"
        f" d, {flags}; }}"
    )
    constraints = ["=f"] * count + [str(i) for i in range(len(old))] + ["r"] * len(words)
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([_f32()] * count),
        [register.value for register in (*old, *left, matrix)],
        text,
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [Float(llvm.extractvalue(_f32(), struct, [i])) for i in range(count)]


def wgmma(acc: Sequence[Float], a: Sequence[Word], matrix: Word) -> list[Float]:
    """Returns `acc + A @ B` of a warpgroup, not to be looked at before `wgmma_wait`.

    float16 A [64, 16] in registers, warp w the rows from 16 w on, laid out as in `mma`; B of
    `descriptor`, [16, columns]. acc[4 j : 4 j + 4] holds columns 8 j + 2t and + 1 of row g, then of
    row g + 8, for lane 4 g + t.
    """
    return _wgmma(acc, a, matrix, "f16", turned=False)


def wgmma_shared(acc: Sequence[Float] | int, left: Word, right: Word) -> list[Float]:
    """Returns `acc + A @ B` as `wgmma` does; A [64, 16] is of `descriptor` too, from [64, 64].

    A number in place of acc asks for so many new sums.
    """
    return _wgmma(acc, [left], right, "f16", turned=False)


def wgmma_rows(acc: Sequence[Float], a: Sequence[Word], matrix: Word) -> list[Float]:
    """Returns `acc + A @ B` as `wgmma` does, in bfloat16; B is of `descriptor_of_rows`."""
    return _wgmma(acc, a, matrix, "bf16", turned=True)


def wgmma_fence() -> None:
    """Orders register writes before the next `wgmma`."""
    _asm("wgmma.fence.sync.aligned;")


def wgmma_commit() -> None:
    """Ends a group of `wgmma`s."""
    _asm("wgmma.commit_group.sync.aligned;")


def wgmma_wait(groups: int) -> None:
    """Waits until at most this many of the last groups are unfinished."""
    _asm(f"wgmma.wait_group.sync.aligned {groups};")


def pin(registers: Sequence[Any]) -> list[Any]:
    """Returns registers that are computed here and nowhere later, and still held here."""
    if not registers:
        return []
    kinds = ["f" if isinstance(register, Float) else "r" for register in registers]
    types = [_f32() if kind == "f" else _i32() for kind in kinds]
    constraints = [f"={kind}" for kind in kinds] + [str(i) for i in range(len(kinds))]
    struct = llvm.inline_asm(
        llvm.StructType.get_literal(types),
        [register.value for register in registers],
        "",
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [
        type(register)(llvm.extractvalue(kind, struct, [i]))
        for i, (register, kind) in enumerate(zip(registers, types, strict=True))
    ]


# Memory.


def shared_address(ref: ir.Value) -> Word:
    """Returns the byte address of a shared-memory reference."""
    return Word(llvm.ptrtoint(_i32(), mosaic.memref_ptr(ref)))


def global_address(ref: ir.Value) -> ir.Value:
    """Returns the 64-bit byte address of a global-memory reference."""
    return llvm.ptrtoint(_i64(), mosaic.memref_ptr(ref))


def offset_address(address: ir.Value, count: Word, stride: int) -> ir.Value:
    """Returns the global address `address + count * stride`, in 64 bits."""
    wide = arith.extui(_i64(), count.value)
    step = arith.constant(_i64(), ir.IntegerAttr.get(_i64(), stride))
    return arith.addi(address, arith.muli(wide, step))


def load_shared(address: Word, offset: int = 0, words: int = 1) -> list[Word]:
    """Returns 1, 2 or 4 consecutive words of shared memory."""
    vector, names = _vector(words, 0)
    text = f"ld.shared{vector}.b32 {names}, [${words}+{offset}];"
    return [Word(v) for v in _asm(text, address, results=[_i32()] * words)]


def load_global(address: ir.Value, offset: int = 0, words: int = 1) -> list[Word]:
    """Returns 1, 2 or 4 consecutive words of global memory that no one writes meanwhile."""
    vector, names = _vector(words, 0)
    text = f"ld.global.nc.L1::no_allocate{vector}.b32 {names}, [${words}+{offset}];"
    return [Word(v) for v in _asm(text, address, results=[_i32()] * words)]


def load_shared_floats(address: Word, offset: int = 0, words: int = 1) -> list[Float]:
    """Returns 1, 2 or 4 consecutive float32 of shared memory."""
    vector, names = _vector(words, 0)
    text = f"ld.shared{vector}.f32 {names}, [${words}+{offset}];"
    return [Float(v) for v in _asm(text, address, results=[_f32()] * words)]


def load_global_floats(address: ir.Value, offset: int = 0, words: int = 1) -> list[Float]:
    """Returns 1, 2 or 4 consecutive float32 that a kernel before this one may have written."""
    vector, names = _vector(words, 0)
    text = f"ld.global{vector}.f32 {names}, [${words}+{offset}];"
    return [Float(v) for v in _asm(text, address, results=[_f32()] * words)]


def load_global_coherent(address: ir.Value, offset: int = 0) -> Word:
    """Returns a word of global memory that a kernel before this one may have written."""
    (value,) = _asm(f"ld.global.b32 $0, [$1+{offset}];", address, results=[_i32()])
    return Word(value)


def load_matrices(address: Word, offset: int = 0, transposed: bool = False) -> list[Word]:
    """Returns this thread's part of four 8x8 matrices of 16-bit values in shared memory.

    Lane 8 i + r gives the address of row r of matrix i, 16 bytes. Lane 4 g + t gets, of each,
    values 2t and 2t + 1 of row g, or, transposed, values g of rows 2t and 2t + 1.
    """
    kind = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return [Word(v) for v in _asm(text, address, results=[_i32()] * 4)]


def copy_async(shared: Word, source: ir.Value, num_bytes: Word) -> None:
    """Starts this thread's copy of 16 bytes, of which those after `num_bytes` become zero."""
    _asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", shared, source, num_bytes)


def close_copies() -> None:
    """Makes this thread's copies since the last call a group."""
    _asm("cp.async.commit_group;")


def wait_copies(groups: int) -> None:
    """Waits until at most this many of this thread's groups are under way."""
    _asm(f"cp.async.wait_group {groups};")


def store_shared(address: Word, values: Sequence[Word | Float], offset: int = 0) -> None:
    """Stores 1, 2 or 4 registers to consecutive words of shared memory."""
    vector, names = _vector(len(values), 1)
    kind = "f32" if isinstance(values[0], Float) else "b32"
    _asm(f"st.shared{vector}.{kind} [$0+{offset}], {names};", address, *values)


def store_global(address: ir.Value, values: Sequence[Word | Float], offset: int = 0) -> None:
    """Stores 1, 2 or 4 registers to consecutive words of global memory."""
    vector, names = _vector(len(values), 1)
    kind = "f32" if isinstance(values[0], Float) else "b32"
    _asm(f"st.global{vector}.{kind} [$0+{offset}], {names};", address, *values)


def _vector(words: int, first: int) -> tuple[str, str]:
    if words not in (1, 2, 4):
        raise ValueError(f"{words=} must be 1, 2 or 4: no wider or odder access exists")
    names = ", ".join(f"${first + i}" for i in range(words))
    return (f".v{words}", f"{{{names}}}") if words > 1 else ("", names)


# Barriers and the copy engine.


def barrier_init(barrier: Word, arrivals: int) -> None:
    """Prepares a barrier in shared memory (8 bytes) for phases of `arrivals` arrivals."""
    _asm(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", barrier)


def fence_barriers() -> None:
    """Makes prepared barriers visible to the copy engine and to the cluster."""
    _asm("fence.mbarrier_init.release.cluster;")


def fence_shared_writes() -> None:
    """Makes what this thread wrote to shared memory visible to the tensor cores' own reads."""
    _asm("fence.proxy.async.shared::cta;")


def barrier_wait(barrier: Word, parity: Word) -> None:
    """Waits until the phase of this parity has ended."""
    _asm(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;"
        " @!p bra AGAIN; }",
        barrier,
        parity,
    )


def barrier_arrive(barrier: Word) -> None:
    """Arrives at a barrier once (for each thread that executes it)."""
    _asm("mbarrier.arrive.shared::cta.b64 _, [$0];", barrier)


def barrier_expect(barrier: Word, num_bytes: Word | int) -> None:
    """Arrives once and makes the phase wait for this many bytes of copies as well."""
    _asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", barrier, _word(num_bytes))


def evict_first_policy() -> ir.Value:
    """Returns the cache policy of bytes that are read once: their lines leave first."""
    text = "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;"
    return _pure(text, result=_i64)


def copy_bulk(
    shared: Word, source: ir.Value, num_bytes: Word | int, barrier: Word, policy: ir.Value
) -> None:
    """Starts a copy of contiguous global bytes (16-byte granules) that completes on a barrier.
    The policy is of `evict_first_policy`.
    """
    _asm(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [$0], [$1], $2, [$3], $4;",
        shared,
        source,
        _word(num_bytes),
        barrier,
        policy,
    )


def copy_bulk_cached(shared: Word, source: ir.Value, num_bytes: int, barrier: Word) -> None:
    """Starts a copy like `copy_bulk` whose lines stay in the cache: every block reads them."""
    _asm(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        shared,
        source,
        _word(num_bytes),
        barrier,
    )


def remote_address(address: Word, rank: Word) -> Word:
    """Returns the cluster-wide address of a shared-memory address in the block of this rank."""
    return Word(_pure("mapa.shared::cluster.u32 $0, $1, $2;", address, rank, result=_i32))


def send(remote: Word, value: Float, remote_barrier: Word) -> None:
    """Stores four bytes in another block of the cluster, counted by a barrier there."""
    _asm(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], $1, [$2];",
        remote,
        as_word(value),
        remote_barrier,
    )


def copy_bulk_multicast(
    shared: Word, source: ir.Value, num_bytes: int, barrier: Word, blocks: Word
) -> None:
    """Starts a copy into several blocks of the cluster, at the same place and barrier of each.

    Args:
      shared: address, as in this block.
      source: global address.
      num_bytes: a multiple of 16.
      barrier: address, as in this block.
      blocks: bit mask of ranks.
    """
    _asm(
        "{ .reg .b16 mask; cvt.u16.u32 mask, $4;"
        " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [$0], [$1], $2, [$3], mask; }",
        shared,
        source,
        _word(num_bytes),
        barrier,
        blocks,
    )


def sync_threads(name: Word | int, num_threads: int) -> None:
    """Waits for a named group of this many threads; name 0 is the whole block's."""
    _asm(f"bar.sync $0, {num_threads};", _word(name))


def arrive_threads(name: Word | int, num_threads: int) -> None:
    """Counts this thread in for `sync_threads` of others, without waiting."""
    _asm(f"bar.arrive $0, {num_threads};", _word(name))


def sync_warp() -> None:
    """Waits for the other lanes of the warp."""
    _asm("bar.warp.sync -1;")


def capability() -> tuple[int, int]:
    """Returns the compute capability that kernels are traced for now; 9.0 where there is no GPU.

    It is that of `jax.default_device`, as Mosaic finds it when it lowers the kernel.
    """
    arch = mosaic.get_arch()
    return arch.major, arch.minor


def launch_next_kernel() -> None:
    """Lets the next kernel's blocks start as soon as this one's leave room.

    Called once the kernel before has ended, so that no three of them are under way at once:
    what the first has in its caches, the third may read anew.
    """
    _asm("griddepcontrol.launch_dependents;")


starts_early = True
"""Whether kernels traced from now on are launched before the one before has ended. Scripts that
time single kernels turn it off: the time of a kernel that waits for another holds the other's."""


def follow_previous_kernel() -> None:
    """Begins a kernel, outside of inline code: waits for the one before, lets the next one come.

    The wait tells Mosaic to launch the kernel before the previous one has ended (programmatic
    dependent launch), which hides what a launch costs. GPUs before sm_90 cannot: there it does
    nothing, and the kernel starts when the previous one has ended.
    """
    if starts_early and capability() >= (9, 0):
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()


def cluster_arrive() -> None:
    """Tells the cluster that this thread has come so far; orders no memory but fenced barriers."""
    _asm("barrier.cluster.arrive.relaxed;")


def cluster_wait() -> None:
    """Waits until every thread of the cluster has arrived."""
    _asm("barrier.cluster.wait.acquire;")
