"""What each row of a tree sees: of a tile, one bit per token."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ctm_rt.decode.plan import MAX_TREE_QUERY_SEQ_LEN
from kernels.common import ptx

WORDS = MAX_TREE_QUERY_SEQ_LEN // 32  # one for each lane of a quad


class Edges(NamedTuple):
    """Where a row's visible keys begin and the mask's take over."""

    query_len: Any
    sliding_window: Any  # at most the capacity; 0: none
    per_row: Any  # whether a row's own position ends its window, rather than the last row's

    def left(self, length, token):
        """Return the first key that the row of a query token may see."""
        last = ptx.select(self.per_row, length - self.query_len + token + 1, length)
        edge = cutlass.max(last - self.sliding_window, Int32(0))
        return ptx.select(self.sliding_window > 0, edge, Int32(0))

    def widest(self):
        """Return the window of all the rows of a sequence together."""
        more = ptx.select(self.per_row & (self.sliding_window > 0), self.query_len - 1, Int32(0))
        return self.sliding_window + more


class Sight(NamedTuple):
    """What a thread's two rows see of the sequence."""

    words: tuple  # of each row, the word of the mask that this lane of the quad holds
    left: tuple  # of each row
    first_query: Any  # position of the first query token: from there on the mask tells
    clear: Any  # from here on to there every row sees every key


def load_words(tree_mask, sequence, tokens, query_len, lane):
    """Return this lane's mask word of each token's row; ``clear_words`` must follow."""
    index = cutlass.min(lane & 3, (query_len - 1) >> 5)
    base = tree_mask.iterator.toint() + (Int64(sequence) * tree_mask.stride[0] + Int64(index)) * 4
    return [ptx.ld_global_i32(base + Int64(token) * tree_mask.stride[1] * 4) for token in tokens]


def clear_words(words, query_len, lane):
    """Clear the bits past the last query token, which may be anything."""
    bits = query_len - 32 * (lane & 3)
    some = (Int32(1) << (cutlass.max(bits, Int32(0)) & 31)) - 1
    keep = ptx.select(bits >= 32, Int32(-1), some)
    return tuple(Uint32(word & keep) for word in words)


def all_bits(tokens):
    """Return for each of the two rows, in words, that it sees every token."""
    return [[Uint32(0xFFFFFFFF)] * -(-tokens // 32) for _ in range(2)]


def visible_bits(sight, tokens, token, valid, lane):
    """Return for each of the two rows, in words, which of the tokens from ``token`` on it sees."""
    count = -(-tokens // 32)
    into_mask = token - sight.first_query
    first_word = into_mask >> 5
    rows = []
    for word, left in zip(sight.words, sight.left, strict=True):
        stream = []
        for i in range(count + 1):
            index = first_word + i
            held = cute.arch.shuffle_sync(word, (lane & ~3) | (index & 3))
            past = ptx.select(index < 0, Uint32(0xFFFFFFFF), Uint32(0))
            stream.append(ptx.select((index >= 0) & (index < WORDS), held, past))
        bits = []
        for i in range(count):
            seen = ptx.funnel_shift_right(stream[i], stream[i + 1], into_mask)
            hidden = left - (token + 32 * i)  # bits below the window
            beyond = Uint32(0xFFFFFFFF) << Uint32(cutlass.max(hidden, Int32(0)) & 31)
            seen = seen & ptx.select(hidden >= 32, Uint32(0), beyond)
            bits.append(ptx.select(valid, seen, Uint32(0)))
        rows.append(bits)
    return rows


def bit(bits, token):
    """Return whether the bit of a traced ``token`` is set."""
    word = bits[0]
    for i in range(1, len(bits)):
        word = ptx.select((token >> 5) == i, bits[i], word)
    return (word >> Uint32(token & 31)) & 1 != 0


def hide(scores, tokens, bits, hidden, lane):
    """Set to ``hidden`` the scores, C fragments of 8 tokens each, of what is not visible."""
    for half in range(2):
        mine = [word >> Uint32((lane & 3) * 2) for word in bits[half]]
        for n in range(tokens // 8):
            for c in range(2):
                at = n * 4 + 2 * half + c
                seen = mine[n // 4] & Uint32(1 << (8 * (n % 4) + c))
                scores[at] = ptx.select(seen != 0, scores[at], hidden)
