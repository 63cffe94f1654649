// What tests/report/test_browser.py does with a page: clicks, choices, and what is then to be seen.
setTimeout(() => {
  const found = {};
  const rows = (table) => [...table.querySelectorAll("tbody tr:not(.part)")].filter((row) => row.checkVisibility());
  const first = (table) => rows(table).map((row) => row.cells[0].textContent);
  const board = document.querySelector("table[data-kind=overview]");
  found.boardAtOneRate = [...board.querySelectorAll("tr.part")].filter((row) => row.checkVisibility()).map((row) => row.textContent);
  const [byName, byScore] = board.querySelectorAll("th button");
  byName.click();
  found.names = first(board);
  byName.click();
  found.backwards = first(board);
  const select = board.closest(".scroll").previousElementSibling.querySelector("select");
  select.value = "together";
  select.dispatchEvent(new Event("change"));
  byScore.click();
  found.together = rows(board).map((row) => Number(row.cells[1].dataset.number ?? NaN)).filter((x) => !isNaN(x));
  found.order = board.querySelector("th[aria-sort]").getAttribute("aria-sort");
  select.value = "";
  select.dispatchEvent(new Event("change"));
  found.groups = [...board.querySelectorAll("tr.part")].filter((row) => row.checkVisibility()).length;
  document.body.dataset.found = JSON.stringify(found);
}, 1000);
