"""The tree kernels' static sides: what fits, what lies where, and who converts what."""

import itertools

import pytest

from kernels.fmha_decode_ctm.config import SMEM_NBYTES
from kernels.fmha_decode_tree.attend import FIRST_TURN
from kernels.fmha_decode_tree.config import tree_config
from kernels.fmha_decode_tree.convert import Conversion
from kernels.fmha_decode_tree.layout import TreeLayout
from kernels.variants import VARIANTS

ARCHS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_90", "sm_100a", "sm_110a", "sm_120a")
TREES = [v for v in VARIANTS if v.family == "fmha_decode_tree"]


def layouts():
    for variant, arch in itertools.product(TREES, ARCHS):
        if variant.supports(arch):
            config = tree_config(variant.kv_dtype, variant.head_dim, arch)
            yield variant, arch, [TreeLayout(config, shape) for shape in config.kernels]


LAYOUTS = [
    pytest.param(arch, layout, id=f"{v.name[17:]}-{arch}-{layout.rows}x{layout.shape.cluster}")
    for v, arch, kernels in layouts()
    for layout in kernels
]
# Modules that have 128 rows a CTA in pairs of CTAs alone.
IN_PAIRS = {("sm_90a", f"fmha_decode_tree_e4m3_d{head_dim}") for head_dim in (64, 128)}
CONVERTING = [param for param in LAYOUTS if param.values[1].converts]


@pytest.mark.parametrize(
    ("variant", "arch", "kernels"), [pytest.param(*x, id=f"{x[0].name}-{x[1]}") for x in layouts()]
)
def test_each_number_of_rows_has_a_kernel_without_clusters(variant, arch, kernels):
    """But 128 of e4m3 where eight warps that wait for each other pay in pairs of CTAs alone."""
    rows = {layout.rows for layout in kernels}
    assert rows
    if (arch, variant.name) in IN_PAIRS:
        assert {layout.shape.cluster for layout in kernels if layout.rows == 128} == {2}
        rows -= {128}
    assert {layout.rows for layout in kernels if layout.shape.cluster == 1} == rows
    assert len({(layout.rows, layout.shape.cluster) for layout in kernels}) == len(kernels)
    if int(arch[3:].rstrip("a")) < 90:
        assert {layout.shape.cluster for layout in kernels} == {1}


@pytest.mark.parametrize(("arch", "layout"), LAYOUTS)
def test_a_kernel_fits(arch, layout):
    most = SMEM_NBYTES.get(int(arch[3:].rstrip("a")), 232_448)
    assert layout.smem_nbytes <= most
    assert layout.threads <= 256  # of 255 registers
    exchanges = layout.warps // layout.dim_split if layout.exchanges else 0
    assert 1 + layout.token_groups + exchanges <= 16  # barriers of a CTA; the first is everyone's


@pytest.mark.parametrize(("arch", "layout"), LAYOUTS)
def test_what_is_there_at_once_does_not_overlap(arch, layout):
    tiles = layout.converted + layout.token_groups * layout.converted_nbytes
    states = layout.token_groups * layout.rows * (8 + 4 * layout.state_row_elems)
    assert layout.q >= tiles
    assert layout.barrier >= layout.q + layout.q_slot.half_nbytes
    assert layout.barrier >= states
    if layout.exchanges:
        assert layout.barrier >= layout.q + 2 * layout.warps * layout.exchange_nbytes
    if layout.shape.cluster > 1:
        assert layout.inbox >= states
        assert layout.inbox % 16 == 0
        assert layout.barrier >= layout.inbox + layout.pushed_nbytes(layout.owned_rows)
    for place in (layout.q, layout.converted, layout.slot.half_nbytes, layout.tile.half_nbytes):
        assert place % 1024 == 0 or not layout.shape.warpgroup  # of descriptors


@pytest.mark.parametrize(("arch", "layout"), LAYOUTS)
def test_products_of_one_shape_overlap(arch, layout):
    """Otherwise ptxas gives the weights the registers of q."""
    if layout.shape.warpgroup and layout.shape.tokens == layout.config.head_dim:
        assert layout.shape.overlap


@pytest.mark.parametrize(("arch", "layout"), LAYOUTS)
def test_who_asks_for_tiles_and_who_has_a_turn(arch, layout):
    if layout.shape.warpgroup and not layout.converts:  # readers are counted in the low bits
        assert layout.group_warps in (4, 8)
    if layout.shape.overlap:  # one slot whose values are added, one whose scores are, one to fill
        assert layout.shape.stages >= 3
    if layout.takes_turns:  # two warpgroups of one ring, at barriers that are not the ring's
        assert (layout.warps, layout.token_groups, layout.exchanges) == (8, 1, False)
        assert layout.token_groups < FIRST_TURN


@pytest.mark.parametrize(("arch", "layout"), CONVERTING)
def test_each_part_of_a_tile_is_converted_once(arch, layout):
    conversion = Conversion(layout)
    parts = [
        tuple(map(sum, zip(conversion.first(warp), step, strict=True)))
        for warp in range(layout.group_warps)
        for step in conversion.steps()
    ]
    everything = itertools.product(range(layout.tile.blocks), range(layout.slot.rows // 8))
    assert sorted(parts) == sorted(everything)
