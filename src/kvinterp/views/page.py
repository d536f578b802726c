"""The frame of the report: one page that asks the network for nothing, in light and dark, on a desk and on a phone.

Rendered with autoescape on: whatever comes from a model, a prompt or a file is text.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, StrictUndefined

__all__ = ["render"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5a6069; --line: #d5d9de; --card: #f5f6f8; --accent: #0a5c96;
  --page: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #a3abb5; --line: #3a4048; --card: #20242a;
  --accent: #7cc4f5; --page: #15181c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.6 system-ui, -apple-system, "Segoe UI",
  Roboto, "DejaVu Sans", sans-serif; overflow-wrap: break-word; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
p, ul, ol, dl { max-width: 52rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.6rem 0 0.5rem; padding-top: 0.8rem;
  border-top: 1px solid var(--line); }
.kicker { color: var(--soft); margin: 0; font-size: 0.9rem; }
.answer { border-left: 4px solid var(--accent); background: var(--card); padding: 0.9rem 1.1rem; margin: 1.2rem 0;
  border-radius: 0 6px 6px 0; }
.answer p { margin: 0.4rem 0; }
.answer p:first-child { font-size: 1.15rem; font-weight: 600; }
.label { font-weight: 600; color: var(--accent); }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr));
  gap: 1rem; margin: 1rem 0; }
figure { margin: 0; background: #ffffff; border: 1px solid var(--line); border-radius: 6px; padding: 0.5rem; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: #444a52; font-size: 0.85rem; padding: 0.3rem 0.3rem 0.1rem; }
.wide { overflow-x: auto; margin: 1rem 0; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem; }
th, td { padding: 0.4rem 0.5rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
th { background: var(--card); font-weight: 600; vertical-align: bottom; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
td.name { white-space: nowrap; }
pre { margin: 0; white-space: pre-wrap; font: 0.8rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace; min-width: 13rem; }
code { font: 0.9em ui-monospace, "DejaVu Sans Mono", monospace; background: var(--card); padding: 0.05em 0.3em;
  border-radius: 3px; }
dt { font-weight: 600; margin-top: 0.6rem; } dd { margin: 0 0 0 1rem; }
summary { cursor: pointer; font-weight: 600; padding: 0.3rem 0; }
.note { color: var(--soft); font-size: 0.9rem; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body><main>
{%- macro table(head, rows) %}
<div class="wide"><table>
<thead><tr>
{%- for cell in head %}<th{% if cell.number %} class="number"{% endif %}>{{ cell.text }}</th>{% endfor %}</tr></thead>
<tbody>
{%- for row in rows %}
<tr>{% for cell in row %}<td{% if head[loop.index0].number %} class="number"{% elif loop.first %} class="name"{% endif %}>
{%- if head[loop.index0].text_block %}<pre>{{ cell }}</pre>{% else %}{{ cell }}{% endif %}</td>{% endfor %}</tr>
{%- endfor %}
</tbody></table></div>
{%- endmacro %}
<p class="kicker">{{ kicker }}</p>
<h1>{{ question }}</h1>
<div class="answer">
{%- for sentence in answer %}
<p>{{ sentence }}</p>
{%- endfor %}
</div>
{%- for section in sections %}
<h2>{{ section.title }}</h2>
{%- for text in section.done %}
<p>{% if loop.first %}<span class="label">What was done.</span> {% endif %}{{ text }}</p>
{%- endfor %}
{%- if section.head %}{{ table(section.head, section.rows) }}{% endif %}
{%- if section.pictures %}
<div class="pictures">
{%- for picture in section.pictures %}
<figure><img alt="{{ picture.caption }}" src="data:image/png;base64,{{ picture.data }}">
<figcaption>{{ picture.caption }}</figcaption></figure>
{%- endfor %}
</div>
{%- endif %}
{%- if section.seen %}
<p><span class="label">What to see.</span> {{ section.seen[0] }}</p>
{%- endif %}
{%- if section.seen|length == 2 %}
<p>{{ section.seen[1] }}</p>
{%- elif section.seen[2:] %}
<ul>{% for text in section.seen[1:] %}<li>{{ text }}</li>{% endfor %}</ul>
{%- endif %}
{%- endfor %}
<h2>The texts</h2>
<p>{{ texts.note }}</p>
<details><summary>Prompts and what was decoded</summary>
{{ table(texts.head, texts.rows) }}
</details>
<h2>How to read this</h2>
<dl>
{%- for term, meaning in glossary %}
<dt>{{ term }}</dt><dd>{{ meaning }}</dd>
{%- endfor %}
</dl>
<h2>What this was made with</h2>
<p>The same on every line of the tables and in every figure:</p>
{{ table(provenance.head, provenance.common) }}
{%- if provenance.varying %}
<p>And what differs:</p>
{{ table(provenance.varying_head, provenance.varying) }}
{%- endif %}
<p class="note">{{ files }}</p>
</main></body></html>
"""


def render(**content: Any) -> str:
    """The page; every value is escaped.

    Args:
        content: What the page's places hold, see the page itself.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    # The style is the one thing that is no text; it is ours, and in a style element an escaped quote would be wrong.
    from markupsafe import Markup

    return environment.from_string(_PAGE).render(style=Markup(_STYLE), **content)
