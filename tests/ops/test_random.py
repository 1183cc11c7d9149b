"""Random numbers: Random123's known answers, one value on every layout, and plain statistics."""

import re
from collections import Counter

import numpy as np
import pytest
from scipy import stats

import meshdsl as md
from meshdsl.lowering.backends.threefry import threefry2x32
from tests.ops.agreement import message, random, run

a, b = md.dims(a=6, b=8)
MESHES = [
    (None, None),
    ("x:2,y:2", "a:x; b:y"),
    ("x:2,y:4", "b:y+x"),
    ("x:3", "a:x"),
    ("x:1", "a:x"),
]

# kat_vectors of Random123 (Salmon et al. 2011): threefry2x32, 20 rounds; counter, key, answer.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_threefry_gives_the_known_answers(counter, key, answer):
    words = [np.array([word], np.uint32) for word in (*key, *counter)]
    assert tuple(int(word[0]) for word in threefry2x32(*words)) == answer


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_an_element_is_drawn_with_its_position_as_the_counter(backend):
    key = md.named(np.array([0x13198A2E, 0x03707344], np.uint32), ["random_key"])
    found = run(lambda k: md.random.bits(k, [a, b]), key, backend=backend)
    words = [np.full(48, word, np.uint32) for word in key.data]
    first, second = threefry2x32(*words, np.zeros(48, np.uint32), np.arange(48, dtype=np.uint32))
    assert np.array_equal(found, (first ^ second).reshape(6, 8))
    pairs = run(lambda k: md.random.split(k, a), key, backend=backend)
    assert np.array_equal(pairs, np.stack([first, second], -1)[:6])


def test_the_rounds_of_each_draw_have_its_line():
    """JAX traces them once for all draws of a shape; profiles and HLO have one line for each."""

    def draws(one, other):
        first = md.random.bits(one, [a, b])
        second = md.random.bits(other, [a, b])
        return first, second

    text = md.jit(draws).lower(md.random.key(0), md.random.key(1)).compile().as_text()
    shifts = r'op_name="[^"]*/threefry2x32~test_random\.py-(\d+)/[^"]*shift_left"'
    rounds = Counter(map(int, re.findall(shifts, text)))
    line = draws.__code__.co_firstlineno
    assert set(rounds) == {line + 1, line + 2}
    assert min(rounds.values()) >= 20


def test_more_than_four_billion_elements_have_distinct_counters():
    """Rows that the low word cannot hold are counted in the high word."""
    rows, long = md.dims(rows=4, long=2**32)
    program = md.jit(
        lambda k: md.random.bits(k, [rows, long]), mesh="x:4", layout="rows:x", backend="numpy"
    ).lower(md.random.key(0))
    assert "threefry2x32" in {i.op for i in program.block.instructions}
    more = md.Dimension("more", 2**33)
    with pytest.raises(ValueError, match="more elements than two 32-bit words can count"):
        md.jit(lambda k: md.random.bits(k, [more, long, rows])).lower(md.random.key(0))


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize(("mesh", "layout"), MESHES)
def test_the_values_are_the_same_on_every_mesh_layout_and_backend(mesh, layout, backend):
    def draw(key):
        keys = md.random.split(key, a)
        first, _ = md.random.split(key)
        _, drawn = md.scan(lambda c, k: (c, md.random.bits(k, [b])), None, keys, "a")
        return {
            "bits": md.random.bits(key, [a, b]),
            "uniform": md.random.uniform(first, [b, a]),
            "normal": md.random.normal(first, [a, b], "float64"),
            "bernoulli": md.random.bernoulli(key, 0.3, [a, b]),
            "drawn": drawn,
        }

    expected = run(draw, md.random.key(7))
    found = run(draw, md.random.key(7), mesh=mesh, layout=layout, backend=backend)
    for name, value in found.items():
        if name == "normal":  # its logarithm and cosine are the backend's own
            assert np.abs(value.data - expected[name].data).max() < 1e-12
        else:
            assert np.array_equal(value, expected[name]), name


def test_keys_hold_the_seed_in_two_words():
    assert md.random.key(2**32 + 5).data.tolist() == [1, 5]
    with pytest.raises(ValueError, match=r"a seed is a whole number from 0 to 2\*\*64 - 1, got -1"):
        md.random.key(-1)
    with pytest.raises(ValueError, match=r"a seed is a whole number from .* got 'a'"):
        md.random.key("a")


def test_split_keys_are_distinct_and_draw_apart():
    many = md.Dimension("many", 1000)
    keys = run(lambda k: md.random.split(k, many), md.random.key(0))
    assert len({tuple(key) for key in keys.data.tolist()}) == 1000
    pair = run(
        lambda k: [md.random.uniform(s, [many]) for s in md.random.split(k)], md.random.key(0)
    )
    assert abs(np.corrcoef(*map(np.asarray, pair))[0, 1]) < 0.1


def test_many_keys_are_drawn_at_once_and_are_those_of_few():
    """A draw for each of 200 keys took 18 s to compile."""
    graph = md.jit(lambda key: md.random.split(key, 20)).trace(md.random.key(3))
    assert [op.name for op in graph.operations].count("random_bits") == 1
    few, many = md.random.split(md.random.key(3), 4), md.random.split(md.random.key(3), 20)
    assert [key.data.tolist() for key in many[:4]] == [key.data.tolist() for key in few]
    assert len({tuple(key.data.tolist()) for key in many}) == 20


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_uniform_numbers_are_uniform_and_below_one(dtype):
    many = md.Dimension("many", 20000)
    found = run(lambda k: md.random.uniform(k, [many], dtype), md.random.key(1))
    assert found.dtype == md.spec([a], dtype).dtype
    numbers = np.asarray(found).astype(np.float64)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert stats.kstest(numbers + 2.0**-9 * (dtype == "bfloat16"), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normal_numbers_are_normal(dtype):
    many = md.Dimension("many", 20000)
    found = run(lambda k: md.random.normal(k, [many], dtype), md.random.key(2))
    assert found.dtype == dtype
    assert stats.kstest(np.asarray(found, np.float64), "norm").pvalue > 1e-3


def test_bernoulli_has_its_probability():
    many = md.Dimension("many", 20000)
    found = run(lambda k: md.random.bernoulli(k, 0.3, [many]), md.random.key(3))
    assert found.dtype == np.bool_
    assert abs(np.mean(found.data) - 0.3) < 0.01


# Keys by number and by name.


def test_keys_folded_in_are_those_of_each_number_apart():
    numbers = md.named(np.array([0, 1, 7, -1, 2**31 - 1, 5], np.int32), [a])

    def keys(key, numbers):
        return [md.random.fold_in(key, numbers), md.random.split(key, a)] + [
            md.random.fold_in(key, number) for number in (0, 1, 7, -1, 2**31 - 1, 2**32 + 5)
        ]

    together, split, *apart = run(keys, md.random.key(5), numbers)
    assert np.array_equal(together, np.stack([np.asarray(one) for one in apart]))
    every = [tuple(row) for row in np.concatenate([together, split]).tolist()]
    assert len(set(every)) == 12
    wide = run(keys, md.random.key(5), md.named(numbers.data.astype(np.int64), [a]))
    assert np.array_equal(wide[0], together)


@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
def test_each_number_can_be_folded_into_a_key_of_its_own(backend):
    seeds = [3, 2**40 + 1, 5]
    keys = md.named(np.stack([md.random.key(seed).data for seed in seeds]), ["row", "random_key"])
    numbers = md.named(np.arange(12, dtype=np.int32).reshape(4, 3), ["vocab", "row"])
    found = run(md.random.fold_in, keys, numbers, backend=backend)
    assert found.shape.names == ("vocab", "row", "random_key")
    for row, seed in enumerate(seeds):
        column = md.named(numbers.data[:, row], ["vocab"])
        alone = run(md.random.fold_in, md.random.key(seed), column)
        assert np.array_equal(np.asarray(found)[:, row], alone)
    assert "the numbers" in message(md.random.fold_in, keys, 3)


def test_the_key_of_a_name_depends_on_nothing_but_the_name():
    def some(key):
        return md.random.split(key, ["params", "dropout"])

    def more(key):
        return md.random.split(key, ["noise", "dropout", "params"])

    few, many = run(some, md.random.key(1)), run(more, md.random.key(1))
    assert all(np.array_equal(few[name], many[name]) for name in ("params", "dropout"))
    assert len({tuple(np.asarray(one).tolist()) for one in many.values()}) == 3
    other = run(some, md.random.key(2))
    assert not np.array_equal(other["params"], few["params"])
    assert np.asarray(few["params"]).tolist() == [2292251708, 3338489346]  # for ever


# Statistics. The keys are fixed, so that a test either passes always or never; p-values are uniform
# if the numbers are as they should be, and one below 1e-4 in some hundred is not to be expected.

MANY = md.Dimension("many", 2**16)
ENOUGH = 1e-4


def drawn(function, seed=11):
    return np.asarray(run(function, md.random.key(seed)))


def test_bits_and_their_bytes_are_uniform():
    words = drawn(lambda k: md.random.bits(k, [MANY]))
    ones = [np.count_nonzero(words >> np.uint32(place) & 1) for place in range(32)]
    assert min(stats.binomtest(n, len(words)).pvalue for n in ones) > ENOUGH
    for place in (0, 8, 16, 24):
        counts = np.bincount(words >> np.uint32(place) & 255, minlength=256)
        assert stats.chisquare(counts).pvalue > ENOUGH


KEYED = {
    "neighbours in one draw": lambda k: md.random.bits(k, [MANY]),
    "one position of split keys": lambda k: md.random.split(k, MANY),
    "one position of folded keys": lambda k: md.random.fold_in(k, md.arange(MANY)),
}


@pytest.mark.parametrize("name", KEYED)
def test_bits_follow_one_another_independently(name):
    """Pairs fall evenly into 16 x 16 fields, and no lag correlates."""
    words = drawn(KEYED[name]).reshape(MANY.size, -1)[:, 0]
    for lag in (1, 2, 3, 64, 1024):
        fields = (words[:-lag] >> 28) * 16 + (words[lag:] >> 28)
        assert stats.chisquare(np.bincount(fields, minlength=256)).pvalue > ENOUGH
        low = (words[:-lag] & 15) * 16 + (words[lag:] & 15)
        assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > ENOUGH
        numbers = words / 2**32
        assert stats.pearsonr(numbers[:-lag], numbers[lag:]).pvalue > ENOUGH


def test_draws_with_split_keys_are_independent():
    def pair(k):
        return md.random.uniform(k, [MANY], "float64")

    children = [lambda k, i=i: pair(md.random.split(k, 3)[i]) for i in range(3)]
    named = [lambda k, n=n: pair(md.random.split(k, [n])[n]) for n in ("a", "b")]
    folded = [lambda k, n=n: pair(md.random.fold_in(k, n)) for n in (0, 1)]
    columns = [drawn(function) for function in (pair, *children, *named, *folded)]
    columns.append(drawn(pair, seed=12))
    for i, first in enumerate(columns):
        for second in columns[:i]:
            assert stats.pearsonr(first, second).pvalue > ENOUGH
            fields = np.floor(first * 16) * 16 + np.floor(second * 16)
            counts = np.bincount(fields.astype(int), minlength=256)
            assert stats.chisquare(counts).pvalue > ENOUGH


def test_turning_one_bit_of_a_key_turns_half_of_the_bits_drawn():
    before = drawn(lambda k: md.random.bits(k, [MANY]), seed=0)
    for place in (0, 1, 31, 32, 63):
        after = drawn(lambda k: md.random.bits(k, [MANY]), seed=1 << place)
        turned = int(np.bitwise_count(before ^ after).sum())
        assert stats.binomtest(turned, 32 * MANY.size).pvalue > ENOUGH


DISTRIBUTIONS = {
    "uniform": (lambda k, d: md.random.uniform(k, [MANY], d), stats.uniform),
    "normal": (lambda k, d: md.random.normal(k, [MANY], d), stats.norm),
    "truncated_normal": (
        lambda k, d: md.random.truncated_normal(k, [MANY], -0.5, 3.0, d),
        stats.truncnorm(-0.5, 3.0),
    ),
    "exponential": (lambda k, d: md.random.exponential(k, [MANY], d), stats.expon),
    "gumbel": (lambda k, d: md.random.gumbel(k, [MANY], d), stats.gumbel_r),
    "laplace": (lambda k, d: md.random.laplace(k, [MANY], d), stats.laplace),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_numbers_follow_their_distribution(name, dtype):
    draw, expected = DISTRIBUTIONS[name]
    numbers = drawn(lambda k: draw(k, dtype))
    assert numbers.dtype == dtype
    assert np.isfinite(numbers).all()
    assert stats.kstest(numbers, expected.cdf).pvalue > ENOUGH
    assert stats.pearsonr(numbers[:-1], numbers[1:]).pvalue > ENOUGH


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_half_precision_is_drawn_in_float32_and_rounded(name):
    if name != "uniform":  # which has as many values as the dtype holds evenly
        draw, _ = DISTRIBUTIONS[name]
        wide, narrow = (drawn(lambda k, d=d: draw(k, d)) for d in ("float32", "bfloat16"))
        assert np.array_equal(narrow, wide.astype(narrow.dtype))


@pytest.mark.parametrize("word", [0, 2**32 - 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_the_rarest_bits_give_finite_numbers(name, dtype, word, backend, monkeypatch):
    """No logarithm of 0, whatever is drawn."""
    import meshdsl.ops.random as module

    def rare(source, dims):
        return md.full([a], word, "uint32")

    monkeypatch.setattr(module, "bits", rare)
    draw, expected = DISTRIBUTIONS[name]
    found = np.asarray(run(lambda k: draw(k, dtype), md.random.key(0), backend=backend))
    low, high = expected.support()
    wide = found.astype(np.float64)
    assert np.isfinite(wide).all()
    assert ((low <= wide) & (wide <= high)).all()
    if name == "uniform":
        assert (wide < 1).all()


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [(0, 10, "int32"), (-3, 4, "int8"), (-(2**31), 2**31, "int32"), (5, 5 + 3 * 2**30, "uint32")],
)
def test_whole_numbers_are_uniform(low, high, dtype):
    numbers = drawn(lambda k: md.random.randint(k, low, high, [MANY], dtype))
    assert numbers.dtype == dtype
    wide = numbers.astype(np.int64)
    assert low <= wide.min()
    assert wide.max() < high
    fields = (wide - low) * min(high - low, 100) // (high - low)
    assert stats.chisquare(np.bincount(fields)).pvalue > ENOUGH


def test_whole_numbers_are_64_bits_times_the_count_cut_off():
    words = drawn(lambda k: md.random.split(k, a)).astype(object)
    for count in (1, 3, 2**16, 2**31 + 12345, 2**32 - 1, 2**32):
        exact = [(high * 2**32 + low) * count >> 64 for high, low in words.tolist()]
        found = drawn(lambda k, n=count: md.random.randint(k, 0, n, [a], "uint32"))
        assert found.tolist() == exact


def test_categorical_draws_with_the_probabilities_of_softmax():
    logits = np.array([[0.0, 1.0, -np.inf, 2.0], [3.0, 3.0, 3.0, 3.0]])
    rows, kinds = md.dims(rows=2, kinds=4)
    given = md.named(logits, [rows, kinds])
    found = run(lambda k, x: md.random.categorical(k, x, "kinds", [MANY]), md.random.key(4), given)
    assert found.dims.names == ("many", "rows")
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for row in range(2):
        counts = np.bincount(np.asarray(found)[:, row], minlength=4)
        kept = expected[row] > 0
        assert not counts[~kept].any()
        assert stats.chisquare(counts[kept], expected[row][kept] * MANY.size).pvalue > ENOUGH
    assert run(lambda k, x: md.random.categorical(k, x, "kinds"), md.random.key(4), given).dims == (
        rows,
    )


def test_permutations_hold_every_number_once_and_are_equally_frequent():
    three, runs = md.Dimension("three", 3), md.Dimension("runs", 600)
    assert np.array_equal(np.sort(drawn(lambda k: md.random.permutation(k, MANY))), range(2**16))

    def several(key):
        keys = md.random.split(key, runs)
        _, found = md.scan(lambda c, k: (c, md.random.permutation(k, three)), None, keys, "runs")
        return found

    _, counts = np.unique(drawn(several), axis=0, return_counts=True)
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > ENOUGH


def test_shuffling_keeps_together_what_is_at_one_position():
    x = random([a, b])
    found, order = run(
        lambda k, x: (md.random.shuffle(k, x, "b"), md.random.permutation(k, b)),
        md.random.key(0),
        x,
    )
    assert np.array_equal(found, x.data[:, np.asarray(order)])


def test_dropout_keeps_the_mean_and_scales_gradients_alike():
    x = random([a, MANY])

    def dropped(key, x):
        return md.random.dropout(key, x, 0.25, shared="a")

    found = np.asarray(run(dropped, md.random.key(0), x))
    kept = found != 0
    assert (kept == kept[0]).all()
    assert abs(kept.mean() - 0.75) < 0.01
    assert np.array_equal(found[kept], (x.data / 0.75)[kept])
    gradient = run(md.grad(lambda x, key: md.sum(dropped(key, x))), x, md.random.key(0))
    assert np.array_equal(np.asarray(gradient) != 0, kept)
    assert run(lambda k, x: md.random.dropout(k, x, 0.0), md.random.key(0), x).data is not None


@pytest.mark.long
@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize(
    ("mesh", "layout"), [("x:4", "a:x; b:x?"), ("x:4,y:2", "b:x+y"), ("x:2,y:2", "a:x; b:y")]
)
def test_sizes_that_do_not_divide_change_nothing(mesh, layout, backend):
    odd, wide = md.dims(a=5, b=7)

    def draw(key, numbers):
        outer = md.outer(md.add, 7 * md.arange(wide), numbers)
        keys = md.random.split(key, ["one", "two"])
        return {
            "folded": md.random.fold_in(key, numbers),
            "folded twice": md.random.fold_in(md.random.fold_in(key, numbers), outer),
            "stacked": md.random.split(key, odd),
            "bits": md.random.bits(keys["one"], [odd, wide]),
            "randint": md.random.randint(keys["two"], -5, 17, [odd, wide]),
            "permutation": md.random.permutation(key, wide),
            "categorical": md.random.categorical(key, md.zeros([odd, wide]), "b"),
            "dropout": md.random.dropout(key, md.ones([odd, wide]), 0.5),
            "bernoulli": md.random.bernoulli(key, md.cast(numbers, "float32") / 10, [odd, wide]),
            "normal": md.random.normal(key, [odd, wide], "float64"),
            "truncated": md.random.truncated_normal(key, [wide, odd], dtype="float64"),
            "gumbel": md.random.gumbel(key, [odd], "float64"),
        }

    numbers = md.named(np.arange(5, dtype=np.int32), [odd])
    expected = run(draw, md.random.key(7), numbers)
    found = run(draw, md.random.key(7), numbers, mesh=mesh, layout=layout, backend=backend)
    for name, value in found.items():
        if value.dtype == np.float64:  # logarithms and the like are the backend's own
            assert np.abs(np.asarray(value) - expected[name].data).max() < 1e-12, name
        else:
            assert np.array_equal(value, expected[name]), name


def test_mistakes_are_told():
    x = random([a])
    assert "bits: a key is u32[random_key=2], as made by md.random.key; got f64[a=6]" in message(
        lambda x: md.random.bits(x, [a]), x
    )
    assert "uniform: needs a floating-point dtype, got s32" in message(
        lambda: md.random.uniform(md.random.key(0), [a], "int32")
    )
    assert "'a' has no size here" in message(lambda: md.random.bits(md.random.key(0), ["a"]))
    key = md.random.key(0)
    x = random([a, b])
    for function, text in {
        lambda: md.random.split(key, ["one", "one"]): "split: a name occurs twice in",
        lambda: md.random.fold_in(key, 0.5): "fold_in: folds in whole numbers, got 0.5",
        lambda: md.random.truncated_normal(key, [a], 1.0, 1.0): "finite bounds, lower < upper",
        lambda: md.random.randint(key, 3, 3, [a]): "[3, 3) needs from 1 to 2**32 numbers",
        lambda: md.random.randint(key, 0, 300, [a], "int8"): "int8 does not hold all of [0, 300)",
        lambda: md.random.randint(key, 0, 3, [a], "float32"): "a dtype of whole numbers, got f32",
        lambda: md.random.bernoulli(key, md.full([b], 0.5), [a]): "dims [b=8] that are not among",
    }.items():
        assert text in message(function), text
    assert "a rate is at least 0 and below 1, got 1" in message(
        lambda x: md.random.dropout(key, x, 1), x
    )
    assert "no dim `c` in" in message(lambda x: md.random.categorical(key, x, "c"), x)
