// The panel to patch by hand, in a notebook. Stands behind draw.js in one text; anywidget calls render().
// It sends what is asked ("asked"). Everything it shows was made in Python and is set before "answered" counts up. Data are only ever text: nothing here sets markup.

const PANEL_CHOICES = [["model", "Model"], ["donor", "What gives (donor)"], ["direction", "Direction"], ["site", "Site"],
  ["layer", "Layer"], ["head", "Head"], ["step", "Step"], ["positions", "Positions"],
  ["distance", "Distance"]];

const TYPED = ["layer", "head", "positions"];

/** The tokens of the prompt: a click picks the position, a click with Shift as far as it; those that the other prompt has not stand out. */
function showTokens(root, tokens, positions, pick) {
  const [start, stop] = Array.isArray(positions) ? positions : [-1, -1];
  root.replaceChildren(...tokens.map(([text, differs], at) => element("button", { type: "button", "data-token": at,
    title: `position ${at}${differs ? ", where the other prompt has another token" : ""}`,
    class: differs ? "kv-token kv-differs" : "kv-token", "aria-pressed": at >= start && at < stop ? "true" : "false",
    onclick: (event) => pick(event.shiftKey && start >= 0 ? [Math.min(start, at), Math.max(start, at) + 1] : [at, at + 1]) },
  seen(text).replace(/^ | $/g, "␣"))));
}

/** A choice of one of several values, with what the chosen one means under it; tell(value) hears it. */
function chooser(name, title, tell) {
  const typed = TYPED.includes(name) && element("input", { type: "text", name: `${name}-typed`, "aria-label": `${title}, typed`,
    placeholder: "or type 3, 1-3", onchange: () => { if (typed.value.trim()) tell(typed.value.trim()); typed.value = ""; } });
  const select = element("select", { name, onchange: () => tell(JSON.parse(select.value)) });
  const meaning = element("small");
  const shown = element("label", { class: name === "model" ? "kv-twice" : false }, element("span", {}, title), select,
    ...(typed ? [meaning, typed] : [meaning]));
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
    element("details", { class: "kv-code" }, element("summary", {}, "As code"), element("pre", {}, answer.code),
      element("button", { type: "button", name: "copy", onclick: (event) => copied(event.target, answer.code) }, "Copy")),
  );
}

/** Copies a text, and says so; where a page may not, the text is there to be marked. */
function copied(button, text) {
  navigator.clipboard?.writeText(text).then(() => { button.textContent = "Copied"; }, () => { button.textContent = "Mark it and copy"; });
}

/** What was tried, each of which can be gone back to. */
function showTried(root, tried, back) {
  root.replaceChildren(...tried.entries.map((entry, at) => element("li", {},
    element("button", { type: "button", "aria-current": at === tried.at ? "true" : false, onclick: () => back(at) },
      `${entry.said}: ${entry.found}`))));
}

function render({ model, el }) {
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
  const goBack = (at) => ask({ ...model.get("tried").entries[at].asked, distance: model.get("asked").distance, back: at });

  const choosers = PANEL_CHOICES.map(([name, title]) => [name, chooser(name, title, (value) => ask({ [name]: value }))]);
  const area = (name, title) => {
    const text = element("textarea", { name, rows: 3, spellcheck: "false", onchange: () => ask({ [name]: text.value }) });
    return [name, text, element("label", { class: "kv-across" }, element("span", {}, title), text)];
  };
  const areas = [area("prompt", "Prompt, which is patched"),
    area("other", "Other prompt, for the donor prompt")];
  const undo = element("button", { type: "button", name: "undo", onclick: () => {
    const tried = model.get("tried");
    goBack(tried.entries[tried.at].before);
  } }, "Undo");
  const reset = element("button", { type: "button", name: "reset", title: "Back to where this panel began", onclick: () => goBack(0) }, "Reset");
  const tokens = element("div", { class: "kv-tokens", role: "group", "aria-label": "Positions of the prompt" });
  const [answer, list] = ["div", "ol"].map((kind) => element(kind));

  function show() {
    busy.textContent = "";
    const asked = model.get("asked"), choices = model.get("choices"), tried = model.get("tried");
    for (const [name, of] of choosers) of.show(choices[name] ?? [], asked[name]);
    for (const [name, text] of areas) if (document.activeElement !== text) text.value = asked[name];
    showTokens(tokens, choices.tokens ?? [], asked.positions, (positions) => ask({ positions }));
    reset.disabled = tried.at <= 0;
    undo.disabled = tried.at < 0 || tried.entries[tried.at].before === tried.at;
    showAnswer(answer, model.get("answer"), model.get("error"));
    showTried(list, tried, goBack);
  }

  answer.setAttribute("aria-live", "polite");
  // JupyterLab takes single letters for its own: pressing a made a cell. It looks at the focused element first, then at what holds it.
  const keep = (event) => event.target.setAttribute("data-lm-suppress-shortcuts", "true");
  el.addEventListener("focusin", keep);
  keep({ target: el });
  el.classList.add("kv", "kvinterp-panel");
  el.replaceChildren(
    element("div", { class: "kv-controls" }, ...areas.map(([, , label]) => label),
      element("div", { class: "kv-across" }, element("span", { class: "kv-soft" },
        "Positions: click a token, with Shift a range; underlined where the other prompt has another token"), tokens), ...choosers.map(([, of]) => of.shown)),
    element("div", { class: "kv-actions" }, undo, reset, busy),
    answer,
    element("details", { class: "kv-tried" }, element("summary", {}, "What was tried"), list),
  );
  model.on("change:answered", show);
  show();
  return () => { model.off("change:answered", show); el.removeEventListener("focusin", keep); };
}

export default { render };
