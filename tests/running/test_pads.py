"""Pads: what a program returns has zeros in them, so that JAX may add up whole arrays."""

import numpy as np
import optax
import pytest

import meshdsl as md

batch, embed, d_ff = md.dims(batch=8, embed=16, d_ff=30)  # 30 positions over 4 devices


def loss(params, x):
    hidden = md.exp(md.einsum(x, params["w_in"], over="embed"))  # 1 in pads
    return md.mean(md.square(md.einsum(hidden, params["w_out"], over="d_ff") - x))


def arguments():
    rng = np.random.default_rng(0)
    shapes = {"w_in": [embed, d_ff], "w_out": [d_ff, embed]}
    params = {
        name: md.named(0.2 * rng.standard_normal([d.size for d in dims], np.float32), dims)
        for name, dims in shapes.items()
    }
    return params, md.named(rng.standard_normal((8, 16), np.float32), [batch, embed])


@pytest.mark.long
def test_losses_with_optax_outside_of_a_program_are_those_without_a_mesh():
    def losses(mesh, layout):
        params, x = arguments()
        step = md.jit(md.value_and_grad(loss), mesh=mesh, layout=layout)
        if mesh is not None:
            params = md.place(params, md.Mesh.parse(mesh), md.Layout.parse(layout))
        rule = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
        state, found = rule.init(params), []
        for _ in range(4):
            value, gradients = step(params, x)
            found += [float(value), float(optax.tree.norm(gradients))]
            updates, state = rule.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return found

    np.testing.assert_allclose(losses("model:4", "d_ff:model"), losses(None, ""), rtol=1e-5)


@pytest.mark.parametrize("backend", ["jax", "tf"])
def test_results_have_zeros_in_pads(backend):
    params, x = arguments()
    gradient = md.jit(md.grad(loss), mesh="model:4", layout="d_ff:model", backend=backend)
    for name, array in gradient(params, x).items():
        data = np.asarray(array.data)
        assert data.shape == tuple(32 if d.name == "d_ff" else d.size for d in array.dims), name
        assert not np.moveaxis(data, array.dims.names.index("d_ff"), 0)[30:].any(), name


def test_what_moves_from_an_argument_to_a_result_has_zeros_in_pads_too():
    params, _ = arguments()
    program = md.jit(
        lambda w: {"first": w, "turned": w.transpose(["embed", "d_ff"])}, "model:4", "d_ff:model"
    )
    padded = program(params["w_out"])["first"]
    padded = md.NamedArray(padded.data + 1, padded.dims, padded.cuts)  # as users' own functions do
    turned = program(padded)["turned"]
    assert not np.asarray(turned.data)[:, 30:].any()
    np.testing.assert_array_equal(np.asarray(turned), np.asarray(padded).T)


def test_a_cache_that_parts_are_written_into_is_not_copied_for_its_pads():
    row, memory, layers = md.dims(row=3, memory=8, layers=5)

    def decode(cache, new, position):
        def layer(carry, _):
            cache, new = carry
            return (md.dynamic_update_slice(cache, new, memory, position), new * 2), None

        return md.scan(layer, (cache, new), md.arange(layers), layers)[0]

    step = md.jit(decode, "model:2", "row:model", donate="cache")
    specs = [
        md.spec([row, memory], "float32"),
        md.spec([row, md.Dimension("memory", 1)], "float32"),
    ]
    block = step.lower(*specs, md.spec([], "int32")).block
    selects = [one.outputs[0].shape for one in block.instructions if one.op == "select"]
    assert [shape.sizes for shape in selects] == [(3, 1)]  # the result that is computed anew
