"""Direct calls: what changes the program, or the places, never reaches the wrong executable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.running.calling import Direct

row, column = md.dims(row=8, column=4)


def ones(dims=(row,), dtype=np.float32):
    return md.named(jnp.ones([d.size for d in dims], dtype), dims)


def armed(function, *args, **options):
    """Returns a compiled function whose next call like these is direct."""
    jitted = md.jit(function, **options)
    jitted(*args)
    assert jitted._direct.function is not None
    return jitted


def looks(jitted, monkeypatch):
    """Returns a list that grows with each call whose arguments are looked at."""
    found = []
    flatten = jitted.flatten
    monkeypatch.setattr(jitted, "flatten", lambda *a: found.append(a) or flatten(*a))
    return found


@pytest.mark.parametrize("backend", ["jax", "jax_auto"])
@pytest.mark.parametrize(("mesh", "layout"), [(None, ""), ("data:8", "row:data")])
def test_calls_alike_are_not_looked_at(mesh, layout, backend, monkeypatch):
    def model(tree, scale=2.0):
        return {"out": tree["x"] * scale, "none": None, "same": tree["x"]}

    jitted = armed(model, {"x": ones()}, mesh=mesh, layout=layout, backend=backend)
    looked = looks(jitted, monkeypatch)
    x = {"x": ones()}
    for _ in range(3):
        found = jitted(x)
        np.testing.assert_array_equal(found["out"], 2 * np.ones(8))
        assert found["none"] is None
        assert found["out"].dims == found["same"].dims == md.Shape([row])
        x = {"x": found["same"]}
    assert looked == []


def test_arguments_by_keyword_are_put_in_order(monkeypatch):
    jitted = armed(lambda x, y, z: x - y * z, ones(), ones() * 2, ones() * 3)
    looked = looks(jitted, monkeypatch)
    x, y, z = ones(), ones() * 2, ones() * 3
    for found in (jitted(x, z=z, y=y), jitted(z=z, y=y, x=x), jitted(x, y, z=z)):
        np.testing.assert_array_equal(found, -5 * np.ones(8))
    assert looked == []
    with pytest.raises(TypeError, match="missing a required argument: 'z'"):
        jitted(x, y=y)
    with pytest.raises(TypeError, match="unexpected keyword argument 'w'"):
        jitted(x, y, z, w=z)


def test_a_keyword_behind_positional_only_parameters_reaches_its_own():
    def model(x, /, y=10.0, z=1.0):
        return x * 100 + y - z

    jitted = armed(model, ones(), ones())
    for _ in range(3):
        np.testing.assert_array_equal(jitted(ones(), ones()), 100 * np.ones(8))
        np.testing.assert_array_equal(jitted(ones(), z=ones() * 4), 106 * np.ones(8))
        np.testing.assert_array_equal(jitted(ones(), z=ones() * 4, y=ones()), 97 * np.ones(8))
    with pytest.raises(TypeError, match=r"positional.only"):
        jitted(x=ones(), y=ones())


def test_whatever_changes_the_program_misses():
    class Scale(md.Module):
        x: md.Tensor
        by: float = md.static(default=2.0)

    def model(m):
        return m.x * m.by if "int" not in m.x.dtype.name else m.x + 100

    jitted = armed(model, Scale(ones()))
    for argument, wanted in [
        (Scale(ones(), by=3.0), 3 * np.ones(8)),
        (Scale(ones((column, row))), 2 * np.ones((4, 8))),
        (Scale(ones((row, column))), 2 * np.ones((8, 4))),
        (Scale(ones(dtype=np.int32)), 101 * np.ones(8)),
        (Scale(ones().rename(row="other")), 2 * np.ones(8)),
        (Scale(ones(dtype=jnp.bfloat16)), 2 * np.ones(8)),
    ]:
        for _ in range(2):  # by the path that looks, and by its own direct call
            assert jitted(Scale(ones())).dims == md.Shape([row])
            found = jitted(argument)
            np.testing.assert_array_equal(found, wanted)
            assert (found.dims, found.dtype) == (argument.x.dims, argument.x.dtype)


def test_plain_numbers_are_not_looked_at(monkeypatch):
    def model(tree, scale, flag, more):
        return md.where(flag, tree["x"] * scale, tree["x"] * more["by"] + more["array"])

    def given(scale, flag, by):
        return {"x": ones()}, scale, flag, {"by": by, "array": ones()}

    jitted = armed(model, *given(0.5, True, 2.0))
    looked = looks(jitted, monkeypatch)
    for scale in (3.0, np.float32(3), md.named(jnp.float32(3), [])):
        np.testing.assert_array_equal(jitted(*given(scale, True, 2.0)), 3 * np.ones(8))
        np.testing.assert_array_equal(jitted(*given(scale, np.bool_(False), 2.0)), 3 * np.ones(8))
        np.testing.assert_array_equal(jitted(*given(scale, False, 5.0)), 6 * np.ones(8))
    assert looked == []


def test_a_plain_number_of_another_kind_is_another_program():
    jitted = armed(lambda x, n: x * md.cast(n, "float32"), ones(), 0.5)
    for _ in range(4):
        for number in (0.5, 2, True, 2.5):
            np.testing.assert_array_equal(jitted(ones(), number), float(number) * np.ones(8))
    with pytest.raises(OverflowError):
        jitted(ones(), 2**40)


def alternating(jitted, calls):
    for _ in range(3):
        for args, wanted in calls:
            np.testing.assert_array_equal(jitted(*args), wanted)


@pytest.mark.parametrize("shared", [True, False])
def test_calls_that_alternate_between_shapes_are_not_looked_at(shared, monkeypatch):
    other = md.Dimension("row", 16)
    same = {"same": ones((md.Dimension("one", 1),))} if shared else {}
    calls = [
        ((same | {"x": ones((dim,))},), np.full(dim.size, 1 + len(same)))
        for dim in (row, other, column)
    ]

    def model(tree):
        return tree["x"] + md.sum(tree["same"]) if "same" in tree else tree["x"] * 1.0

    jitted = md.jit(model)
    for _ in range(4):
        alternating(jitted, calls)
    looked = looks(jitted, monkeypatch)
    alternating(jitted, calls)
    assert looked == []


def test_calls_that_alternate_between_trees_dtypes_and_static_fields_are_not_looked_at(monkeypatch):
    class Scale(md.Module):
        x: md.Tensor
        by: float = md.static(default=2.0)

    def model(m):
        return m.x * m.by if isinstance(m, Scale) else m["x"] + (1 if len(m) == 1 else m["y"])

    calls = [
        ((Scale(ones()),), 2 * np.ones(8)),
        ((Scale(ones(), by=3.0),), 3 * np.ones(8)),
        (({"x": ones()},), 2 * np.ones(8)),
        (({"x": ones(), "y": ones() * 4},), 5 * np.ones(8)),
    ]
    jitted = md.jit(model)
    for _ in range(4):
        alternating(jitted, calls)
    looked = looks(jitted, monkeypatch)
    alternating(jitted, calls)
    assert looked == []
    dtypes = [(({"x": ones(dtype=d)},), 2 * np.ones(8)) for d in (np.float32, np.int32)]
    jitted = md.jit(model)
    for _ in range(4):
        alternating(jitted, dtypes)
    looked = looks(jitted, monkeypatch)
    alternating(jitted, dtypes)
    assert looked == []


def test_more_shapes_than_are_remembered_still_run():
    jitted = md.jit(lambda x: x + x)
    dims = [md.Dimension("row", size) for size in range(1, 12)]
    for _ in range(3):
        alternating(jitted, [((ones((dim,)),), 2 * np.ones(dim.size)) for dim in dims])


def test_an_unused_argument_of_another_dtype_is_another_program():
    traced = []

    def model(x, unused):
        traced.append(unused.dtype)
        return x + (1 if unused.dtype == np.float32 else 2)

    jitted = md.jit(model)
    for _ in range(3):
        np.testing.assert_array_equal(jitted(ones(), ones()), 2 * np.ones(8))
        np.testing.assert_array_equal(jitted(ones(), ones(dtype=np.int32)), 3 * np.ones(8))
    assert len(traced) == 2


def test_wide_numbers_of_the_host_are_not_cut_in_silence():
    with jax.enable_x64(False):
        x = md.named(np.ones(8, np.float32), [row])
        jitted = armed(lambda x: x * 2, x)
        for _ in range(3):
            with pytest.raises(ValueError, match="the program uses float64, which JAX turns into"):
                jitted(md.named(np.ones(8), [row]))
            np.testing.assert_array_equal(jitted(x), 2 * np.ones(8))
        compiled = jitted.lower(x).compile()
        compiled(x)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"x: traced as f32\[row=8\], given f64"):
                compiled(md.named(np.ones(8), [row]))


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_a_refused_call_leaves_donated_arrays_to_the_caller(dtype):
    with jax.enable_x64(False):
        batch = md.named(np.ones(8, np.float32), [row])
        jitted = md.jit(lambda state, batch: state + batch, donate="state")
        state = jitted(batch, batch)
        for _ in range(5):
            state = jitted(state, batch)
        with pytest.raises(ValueError):
            jitted(state, md.named(np.ones(8, dtype), [row]))
        np.testing.assert_array_equal(state, 7 * np.ones(8))


def test_arrays_of_other_places_are_moved():
    placed = md.place(ones(), "data:8", "row:data")
    jitted = armed(lambda x: x + 1, placed, mesh="data:8", layout="row:data")
    for _ in range(3):
        for mesh, layout in [("a:4", "row:a"), ("data:8", ""), ("data:8", "row:data")]:
            found = jitted(md.place(ones(), mesh, layout))
            np.testing.assert_array_equal(found, 2 * np.ones(8))
            assert str(found.layout) == "row:data"
    elsewhere = jax.device_put(jnp.ones(8, np.float32), jax.devices()[3])
    alone = armed(lambda x: x + 1, ones())
    for data in (elsewhere, np.ones(8, np.float32), elsewhere):
        found = alone(md.named(data, [row]))
        np.testing.assert_array_equal(found, 2 * np.ones(8))
        assert found.data.devices() == {jax.devices()[0]}


def test_arrays_with_other_pads_are_stored_anew():
    odd = md.Dimension("odd", 5)
    x = md.named(np.arange(5, dtype=np.float32), [odd])
    jitted = armed(md.sum, md.place(x, "a:4", "odd:a"), mesh="a:4", layout="odd:a")
    for mesh in ("a:4", "a:2", "b:3", "a:4"):
        assert float(jitted(md.place(x, mesh, f"odd:{mesh[0]}"))) == 10
    assert float(jitted(x)) == 10


def test_donated_arguments_are_given_up_in_direct_calls():
    step = md.jit(lambda state, x: ({"a": state["a"] + x}, x * 2), donate="state")
    state, x = {"a": ones()}, ones()
    for _ in range(3):
        before, (state, _) = state, step(state, x)
    assert before["a"].data.is_deleted()
    assert not x.data.is_deleted()
    np.testing.assert_array_equal(state["a"], 4 * np.ones(8))


def test_an_argument_that_is_donated_in_part_is_looked_at():
    step = md.jit(lambda state: {"a": state["a"] + md.sum(state["b"])}, donate="state")
    for _ in range(2):
        state = {"a": ones(), "b": ones((row, column))}
        np.testing.assert_array_equal(step(state)["a"], 33 * np.ones(8))
        assert state["a"].data.is_deleted()
        assert not state["b"].data.is_deleted()


def test_a_call_inside_another_trace_stays_part_of_it():
    inner = armed(lambda x: x * 2, ones())
    literal = ones()
    outer = md.jit(lambda x: inner(x) + inner(literal))
    names = [operation.name for operation in outer.trace(ones()).operations]
    assert names.count("multiply") == 2
    np.testing.assert_array_equal(outer(ones()), 4 * np.ones(8))


def test_checked_functions_are_looked_at():
    jitted = md.jit(lambda x: 1 / x, check_finite=True)
    for _ in range(2):
        np.testing.assert_array_equal(jitted(ones()), np.ones(8))
        with pytest.raises(FloatingPointError):
            jitted(ones() * 0)


def test_mistakes_are_told_as_before():
    jitted = armed(lambda x, y: x + y, ones(), ones())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"y: ndarray\[8\] has no dim names"):
            jitted(ones(), np.ones(8))
        jitted(ones(), ones())
    with pytest.raises(TypeError, match="too many positional arguments"):
        jitted(ones(), ones(), ones())


def test_each_refused_call_doubles_what_is_waited_for():
    jitted = md.jit(lambda x: x + 1)
    compiled = jitted.lower(ones()).compile()
    leaves, _ = jitted.flatten([ones()])
    direct = Direct()
    for wait in (1, 2, 4, 8):
        for _ in range(wait - 1):
            direct.note(compiled, leaves, [ones()])
            assert direct.function is None
        direct.note(compiled, leaves, [ones()])
        assert direct.function is not None
        direct.miss()
