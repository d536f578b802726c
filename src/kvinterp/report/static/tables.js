// Tables whose rows a click on the head of a column puts in order, and a second click turns round; so does Enter.
// Numbers as numbers ("1.2 (0.8 to 1.5)" is 1.2, "1.6 × 10⁻⁷" is small), cells without one last, equal ones as they stood.

const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const NUMBER = /^[<>≤≥≈~+]?\s*([-−]?(?:\d[\d,]*\.?\d*|\.\d+))(?:e([-+]?\d+)|\s*×\s*10([⁻⁺]?)([⁰¹²³⁴⁵⁶⁷⁸⁹]+))?(?=$|[\s%(×/,;:])/i;
const NOTHING = /^(|–|—|-|n\/a|nan|none|not run|not given)$/i;

// The number a cell begins with; NaN where it is none.
function numberOf(text) {
  if (/^exactly 0$/.test(text)) return 0;
  const endless = /^([-−]?)inf(inity)?$|^([-−]?)∞$/i.exec(text);
  if (endless) return endless[1] || endless[3] ? -Infinity : Infinity;
  const found = NUMBER.exec(text);
  if (!found) return NaN;
  const power = [...(found[4] || "")].map((digit) => RAISED.indexOf(digit)).join("");
  const exponent = found[2] || (power && (found[3] === "⁻" ? "-" : "") + power) || "0";
  return Number(`${found[1].replace(/,/g, "").replace("−", "-")}e${exponent}`);
}

// The order of texts: as numbers where every one that says something begins with one.
function comparing(texts) {
  const words = new Intl.Collator("en", { numeric: true });
  const areNumbers = texts.every((text) => NOTHING.test(text) || !Number.isNaN(numberOf(text)));
  return areNumbers ? (one, other) => Math.sign(numberOf(one) - numberOf(other)) || 0 : words.compare;
}

function sortRows(table, column) {
  const heads = [...table.tHead.rows[0].cells];
  const turned = heads[column].getAttribute("aria-sort") === "ascending";
  const body = table.tBodies[0];
  const cell = (row) => row.cells[column]?.textContent.trim() ?? "";
  const rows = [...body.rows].map((row) => ({ row, text: cell(row) }));
  const compare = comparing(rows.map(({ text }) => text));
  const [said, silent] = [rows.filter(({ text }) => !NOTHING.test(text)), rows.filter(({ text }) => NOTHING.test(text))];
  said.sort((one, other) => compare(one.text, other.text) * (turned ? -1 : 1));
  for (const { row } of [...said, ...silent]) body.append(row);
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", turned ? "descending" : "ascending");
}

// A table with one row of heads and rows as long as it can be sorted.
function sortable(table) {
  const heads = table.tHead && table.tHead.rows.length === 1 ? [...table.tHead.rows[0].cells] : [];
  if (!heads.length || table.tBodies.length !== 1 || table.tBodies[0].rows.length < 2) return;
  table.classList.add("sortable");
  heads.forEach((head, column) => {
    head.tabIndex = 0;
    head.addEventListener("click", () => sortRows(table, column));
    head.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      sortRows(table, column);
    });
  });
}

// A table as it stands, as a file that a spreadsheet opens. A quote before what it would take for a formula.
function csvOf(table) {
  const quoted = (cell) => `"${cell.textContent.trim().replace(/^[=+@\t\r]/, "'$&").replaceAll('"', '""')}"`;
  return [...table.rows].map((row) => [...row.cells].map(quoted).join(",")).join("\r\n");
}

// A button under a table that hands it to the reader.
function offered(table, number) {
  const button = document.createElement("button");
  const named = table.closest("[id]")?.id || `table-${number + 1}`;
  button.type = "button";
  button.className = "csv";
  button.textContent = "CSV";
  button.title = `Save this table as ${named}.csv`;
  button.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`\ufeff${csvOf(table)}\r\n`], { type: "text/csv" }));
    link.download = `${named}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  table.parentElement.after(button);
}

// What is wider than its place says that it scrolls.
function hinted(box) {
  new ResizeObserver(() => box.classList.toggle("scrolls", box.scrollWidth > box.clientWidth + 1)).observe(box);
}

// Headings and what is folded have an address of their own; what an address leads to is unfolded.
function addressed() {
  for (const head of document.querySelectorAll("main h2[id]")) {
    const link = document.createElement("a");
    link.href = `#${head.id}`;
    link.className = "address";
    link.textContent = "#";
    link.setAttribute("aria-label", "the address of this part");
    head.append(" ", link);
  }
  for (const fold of document.querySelectorAll("main details[id]")) {
    fold.addEventListener("toggle", () => { if (fold.open && location.protocol !== "about:") history.replaceState(null, "", `#${fold.id}`); });
  }
  const follow = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let each = target; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", follow);
  follow();
}

const tables = [...document.querySelectorAll("main .wide > table")];
tables.forEach(sortable);
tables.forEach(offered);
document.querySelectorAll("main .wide").forEach(hinted);
addressed();
