// Sorting of tables and filtering of answers; the page is complete without it.
"use strict";
const SIZES = { B: 1, KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3 };
function numberOf(text) {  // what a cell begins with: "1,234", "−3.1 [−5.0, −1.2]", "<0.001", "858 MiB"
  const plain = text.replace(/−/g, "-").replace(/,(?=\d{3})/g, "").replace("∞", "1e999");
  const found = plain.match(/^[<+]?\s*(-?\d[\d.]*(?:e[+-]?\d+)?)\s*([KMG]?i?B)?/i);
  return found ? Number(found[1]) * (SIZES[found[2]] ?? 1) : NaN;
}
function sortTable(header) {
  const index = Array.from(header.parentNode.children).indexOf(header);
  const down = header.getAttribute("aria-sort") !== "descending";
  const key = (row) => row.cells[index].textContent.trim().replace(/^–$/, "");
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === "" || y === "") return (x === "") - (y === "");  // what is missing stays last
    const [p, q] = [numberOf(x), numberOf(y)];
    const order = isNaN(p) || isNaN(q) ? x.localeCompare(y) : p - q;
    return down ? -order : order;
  };
  for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  for (const body of header.closest("table").tBodies) {  // each group of rows by itself
    const rows = Array.from(body.rows).filter((row) => !row.classList.contains("part"));
    body.append(...rows.sort(compare));
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
for (const section of document.querySelectorAll(".predictions")) {
  section.addEventListener("change", () => filterExamples(section));
}
