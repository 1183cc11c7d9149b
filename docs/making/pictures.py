"""The pictures of the documentation: `python -m docs.making.pictures` draws them anew.

Shards, collectives and schedules come from meshdsl itself. A test compares the files with what is
drawn, so a picture is never out of date.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import meshdsl as md
from docs.making.svg import AXES, DEVICES, INK, LINE, PALE, Canvas, colour_of, tensor
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.pipelines.named import named

AXES_PALE = "#fed7aa"  # of what is partial
FOLDER = Path(__file__).resolve().parents[1] / "pictures"


def _kib(size: float) -> str:
    return f"{size / 1024:g} KiB"


def _spec(**sizes: int) -> md.Spec:
    return md.spec(list(md.dims(**sizes)))


def _rules(canvas: Canvas, x: float, y: float, layout: str, size: int = 14) -> float:
    """Writes a layout; each dim and its axis have the axis's colour."""
    parsed, words = Layout.parse(layout), []
    for number, rule in enumerate(str(parsed).split("; ")):
        axis = rule.rstrip("?").split(":")[1]
        words += [("; ", PALE)] if number else []
        words.append((rule, AXES.get(axis.split("+")[0], INK)))
    return canvas.words(x, y, words, size)


def _dims(canvas: Canvas, x: float, y: float, name: str, spec: md.Spec, layout: str) -> float:
    """Writes a tensor's name and dims; dims that are split have their axis's colour."""
    parsed = Layout.parse(layout)
    words = [(f"{name} [", INK)]
    for number, dim in enumerate(spec.dims.names):
        words += [(", ", INK)] if number else []
        words.append((dim, colour_of(parsed, dim)))
    return canvas.words(x, y, [*words, ("]", INK)], size=12)


def _devices(canvas: Canvas, x: float, y: float, mesh: str, chosen: int | None = None) -> None:
    """Draws the devices of a mesh of two axes."""
    (down, rows), (across, columns) = Mesh.parse(mesh).axes
    for device in range(rows * columns):
        place = x + 36 * (device % columns), y + 30 * (device // columns)
        fill = "#86efac" if device == chosen else "#f3f4f6"
        canvas.box(*place, 32, 26, fill=fill, stroke="#4b5563")
        canvas.text(place[0] + 16, place[1] + 17, str(device), 12, mono=True, anchor="middle")
    end = x + 36 * columns + 6
    canvas.words(end, y + 18, [(f"{down}:{rows}", AXES[down]), (" down", PALE)], 12)
    canvas.words(end, y + 48, [(f"{across}:{columns}", AXES[across]), (" across", PALE)], 12)


def mlp(x: md.Tensor, w_in: md.Tensor, w_out: md.Tensor) -> md.Tensor:
    """The model of the first picture; its lines are shown."""
    h = md.einsum(x, w_in, over="embed")
    return md.einsum(h, w_out, over="d_ff")


def layout() -> Canvas:
    """A model, its layout line, and what one of eight devices holds and sends."""
    mesh, rules = "data:2,model:4", "batch:data; d_ff:model"
    specs = {
        "x": _spec(batch=8, embed=256),
        "w_in": _spec(embed=256, d_ff=1024),
        "h": _spec(batch=8, d_ff=1024),
        "w_out": _spec(d_ff=1024, embed=256),
        "y": _spec(batch=8, embed=256),
    }
    program = md.jit(mlp, mesh, rules).lower(specs["x"], specs["w_in"], specs["w_out"])
    (sent,) = program.collectives
    canvas = Canvas(920, 372, "A model, its layout, and what one of eight devices holds and sends")
    for x, words in ((24, "the model"), (372, "device 0 holds")):
        canvas.text(x, 34, words, 15, bold=True)
    canvas.text(24, 66, 'h = einsum(x, w_in, over="embed")', 13, mono=True)
    canvas.text(24, 88, 'y = einsum(h, w_out, over="d_ff")', 13, mono=True)
    canvas.text(24, 138, "its layout, one line", 15, bold=True)
    _rules(canvas, 24, 166, rules, 15)
    canvas.text(24, 216, "eight devices", 15, bold=True)
    _devices(canvas, 24, 232, mesh, chosen=0)
    canvas.parts.append(f'<line x1="340" y1="20" x2="340" y2="352" stroke="{LINE}"/>')

    sizes = {256: 64, 1024: 128, 8: 40}
    places = {"x": (372, 84), "w_in": (520, 66), "h": (732, 84)}
    places |= {"w_out": (520, 192), "y": (732, 236)}
    for name, (x, y) in places.items():
        spec = specs[name]
        height, width = (sizes[dim.size] for dim in spec.dims)
        tensor(canvas, (x, y), (width, height), spec, mesh, rules, only=0, labels=False)
        _dims(canvas, x, y - 10, name, spec, rules)
    for x, y, sign in ((486, 110, "·"), (486, 262, "·"), (690, 110, "→"), (690, 262, "→")):
        canvas.text(x, y, sign, 22, PALE, bold=True)
    h_width, h_height = sizes[1024], sizes[8]
    tensor(canvas, (372, 236), (h_width * 0.75, h_height), specs["h"], mesh, rules, 0, False)
    _dims(canvas, 372, 226, "h", specs["h"], rules)
    canvas.text(732, 306, "and sends", 15, bold=True)
    axis = sent.axes[0]
    canvas.words(732, 328, [(f"{sent.kind} over ", INK), (axis, AXES[axis])], 12)
    canvas.text(732, 348, f"{_kib(sent.wire_bytes)}, known before it runs", 13, PALE)
    return canvas


def splits() -> Canvas:
    """One tensor under four layouts: which devices hold which part."""
    mesh, spec = "data:2,model:4", _spec(batch=8, d_ff=16)
    canvas = Canvas(780, 372, "One tensor on eight devices under four layouts")
    layouts = ("batch:data; d_ff:model", "batch:data", "d_ff:model", "d_ff:data+model")
    for number, rules in enumerate(layouts):
        x, y = 24 + 380 * (number % 2), 60 + 178 * (number // 2)
        _rules(canvas, x, y - 26, rules)
        _dims(canvas, x, y - 8, "h", spec, rules)
        tensor(canvas, (x, y), (340, 96), spec, mesh, rules)
    canvas.text(24, 360, "Numbers are devices. Two or more in a part: each has a copy.", 13, PALE)
    return canvas


def if_free() -> Canvas:
    """`length:model?` takes the axis only in tensors where no other dim has it."""
    mesh, rules = "model:4", "heads:model; length:model?"
    canvas = Canvas(780, 212, "A rule with a question mark takes the axis where it is free")
    _rules(canvas, 24, 36, rules, 15)
    tensors = (("x", _spec(length=8, embed=8)), ("q", _spec(length=8, heads=8)))
    captions = ("model is free: length takes it", "heads has model: length stays whole")
    for number, ((name, spec), words) in enumerate(zip(tensors, captions, strict=True)):
        x = 24 + 380 * number
        rule = "length:model" if name == "x" else "heads:model"
        _dims(canvas, x, 72, name, spec, rule)
        tensor(canvas, (x, 82), (200, 84), spec, mesh, rules if name == "q" else "length:model")
        canvas.text(x, 190, words, 13, PALE)
    return canvas


def padding() -> Canvas:
    """A dim of 10 over 4 devices: blocks of 3, the last one with two pads."""
    mesh, rules, size = "model:4", "vocab:model", 10
    canvas = Canvas(780, 150, "A dim of 10 positions over 4 devices: blocks of 3, and two pads")
    inspection = md.inspect(_spec(vocab=size), mesh, rules)
    _rules(canvas, 24, 34, rules, 15)
    canvas.text(170, 34, f"vocab={size} on {mesh}", 13, PALE)
    x = 24.0
    for number, (((start, stop, pads),), (device,)) in enumerate(inspection.blocks.items()):
        for position in range(start, stop + pads):
            pad = position >= stop
            fill = "none" if pad else DEVICES[number]
            canvas.box(x, 54, 48, 40, fill=fill, stroke="#4b5563", dashed=pad)
            words = "pad" if pad else str(position)
            canvas.text(x + 24, 79, words, 12, PALE if pad else INK, mono=True, anchor="middle")
            x += 52
        middle = x - 26 * (stop + pads - start)
        canvas.text(middle, 116, f"device {device}", 12, PALE, anchor="middle")
        x += 14
    return canvas


def partial_sums() -> Canvas:
    """A contraction over a split dim leaves a summand on each device."""
    canvas = Canvas(780, 330, "Contracting a split dim leaves one summand on each device")
    mesh, rules = "model:4", "d_ff:model"
    h, w, y = _spec(batch=8, d_ff=16), _spec(d_ff=16, embed=8), _spec(batch=8, embed=8)
    canvas.text(24, 34, 'y = einsum(h, w_out, over="d_ff")', 14, mono=True)
    _rules(canvas, 330, 34, rules, 14)
    _dims(canvas, 24, 74, "h", h, rules)
    tensor(canvas, (24, 84), (160, 64), h, mesh, rules)
    canvas.text(200, 122, "·", 22, PALE)
    _dims(canvas, 222, 74, "w_out", w, rules)
    tensor(canvas, (222, 84), (64, 128), w, mesh, rules)
    canvas.arrow(310, 122, 350, 122)
    canvas.text(396, 74, "y, a partial sum over model:", 13)
    for device in range(4):
        x = 366 + 98 * device
        canvas.box(x, 84, 64, 64, fill=DEVICES[device], stroke="#4b5563")
        canvas.text(x + 32, 120, str(device), 12, mono=True, anchor="middle")
        if device < 3:
            canvas.text(x + 76, 122, "+", 16, PALE)
    canvas.arrow(470, 160, 440, 206)
    canvas.arrow(640, 160, 670, 206)
    canvas.text(348, 190, "all_reduce", 13, mono=True, bold=True)
    canvas.text(526, 190, "reduce_scatter", 13, mono=True, bold=True)
    tensor(canvas, (390, 222), (64, 64), y, mesh, "")
    canvas.text(422, 310, "y everywhere", 13, PALE, anchor="middle")
    tensor(canvas, (650, 222), (64, 64), y, mesh, "batch:model")
    canvas.text(764, 310, "a quarter each: half the bytes", 13, PALE, anchor="end")
    return canvas


def storage() -> Canvas:
    """A parameter lives split between steps; it is gathered where it is used."""
    canvas = Canvas(780, 208, "A storage layout: split between steps, gathered where it is used")
    mesh, rules = "data:4", "params/embed:data"
    spec = _spec(embed=16, d_ff=16)
    _rules(canvas, 24, 34, "batch:data; params/embed:data", 15)
    steps = ((24, rules.split("/")[1], "between steps"), (290, "", "in its layer"))
    for x, where, words in (*steps, (556, "embed:data", "after the backward pass")):
        name = "gradient" if x == 556 else "w_in"
        _dims(canvas, x, 72, name, spec, where)
        tensor(canvas, (x, 82), (110, 84), spec, mesh, where)
        canvas.text(x, 190, words, 13, PALE)
    canvas.arrow(150, 124, 276, 124)
    canvas.text(213, 114, "all_gather", 13, mono=True, anchor="middle")
    canvas.arrow(416, 124, 542, 124)
    canvas.text(479, 114, "reduce_scatter", 13, mono=True, anchor="middle")
    return canvas


def dims() -> Canvas:
    """An einsum by names: dims that both operands have and the result lacks are summed over."""
    canvas = Canvas(780, 190, "An einsum by names: embed is contracted")
    canvas.text(24, 34, 'q = md.einsum(x, query, over="embed")', 14, mono=True)
    batch, length, embed, heads, kv = md.dims(batch=2, length=4, embed=8, heads=2, kv=4)
    traced = md.jit(lambda x, query: md.einsum(x, query, over="embed")).lower(
        md.spec([batch, length, embed]), md.spec([embed, heads, kv])
    )
    rows = (("x", (batch, length, embed)), ("query", (embed, heads, kv)))
    result = traced.block.outputs[0].shape
    for number, (name, shown) in enumerate((*rows, ("q", tuple(result)))):
        y = 54 + 42 * number
        canvas.text(24, y + 20, name, 14, mono=True)
        x = 96
        for dim in shown:
            gone = dim.name == "embed"
            width = 20 + 9 * len(dim.name)
            fill = "#fee2e2" if gone else "#dbeafe" if dim in rows[0][1] else "#dcfce7"
            canvas.box(x, y, width, 30, fill=fill, stroke="#4b5563")
            canvas.text(x + width / 2, y + 20, dim.name, 13, mono=True, anchor="middle")
            x += width + 8
        captions = ("", "embed is in both: multiplied and summed", "all other dims stay, in order")
        canvas.text(430, y + 20, captions[number], 13, PALE)
    return canvas


def pipeline() -> Canvas:
    """What each of four stages does in each tick."""
    schedule = named("circular", stages=4, microbatches=8, rounds=1)
    columns = max(map(len, schedule.rows))
    canvas = Canvas(96 + 30 * columns, 190, "A pipeline of four stages and eight microbatches")
    canvas.text(20, 32, "layers:pipe on pipe:4, --microbatches=8", 14, mono=True)
    for stage, row in enumerate(schedule.rows):
        y = 48 + 30 * stage
        canvas.text(20, y + 18, f"stage {stage}", 12)
        for tick, action in enumerate(row):
            x = 76 + 30 * tick
            if action is None:
                canvas.box(x, y, 28, 26, stroke="#d1d5db", dashed=True)
                continue
            text = str(action).lstrip("0123456789")
            fill = "#bfdbfe" if text.startswith("F") else "#fed7aa"
            canvas.box(x, y, 28, 26, fill=fill, stroke="#4b5563")
            canvas.text(x + 14, y + 17, text, 11, mono=True, anchor="middle")
    words = "F3: forward pass of microbatch 3. B3: its backward pass. Dashed: the stage waits."
    canvas.text(20, 180, words, 12, PALE)
    return canvas


def halo() -> Canvas:
    """What two devices exchange before a convolution with windows of three rows."""
    height, width, channels, window = 8, 12, 1, 3
    image = md.spec(md.dims(batch=1, height=height, width=width, channels=channels))
    filters = md.spec(md.dims(filter_height=window, channels=channels, features=1))

    def convolve(x: md.Tensor, filters: md.Tensor) -> md.Tensor:
        along = {"height": "filter_height"}
        return md.conv(x, filters, along, in_dim="channels", out_dim="features", padding="same")

    program = md.jit(convolve, "rows:2", "height:rows").lower(image, filters)
    (moved,) = program.collectives
    sent = moved.wire_bytes / (4 * width)  # rows of float32
    canvas = Canvas(780, 300, "Two devices exchange the rows next to their border")
    canvas.words(24, 34, [("height:rows", AXES["model"])], 15)
    canvas.text(140, 34, f"height={height} on rows:2, windows of {window} rows", 13, PALE)
    half = height // 2
    for device in range(2):
        x = 40 + 380 * device
        canvas.text(x, 66, f"device {device}", 14, bold=True)
        for row in range(half):
            y = 78 + 32 * (row + (device == 1))
            canvas.box(x, y, 240, 30, fill=DEVICES[device], stroke="#4b5563")
            number = row + half * device
            canvas.text(x + 120, y + 20, f"row {number}", 12, mono=True, anchor="middle")
        y, number = (78 + 32 * half, half) if device == 0 else (78, half - 1)
        canvas.box(x, y, 240, 30, fill=DEVICES[1 - device], stroke="#4b5563", dashed=True)
        canvas.text(x + 120, y + 20, f"halo: row {number}", 12, mono=True, anchor="middle")
    canvas.arrow(284, 78 + 32 * half - 18, 414, 92)
    canvas.arrow(414, 78 + 32 + 16, 284, 78 + 32 * half + 14)
    words = f"One {moved.kind}: a device sends {sent:g} row of its {half}."
    canvas.text(24, 284, words, 13, PALE)
    return canvas


def cut() -> Canvas:
    """Two programs, which of their values stay partial, and where the cut has them reduced."""

    def linear(h: md.Tensor, w: md.Tensor, g: md.Tensor, v: md.Tensor) -> md.Tensor:
        one, two = md.einsum(h, w, over="d_ff"), md.einsum(g, v, over="d_ff")
        return 2 * (one + two)

    def bent(h: md.Tensor, w: md.Tensor, g: md.Tensor, v: md.Tensor) -> md.Tensor:
        one, two = md.einsum(h, w, over="d_ff"), md.einsum(g, v, over="d_ff")
        return md.tanh(one) + two

    mesh, rules = "model:4", "d_ff:model"
    specs = [_spec(batch=8, d_ff=64), _spec(d_ff=64, embed=32)] * 2
    canvas = Canvas(780, 330, "Which values stay partial sums, and where they are reduced")
    rows = (
        (linear, "2 * (one + two)", ("one", "two", "one + two", "2 * (...)")),
        (bent, "tanh(one) + two", ("one", "two", "tanh(one)", "... + two")),
    )
    for number, (function, title, names) in enumerate(rows):
        is_bent = function is bent
        places = ((40, 0), (40, 52), (250, 0 if is_bent else 26), (460, 26))
        jitted, y = md.jit(function, mesh, rules), 66 + 136 * number
        reduced = jitted.stages(*specs).reduced
        strategies = reduced.planned.strategies
        made = [op for op in strategies if op.name in ("einsum", "add", "multiply", "tanh")]
        sent = sum(one.wire_bytes for one in jitted.lower(*specs).collectives)
        canvas.text(24, y - 14, title, 14, mono=True, bold=True)
        canvas.text(250, y - 14, f"sends {_kib(sent)} per device", 13, PALE)
        edges = [(0, 2), (2, 3), (1, 3) if is_bent else (1, 2)]
        partial = [
            bool(strategies[op].results[0].partial or op.outputs[0] in reduced.partial)
            for op in made
        ]
        for start, end in edges:
            (x, down), (to_x, to_down) = places[start], places[end]
            canvas.arrow(x + 132, y + down + 17, to_x - 2, y + to_down + 17)
        canvas.arrow(592, y + 43, 656, y + 43)
        for name, (x, down), is_partial in zip(names, places, partial, strict=True):
            fill = AXES_PALE if is_partial else "white"
            canvas.box(x, y + down, 130, 34, fill=fill, stroke="#4b5563")
            canvas.text(x + 65, y + down + 22, name, 13, mono=True, anchor="middle")
        canvas.text(664, y + 48, "result", 13, mono=True)
        at = 210 * sum((True, partial[2], partial[2] and partial[3]))
        canvas.parts.append(
            f'<line x1="{at}" y1="{y - 6}" x2="{at}" y2="{y + 96}" stroke="{AXES["model"]}" '
            'stroke-width="2" stroke-dasharray="6 4"/>'
        )
    words = "Coloured: a partial sum over model. Dashed: the cut; what crosses it is reduced."
    canvas.text(24, 314, words, 13, PALE)
    return canvas


PICTURES: dict[str, Callable[[], Canvas]] = {
    drawn.__name__: drawn
    for drawn in (
        *(layout, splits, if_free, padding, partial_sums, storage, dims, pipeline, halo),
        cut,
    )
}


def main() -> None:
    """Draws all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, drawn in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(str(drawn()))


if __name__ == "__main__":
    main()
