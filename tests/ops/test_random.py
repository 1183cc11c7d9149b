"""Random numbers: Random123's known answers, one value on every layout, and plain statistics."""

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
    with pytest.raises(ValueError, match=r"a seed is a number from 0 to 2\*\*64 - 1, got -1"):
        md.random.key(-1)


def test_split_keys_are_distinct_and_draw_apart():
    many = md.Dimension("many", 1000)
    keys = run(lambda k: md.random.split(k, many), md.random.key(0))
    assert len({tuple(key) for key in keys.data.tolist()}) == 1000
    pair = run(
        lambda k: [md.random.uniform(s, [many]) for s in md.random.split(k)], md.random.key(0)
    )
    assert abs(np.corrcoef(*map(np.asarray, pair))[0, 1]) < 0.1


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


def test_mistakes_are_told():
    x = random([a])
    assert "bits: a key is u32[random_key=2], as made by md.random.key; got f64[a=6]" in message(
        lambda x: md.random.bits(x, [a]), x
    )
    assert "uniform: needs a floating-point dtype, got s32" in message(
        lambda: md.random.uniform(md.random.key(0), [a], "int32")
    )
    assert "'a' has no size here" in message(lambda: md.random.bits(md.random.key(0), ["a"]))
