"""What well-known parallelisms send, against their closed forms."""

import dataclasses

import pytest

import meshdsl as md
from meshdsl import nn
from meshdsl.lowering.options import Options
from meshdsl.models import load
from meshdsl.optim import AdamW
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step

LAYERS, BATCH, LENGTH, EMBED, HEADS, KV, D_FF = 4, 8, 32, 64, 4, 16, 128
SIZES = f"layers={LAYERS},embed={EMBED},heads={HEADS},kv={KV},d_ff={D_FF},vocab=256"
TENSOR = "heads:model; d_ff:model"


def lowered(init, loss, batch, mesh, layout, options=None, **step):
    optimizer = AdamW(1e-3)
    state = spec_of(create(init, optimizer))
    function = make_train_step(loss, optimizer, **step)
    return md.jit(function, mesh, layout, donate="state", options=options).lower(state, batch)


def decoder(mesh, layout, remat="none", options=None, **step):
    model = load("gpt_mini", f"{SIZES},remat={remat}")
    batch = model.batch_spec(BATCH, LENGTH)
    return lowered(model.init, model.loss, batch, mesh, layout, options, **step)


def mlp(mesh, layout, layers=6, width=32, **step):
    names = [f"h{i}" for i in range(layers + 1)]
    dims = [md.Dimension(name, width) for name in names]

    def init(key):
        draw = nn.initializers.normal(0.02)
        keys = md.random.split(key, layers)
        return {f"w{i}": draw(keys[i], dims[i : i + 2]) for i in range(layers)}

    def loss(params, batch):
        x = batch["x"]
        for i in range(layers):
            x = md.relu(md.einsum(x, params[f"w{i}"], over=names[i]))
        return md.mean(md.square(x - batch["y"]))

    rows = md.Dimension("batch", BATCH)
    batch = {"x": md.spec([rows, dims[0]]), "y": md.spec([rows, dims[-1]])}
    return lowered(init, loss, batch, mesh, layout, **step)


def encoder(mesh, layout, remat=False, layers=2):
    """BERT's encoder with one product for queries, keys and values, and norms after the sums."""
    embed, qkv, heads, kv, d_ff = md.dims(embed=EMBED, qkv=3, heads=HEADS, kv=KV, d_ff=D_FF)

    def init(key):
        draw = nn.initializers.normal(0.02)
        shapes = ([embed, qkv, heads, kv], [heads, kv, embed], [embed, d_ff], [d_ff, embed])
        keys = md.random.split(key, 4 * layers)
        return [
            [draw(keys[4 * i + j], shape) for j, shape in enumerate(shapes)] for i in range(layers)
        ]

    def layer(x, weights):
        fused, out, w_in, w_out = weights
        q, k, v = md.unstack(md.einsum(x, fused, over="embed"), "qkv")
        k, v = k.rename(length="memory_length"), v.rename(length="memory_length")
        mixed = md.attention(q, k, v)
        x = nn.layer_norm(x + md.einsum(mixed, out, over=["heads", "kv"]), over="embed")
        hidden = md.gelu(md.einsum(x, w_in, over="embed"))
        return nn.layer_norm(x + md.einsum(hidden, w_out, over="d_ff"), over="embed")

    def loss(params, batch):
        x = batch["x"]
        for weights in params:
            x = (md.checkpoint(layer) if remat else layer)(x, weights)
        return md.mean(md.square(x - batch["y"]))

    rows, length = md.dims(batch=BATCH, length=LENGTH)
    batch = {name: md.spec([rows, length, embed]) for name in "xy"}
    return lowered(init, loss, batch, mesh, layout)


def rows_of(program, dims=None, axes=None):
    """Returns (kind, payload, count) of the collectives, without those of single numbers."""
    found = {}
    for one in program.collectives:
        if one.payload_bytes <= 64 or (axes and one.axes != axes):
            continue
        if dims and set(one.dims.names) != set(dims):
            continue
        key = one.kind, one.payload_bytes
        found[key] = found.get(key, 0) + one.count
    return {(kind, size, count) for (kind, size), count in found.items()}


STREAM = ("batch", "length", "embed")
ACTIVATION = BATCH * LENGTH * EMBED * 4


def test_tensor_parallel_layers_reduce_four_times():
    program = decoder("model:4", TENSOR)
    assert rows_of(program) == {("all_reduce", ACTIVATION, 4 * LAYERS)}


def test_sequence_parallel_layers_gather_and_scatter_four_times_each():
    program = decoder("model:4", f"{TENSOR}; length:model?")
    found = {row for row in rows_of(program, STREAM) if row[2] >= LAYERS}
    assert found == {
        ("all_gather", ACTIVATION, 4 * LAYERS),
        ("reduce_scatter", ACTIVATION, 4 * LAYERS),
    }
    tensor = decoder("model:4", TENSOR)
    wire = sum(one.wire_bytes * one.count for one in program.collectives
               if one.count >= LAYERS and set(one.dims.names) == set(STREAM))  # fmt: skip
    assert wire == pytest.approx(sum(o.wire_bytes * o.count for o in tensor.collectives
                                     if o.payload_bytes > 64))  # fmt: skip


def test_rematerialisation_repeats_what_the_layers_send_unless_it_keeps_collectives():
    layout = f"{TENSOR}; length:model?"
    counts = {}
    for remat in ("full", "keep_collectives"):
        counts[remat] = dict.fromkeys(("all_gather", "reduce_scatter"), 0)
        for kind, size, n in rows_of(decoder("model:4", layout, remat), STREAM):
            if n >= LAYERS:  # several may be one collective
                counts[remat][kind] += n * size // ACTIVATION
    # Of the forward pass, all but the last reduction is needed again.
    assert counts["full"] == {"all_gather": 6 * LAYERS, "reduce_scatter": 5 * LAYERS}
    assert counts["keep_collectives"] == {"all_gather": 4 * LAYERS, "reduce_scatter": 4 * LAYERS}


def test_all_to_all_attention_moves_q_k_v_and_the_result_once_each_way():
    program = decoder("context:4", "heads:context; length:context?; params/heads:-")
    part = BATCH * LENGTH * HEADS * KV * 4 // 4
    moved = [one for one in program.collectives if one.kind == "all_to_all"]
    assert sum(one.payload_bytes * one.count for one in moved) == 8 * part * LAYERS
    others = {one.kind for one in program.collectives if one.payload_bytes > 64}
    assert others == {"all_to_all", "all_reduce"}  # of gradients, as in data parallelism


WEIGHTS = 6 * 32 * 32 * 4
EVEN = ("h0", "h2", "h4", "h6")


def scoped(scope):
    return "; ".join(f"{scope}/{name}:data" for name in EVEN)


def test_data_parallel_mlp_reduces_its_gradients_once():
    program = mlp("data:4", "batch:data")
    (one,) = program.collectives  # with the loss
    assert (one.kind, one.count, one.payload_bytes) == ("all_reduce", 1, WEIGHTS + 4)


@pytest.mark.parametrize("scopes", [["optimizer"], ["optimizer", "gradients"]])
def test_sharded_optimizers_scatter_gradients_and_gather_parameters_once(scopes):
    program = mlp("data:4", "; ".join(["batch:data", *map(scoped, scopes)]))
    assert rows_of(program) == {("reduce_scatter", WEIGHTS, 1), ("all_gather", WEIGHTS, 1)}


def test_fully_sharded_mlp_gathers_twice_and_scatters_once():
    options = Options(weights="again")
    program = mlp("data:4", f"batch:data; {scoped('params')}", options=options)
    gathers = [one for one in program.collectives if one.kind == "all_gather"]
    scatters = [one for one in program.collectives if one.kind == "reduce_scatter"]
    # The backward pass does not need the first matrix: nothing before it has a gradient.
    assert [one.payload_bytes for one in gathers] == [WEIGHTS, WEIGHTS * 5 // 6]
    assert [one.payload_bytes for one in scatters] == [WEIGHTS]


@pytest.mark.parametrize("weights", ["keep", "auto"])
def test_kept_weights_are_gathered_once(weights):
    """They are joined into one gather, so that all are there at the peak already."""
    options = Options(weights=weights)
    program = mlp("data:4", f"batch:data; {scoped('params')}", options=options)
    assert rows_of(program) == {("reduce_scatter", WEIGHTS, 1), ("all_gather", WEIGHTS, 1)}


def test_column_and_row_parallel_mlp_reduces_five_times():
    program = mlp("model:4", "; ".join(f"{name}:model" for name in ("h1", "h3", "h5")))
    assert rows_of(program) == {("all_reduce", BATCH * 32 * 4, 5)}


def test_mlp_in_two_dimensions_reduces_six_times():
    rules = [f"{name}:model" for name in ("h1", "h3", "h5")]
    program = mlp("data:2,model:2", "; ".join(["batch:data", *rules]))
    assert rows_of(program) == {
        ("all_reduce", BATCH // 2 * 32 * 4, 5),
        ("all_reduce", WEIGHTS // 2 + 4, 1),
    }


def test_data_parallel_encoder_reduces_once():
    assert len(encoder("data:4", "batch:data").collectives) == 1


@pytest.mark.parametrize(("remat", "count"), [(False, 7), (True, 11)])
def test_tensor_parallel_encoder_reduces_twice_per_layer_and_direction(remat, count):
    """Not for the gradient of its input; what a checkpoint computes again is reduced again."""
    rows = rows_of(encoder("model:4", TENSOR, remat))
    assert {kind for kind, _, _ in rows} == {"all_reduce"}
    assert sum(size * n for _, size, n in rows) == count * ACTIVATION  # some are joined


def test_fully_sharded_layers_gather_twice_and_scatter_once():
    program = decoder("data:4", "batch:data; params/embed:data", remat="full")
    layer = 4 * (4 * EMBED * HEADS * KV + 2 * EMBED * D_FF + 2 * EMBED)
    sent = {}
    for one in program.collectives:
        if one.count == LAYERS:
            sent[one.kind] = sent.get(one.kind, 0) + one.payload_bytes
    assert sent == {"all_gather": 2 * layer, "reduce_scatter": layer}


def test_gradients_are_reduced_once_for_all_microbatches():
    program = mlp("data:4", "batch:data", microbatches=2)
    assert rows_of(program) == {("all_reduce", WEIGHTS + 4, 1)}


def test_a_sum_over_slices_crosses_the_slow_network_in_shards():
    flat = mlp("slice:2,data:4", "batch:slice+data")
    slow = mlp("slice@dcn:2,data:4", "batch:slice+data")
    across = [one for one in slow.collectives if "slice" in one.axes]
    sent = sum(one.wire_bytes * one.count for one in across)
    assert sent == pytest.approx(2 * (1 / 2) * WEIGHTS / 4, abs=64)
    assert slow.wire_bytes == pytest.approx(flat.wire_bytes, abs=64)


@pytest.mark.filterwarnings("ignore:memory=1 B is less")
def test_everything_that_fits_is_kept():
    layout = f"batch:data; {TENSOR}; length:model?; params/embed:data"
    roomy = decoder("data:2,model:2", layout, options=Options(memory=2**40))
    usual = decoder("data:2,model:2", layout)
    tight = decoder("data:2,model:2", layout, options=Options(memory=1))
    assert roomy.wire_bytes < usual.wire_bytes <= tight.wire_bytes
    assert tight.peak_bytes < usual.peak_bytes <= roomy.peak_bytes
    between = (tight.peak_bytes + roomy.peak_bytes) // 2
    some = decoder("data:2,model:2", layout, options=Options(memory=between))
    assert some.peak_bytes <= between


def test_a_choice_is_stated_by_its_fields():
    fields = {one.name for one in dataclasses.fields(Options)}
    assert {"memory", "weights", "bucket_bytes", "overlap", "context"} <= fields
