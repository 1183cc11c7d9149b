"""Inspection: which device holds which block."""

import re

import jax
import numpy as np
import pytest

import meshdsl as md

a, b, c = md.dims(a=8, b=4, c=2)
X = md.named(np.arange(64, dtype=np.float32).reshape(8, 4, 2), [a, b, c])


def test_two_split_dims_are_a_table():
    assert str(md.inspect(md.place(X, "x:2,y:2", "a:x; b:y"))) == (
        "f32[a=8, b=4, c=2]\n"
        "on x:2 y:2: a:x; b:y, 64 bytes per device\n"
        "┌───────┬────────────┬────────────┐\n"
        "│       │   b 0–1    │   b 2–3    │\n"
        "├───────┼────────────┼────────────┤\n"
        "│ a 0–3 │  device 0  │  device 1  │\n"
        "│       │  0 1 2 …   │  4 5 6 …   │\n"
        "├───────┼────────────┼────────────┤\n"
        "│ a 4–7 │  device 2  │  device 3  │\n"
        "│       │ 32 33 34 … │ 36 37 38 … │\n"
        "└───────┴────────────┴────────────┘"
    )


def test_further_split_dims_are_tables_of_their_own():
    text = str(md.inspect(md.place(X, "x:2,y:2,z:2", "a:x; b:y; c:z")))
    assert [line.strip() for line in text.splitlines() if "c " in line] == ["c 0", "c 1"]
    assert "│ a 0–3 │  device 1  │  device 3  │" in text


def test_replicas_are_shown_together():
    text = str(md.inspect(md.place(X, "x:2,y:4", "a:y")))
    assert "2 replicas of each block, over x" in text
    assert "│ a 0–1 │ devices 0 4 │" in text
    whole = str(md.inspect(md.place(X, "x:4")))
    assert "on x:4: replicated, 256 bytes per device" in whole
    assert "│ devices 0 1 2 3 │" in whole


def test_several_axes_cut_one_dim_major_first():
    text = str(md.inspect(md.place(X, "x:2,y:2", "a:y+x")))
    rows = [line for line in text.splitlines() if "│ a" in line]
    assert [row.split("device ")[1][0] for row in rows] == ["0", "2", "1", "3"]


def test_a_spec_is_shown_with_its_pads():
    spec = md.spec(md.dims(n=5, m=3))
    assert str(md.inspect(spec, "x:2,y:2", "n:x+y; other:x")).splitlines() == [
        "f32[n=5, m=3]",
        "on x:2 y:2: n:x+y, 24 bytes per device",
        "padded along n",
        "┌────────────────┬──────────┐",
        "│     n 0–1      │ device 0 │",
        "├────────────────┼──────────┤",
        "│   n 2 +1 pad   │ device 1 │",
        "├────────────────┼──────────┤",
        "│     n 3–4      │ device 2 │",
        "├────────────────┼──────────┤",
        "│ n none +2 pads │ device 3 │",
        "└────────────────┴──────────┘",
    ]


def test_an_axis_of_one_device_splits_nothing():
    spec = md.spec(md.dims(n=4, m=3))
    text = str(md.inspect(spec, "x:1,y:2", "m:x; n:y"))
    assert text.splitlines()[1] == "on x:1 y:2: n:y, 24 bytes per device"
    x = md.place(md.named(np.zeros((4, 3), "f"), ["n", "m"]), "x:1,y:2", "m:x; n:y")
    assert str(md.inspect(x)).splitlines()[1] == text.splitlines()[1]


def test_the_blocks_are_where_jax_says():
    x = md.place(X, "x:2,y:2,z:2", "a:z+x; c:y")
    names = [dim.name for dim in md.inspect(x).split]
    places = x.data.sharding.devices_indices_map(x.data.shape)
    for block, devices in md.inspect(x).blocks.items():
        for device, index in places.items():
            held = {
                name: (part.start or 0, part.stop)
                for name, part in zip(x.dims.names, index, strict=True)
            }
            same = all(
                held[n][0] == r[0] and held[n][1] in (r[1], None)
                for n, r in zip(names, block, strict=True)
            )
            assert (device.id in devices) == same


def test_data_of_no_mesh():
    assert str(md.inspect(X)).splitlines() == [
        "f32[a=8, b=4, c=2]",
        "in this process's memory, on no device",
    ]
    assert "on device 0, 256 bytes" in str(md.inspect(X + 0))


def test_many_blocks_are_cut_short():
    text = str(md.inspect(md.spec(md.dims(n=128)), "x:64", "n:x"))
    assert "the first 32 blocks along each dim:" in text
    assert "device 31" in text
    assert "device 32" not in text


def test_notebooks_get_a_table_in_colours():
    figure = md.inspect(md.place(X, "x:2,y:2", "a:x; b:y"))
    text = figure._repr_html_()
    assert text.count("<table") == 1
    assert len(set(re.findall(r"background: var\(--block-\d\)", text))) == 4
    assert "a 4–7" in text
    assert "<div>device 3</div><div>36 37 38 …</div>" in text
    assert repr(figure) == str(figure)


def test_mistakes_are_told():
    with pytest.raises(ValueError, match=r"no axis `z` in mesh `x:2`"):
        md.inspect(md.spec([a]), "x:2", "a:z")
    with pytest.raises(ValueError, match="both claim mesh axis `x`"):
        md.inspect(md.spec([a, b]), "x:2", "a:x; b:x")
    with pytest.raises(ValueError, match=r"arrays with named dims, and specs, not int; md\.named"):
        md.inspect(3)


def test_blocks_with_pads_show_their_first_numbers():
    x = md.place(md.named(np.arange(9), ["n"]), "x:2,y:4", "n:x+y")
    text = str(md.inspect(x))
    rows = [line.strip("│ ") for line in text.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in row.split("│")] for row in rows]
    assert cells == [
        ["n 0–1", "device 0"],
        ["0 1"],
        ["n 2–3", "device 1"],
        ["2 3"],
        ["n 4 +1 pad", "device 2"],
        ["4"],
        ["n none +2 pads", "device 3"],
        ["n 5–6", "device 4"],
        ["5 6"],
        ["n 7–8", "device 5"],
        ["7 8"],
        ["n none +2 pads", "devices 6 7"],
    ]
    whole = jax.device_put(x, jax.devices()[0])
    assert str(md.inspect(whole)).splitlines()[0] == "s64[n=9]"
