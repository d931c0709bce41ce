"use strict";
// Line charts and gate maps as inline SVG. Markup is built as text and parsed by the page, which
// gives SVG elements their namespace without naming it here.

const escapeText = (value) =>
  String(value).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

function formatNumber(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString("en");
  return value.toFixed(3);
}

function formatBytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) {
    value /= 1024;
    place += 1;
  }
  return `${value.toFixed(place && value < 100 ? 1 : 0)} ${units[place]}`;
}

const isBytes = (column) => /bytes/.test(column);
const formatValue = (column, value) =>
  isBytes(column) && typeof value === "number" ? formatBytes(value) : formatNumber(value);

// ---- tooltip ------------------------------------------------------------------------------------

const tip = document.getElementById("tip");

function showTip(markup, x, y) {
  tip.innerHTML = markup;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > window.innerWidth ? x - 16 - box.width : x + 16;
  const top = Math.min(y + 12, window.innerHeight - box.height - 8);
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

function hideTip() {
  tip.hidden = true;
}

// ---- marks --------------------------------------------------------------------------------------

const isDark = () => document.documentElement.dataset.theme === "dark";
const colorOf = (style) => (isDark() ? style.dark : style.light);

function mark(style, x, y) {
  const color = colorOf(style);
  const at = (points) => points.map(([dx, dy]) => `${x + dx},${y + dy}`).join(" ");
  const polygon = (points) => `<polygon points="${at(points)}" fill="${color}"/>`;
  switch (style.marker) {
    case "square":
      return polygon([[-4, -4], [4, -4], [4, 4], [-4, 4]]);
    case "triangle":
      return polygon([[0, -5], [5, 4], [-5, 4]]);
    case "diamond":
      return polygon([[0, -5.5], [5.5, 0], [0, 5.5], [-5.5, 0]]);
    case "cross":
      return `<path d="M${x - 4},${y - 4}l8,8m0,-8l-8,8" stroke="${color}" stroke-width="2.5"/>`;
    case "plus":
      return `<path d="M${x - 5},${y}h10m-5,-5v10" stroke="${color}" stroke-width="2.5"/>`;
    case "none":
      return "";
    default:
      return `<circle cx="${x}" cy="${y}" r="4.2" fill="${color}"/>`;
  }
}

function swatch(style) {
  const line = `<line x1="0" x2="22" y1="6" y2="6" stroke="${colorOf(style)}" stroke-width="2"
    stroke-dasharray="${style.dash}"/>`;
  return `<svg viewBox="0 0 22 12" aria-hidden="true">${line}${mark(style, 11, 6)}</svg>`;
}

// ---- axes ---------------------------------------------------------------------------------------

function ticks(low, high, count) {
  const span = high - low || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) {
    found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  }
  return found;
}

const tickLabel = (column, value) =>
  isBytes(column) ? formatBytes(value) : String(Number(value.toPrecision(6)));

// ---- line chart ---------------------------------------------------------------------------------

const SIZE = { width: 960, height: 400, left: 62, right: 16, top: 14, bottom: 50 };

function extent(rows, chart, x, names) {
  const shown = rows.filter((row) => names.has(String(row[chart.series])));
  const floating = shown.filter((row) => x !== chart.x || !chart.flat.includes(row[chart.series]));
  const xs = floating.map((row) => row[x]).filter((value) => typeof value === "number");
  const ys = shown.flatMap((row) => [row[chart.y], row[chart.low], row[chart.high]])
    .filter((value) => typeof value === "number");
  const isShare = chart.y === "accuracy";
  const yLow = isShare ? 0 : Math.min(0, ...ys);
  const yHigh = isShare ? 1 : Math.max(...ys, yLow + 1e-9);
  const xLow = xs.length ? Math.min(...xs) : 0;
  const xHigh = xs.length ? Math.max(...xs) : 1;
  const pad = (xHigh - xLow || 0.2) * 0.06;
  return { xLow: xLow - pad, xHigh: xHigh + pad, yLow, yHigh };
}

/** SVG markup of a chart and what a pointer needs to find its points. */
function lineChart(rows, chart, styles, names, x) {
  const range = extent(rows, chart, x, names);
  const { width, height, left, right, top, bottom } = SIZE;
  const toX = (v) => left + ((v - range.xLow) / (range.xHigh - range.xLow)) * (width - left - right);
  const toY = (v) =>
    height - bottom - ((v - range.yLow) / (range.yHigh - range.yLow)) * (height - top - bottom);
  let out = "";
  for (const value of ticks(range.yLow, range.yHigh, 5)) {
    const y = toY(value);
    out += `<line class="grid" x1="${left}" x2="${width - right}" y1="${y}" y2="${y}"/>`;
    out += `<text x="${left - 8}" y="${y + 4}" text-anchor="end">${tickLabel(chart.y, value)}</text>`;
  }
  for (const value of ticks(range.xLow, range.xHigh, 8)) {
    const at = toX(value);
    out += `<line class="axis" x1="${at}" x2="${at}" y1="${height - bottom}" y2="${height - bottom + 5}"/>`;
    out += `<text x="${at}" y="${height - bottom + 19}" text-anchor="middle">${tickLabel(x, value)}</text>`;
  }
  const xTitle = x === chart.x ? chart.x_label || x : "measured KV bytes per sequence";
  out += `<line class="axis" x1="${left}" x2="${width - right}" y1="${height - bottom}" y2="${height - bottom}"/>`;
  out += `<text x="${(left + width - right) / 2}" y="${height - 8}" text-anchor="middle">${escapeText(xTitle)}</text>`;
  out += `<text transform="translate(14 ${(top + height - bottom) / 2}) rotate(-90)" text-anchor="middle">${escapeText(chart.y_label || chart.y)}</text>`;
  const points = [];
  const floating = [...names].filter((name) => x !== chart.x || !chart.flat.includes(name));
  for (const name of names) {
    const own = rows.filter((row) => String(row[chart.series]) === name);
    // lines share x values: a small shift keeps their intervals apart
    const shift = x === chart.x ? (floating.indexOf(name) - (floating.length - 1) / 2) * 3 : 0;
    out += drawSeries(own, chart, styles[name], x, (v) => toX(v) + shift, toY, [toX(range.xLow), toX(range.xHigh)], points);
  }
  out += '<g class="hover"></g>';
  const markup = `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${escapeText(chart.y)} over ${escapeText(x)}">${out}</svg>`;
  return { markup, points };
}

function drawSeries(rows, chart, style, x, toX, toY, [from, to], points) {
  const color = colorOf(style);
  const usable = rows.filter((row) => typeof row[chart.y] === "number");
  if (!usable.length) return "";
  if (x === chart.x && chart.flat.includes(usable[0][chart.series])) {
    const row = usable[0];
    const y = toY(row[chart.y]);
    let out = "";
    if (chart.low && typeof row[chart.low] === "number") {
      const top = toY(row[chart.high]);
      out += `<rect x="${from}" width="${to - from}" y="${top}" height="${toY(row[chart.low]) - top}" fill="${color}" opacity=".12"/>`;
    }
    points.push({ row, x: null, y });
    return `${out}<line x1="${from}" x2="${to}" y1="${y}" y2="${y}" stroke="${color}" stroke-width="1.8" stroke-dasharray="${style.dash}"/>`;
  }
  const sorted = usable.filter((row) => typeof row[x] === "number").sort((a, b) => a[x] - b[x]);
  const path = sorted.map((row) => `${toX(row[x])},${toY(row[chart.y])}`).join(" ");
  let out = `<polyline points="${path}" fill="none" stroke="${color}" stroke-width="2" stroke-dasharray="${style.dash}"/>`;
  const dot = style.marker === "none" ? { ...style, marker: "circle" } : style;
  for (const row of sorted) {
    const at = toX(row[x]);
    if (chart.low && typeof row[chart.low] === "number") {
      const [low, high] = [toY(row[chart.low]), toY(row[chart.high])];
      out += `<path d="M${at - 4},${low}h8m-4,0V${high}m-4,0h8" stroke="${color}" fill="none" stroke-width="1.2" opacity=".75"/>`;
    }
    if (chart.marks) out += mark(dot, at, toY(row[chart.y]));
    points.push({ row, x: at, y: toY(row[chart.y]) });
  }
  return out;
}

// ---- gate map -----------------------------------------------------------------------------------

/** Heads by score, best first; ties go to the lower layer, then the lower head. */
function ranking(scores) {
  const heads = scores.flatMap((row, layer) => row.map((score, head) => ({ layer, head, score })));
  const place = (one) => one.layer * scores[0].length + one.head;
  heads.sort((a, b) => b.score - a.score || place(a) - place(b));
  return heads;
}

const fullCount = (heads, sparsity) => Math.floor((1 - sparsity) * heads + 0.5 + 1e-9);

function gateMap(map, sparsity) {
  const layers = map.scores.length;
  const heads = map.scores[0].length;
  const cell = Math.max(18, Math.min(44, Math.floor(860 / layers)));
  const ranks = new Map(ranking(map.scores).map((one, i) => [`${one.layer}/${one.head}`, i]));
  const kept = fullCount(layers * heads, sparsity);
  const [left, top] = [56, 6];
  let out = "";
  map.scores.forEach((row, layer) => row.forEach((score, head) => {
    const [x, y] = [left + layer * cell, top + head * cell];
    const rank = ranks.get(`${layer}/${head}`);
    const full = rank < kept;
    out += `<rect class="head${full ? " full" : ""}" tabindex="-1" x="${x + 1.5}" y="${y + 1.5}" width="${cell - 3}" height="${cell - 3}" rx="2" fill-opacity="${0.04 + 0.96 * score}" data-layer="${layer}" data-head="${head}" data-rank="${rank}" data-score="${score}"/>`;
    if (!full) out += `<path class="cut" d="M${x + 4},${y + cell - 4}L${x + cell - 4},${y + 4}"/>`;
  }));
  const every = Math.ceil(layers / 18);
  for (let layer = 0; layer < layers; layer += every) {
    out += `<text x="${left + (layer + 0.5) * cell}" y="${top + heads * cell + 16}" text-anchor="middle">${layer}</text>`;
  }
  for (let head = 0; head < heads; head += 1) {
    out += `<text x="${left - 8}" y="${top + (head + 0.5) * cell + 4}" text-anchor="end">${head}</text>`;
  }
  out += `<text x="${left + (layers * cell) / 2}" y="${top + heads * cell + 36}" text-anchor="middle">layer</text>`;
  out += `<text transform="translate(16 ${top + (heads * cell) / 2}) rotate(-90)" text-anchor="middle">KV head</text>`;
  const [width, height] = [left + layers * cell + 6, top + heads * cell + 42];
  return { markup: `<svg viewBox="0 0 ${width} ${height}" style="max-width:${width}px" role="img" aria-label="scores of ${layers * heads} KV heads">${out}</svg>`, kept };
}
