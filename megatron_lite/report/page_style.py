"""How the page looks, on a screen and on paper."""

CSS = """
:root { --ink: #1d2329; --soft: #5b6670; --line: #e3e7eb; --accent: #0072b2; --tint: #f2f7fb; --warm: #b34d00; }
* { box-sizing: border-box; }
html { background: #f5f6f8; }
body { margin: 0 auto; max-width: 1120px; padding: 28px 24px 64px; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: anywhere; }
header { display: flex; justify-content: space-between; gap: 24px; color: var(--soft); margin: 0 4px 12px; }
h1 { font-size: 15px; font-weight: 600; margin: 0; color: var(--ink); }
section { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 18px 22px;
  margin: 16px 0; }
.verdict { border-left: 5px solid var(--accent); padding: 20px 24px; }
.verdict.inconclusive { border-left-color: #8d969f; }
.verdict p { font-size: 22px; line-height: 1.35; font-weight: 600; margin: 0; text-wrap: pretty; }
.verdict small { display: block; margin-top: 8px; color: var(--soft); font-size: 14px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px 36px; margin-top: 18px; }
.tiles div { min-width: 90px; }
.tiles b { display: block; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles span, .of, .quiet, .more { color: var(--soft); font-size: 13px; }
h2 { font-size: 18px; margin: 0 0 10px; display: flex; justify-content: space-between; align-items: baseline;
  gap: 20px; }
h2 .of { font-weight: 400; text-align: right; }
p { margin: 4px 0; }
.chart { margin: 4px 0 14px; }
.rows { max-height: 460px; overflow: auto; margin: 10px 0; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
table.wide { width: 100%; }
th { text-align: left; font-weight: 500; color: var(--soft); position: sticky; top: 0; background: #fff;
  cursor: pointer; white-space: nowrap; }
th, td { padding: 4px 18px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th:last-child, td:last-child { padding-right: 4px; }
th.r, td.r { text-align: right; white-space: nowrap; }
td.bar { width: 260px; border-bottom: 0; vertical-align: middle; }
td.bar span { display: block; height: 12px; background: var(--accent); border-radius: 2px; }
tr.total td { font-weight: 600; border-bottom: 0; }
article { border-top: 1px solid var(--line); padding: 12px 0; }
article:first-of-type { border-top: 0; padding-top: 2px; }
article h3 { font-size: 15px; margin: 0 0 2px; display: flex; justify-content: space-between; gap: 20px; }
article h3 b { color: var(--warm); white-space: nowrap; font-variant-numeric: tabular-nums; }
code { font: 12.5px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--tint);
  padding: 1px 6px; border-radius: 4px; }
article ul { margin: 4px 0; padding-left: 20px; color: var(--soft); }
article .try { margin-top: 6px; padding: 6px 10px; background: var(--tint); border-radius: 6px; }
ul.gaps { margin: 0; padding-left: 20px; color: var(--soft); }
footer { color: var(--soft); font-size: 13px; margin: 0 4px; }
@page { margin: 12mm; }
@media print {
  html { background: #fff; }
  body { max-width: none; padding: 0; font-size: 12px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  section { border: 0; border-radius: 0; padding: 8px 0; margin: 10px 0; }
  .verdict { padding: 6px 0 6px 14px; }
  .verdict p { font-size: 17px; }
  h2, h3 { break-after: avoid; }
  h2 { font-size: 15px; }
  article, .chart, tr, .tiles { break-inside: avoid; }
  .rows { max-height: none; overflow: visible; }
  tbody tr:nth-child(n+21) { display: none; }
  th { position: static; }
  table { font-size: 10.5px; }
  th, td { padding: 2px 10px 2px 0; }
  .chart { zoom: 0.68; }
}
"""
