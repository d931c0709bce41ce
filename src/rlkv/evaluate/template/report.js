// Puts the page together from the data it carries: one section a table, gate maps, the run.

const DATA = JSON.parse(document.getElementById("data").textContent);
const MAIN = document.getElementById("main");
const redraws = [];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "html") made.innerHTML = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function addSection(id, title, note) {
  const section = element("section", { id }, element("h2", {}, title));
  if (note) section.append(element("p", { class: "note" }, note));
  MAIN.append(section);
  document.getElementById("contents").append(element("a", { href: `#${id}` }, title));
  return section;
}

// ---- tables -------------------------------------------------------------------------------------

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });
}

function table(section) {
  let records = section.records;
  let sorted = { column: null, up: true };
  const isNumber = (column) => section.records.some((row) => typeof row[column] === "number");
  const isFraction = (column) => section.records.some((row) => row[column] % 1 !== 0
    && typeof row[column] === "number" && Math.abs(row[column]) < 100);
  const body = element("tbody");
  const fill = () => {
    body.innerHTML = records.map((row) => `<tr>${section.columns.map((column) => {
      const value = row[column];
      const exact = typeof value === "number" ? ` title="${value}"` : "";
      const shown = typeof value === "number" && !isBytes(column) && isFraction(column)
        ? value.toFixed(3) : escapeText(formatValue(column, value));
      return `<td class="${isNumber(column) ? "number" : ""}"${exact}>${shown}</td>`;
    }).join("")}</tr>`).join("");
  };
  const heads = section.columns.map((column) => {
    const sort = () => {
      sorted = { column, up: sorted.column === column ? !sorted.up : true };
      records = [...section.records].sort((a, b) => compare(a[column], b[column]));
      if (!sorted.up) records.reverse();
      heads.forEach((head) => head.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", sorted.up ? "ascending" : "descending");
      fill();
    };
    const cell = element("th", {
      class: isNumber(column) ? "number" : "", scope: "col", tabindex: 0, "data-sortable": "",
      onclick: sort, onkeydown: (event) => { if (event.key === "Enter") sort(); },
    }, column.replaceAll("_", " "));
    return cell;
  });
  fill();
  const head = element("thead", {}, element("tr", {}, ...heads));
  return element("div", { class: "scroll" }, element("table", {}, head, body));
}

// ---- charts -------------------------------------------------------------------------------------

function choice(label, options, onchange) {
  const select = element("select", { onchange: (event) => onchange(event.target.value) });
  for (const [value, text] of options) select.append(element("option", { value }, text));
  return element("label", {}, label, select);
}

function facetsOf(section) {
  const groups = new Map();
  for (const row of section.records) {
    const title = section.chart.facet.map((name) => row[name]).join(" · ");
    if (!groups.has(title)) groups.set(title, []);
    groups.get(title).push(row);
  }
  return groups;
}

function chartPanel(section) {
  const { chart } = section;
  const groups = facetsOf(section);
  const state = { facet: [...groups.keys()][0], x: chart.x, hidden: new Set() };
  const controls = element("div", { class: "controls" });
  const legend = element("div", { class: "controls", role: "group", "aria-label": "Lines shown" });
  const plot = element("div", { class: "plot" });
  let points = [];

  const draw = () => {
    const rows = groups.get(state.facet);
    const all = [...new Set(rows.map((row) => String(row[chart.series])))];
    const shown = new Set(all.filter((name) => !state.hidden.has(name)));
    const drawn = lineChart(rows, chart, DATA.styles, shown, state.x);
    plot.innerHTML = drawn.markup;
    points = drawn.points;
    legend.replaceChildren(...all.map((name) => element("button", {
      class: "series", type: "button", "aria-pressed": String(!state.hidden.has(name)),
      html: `${swatch(DATA.styles[name])}<span>${escapeText(name)}</span>`,
      onclick: () => {
        if (state.hidden.has(name)) state.hidden.delete(name);
        else state.hidden.add(name);
        draw();
      },
    })));
  };
  if (groups.size > 1) {
    const options = [...groups.keys()].map((name) => [name, name]);
    controls.append(choice("Show", options, (value) => { state.facet = value; draw(); }));
  }
  if (section.columns.includes("kv_bytes_mean") && chart.x !== "kv_bytes_mean") {
    const options = [[chart.x, chart.x], ["kv_bytes_mean", "measured KV bytes"]];
    controls.append(choice("Over", options, (value) => { state.x = value; draw(); }));
  }
  plot.addEventListener("pointermove", (event) => hover(event, plot, points, chart, state.x));
  plot.addEventListener("pointerleave", () => {
    hideTip();
    const layer = plot.querySelector(".hover");
    if (layer) layer.innerHTML = "";
  });
  draw();
  redraws.push(draw);
  const panel = element("div", { class: "panel" });
  if (controls.children.length) panel.append(controls);
  panel.append(legend, plot);
  return panel;
}

function hover(event, plot, points, chart, x) {
  const svg = plot.querySelector("svg");
  const box = svg.getBoundingClientRect();
  const scale = SIZE.width / box.width;
  const at = (event.clientX - box.left) * scale;
  const placed = points.filter((point) => point.x !== null);
  if (!placed.length) return;
  const nearest = placed.reduce((a, b) => (Math.abs(b.x - at) < Math.abs(a.x - at) ? b : a));
  const here = points.filter((p) => p.x === null || p.row[x] === nearest.row[x]);
  here.sort((a, b) => a.y - b.y);
  plot.querySelector(".hover").innerHTML =
    `<line class="guide" x1="${nearest.x}" x2="${nearest.x}" y1="${SIZE.top}" y2="${SIZE.height - SIZE.bottom}"/>`;
  const fixed = (value) => (Math.abs(value) < 100 ? value.toFixed(3) : formatNumber(value));
  const lines = here.map(({ row }) => {
    const interval = chart.low && typeof row[chart.low] === "number"
      ? `${fixed(row[chart.low])} to ${fixed(row[chart.high])}` : "";
    const bytes = "kv_bytes_mean" in row ? formatBytes(row.kv_bytes_mean) : "";
    const cells = [row[chart.series], fixed(row[chart.y]), interval, bytes];
    return `<tr>${cells.map((cell) => `<td>${escapeText(cell)}</td>`).join("")}</tr>`;
  });
  const title = `${x.replaceAll("_", " ")} ${formatValue(x, nearest.row[x])}`;
  showTip(`<b>${escapeText(title)}</b><table>${lines.join("")}</table>`, event.clientX, event.clientY);
}

// ---- gate maps ----------------------------------------------------------------------------------

function gatePanel() {
  const section = addSection("gates", "Gate map",
    "Stronger colour means a higher score: the head needs the whole history. At the chosen sparsity, outlined "
    + "heads stay full and struck-out heads keep sink and recent tokens only. Point at a head.");
  const state = { map: 0, sparsity: 0.5 };
  const plot = element("div", { class: "plot" });
  const said = element("output");
  const value = element("span");
  const draw = () => {
    const { markup, kept } = gateMap(DATA.heads[state.map], state.sparsity);
    plot.innerHTML = markup;
    value.textContent = state.sparsity.toFixed(2);
    const total = DATA.heads[state.map].scores.flat().length;
    said.textContent = `${kept} of ${total} KV heads stay full`;
  };
  const slider = element("input", {
    type: "range", min: 0, max: 0.95, step: 0.05, value: state.sparsity,
    "aria-label": "sparsity", oninput: (event) => { state.sparsity = Number(event.target.value); draw(); },
  });
  const controls = element("div", { class: "controls" });
  if (DATA.heads.length > 1) {
    const options = DATA.heads.map((one, i) => [i, `${one.label} · ${one.model}`]);
    controls.append(choice("Scores", options, (index) => { state.map = Number(index); draw(); }));
  }
  controls.append(element("label", {}, "Sparsity", slider, value), said);
  const legend = element("div", { class: "scale", html: "score 0 <i></i> 1" });
  plot.addEventListener("pointermove", (event) => {
    const head = event.target.closest("rect.head");
    if (!head) {
      hideTip();
      return;
    }
    const { layer, head: number, rank, score } = head.dataset;
    const total = DATA.heads[state.map].scores.flat().length;
    const fate = head.classList.contains("full") ? "stays full" : "is local";
    showTip(`<b>layer ${layer}, KV head ${number}</b><br>score ${Number(score).toFixed(4)}, rank `
      + `${Number(rank) + 1} of ${total}<br>${fate} at sparsity ${state.sparsity.toFixed(2)}`,
    event.clientX, event.clientY);
  });
  plot.addEventListener("pointerleave", hideTip);
  draw();
  redraws.push(draw);
  section.append(element("div", { class: "panel" }, controls, plot, legend));
}

// ---- page ---------------------------------------------------------------------------------------

function runFacts() {
  const section = addSection("run", "Run", "Where and with what these figures were made.");
  const list = element("dl");
  const { versions, ...facts } = DATA.run;
  const shown = { ...facts, ...versions };
  for (const [name, fact] of Object.entries(shown)) {
    if (fact === "" || fact === null) continue;
    list.append(element("dt", {}, name.replaceAll("_", " ")), element("dd", {}, String(fact)));
  }
  section.append(list);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "Light page" : "Dark page";
  redraws.forEach((draw) => draw());
}

DATA.sections.forEach((one, place) => {
  const section = addSection(one.key, one.title, one.note);
  if (one.chart && one.records.length) section.append(chartPanel(one));
  const fits = one.records.length <= 12 || !one.chart;
  if (fits) section.append(table(one));
  else section.append(element("details", {}, element("summary", {}, `All ${one.records.length} rows`), table(one)));
  if (place === 0 && DATA.heads.length) gatePanel();
});
if (DATA.run) runFacts();
document.getElementById("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
