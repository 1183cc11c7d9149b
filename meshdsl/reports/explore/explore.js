// What the reader chooses, and everything that follows from it.
const MOST_NEAR = 4;
const RULE = /^((?:[^\s;,:/]+\/)*)([A-Za-z_]\w*):(-|[A-Za-z_]\w*(?:\+[A-Za-z_]\w*)*)(\??)$/;

const ruleText = (rule) => `${rule.target}:${rule.axes || "-"}${rule.optional ? "?" : ""}`;
// Says of wrong layouts what `Layout.parse` says.
const parseLayout = (text) => {
  const rules = [], wrong = [], known = new Map();
  for (const part of text.split(/[;,\s]+/).filter(Boolean)) {
    const match = RULE.exec(part);
    if (!match) { wrong.push(`\`${part}\` is not of the form \`dim:axis\`, \`dim:axis+axis?\`, \`dim:-\` or \`scope/dim:axis\``); continue; }
    const rule = { target: match[1] + match[2], axes: match[3] === "-" ? "" : match[3], optional: match[4] === "?" };
    const twice = rule.axes.split("+").find((axis, n, all) => all.indexOf(axis) < n);
    const first = known.get(rule.target);
    if (twice !== undefined) wrong.push(`\`${part}\` names axis \`${twice}\` twice`);
    else if (first) wrong.push(`\`${rule.target}\` is given twice: \`${ruleText(first)}\` and \`${ruleText(rule)}\``);
    else { known.set(rule.target, rule); rules.push(rule); }
  }
  return { rules, wrong };
};
const layoutText = (rules) => rules.map(ruleText).join("; ");
// The order of rules matters among optional ones only; `dim:-` without a scope says nothing.
const canonical = (rules) => [
  ...rules.filter((rule) => !rule.optional && (rule.axes || rule.target.includes("/"))).map(ruleText).sort(),
  ...rules.filter((rule) => rule.optional).map(ruleText),
].join("; ");
const meshText = (text) => text.trim().split(/[;,\s]+/).filter(Boolean).join(" ");
const axesOf = (text) => text.split(" ").filter(Boolean).map((part) => {
  const [name, size] = part.split(":");
  return [name.split("@")[0], Number(size)];
});
const keyOf = (state) => [state.mesh, canonical(state.rules), state.microbatches, state.remat].join("|");

const unpack = async (text) => {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

// Texts, tensors and the like of a plan stand in the document that it comes from.
const readPlans = (data) => data.plans.map((row) => {
  const text = (number) => data.texts[number];
  const plan = { mesh: text(row[0]), layout: text(row[1]), microbatches: row[2], remat: text(row[3]), details: row[5], source: data };
  plan.rules = parseLayout(plan.layout).rules;
  if (typeof row[4] === "number") return { ...plan, reason: text(row[4]), figures: null };
  const figures = {};
  data.fields.forEach((field, number) => { figures[field] = row[4][number]; });
  const [limit, memory, waits] = row[4].slice(data.fields.length);
  figures.limit = text(limit);
  figures.memory = Object.fromEntries(data.parts.map((part, number) => [part, memory[number]]));
  figures.waits = waits.map(([what, seconds]) => ({ what: text(what), seconds }));
  return { ...plan, figures };
});

const readDetails = (data, row) => {
  const text = (number) => data.texts[number];
  const tensor = (number) => {
    const [part, path, dtype, line, bytes, dims] = data.tensors[number];
    return { part: text(part), path: text(path), dtype: text(dtype), line: text(line), bytes,
      dims: dims.map(([name, size, local, axes]) => ({ name: text(name), size, local, axes: text(axes).split("+").filter(Boolean) })) };
  };
  const [sent, inputs, held, rest, intervals, pipeline, peakAt, faster, smaller, notes, peaks, times] = row;
  return {
    sent: sent.map(([kind, count, payload, wire]) => {
      const [phase, collective, tensors, dims, axes, line] = data.collectives[kind].map(text);
      return { phase, collective, tensors, dims, axes, line, count, payload, wire };
    }),
    inputs: data.lists[inputs].map(tensor),
    held: held.map(tensor),
    rest: { count: rest[0], bytes: rest[1] },
    intervals: intervals.map(([kind, seconds, memory]) => {
      const [phase, what, name, limit, line] = data.intervals[kind].map(text);
      return { phase, kind: what, name, limit, line, seconds, memory };
    }),
    pipeline: pipeline < 0 ? null : data.pipelines[pipeline],
    peakAt: text(peakAt), faster: text(faster), smaller: text(smaller), notes: notes.map(text),
    seconds: peaks[0], overlapped: peaks[1],
    times: times.map(([what, seconds]) => ({ what: text(what), seconds })),
  };
};

const explore = (root, data) => {
  const find = (selector) => root.querySelector(selector);
  const plans = readPlans(data);
  const live = data.live ? liveProcess((key, answer) => arrived(key, answer), () => render()) : null;
  const room = data.memory_bytes;
  const index = new Map(plans.map((plan, number) => [keyOf(plan), number]));
  const unique = (values) => [...new Set(values)];
  const meshes = unique(plans.map((plan) => plan.mesh));
  const counts = unique([...plans.map((plan) => plan.microbatches), ...(live ? data.live.microbatches : [])]).sort((a, b) => a - b);
  const remats = unique([...plans.map((plan) => plan.remat), ...(live ? data.live.remats : [])]).sort();
  const written = new Map(data.dims.map(([name]) => [name, new Set()]));
  for (const plan of plans) for (const rule of plan.rules) {
    if (!written.has(rule.target)) written.set(rule.target, new Set());
    written.get(rule.target).add(`${rule.axes || "-"}${rule.optional ? "?" : ""}`);
  }
  const fitting = (plan) => plan.figures && plan.figures.peak_bytes <= room;
  let state = null;
  const planOf = (some) => plans[index.get(keyOf(some))];
  const chosen = () => planOf(state);

  const controls = { mesh: find("select.mesh"), microbatches: find("select.microbatches"), remat: find("select.remat") };
  const line = find("input.line"), problem = find(".problem");
  const changed = (some) => { state = { ...state, ...some }; render(); };
  const choose = (plan) => changed({ mesh: plan.mesh, rules: plan.rules, microbatches: plan.microbatches, remat: plan.remat });
  const options = (select, values, show, other) => {
    const current = select.value;
    select.replaceChildren(...values.map((value) => {
      const plan = planOf(other(value));
      const dot = plan && plan.figures ? "" : plan ? " ✕" : " ·";
      return element("option", { value: String(value) }, `${show(value)}${dot}`);
    }));
    select.value = current;
  };
  controls.mesh.addEventListener("change", () => changed({ mesh: controls.mesh.value }));
  controls.microbatches.addEventListener("change", () => changed({ microbatches: Number(controls.microbatches.value) }));
  controls.remat.addEventListener("change", () => changed({ remat: controls.remat.value }));
  line.addEventListener("input", () => {
    const [mesh, layout] = line.value.includes("|") ? line.value.split("|") : [null, line.value];
    const { rules, wrong } = parseLayout(layout);
    problem.replaceChildren(...prose(wrong.join("; ")));
    if (!wrong.length) changed({ rules, mesh: mesh === null ? state.mesh : meshText(mesh) });
  });
  find("form").addEventListener("submit", (event) => event.preventDefault());

  const setRule = (target, value) => {
    const rule = value ? parseLayout(`${target}:${value}`).rules[0] : null;
    const at = state.rules.findIndex((one) => one.target === target);
    const rules = [...state.rules];
    if (at >= 0) rules.splice(at, 1, ...(rule ? [rule] : []));
    else if (rule) rules.push(rule);
    return { ...state, rules };
  };
  const chips = [...written.keys()].map((target) => {
    const select = element("select", { onchange: () => changed(setRule(target, select.value)) });
    const size = data.dims.find(([name]) => name === target);
    const node = element("label", { class: "choice" },
      element("span", {}, target.split("/").flatMap((part, n) => (n ? ["/", element("wbr"), part] : [part])),
        size ? element("span", { class: "quiet" }, ` ${showCount(size[1])}`) : null), select);
    return { target, select, node };
  });
  find(".dims").replaceChildren(...chips.map((chip) => chip.node));

  const renderControls = () => {
    const known = meshes.includes(state.mesh) ? meshes : [state.mesh, ...meshes];
    options(controls.mesh, known, (mesh) => mesh, (mesh) => ({ ...state, mesh }));
    options(controls.microbatches, counts, showCount, (microbatches) => ({ ...state, microbatches }));
    options(controls.remat, remats, (remat) => remat || "as the model says", (remat) => ({ ...state, remat }));
    controls.mesh.value = state.mesh;
    controls.microbatches.value = String(state.microbatches);
    controls.remat.value = state.remat;
    for (const [name, values] of [["microbatches", counts], ["remat", remats]]) controls[name].parentElement.hidden = values.length < 2;
    const mesh = axesOf(state.mesh);
    const axes = mesh.filter(([, size]) => size > 1).map(([name]) => name);
    const possible = (value) => value.replace("?", "").split("+").every((axis) => axis === "-" || axes.includes(axis));
    for (const { target, select, node } of chips) {
      const rule = state.rules.find((one) => one.target === target);
      const value = rule ? ruleText(rule).slice(target.length + 1) : "";
      const scoped = target.includes("/");
      const values = unique(["", ...axes, ...[...written.get(target)].filter(possible).sort(), value]);
      options(select, values.filter((one) => scoped || one !== "-"),
        (one) => (one === "" ? (scoped ? "no rule" : "not split") : one === "-" ? "not split" : one), (one) => setRule(target, one));
      select.value = value === "-" && !scoped ? "" : value;
      const first = rule && rule.axes.split("+")[0];
      node.style.setProperty("--colour", first ? axisColour(first, mesh) : "transparent");
    }
    if (document.activeElement !== line) { line.value = layoutText(state.rules); problem.textContent = ""; }
  };

  const quote = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : /["$`\\!]/.test(text) ? `'${text.replaceAll("'", "'\\''")}'` : `"${text}"`);
  const command = () => {
    const flags = [`--mesh_shape=${quote(state.mesh.replaceAll(" ", ","))}`, `--layout=${quote(layoutText(state.rules))}`];
    if (state.microbatches > 1) flags.push(`--microbatches=${state.microbatches}`);
    if (state.remat) flags.push(`--remat=${state.remat}`);
    return ["meshdsl explain", ...data.command, ...flags].join(" ");
  };
  const copied = find(".copied");
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = element("textarea", { style: "position: fixed; opacity: 0" });
      area.value = text;
      root.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    copied.textContent = "copied";
    setTimeout(() => { copied.textContent = ""; }, 2000);
  };
  find(".copy-layout").addEventListener("click", () => copy(layoutText(state.rules)));
  find(".copy-command").addEventListener("click", () => copy(command()));
  const best = (plans, figure) => plans.reduce((a, b) => (a && a.figures[figure] <= b.figures[figure] ? a : b), null);
  let fastest = null, fastestName = "";
  const rank = () => {
    fastest = best(plans.filter(fitting), "seconds") || best(plans.filter((plan) => plan.figures), "seconds");
    fastestName = fitting(fastest) ? "the fastest that fits" : "the fastest; none fits";
    find(".fastest").textContent = fitting(fastest) ? "the fastest that fits" : "the fastest (none fits)";
  };
  rank();
  find(".fastest").addEventListener("click", () => choose(fastest));
  find(".smallest").addEventListener("click", () => choose(best(plans.filter((plan) => plan.figures), "peak_bytes")));

  const tile = (label, figure, more, warn) => element("div", { class: "tile" }, element("span", { class: "quiet" }, label),
    element("strong", {}, figure), element("span", { class: warn ? "warn" : "quiet" }, more));
  const renderFigures = (plan) => {
    find(".tiles").classList.toggle("empty", !plan || !plan.figures);
    if (!plan || !plan.figures) {
      find(".tiles").replaceChildren(...["step, simulated", "peak memory", "sent by a device", "waiting", "work"].map((label) =>
        tile(label, "–", plan ? "not possible" : live && !live.problem(keyOf(state)) ? "being computed" : "not computed")));
      find(".limits").replaceChildren();
      return;
    }
    const one = plan.figures;
    const fits = one.peak_bytes <= room;
    const slower = one.seconds / fastest.figures.seconds - 1;
    find(".tiles").replaceChildren(
      tile("step, simulated", showSeconds(one.seconds), plan === fastest ? fastestName : `${showShare(Math.abs(slower))} ${slower < 0 ? "less" : "more"} than ${fastestName}`),
      tile("peak memory", showBytes(one.peak_bytes), fits ? `${showShare(one.peak_bytes / room)} of ${showBytes(room)}` : `does not fit: there are ${showBytes(room)}`, !fits),
      tile("sent by a device", one.collectives ? showBytes(one.wire_bytes) : "nothing", `${showCount(one.collectives)} collective${one.collectives === 1 ? "" : "s"}`),
      tile("waiting", showSeconds(one.exposed_seconds), `${showSeconds(one.hidden_seconds)} of sending is hidden by work`),
      tile("work", showSeconds(one.work_seconds), `${showFlops(one.flops)} of products`));
    const waits = one.waits.slice(0, 3).map((wait) => `${showSeconds(wait.seconds)} for ${wait.what}`);
    find(".limits").replaceChildren("Limited by ", element("b", {}, one.limit), ".", waits.length ? ` Waits: ${waits.join(", ")}.` : "");
  };

  const view = (name) => find(`.view-${name} .view`);
  const width = (node) => Math.max(280, Math.floor(node.getBoundingClientRect().width));
  let front = null, ahead = data.front;
  const renderFront = () => {
    const node = view("front"), focused = front !== null && document.activeElement === front.svg;
    front = scatter(plans, ahead, room, width(node), chosen, choose);
    node.replaceChildren(front.svg);
    if (focused) front.svg.focus();
  };
  const renderMemory = (plan, details, mesh) => {
    const node = view("memory"), told = element("p", { class: "told", "aria-live": "polite" }, "Point at a part of the step to read what it is.");
    const parts = Object.entries(plan.figures.memory).filter(([, bytes]) => bytes).map(([name, count]) =>
      ({ name: data.meaning[name], count, colour: `var(--part-${data.parts.indexOf(name)})` }));
    const times = details.times.map(({ what, seconds }) => ({ name: called(what), count: seconds, colour: limitColour(what, mesh) }));
    node.replaceChildren(...legend(times, showSeconds), overTime(details, mesh, room, width(node), told), told,
      element("p", { class: "quiet" }, `At the peak${details.peakAt ? `, ${details.peakAt}` : ""}:`), ...legend(parts, showBytes),
      ...[["to be faster", details.faster], ["to use less memory", details.smaller], ...details.notes.map((note) => ["note", note])]
        .filter(([, text]) => text).map(([name, text]) => element("p", {}, element("span", { class: "quiet" }, `${name}: `), ...prose(text))));
  };
  const renderSent = (details, mesh) => {
    if (!details.sent.length) { view("sent").replaceChildren(element("p", {}, "Nothing: no device needs what another has.")); return; }
    const totals = new Map();
    for (const one of details.sent) totals.set(one.axes, (totals.get(one.axes) || 0) + one.wire);
    const rows = [...totals].sort((a, b) => b[1] - a[1]).map(([axes, count]) =>
      ({ name: `over ${axes}`, count, colour: axisColour(axes.split("+")[0], mesh) }));
    const columns = [{ head: "sent", number: true }, { head: "collective" }, { head: "source line" },
      { head: "times", number: true, less: true }, { head: "each time", number: true, less: true }, { head: "dims", less: true },
      { head: "name in the source", least: true }, { head: "phase", less: true }];
    const lines = [...details.sent].sort((a, b) => b.wire - a.wire).map((one) => ({ cells: [
      cell(showBytes(one.wire), one.wire), cell(element("span", {}, one.collective, " ", element("span", { class: "quiet" }, `over ${one.axes}`))),
      cell(element("code", {}, one.line.split("/").flatMap((part, n) => (n ? ["/", element("wbr"), part] : [part])))), cell(showCount(one.count), one.count),
      cell(showBytes(one.payload / one.count), one.payload / one.count), cell(one.dims), cell(element("code", {}, one.tensors)), cell(one.phase)] }));
    view("sent").replaceChildren(...legend(rows, showBytes), table("what is sent", columns, lines));
    view("sent").dispatchEvent(new Event("meshdsl:tables", { bubbles: true }));
  };

  let shownPart = "parameters", shownPath = null;
  const renderWhere = (details, mesh) => {
    const node = view("where");
    const groups = { parameters: "parameters", optimizer: "optimizer state", batch: "batch", held: "held at the peak" };
    const listed = (part) => (part === "held" ? details.held : details.inputs.filter((one) => one.part === part));
    const present = Object.keys(groups).filter((part) => listed(part).length);
    if (!present.includes(shownPart)) shownPart = present[0];
    const tensors = listed(shownPart);
    const tensor = tensors.find((one) => one.path === shownPath) || tensors.find((one) => one.dims.some((dim) => dim.axes.length)) || tensors[0];
    const picture = element("div", { class: "picture" });
    const draw = (one) => picture.replaceChildren(element("h3", {}, element("code", {}, one.path)), ...devices(one, mesh).filter(Boolean));
    const part = element("select", { onchange: () => { shownPart = part.value; shownPath = null; renderWhere(details, mesh); } },
      present.map((name) => element("option", { value: name, selected: name === shownPart }, groups[name])));
    const rows = tensors.map((one) => {
      const all = mesh.reduce((product, [, size]) => product * size, 1);
      const split = one.dims.flatMap((dim) => dim.axes).reduce((product, axis) => product * (Object.fromEntries(mesh)[axis] || 1), 1);
      const button = element("button", { type: "button", class: "path", "aria-pressed": String(one === tensor), onclick: () => {
        shownPath = one.path;
        for (const other of node.querySelectorAll("button.path")) other.setAttribute("aria-pressed", String(other === button));
        draw(one);
      } }, one.path.split("/").flatMap((name, n) => (n ? ["/", element("wbr"), name] : [name])));
      const dims = one.dims.map((dim) => element("span", { class: dim.axes.length ? "dim split" : "dim",
        style: dim.axes.length ? `--colour: ${axisColour(dim.axes[0], mesh)}` : null },
        dim.local === dim.size ? `${dim.name} ${showCount(dim.size)}` : `${dim.name} ${showCount(dim.local)} of ${showCount(dim.size)} (${dim.axes.join("+")})`));
      return { cells: [cell(button), cell(dims), cell(showBytes(one.bytes), one.bytes), cell(showCount(all / split), all / split)] };
    });
    const columns = [{ head: "tensor" }, { head: "dims on a device" }, { head: "bytes", number: true }, { head: "copies", number: true, less: true }];
    const rest = shownPart === "held" && details.rest.count ? element("p", { class: "quiet" }, `and ${details.rest.count} smaller ones, ${showBytes(details.rest.bytes)}`) : "";
    node.replaceChildren(element("label", { class: "choice" }, element("span", {}, "show"), part), table("tensors", columns, rows), rest, picture);
    if (tensor) draw(tensor);
    node.dispatchEvent(new Event("meshdsl:tables", { bubbles: true }));
  };
  const renderPipeline = (details) => {
    const one = details.pipeline;
    find(".view-pipeline").hidden = !one;
    if (one) view("pipeline").replaceChildren(element("p", {}, element("b", {}, one.headline)), ...grid(one.stages),
      element("ul", {}, one.facts.map((fact) => element("li", {}, fact))));
  };

  const different = (plan) => {
    const own = new Set(state.rules.map(ruleText)), theirs = new Set(plan.rules.map(ruleText));
    const rules = [...own].filter((rule) => !theirs.has(rule)).length + [...theirs].filter((rule) => !own.has(rule)).length;
    return rules + 2 * (plan.mesh !== state.mesh) + (plan.microbatches !== state.microbatches) + (plan.remat !== state.remat);
  };
  const renderMissing = (plan) => {
    const node = find(".view-missing section");
    const near = plans.filter((one) => one.figures).map((one) => [different(one), one]).sort((a, b) => a[0] - b[0]).slice(0, MOST_NEAR);
    const [heading, ...words] = plan && plan.reason ? ["This layout does not fit the model", element("p", { class: "reason" }, ...prose(plan.reason))]
      : plan ? ["This plan has no details here", element("p", {}, "Its figures are above. Its details were left out, so that the page stays small; the command shows them.")]
        : live ? absent() : ["This plan was not computed", element("p", {}, "The command above computes it. ",
          ...prose("`meshdsl explore --live`, with the same flags as this page, computes such plans when you choose them."))];
    node.replaceChildren(element("h2", {}, heading), ...words, plan && plan.figures ? "" : element("p", { class: "quiet" }, "Plans near it:"),
      plan && plan.figures ? "" : element("ul", { class: "near" }, near.map(([, one]) => element("li", {},
        element("button", { type: "button", onclick: () => choose(one) }, `${one.mesh} | ${one.layout || "no rules"}`
          + (one.microbatches > 1 ? `, ${one.microbatches} microbatches` : "") + (one.remat ? `, remat ${one.remat}` : ""))))));
  };

  const asked = () => ({ mesh: state.mesh, layout: layoutText(state.rules), microbatches: state.microbatches, remat: state.remat });
  // Returns what is said of a plan that is asked for: a heading, and words.
  const absent = () => {
    const key = keyOf(state), problem = live.problem(key);
    if (!problem) return ["This plan is being computed", element("p", { role: "status" }, "The process of this page computes it. It shows here as soon as it is there."), element("div", { class: "waiting" })];
    const again = element("button", { type: "button", class: "again", onclick: () => { live.ask(key, asked()); render(); } }, "ask again");
    const words = problem === "gone" ? "The process of this page does not answer: it has ended, or cannot be reached. Start it again, or take the command above."
      : problem === "replaced" ? "Another page has asked the same process for another plan meanwhile." : `The process of this page refuses it: ${problem}.`;
    return ["This plan was not computed", element("p", { role: "alert" }, ...prose(words)), element("div", { class: "buttons" }, again)];
  };
  const arrived = (key, answer) => {
    const [plan] = readPlans(answer);
    index.set(key, plans.length).set(keyOf(plan), plans.length);
    plans.push(plan);
    if (plan.figures && !meshes.includes(plan.mesh)) meshes.push(plan.mesh);
    if (plan.figures) { ahead = paretoFront(plans); rank(); renderFront(); }
    if (chosen() === plan) render(); else front.select(chosen());
  };

  let cache = new Map();
  const render = () => {
    renderControls();
    find(".command code").textContent = command();
    const plan = chosen(), hasFigures = Boolean(plan && plan.figures), hasDetails = hasFigures && Boolean(plan.details);
    find(".view-missing").hidden = hasDetails;
    if (live) live.want(plan ? null : keyOf(state), asked());
    root.dataset.plan = plan ? String(plans.indexOf(plan)) : "";
    for (const name of ["memory", "sent", "where", "pipeline"]) find(`.view-${name}`).hidden = !hasDetails;
    renderFigures(plan);
    front.select(plan);
    if (!hasDetails) { renderMissing(plan); return; }
    if (!cache.has(plan)) cache = new Map([[plan, readDetails(plan.source, plan.details)]]);
    const details = cache.get(plan), mesh = axesOf(state.mesh);
    renderMemory(plan, details, mesh);
    renderSent(details, mesh);
    renderWhere(details, mesh);
    renderPipeline(details);
  };

  const first = plans.find((plan) => plan.figures);
  state = { mesh: first.mesh, rules: first.rules, microbatches: first.microbatches, remat: first.remat };
  renderFront();
  render();
  let known = width(view("front"));
  new ResizeObserver(() => {
    const now = width(view("front"));
    if (now === known) return;
    known = now;
    renderFront();
    render();
  }).observe(view("front"));
  root.dataset.explored = "";
};

window.addEventListener("DOMContentLoaded", () => {
  for (const root of document.querySelectorAll(".meshdsl")) {
    const plans = root.querySelector("script.plans");
    if (plans) unpack(plans.textContent).then((data) => explore(root, data)).catch((error) => {
      root.querySelector(".problem").textContent = `This page cannot be shown: ${error.message}`;
      throw error;
    });
  }
});
