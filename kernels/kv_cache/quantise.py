"""From f16 to e4m3: value / scale in f32, then rounded; defined by ctm_rt/reference/paged_kv.py."""

from typing import Any, NamedTuple

from cutlass import Float32

from kernels.common import ptx

# Quotients outside of these become 0 or 448 whatever their last bits are: half of the smallest
# number, 2**-9, still rounds to zero, and beyond 464 all is 448.
_LEAST, _MOST = 2.0**-11, 512.0


class Scale(NamedTuple):
    value: Any
    inverse: Any  # rounded to nearest

    @classmethod
    def of(cls, value):
        return cls(value, ptx.reciprocal(value))


def to_e4m3(words, scale):
    """Convert four f16 pairs to two words of four e4m3 each."""
    values = [divide(x, scale) for word in words for x in ptx.f16x2_to_f32x2(word)]
    return [ptx.f32x4_to_e4m3x4(values[i : i + 4]) for i in (0, 4)]


def divide(x, scale):
    """Return x / scale as f32 rounds it, where that matters.

    The product with the rounded inverse is off by an ulp at most; the remainder is exact, and
    brings it to the rounded quotient (Markstein's theorem): three instructions instead of the ten
    and a branch of a division.
    """
    product = ptx.mul_rn(x, scale.inverse)
    rest = ptx.fma_rn(product, -scale.value, x)
    quotient = ptx.fma_rn(rest, scale.inverse, product)
    size = ptx.absolute(product)
    # An infinity has no remainder, and a correction would lose the sign of a zero.
    return ptx.select((size >= Float32(_LEAST)) & (size < Float32(_MOST)), quotient, product)
