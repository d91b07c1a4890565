"""Warpgroup matrix multiplies of sm_90a: B, and A if it must, from swizzled shared memory.

The tensor copy's 128-byte swizzle is what the tensor cores read: a tile lies as [block][row] of
128 bytes, from an address that is a multiple of 1,024. Four warps issue together; each keeps 16
rows of A and of the result, in the registers of ``ptx.mma_m16n8k16``.

A product is one statement, and so is a wait: the compiler sees the registers that are in flight go
into each and come out of it, so it can neither read nor reuse them in between.
"""

from cutlass import Float32, Int32, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

BLOCK_NBYTES = 128
_SWIZZLE_128B = 1 << 30  # bits of a descriptor's upper half
_EIGHT_ROWS = 8 * BLOCK_NBYTES // 16

_LETTERS = {Float32: ("f", "f32"), Uint32: ("r", "i32"), Int32: ("r", "i32")}


def _statement(code, inputs, kept):
    """Return what ``code`` makes of ``kept``, its operands $0 and on; ``inputs`` follow them."""
    letters = [_LETTERS[type(value)] for value in kept]
    constraints = [f"={letter}" for letter, _ in letters]
    constraints += [_LETTERS[type(value)][0] for value in inputs]
    constraints += [str(i) for i in range(len(kept))]
    kinds = ", ".join(kind for _, kind in letters)
    result = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({kinds})>"),
        [value.ir_value() for value in (*inputs, *kept)],
        code,
        ",".join([*constraints, "~{memory}"]),
        has_side_effects=True,
        asm_dialect=0,
    )
    return [
        type(value)(llvm.extractvalue(ir.Type.parse(kind), result, [i]))
        for i, (value, (_, kind)) in enumerate(zip(kept, letters, strict=True))
    ]


class Tile:
    """Rows in shared memory, as an operand: K or V as B, q as A."""

    def __init__(self, rows: int):
        self.block = rows * BLOCK_NBYTES // 16  # in the units of a descriptor, 16 bytes

    def low_half(self, smem):
        """Return the lower half of the descriptor of a tile at ``smem``."""
        return Uint32((smem >> 4) & 0x3FFF) | Uint32(self.block << 16)

    def row_step(self, step):
        """Return how far the 16 dimensions of a product over dimensions lie from the first."""
        block, within = divmod(step, BLOCK_NBYTES // 32)
        return block * self.block + within * 2

    def column_step(self, step):
        """Return how far the 16 rows of a product over rows lie from the first."""
        return step * 2 * _EIGHT_ROWS


def scores(q, k, k_smem, c):
    """Issue Q K^T; return the registers it will fill.

    ``q`` holds A registers of each 16 dimensions, or a tile, its address and how many such there
    are.
    """
    count = q[2] if isinstance(q[0], Tile) else len(q)
    return _product(q, count, k.low_half(k_smem), [k.row_step(i) for i in range(count)], c, False)


def accumulate(p, v, v_smem, c):
    """Issue C + P V, ``p`` A registers of each 16 tokens; return the registers it will fill."""
    offsets = [v.column_step(i) for i in range(len(p))]
    return _product(p, len(p), v.low_half(v_smem), offsets, c, True)


def _product(a, steps, b_low, b_offsets, c, values):
    """Issue C + A B, or A B; ``values``: B is V, whose rows are summed over."""
    count = len(c)
    inputs, b_place = [b_low], count
    staged = isinstance(a[0], Tile)
    if staged:
        a_tile, a_smem, _ = a
        inputs.append(a_tile.low_half(a_smem))
    else:
        inputs += [word for words in a for word in words]
    lines = [
        "{ .reg .pred keep; .reg .b32 low, high; .reg .b64 desc, adesc;",
        f"mov.b32 high, {_SWIZZLE_128B | _EIGHT_ROWS};",
        f"setp.ne.b32 keep, {int(values)}, 0;",
        "wgmma.fence.sync.aligned;",
    ]
    results = ", ".join(f"${i}" for i in range(count))
    for step in range(steps):
        lines.append(f"add.u32 low, ${b_place}, {b_offsets[step]}; mov.b64 desc, {{low, high}};")
        if staged:
            lines.append(
                f"add.u32 low, ${b_place + 1}, {a_tile.row_step(step)}; "
                "mov.b64 adesc, {low, high};"
            )
            operand, transposes = "adesc", "0, 0"
        else:
            words = ", ".join(f"${b_place + 1 + 4 * step + i}" for i in range(4))
            operand, transposes = f"{{{words}}}", str(int(values))
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{count * 2}k16.f32.f16.f16 {{{results}}}, "
            f"{operand}, desc, keep, 1, 1, {transposes};"
        )
        if step == 0 and not values:
            lines.append("setp.ne.b32 keep, 1, 0;")
    lines.append("wgmma.commit_group.sync.aligned; }")
    return _statement(" ".join(lines), inputs, c)


def wait(pending, values):
    """Wait until at most ``pending`` products are in flight, of which none touches ``values``."""
    return _statement(f"wgmma.wait_group.sync.aligned {pending};", [], values)
