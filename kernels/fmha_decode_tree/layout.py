"""What a tree-decode kernel is made from, and the sizes that follow; integers alone."""

from dataclasses import dataclass

from ctm_rt.decode.plan import MAX_GROUPS
from kernels.common.layout import SlotLayout, ctas_per_sm

MMA_ROWS = 16  # of a warp
MAX_DIMS_PER_WARP = 128  # mma.sync: beside as much of q, 64 accumulators a thread
MAX_DIMS_PER_WARPGROUP = 256  # 128 accumulators a thread; q then stays in shared memory


@dataclass(frozen=True)
class TreeShape:
    """One kernel of a module: which calls it serves and how it is laid out."""

    cluster: int  # CTAs that share a group's tiles and merge through distributed shared memory
    row_warps: int  # of 16 rows each
    token_groups: int  # sets of warps that take different tokens of a tile
    tokens: int  # of a tile, that such a set takes
    stages: int
    warpgroup: bool = False  # wgmma on tensor copies; else mma.sync on cp.async
    overlap: bool = False  # a tile's values are added beside the next one's softmax


@dataclass(frozen=True)
class TreeConfig:
    kv_dtype: str  # f16 or e4m3
    head_dim: int
    has_clusters: bool  # sm_90 and later; also programmatic dependent launch
    kernels: tuple[TreeShape, ...]

    @property
    def kv_nbytes(self) -> int:
        return 1 if self.kv_dtype == "e4m3" else 2


@dataclass(frozen=True)
class TreeLayout:
    """How a kernel's threads share the work, and where things lie in a CTA's shared memory.

    From 0: the rings and what is converted, whose place the warps' states take when the last tile
    is read, and then the weights of the groups. Then q and what follows it there; then barriers.
    """

    config: TreeConfig
    shape: TreeShape

    @property
    def rows(self) -> int:
        """(token, head) pairs of a CTA."""
        return MMA_ROWS * self.shape.row_warps

    @property
    def max_heads(self) -> int:
        """What kernels/common/merge.py calls a head is a row here."""
        return self.rows

    @property
    def token_groups(self) -> int:
        return self.shape.token_groups

    @property
    def dims(self) -> int:
        """Dimensions of the values per warp; ``dim_split`` warps share their rows and tokens."""
        most = MAX_DIMS_PER_WARPGROUP if self.shape.warpgroup else MAX_DIMS_PER_WARP
        return min(self.config.head_dim, most)

    @property
    def dim_split(self) -> int:
        return self.config.head_dim // self.dims

    @property
    def group_warps(self) -> int:
        """Warps that share a ring."""
        return self.shape.row_warps * self.dim_split

    @property
    def warps(self) -> int:
        return self.shape.token_groups * self.group_warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile_tokens(self) -> int:
        return self.shape.tokens * self.shape.token_groups

    @property
    def owned_rows(self) -> int:
        """Rows of the result that each CTA of the cluster merges, at most."""
        return -(-self.rows // self.shape.cluster)

    @property
    def slot(self) -> SlotLayout:
        row_nbytes = self.config.head_dim * self.config.kv_nbytes
        return SlotLayout(self.shape.tokens, row_nbytes, self.shape.stages)

    @property
    def takes_turns(self) -> bool:
        """Whether two warpgroups, of other rows and the same tiles, issue products in turn."""
        return self.shape.overlap and self.shape.row_warps == 8

    @property
    def exchanges(self) -> bool:
        """Whether warps that share rows and tokens add up the scores of their dimensions."""
        return self.dim_split > 1 and not self.shape.warpgroup

    @property
    def q_stays(self) -> bool:
        """Whether q is read from shared memory as long as there are tiles."""
        return self.shape.warpgroup and self.config.head_dim > MAX_DIMS_PER_WARP

    @property
    def converts(self) -> bool:
        """Whether K and V are converted to f16 in shared memory."""
        return self.shape.warpgroup and self.config.kv_dtype == "e4m3"

    @property
    def keeps_addresses(self) -> bool:
        """Whether registers suffice to keep what ptxas would work out again for each tile.

        64 tokens, 32/8 f16 heads of 64, batch 32 of 4,096 keys on an H200: 180 us instead of 193.
        Heads of 128 with 128 rows would spill.
        """
        return self.converts or self.dims + self.shape.tokens < 256

    @property
    def tile(self) -> SlotLayout:
        """K or V as the MMA reads it: in a slot, or converted."""
        if not self.converts:
            return self.slot
        return SlotLayout(self.shape.tokens, 2 * self.config.head_dim, 1)

    @property
    def converted(self) -> int:
        """Tiles, one for each set of warps, behind the rings."""
        return self.shape.token_groups * self.slot.ring_nbytes

    @property
    def converted_nbytes(self) -> int:
        return self.tile.slot_nbytes if self.converts else 0

    @property
    def state_row_elems(self) -> int:
        """Padded, so that the rows that a warp stores at once fall into different banks."""
        return self.config.head_dim + (16 if self.config.kv_dtype == "e4m3" else 8)

    def pushed_nbytes(self, owned_rows):
        """Bytes that arrive in a CTA's inbox: of each CTA values in f16, then (m, l)."""
        return self.shape.cluster * owned_rows * (2 * self.config.head_dim + 8)

    @property
    def q_slot(self) -> SlotLayout:
        """q lies as K does: of a swizzled block of 128 bytes a row, of every row."""
        return SlotLayout(self.rows, 2 * self.config.head_dim, 1)

    @property
    def _states(self) -> int:
        """Bytes of what the warps leave, and of the weights of the groups, which come after it."""
        states = self.shape.token_groups * self.rows * (8 + 4 * self.state_row_elems)
        return max(states, self.rows * MAX_GROUPS * 4)

    @property
    def q(self) -> int:
        tiles = self.converted + self.shape.token_groups * self.converted_nbytes
        # The warps' states may take the place of q too, but not what others push there.
        return _align(max(tiles, self._states) if self.shape.cluster > 1 else tiles, 1024)

    @property
    def exchange_nbytes(self) -> int:
        """Of the partial scores of one warp that shares rows and tokens with others."""
        return MMA_ROWS * self.shape.tokens * 4

    @property
    def inbox(self) -> int:
        """Takes the place of q, or, where the exchange of scores has taken that, its own."""
        if not self.exchanges:
            return self.q
        exchanged = 2 * self.warps * self.exchange_nbytes  # twice, so that it takes one barrier
        return self.q + max(self.q_slot.half_nbytes, exchanged)

    @property
    def barrier(self) -> int:
        """Counts the inbox's bytes; 8 bytes on lies the ticket of the groups."""
        pushed = self.pushed_nbytes(self.owned_rows) if self.shape.cluster > 1 else 0
        return _align(max(self.inbox + pushed, self.q + self.q_slot.half_nbytes, self._states), 16)

    @property
    def ring_barriers(self) -> int:
        """Of each ring: of each slot one that it is full, then of each a count of who read it."""
        return self.barrier + 16

    @property
    def ring_barrier_nbytes(self) -> int:
        return 16 * self.shape.stages if self.shape.warpgroup else 0

    @property
    def unread(self) -> int:
        """A word of each thread that is stored to and not read."""
        return self.ring_barriers + self.shape.token_groups * self.ring_barrier_nbytes

    @property
    def smem_nbytes(self) -> int:
        return self.unread + (4 * self.threads if self.shape.overlap else 0)

    @property
    def ctas_per_sm(self) -> int:
        """How many CTAs find room on an SM, with as many registers as a thread can have."""
        return ctas_per_sm(self.smem_nbytes, self.threads, 256)


def _align(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
