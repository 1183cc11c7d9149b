"""Examples of the elementwise operations that `unary` and `binary` make.

Each paragraph shows the operation whose result it prints first. The docstring of that operation
ends with it. A test runs it.
"""

from __future__ import annotations

import re

_SHOWN = """
>>> x = md.named([-3.0, 0.0, 2.0], ["feature"])
>>> print(md.abs(x))
f32[feature=3] [3. 0. 2.]
>>> print(md.abs(md.named(np.complex64([3 + 4j]), ["frequency"])))
f32[frequency=1] [5.]

>>> cosine = md.named([1.0, 0.5, -1.0], ["angle"])
>>> print(md.acos(cosine))
f32[angle=3] [0.     1.0472 3.1416]

>>> x = md.named([1.0, 2.0], ["feature"])
>>> print(md.acosh(x))
f32[feature=2] [0.    1.317]

>>> x = md.named([[1.0, 2.0], [3.0, 4.0]], ["batch", "feature"])
>>> bias = md.named([10.0, 20.0], ["feature"])
>>> print(md.add(x, bias))
f32[batch=2, feature=2] [[11. 22.]
 [13. 24.]]
>>> md.add(x, bias.rename(feature="length"))
Traceback (most recent call last):
    ...
meshdsl.ops.operation.OperationError: add: one operand must have the dims of all: ...

>>> sine = md.named([0.0, 0.5, 1.0], ["angle"])
>>> print(md.asin(sine))
f32[angle=3] [0.     0.5236 1.5708]

>>> x = md.named([0.0, 1.0], ["feature"])
>>> print(md.asinh(x))
f32[feature=2] [0.     0.8814]

>>> slope = md.named([0.0, 1.0, np.inf], ["angle"])
>>> print(md.atan(slope))
f32[angle=3] [0.     0.7854 1.5708]

>>> height = md.named([0.0, 1.0, 1.0, -1.0], ["point"])
>>> across = md.named([1.0, 1.0, -1.0, -1.0], ["point"])
>>> print(md.atan2(height, across))
f32[point=4] [ 0.      0.7854  2.3562 -2.3562]

>>> x = md.named([0.0, 0.5, 1.0], ["feature"])
>>> print(md.atanh(x))
f32[feature=3] [0.     0.5493    inf]

>>> x = md.named([0.0, 1.0, 100.0], ["feature"])
>>> print(md.bessel_i0e(x))
f32[feature=3] [1.     0.4658 0.0399]

>>> x = md.named([0.0, 1.0, 100.0], ["feature"])
>>> print(md.bessel_i1e(x))
f32[feature=3] [0.     0.2079 0.0397]

>>> x = md.named([0b1100, 0b1010], ["word"])
>>> print(md.bit_and(x, 0b0110))
s32[word=2] [4 2]

>>> x = md.named([0, 5], ["word"])
>>> print(md.bit_not(x))
s32[word=2] [-1 -6]
>>> print(md.bit_not(md.named([True, False], ["word"])))
bool[word=2] [False  True]

>>> x = md.named([0b1100, 0b1010], ["word"])
>>> print(md.bit_or(x, 0b0110))
s32[word=2] [14 14]

>>> x = md.named([0b1100, 0b1010], ["word"])
>>> print(md.bit_xor(x, 0b0110))
s32[word=2] [10 12]

>>> x = md.named([-8.0, 27.0], ["feature"])
>>> print(md.cbrt(x))
f32[feature=2] [-2.  3.]

>>> x = md.named([-1.5, 0.5, 2.0], ["feature"])
>>> print(md.ceil(x))
f32[feature=3] [-1.  1.  2.]

>>> x, y = md.named([1.0, 2.0], ["frequency"]), md.named([0.0, -3.0], ["frequency"])
>>> print(md.complex(x, y))
c64[frequency=2] [1.+0.j 2.-3.j]

>>> x = md.named([0.0, np.pi / 3, np.pi], ["angle"])
>>> print(md.cos(x))
f32[angle=3] [ 1.   0.5 -1. ]

>>> x = md.named([-1.0, 0.0, 1.0], ["feature"])
>>> print(md.cosh(x))
f32[feature=3] [1.5431 1.     1.5431]

>>> x = md.named([1.0, 2.0], ["feature"])
>>> print(md.digamma(x))
f32[feature=2] [-0.5772  0.4228]

>>> counts = md.named([[1.0, 3.0], [6.0, 2.0]], ["batch", "vocab"])
>>> print(md.divide(counts, md.sum(counts, over="vocab")))
f32[batch=2, vocab=2] [[0.25 0.75]
 [0.75 0.25]]

>>> tokens = md.named([[5, 7, 0], [6, 0, 0]], ["batch", "length"])
>>> print(md.equal(tokens, 0))
bool[batch=2, length=3] [[False False  True]
 [False  True  True]]

>>> x = md.named([-1.0, 0.0, 1.0], ["feature"])
>>> print(md.erf(x))
f32[feature=3] [-0.8427  0.      0.8427]

>>> probability = md.named([-0.5, 0.0, 1.0], ["feature"])
>>> print(md.erf_inv(probability))
f32[feature=3] [-0.4769  0.         inf]

>>> x = md.named([0.0, 1.0, 5.0], ["feature"])
>>> print(md.erfc(x))
f32[feature=3] [1.0000e+00 1.5730e-01 1.5375e-12]
>>> print(1 - md.erf(x))
f32[feature=3] [1.     0.1573 0.    ]

>>> x = md.named([-1.0, 0.0, 1.0], ["feature"])
>>> print(md.exp(x))
f32[feature=3] [0.3679 1.     2.7183]

>>> x = md.named([-1.0, 0.0, 3.0], ["feature"])
>>> print(md.exp2(x))
f32[feature=3] [0.5 1.  8. ]

>>> x = md.named([1e-8, 1.0], ["feature"])
>>> print(md.expm1(x))
f32[feature=2] [1.0000e-08 1.7183e+00]
>>> print(md.exp(x) - 1)
f32[feature=2] [0.     1.7183]

>>> x = md.named([-1.5, 0.5, 2.0], ["feature"])
>>> print(md.floor(x))
f32[feature=3] [-2.  0.  2.]

>>> x = md.named([-7, 7], ["feature"])
>>> print(md.floor_divide(x, 2))
s32[feature=2] [-4  3]

>>> x = md.named([[1.0, 5.0], [3.0, 4.0]], ["batch", "feature"])
>>> limit = md.named([4.0, 2.0], ["batch"])
>>> print(md.greater(x, limit))
bool[batch=2, feature=2] [[False  True]
 [ True  True]]

>>> x = md.named([1.0, 3.0, 5.0], ["feature"])
>>> print(md.greater_equal(x, 3))
bool[feature=3] [False  True  True]

>>> x, y = md.named([3.0, 0.0], ["point"]), md.named([4.0, -2.0], ["point"])
>>> print(md.hypot(x, y))
f32[point=2] [5. 2.]

>>> x = md.named([1.0, np.inf, np.nan], ["feature"])
>>> print(md.isfinite(x))
bool[feature=3] [ True False False]

>>> x = md.named([1.0, -np.inf, np.nan], ["feature"])
>>> print(md.isinf(x))
bool[feature=3] [False  True False]

>>> x = md.named([1.0, np.inf, np.nan], ["feature"])
>>> print(md.isnan(x))
bool[feature=3] [False False  True]

>>> position = md.named([0, 1, 2], ["length"])
>>> print(md.less(position, 2))
bool[length=3] [ True  True False]
>>> print(md.outer(md.less, position, md.named([1, 3], ["batch"])))
bool[length=3, batch=2] [[ True  True]
 [False  True]
 [False  True]]

>>> x = md.named([[1.0, 5.0], [3.0, 4.0]], ["batch", "feature"])
>>> print(md.less_equal(x, md.mean(x, over="feature")))
bool[batch=2, feature=2] [[ True False]
 [ True False]]

>>> x = md.named([0.5, 5.0], ["feature"])
>>> print(md.lgamma(x))
f32[feature=2] [0.5724 3.1781]

>>> x = md.named([1.0, np.e, 0.0], ["feature"])
>>> print(md.log(x))
f32[feature=3] [  0.   1. -inf]

>>> x = md.named([0.001, 1.0, 100.0], ["feature"])
>>> print(md.log10(x))
f32[feature=3] [-3.  0.  2.]

>>> x = md.named([1e-8, 1.0], ["feature"])
>>> print(md.log1p(x))
f32[feature=2] [1.0000e-08 6.9315e-01]
>>> print(md.log(1 + x))
f32[feature=2] [0.     0.6931]

>>> x = md.named([0.5, 1.0, 8.0], ["feature"])
>>> print(md.log2(x))
f32[feature=3] [-1.  0.  3.]

>>> x = md.named([0.0, 100.0], ["feature"])
>>> print(md.logaddexp(x, x))
f32[feature=2] [  0.6931 100.6931]

>>> seen = md.named([[True, True], [False, True]], ["length", "memory"])
>>> known = md.named([True, False], ["memory"])
>>> print(md.logical_and(seen, known))
bool[length=2, memory=2] [[ True False]
 [False False]]

>>> mask = md.named([True, False], ["length"])
>>> print(md.logical_not(mask))
bool[length=2] [False  True]

>>> x, y = md.named([True, True, False], ["length"]), md.named([True, False, False], ["length"])
>>> print(md.logical_or(x, y))
bool[length=3] [ True  True False]

>>> x, y = md.named([True, True, False], ["length"]), md.named([True, False, False], ["length"])
>>> print(md.logical_xor(x, y))
bool[length=3] [False  True False]

>>> x = md.named([[-1.0, 2.0], [3.0, -4.0]], ["batch", "feature"])
>>> print(md.maximum(x, 0))
f32[batch=2, feature=2] [[0. 2.]
 [3. 0.]]
>>> print(md.maximum(x, md.named([0.0, 1.0], ["batch"])))
f32[batch=2, feature=2] [[0. 2.]
 [3. 1.]]

>>> x = md.named([[-1.0, 2.0], [3.0, -4.0]], ["batch", "feature"])
>>> print(md.minimum(x, 0))
f32[batch=2, feature=2] [[-1.  0.]
 [ 0. -4.]]

>>> x = md.named([[1.0, 2.0], [3.0, 4.0]], ["batch", "feature"])
>>> scale = md.named([10.0, 100.0], ["batch"])
>>> print(md.multiply(x, scale))
f32[batch=2, feature=2] [[ 10.  20.]
 [300. 400.]]

>>> x = md.named([-1.0, 2.0], ["feature"])
>>> print(md.negative(x))
f32[feature=2] [ 1. -2.]

>>> tokens = md.named([[5, 7, 0], [6, 0, 0]], ["batch", "length"])
>>> print(md.not_equal(tokens, 0))
bool[batch=2, length=3] [[ True  True False]
 [ True False False]]

>>> x = md.named([1.0, 2.0], ["feature"])
>>> print(md.polygamma(1, x))
f32[feature=2] [1.6449 0.6449]

>>> x = md.named([0, 7, 255], ["word"])
>>> print(md.population_count(x))
s32[word=3] [0 3 8]

>>> x = md.named([1.0, 2.0, 3.0], ["feature"])
>>> print(md.power(x, 2), md.power(2, x))
f32[feature=3] [1. 4. 9.] f32[feature=3] [2. 4. 8.]

>>> x = md.named([0.0, 0.3, -5.0, 8.0], ["feature"])
>>> print(md.power_of_two(x))
f32[feature=4] [0.   0.25 4.   8.  ]

>>> x = md.named([-7, 7], ["feature"])
>>> print(md.remainder(x, 3), md.remainder(x, -3))
s32[feature=2] [2 1] s32[feature=2] [-1 -2]

>>> x = md.named([0.5, 1.5, 1.6, -2.5], ["feature"])
>>> print(md.round(x))
f32[feature=4] [ 0.  2.  2. -2.]

>>> x = md.named([1.0, 4.0, 100.0], ["feature"])
>>> print(md.rsqrt(x))
f32[feature=3] [1.  0.5 0.1]

>>> x = md.named([1, 3], ["word"])
>>> print(md.shift_left(x, 4))
s32[word=2] [16 48]

>>> x = md.named([16, 255, -8], ["word"])
>>> print(md.shift_right(x, 2))
s32[word=3] [ 4 63 -2]

>>> x = md.named([-1000.0, 0.0, 2.0], ["feature"])
>>> print(md.sigmoid(x))
f32[feature=3] [0.     0.5    0.8808]

>>> x = md.named([-3.0, 0.0, 2.0], ["feature"])
>>> print(md.sign(x))
f32[feature=3] [-1.  0.  1.]

>>> x = md.named([0.0, np.pi / 6, np.pi / 2], ["angle"])
>>> print(md.sin(x))
f32[angle=3] [0.  0.5 1. ]

>>> x = md.named([-1.0, 0.0, 1.0], ["feature"])
>>> print(md.sinh(x))
f32[feature=3] [-1.1752  0.      1.1752]

>>> x = md.named([0.0, 2.0, 9.0], ["feature"])
>>> print(md.sqrt(x))
f32[feature=3] [0.     1.4142 3.    ]

>>> x = md.named([-3.0, 0.5], ["feature"])
>>> print(md.square(x))
f32[feature=2] [9.   0.25]

>>> x = md.named([[1.0, 3.0], [4.0, 8.0]], ["batch", "feature"])
>>> print(md.subtract(x, md.mean(x, over="feature")))
f32[batch=2, feature=2] [[-1.  1.]
 [-2.  2.]]

>>> x = md.named([0.0, np.pi / 4], ["angle"])
>>> print(md.tan(x))
f32[angle=2] [0. 1.]

>>> x = md.named([-1.0, 0.0, 100.0], ["feature"])
>>> print(md.tanh(x))
f32[feature=3] [-0.7616  0.      1.    ]

>>> x = md.named([-1.5, 0.5, 2.0], ["feature"])
>>> print(md.trunc(x))
f32[feature=3] [-1.  0.  2.]

>>> x = md.named([0.0, 2.0], ["feature"])
>>> print(md.xlog1py(x, md.named([-1.0, 1.0], ["feature"])))
f32[feature=2] [0.     1.3863]

>>> p = md.named([0.0, 0.5, 0.5], ["vocab"])
>>> print(md.xlogy(p, p))
f32[vocab=3] [ 0.     -0.3466 -0.3466]

>>> x = md.named([2.0, 4.0], ["feature"])
>>> print(md.zeta(x, 1))
f32[feature=2] [1.6449 1.0823]
"""

EXAMPLES: dict[str, str] = {  # by the names of operations
    re.findall(r"^>>> print\(md\.(\w+)", example, re.M)[0]: example.strip()
    for example in _SHOWN.split("\n\n")
}
