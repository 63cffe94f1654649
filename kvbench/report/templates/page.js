// Sorting of tables, choice of rates and filtering of answers; the page is complete without it.
"use strict";
const TOGETHER = "together";

function keyOf(cell) {  // what a cell is sorted by: its number, or its text; null where it is empty
  if (cell.dataset.number !== undefined) return Number(cell.dataset.number);
  const text = cell.textContent.trim();
  return text === "" || text === "–" ? null : text;
}
function sortTable(header) {
  const table = header.closest("table");
  const index = Array.from(header.parentNode.children).indexOf(header);
  const cells = Array.from(table.tBodies).flatMap((body) => Array.from(body.rows))
    .filter((row) => !row.classList.contains("part")).map((row) => keyOf(row.cells[index]));
  const isText = cells.every((key) => typeof key !== "number");
  const before = header.getAttribute("aria-sort");
  const first = isText ? "ascending" : "descending";  // names A to Z, numbers from the largest
  const second = isText ? "descending" : "ascending";
  const order = before === first ? second : first;
  const sign = order === "ascending" ? 1 : -1;
  const compare = (a, b) => {
    const [x, y] = [keyOf(a.cells[index]), keyOf(b.cells[index])];
    if (x === null || y === null) return (x === null) - (y === null);  // what is missing stays last
    const bothNumbers = typeof x === "number" && typeof y === "number";
    return sign * (bothNumbers ? x - y : String(x).localeCompare(String(y)));
  };
  for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", order);
  for (const body of table.tBodies) {  // each group of rows by itself
    const rows = Array.from(body.rows).filter((row) => !row.classList.contains("part"));
    body.append(...rows.sort(compare));
  }
}
function chooseGroups(select, table) {  // one group of rows, all of them, or all rows in one group
  const bodies = Array.from(table.tBodies);
  for (const row of table.querySelectorAll("tr[data-body]")) bodies[row.dataset.body].append(row);
  for (const [i, body] of bodies.entries()) {
    for (const row of body.rows) row.dataset.body = i;
    const heading = body.dataset.group;
    body.hidden = heading !== "" && select.value !== "" && select.value !== TOGETHER && heading !== select.value;
  }
  table.classList.toggle(TOGETHER, select.value === TOGETHER);
  if (select.value === TOGETHER) {
    for (const body of bodies.slice(1)) {
      bodies[0].append(...Array.from(body.rows).filter((row) => !row.classList.contains("part")));
    }
  }
  const sorted = table.querySelector("th[aria-sort]");
  if (sorted) { sorted.removeAttribute("aria-sort"); }
}
function offerGroups(table) {
  const headings = Array.from(table.tBodies, (body) => body.dataset.group ?? "").filter((text) => text !== "");
  if (headings.length < 2 || !headings.every((text) => text.startsWith("rate "))) return;
  const label = document.createElement("label");
  label.className = "controls";
  const select = document.createElement("select");
  const choices = [["", "each rate"], ...headings.map((text) => [text, text]), [TOGETHER, "all rates in one list"]];
  for (const [value, text] of choices) select.append(new Option(text, value));
  label.append("show ", select);
  table.closest(".scroll").before(label);
  select.addEventListener("change", () => chooseGroups(select, table));
  if (table.dataset.kind === "overview") {  // the leaderboard is read at one rate
    select.value = headings[Math.floor((headings.length - 1) / 2)];
    chooseGroups(select, table);
  }
}
function filterExamples(section) {
  const wanted = Array.from(section.querySelectorAll("select")).filter((s) => s.value !== "");
  const disagree = section.querySelector("input[type=checkbox]").checked;
  let shown = 0;
  for (const card of section.querySelectorAll(".example")) {
    const fields = JSON.parse(card.dataset.fields);
    card.hidden = !(wanted.every((s) => fields[s.name] === s.value)
      && (!disagree || card.dataset.disagree === "yes"));
    shown += !card.hidden;
  }
  section.querySelector("output").textContent = shown + " shown";
}
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sortTable(button.parentNode));
}
for (const table of document.querySelectorAll("table")) offerGroups(table);
for (const section of document.querySelectorAll(".predictions")) {
  section.addEventListener("change", () => filterExamples(section));
}
function openTarget() {  // a link to what is folded opens it
  const target = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
  if (target?.closest("details")) { target.closest("details").open = true; target.scrollIntoView(); }
}
addEventListener("hashchange", openTarget);
openTarget();
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
