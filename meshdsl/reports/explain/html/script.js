(() => {
  "use strict";

  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
  const bytes = (count) => {
    let unit = 0;
    while (count >= 1024 && unit < UNITS.length - 1) { count /= 1024; unit += 1; }
    return `${count.toFixed(unit === 0 || count >= 100 ? 0 : 1)} ${UNITS[unit]}`;
  };

  // Cells with a number are sorted by it, others by their text; the numbers in a text count as such.
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.order === undefined ? cell.textContent.trim() : Number(cell.dataset.order);
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number"
      ? a - b
      : String(a).localeCompare(String(b), undefined, { numeric: true });

  const sortable = (table) => {
    const heads = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        // Numbers begin with the largest.
        const first = head.classList.contains("number") ? "descending" : "ascending";
        const other = first === "ascending" ? "descending" : "ascending";
        const order = head.getAttribute("aria-sort") === first ? other : first;
        heads.forEach((one) => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const rows = [...body.rows].map((row) => [keyOf(row, column), row]);
        rows.sort((a, b) => sign * compare(a[0], b[0]));
        body.append(...rows.map((pair) => pair[1]));
      });
    });
  };

  const filterable = (holder) => {
    const input = holder.querySelector("input[type=search]");
    const table = holder.querySelector("table");
    if (!input || !table) return;
    const count = holder.querySelector(".count");
    const rows = [...table.tBodies[0].rows];
    const whole = count.textContent;
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += row.hidden ? 0 : 1;
      }
      count.textContent = shown === rows.length ? whole : `${shown.toLocaleString("en")} of ${whole}`;
      for (const cell of table.tFoot ? table.tFoot.rows[0].cells : []) {
        if (!cell.classList.contains("sum")) continue;
        const visible = rows.filter((row) => !row.hidden);
        cell.textContent = bytes(visible.reduce((sum, row) => sum + keyOf(row, cell.cellIndex), 0));
      }
    });
  };

  // The strip tells what lies under the mouse, or is reached with the arrow keys, in the line below.
  const readable = (strip, folds) => {
    const line = strip.closest(".timeline").parentElement.querySelector(":scope > .told");
    const segments = [...strip.querySelectorAll(".segment")];
    let at = -1;
    const show = (index) => {
      if (segments[at]) segments[at].classList.remove("on");
      at = index;
      if (!segments[at]) return;
      segments[at].classList.add("on");
      if (line) line.textContent = segments[at].dataset.told;
    };
    const unfold = (segment) => {
      const fold = folds[segment.dataset.loop];
      if (!fold) return;
      fold.open = true;
      fold.scrollIntoView({ block: "nearest" });
    };
    segments.forEach((segment, index) => {
      segment.dataset.told = segment.title;
      segment.removeAttribute("title");
      segment.addEventListener("mouseenter", () => show(index));
      segment.addEventListener("click", () => unfold(segment));
    });
    strip.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: segments.length - 1 };
      if (event.key in moves) {
        event.preventDefault();
        show(Math.max(0, Math.min(segments.length - 1, moves[event.key])));
      } else if (event.key === "Enter" && segments[at]) {
        unfold(segments[at]);
      }
    });
  };

  for (const root of document.querySelectorAll(".meshdsl:not([data-ready])")) {
    root.dataset.ready = "";
    // Pages that write tables later say so.
    root.addEventListener("meshdsl:tables", (event) => {
      event.target.querySelectorAll("table.sortable").forEach(sortable);
    });
    root.querySelectorAll("table.sortable").forEach(sortable);
    root.querySelectorAll(".table").forEach(filterable);
    root.querySelectorAll(".strip").forEach((strip) => {
      const holder = strip.closest(".timeline").parentElement;
      readable(strip, [...holder.querySelectorAll(":scope > details.fold:not(.plain)")]);
    });
  }
})();
