"""What a decode kernel is made from, and the sizes that follow; integers alone."""

from dataclasses import dataclass

from ctm_rt.decode.plan import HEADS_PER_TILE, MAX_GROUPS
from kernels.common.layout import SlotLayout, ctas_per_sm

MMA_TOKENS = 16


@dataclass(frozen=True)
class KernelShape:
    """One kernel of a module: which calls it serves and how it is laid out."""

    cluster: int  # CTAs that share a group's tiles and merge through distributed shared memory
    warps: int
    token_tiles: int  # 16-token tiles that a warp takes at a time
    stages: int  # slots of a warp's ring
    tensor_copy: bool = False  # K and V come by tensor copies, else by cp.async
    max_tokens: int = 0  # planned for up to so many tokens a CTA; 0: for any number
    min_ctas: int = 0  # and for so many CTAs, on a GPU of 132 SMs
    load_only: bool = False  # bring every visible byte and compute nothing: the memory's ceiling
    head_tiles: int = 1  # 8 * head_tiles query heads per CTA
    # Of K and V that a warp takes, at most; warps share longer rows. 64 accumulators a thread do
    # not spill: 256 dimensions of 8 heads, 128 of 16.
    warp_dims: int = 128
    skips: bool = False  # it serves calls with a skip-softmax table; the others have no code for it


@dataclass(frozen=True)
class DecodeConfig:
    kv_dtype: str  # f16 or e4m3
    head_dim: int
    has_clusters: bool  # sm_90 and later; also programmatic dependent launch
    kernels: tuple[KernelShape, ...]

    @property
    def kv_nbytes(self) -> int:
        return 1 if self.kv_dtype == "e4m3" else 2


@dataclass(frozen=True)
class KernelLayout:
    """How a kernel's threads share the work, and where things lie in a CTA's shared memory.

    From 0: the warps' rings, whose place the warps' states take when the last tile is read, and
    then the weights of the groups. Then, from ``inbox`` on, what has a place of its own.
    """

    config: DecodeConfig
    shape: KernelShape

    @property
    def dims(self) -> int:
        """Dimensions per warp; ``dim_split`` warps share a token."""
        return min(self.config.head_dim, self.shape.warp_dims)

    @property
    def dim_split(self) -> int:
        return self.config.head_dim // self.dims

    @property
    def threads(self) -> int:
        return 32 * self.shape.warps

    @property
    def token_groups(self) -> int:
        """Sets of ``dim_split`` warps that share their tokens."""
        return self.shape.warps // self.dim_split

    @property
    def tile_tokens(self) -> int:
        return self.slot.rows * self.token_groups

    @property
    def max_heads(self) -> int:
        return HEADS_PER_TILE * self.shape.head_tiles

    @property
    def owned_dims(self) -> int:
        """Dimensions of the result that each CTA of the cluster merges."""
        return self.config.head_dim // self.shape.cluster

    @property
    def slot(self) -> SlotLayout:
        rows = MMA_TOKENS * self.shape.token_tiles
        return SlotLayout(rows, self.dims * self.config.kv_nbytes, self.shape.stages)

    def pushed_nbytes(self, heads):
        """Bytes that arrive in a CTA's inbox: of each CTA accumulators, then (m, l)."""
        return self.shape.cluster * heads * (4 * self.owned_dims + 8)

    @property
    def inbox(self) -> int:
        states = self.token_groups * self.max_heads * (8 + 4 * (self.config.head_dim + 4))
        weights = self.max_heads * MAX_GROUPS * 4
        return _align(max(self.shape.warps * self.slot.ring_nbytes, states, weights))

    @property
    def exchange(self) -> int:
        """Partial scores of warps that share tokens, twice."""
        return self.inbox + (self.pushed_nbytes(self.max_heads) if self.shape.cluster > 1 else 0)

    @property
    def exchange_nbytes(self) -> int:
        """Of one warp, once."""
        return 128 * 4 * self.shape.token_tiles * self.shape.head_tiles

    @property
    def q(self) -> int:
        exchanged = 2 * self.shape.warps * self.exchange_nbytes
        return _align(self.exchange + (exchanged if self.dim_split > 1 else 0))

    @property
    def q_row_nbytes(self) -> int:
        """Padded, so that eight rows of one chunk fall into different banks."""
        return 2 * self.config.head_dim + (32 if self.config.kv_dtype == "e4m3" else 16)

    @property
    def barrier(self) -> int:
        """Counts the inbox's bytes; 8 bytes on lies the ticket of the groups."""
        return self.q + self.max_heads * self.q_row_nbytes

    @property
    def asks_apart(self) -> bool:
        """Whether keys and values of a tile are asked for apart: always but to measure loading.

        On an H200 f16 d128, batch 1 of 4,096 tokens, 6.7 us instead of 7.0; d64 5.1 instead of 5.7.
        """
        return not self.shape.load_only

    @property
    def ring_barriers(self) -> int:
        """One for each part of each slot of each warp, where tensor copies fill it."""
        return self.barrier + 16

    @property
    def ring_barrier_nbytes(self) -> int:
        """Of one warp."""
        return 8 * self.shape.stages * (1 + self.asks_apart) if self.shape.tensor_copy else 0

    @property
    def smem_nbytes(self) -> int:
        return self.ring_barriers + self.shape.warps * self.ring_barrier_nbytes

    @property
    def ctas_per_sm(self) -> int:
        """How many CTAs find room on an SM, if 8 heads take 96 registers a thread."""
        return ctas_per_sm(self.smem_nbytes, self.threads, 96 * self.shape.head_tiles)


def _align(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
