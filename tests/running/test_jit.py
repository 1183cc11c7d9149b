"""jit: stages, signatures, arguments and results; each mistake is one clear message."""

import inspect
import threading

import jax
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_close, message, random

a, b = md.dims(a=4, b=2)


def double(x, y=None):
    return {"twice": x * 2, "y": y}


def test_stages_can_be_had_one_by_one():
    jitted = md.jit(double, mesh="x:2", layout="a:x", backend="numpy")
    spec = md.spec([a, b], "float64")
    graph = jitted.trace(spec)
    assert graph.input_paths == ("x",)
    assert graph.output_paths == ("twice",)
    assert "x * 2" in str(graph)
    program = jitted.lower(spec)
    assert program.block.inputs[0].local.sizes == (2, 2)
    x = random([a, b])
    found = program.compile()(x)
    assert_close(found["twice"], 2 * x.data)
    assert found["y"] is None


def test_each_signature_is_traced_once():
    traced = []

    def model(x):
        traced.append(x)
        return x + 1

    jitted = md.jit(model, backend="numpy")
    for dims in ([a], [a], [b], [b, a], [a]):
        assert jitted(random(dims)).dims.names == tuple(d.name for d in dims)
    assert [str(t) for t in traced] == ["f64[a=4]", "f64[b=2]", "f64[b=2, a=4]"]


def test_a_function_is_traced_once_for_all_meshes_and_layouts():
    traced = []

    def double(x):
        traced.append(x)
        return x + x

    x = md.named(np.arange(8, dtype=np.float32), [md.Dimension("row", 8)])
    first = md.jit(double, donate="x")
    for mesh, layout in [("data:2", "row:data"), ("data:4", "row:data"), ("data:2,model:2", "")]:
        other = first.on(mesh, layout)
        assert (str(other.mesh), str(other.layout)) == (mesh.replace(",", " "), layout)
        program = other.lower(md.spec(x.dims, x.dtype))
        assert (
            program.block.inputs[0].local.volume * (other.mesh.sizes["data"] if layout else 1) == 8
        )
        assert program.donated == (True,)
        np.testing.assert_array_equal(np.asarray(other(x)), 2 * np.arange(8))
    assert len(traced) == 1
    first.on("data:2", "").lower(md.spec([md.Dimension("row", 4)], "float32"))
    assert len(traced) == 2


def test_numbers_are_tensors_without_dims():
    found = md.jit(lambda x, n, on: (x * 2, n, on), backend="numpy")(1.5, np.float64(2), True)
    assert [leaf.dtype.name for leaf in found] == ["float32", "float64", "bool"]


def test_keywords_and_defaults_and_variable_arguments():
    x = random([a])
    assert_close(md.jit(lambda x, *, k: x * k, backend="numpy")(x, k=x), x.data**2)
    assert_close(md.jit(lambda *xs: xs[0] * xs[1], backend="numpy")(x, x), x.data**2)
    assert_close(md.jit(lambda **xs: xs["p"] + xs["q"], backend="numpy")(p=x, q=x), 2 * x.data)


def test_inputs_can_be_outputs_and_outputs_can_repeat():
    x = random([a, b])
    for backend in ("numpy", "jax"):
        jitted = md.jit(lambda x: (x, x, x * 1, md.zeros([a])), "x:2", "a:x", backend)
        found = jitted(x)
        for mine in found[:3]:
            assert_close(mine, x.data)


def test_without_a_mesh_everything_runs_on_one_device():
    x = random([a])
    assert md.jit(lambda x: x, layout="a:x", backend="numpy").lower(x).mesh.size == 1
    assert_close(md.jit(lambda x: md.sum(x))(x), x.data.sum())


@pytest.mark.long
def test_as_jax_composes_with_jax():
    jitted = md.jit(lambda x, y: md.sum(x * y, "a"), mesh="x:2", layout="a:x")
    x, y = random([a, b]), random([a], seed=1)
    function = jitted.as_jax(x, y)
    (found,) = jax.jit(function)(x.data, y.data)
    assert_close(found, y.data @ x.data)
    slope = jax.grad(lambda x: function(x, y.data)[0].sum())(x.data)
    assert_close(slope, np.broadcast_to(y.data[:, None], (4, 2)))


def test_as_jax_checks_shapes_dtypes_and_number():
    jitted = md.jit(lambda p, x: md.mean(p["w"] * x), mesh="x:2", layout="a:x")
    w, x = md.named(np.ones((4, 2), np.float32), [a, b]), md.named(np.ones(4, np.float32), [a])
    mean = jitted.as_jax({"w": w}, x)
    assert float(mean(w.data, x.data)[0]) == float(jax.jit(mean)(w.data, x.data)[0]) == 1
    for call in (mean, jax.jit(mean)):
        with pytest.raises(ValueError) as error:
            call(np.ones((8, 2), np.float32), np.ones(4, np.int32))
        assert str(error.value) == (
            "<lambda>.as_jax: arrays differ from the traced arguments:\n"
            "  p/w: traced as f32[a=4, b=2], given float32[a=8, b=2]\n"
            "  x: traced as f32[a=4], given int32[a=4]"
        )
        with pytest.raises(ValueError, match=r"p/w: traced as f32\[a=4, b=2\], given float32\[8\]"):
            call(np.ones(8, np.float32), x.data)
        with pytest.raises(ValueError, match=r"takes 2 arrays, .*, but was called with 3: p/w"):
            call(w.data, x.data, x.data)
        with pytest.raises(ValueError, match=r"p/w: .*, given a dict; give the leaves of trees"):
            call({"w": w.data}, x.data)
    with pytest.raises(ValueError, match=r"x: .*; give its data, as in x.unpadded\(\)"):
        mean(w.data, x)
    with pytest.raises(ValueError, match="as_jax takes 0 arrays"):
        md.jit(lambda: md.zeros([a])).as_jax()(x.data)


def test_numbers_are_arrays_without_dims_for_as_jax():
    scaled = md.jit(lambda x, s: x * s).as_jax(md.spec([a], "bfloat16"), md.spec([], "bfloat16"))
    x = jax.numpy.ones(4, "bfloat16")
    for call in (scaled, jax.jit(scaled)):
        for number in (2.0, 2, jax.numpy.asarray(2, "bfloat16")):
            assert call(x, number)[0].tolist() == [2.0] * 4
    counted = md.jit(lambda x, n: x * n).as_jax(md.spec([a], "int32"), md.spec([], "int32"))
    for number, kind in ((2.5, "a float"), (True, "a bool")):
        with pytest.raises(ValueError, match=rf"n: traced as s32\[\], given {kind}$"):
            counted(np.ones(4, np.int32), number)
    with pytest.raises(ValueError, match=r"x: traced as s32\[a=4\], given an int$"):
        counted(2, 2)
    with pytest.raises(ValueError, match=r"n: traced as s32\[\], given float"):
        jax.jit(counted)(np.ones(4, np.int32), 2.5)


def test_a_layout_without_a_mesh_is_checked():
    x = random([a, b])
    with pytest.raises(ValueError, match="`rwoo:data` names a dim that this program does not have"):
        md.jit(lambda x: x * 2, layout="rwoo:data")(x)
    with pytest.raises(ValueError, match="Did you mean `a`"):
        md.jit(lambda x: x * 2, layout="aa:data")(x)
    with pytest.raises(ValueError, match="`a:data` and `b:data` both claim mesh axis `data`"):
        md.jit(lambda x: x * 2, layout="a:data; b:data").lower(x)
    with pytest.raises(ValueError, match="malformed layout"):
        md.jit(lambda x: x * 2, layout="a=data")
    assert md.jit(lambda x: x * 2, layout="a:data; b:model?").lower(x).mesh.size == 1


@pytest.mark.long
def test_a_mesh_is_a_text_or_sizes_or_one_of_jax():
    x = random([a, b])
    devices = np.array(jax.devices()[:5:-1]).reshape(2, 1)  # others than the first ones
    own = jax.sharding.Mesh(devices, ("data", "model"))
    made = jax.make_mesh((2, 1), ("data", "model"))
    assert jax.sharding.AxisType.Explicit in made.axis_types
    for mesh in (
        "data:2,model:1",
        {"data": 2, "model": 1},
        md.Mesh.of({"data": 2, "model": 1}),
        own,
        made,
    ):
        jitted = md.jit(lambda x: x * 2, mesh, "a:data")
        assert str(jitted.mesh) == "data:2 model:1"
        for backend in ("jax", "jax_auto", "numpy"):
            found = md.jit(lambda x: md.sum(x * 2, "a"), mesh, "a:data", backend)(x)
            assert_close(found, 2 * x.data.sum(0))
        placed = md.place(x, mesh, "a:data")
        wanted = {d.id for d in devices.flat} if mesh is own else {0, 1}
        for array in (
            placed,
            jitted(x),
            jitted(placed),
            jitted(placed),
            jitted.on(mesh, "")(x),
            placed + x,
        ):
            assert {device.id for device in array.data.devices()} == wanted
        (found,) = jitted.as_jax(x)(x.data)
        assert_close(found, 2 * x.data)
    assert md.Mesh.of(None) == md.Mesh()
    assert md.Mesh.of({"slice@dcn": 2, "data": 2}) == md.Mesh.parse("slice@dcn:2,data:2")
    with pytest.raises(ValueError, match=r'a mesh is given as "data:2,model:4", .*, not as int: 8'):
        md.jit(lambda x: x, mesh=8)
    with pytest.raises(ValueError, match="mesh axis `data` needs a size of at least 1"):
        md.jit(lambda x: x, mesh={"data": 0})


def test_donated_buffers_are_given_up():
    jitted = md.jit(lambda state, x: (state + x, x), mesh="x:2", layout="a:x", donate="state")
    state, x = jitted(random([a]), random([a]))
    jitted(state, x)
    assert state.data.is_deleted()
    assert not x.data.is_deleted()


def test_tracing_leaves_nothing_behind_when_it_fails():
    def broken(x):
        md.scan(lambda c, x: 1 / 0, x, x, "a")

    with pytest.raises(ZeroDivisionError):
        md.jit(broken, backend="numpy")(random([a]))
    assert isinstance(md.zeros([a]), md.NamedArray)


def test_threads_trace_for_themselves():
    meet = threading.Barrier(2, timeout=120)

    def model(x):
        meet.wait()
        y = x + 1
        meet.wait()
        return y * 2

    found = []
    threads = [
        threading.Thread(target=lambda: found.append(md.jit(model, backend="numpy")(random([a]))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    for mine in found:
        assert_close(mine, 2 * random([a]).data + 2)


# Mistakes.


def test_an_unknown_backend_is_told_with_the_known_ones():
    known = "unknown backend 'jaxx'; choose one of jax, jax_auto, tf, numpy"
    with pytest.raises(ValueError, match=known) as e:
        md.jit(double, backend="jaxx")
    assert str(e.value).endswith("Did you mean `jax`?")


def test_malformed_meshes_and_layouts_are_told_at_once():
    with pytest.raises(ValueError, match="malformed mesh"):
        md.jit(double, mesh="x=2")
    with pytest.raises(ValueError, match="malformed layout"):
        md.jit(double, mesh="x:2", layout="a=x")


def test_donating_an_unknown_parameter_is_told():
    with pytest.raises(ValueError) as error:
        md.jit(lambda state, x: x, donate=["x", "stat"])
    assert "donate='stat' is no parameter of <lambda>(state, x). Did you mean `state`?" in str(
        error.value
    )


def test_arguments_without_names_are_told_together():
    text = message(double, {"p": np.zeros((3, 2)), "q": random([a])}, "text")
    assert text == (
        "double: arguments without names:\n"
        "  x/p: ndarray[3, 2] has no dim names; use md.named(array, dims)\n"
        "  y: str is no array and no tree of arrays; use md.named(array, dims) for arrays, and a "
        "md.Module, dict, list or tuple for what holds them"
    )


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_a_call_with_arguments_that_have_no_numbers_is_told(backend):
    jitted, spec = md.jit(double, backend=backend), md.spec([a, b], "float32")
    args = (spec, {"z": spec})
    for call in (jitted, jitted.lower(*args).compile()):
        with pytest.raises(ValueError) as error:
            call(*args)
        assert str(error.value) == (
            "double: a call needs arrays: give md.named(array, dims), or write .lower(...), which "
            "takes arrays without numbers:\n"
            "  x: md.spec f32[a=4, b=2] has no numbers\n"
            "  y/z: md.spec f32[a=4, b=2] has no numbers"
        )


def test_arguments_that_differ_from_the_traced_ones_are_told_together():
    jitted = md.jit(lambda x, y: x + y, backend="numpy")
    compiled = jitted.lower(random([a]), random([a, b])).compile()
    with pytest.raises(ValueError) as error:
        compiled(random([b]), md.named(np.zeros((4, 2), np.float32), [a, b]))
    assert str(error.value) == (
        "arguments differ from the traced ones:\n"
        "  x: traced as f64[a=4], given f64[b=2]\n"
        "  y: traced as f64[a=4, b=2], given f32[a=4, b=2]"
    )
    with pytest.raises(ValueError) as error:
        compiled([random([a])], random([a, b]))
    assert str(error.value) == (
        "the arguments have another structure than the traced ones:\n"
        "  x: missing\n"
        "  x/0: not expected"
    )


def test_arguments_of_another_structure_are_told_by_their_paths():
    class Scale(md.Module):
        x: md.Tensor
        by: int = md.static(default=2)

    x = random([a])
    given = {"batch": {"image": x}, "m": Scale(x), "l": [x]}
    compiled = md.jit(lambda tree: tree, backend="numpy").lower(given).compile()
    for change, text in [
        ({"batch": {"imag": x}}, "tree/batch/image: missing"),
        ({"batch": {"imag": x}}, "tree/batch/imag: not expected. Did you mean `tree/batch/image`"),
        ({"batch": {"image": x, "label": x}}, "  tree/batch/label: not expected"),
        ({"batch": {"image": x, "images": x}}, "  tree/batch/images: not expected\n"),
        ({"m": Scale(x, by=3)}, "  Scale: traced with the static fields (2,), given (3,)"),
        ({"l": (x,)}, "  traced with list, given tuple"),
    ]:
        with pytest.raises(ValueError) as error:
            compiled(given | change)
        assert text in f"{error.value}\n"
        assert "PyTreeDef" not in str(error.value)


def test_a_mesh_larger_than_the_machine_is_told_with_the_flag():
    jitted = md.jit(lambda x: x, mesh="data:4,model:4", layout="a:data")
    with pytest.raises(ValueError) as error:
        jitted(md.named(np.zeros(4, np.float32), [a]))
    text = str(error.value)
    assert "mesh data:4 model:4 needs 16 devices, but this machine has 8 (cpu)" in text
    assert "--host_devices=16" in text
    assert "jax.config.update('jax_num_cpu_devices', 16)" in text


def test_wide_dtypes_need_the_wide_mode_of_jax():
    with jax.enable_x64(False):
        with pytest.raises(ValueError, match="the program uses float64, which JAX turns into 32"):
            md.jit(lambda x: x * 2)(random([a]))
        narrow = md.named(np.ones(4, np.float32), [a])
        assert float(md.jit(md.sum)(narrow)) == 4


def test_every_mistake_of_a_layout_is_told_at_once():
    def model(x, w):
        return md.einsum(x, w, over="b")

    jitted = md.jit(model, mesh="data:2,model:3", layout="a:data; b:data; d:modle; x/c:model")
    d = md.Dimension("d", 3)
    with pytest.raises(ValueError) as error:
        jitted.lower(md.spec([a, b]), md.spec([b, d]))
    text = str(error.value)
    assert "`a:data` and `b:data` both claim mesh axis `data` in" in text
    assert "x: [a=4, b=2]" in text
    assert "`d:modle` names mesh axis `modle`, but the mesh has `data`, `model`. Did you" in text
    assert "names a dim that this program does not have" in text
    assert "test_jit.py:" in text


def test_a_layout_without_a_mesh_is_checked_and_the_error_shows_none():
    with pytest.raises(ValueError) as error:
        md.jit(lambda x: x * 2, layout="aa:data")(random([a]))
    assert str(error.value).endswith("\n  mesh    none given\n  layout  aa:data")


def test_a_size_that_does_not_divide_is_stored_with_pads():
    jitted = md.jit(lambda x: (x * 2, md.sum(x * 2, over="a")), mesh="x:3", layout="a:x")
    x = random([a])
    program = jitted.lower(x)
    assert [str(v.layout) for v in program.block.inputs] == ["a:x"]
    assert [v.local.sizes for v in program.block.outputs] == [(2,), ()]
    doubled, total = jitted(x)
    assert doubled.dims == x.dims
    assert doubled.data.shape == (6,)
    assert np.array_equal(doubled, 2 * np.asarray(x))
    assert float(total) == pytest.approx(2 * np.asarray(x).sum())


def test_a_leaked_tensor_is_told_with_its_line():
    leaked = []

    def leak(x):
        leaked.append(x * 2)
        return x

    md.jit(leak, backend="numpy")(random([a]))
    line = leak.__code__.co_firstlineno + 1
    for use in (lambda x: x + leaked[0], lambda x: leaked[0]):
        text = message(use, random([a]))
        assert (
            f"a tensor f64[a=4] made at tests/running/test_jit.py:{line} is used outside of the"
            in text
        )
        assert "return it from that function instead" in text


def test_a_body_does_not_leak_either():
    def model(x):
        inside = []

        def body(c, x):
            inside.append(c * x)
            return c, None

        md.scan(body, x, x, "a")
        return inside[0] + 1

    assert "is used outside of the function that was traced with it" in message(model, random([a]))


def test_a_default_that_is_not_passed_stays_a_python_value():
    def scaled(x, flag=True, scale=2.0):
        return x * scale if flag else x

    x = md.named(np.ones(3), ["a"])
    np.testing.assert_array_equal(md.jit(scaled)(x), [2, 2, 2])
    assert md.jit(scaled).trace(x).input_paths == ("x",)


def test_jit_is_a_decorator_with_and_without_a_mesh():
    @md.jit
    def double(x: md.Tensor, times: int = 2) -> md.Tensor:
        """Returns a multiple."""
        return x * times

    @md.jit(mesh="data:2", layout="a:data", backend="numpy")
    def total(x):
        return md.sum(x)

    x = random([a])
    np.testing.assert_allclose(double(x), np.asarray(x) * 2)
    np.testing.assert_allclose(total(x), np.asarray(x).sum())
    assert total.lower(x).mesh.sizes == {"data": 2}
    assert (double.__name__, double.__doc__) == ("double", "Returns a multiple.")
    assert list(inspect.signature(double).parameters) == ["x", "times"]


def test_jit_shows_what_it_compiles_for_and_how_often_it_did():
    double = md.jit(lambda x, y: x * y, mesh="data:2", layout="a:data", backend="numpy")
    text = "<md.jit of <lambda>(x, y): mesh='data:2', layout='a:data', backend='numpy', "
    assert repr(double) == text + "0 programs compiled>"
    double(random([a]), random([a]))
    assert repr(double) == text + "1 program compiled>"


def test_methods_of_modules_are_compiled_with_the_module_as_first_argument():
    class Scale(md.Module):
        by: md.Tensor

        @md.jit(mesh="data:2", layout="self/a:data", backend="numpy")
        def apply(self, x: md.Tensor) -> md.Tensor:
            """Scales."""
            return x * self.by

    x, scale = random([a]), Scale(random([a]))
    np.testing.assert_allclose(scale.apply(x), np.asarray(x) * np.asarray(scale.by))
    assert scale.apply.lower(x).input_paths == ("self/by", "x")
    assert scale.apply.trace(x).input_paths == ("self/by", "x")
    assert scale.apply.on("data:4", "a:data").lower(x).mesh.sizes == {"data": 4}
    assert scale.apply.__doc__ == "Scales."
    assert "Scale" in repr(scale.apply)
    assert Scale.apply is Scale.__dict__["apply"]


def test_a_method_of_what_is_no_tree_says_what_holds_arrays():
    class Plain:
        @md.jit
        def apply(self, x):
            return x

    with pytest.raises(ValueError, match=r"self: Plain is no array and no tree .* md\.Module"):
        Plain().apply(random([a]))


@pytest.mark.parametrize("function", ["data:2", 3, md.Mesh.parse("data:2")])
def test_jit_without_a_function_says_how_to_write_it(function):
    with pytest.raises(ValueError, match=r"jit compiles a function, not .*@md\.jit\(mesh="):
        md.jit(function)
