"""`md.show`, and traced programs in a notebook."""

import jax
import numpy as np
import pytest

import meshdsl as md
from tests.reports.notebook.cells_of import read

embed, d_ff, vocab = md.dims(embed=64, d_ff=256, vocab=1000)
LAYOUT, MESH = "params/embed:data; d_ff:model; vocab:-", "data:2,model:4"


class Mlp(md.Module):
    w_in: md.Tensor
    w_out: md.Tensor


def model(**named):
    w_in = md.named(np.ones((64, 256), np.float32), [embed, d_ff])
    w_out = md.named(np.ones((256, 64), np.float32), [d_ff, embed])
    return {"mlp": Mlp(w_in, w_out), **named}


def test_each_array_has_the_share_that_placing_it_would_give_a_device():
    tree = {"params": model()}
    arrays = jax.tree.leaves(md.place(tree, MESH, LAYOUT))
    shards = [array.addressable_shards[0].data for array in arrays]
    shown = md.show(model(), LAYOUT, mesh=MESH)
    assert shown.root.local_bytes == sum(shard.nbytes for shard in shards)
    cell = read(shown._repr_html_())
    rows = cell.texts("div", "leaf")
    assert rows[0] == "w_inf32embed32/64 ÷ datad_ff64/256 ÷ model8.0 KiB of 64.0 KiB"
    assert [shard.shape for shard in shards] == [(32, 64), (64, 32)]
    grids = cell.texts("table", "devices")
    assert len(grids) == 1 and grids[0].count("embed 32:64") == 4
    assert cell.texts("b", "device") == [str(number) for number in range(8)]
    assert "2 arrays, 16.0 KiB on a device; such as params/mlp/w_in" in cell.texts("summary")[-1]


def test_scopes_apply_to_paths_that_start_as_the_user_says():
    assert md.show(model(), LAYOUT, MESH, path="ema").root.local_bytes == 2 * 64 * 64 * 4
    assert "ema/mlp/w_in" in str(md.show(model(), LAYOUT, MESH, path="ema"))


def test_text_has_a_line_for_each_array():
    lines = str(md.show(model(), LAYOUT, MESH)).splitlines()
    assert lines[0] == (
        "2 arrays, 32,768 elements, 128 KiB; on data:2 model:4, a device holds 16.0 KiB"
    )
    assert lines[1] == (
        "params/mlp/w_in   f32[embed=32/64, d_ff=64/256]  8.0 KiB of 64.0 KiB  "
        "d_ff:model; embed:data"
    )
    assert lines[3] == "`vocab:-` splits no array here"


def test_rules_that_contradict_each_other_are_shown():
    shown = md.show(model(), "embed:data; d_ff:data", "data:2")
    assert len(shown.problems) == 2 and "both claim mesh axis `data`" in str(shown)
    warnings = read(shown._repr_html_()).texts("p", "warn")
    assert len(warnings) == 2 and warnings[0].startswith("params/mlp/w_in: embed:data and")


def test_what_is_missing_or_unknown_is_an_error():
    with pytest.raises(ValueError, match="a layout needs a mesh beside it"):
        md.show(model(), "embed:data")
    with pytest.raises(ValueError, match="a mesh needs a layout beside it"):
        md.show(model(), mesh="data:2")
    with pytest.raises(ValueError, match=r"no axis `daat` in mesh `data:2`\. Did you mean `data`"):
        md.show(model(), "embed:daat", "data:2")


def test_specs_and_meshes_that_no_machine_has_will_do():
    tree = {"a<b": md.spec([vocab, embed], "bfloat16")}
    shown = md.show(tree, "vocab:data; embed:model", "data:512,model:8")
    assert shown.root.local_bytes == 2 * 8 * 2  # 1000 rows in 512 blocks are blocks of two
    text = shown._repr_html_()
    assert "a<b" in "".join(read(text).elements[0][2]) and len(text) < 40_000


def test_arrays_that_are_on_a_mesh_show_where_they_are():
    placed = md.place(model(), MESH, "d_ff:model")
    cell = read(md.show(placed)._repr_html_())
    assert cell.texts("table", "devices")[0].count("d_ff 64:128") == 2
    assert "a device holds" not in str(md.show(model()))


def test_a_traced_program_shows_its_lines_with_dims_in_colours():
    graph = md.jit(lambda x: md.einsum(x, x, over="embed") * 2).trace(md.spec([embed]))
    cell = read(graph._repr_html_())
    rows = cell.texts("tr")
    assert len(rows) - 1 == len(str(graph).splitlines()) - 1
    assert rows[1].startswith("input xf32embed64") and rows[-1].startswith("output ")
    assert any("test_showing.py" in row for row in rows)


@pytest.mark.long
def test_a_long_program_is_cut():
    def many(x):
        for _ in range(2000):
            x = md.sin(x)
            x = md.checkpoint(md.cos)(x)
        return x

    text = md.jit(many).trace(md.spec([embed]))._repr_html_()
    assert "more lines" in text and len(text) < 200_000
    read(text)


def test_one_array_is_one():
    assert str(md.show({"w": md.spec(md.dims(embed=8))})).splitlines()[0].startswith("1 array, 8 ")
