"""The modules that synccheck has to see in another form."""

from tests.unshared import ALONE_NBYTES, concerned

SM_NBYTES, CTA_NBYTES, RESERVED_NBYTES = 233_472, 232_448, 1024  # sm_90; reserved for each CTA


def test_which_kernels_are_kept_from_sharing():
    modules = concerned()
    assert [v.name for v in modules] == ["fmha_decode_f16_d128", "fmha_decode_e4m3_d256"]
    for layout in (layout for layouts in modules.values() for layout in layouts):
        assert layout.shape.cluster == 16
        assert layout.smem_nbytes < ALONE_NBYTES


def test_one_fits_an_sm_and_two_do_not():
    assert ALONE_NBYTES <= CTA_NBYTES
    assert 2 * (ALONE_NBYTES + RESERVED_NBYTES) > SM_NBYTES
