"""The PTX instructions that the kernels use, one function each.

Inline PTX is volatile: the compiler keeps the order of these calls and drops none of them. Shared
memory is addressed by its 32-bit window address, global memory by a 64-bit address.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import arith

LOG2_E = 1.4426950408889634
NEG_INF = float("-inf")


def asm(code, outputs=(), inputs=(), predicate=None):
    return cute.arch.inline_ptx(
        code,
        write_only_types=list(outputs) or None,
        read_only_args=list(inputs) or None,
        predicate=None if predicate is None else Boolean(predicate),
    )


def select(condition, a, b):
    """Return ``a`` if ``condition`` else ``b`` without a branch (a Python ``if`` becomes one)."""
    kind = type(a)
    return kind(arith.select(Boolean(condition).ir_value(), a.ir_value(), kind(b).ir_value()))


# --- asynchronous copies -------------------------------------------------------------------------


def cp_async_16(smem, gmem, nbytes):
    """Copy ``nbytes`` (0 or 16) to shared memory and fill the rest of the 16 with zeros."""
    asm(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};",
        inputs=(smem, gmem, nbytes),
    )


def cp_async_commit():
    asm("cp.async.commit_group;")


def cp_async_wait(pending):
    asm(f"cp.async.wait_group {pending};")


# --- fragments -----------------------------------------------------------------------------------


def ldmatrix_x4(smem, transpose=False):
    trans = ".trans" if transpose else ""
    return asm(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        (Uint32,) * 4,
        (smem,),
    )


def movmatrix_trans(a):
    return asm("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", (Uint32,), (a,))


def mma_m16n8k16(a, b, c):
    """Return A (16x16, f16) times B (16x8, f16) plus C (16x8, f32), as the four C registers."""
    return asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        (Float32,) * 4,
        (*a, *b, *c),
    )


def pack_f16x2(low, high):
    return asm("cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", (Uint32,), (low, high))


def f16x2_to_f32x2(word):
    return asm(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
        (Float32, Float32),
        (word,),
    )


def e4m3x4_to_f16x2x2(word):
    """Convert four e4m3 bytes to two f16 pairs, exactly (every e4m3 value is an f16 value)."""
    return asm(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        (Uint32, Uint32),
        (word,),
    )


def byte_permute(word, selector):
    return asm(f"prmt.b32 {{$w0}}, {{$r0}}, 0, {selector:#x};", (Uint32,), (word,))


def exp2(x):
    return asm("ex2.approx.ftz.f32 {$w0}, {$r0};", (Float32,), (x,))


def exp2_scaled(x, scale, shift):
    """Return exp2(x * scale + shift), rounded once before the exponential."""
    return asm(
        "{ .reg .f32 t; fma.rn.f32 t, {$r0}, {$r1}, {$r2}; ex2.approx.ftz.f32 {$w0}, t; }",
        (Float32,),
        (x, scale, shift),
    )


def reciprocal_approx(x):
    """Within one unit in the last place; 0 of infinity, infinity of 0 and of what is next to it."""
    return asm("rcp.approx.ftz.f32 {$w0}, {$r0};", (Float32,), (x,))


def log2(x):
    return asm("lg2.approx.f32 {$w0}, {$r0};", (Float32,), (x,))


def max_nan(a, b):
    """Return the larger; NaN if either is."""
    return asm("max.NaN.f32 {$w0}, {$r0}, {$r1};", (Float32,), (a, b))


def f32x4_to_e4m3x4(values):
    """Round to nearest even, and what is too large to 448; NaN becomes 0x7f. From sm_89."""
    return asm(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
        (Uint32,),
        tuple(values),
    )


def reciprocal(x):
    return asm("rcp.rn.f32 {$w0}, {$r0};", (Float32,), (x,))


def mul_rn(a, b):
    """Multiply, never contracted with an addition."""
    return asm("mul.rn.f32 {$w0}, {$r0}, {$r1};", (Float32,), (a, b))


def funnel_shift_right(low, high, shift):
    """Return the lower half of (high, low) >> (shift % 32)."""
    return asm("shf.r.wrap.b32 {$w0}, {$r0}, {$r1}, {$r2};", (Uint32,), (low, high, shift))


def fma_rn(a, b, c):
    return asm("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", (Float32,), (a, b, c))


def absolute(x):
    return asm("abs.f32 {$w0}, {$r0};", (Float32,), (x,))


# --- memory --------------------------------------------------------------------------------------


def ld_global_i32(address):
    return asm("ld.global.nc.b32 {$w0}, [{$r0}];", (Int32,), (address,))


def ld_global_f32(address, predicate=None):
    """Undefined where there is a predicate and it is false."""
    return asm("ld.global.nc.f32 {$w0}, [{$r0}];", (Float32,), (address,), predicate)


def ld_global_u32(address):
    return asm("ld.global.nc.b32 {$w0}, [{$r0}];", (Uint32,), (address,))


def ld_global_u32x2(address):
    return asm("ld.global.nc.v2.b32 {{$w0}, {$w1}}, [{$r0}];", (Uint32,) * 2, (address,))


def ld_relaxed_u32x4(address, predicate):
    """Load 16 bytes that nobody reads again; undefined without ``predicate``.

    The assembler keeps the order of relaxed loads. Plain and ``.nc`` ones it moves down to their
    use, behind the wait for what was meant to come meanwhile. At CTA scope ids come from L1, though
    not these bytes; where a whole grid read its ids from one place in L2, appending 128 tokens to
    256 sequences took 83 us on an H200, and takes 71.
    """
    return asm(
        "ld.relaxed.cta.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        (Uint32,) * 4,
        (address,),
        predicate,
    )


def ld_relaxed_i32(address):
    return asm("ld.relaxed.cta.global.b32 {$w0}, [{$r0}];", (Int32,), (address,))


def ld_l2_f32x4(address):
    """Load past L1: another CTA of this launch wrote it."""
    return asm(
        "ld.global.cg.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", (Float32,) * 4, (address,)
    )


def ld_l2_f32x2(address):
    return asm("ld.global.cg.v2.f32 {{$w0}, {$w1}}, [{$r0}];", (Float32,) * 2, (address,))


def st_global_f32x4(address, values, predicate=None):
    asm(
        "st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        inputs=(address, *values),
        predicate=predicate,
    )


def st_global_f32x2(address, values, predicate=None):
    asm("st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};", inputs=(address, *values), predicate=predicate)


def st_global_u32x2(address, values, predicate=None):
    asm("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", inputs=(address, *values), predicate=predicate)


def st_global_u32x4(address, values, predicate=None):
    asm(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        inputs=(address, *values),
        predicate=predicate,
    )


def st_global_i32(address, value):
    asm("st.relaxed.gpu.global.b32 [{$r0}], {$r1};", inputs=(address, value))


def atomic_add_acq_rel(address, value):
    """Add at GPU scope; what this CTA wrote before is visible to whoever reads the sum."""
    return asm("atom.acq_rel.gpu.global.add.s32 {$w0}, [{$r0}], {$r1};", (Int32,), (address, value))


def atomic_add_shared(smem, value, predicate):
    """Add in no order with other memory; undefined without ``predicate``."""
    return asm(
        "atom.relaxed.cta.shared::cta.add.s32 {$w0}, [{$r0}], {$r1};",
        (Int32,),
        (smem, value),
        predicate,
    )


def reduce_add_i32(address, value, predicate):
    asm(
        "red.relaxed.gpu.global.add.s32 [{$r0}], {$r1};",
        inputs=(address, value),
        predicate=predicate,
    )


def ld_shared_f32(smem):
    return asm("ld.shared.f32 {$w0}, [{$r0}];", (Float32,), (smem,))


def ld_shared_f32x2(smem):
    return asm("ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", (Float32,) * 2, (smem,))


def ld_shared_f32x4(smem):
    return asm("ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", (Float32,) * 4, (smem,))


def ld_shared_u32x2(smem):
    return asm("ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", (Uint32,) * 2, (smem,))


def ld_shared_u32(smem):
    return asm("ld.shared.b32 {$w0}, [{$r0}];", (Uint32,), (smem,))


def ld_shared_u32x4(smem):
    return asm("ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", (Uint32,) * 4, (smem,))


def st_shared_u32x4(smem, values):
    asm("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", inputs=(smem, *values))


def ld_shared_i32(smem):
    return asm("ld.shared.b32 {$w0}, [{$r0}];", (Int32,), (smem,))


def st_shared_f32(smem, value):
    asm("st.shared.f32 [{$r0}], {$r1};", inputs=(smem, value))


def st_shared_f32x2(smem, values):
    asm("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", inputs=(smem, *values))


def st_shared_f32x4(smem, values, predicate=None):
    asm(
        "st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        inputs=(smem, *values),
        predicate=predicate,
    )


def st_shared_i32(smem, value, predicate=None):
    asm("st.shared.b32 [{$r0}], {$r1};", inputs=(smem, value), predicate=predicate)


# --- memory barriers -----------------------------------------------------------------------------


def mbarrier_init(smem, predicate=None):
    """Make a barrier for one arrival and the bytes it announces; ``fence_mbarrier_init`` next."""
    asm("mbarrier.init.shared::cta.b64 [{$r0}], 1;", inputs=(smem,), predicate=predicate)


def fence_mbarrier_init():
    asm("fence.mbarrier_init.release.cluster;")


def mbarrier_expect(smem, nbytes, predicate=None):
    """Arrive, and announce ``nbytes`` that asynchronous copies will bring."""
    asm(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};",
        inputs=(smem, nbytes),
        predicate=predicate,
    )


@cute.jit
def mbarrier_wait(smem, phase, scope: cutlass.Constexpr = "cta"):
    """Wait for the end of the barrier's phase; at the scope of a cluster that empties L1."""
    done = _mbarrier_done(smem, phase, scope)
    while done == 0:
        done = _mbarrier_done(smem, phase, scope)


def _mbarrier_done(smem, phase, scope):
    return asm(
        f"{{ .reg .pred done; mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 "
        "done, [{$r0}], {$r1}; selp.b32 {$w0}, 1, 0, done; }",
        (Int32,),
        (smem, phase),
    )


def elect_one():
    """Return whether this lane is the one that acts for its warp, all of whose lanes are here.

    It is the same lane each time; ``cute.arch.elect_one`` is a branch, this is a value. ptxas knows
    that it is one lane: a tensor copy, which is of a warp's uniform datapath, stands alone under
    it, but in a loop over the lanes under another predicate.
    """
    return (
        asm(
            "{{ .reg .pred one; elect.sync _|one, 0xffffffff; selp.b32 {$w0}, 1, 0, one; }}",
            (Int32,),
        )
        != 0
    )


def settled(value, lane):
    """Return ``value``, which the compiler then keeps: it would rather work it out at each use."""
    return cute.arch.shuffle_sync(value, lane)


def fence_proxy_async():
    asm("fence.proxy.async.shared::cta;")


def prefetch_tensor_map(tensor_map, predicate):
    asm("prefetch.tensormap [{$r0}];", inputs=(tensor_map,), predicate=predicate)


def tensor_copy_5d(smem, tensor_map, coordinates, barrier, predicate):
    """Copy a box of the tensor, innermost coordinate first; ``barrier`` counts its bytes."""
    asm(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}, {$r6}}], [{$r7}];",
        inputs=(smem, tensor_map, *coordinates, barrier),
        predicate=predicate,
    )


# --- clusters ------------------------------------------------------------------------------------


def cluster_arrive():
    """Relaxed: a release would be a fence in front of the first loads; the init has its own."""
    asm("barrier.cluster.arrive.relaxed.aligned;")


def cluster_wait():
    asm("barrier.cluster.wait.acquire.aligned;")


def peer_address(smem, rank):
    return asm("mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", (Uint32,), (smem, rank))


def st_async_f32x4(peer, values, peer_barrier, predicate):
    asm(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        inputs=(peer, *values, peer_barrier),
        predicate=predicate,
    )


def st_async_u32x4(peer, words, peer_barrier, predicate):
    asm(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
        "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        inputs=(peer, *words, peer_barrier),
        predicate=predicate,
    )


def st_async_f32x2(peer, values, peer_barrier, predicate):
    asm(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 "
        "[{$r0}], {{$r1}, {$r2}}, [{$r3}];",
        inputs=(peer, *values, peer_barrier),
        predicate=predicate,
    )


# --- barriers ------------------------------------------------------------------------------------


def barrier(index, threads):
    """Wait for ``threads`` threads of the CTA at one of its sixteen barriers."""
    asm(f"bar.sync {{$r0}}, {threads};", inputs=(index,))


def barrier_arrive(index, threads):
    """Count as having come to where others wait; do not."""
    asm(f"bar.arrive {{$r0}}, {threads};", inputs=(index,))


def barrier_any(index, threads, flag):
    """Wait as ``barrier`` does; return whether the flag of any of the threads is not 0."""
    return asm(
        "{ .reg .pred mine, any; setp.ne.b32 mine, {$r1}, 0; "
        f"barrier.cta.red.or.pred any, {{$r0}}, {threads}, mine; selp.b32 {{$w0}}, 1, 0, any; }}",
        (Int32,),
        (index, flag),
    )


# --- warp ----------------------------------------------------------------------------------------


def warp_reduce(value, combine, lane_masks=(16, 8, 4, 2, 1)):
    for mask in lane_masks:
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=mask))
    return value


def add(a, b):
    return a + b


def magic(divisor):
    """Return what ``divmod_by_magic`` takes; the host works it out."""
    return Uint32(Int64(0xFFFFFFFF) // Int64(divisor))


def divmod_by_magic(n, divisor, magic):
    """Return ``n // divisor, n % divisor`` for 0 <= n < 2**31.

    ``magic`` is that of the divisor, (2**32 - 1) // divisor: the product falls short of the
    quotient by at most one. A run-time division is some 40 instructions in front of the first load.
    """
    quotient = cutlass.Int32(cute.arch.mul_hi(Uint32(n), Uint32(magic)))
    remainder = n - quotient * divisor
    over = remainder >= divisor
    return (
        select(over, quotient + Int32(1), quotient),
        select(over, remainder - divisor, remainder),
    )
