// Charts: Vega-Lite draws what the reader chooses. A page without script, and a printed one, names the
// files of matplotlib's figures instead.
"use strict";
const MOST_LINES = 8;  // methods that have a colour at once
const ABOUT_ONE_RATIO = 1.5;  // the largest ratio over the smallest where methods hold about as much
const FEW_CELLS = 64;  // a heatmap of so many cells has their numbers in it
const BLACK = "#000000";  // the exact cache's colour, which is the text's own in the dark
const BYTES = "";  // what scores are drawn against, beside the fields of records
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
    if (chart.kind !== "scores") return row;
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
  return isDark.matches ? { text: "#e4e8ed", line: "#343c47", soft: "#9aa6b4", ground: "#14181d" }
    : { text: "#1c2430", line: "#d9dde3", soft: "#5a6573", ground: "#ffffff" };
}
function tooltipOf(axis) {
  return [
    { field: "name", title: "method" }, { field: "at", title: "rate" },
    { field: "value", title: axis }, { field: "interval", title: "95 % interval" },
    { field: "n", title: "examples" }, { field: "ratio", title: "ratio" },
    { field: "held", title: "bytes held" },
  ];
}
function framed(spec) {  // a chart with what all charts share
  const { text, line } = inks();
  return {
    background: null, ...spec,
    config: {
      aria: false, mark: { aria: false }, view: { stroke: null }, font: "system-ui, sans-serif",
      axis: { aria: false, labelColor: text, titleColor: text, gridColor: line, domainColor: line, tickColor: line,
        titleFontWeight: "normal", titleFontSize: 12, labelFontSize: 12, titleLimit: 600, labelOverlap: true, labelPadding: 6 },
      legend: { aria: false, labelColor: text, titleColor: text, titleFontWeight: "normal", titleFontSize: 12, labelFontSize: 12 },
      header: { labelColor: text, labelFontSize: 12, titleColor: text, title: null },
    },
  };
}
const layered = (height, layer) => framed({
  width: "container", height, resolve: { scale: { color: "shared" } }, layer: layer.filter((part) => part.data.values.length),
});
const ofMethods = (methods, key) => ({ field: "name", type: "nominal", legend: null,
  scale: { domain: methods.map((method) => method.name), range: methods.map((method) => method[key] === BLACK ? inks().text : method[key]) } });
const POINT = { type: "point", filled: true, size: 90, opacity: 1, strokeWidth: 0.6 };
const INTERVAL = { type: "rule", strokeWidth: 2, opacity: 0.55 };
const withInterval = (rows) => rows.filter((row) => row.low !== null);
function exactOf(chart, rows) {  // where the exact cache is drawn as a line across: of differences at 0
  const isDifference = rows.some((row) => row.measure.startsWith("difference"));
  return isDifference ? [{ name: chart.baseline, mean: 0, value: "0", interval: "none" }]
    : rows.filter((row) => row.name === chart.baseline).slice(0, 1);
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
  const methods = chart.methods.filter((method) => shown.some((row) => row.name === method.name));
  const color = ofMethods(methods, "color");
  const x = { field: "mean", type: "quantitative", title: axis, scale: { zero: false }, axis: { tickCount: 8 } };
  const y = { field: "row", type: "nominal", sort: shown.map((row) => row.row),
    title: null, axis: { grid: true, labelLimit: 260, labelPadding: 10 } };
  const tooltip = tooltipOf(axis);
  return layered(24 * shown.length, [
    { data: { values: exactOf(chart, rows) }, mark: { type: "rule", strokeDash: [6, 4], color: text }, encoding: { x, tooltip } },
    { data: { values: withInterval(shown) }, mark: INTERVAL, encoding: { y, x: { ...x, field: "low" }, x2: { field: "high" }, color } },
    { data: { values: shown }, mark: { ...POINT, stroke: soft },
      encoding: { x, y, color, shape: ofMethods(methods, "shape"), tooltip } },
  ]);
}

function linesSpec(chart, rows, axis, by) {  // the measure against the ratio or a field, a line for each method
  const { text, soft } = inks();
  const ofBytes = by === BYTES;
  const isJoined = ofBytes || rows.every((row) => /^\d/.test(row.part));
  const shown = compressedOf(chart, rows);
  const names = coloured(chart, shown);
  const bright = (ofBytes ? shown : rows).filter((row) => names.has(row.name) || row.name === chart.baseline);
  const grey = shown.filter((row) => !names.has(row.name));
  const methods = chart.methods.filter((method) => bright.some((row) => row.name === method.name));
  const least = Math.min(...shown.map((row) => row.low ?? row.mean));
  const log = chart.lower && least > 0 && axis === chart.axis.score;
  const x = ofBytes ? { field: "ratio", type: "quantitative", title: "ratio: bytes held / bytes of the exact cache",
    scale: { type: "log", base: 2 }, axis: { format: ".2~r", labelSeparation: 8 } }
    : { field: "part", type: "ordinal", title: by, sort: distinct(rows, "part"),
      scale: { paddingInner: isJoined ? 0.8 : 0.2 }, axis: { labelAngle: 0, labelLimit: 120 } };
  const y = { field: "mean", type: "quantitative", title: axis, scale: log ? { type: "log", nice: false } : { zero: false } };
  const beside = ofBytes ? {} : { xOffset: { field: "name", sort: methods.map((method) => method.name) } };
  const color = ofMethods(methods, "color");
  const tooltip = tooltipOf(axis);
  const exact = exactOf(chart, rows).filter((row) => (ofBytes || row.value === "0") && !(log && row.mean <= 0));
  return layered(340, [
    { data: { values: exact }, mark: { type: "rule", strokeDash: [6, 4], color: text }, encoding: { y, tooltip } },
    { data: { values: ofBytes ? frontierOf(shown, chart.lower) : [] },
      mark: { type: "line", interpolate: "step-after", strokeDash: [2, 3], strokeWidth: 2, color: soft }, encoding: { x, y } },
    { data: { values: grey }, mark: { type: "point", filled: true, size: 30, color: soft, opacity: 0.6 }, encoding: { x, y, tooltip } },
    { data: { values: isJoined ? bright : [] }, mark: { type: "line", strokeWidth: 1.4 }, encoding: { x, y, color, ...beside } },
    { data: { values: withInterval(bright) }, mark: { ...INTERVAL, strokeWidth: 1 },
      encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color, ...beside } },
    { data: { values: bright }, mark: { ...POINT, stroke: soft },
      encoding: { x, y, color, shape: ofMethods(methods, "shape"), tooltip, ...beside } },
  ]);
}

function inLines(text, most) {  // words in lines of at most so many characters
  return text.split(" ").reduce((lines, word) => {
    const longer = lines[lines.length - 1] + " " + word;
    return longer.length <= most ? [...lines.slice(0, -1), longer.trim()] : [...lines, word];
  }, [""]);
}
function faceted(place, titles, most, least, xlabel, spec) {  // panels at least so wide, as many in a row as there is room for
  const width = Math.min(960, place.clientWidth) - 70;  // without the y axis
  const columns = Math.max(1, Math.min(most, titles.length, Math.floor(width / least)));
  return framed({
    ...spec.top, columns, spacing: 14,
    title: { text: inLines(xlabel, width / 7), orient: "bottom", anchor: "middle", fontSize: 12, fontWeight: "normal", color: inks().text },
    facet: { field: "title", type: "nominal", sort: titles, title: null, header: { labelExpr: "split(datum.label, '\\n')", labelFontSize: 11, labelLineHeight: 13 } },
    spec: spec.panel(Math.floor(width / columns) - 14),
  });
}

function panelsSpec(chart, place) {  // numbers with intervals against x, a panel for each title
  const { soft } = inks();
  const rows = rowsOf(chart).map((row) => ({ ...row, title: row.panel }));
  const shown = rows.filter((row) => row.name !== null && !hiddenMethods.has(row.name));
  if (shown.length === 0) return null;
  const guides = rows.filter((row) => row.name === null);
  const methods = chart.methods.filter((method) => shown.some((row) => row.name === method.name));
  const ends = shown.flatMap((row) => [row.mean, row.low, row.high]).filter((end) => end !== null && (!chart.log || end > 0));
  const domain = [Math.min(...ends), Math.max(...ends)];
  const x = chart.log ? { field: "x", type: "quantitative", title: null, scale: { type: "log", base: 2 }, axis: { format: ".4~r", labelSeparation: 8, tickCount: 5 } }
    : { field: "x", type: "ordinal", title: null, sort: chart.ticks, axis: { labelAngle: 0, labelLimit: 90, labelExpr: "split(datum.label, '\\n')" } };
  const y = { field: "mean", type: "quantitative", title: chart.ylabel, axis: { tickCount: 5 },
    scale: chart.log ? { type: "log", domain } : { domain, nice: true, zero: false } };
  const color = ofMethods(methods, "color");
  const beside = chart.log ? {} : { xOffset: { field: "line", sort: distinct(shown, "line") } };
  const tooltip = [{ field: "line", title: "method" }, { field: "x", title: chart.xlabel }, { field: "value", title: chart.ylabel },
    { field: "interval", title: chart.log ? "95 % interval" : "mean ± one standard deviation" }];
  const of = (test) => [{ filter: test }];
  const panel = (width) => ({
    width, height: Math.min(260, Math.max(170, width)),
    layer: [
      { transform: of("datum.name === null"), mark: { type: "line", clip: true, strokeDash: [6, 4], strokeWidth: 1, color: soft },
        encoding: { x, y, detail: { field: "line" } } },
      { transform: of(chart.log ? "datum.name !== null" : "false"), mark: { type: "line", strokeWidth: 1.4 },
        encoding: { x, y, color, detail: { field: "line" } } },
      { transform: of("datum.low !== null"), mark: { ...INTERVAL, strokeWidth: 1, clip: true },
        encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color, ...beside } },
      { transform: of("datum.name !== null"), mark: { ...POINT, size: 50, stroke: soft },
        encoding: { x, y, color, shape: ofMethods(methods, "shape"), tooltip, ...beside } },
    ],
  });
  return faceted(place, distinct(shown, "title"), 3, Math.max(135, 60 * chart.ticks.length), chart.xlabel, { top: { data: { values: [...guides, ...shown] } }, panel });
}

function heatmapSpec(chart, place) {  // mean scores by two fields, a panel for each method, one scale
  const { line, ground } = inks();
  const panels = chart.panels.filter((panel) => !hiddenMethods.has(panel.name));
  if (panels.length === 0) return null;
  const [low, high] = chart.limits;
  const cells = panels.flatMap(({ title, values }) => values.flatMap((row, j) => row.map((value, i) => ({
    title, x: chart.x[i], y: chart.y[j], value, text: value === null ? "" : high === 100 ? value.toFixed(0) : String(Number(value.toPrecision(2))),
  }))));
  const x = { field: "x", type: "ordinal", sort: chart.x, title: null };
  const y = { field: "y", type: "ordinal", sort: chart.y, title: chart.ylabel };
  const color = { field: "value", type: "quantitative", title: chart.axis, scale: { scheme: "viridis", domain: [low, high] },
    legend: { orient: "top", gradientLength: 160, gradientThickness: 10 } };
  const tooltip = [{ field: "title", title: "method" }, { field: "x", title: chart.xlabel }, { field: "y", title: chart.ylabel },
    { field: "text", title: chart.axis }];
  const ink = { value: "#111111", condition: { test: "datum.value < " + (low + high) / 2, value: "#fdfdfd" } };
  const cell = { type: "rect", stroke: ground, strokeWidth: 1 };
  const few = chart.x.length * chart.y.length <= FEW_CELLS;
  const longest = Math.max(...chart.x.map((name) => name.length));
  const panel = (width) => ({
    width, height: Math.min(24 * chart.y.length, 200),
    layer: [
      { transform: [{ filter: "datum.value === null" }], mark: { ...cell, color: line }, encoding: { x, y } },
      { transform: [{ filter: "datum.value !== null" }], mark: cell, encoding: { x, y, color, tooltip } },
      ...(few ? [{ transform: [{ filter: "datum.value !== null" }], mark: { type: "text", fontSize: 11 },
        encoding: { x, y, text: { field: "text" }, color: ink } }] : []),
    ],
  });
  x.axis = { labelAngle: longest > 4 ? -45 : 0, labelLimit: 90 };
  y.axis = { labelLimit: 90 };
  return faceted(place, panels.map(({ title }) => title), 4, 135, chart.xlabel, { top: { data: { values: cells }, resolve: { scale: { color: "shared" } } }, panel });
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

function drawn(place, spec) {  // Vega-Lite's picture of a specification; nothing of null
  if (spec === null) place.replaceChildren();
  else vegaEmbed(place, spec, { actions: false, renderer: "svg", ast: true, tooltip: { theme: isDark.matches ? "dark" : "light" } });
}
function canvasOf(place) {
  const canvas = document.createElement("div");
  canvas.className = "canvas";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", place.dataset.title + "; the numbers stand in the tables");
  return canvas;
}
function drawAlways(draw) {  // now, and after every change of methods, colours and room
  document.addEventListener("methods", draw);
  isDark.addEventListener("change", draw);
  addEventListener("resize", draw);
  draw();
}

function buildScores(place, chart) {
  const rows = rowsOf(chart);
  const controls = document.createElement("div");
  controls.className = "controls";
  const rates = distinct(rows, "rate").filter((rate) => rate !== null).sort((a, b) => b - a);
  const rateChoices = rates.map((rate) => [String(rate), rateText(rate, rows)]);
  const rate = chooser(controls, "rate", rates.length > 1 ? [["", "all"], ...rateChoices] : rateChoices);
  const measure = chooser(controls, "measure", distinct(rows, "measure").map((name) => [name, name]));
  const split = rows.filter((row) => row.part !== chart.all);
  const fields = distinct(split, "by").filter((by) => distinct(split.filter((row) => row.by === by), "part").length > 1);
  const against = chooser(controls, "against", [...(chart.memory ? [[BYTES, "bytes held"]] : []), ...fields.map((by) => [by, by])]);
  const parts = [chart.all, ...new Set(split.map((row) => row.by + " " + row.part))];
  const part = chooser(controls, "examples", parts.map((name) => [name, name]));
  const partLabel = part.parentNode;
  const canvas = canvasOf(place);
  const told = document.createElement("output");
  told.className = "soft";
  place.prepend(controls, canvas, legendOf(chart), told);
  const draw = () => {
    const by = against.value;
    const lowest = by !== BYTES && rate.value === "" && rates.length ? String(rates[rates.length - 1]) : rate.value;
    const wanted = rows.filter((row) => row.measure === measure.value && !hiddenMethods.has(row.name)
      && (by === BYTES ? row.ratio !== null && (row.part === chart.all ? row.part : row.by + " " + row.part) === part.value
        : row.by === by && row.part !== chart.all)
      && (lowest === "" || row.rate === null || String(row.rate) === lowest));
    if (partLabel) partLabel.hidden = by !== BYTES;
    const compressed = new Set(wanted.map((row) => row.name).filter((name) => name !== chart.baseline));
    const inRows = by === BYTES && compressed.size > 0 && holdAsMuch(chart, wanted);
    const nothing = by === BYTES ? compressed.size === 0 : wanted.length === 0;
    const notes = [];
    if (nothing) notes.push("No such numbers: choose others, or show a method.");
    if (by !== BYTES && lowest !== rate.value) notes.push("At rate " + lowest + ", the lowest.");
    if (inRows) notes.push("All hold about as many bytes (the ratio stands behind the name): a row for each method, the best first; dashed: exact.");
    else if (compressed.size > MOST_LINES) {
      notes.push("In colour: " + MOST_LINES + " of " + compressed.size + " methods shown: BalanceKV, SubGen and H2O before others, then those of the best mean over all points. Grey points say on hover what they are.");
    }
    told.textContent = notes.join(" ");
    const axis = measure.value.startsWith("difference") ? measure.value + ", " + chart.axis.score : chart.axis.score;
    drawn(canvas, nothing ? null : inRows ? rowsSpec(chart, wanted, axis) : linesSpec(chart, wanted, axis, by));
  };
  for (const select of [rate, measure, against, part]) select.addEventListener("change", draw);
  drawAlways(draw);
}

function buildPanels(place, chart) {
  const canvas = canvasOf(place);
  const isHeatmap = chart.kind === "heatmap";  // its panels bear the methods' names
  place.prepend(canvas, ...(isHeatmap ? [] : [legendOf(chart)]));
  const specOf = isHeatmap ? heatmapSpec : panelsSpec;
  drawAlways(() => drawn(canvas, specOf(chart, place)));
}

function legendOf(chart) {
  const legend = document.createElement("div");
  legend.className = "legend";
  legend.setAttribute("role", "group");
  legend.setAttribute("aria-label", "Methods, shown or hidden everywhere on this page");
  legend.append(...chart.methods.map(methodButton), wholeButton("show all", false, chart), wholeButton("hide all", true, chart));
  return legend;
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
function showMethods() {  // everywhere: charts, legends, rows of tables, kept tokens
  for (const button of document.querySelectorAll(".legend button[data-name]")) {
    button.setAttribute("aria-pressed", String(!hiddenMethods.has(button.dataset.name)));
  }
  for (const one of document.querySelectorAll("tr[data-name], .kept [data-name]")) {
    one.classList.toggle("off", hiddenMethods.has(one.dataset.name));
  }
  document.dispatchEvent(new Event("methods"));
}

for (const place of document.querySelectorAll(".chart")) {
  const chart = JSON.parse(place.querySelector("script").textContent);
  place.hidden = false;
  (chart.kind === "scores" ? buildScores : buildPanels)(place, chart);
}
