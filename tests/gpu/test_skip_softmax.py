"""Skip-softmax: what is dropped, by the counter and by the answer, and what never is.

Keys are made so that a page has a score of its own for each query head, far from any threshold.
Then which pages go follows from how they are dealt, and the definition says so.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

import ctm_rt
from ctm_rt import driver
from ctm_rt.decode import plan
from ctm_rt.decode.plan import DecodeProblem
from ctm_rt.reference import decode_attention, dropped_pages
from ctm_rt.tensor import view
from tests.dealing import Dealing
from tests.gpu.device import (
    DEVICE,
    Call,
    assert_matches,
    assert_same,
    capture,
    new_stream,
    place,
    reference,
    write,
)
from tests.gpu.inputs import PAGE, POISON, Inputs, Module, make, number

LOW = -60.0  # a weight of 1e-26
ALWAYS = 2**31 - 1  # S that lets go of whatever does not raise the maximum
LENGTHS = [2600, 128, 0, 1, 1300, 700]
DEALINGS = ((1, 0), (3, 0), (1, 8))
RATIOS = pytest.mark.parametrize("many_heads", [False, True])


def levelled(
    module: Module, lengths: Sequence[int], levels: object, *, many_heads: bool = False, **options
) -> Inputs:
    """Inputs in which page p of each sequence scores ``levels[sequence, p, KV head, head % 4]``.

    ``levels`` is broadcast to that; scores are exact in f32.
    """
    window, num_kv_heads = options.get("sliding_window", 0), options.setdefault("num_kv_heads", 2)
    lengths = np.asarray(lengths)
    pages = -(-lengths.max() // PAGE)
    levels = np.broadcast_to(levels, (len(lengths), pages, num_kv_heads, 4))
    left = np.maximum(lengths - window, 0) if window else 0 * lengths
    token = np.concatenate([np.arange(a, b) for a, b in zip(left, lengths, strict=True)])
    sequence = np.repeat(np.arange(len(lengths)), lengths - left)

    codes = {level: number(module, level / 8) for level in np.unique(levels)}
    rng = np.random.default_rng(7)
    shape = (len(token), num_kv_heads, module.head_dim)
    keys = rng.integers(0, 0x30, shape).astype(POISON[module.kv_dtype].dtype)  # met by zeros of q
    for d in range(4):
        of_token = levels[sequence, token // PAGE, :, d]
        keys[..., d] = np.vectorize(codes.get, otypes=[keys.dtype])(of_token)
    ratio = module.max_ratio if many_heads else 4
    inputs = make(module, lengths, keys=keys, ratio=ratio, scale=1.0, **options)
    inputs.q[:] = 0
    heads = np.arange(inputs.num_q_heads)
    inputs.q[:, heads, heads % 4] = 8
    return inputs


def random_levels(lengths: Sequence[int], num_kv_heads: int = 2, seed: int = 0) -> np.ndarray:
    """Most pages low for every head, some for all heads but one, some among the highest."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), -(-max(lengths) // PAGE), num_kv_heads)
    kind = rng.integers(0, 8, shape)[..., None]
    high = rng.integers(0, 3, (*shape, 4)).astype(float)
    one_head = np.where(np.arange(4) == rng.integers(0, 4, (*shape, 1)), high, LOW)
    return np.where(kind == 0, high, np.where(kind == 1, one_head, LOW))


class Dealt(NamedTuple):
    """A kernel and how it deals: of a plan, or as a test wants it."""

    what: str
    index: int
    cluster: int
    num_groups: int
    spare_groups: int
    tile_tokens: int


class Answer(NamedTuple):
    """What a launch gave, and how many pages it said that it dropped."""

    what: str
    partials: list[int]
    got: np.ndarray
    dropped: int


class Skipping(Call):
    """A call with a table and a counter."""

    def __init__(self, module: Module, inputs: Inputs, table: Sequence[tuple[int, int]]) -> None:
        super().__init__(module, inputs)
        self.pairs = table
        self.table = place(np.array(table, np.int32).reshape(-1))
        self.stats = place(np.zeros(1, np.int32))

    def planned(self) -> Dealt:
        """What the plan chooses."""
        inputs = self.inputs
        problem = DecodeProblem(
            inputs.batch,
            inputs.num_q_heads,
            inputs.num_kv_heads,
            self.module.head_dim,
            inputs.page_table.shape[2],
            self.module.kv_dtype == "e4m3",
            sliding_window=inputs.sliding_window,
            skip_softmax=True,
        )
        table = plan.decode_kernels(self.kernel.manifest.config)
        p = plan.plan_decode(problem, num_sms=driver.num_sms(DEVICE), kernels=table)
        tile_tokens = table[p.kernel].tile_tokens
        groups = p.num_groups, p.spare_groups
        return Dealt("as planned", p.kernel, p.cluster, *groups, tile_tokens)

    def dealings(self, dealings: Sequence[tuple[int, int]] = DEALINGS) -> Iterator[Dealt]:
        """Each kernel that skips, dealt in each way."""
        for index, kernel in self.kernels(skips=True).items():
            for groups in self.possible(dealings, kernel.cluster):
                what = f"cluster {kernel.cluster}, (num_groups, spare_groups) {groups}"
                yield Dealt(what, index, kernel.cluster, *groups, kernel.tile_tokens)

    def partials(self, dealt: Dealt) -> list[int]:
        """Among how many partial results the pages of each sequence are dealt."""
        lengths, window = self.inputs.seq_lens.tolist(), self.inputs.sliding_window
        max_pages = self.inputs.page_table.shape[2]
        return Dealing(dealt, dealt.tile_tokens, lengths, max_pages, window).partials()

    def count(self, **changed: object) -> Answer:
        """Run as planned, twice."""
        bound = self.bind(**{"skip_softmax": self.pairs, "stats": self.stats} | changed)
        return self._answer(self.planned(), bound)

    def count_dealt(self, dealt: Dealt) -> Answer:
        """Run a kernel dealt in some way, twice."""
        arrays = {"skip_table": self.table, "skip_dropped": self.stats}
        groups = dealt.num_groups, dealt.spare_groups
        return self._answer(dealt, self.bind_kernel(dealt.index, *groups, **arrays))

    def count_kernels(self, dealings: Sequence[tuple[int, int]] = DEALINGS) -> Iterator[Answer]:
        """Run each kernel that skips, dealt in each way, twice."""
        return map(self.count_dealt, self.dealings(dealings))

    def _answer(self, dealt: Dealt, bound: Callable[..., object]) -> Answer:
        before = int(ctm_rt.to_host(self.stats)[0])
        got = self.run(bound)
        twice = int(ctm_rt.to_host(self.stats)[0]) - before
        assert twice % 2 == 0, "equal launches dropped different pages"
        return Answer(dealt.what, self.partials(dealt), got, twice // 2)

    def expected(self, partials: list[int], dims: slice | list[int]) -> tuple[np.ndarray, int]:
        """The definition, for pages dealt to so many partial results of each sequence."""
        inputs = replace(self.inputs, q=self.inputs.q[..., dims])
        inputs = replace(inputs, kv_pool=self.inputs.kv_pool[..., dims])
        options = {"skip_softmax": self.pairs, "num_partials": partials}
        arrays = {n: a for n, a in inputs.arrays.items() if n != "sinks"}
        scalars = {n: s for n, s in inputs.scalars.items() if n != "v_scale"}
        with np.errstate(all="ignore"):
            out = decode_attention(**inputs.arrays, **inputs.scalars, **options)
            return out, int(dropped_pages(**arrays, **scalars, **options).sum())

    def check(self, *answers: Answer, all_dims: bool = False) -> list[int]:
        """Compare with the definition, in some dimensions (it is slow); return the counts.

        Keys of ``levelled`` tell no more than their first dimensions.
        """
        last = self.module.head_dim - 1
        dims = slice(None) if all_dims else [*range(8), last // 2, last - 8, last]
        known: dict[tuple[int, ...], tuple[np.ndarray, int]] = {}
        for what, partials, got, dropped in answers:
            if tuple(partials) not in known:
                known[tuple(partials)] = self.expected(partials, dims)
            exact, count = known[tuple(partials)]
            assert dropped == count, f"{what}: dropped {dropped} pages, not {count}"
            assert_matches(got[..., dims], self.inputs, exact, what)
        return [answer.dropped for answer in answers]


@RATIOS
def test_pages_are_dropped(module: Module, many_heads: bool) -> None:
    """Case 24. By every kernel, however the pages are dealt; the counter proves it.

    What is dropped weighs next to nothing, so the answer is the dense one, too.
    """
    levels = random_levels(LENGTHS)
    call = Skipping(module, levelled(module, LENGTHS, levels, many_heads=many_heads), [(0, 1)])
    answers = [call.count(), *call.count_kernels()]
    assert max(call.check(*answers)) > 20  # most of the pages, where one CTA sees them all
    exact = reference(call.inputs)
    for what, _, got, _ in answers:
        assert_matches(got, call.inputs, exact, what)


@RATIOS
def test_what_is_dropped_is_not_read(module: Module, many_heads: bool) -> None:
    """Case 24. NaN in the values of pages that go: nobody multiplies them, not even by zero."""
    pages, heads = 24, {"many_heads": many_heads}
    levels = np.zeros((1, pages, 1, 1))
    call = Skipping(module, levelled(module, [pages * PAGE], levels, **heads), [(0, 1)])
    by_first: dict[int, list[Dealt]] = {}  # how many pages stay: one of each partial result
    for dealt in call.dealings([(1, 0), (3, 0)]):
        by_first.setdefault(*call.partials(dealt), []).append(dealt)
    for first in by_first.keys() & {*range(pages)}:
        levels[:, :first], levels[:, first:] = 0, LOW
        inputs = levelled(module, [pages * PAGE], levels, **heads)
        inputs.kv_pool[inputs.page_table[0, 1, first:pages]] = POISON[module.kv_dtype]
        seen = replace(inputs, seq_lens=np.array([first * PAGE], np.int32))
        call, exact = Skipping(module, inputs, [(0, 1)]), reference(seen)
        for what, _, got, dropped in map(call.count_dealt, by_first[first]):
            assert dropped == 2 * (pages - first), what
            assert_matches(got, seen, exact, what)


def test_every_head_of_the_group_must_agree(module: Module) -> None:
    """Also the last of 16, of a call so small that two CTAs take half of its heads each."""
    levels = np.full((1, 20, 2, 4), LOW)
    levels[:, 0] = 0
    levels[:, 5::3, 0, 3] = 1  # for one query head of KV head 0
    inputs = levelled(module, [20 * PAGE], levels, many_heads=True)
    ratio = module.max_ratio
    heads = np.delete(np.arange(2 * ratio), [ratio - 1, 2 * ratio - 1])
    inputs.q[:, heads] = 0
    inputs.q[:, heads, 0] = 8
    call = Skipping(module, inputs, [(0, 1)])
    counts = call.check(call.count(), *call.count_kernels([(1, 0)]))
    assert max(counts) > 0


def test_random_keys(module: Module) -> None:
    """Pages go by the largest of many scores, one query head to a KV head."""
    inputs = make(module, [3000], ratio=1, num_kv_heads=2, scale=8 * module.head_dim**-0.5)
    call = Skipping(module, inputs, [(0, 40)])
    counts = call.check(call.count(), *call.count_kernels([(1, 0)]), all_dims=True)
    assert max(counts) > 0


@RATIOS
@pytest.mark.parametrize("table", [[(2601, ALWAYS)], [(0, 0), (2601, 1)]])
def test_dense_in_every_bit(module: Module, table: list[tuple[int, int]], many_heads: bool) -> None:
    """Case 24. S = 0, and lengths below the first bin, by the kernels that could skip."""
    ratio = module.max_ratio if many_heads else 4
    inputs = make(module, LENGTHS, sinks=True, ratio=ratio)
    call = Skipping(module, inputs, table)
    assert_same(call.count().got, Call(module, inputs).run())
    dense = Call(module, inputs).run_kernels(DEALINGS)  # the same kernels, in the same order
    for answer, (_, expected) in zip(call.count_kernels(), dense, strict=True):
        assert_same(answer.got, expected)
    assert ctm_rt.to_host(call.stats) == [0]


@pytest.mark.parametrize("step", [1, 0, -1])
def test_a_maximum_is_never_dropped(module: Module, step: int) -> None:
    """Case 24. S beyond the length: a page goes only if it neither raises nor equals it."""
    levels = step * np.arange(32)[None, :, None, None] / 4
    call = Skipping(module, levelled(module, [32 * PAGE], levels), [(0, ALWAYS)])
    answers = [call.count(), *call.count_kernels()]
    for answer in answers:
        kept = max(0, 32 - answer.partials[0]) if step < 0 else 0
        assert answer.dropped == 2 * kept, answer.what
    call.check(*answers)


@pytest.mark.parametrize("window", [1, 300, 1000, 2000])
def test_windows(module: Module, window: int) -> None:
    """The pages that the window reaches are dealt; left of it there is NaN, and -1 in the table."""
    lengths = [2600, 1153, 300]
    inputs = levelled(module, lengths, random_levels(lengths, seed=1), sliding_window=window)
    call = Skipping(module, inputs, [(0, 1)])
    call.check(call.count(), *call.count_kernels([(1, 0), (1, 8)]))


@pytest.mark.parametrize(("scale", "dropped"), [(8, 0), (9, 1)])
def test_the_threshold_is_of_the_whole_length(module: Module, scale: int, dropped: int) -> None:
    """log(8 / 1280) = -5.08 and log(9 / 1280) = -4.96; a window of two pages changes neither."""
    levels = np.where(np.arange(10) == 9, -5.0, 0.0)[None, :, None, None]
    inputs = levelled(module, [1280], levels, sliding_window=2 * PAGE)
    call = Skipping(module, inputs, [(0, scale)])
    for answer in call.count_kernels([(1, 0)]):
        assert answer.dropped == 2 * dropped * (answer.partials[0] == 1)
        call.check(answer)


def test_bins(module: Module) -> None:
    """Case 25. Below, at and between bins, in one batch; more bins than a warp has lanes."""
    lengths = [639, 640, 1000, 1279, 1280, 2000, 1999]
    levels = random_levels(lengths, seed=2)
    inputs = levelled(module, lengths, levels)
    bins = [(n, (n // 20) % 2) for n in range(0, 2000, 20)]  # S of 1 and of 0 in turn
    for table in ([(640, 1), (1280, 0), (2000, ALWAYS)], [(1000, 1)], bins):
        call = Skipping(module, inputs, table)
        counts = call.check(call.count(), *call.count_kernels([(1, 0)]))
        assert max(counts) > 0


def test_a_mixed_batch(module: Module) -> None:
    """Dense sequences beside skipping ones are as in a dense call, in every bit."""
    lengths = [1500, 500, 700, 1501, 1900, 0, 90]
    inputs = levelled(module, lengths, random_levels(lengths, seed=3))
    call = Skipping(module, inputs, [(600, 0), (1500, 1), (1899, 0)])
    dense = [1, 2, 4, 5, 6]
    answers = [call.count(), *call.count_kernels()]
    assert max(call.check(*answers)) > 0
    plain = [Call(module, inputs).run()]
    plain += [got for _, got in Call(module, inputs).run_kernels(DEALINGS)]
    for answer, expected in zip(answers, plain, strict=True):
        assert_same(answer.got[dense], expected[dense])


def test_balanced_batches(module: Module) -> None:
    """Many ragged sequences, whose pages the device deals to one group or several."""
    lengths = [(37 * b) % 500 + 1 for b in range(40)]
    lengths[3], lengths[20], lengths[39] = 4000, 0, 2049
    levels = random_levels(lengths, num_kv_heads=1, seed=4)
    inputs = levelled(module, lengths, levels, num_kv_heads=1, max_pages=50)
    call = Skipping(module, inputs, [(0, 1)])
    assert call.check(call.count())[0] > 0


def test_sinks_take_no_part(module: Module) -> None:
    """One above every score drops no page; it joins the sum once."""
    inputs = levelled(module, LENGTHS, random_levels(LENGTHS))
    without = Skipping(module, inputs, [(0, 1)])
    sinks = np.resize(np.array([50, 0, -80, 3], np.float32), inputs.num_q_heads)
    call = Skipping(module, replace(inputs, sinks=sinks), [(0, 1)])
    counts = call.check(call.count(), *call.count_kernels([(1, 0), (3, 0)]))
    assert counts == [
        a.dropped for a in (without.count(), *without.count_kernels([(1, 0), (3, 0)]))
    ]


@pytest.mark.parametrize("row", [0, 1])
def test_nan(module: Module, row: int) -> None:
    """In a key, its page and those after it stay; in the value of a page that stays, it shows."""
    levels = np.full((2, 20, 2, 1), LOW)
    levels[:, 7], levels[1] = 0, 0
    inputs = levelled(module, [20 * PAGE, 300], levels)
    inputs.kv_pool[inputs.page_table[0, row, 7], 5, 1, 6] = POISON[module.kv_dtype]
    call = Skipping(module, inputs, [(0, 1)])
    call.check(call.count(), *call.count_kernels([(1, 0), (3, 0)]))


def test_a_nan_query_keeps_the_pages_of_its_group(module: Module) -> None:
    """Its row is NaN; the others of its KV head attend all, those of the other head do not."""
    levels = np.where(np.arange(20)[None, :, None, None] == 0, 0, LOW)
    inputs = levelled(module, [20 * PAGE], levels)
    inputs.q[0, 1, 3] = np.nan
    call = Skipping(module, inputs, [(0, 1)])
    for answer in call.count_kernels([(1, 0)]):
        call.check(answer)
        assert np.isnan(answer.got).any(axis=(0, 2)).tolist() == [False, True] + [False] * 6


def test_pages_outside_the_pool(module: Module) -> None:
    """They are invisible, and neither dropped nor counted; the pages after keep their places."""
    inputs = levelled(module, LENGTHS, random_levels(LENGTHS))
    inputs.page_table[0, 0, [0, 3, 11]] = -1
    inputs.page_table[0, 1, [4, 5, 20]] = 2**31 - 1
    call = Skipping(module, inputs, [(0, 1)])
    call.check(call.count(), *call.count_kernels([(1, 0), (3, 0)]))


def test_without_a_counter(any_module: Module) -> None:
    """The answer is the same; a counter alone counts nothing."""
    inputs = levelled(any_module, LENGTHS, random_levels(LENGTHS))
    call = Skipping(any_module, inputs, [(0, 1)])
    expected = call.count()
    assert_same(call.count(stats=None).got, expected.got)
    before = ctm_rt.to_host(call.stats)
    assert_same(call.run(call.bind(stats=call.stats)), Call(any_module, inputs).run())
    assert ctm_rt.to_host(call.stats) == before


def test_tables_of_host_and_device(any_module: Module) -> None:
    """Give the same, and what the counter held stays in it."""
    inputs = levelled(any_module, LENGTHS, random_levels(LENGTHS))
    call = Skipping(any_module, inputs, [(0, 1)])
    expected = call.count()
    write(call.stats, np.array([1000], np.int32))
    for table in (np.array([[0, 1]], np.int32), call.table, [0, 1]):
        answer = call.count(skip_softmax=table)
        assert_same(answer.got, expected.got)
        assert answer.dropped == expected.dropped
    assert ctm_rt.to_host(call.stats) == [1000 + 6 * expected.dropped]


def test_graphs(any_module: Module) -> None:
    """Each replay drops the same pages, of lengths that may change, and counts them."""
    inputs = levelled(any_module, LENGTHS, random_levels(LENGTHS))
    call = Skipping(any_module, inputs, [(2600, 1)])
    expected = call.count()
    with new_stream() as stream:
        call.workspace.reset()
        launch = call.bind(skip_softmax=call.pairs, stats=call.stats, stream=stream)
        replay = capture(stream, launch)
        write(call.stats, np.zeros(1, np.int32))
        for times in (1, 2, 3):
            call.poison()
            replay()
            driver.synchronize(stream, DEVICE)
            assert_same(call.result(), expected.got)
            assert ctm_rt.to_host(call.stats) == [times * expected.dropped]
        short = replace(inputs, seq_lens=np.minimum(inputs.seq_lens, 2599).astype(np.int32))
        write(call.arrays["seq_lens"], short.seq_lens)
        replay()
        driver.synchronize(stream, DEVICE)
        assert_matches(call.result(), short)
        assert ctm_rt.to_host(call.stats) == [3 * expected.dropped]


def test_many_launches_beside_another_stream(any_module: Module) -> None:
    """Case 12. The same bits and the same count each time."""
    inputs = levelled(any_module, LENGTHS, random_levels(LENGTHS))
    call = Skipping(any_module, inputs, [(0, 1)])
    other = Skipping(any_module, inputs, [(0, ALWAYS)])
    expected = call.count()
    write(call.stats, np.zeros(1, np.int32))
    call.workspace.reset()
    launch = call.bind(skip_softmax=call.pairs, stats=call.stats)
    beside = other.bind(skip_softmax=other.pairs)
    with new_stream() as stream, new_stream() as second:
        for _ in range(500):
            beside(second)
            launch(stream)
        assert_same(call.result(), expected.got)
    assert ctm_rt.to_host(call.stats) == [500 * expected.dropped]


def test_the_unbound_call(any_module: Module) -> None:
    """With a host table, of which it needs to upload none twice."""
    inputs = levelled(any_module, LENGTHS, random_levels(LENGTHS))
    call = Skipping(any_module, inputs, [(0, 1)])
    expected = call.count()
    options = {"skip_softmax": [(0, 1)], "stats": call.stats}
    out = ctm_rt.decode_attention(**call.arrays, **inputs.scalars, **options)
    assert_same(ctm_rt.to_host(out), expected.got)


def test_wrong_tables_are_refused(any_module: Module) -> None:
    """Case 25. By name, whether they come from the host or lie on the device."""
    call = Call(any_module, make(any_module, [5]))
    wrong: list[object] = [[0, 1, 2], [(5, 1), (5, 1)], [(0, -1)], np.zeros(2, np.int64)]
    wrong += [place(np.array(table, np.int32)) for table in ([0, 1, 2], [9, 1, 5, 1], [0, -1])]
    for table in wrong:
        with pytest.raises(ctm_rt.ArgumentError, match=r"^skip_softmax: "):
            call.bind(skip_softmax=table)
    stats: list[object] = [np.zeros(1, np.int32), place(np.zeros(2, np.int32))]
    for counter in (*stats, view(place(np.zeros(1, np.float32)))):
        with pytest.raises(ctm_rt.ArgumentError, match=r"^stats: "):
            call.bind(skip_softmax=[(0, 1)], stats=counter)
