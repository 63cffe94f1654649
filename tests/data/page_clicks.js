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
  const chart = document.querySelector(".chart");
  const points = () => chart.querySelectorAll(".mark-symbol path").length;
  found.pictures = document.querySelectorAll("img").length;
  found.pointsBefore = points();
  chart.querySelector("button[data-name=h2o]").click();
  setTimeout(() => {
    found.pointsAfter = points();
    found.pressed = [...document.querySelectorAll("button[data-name=h2o]")].map((one) => one.getAttribute("aria-pressed"));
    found.rowsLeft = [...document.querySelectorAll("tr[data-name=h2o]")].filter((row) => row.checkVisibility()).length;
    const rate = chart.querySelector("select");
    rate.value = "0.25";
    rate.dispatchEvent(new Event("change"));
    setTimeout(() => {
      found.pointsAtOneRate = points();
      const texts = (place) => [...place.querySelectorAll("svg text")].map((one) => one.textContent);
      found.heatmaps = texts(document.querySelector(".heatmap")).filter((text) => /^[a-z]+(kv|2o|form|act)$/.test(text));
      const choose = (label, value) => {
        const one = [...chart.querySelectorAll("select")].find((select) => select.parentNode.textContent.startsWith(label));
        one.value = value;
        one.dispatchEvent(new Event("change"));
      };
      choose("measure", "difference to exact");
      choose("against", "num lines");
      setTimeout(() => {
        found.zeroLines = chart.querySelectorAll(".mark-rule line[stroke-dasharray]").length;
        found.against = texts(chart).includes("num lines");
        document.body.dataset.found = JSON.stringify(found);
      }, 500);
    }, 500);
  }, 500);
}, 1000);
