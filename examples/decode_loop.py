"""Decode 256 tokens in one CUDA graph: a step is a replay, and the host does nothing else.

``python -m examples.decode_loop``. A small transformer with random weights picks each next token
from its own logits; what touches the cache is ctm_rt's, all else CuPy's. At every step the logits
are checked against a dense model in float64, which has no pages and no cache of ours, and is given
the same tokens. Needs a GPU, CuPy and ``make kernels``.
"""

import sys
import time
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

import ctm_rt
from ctm_rt import paged_kv

BATCH, STEPS, LAYERS, VOCABULARY = 3, 256, 4, 1000
Q_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
WIDTH = Q_HEADS * HEAD_DIM
SCALE = HEAD_DIM**-0.5
TOLERANCE = 2e-2  # of the logits' norm: f16 through all layers


class Layer(NamedTuple):
    """Weights."""

    qkv: Any
    out: Any
    up: Any
    down: Any


class Model(NamedTuple):
    """Weights, on the host in f16 or on the device."""

    layers: list[Layer]
    tokens: Any  # embeddings, and the last product
    positions: Any


def random_model(rng: np.random.Generator) -> Model:
    """Weights that keep the size of what passes through them."""

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / rows**0.5).astype(np.float16)

    row = WIDTH + 2 * KV_HEADS * HEAD_DIM
    layers = [
        Layer(
            matrix(WIDTH, row),
            matrix(WIDTH, WIDTH),
            matrix(WIDTH, 4 * WIDTH),
            matrix(4 * WIDTH, WIDTH),
        )
        for _ in range(LAYERS)
    ]
    tokens, positions = (
        rng.standard_normal((rows, WIDTH)).astype(np.float16) for rows in (VOCABULARY, STEPS)
    )
    return Model(layers, tokens, positions)


def normed(x: Any) -> Any:
    """Divide by the root of the mean square; for arrays of both libraries."""
    wide = x.astype("f8" if isinstance(x, np.ndarray) else "f4")
    return (wide / (wide**2).mean(axis=-1, keepdims=True) ** 0.5).astype(x.dtype)


# Rows times a matrix. CuPy refuses to capture cuBLAS.
_product = cp.ReductionKernel(
    "float16 x, float16 w",
    "float16 y",
    "float(x) * float(w)",
    "a + b",
    "y = a",
    "0",
    "product",
    reduce_type="float",
)


def product(rows: Any, matrix: Any, out: Any = None) -> Any:
    """Return ``rows @ matrix``, summed in f32."""
    return _product(rows[:, :, None], matrix[None], out=out, axis=1)


class PagedDecoder:
    """One step of all sequences on the device, captured in a graph."""

    def __init__(self, model: Model, stream: Any) -> None:
        self.model = Model(
            [Layer(*map(cp.asarray, layer)) for layer in model.layers],
            cp.asarray(model.tokens),
            cp.asarray(model.positions),
        )
        self.cache = paged_kv.PagedKvCache(BATCH, STEPS)
        pools = [self.cache.add_layer(KV_HEADS, HEAD_DIM) for _ in range(LAYERS)]
        self.slots = [self.cache.admit(STEPS) for _ in range(BATCH)]
        self.cache.upload(stream.ptr)
        table, seq_lens = self.cache.table.device_array, self.cache.seq_lens_device_array
        self.lengths = cp.asarray(seq_lens)  # the same memory

        self.next = cp.zeros(BATCH, np.int64)
        self.logits = cp.empty((BATCH, VOCABULARY), np.float16)
        self.qkv = cp.zeros((BATCH, Q_HEADS + 2 * KV_HEADS, HEAD_DIM), np.float16)
        self.attended = cp.empty((BATCH, Q_HEADS, HEAD_DIM), np.float16)
        q, k, v = cp.split(self.qkv, [Q_HEADS, Q_HEADS + KV_HEADS], axis=1)
        self.count = paged_kv.bind_advance(seq_lens)
        self.append = [paged_kv.bind_append(k, v, pool, table, seq_lens) for pool in pools]
        self.attend = [
            ctm_rt.bind_decode(q, pool, table, seq_lens, scale=SCALE, out=self.attended)
            for pool in pools
        ]
        self.graph = self.capture(stream)

    def step(self, stream: Any) -> None:
        """Queue one step: count the token, then write its keys and values and attend, by layers."""
        self.count(stream.ptr)
        x = self.model.tokens[self.next] + self.model.positions[self.lengths - 1]
        for layer, append, attend in zip(self.model.layers, self.append, self.attend, strict=True):
            product(normed(x), layer.qkv, out=self.qkv.reshape(BATCH, -1))
            append(stream.ptr)
            attend(stream.ptr)
            x = x + product(self.attended.reshape(BATCH, -1), layer.out)
            x = x + product(cp.maximum(product(normed(x), layer.up), 0), layer.down)
        product(normed(x), self.model.tokens.T, out=self.logits)
        self.next[...] = self.logits.argmax(axis=1)

    def capture(self, stream: Any) -> Any:
        """Capture a step, after one that loads all that is loaded late; then start anew."""
        self.memory = cp.cuda.MemoryPool()  # temporaries of the graph are nobody else's
        with cp.cuda.using_allocator(self.memory.malloc):
            self.step(stream)
            stream.synchronize()
            stream.begin_capture()
            self.step(stream)
            graph = stream.end_capture()
            self.lengths[...] = 0
            self.next[...] = cp.arange(BATCH)
        return graph


class DenseModel:
    """The same model in float64: keys and values are rows of an array, in order."""

    def __init__(self, model: Model) -> None:
        self.layers = [Layer(*(w.astype(np.float64) for w in layer)) for layer in model.layers]
        self.tokens, self.positions = model.tokens.astype(float), model.positions.astype(float)
        self.kv = np.zeros((LAYERS, 2, STEPS, BATCH, KV_HEADS, HEAD_DIM))

    def logits(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """Return the logits that follow ``tokens``, one of each sequence."""
        x = self.tokens[tokens] + self.positions[position]
        for layer, kv in zip(self.layers, self.kv, strict=True):
            rows = (normed(x) @ layer.qkv).reshape(BATCH, -1, HEAD_DIM)
            q, kv[0, position], kv[1, position] = np.split(
                rows, [Q_HEADS, Q_HEADS + KV_HEADS], axis=1
            )
            keys, values = (np.repeat(a[: position + 1], Q_HEADS // KV_HEADS, 2) for a in kv)
            scores = np.einsum("bhd,sbhd->bhs", q, keys) * SCALE
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            x = x + np.einsum("bhs,sbhd->bhd", weights, values).reshape(BATCH, -1) @ layer.out
            x = x + np.maximum(normed(x) @ layer.up, 0) @ layer.down
        logits: np.ndarray = normed(x) @ self.tokens.T
        return logits


def main() -> int:
    """Decode, check each step, and time the replays."""
    model = random_model(np.random.default_rng(0))
    with cp.cuda.Stream(non_blocking=True) as stream:
        decoder, dense = PagedDecoder(model, stream), DenseModel(model)
        worst = 0.0
        for step in range(STEPS):
            tokens = decoder.next.get()  # waits for the step before
            decoder.graph.launch(stream)
            exact = dense.logits(tokens, step)
            error = np.linalg.norm(decoder.logits.get() - exact, axis=1)
            worst = max(worst, (error / np.linalg.norm(exact, axis=1)).max())
        for slot in decoder.slots:
            decoder.cache.advance(slot, STEPS)  # what the device has counted
        same = (decoder.lengths.get() == decoder.cache.seq_lens).all()
        print(f"{STEPS} steps of {BATCH} sequences, {LAYERS} layers: largest error {worst:.1e} of")
        print(f"the logits' norm (allowed {TOLERANCE:.0e}); lengths as the host counts: {same}")

        decoder.lengths[...] = 0
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            decoder.graph.launch(stream)
        stream.synchronize()
        print(f"{(time.perf_counter() - start) / STEPS * 1e6:.0f} us a step, without the checks")
    return int(not (worst <= TOLERANCE and same))


if __name__ == "__main__":
    sys.exit(main())
