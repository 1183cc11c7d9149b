"""Convolutions in one to three dims against JAX's, with all gradients; on layouts; mistakes."""

import random as lottery

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, message, random, run
from tests.ops.layouts import assert_same_on_every_layout

batch, height, width, channels, features = md.dims(
    batch=2, height=7, width=6, channels=4, features=6
)
kh, kw = md.dims(kh=3, kw=2)
SPATIAL = {"height": "kh", "width": "kw"}
NAMES = ("NHWC", "HWIO", "NHWC")


def image(seed=0):
    return random([batch, height, width, channels], seed=seed)


def filters(ins=channels, seed=1):
    return random([kh, kw, ins, features], seed=seed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strides", "padding", "dilation"),
    [
        (1, "same", 1),
        ({"height": 2, "width": 3}, "same", 1),
        (2, "valid", {"width": 2}),
        ({"width": 2}, {"height": (3, -1), "width": 2}, 2),
    ],
)
def test_two_dims_with_two_derivatives(strides, padding, dilation):
    def ours(x, f):
        return md.conv(x, f, SPATIAL, "channels", "features", strides, padding, dilation=dilation)

    def each(value, default=1):
        if isinstance(value, dict):
            return [value.get(name, default) for name in SPATIAL]
        return [value] * 2

    def theirs(x, f):
        around = padding.upper() if isinstance(padding, str) else [(3, -1), (2, 2)]
        return lax.conv_general_dilated(
            x, f, each(strides), around, rhs_dilation=each(dilation), dimension_numbers=NAMES
        )

    assert_agree(ours, theirs, image(), filters(), order=2)


@pytest.mark.parametrize("groups", [2, 4])
def test_groups(groups):
    ins = md.Dimension("channels", 4 // groups)
    many = md.Dimension("features", 8)

    def ours(x, f):
        return md.conv(x, f, SPATIAL, "channels", "features", groups=groups)

    def theirs(x, f):
        return lax.conv_general_dilated(
            x, f, (1, 1), "SAME", dimension_numbers=NAMES, feature_group_count=groups
        )

    assert_agree(ours, theirs, image(), random([kh, kw, ins, many], seed=1))


def test_a_shared_dim_that_is_not_summed_over_has_filters_of_its_own():
    def theirs(x, f):
        return lax.conv_general_dilated(
            x, f[:, :, None], (2, 2), "SAME", dimension_numbers=NAMES, feature_group_count=4
        )

    own = random([kh, kw, channels], seed=1)
    assert_agree(lambda x, f: md.conv(x, f, SPATIAL, strides=2), theirs, image(), own)


def test_filters_may_call_the_summed_dim_otherwise():
    square = random([kh, kw, md.Dimension("channels_in", 4), channels], seed=1)
    found = run(
        lambda x, f: md.conv(x, f, SPATIAL, {"channels": "channels_in"}, "channels"),
        image(),
        square,
    )
    assert found.dims == image().dims
    expected = lax.conv_general_dilated(
        image().data, square.data, (1, 1), "SAME", dimension_numbers=NAMES
    )
    assert_close(found, expected)


def test_dims_keep_their_names_and_the_result_takes_the_place_of_what_is_summed():
    x = random([channels, height, batch])
    f = random([features, kh, channels], seed=1)
    found = run(lambda x, f: md.conv(x, f, {height: kh}, channels, strides={height: 2}), x, f)
    assert str(found.dims) == "[features=6, height=4, batch=2]"
    padded = np.pad(x.data, ((0, 0), (1, 1), (0, 0)))
    expected = sum(
        np.einsum("chb,fc->fhb", padded[:, k : k + 7 : 2], f.data[:, k]) for k in range(3)
    )
    assert_close(found, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("padding", "pads", "lost"),
    [
        ("same", "SAME", 0),
        ("valid", "VALID", 0),
        ((2, 1), [(2, 1)], 3),
        (-1, [(-1, -1)], -2),
    ],
)
@pytest.mark.parametrize("strides", [1, 3])
def test_the_transposed_convolution_is_the_gradient_of_the_convolution(
    strides, padding, pads, lost
):
    x, f = random([batch, height, channels]), random([kh, channels, features], seed=1)
    size = 7 * strides if padding == "same" else 6 * strides + 3 - lost

    def ours(x, f):
        return md.conv_transpose(x, f, {"height": "kh"}, "channels", "features", strides, padding)

    def theirs(x, f):
        def forward(y):
            turned = jnp.swapaxes(f, 1, 2)
            names = ("NHC", "HIO", "NHC")
            return lax.conv_general_dilated(y, turned, (strides,), pads, dimension_numbers=names)

        whole = jax.ShapeDtypeStruct((2, size, 6), x.dtype)
        return jax.linear_transpose(forward, whole)(x)[0]

    assert_agree(ours, theirs, x, f)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
def test_other_dtypes_on_both_backends(dtype):
    long = md.Dimension("channels", 2048)
    x = md.named(np.ones((7, 2048), md.spec([], dtype).dtype), [height, long])
    f = md.named(np.ones((3, 2048), x.dtype), [kh, long])
    for backend in ("numpy", "jax"):
        found = run(lambda x, f: md.conv(x, f, {"height": "kh"}, long), x, f, backend=backend)
        assert found.dtype == x.dtype
        assert np.array_equal(np.asarray(found, np.float64), [4096, *[6144] * 5, 4096])


def test_random_convolutions_are_the_same_on_every_layout():
    """Odd sizes, halos longer than a shard, empty shards, window dims split, in 1, 2 and 3 dims."""
    meshes = ["x:2", "x:8", "x:2,y:3", "x:4,y:2", "x:2,y:2,z:2"]
    for seed in range(40):
        draw = lottery.Random(seed)
        function, x, f, dims = random_convolution(draw)
        mesh = draw.choice(meshes)
        rules: dict[str, list[str]] = {}
        for axis in draw.sample([a.split(":")[0] for a in mesh.split(",")], mesh.count(":")):
            rules.setdefault(draw.choice(dims), []).append(axis)
        layout = "; ".join(f"{dim}:{'+'.join(axes)}" for dim, axes in rules.items())
        backend = "jax" if seed % 10 == 0 else "numpy"

        def everything(x, f, function=function):
            def loss(x, f):
                return md.sum(md.sin(function(x, f)))

            return [function(x, f), *md.grad(loss, (0, 1))(x, f)]

        expected = run(everything, x, f)
        found = run(everything, x, f, mesh=mesh, layout=layout, backend=backend)
        for mine, other in zip(found, expected, strict=True):
            try:
                assert_close(mine, other)
            except AssertionError as error:
                error.add_note(f"seed {seed}: {x.dims} with {f.dims} on {mesh}, {layout}")
                raise


def random_convolution(draw):
    """Returns a function, its operands, and the dims that a layout may split."""
    count = draw.choice([1, 1, 2, 3])
    names = ["height", "width", "depth"][:count]
    dims = [md.Dimension(n, draw.randint(4, (20, 9, 6)[count - 1])) for n in names]
    windows = [md.Dimension(f"k_{n}", draw.randint(1, 3)) for n in names]
    ins, outs = md.dims(channels=draw.randint(1, 3), features=draw.randint(1, 3))
    x = random(draw.sample([batch, *dims, ins], count + 2), seed=0)
    f = random(draw.sample([*windows, ins, outs], count + 2), seed=1)
    operation = draw.choice([md.conv, md.conv, md.conv_transpose])
    arguments = {
        "strides": {n: draw.randint(1, 3) for n in names},
        "padding": {n: draw.choice(["same", 2, (0, 3)]) for n in names},
        "dilation": {n: draw.randint(1, 2) for n in names},
    }
    if operation is md.conv_transpose:
        arguments["padding"] = draw.choice(["same", "valid"])
    spatial = {n: f"k_{n}" for n in names}

    def function(x, f):
        return operation(x, f, spatial, "channels", "features", **arguments)

    return function, x, f, [*names, *names, "batch", "channels", "features", windows[0].name]


def test_groups_and_depthwise_on_every_layout():
    length = md.Dimension("length", 11)
    x = random([batch, length, channels])
    grouped = random([kh, md.Dimension("channels", 2), features], seed=1)
    own = random([kh, channels], seed=2)
    assert_same_on_every_layout(
        [
            lambda x, g, d: md.conv(x, g, {"length": "kh"}, "channels", groups=2, strides=2),
            lambda x, g, d: md.conv(x, d, {"length": "kh"}, dilation=3),
        ],
        x,
        grouped,
        own,
    )


def test_mistakes_are_told():
    x, f = image(), filters()
    conv = md.conv
    for function, text in [
        (lambda x, f: conv(x, f, {"hight": "kh"}, "channels"), "no dim `hight` in [batch=2, h"),
        (lambda x, f: conv(x, f, {"height": "kx"}, "channels"), "no dim `kx` in [kh=3, kw=2, ch"),
        (lambda x, f: conv(x, f, {}, "channels"), "`spatial` names no dim for the filters"),
        (
            lambda x, f: conv(x, f, {"height": "kh", "width": "kh"}, "channels"),
            "each dim needs a window of its own, got kh, kh",
        ),
        (
            lambda x, f: conv(x, f.rename(channels="rgb"), SPATIAL, "channels"),
            "no dim `channels` in [kh=3, kw=2, rgb=4, features=6]",
        ),
        (
            lambda x, f: conv(x, md.slice(f, "channels", 0, 3), SPATIAL, "channels"),
            "x has channels=4, but the filters have channels=3",
        ),
        (
            lambda x, f: conv(x, f, SPATIAL, "channels", groups=3),
            "groups=3 does not divide channels",
        ),
        (lambda x, f: conv(x, f, SPATIAL, "channels", groups=0), "groups must be 1 or more, got 0"),
        (
            lambda x, f: conv(x, f, SPATIAL, "channels", groups=2),
            "with groups=2 and channels=4 in x the filters need channels=2, but have channels=4",
        ),
        (lambda x, f: conv(x, f, SPATIAL, groups=2), "groups cut in_dim and out_dim: name both"),
        (
            lambda x, f: conv(x, f, SPATIAL, "channels", padding="valid", dilation=4),
            "kh=3 in steps of 4 spans 9 positions, more than height=7 has",
        ),
        (
            lambda x, f: conv(x, f, SPATIAL, "channels", padding={"height": -3}),
            "kh=3 spans 3 positions, more than height=7 with -3 and -3 zeros around it has",
        ),
        (
            lambda x, f: md.conv_transpose(x, f, SPATIAL, "channels", padding=5),
            "cutting 5 and 5 of the 9 positions that kh=3 reaches from height=7 leaves nothing",
        ),
        (
            lambda x, f: conv(x, f, SPATIAL, "channels", strides={"kh": 2}),
            "strides is given for `kh`, but the window slides along `height`, `width`",
        ),
        (
            lambda x, f: conv(x, f, SPATIAL, "channels", strides=0),
            "the stride along `height` must be a positive integer, got 0",
        ),
        (
            lambda x, f: conv(x, f, SPATIAL, "channels", padding="full"),
            'the padding along `height` must be "same", "valid", a number or a pair of them, got',
        ),
        (
            lambda x, f: conv(x.rename(batch="kh"), f, SPATIAL, "channels"),
            "x has a dim `kh` as well, the window along `height`",
        ),
        (
            lambda x, f: conv(x, f.rename(kw="height"), {"height": "kh"}, "channels"),
            "the filters have a dim `height` as well, which they slide along",
        ),
        (
            lambda x, f: conv(x, f, SPATIAL, "height"),
            "in_dim `height` is a dim that the filters slide along",
        ),
        (
            lambda x, f: conv(
                x, f.rename(channels="c", features="channels"), SPATIAL, None, "channels"
            ),
            "out_dim `channels` is a dim of x as well. If that is to be summed over, let the",
        ),
        (
            lambda x, f: conv(x, f, SPATIAL, {"channels": "a", "batch": "b"}),
            "in_dim names one dim, got 2",
        ),
        (
            lambda x, f: conv(x, md.cast(f, "float32"), SPATIAL, "channels"),
            "dtypes differ: f64 and f32; cast one of them",
        ),
        (lambda x, f: conv(x > 0, f > 0, SPATIAL, "channels"), "needs numbers, got bool"),
    ]:
        found = message(function, x, f)
        assert text in found, found
        assert "operand 2: " in found
        assert "made at" in found
