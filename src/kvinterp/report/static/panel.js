// The panel to patch by hand, in a notebook. Stands behind draw.js in one text; anywidget calls render().
// It sends what is asked ("asked") and the next row of the map it waits for ("wanted"). Everything it shows was made in
// Python and is set before "answered" counts up. Data are only ever text: nothing here sets markup.

const PANEL_CHOICES = [["model", "Model"], ["donor", "What gives (donor)"], ["direction", "Direction"], ["site", "Site"],
  ["layer", "Layer"], ["head", "Head"], ["step", "Step"], ["positions", "Positions"], ["view", "Map"],
  ["distance", "Distance"]];

/** A choice of one of several values, with what the chosen one means under it; tell(value) hears it. */
function chooser(name, title, tell) {
  const select = element("select", { name, onchange: () => tell(JSON.parse(select.value)) });
  const meaning = element("small");
  const shown = element("label", { class: name === "model" ? "kv-twice" : false }, element("span", {}, title), select, meaning);
  return {
    shown,
    show(options, value) {
      const now = JSON.stringify(value);
      const known = options.some(([each]) => JSON.stringify(each) === now);
      const all = known ? options : [...options, [value, String(value), "there is none"]];
      select.replaceChildren(...all.map(([each, text, means]) =>
        element("option", { value: JSON.stringify(each), title: means }, String(text))));
      select.value = now;
      select.disabled = all.length < 2;
      meaning.textContent = all.find(([each]) => JSON.stringify(each) === now)[2];
    },
  };
}

/** A table with a caption; cells are texts. */
function plainTable(caption, head, rows) {
  const line = (kind, cells) => element("tr", {}, ...cells.map((cell) => element(kind, {}, String(cell))));
  return element("table", { class: "kv-plain" }, element("caption", {}, caption),
    element("thead", {}, line("th", head)), element("tbody", {}, ...rows.map((row) => line("td", row))));
}

/** What the chosen patch did, or what was wrong. */
function showAnswer(root, answer, error) {
  root.replaceChildren();
  if (error) root.append(element("p", { role: "alert", class: "kv-alert" }, error));
  if (!answer.lead) return;
  root.append(
    element("p", { class: "kv-lead" }, element("b", {}, answer.lead), ` ${answer.rest}`),
    element("p", {}, answer.said),
    element("div", { class: "kv-wide" },
      plainTable("Distances to the donor's logits (of an ablation: to the unpatched ones)",
        ["distance", "before", "after", "recovery"], answer.distances)),
    element("p", { class: "kv-soft" }, answer.step),
    element("div", { class: "kv-lists" }, ...answer.lists.map((list) => element("div", { class: "kv-wide" },
      plainTable(list.title, ["token", "probability", "logit"], list.rows)))),
    element("p", { class: "kv-soft" }, answer.seconds),
  );
}

/** What was tried, each of which can be gone back to. */
function showTried(root, tried, back) {
  root.replaceChildren(...tried.entries.map((entry, at) => element("li", {},
    element("button", { type: "button", "aria-current": at === tried.at ? "true" : false, onclick: () => back(at) },
      `${entry.said}: ${entry.found}`))));
}

function render({ model, el }) {
  let stopped = false, shownMap = "", number = 0;
  const busy = element("span", { role: "status", class: "kv-soft" });
  const send = (name, value) => {
    model.set(name, value);
    model.save_changes();
  };
  const ask = (changes) => {
    busy.textContent = "computing …";
    const { back, ...asked } = model.get("asked");
    send("asked", { ...asked, ...changes });
  };
  const goBack = (at) => ask({ ...model.get("tried").entries[at].asked, view: model.get("asked").view,
    distance: model.get("asked").distance, back: at });

  const choosers = PANEL_CHOICES.map(([name, title]) => [name, chooser(name, title, (value) => ask({ [name]: value }))]);
  const area = (name, title) => {
    const text = element("textarea", { name, rows: 3, spellcheck: "false", onchange: () => ask({ [name]: text.value }) });
    return [name, text, element("label", { class: "kv-across" }, element("span", {}, title), text)];
  };
  const areas = [area("prompt", "Prompt, which is patched"),
    area("other", "Other prompt, for the donors prompt, mean and resample")];
  const seed = element("input", { type: "number", name: "seed", step: 1,
    onchange: () => ask({ seed: Math.trunc(Number(seed.value)) || 0 }) });
  const undo = element("button", { type: "button", name: "undo", onclick: () => {
    const tried = model.get("tried");
    goBack(tried.entries[tried.at].before);
  } }, "Undo");
  const filling = element("button", { type: "button", name: "filling", onclick: () => { stopped = !stopped; showMap(); } });
  const [answer, map, mapNote, list] = ["div", "div", "p", "ol"].map((kind) => element(kind));

  function showMap() {
    const made = model.get("map");
    if (!made.name) {
      map.replaceChildren();
      mapNote.textContent = "";
      filling.hidden = true;
      return;
    }
    if (made.name !== shownMap) stopped = false;
    shownMap = made.name;
    const on = map.contains(document.activeElement) ? document.activeElement.dataset.at : null;
    const picked = (row, column) => ask({ [made.fields[0]]: made.values[0][row], [made.fields[1]]: made.values[1][column] });
    const drawn = heatmap(map, { ...made, values: made.cells, rowName: made.fields[0], columnName: made.fields[1], onpick: picked });
    if (on) drawn.cell(...on.split(" ").map(Number))?.focus();
    const left = made.rows.length - made.filled;
    const said = [left ? `${made.filled} of ${made.rows.length} rows are filled.` : "Each cell is a patch of its own: click one."];
    if (made.beyond) said.push(`${made.beyond} cells lie beyond −1 to 1 and have the colour of that end.`);
    mapNote.textContent = said.join(" ");
    filling.hidden = left === 0;
    filling.textContent = stopped ? "Go on filling the map" : "Stop filling the map";
    if (left && !stopped) send("wanted", { map: made.name, row: made.filled, number: number += 1 });
  }

  function show() {
    busy.textContent = "";
    const asked = model.get("asked"), choices = model.get("choices"), tried = model.get("tried");
    for (const [name, of] of choosers) of.show(choices[name] ?? [], asked[name]);
    for (const [name, text] of areas) if (document.activeElement !== text) text.value = asked[name];
    seed.value = asked.seed;
    seed.disabled = asked.donor !== "resample";
    undo.disabled = tried.at < 0 || tried.entries[tried.at].before === tried.at;
    showAnswer(answer, model.get("answer"), model.get("error"));
    showTried(list, tried, goBack);
    showMap();
  }

  answer.setAttribute("aria-live", "polite");
  el.classList.add("kv", "kvinterp-panel");
  el.replaceChildren(
    element("div", { class: "kv-controls" }, ...areas.map(([, , label]) => label), ...choosers.map(([, of]) => of.shown),
      element("label", {}, element("span", {}, "Seed of resample"), seed)),
    element("div", { class: "kv-actions" }, undo, filling, busy),
    element("div", { class: "kv-beside" }, element("section", {}, map, mapNote), answer),
    element("details", { class: "kv-tried" }, element("summary", {}, "What was tried"), list),
  );
  model.on("change:answered", show);
  show();
  return () => model.off("change:answered", show);
}

export default { render };
