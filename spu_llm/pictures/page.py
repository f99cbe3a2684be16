"""The style that pages with pictures share: light and dark as the reader's system has it, wide things in boxes that scroll."""

STYLE = """
  :root { color-scheme: light dark; --quiet: light-dark(#555, #aaa); --line: light-dark(#ccc, #444); }
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word;
    color: light-dark(#1a1a1a, #e6e6e6); background: light-dark(#fff, #121212); }
  a { color: light-dark(#0b5cad, #7db8f5); }
  blockquote { border-left: 4px solid #888; margin: 1rem 0; padding: .2rem 1rem; white-space: pre-wrap; }
  b.new { color: light-dark(#0b5cad, #7db8f5); font-weight: 600; }
  code { background: #8882; padding: 0 .2rem; white-space: pre-wrap; }
  .wide, figure { overflow-x: auto; margin: 1rem 0; }
  table { border-collapse: collapse; }
  th, td { border-bottom: 1px solid var(--line); padding: .3rem .7rem; text-align: right; vertical-align: top; }
  th { vertical-align: bottom; }
  th:first-child, td:first-child, td.text, th.text { text-align: left; }
  td.text { min-width: 14rem; }
  figure svg { display: block; width: 100%; min-width: 42rem; height: auto; }
  figcaption, .note { color: var(--quiet); font-size: .9rem; }
"""
