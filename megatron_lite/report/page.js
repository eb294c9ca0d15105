"use strict";
// Charts name their colors as the style sheet does, which has other values on dark pages and on paper.
const source = document.getElementById("charts").textContent;
const config = { displayModeBar: false, responsive: true };
const shown_rows = 12, paper = matchMedia("print"), paper_px = 1010; // as wide as a page, however narrow the window is
function draw() {
  const style = getComputedStyle(document.documentElement);
  const charts = JSON.parse(source, (key, value) =>
    typeof value === "string" ? value.replace(/^var\((--[a-z]+)\)$/, (all, name) => style.getPropertyValue(name).trim()) : value);
  for (const [key, figure] of Object.entries(charts)) {
    if (paper.matches) figure.layout.width = paper_px;
    Plotly.react("chart-" + key, figure.data, figure.layout, config);
    if (!paper.matches) Plotly.Plots.resize("chart-" + key); // after paper
  }
}
if (window.Plotly) {
  draw();
  for (const query of [matchMedia("(prefers-color-scheme: dark)"), paper]) query.addEventListener("change", draw);
}

// On paper nothing is folded; what a link leads to is not either.
let unfolded = [];
addEventListener("beforeprint", () => {
  unfolded = [...document.querySelectorAll("details:not([open])")];
  for (const one of unfolded) one.open = true;
});
addEventListener("afterprint", () => { for (const one of unfolded) one.open = false; });

const value = (row, at) => row.cells[at].textContent.trim();
const number = text => /^[<+-]?[\d.,]+/.test(text) ? parseFloat(text.replace(/[<+,]/g, "")) : NaN;
const UNITS = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
const key = text => number(text) * (UNITS[text.split(" ")[1]] || 1);
function sort(head) {
  const body = head.closest("table").tBodies[0], at = head.cellIndex, down = head.ariaSort !== "descending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.ariaSort = down ? "descending" : "ascending";
  const rows = [...body.rows].sort((a, b) => {
    const [one, other] = [value(a, at), value(b, at)], [x, y] = [key(one), key(other)];
    const order = isNaN(x) || isNaN(y) ? one.localeCompare(other) : x - y;
    return down ? -order : order;
  });
  body.append(...rows);
}

for (const table of document.querySelectorAll("table")) {
  const rows = [...table.tBodies[0].rows], heads = table.tHead ? [...table.tHead.rows[0].cells] : [];
  // On a phone each row stands as a block, whose cells say what they are.
  for (const row of rows) heads.forEach((head, at) => { row.cells[at].dataset.name = head.textContent; });
  for (const head of heads) if (head.textContent) {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(head));
    head.append(button);
  }
  if (rows.length <= shown_rows + 3 || table.closest("details")) continue;
  const button = document.createElement("button");
  button.className = "all";
  button.textContent = `show all ${rows.length} rows`;
  button.addEventListener("click", () => { table.classList.remove("cut"); button.remove(); });
  table.classList.add("cut");
  table.after(button);
}

// The contents say where the reader is.
const links = new Map([...document.querySelectorAll("nav > ol > li > a")].map(link => [link.hash.slice(1), link]));
const visible = new Set();
const watcher = new IntersectionObserver(entries => {
  for (const entry of entries) visible[entry.isIntersecting ? "add" : "delete"](entry.target.id);
  const here = [...links.keys()].find(id => visible.has(id));
  for (const [id, link] of links) id === here ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
}, { rootMargin: "0px 0px -60% 0px" });
for (const id of links.keys()) watcher.observe(document.getElementById(id));
