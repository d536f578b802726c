// The page of a comparison: the texts of both paths, and for a chosen token its heads, its layers and their attention.

/** What a comparison's packed data say of one step: its row in the columns. */
class Comparison {
  constructor(data) {
    Object.assign(this, data);
    const seenKl = [];
    for (let row = 0; row < data.columns.kl.length; row += 1) if (!this.other(row)) seenKl.push(this.value("kl", row));
    this.scale = scaleOf(seenKl, "log");
  }

  value(name, row) {
    return this.columns[name][row];
  }

  text(side, row) {
    return this.texts[this.columns[`text_${side}`][row]];
  }

  flipped(row) {
    return this.columns.flipped[row];
  }

  /** Whether the paths hold different texts at a step. */
  other(row) {
    return this.protocol === "free" && this.columns.after_flip[row];
  }

  /** The step of a prompt that is looked at first: its first flip, or its largest KL. */
  telling(prompt) {
    let best = 0;
    for (let step = 0; step < prompt.steps; step += 1) {
      const row = prompt.start + step;
      if (this.other(row)) break;
      if (this.flipped(row)) return step;
      if (this.value("kl", row) > this.value("kl", prompt.start + best)) best = step;
    }
    return best;
  }

  /** The texts at the positions before a step, as a path read them. */
  positions(prompt, step, side) {
    const found = prompt.texts.map((at) => this.texts[at]);
    while (found.length < prompt.tokens) found.push("?");
    const fed = this.protocol === "free" ? side : "a";
    for (let at = 0; at < step; at += 1) found.push(this.text(fed, prompt.start + at));
    return found;
  }
}

/** The prompts in the order in which they are chosen from: those that flip, by their step, then by their largest KL. */
function inOrder(comparison) {
  const ranked = comparison.prompts.map((prompt) => {
    const step = comparison.telling(prompt);
    const row = prompt.start + step;
    return { prompt, step, flips: comparison.flipped(row) && !comparison.other(row), kl: comparison.value("kl", row) ?? -1 };
  });
  return ranked.sort((x, y) => Number(y.flips) - Number(x.flips) || (x.flips ? x.step - y.step : y.kl - x.kl));
}

/** A choice among texts, under a label. */
function choice(label, options, onchange) {
  const select = element("select", { onchange: () => onchange(Number(select.value)) });
  options.forEach((text, at) => select.append(element("option", { value: at }, text)));
  return [element("label", { class: "kv-choice" }, `${label} `, select), select];
}

/** Facts of both paths beside each other. */
function facts(comparison, row) {
  const pair = (label, name, unit, none = "not recorded") => element("tr", {}, element("th", { scope: "row" }, label), ...["a", "b"].map((side) => {
    const value = comparison.value(`${name}_${side}`, row);
    return element("td", {}, value === null ? none : `${number(value)}${unit ? ` ${unit}` : ""}`);
  }));
  const texts = element("tr", {}, element("th", { scope: "row" }, "token"),
    ...["a", "b"].map((side) => element("td", {}, element("code", {}, seen(comparison.text(side, row))))));
  const head = element("tr", {}, element("td"), ...["a", "b"].map((side) => element("th", { scope: "col" }, `path ${side}: ${comparison.paths[side]}`)));
  const rows = [texts, pair("its probability, at temperature 1", "probability", "")];
  if (comparison.unit) rows.push(pair("its distance to the decision boundary", "boundary", comparison.unit, comparison.no_distance));
  if (comparison.unit !== "logits") rows.push(pair("logit margin, which does not decide here", "margin", "logits"));
  const both = (label, name, unit) => element("tr", {}, element("th", { scope: "row" }, label),
    element("td", { colspan: 2 }, `${number(comparison.value(name, row))} ${unit}`));
  rows.push(both("KL of the next-token distributions", "kl", "nats"), both("largest difference of any logit", "max_abs_logit", "logits"));
  return element("div", { class: "kv-wide" }, element("table", { class: "kv-facts" }, element("thead", {}, head), element("tbody", {}, ...rows)));
}

/** What a token says when it is pointed at. */
function saidOf(comparison, row, step, side) {
  const text = `step ${step}, ${JSON.stringify(comparison.text(side, row))}`;
  if (comparison.other(row)) return `${text}: after the flip, another text on each path`;
  const flip = comparison.flipped(row) ? `; here path a chose ${JSON.stringify(comparison.text("a", row))}, path b ${JSON.stringify(comparison.text("b", row))}` : "";
  return `${text}: KL ${number(comparison.value("kl", row))} nats${flip}`;
}

/** The lines of a prompt's text: two where the paths read their own tokens, else one that shows the other token under its own. */
function linesOf(comparison, prompt) {
  const line = (side) => {
    const tokens = [];
    for (let step = 0; step < prompt.steps; step += 1) {
      const row = prompt.start + step;
      const other = comparison.other(row), flipped = comparison.flipped(row);
      const look = [other && "kv-other", flipped && !other && "kv-flip", row in comparison.rows && "kv-kept"].filter(Boolean).join(" ");
      const token = { text: comparison.text(side, row), said: saidOf(comparison, row, step, side), look };
      if (!other) token.value = comparison.value("kl", row);
      if (comparison.protocol !== "free" && flipped) token.below = comparison.text("b", row);
      tokens.push(token);
    }
    return { name: `path ${side}: ${comparison.paths[side]}`, tokens, scale: comparison.scale };
  };
  return comparison.protocol === "free" ? [line("a"), line("b")] : [line("a")];
}

/** The map of heads and the drift by layer of one step; a click on a head is told to onhead(layer, head). */
function drawStep(root, comparison, row, onhead) {
  const map = comparison.maps[row];
  const { map_layers: layers, map_heads: heads, drift_layers: drifts } = comparison;
  root.replaceChildren();
  if (!map) {
    if (comparison.patterns || drifts.length) {
      root.append(element("p", {}, "The map of this step is not in the page, which has room for some: first flips and the largest KL first."));
    }
    return;
  }
  if (heads.length) {
    const place = element("div");
    heatmap(place, {
      rows: layers, columns: heads, values: map.heads, unit: "nats", scale: "log", rowName: "layer", columnName: "head",
      title: "KL of the newest query's attention, a against b: click a head",
      onpick: (layer, head) => onhead(layers[layer], heads[head]),
    });
    root.append(place);
  }
  if (drifts.length) {
    const place = element("div");
    bars(place, { labels: drifts, values: map.drift, title: `Drift of ${comparison.site} by layer`,
      unit: "relative L2 at the newest position", rowName: "layer" });
    root.append(place);
  }
}

/** For how many steps the page has maps and attention rows, and why not for more. */
function coverage(comparison) {
  const { recorded, patterns, derived } = comparison;
  if (!recorded) return ["No activation was recorded."];
  const [steps, maps, rows] = [comparison.columns.kl, comparison.maps, comparison.rows].map((all) => Object.keys(all).length);
  const texts = [];
  if (!patterns) texts.push("No attention pattern was recorded.");
  else if (derived) texts.push("Attention was derived from queries and keys, beside a kernel that shows none.");
  if (maps < steps || (rows < steps && patterns))
    texts.push(`Of ${steps} steps ${maps} have their map here and ${rows} their attention (dotted): flips and the largest KL first.`);
  return texts;
}

/** The attention of one head on both paths and their difference, over the tokens it looks at. */
function drawHead(root, comparison, prompt, step, layer, head) {
  const rows = comparison.rows[prompt.start + step];
  const row = rows?.find((each) => each.layer === layer && each.head === head);
  // How to see the attention of every query instead of the newest alone.
  const call = `kv.attention_comparison(both, prompts[${prompt.example}], model=model, example=${prompt.example}, step=${step}, layers=[${layer}])`;
  const square = comparison.protocol === "matched"
    ? `Every query's attention, for any step, where both is this comparison (kv.load(FOLDER)): ${call}.`
    : `Every query's attention is compared on one text: kv.compare(..., protocol='matched'), then ${call}.`;
  root.replaceChildren(element("p", { class: "kv-title" }, `Attention of layer ${layer}, head ${head}, at step ${step}`));
  if (!row) {
    root.append(element("p", {}, `${rows ? "Of this step the heads of largest KL were kept, and this is none of them."
      : "The attention of this step was not kept: tokens with dots under them have theirs."} ${square}`));
    return;
  }
  const { a, b, difference } = row;
  const places = [...a.keys()];
  const texts = comparison.positions(prompt, step, "a");
  const both = scaleOf([...a, ...b], "sequential"), apart = scaleOf(difference, "diverging");
  const line = (name, values, scale) => ({ name, scale, tokens: places.map((at) => ({ text: texts[row.first + at] ?? "?", value: values[at],
    said: `position ${row.first + at}, ${JSON.stringify(texts[row.first + at] ?? "?")}: a ${number(a[at])}, b ${number(b[at])}, a − b ${number(difference[at])}` })) });
  const place = element("div");
  strips(place, { title: `attention of layer ${layer}, head ${head}`, lines: [line(`path a: ${comparison.paths.a}`, a, both),
    line(`path b: ${comparison.paths.b}`, b, both), line("difference, a − b", difference, apart)] });
  root.append(place, legend(both, "", "attention probability"), legend(apart, "", "difference of probability"));
  if (difference.every((value) => value === 0)) root.append(element("p", {}, "Both paths' attention is exactly equal here."));
  const largest = places.filter((at) => difference[at]).sort((x, y) => Math.abs(difference[y]) - Math.abs(difference[x])).slice(0, 8);
  if (largest.length) {
    const head = element("tr", {}, ...["position", "token", "path a", "path b", "a − b"].map((text) => element("th", { scope: "col" }, text)));
    const body = largest.map((at) => element("tr", {}, element("td", {}, String(row.first + at)), element("td", {}, element("code", {}, seen(texts[row.first + at] ?? "?"))),
      ...[a[at], b[at], difference[at]].map((value) => element("td", { class: "kv-number" }, number(value)))));
    root.append(element("p", { class: "kv-title" }, `Where they differ most (${largest.length} of ${a.length} positions)`),
      element("div", { class: "kv-wide" }, element("table", { class: "kv-facts" }, element("thead", {}, head), element("tbody", {}, ...body))));
  }
  root.append(element("p", { class: "kv-note" }, square));
}

/** What holds a prompt back from the list: which ones are wanted, and what their texts must hold. */
function wanted(comparison, { prompt, flips }, which, text) {
  if (which && flips !== (which === "flip")) return false;
  if (!text) return true;
  const places = [...prompt.texts];
  for (const side of ["a", "b"]) places.push(...comparison.columns[`text_${side}`].slice(prompt.start, prompt.start + prompt.steps));
  return `${prompt.id} ${places.map((at) => comparison.texts[at]).join("")}`.toLowerCase().includes(text);
}

/** One comparison, in an element: prompts to choose from, its texts, and what is chosen of them.
 *
 * moved(example, step, head) hears what is shown. Returns { show(example, step, head), next(prompts, steps) }.
 */
function drawComparison(root, comparison, moved) {
  const order = inOrder(comparison);
  const texts = element("div"), detail = element("div", { class: "kv-detail" }), prompted = element("p", { class: "kv-prompt" });
  let shown = [], prompt, step, strip;
  const showHead = (place, layer, head) => {
    drawHead(place, comparison, prompt, step, layer, head);
    moved(prompt.example, step, [layer, head]);
  };
  const showStep = (to, head = null) => {
    step = to;
    const row = prompt.start + step;
    const attention = element("div", { class: "kv-attention" }), beside = element("div", { class: "kv-beside" });
    const where = comparison.other(row) ? ", after the flip: each path reads a text of its own" : "";
    detail.replaceChildren(element("h3", {}, `${seen(prompt.id)}, step ${step}${where}`), facts(comparison, row), beside, attention);
    drawStep(beside, comparison, row, (layer, at) => showHead(attention, layer, at));
    moved(prompt.example, step, null);
    if (head) showHead(attention, ...head);
  };
  const showPrompt = (at, to = shown[at].step, head = null) => {
    ({ prompt } = shown[at]);
    select.value = at;
    prompted.replaceChildren(element("b", {}, "prompt "), ...prompt.texts.map((at) => seen(comparison.texts[at], "text")));
    strip = strips(texts, { lines: linesOf(comparison, prompt), chosen: [0, to], title: `what ${prompt.id} became`,
      onpick: (line, index) => showStep(index) });
    showStep(to, head);
  };
  const named = ({ prompt: of, step: at, flips, kl }) => flips ? `${seen(of.id)}: flips at step ${at}` : `${seen(of.id)}: largest KL ${number(kl)} nats, step ${at}`;
  const [label, select] = choice("Prompt", [], (at) => showPrompt(at));
  const count = element("output", { class: "kv-said" });
  const sift = () => {
    shown = order.filter((each) => wanted(comparison, each, which.value, search.value.trim().toLowerCase()));
    select.replaceChildren(...shown.map((each, at) => element("option", { value: at }, named(each))));
    count.textContent = `${shown.length} of ${order.length} prompts; keys: j and k for the next prompt, ← and → for the next token`;
    if (shown.length) showPrompt(0);
  };
  const search = element("input", { type: "search", placeholder: "search prompts and texts", "aria-label": "search prompts and texts", oninput: sift });
  const which = element("select", { "aria-label": "which prompts", onchange: sift },
    ...[["", "all"], ["flip", "that flip"], ["same", "that do not"]].map(([value, text]) => element("option", { value }, text)));
  label.append(" ", which, " ", search);
  const key = legend(comparison.scale, "nats", "a token's colour is the KL at its step");
  const marks = [["kv-flip", "flips: the paths chose different tokens"], ["kv-kept", "its attention rows are here"]];
  if (comparison.protocol === "free") marks.push(["kv-other", "after the flip: another text, not coloured"]);
  key.append(...marks.map(([look, text]) => element("span", {}, element("em", { class: look }, "token"), text)));
  root.replaceChildren(label, count, prompted, texts, key, ...coverage(comparison).map((text) => element("p", { class: "kv-note" }, text)), detail);
  sift();
  const show = (example, to, head) => {
    const at = shown.findIndex((each) => each.prompt.example === example);
    if (at >= 0 && to < shown[at].prompt.steps) showPrompt(at, to, head);
  };
  return {
    show,
    next(prompts, steps) {
      const at = Math.min(Math.max(Number(select.value) + prompts, 0), shown.length - 1);
      if (prompts && shown.length) showPrompt(at);
      else if (steps && prompt) show(prompt.example, Math.min(Math.max(step + steps, 0), prompt.steps - 1));
    },
  };
}

/** The texts of all comparisons of a page. Links to #at-COMPARISON-EXAMPLE-STEP choose, and with -LAYER-HEAD a head too. */
async function drawPage(root) {
  const packed = [...root.querySelectorAll("[data-packed]")];
  const made = new Map();
  const content = element("div");
  let drawn = null, quiet = true;
  const open = async (at) => {
    if (!made.has(at)) made.set(at, new Comparison(await unpacked(packed[at].dataset.packed)));
    drawn = drawComparison(content, made.get(at), (example, step, head) => {
      // A page in a frame of a notebook has no address of its own.
      if (!quiet && location.protocol !== "about:") history.replaceState(null, "", `#at-${[at, example, step, ...(head ?? [])].join("-")}`);
    });
    return drawn;
  };
  const [label, select] = choice("Comparison", packed.map((each) => each.dataset.label), (at) => open(at));
  root.querySelector(".note")?.remove();
  if (packed.length > 1) root.append(label);
  root.append(content);
  const follow = async () => {
    const found = /^#at-(\d+)-(\d+)-(\d+)(?:-(\d+)-(\d+))?$/.exec(location.hash);
    if (!found || Number(found[1]) >= packed.length) return false;
    const [, at, example, step, layer, head] = found.map(Number);
    select.value = at;
    (await open(at)).show(example, step, found[4] ? [layer, head] : null);
    root.scrollIntoView();
    return true;
  };
  addEventListener("hashchange", follow);
  addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
    const move = { j: [1, 0], k: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
    if (move) { event.preventDefault(); drawn?.next(...move); }
  });
  if (!(await follow()) && packed.length) await open(0);
  quiet = false;
  root.dataset.drawn = "yes";
}

for (const root of document.querySelectorAll("#kv-changes")) drawPage(root);
