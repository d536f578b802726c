// The charts of a page: panels as data (report/panels.py), drawn in SVG as wide as there is room, so that a phone reads the same
// letters as a desk. draw.js comes first. Data are only ever text: nothing here sets markup.

const LINES = [["o", ""], ["s", "5 3"], ["^", "1.5 2"], ["D", "6 2 1.5 2"], ["v", "8 3"], ["P", "3 3"]];
const FONT = 12;
const pen = document.createElement("canvas").getContext("2d");

/** How wide a text is, in pixels. */
function wide(text, size = FONT) {
  pen.font = `${size}px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif`;
  return pen.measureText(text).width;
}

/** A text in lines of at most so many pixels. */
function wrapped(text, width) {
  const lines = [];
  for (const part of String(text).split("\n")) {
    let line = "";
    for (const word of part.split(" ")) {
      const longer = line ? `${line} ${word}` : word;
      if (line && wide(longer) > width) { lines.push(line); line = word; } else line = longer;
    }
    lines.push(line);
  }
  return lines;
}

/** An SVG element of a kind, with attributes and children. */
function drawn(kind, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined && value !== "") made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A text in lines, each centred on y as a whole. */
function words(lines, x, y, attributes = {}) {
  const first = y - ((lines.length - 1) * FONT * 1.2) / 2;
  return drawn("text", { "dominant-baseline": "central", ...attributes },
    ...lines.map((line, at) => drawn("tspan", { x, y: first + at * FONT * 1.2 }, line)));
}

/** The colour, marker and dashes of a line by its number; every second has hollow markers, so that two that coincide are seen. */
function look(index) {
  const turn = Math.floor(index / LINES.length), at = index % LINES.length;
  return { color: `kv-line-${at}`, marker: LINES[(at + turn) % LINES.length][0], dashes: LINES[(at + 2 * turn) % LINES.length][1],
    hollow: (index + turn) % 2 === 1 };
}

/** The path of a marker around a place. */
function mark(shape, x, y, r) {
  const at = (dx, dy) => `${(x + dx * r).toFixed(1)} ${(y + dy * r).toFixed(1)}`;
  if (shape === "o") return `M${at(-1, 0)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;
  const outlines = { s: [[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]], "^": [[0, -1.1], [1.1, 0.9], [-1.1, 0.9]],
    v: [[0, 1.1], [1.1, -0.9], [-1.1, -0.9]], D: [[0, -1.3], [1.1, 0], [0, 1.3], [-1.1, 0]],
    P: [[-0.4, -1.1], [0.4, -1.1], [0.4, -0.4], [1.1, -0.4], [1.1, 0.4], [0.4, 0.4], [0.4, 1.1], [-0.4, 1.1], [-0.4, 0.4], [-1.1, 0.4],
      [-1.1, -0.4], [-0.4, -0.4]] };
  return `M${outlines[shape].map(([dx, dy]) => at(dx, dy)).join("L")}Z`;
}

// Scales ---------------------------------------------------------------------------------------------------------------

/** Round numbers over a span, about so many. */
function rounds(low, high, count) {
  const rough = (high - low) / Math.max(count, 1) || 1;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * ten).find((n) => n >= rough * 0.999);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) ticks.push(Number((n * step).toPrecision(12)));
  return ticks;
}

const plain = (value) => number(value).replace(/e-/, "e−").replace(/e\+/, "e");
const share = (value) => `${Math.round(value * 100)}\u202f%`.replace("-", "−");

/** An axis: at(value) is its place from 0 to 1, ticks are [place, text], strip is the height of the place for exact zeros.
 *
 * name: a scale of a Panel. count: about how many ticks fit.
 */
function axisOf(name, values, count, zero = "exactly 0") {
  const there = values.filter(known);
  const positive = there.filter((value) => value > 0);
  const linear = (low, high, ticks, text) => ({ at: (value) => (value - low) / (high - low),
    ticks: ticks.map((tick) => [(tick - low) / (high - low), text(tick)]), strip: 0 });
  if (name === "share") return linear(-0.03, 1.03, rounds(0, 1, Math.min(count, 5)), (tick) => String(Number(tick.toFixed(2))));
  if (name === "signed") return linear(-1.12, 1.12, rounds(-1, 1, Math.min(count, 4)), share);
  if (!there.length) return linear(0, 1, [], plain);
  const least = there.reduce((a, b) => Math.min(a, b)), most = there.reduce((a, b) => Math.max(a, b));
  if (name === "whole") {
    const ticks = rounds(least, most, Math.min(count, 10)).filter(Number.isInteger);
    return linear(least - 0.5, most + 0.5, ticks.length ? ticks : [Math.round(least)], plain);
  }
  if (name === "linear" || (name !== "zero" && !positive.length)) {
    const room = (most - least || Math.abs(most) || 1) * 0.05;
    return linear(least - room, most + room, rounds(least - room, most + room, Math.min(count, 6)), plain);
  }
  const small = positive.length ? positive.reduce((a, b) => Math.min(a, b)) : 1;
  const large = positive.length ? positive.reduce((a, b) => Math.max(a, b)) : 1;
  if (name === "log" || name === "doubling") {
    const [low, high] = [Math.log(small), Math.log(large)], room = (high - low || 1) * 0.05;
    const at = (value) => (value > 0 ? (Math.log(value) - low + room) / (high - low + 2 * room) : Number.NaN);
    let ticks = [];
    if (name === "doubling") ticks = [...new Set(positive)].sort((a, b) => a - b);
    else if (large / small < 10) ticks = rounds(small, large, Math.min(count, 6)).filter((tick) => tick > 0);
    else for (let n = Math.floor(Math.log10(small)); n <= Math.log10(large) + 1e-9; n += 1) {
      for (const part of large / small < 100 ? [1, 2, 5] : [1]) ticks.push(part * 10 ** n);
    }
    ticks = ticks.filter((tick) => tick >= small * Math.exp(-room) && tick <= large * Math.exp(room));
    const every = Math.ceil(ticks.length / Math.max(count, 2));
    return { at, ticks: ticks.filter((_, n) => n % every === 0).map((tick) => [at(tick), plain(tick)]), strip: 0 };
  }
  // Logarithmic, with a place of its own for exact zeros below the smallest decade.
  const low = Math.floor(Math.log10(small)), decades = Math.max(1, Math.ceil(Math.log10(large)) - low);
  const zeros = there.includes(0) || !positive.length, strip = zeros ? (positive.length ? 0.15 : 1) : 0;
  const begin = zeros ? 0 : 0.04, all = 1.04 + begin;
  const at = (value) => (value === 0 ? strip / 2 : value > 0
    ? strip + ((1 - strip) * ((Math.log10(value) - low) / decades + begin)) / all : Number.NaN);
  const every = Math.ceil((decades + 1) / Math.max(Math.min(count, 7), 2));
  const ticks = zeros ? [[strip / 2, zero]] : [];
  if (positive.length) for (let n = 0; n <= decades; n += every) ticks.push([at(10 ** (low + n)), `1e${low + n}`.replace("-", "−")]);
  return { at, ticks, strip };
}

// Panels ---------------------------------------------------------------------------------------------------------------

/** A frame for one panel: an SVG with margins, axes and their labels. Returns the SVG and the places of its inner corner. */
function frame(width, height, left, panel, facet, { below = [], above = "", strip = 0, upright = null }) {
  const lines = wrapped(below.join(" "), width - 8);
  // Bold letters are wider than those that are measured.
  const title = facet.title ? wrapped(facet.title, width * 0.88) : [];
  const top = (title.length ? FONT * 1.2 * title.length + 6 : 2) + (above ? FONT * 1.2 * wrapped(above, width).length + 6 : 8);
  const foot = (upright ?? FONT + 8) + lines.length * FONT * 1.2 + 4;
  const right = 10;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${top + height + foot}`, width, height: top + height + foot, role: "img",
    "aria-label": [facet.title, ...below, above].filter(Boolean).join(", ") });
  let y = 0;
  if (title.length) {
    svg.append(words(title, 0, (FONT * 1.2 * title.length) / 2, { class: "kv-head" }));
    y = FONT * 1.2 * title.length + 6;
  }
  if (above) {
    const said = wrapped(above, width);
    svg.append(words(said, 0, y + (FONT * 1.2 * said.length) / 2, { class: "kv-soft" }));
  }
  const box = { left, top, width: width - left - right, height };
  if (strip) svg.append(drawn("rect", { class: "kv-strip-zero", x: left, y: top + height * (1 - strip), width: box.width, height: height * strip }));
  svg.append(words(lines, left + box.width / 2, top + height + foot - (lines.length * FONT * 1.2) / 2 - 2, { class: "kv-soft", "text-anchor": "middle" }));
  return { svg, box };
}

/** Ticks and grid lines of a horizontal axis; of ticks that would touch, the later is left out. */
function across(svg, box, ticks, grid) {
  let free = -Infinity;
  for (const [part, text] of [...ticks].sort((a, b) => a[0] - b[0])) {
    if (part < -1e-6 || part > 1 + 1e-6) continue;
    const x = box.left + part * box.width, half = wide(text) / 2;
    if (grid) svg.append(drawn("line", { class: "kv-grid", x1: x, x2: x, y1: box.top, y2: box.top + box.height }));
    // A label at the edge moves inwards.
    const middle = Math.min(Math.max(x, half), box.left + box.width + 10 - half);
    if (middle - half < free) continue;
    free = middle + half + 6;
    svg.append(drawn("line", { class: "kv-axis", x1: x, x2: x, y1: box.top + box.height, y2: box.top + box.height + 4 }),
      words([text], middle, box.top + box.height + 6 + FONT / 2, { "text-anchor": "middle" }));
  }
}

/** Ticks and grid lines of a vertical axis. */
function along(svg, box, ticks, grid) {
  for (const [part, text] of ticks) {
    if (part < -1e-6 || part > 1 + 1e-6) continue;
    const y = box.top + (1 - part) * box.height;
    if (grid) svg.append(drawn("line", { class: "kv-grid", x1: box.left, x2: box.left + box.width, y1: y, y2: y }));
    svg.append(words([text], box.left - 5, y, { "text-anchor": "end" }));
  }
}

const borders = (svg, box) => svg.append(drawn("path", { class: "kv-axis",
  d: `M${box.left} ${box.top}V${box.top + box.height}H${box.left + box.width}` }));

/** Where lines are drawn: what leaves the scale is cut off a little beyond the axes, so that markers on them stay whole. */
function within(svg, box) {
  const [x, y, width, height] = [box.left - 5, box.top - 5, box.width + 10, box.height + 10];
  const inner = drawn("svg", { x, y, width, height, viewBox: `${x} ${y} ${width} ${height}` });
  svg.append(inner);
  return inner;
}

/** One line of a panel: its interval, itself and its markers. sideways: places stand on the vertical axis. */
function lineOf(svg, panel, line, x, y, sideways) {
  const of = look(line.line), group = drawn("g", { class: of.color });
  const places = line.at.map((at, n) => (sideways ? [x(line.value[n]), y(at)] : [x(at), y(line.value[n])]));
  const seen = places.filter(([a, b]) => Number.isFinite(a) && Number.isFinite(b));
  const text = (a, b) => `${a.toFixed(1)} ${b.toFixed(1)}`;
  if (line.faint.length) {
    const [at, value] = line.faint, r = at.length > 400 ? 1.4 : 2;
    group.append(drawn("path", { class: "kv-faint", d: at.map((a, n) => [x(a), y(value[n])])
      .filter(([a, b]) => Number.isFinite(a) && Number.isFinite(b)).map(([a, b]) => mark("o", a, b, r)).join("") }));
  }
  if (line.low && panel.ends === "band" && !sideways) {
    const ends = line.at.map((at, n) => [x(at), y(line.low[n]), y(line.high[n])]).filter((end) => end.every(Number.isFinite));
    const steps = (side) => ends.flatMap((end, n) => (panel.kind === "step" && n ? [text(end[0], ends[n - 1][side]), text(end[0], end[side])]
      : [text(end[0], end[side])]));
    if (ends.length) group.append(drawn("path", { class: "kv-band", d: `M${[...steps(2), ...steps(1).reverse()].join("L")}Z` }));
  } else if (line.low) {
    group.append(drawn("path", { class: "kv-ends", d: line.at.map((at, n) => {
      const ends = sideways ? [x(line.low[n]), y(at), x(line.high[n]), y(at)] : [x(at), y(line.low[n]), x(at), y(line.high[n])];
      return ends.every(Number.isFinite) ? `M${text(ends[0], ends[1])}L${text(ends[2], ends[3])}` : "";
    }).join("") }));
  }
  if (!sideways && panel.kind !== "points" && seen.length > 1) {
    const path = panel.kind === "step" ? `M${seen.map(([a, b], n) => (n ? `H${a.toFixed(1)}V${b.toFixed(1)}` : text(a, b))).join("")}`
      : `M${seen.map(([a, b]) => text(a, b)).join("L")}`;
    group.append(drawn("path", { class: "kv-stroke", d: path, "stroke-dasharray": of.dashes }));
  }
  if (panel.kind !== "step" || seen.length === 1) {
    const every = !sideways && panel.kind !== "points" && seen.length > 40 ? Math.floor(seen.length / 20) : 1;
    const r = sideways ? 3.6 : seen.length > 400 ? 1.8 : 3;
    group.append(drawn("path", { class: of.hollow ? "kv-mark kv-hollow" : "kv-mark",
      d: seen.filter((_, n) => n % every === 0).map(([a, b]) => mark(of.marker, a, b, r)).join("") }));
  }
  svg.append(group);
  if (line.marked?.[0].length) {
    svg.append(drawn("path", { class: "kv-cross", d: line.marked[0].map((at, n) => [x(at), y(line.marked[1][n])])
      .filter(([a, b]) => Number.isFinite(a) && Number.isFinite(b))
      .map(([a, b]) => `M${text(a - 4, b - 4)}L${text(a + 4, b + 4)}M${text(a - 4, b + 4)}L${text(a + 4, b - 4)}`).join("") }));
  }
  (line.beyond || []).forEach((said, n) => {
    if (!said) return;
    const shown = `${line.value[n] > 0 ? "▲" : "▼"} ${said}`, half = wide(shown, 11) / 2;
    const at = sideways ? [x(line.value[n]) - Math.sign(line.value[n]) * (half + 8), y(line.at[n])]
      : [x(line.at[n]), y(line.value[n]) + Math.sign(line.value[n]) * 12];
    svg.append(words([shown], at[0], at[1], { class: "kv-over", "text-anchor": "middle" }));
  });
}

/** A panel of lines, points, steps, medians or dots, so many pixels wide. */
function series(panel, facet, width, ranges) {
  const sideways = panel.kind === "dots";
  const lines = facet.lines, count = panel.names.length;
  const apart = sideways || (panel.xscale === "whole" && panel.ends === "bars");
  const gap = apart ? Math.min(0.08, 0.4 / count) * (sideways ? -2.5 : 1) : 0;
  const moved = lines.map((line) => ({ ...line, at: line.at.map((at) => at + (line.line - (count - 1) / 2) * gap) }));
  if (sideways) {
    // Long names stand above their dots where they would take the room of these.
    const widest = Math.max(...panel.labels.map((label) => wide(label)));
    const over = widest > 0.4 * width, left = over ? 6 : widest + 12;
    const rows = panel.labels.map((label) => (over ? wrapped(label, width - 12).length * FONT * 1.2 + 26 : 22));
    const height = rows.reduce((a, b) => a + b, 0);
    const axis = axisOf(panel.scale, ranges.value, Math.floor((width - left) / 60), "0");
    const { svg, box } = frame(width, height, left, panel, facet, { below: [panel.label] });
    across(svg, box, axis.ticks, true);
    borders(svg, box);
    if (axis.strip) svg.prepend(drawn("rect", { class: "kv-strip-zero", x: box.left, y: box.top, width: box.width * axis.strip, height }));
    const middles = [];
    let at = box.top + height;
    panel.labels.forEach((label, n) => {
      at -= rows[n];
      if (over) {
        const said = wrapped(label, width - 12);
        svg.append(words(said, left + 4, at + 4 + (said.length * FONT * 1.2) / 2));
        middles.push(at + rows[n] - 12);
      } else {
        svg.append(words([label], left - 6, at + rows[n] / 2, { "text-anchor": "end" }));
        middles.push(at + rows[n] / 2);
      }
    });
    const x = (value) => box.left + axis.at(value) * box.width;
    const y = (place) => middles[Math.round(place)] - (place - Math.round(place)) * 22;
    if (known(panel.level)) svg.append(drawn("line", { class: "kv-level", x1: x(panel.level), x2: x(panel.level), y1: box.top, y2: box.top + height }));
    const inner = within(svg, box);
    moved.forEach((line) => lineOf(inner, panel, line, x, y, true));
    for (const [place, why] of facet.why) {
      const said = wrapped(why, box.width - 16)[0];
      svg.append(words([said === why ? why : `${said} …`], box.left + 6, y(place), { class: "kv-soft" }));
    }
    return svg;
  }
  const height = Math.max(150, Math.min(210, width * 0.5));
  const axis = axisOf(panel.scale, ranges.value, 6);
  const left = Math.max(0, ...axis.ticks.map(([, text]) => wide(text))) + 10;
  const bottom = axisOf(panel.xscale, ranges.place, Math.floor((width - left) / 44), "0");
  const { svg, box } = frame(width, height, left, panel, facet, { below: [panel.xlabel], above: panel.label, strip: axis.strip });
  along(svg, box, axis.ticks, true);
  across(svg, box, bottom.ticks, false);
  borders(svg, box);
  const x = (value) => box.left + bottom.at(value) * box.width;
  const y = (value) => (known(value) ? box.top + (1 - axis.at(value)) * box.height : Number.NaN);
  if (panel.level === "equal") {
    const ends = [bottom, axis].map((one) => one.at);
    const both = [...ranges.place, ...ranges.value].filter((value) => known(value) && ends.every((at) => at(value) >= 0 && at(value) <= 1));
    if (both.length) {
      const [low, high] = [both.reduce((a, b) => Math.min(a, b)), both.reduce((a, b) => Math.max(a, b))];
      svg.append(drawn("line", { class: "kv-level", x1: x(low), y1: y(low), x2: x(high), y2: y(high) }));
    }
  } else if (known(panel.level)) {
    svg.append(drawn("line", { class: "kv-level", x1: box.left, x2: box.left + box.width, y1: y(panel.level), y2: y(panel.level) }));
  }
  const inner = within(svg, box);
  moved.forEach((line) => lineOf(inner, panel, line, x, y, false));
  for (const [, why] of facet.why) {
    svg.append(words(wrapped(why, box.width - 16), box.left + box.width / 2, box.top + box.height / 2, { class: "kv-soft", "text-anchor": "middle" }));
  }
  return svg;
}

let hatches = 0;

/** A panel of cells: neighbours that look alike are one rectangle. */
function map(panel, facet, width, scale) {
  const { rows, across: columns, numbers } = panel;
  const widest = Math.max(...rows.map((label) => wide(label)));
  const left = Math.min(widest, 0.45 * width) + 10;
  const each = Math.max(12, Math.min(26, 240 / rows.length)), height = rows.length * (rows.length > 40 ? 6 : each);
  const cell = (width - left - 10) / columns.length;
  const long = Math.max(...columns.map((label) => wide(label)));
  const upright = !numbers[1] && long + 6 > cell ? Math.min(long, 150) * 0.75 + 12 : null;
  const { svg, box } = frame(width, height, left, panel, facet, { below: [panel.xlabel], above: numbers[0] ? panel.ylabel : "", upright });
  const high = box.height / rows.length, of = (row) => box.top + (rows.length - 1 - row) * high;
  const name = `kv-hatch-${hatches += 1}`;
  svg.append(drawn("defs", {}, drawn("pattern", { id: name, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    drawn("rect", { width: 2, height: 5, class: "kv-hatch" }))));
  facet.cells.forEach((line, row) => {
    for (let begin = 0, end = 1; end <= line.length; end += 1) {
      if (end < line.length && line[end] === line[begin]) continue;
      const value = line[begin];
      const made = drawn("rect", { x: box.left + begin * cell, y: of(row), width: (end - begin) * cell + 0.3, height: high + 0.3 });
      if (known(value)) paint(made, value, scale);
      else made.setAttribute("fill", `url(#${name})`);
      if (columns.length * rows.length <= 2000) {
        const where = begin + 1 === end ? columns[begin] : `${columns[begin]} to ${columns[end - 1]}`;
        made.append(drawn("title", {}, `${panel.ylabel} ${rows[row]}, ${panel.xlabel} ${where}: ${number(value)}`));
      }
      svg.append(made);
      begin = end;
    }
  });
  facet.written.forEach((line, row) => line.forEach((text, column) => {
    if (!text || wide(text, 11) + 6 > cell || high < 11) return;
    const strong = shade(facet.cells[row][column], scale)[1] > 0.55;
    svg.append(words([text], box.left + (column + 0.5) * cell, of(row) + high / 2, { class: strong ? "kv-in kv-strong" : "kv-in", "text-anchor": "middle" }));
  }));
  const step = Math.ceil((FONT * 1.2) / high);
  rows.forEach((label, row) => {
    if (row % step) return;
    const shown = wide(label) > left - 8 ? `${label.slice(0, Math.floor((label.length * (left - 20)) / wide(label)))}…` : label;
    svg.append(words([shown], box.left - 5, of(row) + high / 2, { "text-anchor": "end" }));
  });
  if (upright) {
    columns.forEach((label, column) => {
      const x = box.left + (column + 0.5) * cell, y = box.top + box.height + 8;
      if (column && cell < FONT && column % Math.ceil(FONT / cell)) return;
      svg.append(drawn("text", { transform: `rotate(-45 ${x} ${y})`, x, y, "text-anchor": "end", "dominant-baseline": "central" }, label));
    });
  } else {
    const every = Math.max(1, Math.ceil((long + 8) / cell)), nice = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => n >= every) ?? every;
    across(svg, box, columns.map((label, column) => [(column + 0.5) / columns.length, label]).filter((_, n) => n % (numbers[1] ? nice : 1) === 0), false);
  }
  svg.append(drawn("rect", { class: "kv-axis", x: box.left, y: box.top, width: box.width, height: box.height }));
  if (panel.level !== null) {
    const x = box.left + panel.level * cell;
    svg.append(drawn("line", { class: "kv-level kv-end", x1: x, x2: x, y1: box.top, y2: box.top + box.height }));
  }
  return svg;
}

/** The names of lines beside what they look like. */
function names(panel) {
  const shown = panel.names.map((name, index) => {
    const of = look(index), line = !["dots", "points"].includes(panel.kind);
    const sample = drawn("svg", { width: 28, height: 12, class: of.color, "aria-hidden": "true" });
    if (line) sample.append(drawn("path", { class: "kv-stroke", d: "M1 6H27", "stroke-dasharray": of.dashes }));
    if (panel.kind !== "step") sample.append(drawn("path", { class: of.hollow ? "kv-mark kv-hollow" : "kv-mark", d: mark(of.marker, 14, 6, 3) }));
    return element("span", {}, sample, name);
  });
  if (panel.mark && panel.facets.some((facet) => facet.lines.some((line) => line.marked?.[0].length))) {
    shown.push(element("span", {}, drawn("svg", { width: 12, height: 12, "aria-hidden": "true" }, drawn("path", { class: "kv-cross", d: "M2 2L10 10M2 10L10 2" })),
      panel.mark));
  }
  return shown.length > 1 ? [element("div", { class: "kv-legend kv-names" }, ...shown)] : [];
}

/** A row of panels, so many pixels wide: as many beside one another as can be read. */
function panelOf(panel, width) {
  const least = panel.kind === "map" ? 240 : 210;
  const columns = Math.max(1, Math.min(panel.facets.length, panel.columns, Math.floor((width + 16) / (least + 16))));
  // Neighbours do not stretch over a whole desk.
  const each = Math.min((width - 16 * (columns - 1)) / columns, 720);
  const made = [];
  if (panel.kind === "map") {
    const values = panel.facets.flatMap((facet) => facet.cells.flat());
    const scale = scaleOf(values, panel.scale === "zero" ? "log" : "diverging", panel.scale === "signed" ? [-1, 1] : null);
    made.push(element("div", { class: "kv-panels" }, ...panel.facets.map((facet) => map(panel, facet, each, scale))),
      legend(scale, panel.label.replace(/\s+/g, " ")));
  } else {
    const every = panel.facets.flatMap((facet) => facet.lines);
    const ranges = { place: every.flatMap((line) => [...line.at, ...(line.faint[0] || [])]),
      value: every.flatMap((line) => [...line.value, ...(line.low || []), ...(line.high || []), ...(line.faint[1] || [])]) };
    made.push(element("div", { class: "kv-panels" }, ...panel.facets.map((facet) => series(panel, facet, each, ranges))), ...names(panel));
  }
  return made;
}

/** Draws a chart into an element, and again where its width changes. */
function chart(root, data) {
  let before = 0;
  const draw = () => {
    const style = getComputedStyle(root);
    const width = Math.floor(root.clientWidth - Number.parseFloat(style.paddingLeft) - Number.parseFloat(style.paddingRight));
    // What is folded has no width yet.
    if (width < 40 || Math.abs(width - before) < 2) return;
    before = width;
    root.replaceChildren(element("p", { class: "kv-title" }, data.title), ...data.panels.flatMap((panel) => panelOf(panel, width)),
      ...data.notes.map((note) => element("p", { class: "kv-note" }, note)));
  };
  draw();
  new ResizeObserver(draw).observe(root);
}

for (const root of document.querySelectorAll("[data-chart]")) chart(root, await unpacked(root.dataset.chart));
