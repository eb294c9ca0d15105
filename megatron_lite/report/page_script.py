"""What the page does: draw its charts, and sort a table by the column that is clicked."""

SCRIPT = """
"use strict";
const charts = JSON.parse(document.getElementById("charts").textContent);
const shown = { displayModeBar: false, responsive: true };
function draw() {
  for (const [key, figure] of Object.entries(charts)) Plotly.newPlot("chart-" + key, figure.data, figure.layout, shown);
}
if (window.Plotly) draw();
const value = (row, at) => row.cells[at].textContent.trim();
const number = text => /^[<-]?[\\d.,]+/.test(text) ? parseFloat(text.replace(/[<,]/g, "")) : NaN;
const UNITS = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
const key = text => number(text) * (UNITS[text.split(" ")[1]] || 1);
for (const head of document.querySelectorAll("th")) head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], at = head.cellIndex, down = head.dataset.down !== "yes";
  head.dataset.down = down ? "yes" : "no";
  const rows = [...body.rows].sort((a, b) => {
    const [one, other] = [value(a, at), value(b, at)], [x, y] = [key(one), key(other)];
    const order = isNaN(x) || isNaN(y) ? one.localeCompare(other) : x - y;
    return down ? -order : order;
  });
  body.append(...rows);
});
"""
