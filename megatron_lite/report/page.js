"use strict";
const shown_rows = 12;

// A finger has no pointer: what was touched is written below its chart.
addEventListener("click", event => {
  const touched = event.target.closest(".chart rect, .chart circle"), title = touched && touched.querySelector("title");
  if (title) touched.closest("figure").querySelector(".said").textContent = title.textContent;
});

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
