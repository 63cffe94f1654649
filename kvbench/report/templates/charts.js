// Interactive figures: Vega-Lite draws the rows that the reader chooses. A page without script, and a
// printed one, names the files of matplotlib's figures instead.
"use strict";
const MOST_LINES = 8;  // methods that have a colour at once
const ABOUT_ONE_RATIO = 1.5;  // the largest ratio over the smallest where methods hold about as much
const hiddenMethods = new Set();
const isDark = matchMedia("(prefers-color-scheme: dark)");

const digits = (value) => value === null ? "–" : String(Number(value.toPrecision(3)));
function sizeText(bytes) {
  if (bytes === null) return "–";
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return digits(bytes) + " " + units[unit];
}

function rowsOf(chart) {  // each row as an object, with the texts that a pointer over it shows
  return chart.rows.map((values) => {
    const row = Object.fromEntries(chart.fields.map((field, i) => [field, values[i]]));
    row.value = digits(row.mean);
    row.interval = row.low === null ? "none" : "[" + digits(row.low) + ", " + digits(row.high) + "]";
    row.held = sizeText(row.bytes);
    row.at = row.rate === null ? "none" : String(row.rate);
    return row;
  });
}

function frontierOf(rows, lower) {  // the points than which no other has fewer bytes and a better mean
  const sign = lower ? -1 : 1;
  const ordered = [...rows].sort((a, b) => a.ratio - b.ratio || sign * (b.mean - a.mean));
  let best = -Infinity;
  return ordered.filter((row) => sign * row.mean > best && ((best = sign * row.mean), true));
}

function coloured(chart, rows) {  // names of the papers' methods, then those of the best means over all rows
  const means = new Map();
  for (const row of rows) means.set(row.name, [...(means.get(row.name) ?? []), row.mean]);
  const sign = chart.lower ? 1 : -1;
  const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const first = new Set(chart.methods.filter((method) => method.first).map((method) => method.name));
  const ranked = [...means].sort((a, b) => first.has(b[0]) - first.has(a[0])
    || sign * (average(a[1]) - average(b[1])));
  return new Set(ranked.slice(0, MOST_LINES).map(([name]) => name));
}

function inks() {  // text, lines and what is less important, in the page's own colours
  return isDark.matches ? { text: "#e4e8ed", line: "#343c47", soft: "#9aa6b4" }
    : { text: "#1c2430", line: "#d9dde3", soft: "#5a6573" };
}
function tooltipOf(axis) {
  return [
    { field: "name", title: "method" }, { field: "at", title: "rate" },
    { field: "value", title: axis }, { field: "interval", title: "95 % interval" },
    { field: "n", title: "examples" }, { field: "ratio", title: "ratio" },
    { field: "held", title: "bytes held" },
  ];
}
function framed(spec) {  // a figure's layers with what all figures share
  const { text, line } = inks();
  return {
    width: "container", background: null, resolve: { scale: { color: "shared" } },
    ...spec, layer: spec.layer.filter((part) => part.data.values.length),
    config: {
      aria: false, mark: { aria: false }, view: { stroke: null }, font: "system-ui, sans-serif",
      axis: { aria: false, labelColor: text, titleColor: text, gridColor: line, domainColor: line, tickColor: line,
        titleFontWeight: "normal", titleFontSize: 12, labelFontSize: 12, titleLimit: 600 },
    },
  };
}
const compressedOf = (chart, rows) => rows.filter((row) => row.name !== chart.baseline);
function holdAsMuch(chart, rows) {  // whether each method has one point, and all are of about one ratio
  const shown = compressedOf(chart, rows);
  const ratios = shown.map((row) => row.ratio);
  return new Set(shown.map((row) => row.name)).size === shown.length
    && Math.max(...ratios) <= ABOUT_ONE_RATIO * Math.min(...ratios);
}

function rowsSpec(chart, rows, axis) {  // a row for each method, the best first
  const { text, soft } = inks();
  const sign = chart.lower ? 1 : -1;
  const named = (row) => ({ ...row, row: row.name + "  (" + row.ratio.toPrecision(2) + ")" });
  const shown = compressedOf(chart, rows).sort((a, b) => sign * (a.mean - b.mean)).map(named);
  const exact = rows.filter((row) => row.name === chart.baseline).slice(0, 1);
  const methods = chart.methods.filter((method) => shown.some((row) => row.name === method.name));
  const scale = (key) => ({ domain: methods.map((m) => m.name), range: methods.map((m) => m[key]) });
  const color = { field: "name", type: "nominal", legend: null, scale: scale("color") };
  const shape = { field: "name", type: "nominal", legend: null, scale: scale("shape") };
  const x = { field: "mean", type: "quantitative", title: axis, scale: { zero: false } };
  const y = { field: "row", type: "nominal", sort: shown.map((row) => row.row),
    title: null, axis: { grid: true, labelLimit: 260 } };
  const tooltip = tooltipOf(axis);
  return framed({
    height: 24 * shown.length,
    layer: [
      { data: { values: exact }, mark: { type: "rule", strokeDash: [6, 4], color: text }, encoding: { x, tooltip } },
      { data: { values: shown.filter((row) => row.low !== null) }, mark: { type: "rule", strokeWidth: 2, opacity: 0.55 },
        encoding: { y, x: { ...x, field: "low" }, x2: { field: "high" }, color } },
      { data: { values: shown }, mark: { type: "point", filled: true, size: 90, opacity: 1, stroke: soft, strokeWidth: 0.6 },
        encoding: { x, y, color, shape, tooltip } },
    ],
  });
}

function ratioSpec(chart, rows, axis) {  // the measure against the ratio, a line for each method
  const { text, soft } = inks();
  const shown = compressedOf(chart, rows);
  const names = coloured(chart, shown);
  const bright = shown.filter((row) => names.has(row.name));
  const grey = shown.filter((row) => !names.has(row.name));
  const methods = chart.methods.filter((method) => names.has(method.name));
  const tooltip = tooltipOf(axis);
  const least = Math.min(...shown.map((row) => row.low ?? row.mean));
  const log = chart.lower && least > 0 && axis === chart.axis.score;
  const x = { field: "ratio", type: "quantitative", title: "ratio: bytes held / bytes of the exact cache",
    scale: { type: "log", base: 2 }, axis: { format: ".2~r", labelSeparation: 8 } };
  const y = { field: "mean", type: "quantitative", title: axis,
    scale: log ? { type: "log", nice: false } : { zero: false } };
  const color = { field: "name", type: "nominal", legend: null,
    scale: { domain: methods.map((m) => m.name), range: methods.map((m) => m.color) } };
  const shape = { field: "name", type: "nominal", legend: null,
    scale: { domain: methods.map((m) => m.name), range: methods.map((m) => m.shape) } };
  const exact = rows.filter((row) => row.name === chart.baseline && !(log && row.mean <= 0)).slice(0, 1);
  const layer = [
    { data: { values: exact }, mark: { type: "rule", strokeDash: [6, 4], color: text },
      encoding: { y: { ...y, field: "mean" }, tooltip } },
    { data: { values: frontierOf(shown, chart.lower) },
      mark: { type: "line", interpolate: "step-after", strokeDash: [2, 3], strokeWidth: 2, color: soft },
      encoding: { x, y } },
    { data: { values: grey }, mark: { type: "point", filled: true, size: 30, color: soft, opacity: 0.6 },
      encoding: { x, y, tooltip } },
    { data: { values: bright }, mark: { type: "line", strokeWidth: 1.4 }, encoding: { x, y, color } },
    { data: { values: bright.filter((row) => row.low !== null) }, mark: { type: "rule", opacity: 0.55 },
      encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color } },
    { data: { values: bright }, mark: { type: "point", filled: true, size: 90, opacity: 1, stroke: soft, strokeWidth: 0.6 },
      encoding: { x, y, color, shape, tooltip } },
  ];
  return framed({ height: 340, layer });
}

function option(select, value, text) {
  const made = document.createElement("option");
  made.value = value;
  made.textContent = text;
  select.append(made);
}
function chooser(place, name, values) {  // a select, where there is something to choose
  const select = document.createElement("select");
  for (const [value, text] of values) option(select, value, text);
  if (values.length > 1) {
    const label = document.createElement("label");
    label.append(name + " ", select);
    place.append(label);
  }
  return select;
}
function rateText(rate, rows) {  // a rate with the ratios that were measured at it: "0.25, ratio 0.28 to 0.31"
  const ratios = rows.filter((row) => row.rate === rate).map((row) => row.ratio);
  const [low, high] = [Math.min(...ratios), Math.max(...ratios)].map((ratio) => ratio.toPrecision(2));
  return rate + ", ratio " + (low === high ? low : low + " to " + high);
}
const distinct = (rows, field) => [...new Set(rows.map((row) => row[field]))];

function buildChart(place, chart) {
  const rows = rowsOf(chart);
  const controls = document.createElement("div");
  controls.className = "controls";
  const rates = distinct(rows, "rate").filter((rate) => rate !== null).sort((a, b) => b - a);
  const rateChoices = rates.map((rate) => [String(rate), rateText(rate, rows)]);
  const rate = chooser(controls, "rate", rates.length > 1 ? [["", "all"], ...rateChoices] : rateChoices);
  const measure = chooser(controls, "measure", distinct(rows, "measure").map((name) => [name, name]));
  const parts = distinct(rows, "part").sort((a, b) => (b === chart.all) - (a === chart.all));
  const part = chooser(controls, "examples", parts.map((name) => [name, name]));
  const canvas = document.createElement("div");
  canvas.className = "canvas";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", place.dataset.title + "; the numbers stand in the tables");
  const told = document.createElement("output");
  told.className = "soft";
  const legend = document.createElement("div");
  legend.className = "legend";
  legend.setAttribute("role", "group");
  legend.setAttribute("aria-label", "Methods, shown or hidden everywhere on this page");
  place.append(controls, canvas, legend, told);
  for (const method of chart.methods) legend.append(methodButton(method));
  legend.append(wholeButton("show all", false, chart), wholeButton("hide all", true, chart));
  const draw = () => {
    const wanted = rows.filter((row) => row.part === part.value && row.measure === measure.value
      && (rate.value === "" || row.rate === null || String(row.rate) === rate.value)
      && !hiddenMethods.has(row.name));
    const compressed = new Set(wanted.map((row) => row.name).filter((name) => name !== chart.baseline));
    const inRows = compressed.size > 0 && holdAsMuch(chart, wanted);
    told.textContent = compressed.size === 0 ? "No such numbers: choose others, or show a method."
      : inRows ? "All hold about as many bytes (the ratio stands behind the name): a row for each method, the best first; dashed: exact."
      : compressed.size > MOST_LINES ? "In colour: " + MOST_LINES + " of " + compressed.size + " methods shown: BalanceKV, SubGen and H2O before others, then those of the best mean over all points. Grey points say on hover what they are."
      : "";
    const axis = measure.value.startsWith("difference") ? measure.value + ", " + chart.axis.score : chart.axis.score;
    if (compressed.size === 0) { canvas.replaceChildren(); return; }
    vegaEmbed(canvas, (inRows ? rowsSpec : ratioSpec)(chart, wanted, axis), { actions: false, renderer: "svg", ast: true, tooltip: { theme: isDark.matches ? "dark" : "light" } });
  };
  for (const select of [rate, measure, part]) select.addEventListener("change", draw);
  document.addEventListener("methods", draw);
  isDark.addEventListener("change", draw);
  draw();
}

function methodButton(method) {
  const button = document.createElement("button");
  button.type = "button";
  button.dataset.name = method.name;
  button.setAttribute("aria-pressed", "true");
  const chip = document.createElement("span");
  chip.className = "chip";
  chip.style.setProperty("--c", method.color);
  button.append(chip, method.name);
  button.addEventListener("click", () => {
    if (!hiddenMethods.delete(method.name)) hiddenMethods.add(method.name);
    showMethods();
  });
  return button;
}
function wholeButton(text, hides, chart) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.className = "plain";
  button.addEventListener("click", () => {
    hiddenMethods.clear();
    if (hides) for (const method of chart.methods) hiddenMethods.add(method.name);
    showMethods();
  });
  return button;
}
function showMethods() {  // everywhere: figures, legends, rows of tables
  for (const button of document.querySelectorAll(".legend button[data-name]")) {
    button.setAttribute("aria-pressed", String(!hiddenMethods.has(button.dataset.name)));
  }
  for (const row of document.querySelectorAll("tr[data-name]")) {
    row.classList.toggle("off", hiddenMethods.has(row.dataset.name));
  }
  document.dispatchEvent(new Event("methods"));
}

const charts = document.getElementById("charts");
if (charts && window.vegaEmbed) {
  const all = JSON.parse(charts.textContent);
  for (const place of document.querySelectorAll(".chart")) buildChart(place, all[place.dataset.chart]);
}
