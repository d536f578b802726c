// What pages and notebooks draw with: elements, numbers, colour scales and heatmaps. Plain functions, no build step.
// Data are only ever text: nothing here sets markup.

/** An element of a kind, with attributes and children (nodes or texts). */
function element(kind, attributes = {}, ...children) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** A number to three digits, as it is read on the page: 0.0156, 1.62e-7, exactly zero as 0. */
function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "no value";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = size === 0 ? "0" : size >= 1e-3 && size < 1e6 ? String(Number(size.toPrecision(3))) : size.toExponential(2);
  return (value < 0 ? "−" : "") + text;
}

/** Whether there is a number to draw. */
function known(value) {
  return value !== null && value !== undefined && Number.isFinite(value);
}

/** Where numbers lie on a scale of colours.
 *
 * kind: "sequential" (from 0, or from the smallest where that is below 0, to the largest), "diverging" (equally far to both
 * sides of 0) or "log" (from the smallest above 0 to the largest; exactly 0 has a look of its own).
 * limits: [low, high] where the values do not decide them.
 */
function scaleOf(values, kind = "sequential", limits = null) {
  if (!["sequential", "diverging", "log"].includes(kind)) throw new Error(`unknown scale ${kind}`);
  let low = Infinity, high = -Infinity, missing = 0, zeros = 0, beyond = 0;
  for (const value of values) {
    if (!known(value)) { missing += 1; continue; }
    if (value === 0) zeros += 1;
    const seen = kind === "diverging" ? Math.abs(value) : value;
    if (kind === "log" && seen <= 0) continue;
    low = Math.min(low, seen);
    high = Math.max(high, seen);
  }
  if (kind === "sequential") low = Math.min(low, 0);
  if (kind === "diverging") low = -high;
  if (limits) {
    [low, high] = limits;
    for (const value of values) beyond += known(value) && (value < low || value > high);
  }
  return { kind, low, high, missing, zeros, beyond, empty: !(high >= low) };
}

/** The class and the share of the colour (0 to 1) of a number on a scale. */
function shade(value, scale) {
  if (!known(value)) return ["kv-missing", 0];
  if (scale.kind === "diverging") {
    const part = scale.high > 0 ? Math.min(Math.abs(value) / scale.high, 1) : 0;
    return [value < 0 ? "kv-shade kv-below" : "kv-shade kv-above", part];
  }
  if (scale.kind === "log") {
    if (value <= 0) return ["kv-zero", 0];
    const span = Math.log(scale.high) - Math.log(scale.low);
    return ["kv-shade", span > 0 ? Math.min(Math.max((Math.log(value) - Math.log(scale.low)) / span, 0), 1) : 1];
  }
  const span = scale.high - scale.low;
  return ["kv-shade", span > 0 ? Math.min(Math.max((value - scale.low) / span, 0), 1) : 0];
}

/** Gives an element the colour of a number. */
function paint(target, value, scale) {
  const [look, part] = shade(value, scale);
  target.classList.add(...look.split(" "));
  // What has the colour of the end and lies beyond it is marked.
  if (scale.beyond && known(value)) target.classList.toggle("kv-beyond", value < scale.low || value > scale.high);
  target.style.setProperty("--kv-part", `${(100 * part).toFixed(1)}%`);
}

/** What the colours of a scale mean, in numbers and a unit. */
function legend(scale, unit, unitOf = "") {
  const parts = [];
  const item = (look, text) => parts.push(element("span", {}, element("i", { class: look }), text));
  const end = (value) => element("b", {}, number(value));
  const named = [unitOf, unit].filter(Boolean).join(", ");
  if (!scale.empty && scale.kind !== "diverging") {
    const how = scale.kind === "log" ? ", log scale" : "";
    parts.push(element("span", {}, end(scale.low), element("i", { class: "kv-ramp" }), end(scale.high), `(${named}${how})`));
  } else if (!scale.empty) {
    const bar = element("i", { class: "kv-ramp kv-arms" });
    parts.push(element("span", {}, end(scale.low), bar, end(scale.high), `(${named}; the middle is 0)`));
  }
  if (scale.kind === "log" && scale.zeros) item("kv-zero", `exactly 0 (${scale.zeros})`);
  if (scale.beyond) item("kv-shade kv-above kv-beyond", `beyond the scale (${scale.beyond})`);
  if (scale.missing) item("kv-missing", `no value (${scale.missing})`);
  return element("div", { class: "kv-legend" }, ...parts);
}

/** Moves the focus among cells by the arrow keys, Home and End; Enter and the space bar pick. */
function keys(cellAt, rows, columns, pick) {
  return (event) => {
    const cell = event.target.closest("[data-at]");
    if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
    let [row, column] = cell.dataset.at.split(" ").map(Number);
    if (event.key === "Enter" || event.key === " ") pick(row, column);
    else if (event.key === "ArrowLeft") column -= 1;
    else if (event.key === "ArrowRight") column += 1;
    else if (event.key === "ArrowUp") row -= 1;
    else if (event.key === "ArrowDown") row += 1;
    else if (event.key === "Home") column = 0;
    else if (event.key === "End") column = columns - 1;
    else return;
    event.preventDefault();
    const next = cellAt(Math.min(Math.max(row, 0), rows - 1), Math.min(Math.max(column, 0), columns - 1));
    next?.focus();
  };
}

/** Of the cells that the arrow keys move among, the one last focused is the one that Tab comes back to. */
function roving(event) {
  const cell = event.target.closest("[data-at]");
  if (!cell) return;
  for (const other of event.currentTarget.querySelectorAll("[data-at][tabindex='0']")) other.tabIndex = -1;
  cell.tabIndex = 0;
}

/** A heatmap: a grid that is read with the mouse, a finger or the keyboard.
 *
 * root: is emptied first. rows, columns: labels. values: a list of lists; null is no value, drawn as hatching and said so.
 * title, unit: words; rowName, columnName: what a row and a column are. scale: "sequential", "diverging" or "log"; limits:
 * [low, high] where the values do not decide. chosen: [row, column] by index. onpick(row, column) hears indices.
 * Returns { choose(row, column), cell(row, column) }.
 */
function heatmap(root, { rows, columns, values, title = "", unit = "", scale = "sequential", rowName = "row", columnName = "column",
  chosen = null, limits = null, onpick = null }) {
  const of = scaleOf(values.flat(), scale, limits);
  const said = element("output", { class: "kv-said" });
  const long = columns.some((label) => String(label).length > 3);
  const every = long ? 1 : Math.max(1, Math.ceil(columns.length / 48));
  const head = element("tr", {}, element("th", { class: "kv-corner" }, `${rowName} ↓ ${columnName} →`));
  columns.forEach((label, at) => head.append(
    element("th", { scope: "col", class: long ? "kv-long" : false, title: String(label) }, at % every ? "" : String(label))));
  const body = element("tbody");
  const grid = [];
  const words = (row, column) => {
    const value = values[row][column];
    return `${rowName} ${rows[row]}, ${columnName} ${columns[column]}: ${number(value)}${known(value) && unit ? ` ${unit}` : ""}`;
  };
  values.forEach((line, row) => {
    const shown = element("tr", {}, element("th", { scope: "row" }, String(rows[row])));
    grid.push(line.map((value, column) => {
      const cell = element("td", { role: "gridcell", tabindex: -1, "data-at": `${row} ${column}`, "aria-label": words(row, column) });
      paint(cell, value, of);
      shown.append(cell);
      return cell;
    }));
    body.append(shown);
  });
  const cell = (row, column) => grid[row]?.[column];
  let at = null;
  const choose = (row, column) => {
    if (at) cell(...at)?.removeAttribute("aria-selected");
    at = [row, column];
    cell(row, column)?.setAttribute("aria-selected", "true");
  };
  const pick = (row, column) => {
    choose(row, column);
    if (onpick) onpick(row, column);
  };
  const tell = (event) => {
    const on = event.target.closest("[data-at]");
    if (on) said.textContent = words(...on.dataset.at.split(" ").map(Number));
  };
  const table = element("table", {
    role: "grid", class: "kv-heat", "aria-label": title || `${rowName} by ${columnName}`, onmouseover: tell,
    onfocusin: (event) => { roving(event); tell(event); },
    onclick: (event) => {
      const on = event.target.closest("[data-at]");
      if (on) pick(...on.dataset.at.split(" ").map(Number));
    },
    onkeydown: keys(cell, values.length, columns.length, pick),
  }, element("thead", {}, head), body);
  if (chosen) choose(...chosen);
  const first = chosen ? cell(...chosen) : cell(0, 0);
  if (first) first.tabIndex = 0;
  root.replaceChildren();
  root.classList.add("kv");
  if (title) root.append(element("p", { class: "kv-title" }, title));
  root.append(element("div", { class: "kv-wide" }, table), said, legend(of, unit));
  return { choose, cell };
}

/** Tokens in lines that are read as text: each is coloured by its number, and picked by mouse or keyboard.
 *
 * root: is emptied first. lines: a list of { name, tokens, scale }, tokens being { text, value, said, look, below }: value
 * undefined is no colour, said is what is told of it, look are classes, below is a second text under the first. picked tokens are
 * told to onpick(line, index). Returns { choose(line, index) }.
 */
function strips(root, { lines, title = "", chosen = null, onpick = null }) {
  const said = element("output", { class: "kv-said" });
  const grid = [];
  const body = element("div", { role: "grid", class: "kv-strips", "aria-label": title });
  lines.forEach((line, row) => {
    const shown = element("div", { role: "row", class: "kv-strip" }, element("b", { role: "rowheader" }, line.name));
    grid.push(line.tokens.map((token, at) => {
      const cell = element("span", { role: "gridcell", tabindex: -1, "data-at": `${row} ${at}`, "aria-label": token.said }, seen(token.text));
      if (token.look) cell.classList.add(...token.look.split(" "));
      if (token.value !== undefined) {
        paint(cell, token.value, line.scale);
        cell.classList.toggle("kv-strong", shade(token.value, line.scale)[1] > 0.55);
      }
      if (token.below !== undefined) cell.append(element("small", {}, seen(token.below)));
      shown.append(cell);
      if (token.text.endsWith("\n")) shown.append(element("br"));
      return cell;
    }));
    body.append(shown);
  });
  let at = null;
  const choose = (row, index) => {
    if (at) grid[at[0]]?.[at[1]]?.removeAttribute("aria-selected");
    at = [row, index];
    grid[row]?.[index]?.setAttribute("aria-selected", "true");
  };
  const of = (event) => event.target.closest("[data-at]")?.dataset.at.split(" ").map(Number);
  const tell = (event) => { const on = of(event); if (on) said.textContent = lines[on[0]].tokens[on[1]].said; };
  const pick = (row, index) => { choose(row, index); if (onpick) onpick(row, index); };
  body.addEventListener("mouseover", tell);
  body.addEventListener("focusin", (event) => { roving(event); tell(event); });
  body.addEventListener("click", (event) => { const on = of(event); if (on) pick(...on); });
  const longest = Math.max(0, ...lines.map((line) => line.tokens.length));
  const cell = (row, index) => grid[row]?.[Math.min(index, grid[row].length - 1)];
  body.addEventListener("keydown", keys(cell, lines.length, longest, pick));
  if (chosen) choose(...chosen);
  const first = (chosen && grid[chosen[0]]?.[chosen[1]]) || grid.flat()[0];
  if (first) first.tabIndex = 0;
  root.replaceChildren(body, said);
  root.classList.add("kv");
  return { choose };
}

/** A token's text with what cannot be seen made visible; of a longer "text" line feeds and single spaces stay as they are. */
function seen(text, what = "token") {
  const plain = text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (c) => {
    if (what === "text" && (c === "\n" || c === "\t")) return c;
    return { "\n": "↵", "\t": "⇥", "\r": "␍" }[c] ?? (c.codePointAt(0) < 256 ? `\\x${c.codePointAt(0).toString(16).padStart(2, "0")}`
      : `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`);
  });
  return what === "text" ? plain : plain.replace(/^ +$/, (spaces) => "␣".repeat(spaces.length)) || "(empty)";
}

/** Numbers by name as horizontal bars from 0. */
function bars(root, { labels, values, title = "", unit = "", rowName = "" }) {
  const most = Math.max(0, ...values.filter(known));
  const body = element("tbody");
  labels.forEach((label, at) => {
    const bar = element("i", { role: "img", "aria-label": number(values[at]), class: known(values[at]) ? "kv-bar" : "kv-bar kv-missing" });
    bar.style.width = known(values[at]) && most > 0 ? `${(100 * values[at]) / most}%` : "0";
    body.append(element("tr", {}, element("th", { scope: "row" }, `${rowName} ${label}`.trim()), element("td", {}, bar),
      element("td", { class: "kv-number" }, number(values[at]))));
  });
  const caption = element("p", { class: "kv-title" }, unit ? `${title} (${unit})` : title);
  root.replaceChildren(caption, element("table", { class: "kv-bars", "aria-label": title }, body));
  root.classList.add("kv");
}

/** The data that Python packed (report/tokens.py). */
async function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}
