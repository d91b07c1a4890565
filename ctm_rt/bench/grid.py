"""The cells of the benchmark: what is decoded in each, and how fast it should be on an H200."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ctm_rt.decode.plan import DecodeProblem, module_name
from ctm_rt.paged_kv import TOKENS_PER_PAGE, ceil_div

# The best rate of another kernel that we have seen on an H200, and what a launch with its merge may
# take on top.
FLOOR_TB_PER_S = 4.39
MERGE_US = 4.0
# And the rate of f16 matrix products that others of our kernels reached where nothing else held
# them back.
MMA_TFLOP_PER_S = 470
COLD_NBYTES = 400e6  # of KV between two uses of an input set; the L2 of an H200 has 60 MB
KV_NBYTES = {"f16": 2, "e4m3": 1}


class Cell(NamedTuple):
    """One decode step, or the verification of a token tree."""

    kv_dtype: str
    head_dim: int
    num_q_heads: int
    num_kv_heads: int
    seq_lens: tuple[int, ...]
    sliding_window: int = 0
    label: str = ""  # one more word of the name
    known_load_us: float | None = None  # of the load-only kernel, on the H200 that the target is of
    known_target_us: float | None = None  # where it is not ``MERGE_US`` above the floor
    query_len: int = 1  # above 1 a tree

    @property
    def name(self) -> str:
        """Words that say what is decoded, such as ``f16 d128 32/8 b8 s4096``."""
        words = (
            self.kv_dtype,
            f"d{self.head_dim}",
            f"{self.num_q_heads}/{self.num_kv_heads}",
            f"b{len(self.seq_lens)}",
            f"s{max(self.seq_lens)}",
            *([f"w{self.sliding_window}"] if self.sliding_window else []),
            *([f"q{self.query_len}"] if self.is_tree else []),
            *([self.label] if self.label else []),
        )
        return " ".join(words)

    @property
    def is_tree(self) -> bool:
        """Whether it has several query tokens, and a mask."""
        return self.query_len > 1

    @property
    def module(self) -> str:
        """The module that decodes it."""
        return module_name(self.head_dim, self.kv_dtype == "e4m3", self.is_tree)

    @property
    def load_module(self) -> str:
        """The module that only loads what it reads."""
        return f"kv_load_{self.kv_dtype}_d{self.head_dim}"

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The tokens that each sequence sees: from, to."""
        window = self.sliding_window
        return [(max(0, length - window) if window else 0, length) for length in self.seq_lens]

    @property
    def page_spans(self) -> list[tuple[int, int]]:
        """The pages that hold them."""
        return [
            (left // TOKENS_PER_PAGE, ceil_div(end, TOKENS_PER_PAGE)) for left, end in self.spans
        ]

    @property
    def num_pages(self) -> int:
        """K pages of one input set."""
        return sum(end - first for first, end in self.page_spans)

    @property
    def token_nbytes(self) -> int:
        """Bytes of K, or of V, of one token."""
        return self.num_kv_heads * self.head_dim * KV_NBYTES[self.kv_dtype]

    @property
    def kv_nbytes(self) -> int:
        """Bytes of K and V that are seen."""
        return 2 * self.token_nbytes * sum(end - left for left, end in self.spans)

    @property
    def floor_us(self) -> float:
        """The time of these bytes at ``FLOOR_TB_PER_S``."""
        return self.kv_nbytes / FLOOR_TB_PER_S / 1e6

    @property
    def flop(self) -> float:
        """Operations of q K and P V, as if every query token saw every key that is seen."""
        keys = sum(end - left for left, end in self.spans)
        return 4.0 * self.query_len * self.num_q_heads * self.head_dim * keys

    @property
    def target_us(self) -> float:
        """What we aim at on an H200, to a tenth."""
        bound_us = max(self.floor_us + MERGE_US, self.flop / MMA_TFLOP_PER_S / 1e6)
        return self.known_target_us or round(bound_us, 1)

    @property
    def num_sets(self) -> int:
        """Input sets that launches rotate over, so that each finds its KV cold."""
        return int(COLD_NBYTES // self.kv_nbytes) + 1

    @property
    def pool_nbytes(self) -> int:
        """Bytes of the pages of all sets."""
        return 2 * self.num_sets * self.num_pages * TOKENS_PER_PAGE * self.token_nbytes

    @property
    def problem(self) -> DecodeProblem:
        """The shapes that are planned for."""
        return DecodeProblem(
            len(self.seq_lens),
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim,
            ceil_div(max(self.seq_lens), TOKENS_PER_PAGE),
            fp8_kv_cache=self.kv_dtype == "e4m3",
            query_len=self.query_len,
            tree=self.is_tree,
            sliding_window=self.sliding_window,
        )


def _table(kv_dtype: str, *load_us: float) -> list[Cell]:
    """Return the cells of 32/8 heads of 128, given the load-only times of our H200."""
    shapes = (
        (1, 1024),
        (1, 4096),
        (1, 16384),
        (1, 65536),
        (8, 4096),
        (32, 4096),
        (64, 8192),
        (128, 1024),
    )
    return [
        Cell(kv_dtype, 128, 32, 8, (tokens,) * batch, known_load_us=us)
        for (batch, tokens), us in zip(shapes, load_us, strict=True)
    ]


_SHAPES = (
    ("f16", 32, 32, 8),
    ("f16", 64, 64, 8),
    ("f16", 128, 64, 4),
    ("f16", 256, 16, 4),
    ("f16", 512, 16, 2),
    ("e4m3", 64, 64, 8),
    ("e4m3", 128, 64, 8),
    ("e4m3", 256, 16, 4),
)

# Trees of 32/8 heads at 4,096 tokens, the draft included: at batch 1, 8 and 32 the times of the
# load-only kernel and, by query tokens, the targets.
_TREE_BATCHES = (1, 8, 32)
_TREE_LOAD_US = {("f16", 128): (6.3, 31.3, 118.1), ("e4m3", 128): (4.6, 17.6, 60.9)}
_TREE_TARGETS_US: dict[tuple[str, int], dict[int, tuple[float | None, ...]]] = {
    ("f16", 128): {
        4: (10.0, 37.0, 130.0),
        16: (10.5, 38.0, 135.0),
        32: (15.0, 42.0, 160.0),
        64: (18.0, 70.0, 290.0),
        128: (24.0, 135.0, 600.0),
    },
    ("e4m3", 128): {16: (12.0, 31.0, 100.0)},
    **{("f16", d): dict.fromkeys((4, 16, 32, 64, 128), (None,) * 3) for d in (64, 256)},
}


def _trees() -> Iterator[Cell]:
    """Yield the cells of trees."""
    for (kv_dtype, head_dim), targets in _TREE_TARGETS_US.items():
        load_us = _TREE_LOAD_US.get((kv_dtype, head_dim), (None,) * 3)
        for query_len, target_us in targets.items():
            for batch, load, target in zip(_TREE_BATCHES, load_us, target_us, strict=True):
                cell = Cell(kv_dtype, head_dim, 32, 8, (4096,) * batch, query_len=query_len)
                yield cell._replace(known_load_us=load, known_target_us=target)


# One long sequence among 31 short ones; its place must not matter.
_RAGGED = {
    place: (*(1024,) * before, 65536, *(1024,) * (31 - before))
    for place, before in (("first", 0), ("middle", 15), ("last", 31))
}

CELLS = (
    *_table("f16", 3.4, 6.3, 17.1, 60.2, 31.3, 118.1, 463.5, 117.7),
    *_table("e4m3", 3.0, 4.6, 10.3, 32.3, 17.6, 60.9, 241.4, 63.0),
    *(Cell(*shape, (4096,) * batch) for shape in _SHAPES for batch in (1, 8, 32)),
    *(Cell("f16", 128, 32, 8, (32768,) * batch, sliding_window=1024) for batch in (1, 8)),
    *(
        Cell("f16", 128, 32, 8, seq_lens, label=place, known_target_us=104.0)
        for place, seq_lens in _RAGGED.items()
    ),
    *_trees(),
)


def select(only: Iterable[str]) -> list[Cell]:
    """Return the cells whose name has every word of one of ``only``; all cells if that is empty."""
    wanted = [set(words.split()) for words in only]
    return [c for c in CELLS if not wanted or any(w <= set(c.name.split()) for w in wanted)]
