import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import ctm_rt
from ctm_rt.errors import ArgumentError, CapacityError, CtmError
from ctm_rt.paged_kv import TOKENS_PER_PAGE, Move, PagedKvCache, retained_pages


def snapshot(cache):
    """All that can be seen of a cache, to compare."""
    rooms = {slot: cache.room(slot) for slot in cache.slots}
    return (
        rooms,
        cache.num_free_pages,
        cache.table.host.tolist(),
        cache.seq_lens.tolist(),
        [cache.holders(page) for page in range(cache.num_pages)],
    )


# Many that end where a page does.
COUNTS = st.integers(0, 300) | st.sampled_from([1, 128, 256, 512, 640])


class CacheMachine(RuleBasedStateMachine):
    """A cache beside lists of tokens, and a memory that appends and moves as kernels would."""

    @initialize(
        window=st.sampled_from([0, 0, 1, 100, 128, 129, 300]),
        batch=st.integers(1, 4),
        pages=st.integers(1, 24),
    )
    def start(self, window, batch, pages):
        num_pages = None if window else pages
        self.cache = PagedKvCache(batch, 1000, kv_cache_capacity=window, num_pages=num_pages)
        self.batch, self.window = batch, self.cache.sliding_window
        self.memory = np.full((self.cache.num_pages, TOKENS_PER_PAGE), -1)
        self.tokens = {}
        self.next_token = 0

    def attempt(self, call, *arguments):
        """Return what the call returned; if it raises, nothing has changed and None comes."""
        before = snapshot(self.cache)
        try:
            return call(*arguments)
        except CtmError as error:
            assert snapshot(self.cache) == before
            self.error = error
            return None

    def move(self, moves):
        sources = {move.source for move in moves}
        destinations = [move.destination for move in moves]
        assert len(set(destinations)) == len(destinations)
        assert not sources & set(destinations)
        for source, destination in moves:
            self.memory[destination] = self.memory[source]

    def refused_for_pages(self):
        assert isinstance(self.error, CapacityError)
        assert not self.window  # there they never run out
        assert self.error.wanted > self.error.free == self.cache.num_free_pages

    def pick(self, data):
        return data.draw(st.sampled_from(self.cache.slots))

    @property
    def busy(self):
        return bool(self.cache.slots)

    @rule(num_tokens=COUNTS)
    def admit(self, num_tokens):
        slot = self.attempt(self.cache.admit, num_tokens)
        if slot is not None:
            assert slot not in self.tokens
            assert self.cache.room(slot) == num_tokens
            self.tokens[slot] = []
        elif len(self.tokens) < self.batch:
            self.refused_for_pages()

    @precondition(lambda self: self.busy)
    @rule(data=st.data(), num_tokens=COUNTS)
    def extend(self, data, num_tokens):
        slot = self.pick(data)
        room, length = self.cache.room(slot), len(self.tokens[slot])
        moves = self.attempt(self.cache.extend, slot, num_tokens)
        if moves is not None:
            self.move(moves)
            assert self.cache.room(slot) == max(room, num_tokens)
        elif length + num_tokens <= 1000:
            self.refused_for_pages()

    @precondition(lambda self: self.busy)
    @rule(data=st.data(), part=st.sampled_from([0, 0.5, 1, 1, 1]), draft=st.booleans())
    def append(self, data, part, draft):
        slot = self.pick(data)
        room, tokens = self.cache.room(slot), self.tokens[slot]
        count = int(part * room)
        new = np.arange(self.next_token, self.next_token + count)
        self.next_token += count
        if draft:  # written, and not accepted
            self.write(slot, len(tokens), np.full(room, -2))
        self.write(slot, len(tokens), new)
        if self.attempt(lambda: self.cache.advance(slot, count) or True):
            tokens += new.tolist()
        else:
            assert isinstance(self.error, ArgumentError)
            assert self.window < room  # pages were skipped, so all must come at once
            assert count < room

    def write(self, slot, length, values):
        positions = np.arange(length, length + len(values))
        pages = self.cache.table.host[slot, 0, positions // TOKENS_PER_PAGE]
        kept = pages >= 0
        self.memory[pages[kept], positions[kept] % TOKENS_PER_PAGE] = values[kept]

    @precondition(lambda self: self.busy)
    @rule(data=st.data(), drop=st.integers(0, 400))
    def truncate(self, data, drop):
        slot = self.pick(data)
        length = max(0, len(self.tokens[slot]) - drop)
        if self.attempt(lambda: self.cache.truncate(slot, length) or True):
            del self.tokens[slot][length:]
            assert self.cache.room(slot) == 0
        else:
            assert self.window
            left = retained_pages(len(self.tokens[slot]), self.window).start
            assert retained_pages(length, self.window).start < left

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def fork(self, data):
        slot = self.pick(data)
        free = self.cache.num_free_pages
        other = self.attempt(self.cache.fork, slot)
        if other is None:
            assert len(self.tokens) == self.batch
        else:
            self.tokens[other] = self.tokens[slot].copy()
            assert self.cache.num_free_pages >= free

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def evict(self, data):
        slot = self.pick(data)
        self.cache.evict(slot)
        del self.tokens[slot]

    @rule()
    def compact(self):
        self.move(self.cache.compact())
        used = self.cache.num_pages - self.cache.num_free_pages
        assert self.cache.table.host[:, 0].max() == used - 1

    @precondition(lambda self: hasattr(self, "cache"))
    @invariant()
    def each_row_describes_its_sequence(self):
        assert self.cache.slots == sorted(self.tokens)
        for slot in range(self.batch):
            tokens, row = self.tokens.get(slot, []), self.cache.table.host[slot, 0]
            length = len(tokens)
            assert self.cache.seq_lens[slot] == length
            end = length + (self.cache.room(slot) if slot in self.tokens else 0)
            held, planned = (retained_pages(n, self.window) for n in (length, end))
            wanted = {*held, *(page for page in planned if page >= held.stop)}
            assert {*np.flatnonzero(row >= 0).tolist()} == wanted
            first = max(0, length - self.window) if self.window else 0
            seen = np.arange(first, length)
            assert self.memory[row[seen // 128], seen % 128].tolist() == tokens[first:]
            room = {*range(length // 128, -(-end // 128))} & wanted if end > length else set()
            assert all(self.cache.holders(row[page]) == 1 for page in room)

    @precondition(lambda self: hasattr(self, "cache"))
    @invariant()
    def each_page_is_free_or_held_by_those_that_list_it(self):
        k_rows, v_rows = self.cache.table.host.transpose(1, 0, 2)
        listed = np.bincount(k_rows[k_rows >= 0], minlength=self.cache.num_pages)
        assert listed.tolist() == [self.cache.holders(p) for p in range(self.cache.num_pages)]
        assert self.cache.num_free_pages == (listed == 0).sum()
        assert (v_rows == np.where(k_rows < 0, -1, k_rows + self.cache.num_pages)).all()


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def filled(cache, num_tokens):
    slot = cache.admit(num_tokens)
    cache.advance(slot, num_tokens)
    return slot


def test_a_fork_shares_until_one_writes():
    cache = PagedKvCache(3, 1024)
    one = filled(cache, 200)
    two = cache.fork(one)
    assert cache.table.host[one].tolist() == cache.table.host[two].tolist()
    assert cache.holders(0) == cache.holders(1) == 2
    assert cache.extend(two, 1) == [Move(1, 2)]
    assert cache.extend(one, 1) == []  # it has its last page alone now
    assert cache.table.host[:2, 0, :2].tolist() == [[0, 1], [0, 2]]
    assert cache.holders(0) == 2


def test_a_full_last_page_is_not_copied():
    cache = PagedKvCache(2, 1024)
    two = cache.fork(filled(cache, 256))
    assert cache.extend(two, 1) == []


def test_a_fork_ends_the_room_of_both():
    cache = PagedKvCache(2, 1024)
    one = cache.admit(300)
    cache.advance(one, 100)
    two = cache.fork(one)
    assert cache.room(one) == cache.room(two) == 0
    assert cache.num_free_pages == cache.num_pages - 1
    with pytest.raises(ArgumentError, match="num_tokens: expected 0 to 0, got 1"):
        cache.advance(one, 1)


def test_a_page_that_truncation_made_the_last_is_copied():
    cache = PagedKvCache(2, 1024)
    one = filled(cache, 300)
    two = cache.fork(one)
    cache.truncate(one, 50)
    assert cache.extend(one, 200) == [Move(0, 3)]
    assert cache.table.host[two, 0, :3].tolist() == [0, 1, 2]


def test_pages_run_out_and_come_back():
    cache = PagedKvCache(3, 1024, num_pages=3)
    one = filled(cache, 128)
    before = snapshot(cache)
    with pytest.raises(CapacityError, match="pages: wanted 3, 2 free") as refusal:
        cache.admit(300)
    assert isinstance(refusal.value, MemoryError)
    with pytest.raises(CapacityError, match="pages: wanted 4, 2 free"):
        cache.extend(one, 512)
    assert snapshot(cache) == before
    cache.evict(one)
    assert cache.admit(300) == one


def test_slots_run_out():
    cache = PagedKvCache(1, 1024)
    slot = cache.admit()
    for call in (cache.admit, lambda: cache.fork(slot)):
        with pytest.raises(CapacityError, match="slots: wanted 1, 0 free"):
            call()


def test_compact_closes_the_gaps():
    cache = PagedKvCache(4, 512)
    slots = [filled(cache, 200) for _ in range(3)]
    fork = cache.fork(slots[2])
    cache.evict(slots[0])
    free = cache.num_free_pages
    assert cache.compact() == [Move(4, 0), Move(5, 1)]
    assert cache.table.host[fork].tolist() == cache.table.host[slots[2]].tolist()
    assert cache.table.host[fork, 0].tolist() == [0, 1, -1, -1]
    assert cache.table.host[slots[1], 0].tolist() == [2, 3, -1, -1]
    assert cache.holders(0) == 2
    assert cache.holders(4) == 0
    assert cache.num_free_pages == free
    assert cache.compact() == []
    assert cache.table.host[cache.admit(200), 0].tolist() == [4, 5, -1, -1]


def test_a_window_moves_page_by_page():
    cache = PagedKvCache(1, 1024, kv_cache_capacity=200)
    assert cache.sliding_window == 200
    assert cache.num_pages == 2 * 3 + 1
    slot = filled(cache, 456)
    assert np.flatnonzero(cache.table.host[slot, 0] >= 0).tolist() == [2, 3]
    for length in range(457, 1025):
        cache.extend(slot, 1)
        cache.advance(slot, 1)
        held = np.flatnonzero(cache.table.host[slot, 0] >= 0).tolist()
        assert held == list(retained_pages(length, 200))
        assert ctm_rt.validate(cache.table.host, cache.seq_lens, 7, sliding_window=200) == []


def test_a_long_chunk_skips_what_no_window_sees():
    cache = PagedKvCache(1, 1024, kv_cache_capacity=128)
    slot = filled(cache, 100)
    cache.extend(slot, 800)
    assert np.flatnonzero(cache.table.host[slot, 0] >= 0).tolist() == [0, 6, 7]
    with pytest.raises(ArgumentError, match="num_tokens: expected a length whose window is kept"):
        cache.advance(slot, 300)
    cache.advance(slot, 800)
    assert np.flatnonzero(cache.table.host[slot, 0] >= 0).tolist() == [6, 7]
    with pytest.raises(ArgumentError, match="length: expected a length whose window is kept"):
        cache.truncate(slot, 800)
    cache.truncate(slot, 0)


def test_room_that_the_window_left_is_used_again():
    cache = PagedKvCache(1, 1024, kv_cache_capacity=128)
    slot = cache.admit(300)
    assert cache.table.host[slot, 0].tolist() == [-1, 0, 1, -1, -1, -1, -1, -1]
    cache.extend(slot, 896)
    assert cache.table.host[slot, 0].tolist() == [-1] * 6 + [0, -1]
    assert cache.num_free_pages == cache.num_pages - 1


@pytest.mark.parametrize(
    ("arguments", "options", "name"),
    [
        ((0, 1024), {}, "batch"),
        ((1, 0), {}, "max_kv_cache_capacity"),
        ((1, 2**31), {}, "max_kv_cache_capacity"),
        ((1, 1024), {"kv_cache_capacity": 1025}, "kv_cache_capacity"),
        ((1, 1024), {"kv_cache_capacity": -1}, "kv_cache_capacity"),
        ((1, 1024), {"num_pages": 0}, "num_pages"),
        ((1, 1024), {"num_pages": 2**30}, "num_pages"),
        ((4, 4096), {"kv_cache_capacity": 1024, "num_pages": 75}, "num_pages"),
        ((2**10, 2**31 - 128), {}, "num_pages"),
    ],
)
def test_sizes_are_checked(arguments, options, name):
    with pytest.raises(ArgumentError) as refusal:
        PagedKvCache(*arguments, **options)
    assert refusal.value.name == name


@pytest.mark.parametrize(
    ("method", "arguments", "name"),
    [
        *((m, (1, 0), "slot") for m in ("extend", "advance", "truncate")),
        *((m, (1,), "slot") for m in ("fork", "evict", "room")),
        ("admit", (1025,), "num_tokens"),
        ("admit", (-1,), "num_tokens"),
        ("extend", (0, -1), "num_tokens"),
        ("extend", (0, 925), "num_tokens"),
        ("advance", (0, 1), "num_tokens"),
        ("advance", (0, -1), "num_tokens"),
        ("truncate", (0, 101), "length"),
        ("truncate", (0, -1), "length"),
        ("holders", (99,), "page"),
    ],
)
def test_a_refused_call_changes_nothing(method, arguments, name):
    cache = PagedKvCache(2, 1024)
    filled(cache, 100)
    before = snapshot(cache)
    with pytest.raises(ArgumentError) as refusal:
        getattr(cache, method)(*arguments)
    assert refusal.value.name == name
    assert snapshot(cache) == before


def test_layers_share_the_bookkeeping(fake):
    cache = PagedKvCache(2, 256)
    pools = [cache.add_layer(8, 64), cache.add_layer(2, 128, "e4m3")]
    assert cache.pools == pools
    assert [pool.shape for pool in pools] == [(8, 128, 8, 64), (8, 128, 2, 128)]
    assert [str(pool.dtype) for pool in pools] == ["f16", "e4m3"]


def test_upload_sends_what_changed(fake):
    cache = PagedKvCache(2, 256)
    filled(cache, 130)
    cache.upload()
    arrays = cache.table.device_array, cache.seq_lens_device_array
    assert ctm_rt.to_host(arrays[0]).tolist() == cache.table.host.tolist()
    assert ctm_rt.to_host(arrays[1]).tolist() == [130, 0]
    calls = len(fake.calls("cuMemcpyHtoDAsync"))
    cache.extend(0, 1)  # on a page that it has
    cache.advance(0, 1)
    cache.upload()
    assert len(fake.calls("cuMemcpyHtoDAsync")) == calls + 1  # of the lengths
    assert ctm_rt.to_host(arrays[1]).tolist() == [131, 0]
