"""Linear algebra on the matrices of one shard, with tf.linalg.

If a function fails for a matrix, its results are NaN. No float32 matrices are multiplied here: a
TPU would round them to bfloat16. Within the functions of tf.linalg, XLA does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from meshdsl.lowering.backends.common.matrices import factors, solve
from meshdsl.lowering.backends.tf.machine import Emitter
from meshdsl.lowering.parameters import Triangular, parameters_of
from meshdsl.lowering.program import Instruction


def _nan_unless(sound: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Returns the results x of matrices that are sound, and NaN for all others."""
    mask = tf.reshape(sound, [*sound.shape, *(1,) * (len(x.shape) - len(sound.shape))])
    return tf.where(mask, x, tf.constant(np.nan, x.dtype))


def _of_finite(function: Callable[[tf.Tensor], Sequence[tf.Tensor]]) -> Emitter:
    """Returns the emitter of a function that fails, or does not end, for inf and NaN."""

    def compute(x: tf.Tensor) -> Sequence[tf.Tensor]:
        sound = tf.reduce_all(tf.math.is_finite(x), [-2, -1])
        safe = tf.where(sound[..., None, None], x, tf.zeros_like(x))
        return [_nan_unless(sound, result) for result in function(safe)]

    return factors(compute)


def _scale(x: tf.Tensor) -> tf.Tensor:
    """Returns the largest magnitudes of matrices, [..., 1, 1]; scaled by them, squares fit."""
    largest = tf.reduce_max(tf.abs(x), [-2, -1], keepdims=True)
    return tf.where(largest == 0, tf.ones_like(largest), largest)


def _triangular(instruction: Instruction, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    params = parameters_of(instruction, Triangular)
    lower = params["lower"]
    if not params["unit_diagonal"]:
        return _substituted(a, b, lower)
    return tf.linalg.triangularsolve(_with_unit_diagonal(a), b, lower=lower)


def _with_unit_diagonal(a: tf.Tensor) -> tf.Tensor:
    return tf.linalg.set_diag(a, tf.ones(a.shape[:-1], a.dtype))


def _substituted(a: tf.Tensor, b: tf.Tensor, lower: bool) -> tf.Tensor:
    sound = tf.reduce_all(tf.linalg.diag_part(a) != 0, -1)
    return _nan_unless(sound, tf.linalg.triangular_solve(a, b, lower=lower))


def _solver(instruction: Instruction, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Solves by a QR factorization of [a, b]: with a = q r, its triangular factor is [r, qᴴ b]."""
    size = a.shape[-1]
    _, r = tf.linalg.qr(tf.concat([a, b], -1))
    return _substituted(r[..., :size], r[..., size:], lower=False)


def _symmetric(x: tf.Tensor) -> tf.Tensor:
    return (x + tf.linalg.matrix_transpose(x)) / 2


def _cholesky(x: tf.Tensor) -> tf.Tensor:
    low = tf.linalg.cholesky(_symmetric(x))
    return _nan_unless(tf.reduce_all(tf.math.is_finite(tf.linalg.diag_part(low)), -1), low)


def _qr(x: tf.Tensor) -> Sequence[tf.Tensor]:
    q, r = tf.linalg.qr(x)
    sign = _sign(tf.linalg.diag_part(r))
    return q * sign[..., None, :], r * sign[..., None]


def _sign(x: tf.Tensor) -> tf.Tensor:
    return tf.where(x < 0, tf.constant(-1, x.dtype), tf.constant(1, x.dtype))


def _signs(vectors: tf.Tensor) -> tf.Tensor:
    """Returns the signs of the elements of largest magnitude: [..., 1, vectors]."""
    rows = tf.linalg.matrix_transpose(vectors)
    at = tf.argmax(tf.abs(rows), -1, tf.int32)
    largest = tf.gather(rows, at, axis=-1, batch_dims=len(at.shape))
    return _sign(largest)[..., None, :]


def _eigh(x: tf.Tensor) -> Sequence[tf.Tensor]:
    scale = _scale(x)
    x = _symmetric(x / scale)
    values, vectors = tf.linalg.eigh(x)
    if x.dtype == tf.float64:
        # A shift makes all eigenvalues positive, so that rotations also separate those of equal
        # magnitude and opposite sign.
        shift = 2 * tf.norm(x, axis=[-2, -1])[..., None]
        images = tf.linalg.matmul(x, vectors) + shift[..., None] * vectors
        images, vectors = _rotated(images, vectors)
        values = tf.reduce_sum(images * vectors, -2) - shift
        order = tf.argsort(values)
        values, vectors = _ordered(values, order), _ordered(vectors, order)
    return values * scale[..., 0], vectors * _signs(vectors)


def _svd(x: tf.Tensor) -> Sequence[tf.Tensor]:
    if x.shape[-2] < x.shape[-1]:
        v, s, u = _tall_svd(tf.linalg.matrix_transpose(x))
    else:
        u, s, v = _tall_svd(x)
    signs = _signs(u)
    return u * signs, s, tf.linalg.matrix_transpose(v * signs)


def _tall_svd(x: tf.Tensor) -> Sequence[tf.Tensor]:
    """Returns u, s and v of matrices with at least as many rows as columns."""
    scale = _scale(x)
    x = x / scale
    s, u, v = tf.linalg.svd(x)
    if x.dtype == tf.float64:
        images, v = _rotated(tf.linalg.matmul(x, v), v)
        s = tf.norm(images, axis=-2)
        order = tf.argsort(s, direction="DESCENDING")
        s, v, images = (_ordered(part, order) for part in (s, v, images))
        u, _ = _qr(images)
    return u, s * scale[..., 0], v


def _ordered(x: tf.Tensor, order: tf.Tensor) -> tf.Tensor:
    """Returns numbers [..., n], or the columns of matrices [..., m, n], in another order."""
    if x.shape.rank == order.shape.rank:
        return tf.gather(x, order, axis=-1, batch_dims=x.shape.rank - 1)
    rows = tf.gather(tf.linalg.matrix_transpose(x), order, axis=-2, batch_dims=x.shape.rank - 2)
    return tf.linalg.matrix_transpose(rows)


def _rotated(images: tf.Tensor, vectors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Rotates the columns of both until those of `images` are orthogonal (Hestenes 1958)."""
    # XLA's eigenvectors and singular vectors of float64 have the accuracy of float32. Those of
    # hosts are accurate, and nothing is rotated.
    height, size = images.shape[-2:]
    rounds = _tournament(size)
    orders, inverses = (tf.constant(t, tf.int32) for t in (rounds, np.argsort(rounds)))

    def unfinished(sweep: tf.Tensor, both: tf.Tensor) -> tf.Tensor:
        """Whether two columns of the images are not orthogonal yet, within 20 sweeps."""
        columns = both[..., :height, :]
        products = tf.abs(tf.linalg.matmul(columns, columns, transpose_a=True))
        norms = tf.sqrt(tf.linalg.diag_part(products))
        larger = tf.maximum(norms[..., :, None], norms[..., None, :])
        limit = size * 2e-15 * tf.reduce_max(norms, -1)[..., None, None] * larger
        off_diagonal = tf.linalg.set_diag(products, tf.zeros_like(norms))
        return (sweep < 20) & tf.reduce_any(off_diagonal > limit)

    def sweep(count: tf.Tensor, both: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Rotates all pairs of columns once."""

        def rotate(k: tf.Tensor, both: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            rotated_columns = _rotated_pairs(tf.gather(both, orders[k], axis=-1), height)
            return k + 1, tf.gather(rotated_columns, inverses[k], axis=-1)

        start = (tf.constant(0), both)
        return count + 1, tf.while_loop(lambda k, _: k < len(rounds), rotate, start)[1]

    start = (tf.constant(0), tf.concat([images, vectors], -2))
    both = tf.while_loop(unfinished, sweep, start)[1]
    return both[..., :height, :], both[..., height:, :]


def _tournament(size: int) -> np.ndarray:
    """Returns orders of columns, [rounds, size], that pair the first half with the second half.

    Each two columns are a pair in some round. If their number is odd, the last one has no pair.
    """
    others = size - 1 + size % 2
    number, steps = np.arange(others)[:, None], np.arange(1, others // 2 + 1)
    first, second = (number + steps) % others, (number - steps) % others
    if size % 2:
        return np.concatenate([first, second, number], 1)
    return np.concatenate([first, number, second, np.full_like(number, size - 1)], 1)


def _rotated_pairs(both: tf.Tensor, height: int) -> tf.Tensor:
    """Rotates pairs of columns so that their first `height` rows become orthogonal."""
    half = both.shape[-1] // 2
    first, second, idle = both[..., :half], both[..., half : 2 * half], both[..., 2 * half :]
    x, y = first[..., :height, :], second[..., :height, :]
    product = tf.reduce_sum(x * y, -2, keepdims=True)
    difference = tf.reduce_sum(y * y - x * x, -2, keepdims=True)
    twice_product = tf.where(product == 0, tf.ones_like(product), 2 * product)
    ratio = difference / twice_product
    sign = tf.where(ratio < 0, -tf.ones_like(ratio), tf.ones_like(ratio))
    tangent = sign / (tf.abs(ratio) + tf.sqrt(1 + ratio * ratio))
    tangent = tf.where(product == 0, tf.zeros_like(tangent), tangent)
    cosine = tf.math.rsqrt(1 + tangent * tangent)
    sine = cosine * tangent
    return tf.concat([cosine * first - sine * second, sine * first + cosine * second, idle], -1)


def _slogdet(x: tf.Tensor) -> Sequence[tf.Tensor]:
    """Eliminates one column after another, with the largest element as the pivot.

    The sign is that of the pivots; it changes once for each remaining row before the pivot's.
    """
    lead, size = x.shape[:-2], x.shape[-1]
    index = tf.range(size, dtype=tf.int32)

    def step(
        k: tf.Tensor, remaining: tf.Tensor, a: tf.Tensor, sign: tf.Tensor, log: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        column = tf.where(remaining, tf.gather(a, k, axis=-1), tf.zeros([], a.dtype))
        magnitude = tf.where(tf.math.is_nan(column), tf.constant(np.inf, a.dtype), tf.abs(column))
        at = tf.argmax(magnitude, -1, tf.int32)
        pivot, row = tf.gather(column, at, batch_dims=1), tf.gather(a, at, batch_dims=1)
        before = tf.reduce_sum(tf.cast(remaining & (index < at[:, None]), tf.int32), -1)
        parity = tf.where(before % 2 == 0, tf.ones_like(sign), -tf.ones_like(sign))
        remaining &= index != at[:, None]
        safe = tf.where(pivot == 0, tf.ones_like(pivot), pivot)
        factor = tf.where(remaining, column / safe[:, None], tf.zeros([], a.dtype))
        a -= factor[:, :, None] * row[:, None, :]
        return k + 1, remaining, a, sign * parity * tf.sign(pivot), log + tf.math.log(tf.abs(pivot))

    count = lead.num_elements()
    start = tf.ones([count], x.dtype), tf.zeros([count], x.dtype)
    a, remaining = tf.reshape(x, [count, size, size]), tf.ones([count, size], tf.bool)
    state = (tf.constant(0), remaining, a, *start)
    *_, sign, log = tf.while_loop(lambda k, *_: k < size, step, state)
    return tf.reshape(sign, lead), tf.reshape(log, lead)


EMITTERS: Mapping[str, Emitter] = {
    "cholesky": factors(_cholesky),
    "qr": factors(_qr),
    "eigh": _of_finite(_eigh),
    "svd": _of_finite(_svd),
    "slogdet": factors(_slogdet),
    "solve": solve(_solver),
    "triangular_solve": solve(_triangular),
}
