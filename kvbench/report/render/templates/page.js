// Sorting of tables and filtering of predictions; the page is complete without it.
"use strict";
const SIZES = { B: 1, KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3 };
function numberOf(text) {  // what a cell begins with: "1,234", "−3.1 [−5.0, −1.2]", "<0.001", "858 MiB"
  const plain = text.replace(/−/g, "-").replace(/,(?=\d{3})/g, "").replace("∞", "1e999");
  const found = plain.match(/^[<+]?\s*(-?\d[\d.]*(?:e[+-]?\d+)?)\s*([KMG]?i?B)?/i);
  return found ? Number(found[1]) * (SIZES[found[2]] ?? 1) : NaN;
}
function sortTable(button) {
  const header = button.closest("th");
  const table = header.closest("table");
  const index = Array.from(header.parentNode.children).indexOf(header);
  const down = header.getAttribute("aria-sort") === "descending";
  const key = (row) => {
    const text = row.cells[index].dataset.sort ?? row.cells[index].textContent.trim();
    return text === "–" ? "" : text;
  };
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === "" || y === "") return (x === "") - (y === "");  // what is missing stays last
    const [p, q] = [numberOf(x), numberOf(y)];
    const order = isNaN(p) || isNaN(q) ? x.localeCompare(y) : p === q ? 0 : p - q;
    return down ? order : -order;
  };
  for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", down ? "ascending" : "descending");
  for (const body of table.tBodies) {  // each group of rows by itself, its heading on top
    const rows = Array.from(body.rows);
    const heading = rows.filter((row) => row.classList.contains("part"));
    const others = rows.filter((row) => !row.classList.contains("part"));
    body.append(...heading, ...others.sort(compare));
  }
}
function filterExamples(section) {
  const wanted = Array.from(section.querySelectorAll("select")).filter((s) => s.value !== "");
  const disagree = section.querySelector("input[type=checkbox]").checked;
  let shown = 0;
  for (const card of section.querySelectorAll(".example")) {
    const fields = JSON.parse(card.dataset.fields);
    const keep = wanted.every((s) => fields[s.name] === s.value)
      && (!disagree || card.dataset.disagree === "yes");
    card.hidden = !keep;
    shown += keep;
  }
  section.querySelector("output").textContent = shown + " shown";
}
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sortTable(button));
}
for (const section of document.querySelectorAll(".predictions")) {
  section.addEventListener("change", () => filterExamples(section));
}
