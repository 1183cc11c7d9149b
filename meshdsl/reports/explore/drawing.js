// Elements, units and drawings. Sizes of drawings are those of the screen, so that texts keep theirs.
const SVG = "http://www.w3.org/2000/svg";
const fill = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined));
  return node;
};
const element = (name, attributes, ...children) =>
  fill(document.createElement(name), attributes, children);
const shape = (name, attributes, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);

const scaled = (count, base, units) => {
  let unit = 0;
  while (count >= base && unit < units.length - 1) { count /= base; unit += 1; }
  return [count, units[unit], unit];
};
const showBytes = (count) => {
  const [value, unit, n] = scaled(count, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
  return `${value.toFixed(n === 0 || value >= 100 ? 0 : 1)} ${unit}`;
};
const showFlops = (count) => {
  const [value, unit, n] = scaled(count, 1000, ["", "K", "M", "G", "T", "P", "E"]);
  const digits = { minimumFractionDigits: n ? 1 : 0, maximumFractionDigits: n ? 1 : 0 };
  return `${value.toLocaleString("en", digits)} ${unit}flop`;
};
const showSeconds = (count) => {
  if (count >= 60) return `${Math.floor(Math.round(count) / 60).toLocaleString("en")} min ${Math.round(count) % 60} s`;
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (count >= size) return `${(count / size).toFixed(count / size >= 100 ? 0 : 1)} ${unit}`;
  }
  return `${(count * 1e9).toFixed(0)} ns`;
};
const showShare = (share) => {
  const percent = 100 * share;
  if (percent > 0 && percent < 0.01) return "< 0.01 %";
  return `${percent >= 10 || !percent ? percent.toFixed(0) : String(Number(percent.toPrecision(2)))} %`;
};
const showCount = (count) => count.toLocaleString("en");

// Texts of reports mark code by backticks.
const prose = (text) => text.split("`").map((part, n) => (n % 2 ? element("code", {}, part) : part));

const PALETTE = 8;
const axisColour = (axis, mesh) => {
  const at = mesh.findIndex(([name]) => name === axis);
  return `var(--axis-${Math.max(at, 0) % PALETTE})`;
};
const limitColour = (what, mesh) =>
  what.startsWith("over ") ? axisColour(what.slice(5).split("+")[0], mesh) : `var(--${what})`;
const called = (what) =>
  ({ compute: "products of matrices", memory: "memory bandwidth" })[what] ||
  what.replace("over ", what.includes("+") ? "the network over axes " : "the network over axis ");

const legend = (rows, show) => {
  const total = rows.reduce((sum, row) => sum + row.count, 0) || 1;
  return [
    element("div", { class: "bar" }, rows.map((row) =>
      element("span", { style: `flex: ${row.count / total}; background: ${row.colour}` }))),
    element("ul", { class: "legend" }, rows.filter((row) => row.count >= 0.001 * total).map((row) =>
      element("li", {}, element("i", { style: `background: ${row.colour}` }), `${row.name} `,
        element("b", {}, show(row.count)),
        element("span", { class: "quiet" }, ` ${showShare(row.count / total)}`)))),
  ];
};

// A table whose heads sort; `less` columns are left out on narrow screens, `least` ones also on others.
const table = (label, columns, rows) => {
  const kind = (column) => [column.number && "number", column.less && "less", column.least && "less least"].filter(Boolean).join(" ") || null;
  const node = element("table", { class: "sortable", "aria-label": label },
    element("thead", {}, element("tr", {}, columns.map((column) =>
      element("th", { scope: "col", class: kind(column) }, element("button", { type: "button" }, column.head))))),
    element("tbody", {}, rows.map((row) => element("tr", row.attributes, row.cells.map((cell, n) =>
      element("td", { class: kind(columns[n]), "data-order": cell.order }, cell.content))))));
  return element("div", { class: "table" }, element("div", { class: "scroll" }, node));
};
const cell = (content, order) => ({ content, order });

// Steps on a logarithmic scale: 1, 2 and 5 times powers of ten, or powers of two; more if these are few.
const ticks = (low, high, binary, most) => {
  const base = binary ? 2 : 10;
  const steps = (factors) => {
    const found = [];
    for (let n = Math.floor(Math.log(low) / Math.log(base)); base ** n <= high; n += 1) {
      for (const by of factors) if (by * base ** n >= low && by * base ** n <= high) found.push(by * base ** n);
    }
    return found;
  };
  const coarse = steps(binary ? [1] : [1, 2, 5]);
  const found = coarse.length >= Math.min(3, most) ? coarse : steps(binary ? [1, 1.25, 1.5, 1.75] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8]);
  const every = Math.ceil(found.length / most);
  return found.filter((_, n) => n % every === 0);
};

const scatter = (plans, front, room, width, chosen, choose) => {
  const height = Math.max(280, Math.min(380, 0.62 * width));
  const [left, right, top, bottom] = [68, 14, 14, 40];
  const known = plans.filter((plan) => plan.figures);
  const range = (values) => {
    const low = Math.min(...values), high = Math.max(...values);
    return [low / 1.12, Math.max(high * 1.12, low * 1.3)];
  };
  const fold = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, 0]);
  const seconds = range(fold(known.map((plan) => plan.figures.seconds)));
  const peaks = range(fold(known.map((plan) => plan.figures.peak_bytes || 1)));
  const shown = room <= peaks[1] * 2 ? [peaks[0], Math.max(peaks[1], room * 1.1)] : peaks;
  const at = (value, [low, high], from, to) => from + (Math.log(value / low) / Math.log(high / low)) * (to - from);
  const x = (plan) => at(plan.figures.seconds, seconds, left, width - right);
  const y = (plan) => at(plan.figures.peak_bytes || 1, shown, height - bottom, top);
  const parts = [];
  for (const value of ticks(...seconds, false, Math.max(2, Math.floor(width / 110)))) {
    const place = at(value, seconds, left, width - right);
    parts.push(shape("line", { x1: place, x2: place, y1: top, y2: height - bottom, class: "rule" }));
    parts.push(shape("text", { x: place, y: height - bottom + 16, "text-anchor": "middle" }, showSeconds(value)));
  }
  for (const value of ticks(...shown, true, 7)) {
    const place = at(value, shown, height - bottom, top);
    parts.push(shape("line", { x1: left, x2: width - right, y1: place, y2: place, class: "rule" }));
    parts.push(shape("text", { x: left - 6, y: place + 4, "text-anchor": "end" }, showBytes(value)));
  }
  parts.push(shape("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle", class: "quiet" }, "time of a step"));
  if (room <= shown[1]) {
    const place = at(room, shown, height - bottom, top);
    parts.push(shape("line", { x1: left, x2: width - right, y1: place, y2: place, class: "room" }));
    parts.push(shape("text", { x: width - right, y: place - 5, "text-anchor": "end", class: "room" }, `${showBytes(room)}: memory of a device`));
  }
  for (const plan of known) {
    const fits = plan.figures.peak_bytes <= room;
    parts.push(shape("circle", { cx: x(plan).toFixed(1), cy: y(plan).toFixed(1), r: 3.5, class: fits ? "plan" : "plan large" }));
  }
  const stairs = front.map((number) => plans[number]);
  const line = stairs.map((plan, n) => (n ? `H${x(plan)}V${y(plan)}` : `M${x(plan)} ${y(plan)}`)).join("");
  parts.push(shape("path", { d: line, class: "stairs" }));
  for (const plan of stairs) parts.push(shape("circle", { cx: x(plan), cy: y(plan), r: 5, class: "plan ahead" }));
  const ring = shape("circle", { r: 9, class: "ring" });
  const svg = shape("svg", { width, height, role: "img", tabindex: "0", "aria-label":
    "time of a step against memory, a mark for each plan; arrow keys move along the Pareto front" }, parts, ring);
  const select = (plan) => {
    ring.setAttribute("visibility", plan && plan.figures ? "visible" : "hidden");
    if (plan && plan.figures) { ring.setAttribute("cx", x(plan)); ring.setAttribute("cy", y(plan)); }
  };
  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect();
    const distance = (plan) => Math.hypot(x(plan) - event.clientX + box.left, y(plan) - event.clientY + box.top);
    let best = null;
    for (const plan of known) if (!best || distance(plan) < distance(best)) best = plan;
    if (best && distance(best) < 40) choose(best);
  });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!move || !front.length) return;
    event.preventDefault();
    const now = front.findIndex((number) => plans[number] === chosen());
    const next = now < 0 ? 0 : Math.max(0, Math.min(front.length - 1, now + move));
    choose(plans[front[next]]);
  });
  return { svg, select };
};

const overTime = (details, mesh, room, width, told) => {
  const [left, right, top, strip, high] = [62, 8, 8, 26, 150];
  const total = details.intervals.reduce((sum, one) => sum + one.seconds, 0) || 1;
  const peak = details.intervals.reduce((most, one) => Math.max(most, one.memory), 0) || 1;
  const shown = room <= 3 * peak ? Math.max(1.08 * room, 1.1 * peak) : 1.25 * peak;
  const x = (seconds) => left + (seconds / total) * (width - left - right);
  const base = top + strip + 8 + high;
  const y = (bytes) => base - (bytes / shown) * high;
  const parts = [], edges = [];
  let start = 0, memory = 0, line = "";
  details.intervals.forEach((one, number) => {
    memory = one.memory || memory;
    const [from, to] = [x(start), x(start + one.seconds)];
    parts.push(shape("rect", { x: from, y: top, width: Math.max(to - from - 0.4, 0.4), height: strip,
      style: `fill: ${limitColour(one.limit, mesh)}` }));
    line += `${number ? "V" : `M${left} `}${y(memory).toFixed(1)}H${to.toFixed(1)}`;
    edges.push(to);
    start += one.seconds;
  });
  parts.push(shape("path", { d: `${line}V${base}H${left}Z`, class: "area" }), shape("path", { d: line, class: "edge" }));
  for (const part of [0, 0.5, 1]) {
    const value = part * peak;
    parts.push(shape("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "rule" }));
    parts.push(shape("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, part ? showBytes(value) : "0"));
  }
  const inside = room <= shown;
  const place = inside ? y(room) : base - high + 4;
  parts.push(shape("line", { x1: left, x2: width - right, y1: place, y2: place, class: "room" }));
  const words = inside ? `${showBytes(room)}: memory of a device` : `a device has ${showBytes(room)}: ${showCount(Math.round(room / peak))} × the peak`;
  parts.push(shape("text", { x: left + 4, y: inside && place < base - high + 10 ? place + 14 : inside ? place - 5 : place + 14, class: "room" }, words));
  const marks = Math.max(2, Math.floor(width / 130));
  for (let n = 0; n <= marks; n += 1) {
    const anchor = n === 0 ? "start" : n === marks ? "end" : "middle";
    parts.push(shape("text", { x: x((total * n) / marks), y: base + 16, "text-anchor": anchor }, n ? showSeconds((total * n) / marks) : "0"));
  }
  const cursor = shape("rect", { y: top, height: base - top, class: "cursor", visibility: "hidden" });
  const svg = shape("svg", { width, height: base + 22, role: "img", tabindex: "0",
    "aria-label": `the step as intervals, and memory over it, at most ${showBytes(peak)} of ${showBytes(room)}` }, parts, cursor);
  let at = -1;
  const show = (number) => {
    at = Math.max(0, Math.min(edges.length - 1, number));
    const one = details.intervals[at], from = at ? edges[at - 1] : left;
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x", from);
    cursor.setAttribute("width", Math.max(edges[at] - from, 1.5));
    told.textContent = [`${one.kind === "local" ? "" : `${one.kind} `}${one.name}`, showSeconds(one.seconds),
      `limited by ${called(one.limit)}`, one.memory ? `${showBytes(one.memory)} held` : "", one.line || one.phase]
      .filter(Boolean).join(" · ");
  };
  const under = (event) => {
    const place = event.clientX - svg.getBoundingClientRect().left;
    const found = edges.findIndex((edge) => place <= edge);
    show(found < 0 ? edges.length - 1 : found);
  };
  svg.addEventListener("pointermove", under);
  svg.addEventListener("click", under);
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: edges.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
  return svg;
};

// Devices as cells, the last axis from left to right. A bar for each dim: the device's block of it.
const MOST_DEVICES = 64;
const devices = (tensor, mesh) => {
  const count = mesh.reduce((all, [, size]) => all * size, 1);
  const columns = mesh.length ? Math.min(mesh[mesh.length - 1][1], 8) : 1;
  const position = (device) => {
    const found = {};
    for (const [name, size] of [...mesh].reverse()) { found[name] = device % size; device = Math.floor(device / size); }
    return found;
  };
  const sizes = Object.fromEntries(mesh);
  const cells = [];
  for (let device = 0; device < Math.min(count, MOST_DEVICES); device += 1) {
    const where = position(device);
    const bars = tensor.dims.map((dim, number) => {
      const blocks = dim.axes.reduce((all, axis) => all * (sizes[axis] || 1), 1);
      const block = dim.axes.reduce((index, axis) => index * (sizes[axis] || 1) + (where[axis] || 0), 0);
      const first = block * dim.local, last = Math.min(dim.size, first + dim.local) - 1;
      const range = last < first ? "pads only" : first === last ? `${first}` : `${showCount(first)}–${showCount(last)}`;
      const part = element("i", { style: `left: ${(100 * block) / blocks}%; width: max(${100 / blocks}%, 2px); background: ${dimColour(number)}` });
      return element("span", { class: "dim-bar" + (blocks > 1 ? "" : " all"), title: `${dim.name} ${range} of ${showCount(dim.size)}` },
        part, element("span", {}, blocks > 1 ? `${dim.name} ${range}` : dim.name));
    });
    const name = mesh.map(([axis]) => `${axis} ${where[axis]}`).join(", ");
    cells.push(element("div", { class: "device", role: "listitem", "aria-label": `device ${device}: ${bars.map((bar) => bar.title).join(", ")}` },
      element("span", { class: "quiet" }, name || "the device"), bars));
  }
  const rest = count - cells.length;
  return [
    element("div", { class: "devices", role: "list", style: `--columns: ${columns}` }, cells),
    rest > 0 ? element("p", { class: "quiet" }, `The first ${MOST_DEVICES} of ${showCount(count)} devices; the others go on alike.`) : null,
  ];
};
const dimColour = (number) => `hsl(${(number * 67 + 212) % 360} 48% 52%)`;

const MOST_COLUMNS = 120;
const grid = (stages) => {
  const rows = stages.map((row) => row.split(" "));
  const columns = Math.min(rows[0].length, MOST_COLUMNS);
  const body = rows.slice(0, 64).map((row, stage) => element("tr", {},
    element("th", { scope: "row" }, `stage ${stage}`),
    row.slice(0, columns).map((text) => {
      const kind = text === "." ? "wait" : /F/.test(text) ? "forward" : "backward";
      return element("td", { class: kind }, text === "." ? "" : text);
    })));
  const more = columns < rows[0].length || rows.length > 64;
  return [
    element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "what each stage does in each tick" },
      element("table", { class: "ticks" }, element("tbody", {}, body))),
    element("p", { class: "quiet" }, "F3: the forward pass of microbatch 3, B3: its backward pass; empty: the stage waits." +
      (more ? ` The first ${columns} of ${rows[0].length} ticks.` : "")),
  ];
};
