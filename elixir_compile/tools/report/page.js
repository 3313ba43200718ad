// Everything is in the page without this script. It adds zoom and tooltips, a cursor for the keyboard, sorting, a filter.
"use strict";
(() => {
  const read = (id) => {
    const block = document.getElementById(id);
    return block === null ? null : JSON.parse(block.textContent);
  };
  const data = read("elixir-report");
  const GIB = 2 ** 30;

  const chart = document.getElementById("step-chart");
  const packed = document.getElementById("packed-library");

  // The library of the charts is packed. As a script of the page it has the rights of one, and is fetched from nowhere.
  const load = async () => {
    const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
    const unpacked = new Response(bytes).body.pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  };

  const draw = async () => {
    await load();
    const spec = read("elixir-step");
    // Memory gets a last row that repeats the one before at its end, because an area of steps ends at its last point.
    const closed = (table) => Object.fromEntries(Object.entries(table)
      .map(([name, column]) => [name, [...column, table[name === "start_s" ? "end_s" : name].at(-1)]]));
    spec.datasets = { memory: [closed(data.memory)], lanes: [data.bars] };
    if (data.second !== undefined) spec.datasets.second = [closed(data.second.memory)];
    if (data.rates !== undefined) spec.datasets.rates = [data.rates];
    // `ast` interprets expressions: the policy of the page forbids `eval`.
    await window.vegaEmbed(chart, spec, { ast: true, renderer: "svg", actions: false });
    chart.setAttribute("data-drawn", "yes");
  };

  // The picture of the chart is painted before anything is loaded. If the chart fails, the picture stays.
  if (chart !== null && packed !== null) {
    const still = chart.innerHTML;
    const fail = (error) => { chart.innerHTML = still; console.error(String(error)); };
    requestAnimationFrame(() => setTimeout(() => draw().catch(fail)));
  }

  // The cursor: arrow keys walk over the regions, Home, End and P go to the first, the last and the peak.
  const output = document.getElementById("cursor");
  if (chart !== null && output !== null) {
    const rows = data.memory;
    const total = rows.region.map((_, at) => data.kinds.reduce((sum, kind) => sum + rows[kind][at], 0));
    const peak = total.indexOf(Math.max(...total));
    let at = peak;
    const show = () => {
      const held = data.kinds.filter((kind) => rows[kind][at] > 0)
        .map((kind) => `${kind} ${(rows[kind][at] / GIB).toFixed(2)}`);
      const place = [rows.op[at], rows.module[at], rows.source[at]].filter((text) => text !== "").join(", ");
      output.textContent =
        `${rows.region[at]} from ${rows.start_s[at].toFixed(4)} s: ${(total[at] / GIB).toFixed(2)} GiB at ${place} ` +
        `(${held.join(", ")})`;
    };
    const last = rows.region.length - 1;
    const moves = {
      ArrowLeft: () => Math.max(at - 1, 0), ArrowRight: () => Math.min(at + 1, last), Home: () => 0, End: () => last,
      p: () => peak, P: () => peak,
    };
    chart.addEventListener("keydown", (event) => {
      if (!(event.key in moves)) return;
      at = moves[event.key]();
      show();
      event.preventDefault();
    });
    chart.addEventListener("focus", show);
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const value = (row, column) => {
      const cell = row.cells[column];
      return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
    };
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const isUp = head.getAttribute("aria-sort") === "descending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
        const sign = isUp ? 1 : -1;
        const compare = (a, b) => (a < b ? -sign : a > b ? sign : 0);
        body.append(...[...body.rows].sort((a, b) => compare(value(a, column), value(b, column))));
      });
    });
  }

  for (const label of document.querySelectorAll("label[data-filters]")) {
    label.hidden = false;
    const rows = document.getElementById(label.dataset.filters).tBodies[0].rows;
    label.querySelector("input").addEventListener("input", (event) => {
      const sought = event.target.value.toLowerCase();
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(sought);
    });
  }
})();
