// Sorting of tables, filtering of predictions, numbers of points, cues; the page is complete without it.
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
  const before = header.getAttribute("aria-sort");  // the best first, at the second click the worst
  const down = before ? before === "descending" : header.dataset.first === "ascending";
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
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
tip.setAttribute("aria-hidden", "true");  // a spot's label says the same
document.body.append(tip);
function showTip(spot) {
  tip.textContent = spot.getAttribute("aria-label");
  tip.hidden = false;
  const at = spot.getBoundingClientRect();
  const room = document.documentElement.clientWidth - tip.offsetWidth - 4;
  tip.style.left = window.scrollX + Math.max(4, Math.min(room, at.left + at.width / 2 - tip.offsetWidth / 2)) + "px";
  tip.style.top = window.scrollY + Math.max(0, at.top - tip.offsetHeight - 6) + "px";
}
function moveFocus(event) {  // one stop of the tab key in a figure, arrows from point to point
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape") tip.hidden = true;
  if (!step) return;
  const spots = Array.from(event.currentTarget.querySelectorAll(".spot"));
  const next = spots[spots.indexOf(document.activeElement) + step];
  event.preventDefault();
  if (!next) return;
  document.activeElement.setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
}
for (const spot of document.querySelectorAll(".spot")) {
  const title = spot.querySelector("title");
  spot.setAttribute("aria-label", title.textContent);
  title.remove();  // else the browser shows its own tip beside this one
  for (const name of ["mouseenter", "focus"]) spot.addEventListener(name, () => showTip(spot));
  for (const name of ["mouseleave", "blur"]) spot.addEventListener(name, () => { tip.hidden = true; });
}
for (const svg of document.querySelectorAll("figure svg")) svg.addEventListener("keydown", moveFocus);
const regions = Array.from(document.querySelectorAll(".scroll, .cards, pre"));
function cue(region) {  // what does not fit says so, and scrolls by keys
  const wide = region.scrollWidth > region.clientWidth + 1;
  region.classList.toggle("more", wide);
  if (wide || region.scrollHeight > region.clientHeight + 1) {
    region.tabIndex = 0;
    region.setAttribute("role", "group");
    region.setAttribute("aria-label", region.dataset.name ?? region.querySelector("caption")?.textContent ?? "scrolls");
  } else {
    for (const name of ["tabindex", "role", "aria-label"]) region.removeAttribute(name);
  }
}
const sizes = new ResizeObserver((entries) => { for (const entry of entries) cue(entry.target); });
for (const region of regions) sizes.observe(region);
