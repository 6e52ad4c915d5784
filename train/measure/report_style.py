"""The frame of the report's page, and how it looks."""

from string import Template

STYLE = """
:root { --ink: #22272e; --soft: #66717f; --line: #e1e6ed; --paper: #ffffff; --ground: #f4f6f9;
  --accent: #2f6fab; --pale: #e3edf6; --warm: #d9822b; color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", "Liberation Sans", Arial, sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 44px 24px 80px; }
.eyebrow { margin: 0; color: var(--accent); font-weight: 600; font-size: 13px;
  letter-spacing: .08em; text-transform: uppercase; }
h1 { margin: 4px 0 10px; font-size: 38px; line-height: 1.15; letter-spacing: -.02em; }
h2 { margin: 0 0 8px; font-size: 22px; letter-spacing: -.01em; }
h3 { margin: 26px 0 6px; font-size: 17px; }
p { margin: 0 0 12px; max-width: 76ch; }
.lead { font-size: 18px; }
.facts, .small, .more { color: var(--soft); font-size: 14px; }
.facts { max-width: none; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 14px; margin: 22px 0; }
.card, section { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; }
.card { padding: 18px 20px; }
.figure { font-size: 34px; font-weight: 700; color: var(--accent); letter-spacing: -.02em;
  line-height: 1.15; }
.what { font-weight: 600; }
section { padding: 26px 30px; margin: 18px 0; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 24px; align-items: center;
  margin: 14px 0; }
.beside { display: grid; grid-template-columns: 1.25fr 1fr; gap: 30px; align-items: center; }
.picture { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: 10px 0 14px;
  font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: right; font-weight: 600; color: var(--soft); padding: 6px 9px;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
td { text-align: right; padding: 7px 9px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 2px; }
.total td { font-weight: 600; background: var(--ground); }
.narrow { max-width: 660px; }
.facts-table td { text-align: left; white-space: normal; padding: 4px 9px; }
.facts-table td:first-child { color: var(--soft); width: 210px; }
.grid td { text-align: center; border: 2px solid var(--paper); border-radius: 6px;
  background: rgba(47, 111, 171, var(--shade)); line-height: 1.25; }
.grid th { text-align: center; border: 0; }
.grid small { display: block; color: var(--soft); font-size: 11px; }
.grid .best { outline: 2px solid var(--accent); outline-offset: -2px; font-weight: 700; }
.warning { background: #fdf1e2; border: 1px solid #f0cfa3; border-radius: 8px; max-width: none;
  padding: 10px 14px; }
figure { margin: 20px 0 0; padding: 16px 0 0; border-top: 1px solid var(--line); }
.context { font-family: Georgia, serif; color: var(--soft); margin: 2px 0 8px; font-size: 15px;
  font-style: italic; }
.tree .edge { fill: none; stroke: #ccd4de; stroke-width: 1.3; }
.tree .edge.accepted { stroke: var(--accent); stroke-width: 2.6; }
.tree .edge.bonus { stroke: var(--warm); stroke-width: 2; stroke-dasharray: 5 4; }
.tree .node { fill: #f4f6f9; stroke: #d5dce5; }
.tree .node.root { fill: var(--ink); stroke: var(--ink); }
.tree .node.accepted { fill: var(--accent); stroke: var(--accent); }
.tree .node.bonus { fill: #fdf1e2; stroke: var(--warm); }
.tree .word { font: 12px "DejaVu Sans Mono", ui-monospace, Menlo, Consolas, monospace;
  fill: #76818f; }
.tree .word.root, .tree .word.accepted { fill: #ffffff; }
.tree .word.bonus { fill: #8f5210; }
.tree .share { font: 10px system-ui, "Liberation Sans", sans-serif; fill: #98a2af; }
.tree .share.accepted { fill: #d6e5f2; }
.key { border-radius: 5px; padding: 1px 8px; font-size: 13px; white-space: nowrap;
  border: 1px solid #d5dce5; background: #f4f6f9; color: #76818f; }
.key.accepted { background: var(--accent); border-color: var(--accent); color: #ffffff; }
.key.bonus { background: #fdf1e2; border-color: var(--warm); color: #8f5210; }
code { font: 13px "DejaVu Sans Mono", ui-monospace, Menlo, Consolas, monospace;
  overflow-wrap: anywhere; }
@media (max-width: 820px) {
  .cards { grid-template-columns: 1fr 1fr; }
  .pair, .beside { grid-template-columns: 1fr; }
  section { padding: 20px 18px; }
}
@media print { body { background: #ffffff; } section { break-inside: avoid; } }
"""

PAGE = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>"""
    + STYLE
    + """</style>
</head>
<body><main>
$body
</main></body>
</html>
"""
)
