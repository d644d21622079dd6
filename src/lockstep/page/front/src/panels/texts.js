// Tables and texts as they are, and a whole cut into shares.
import { make, setText } from "../dom.js";
import { amount, percent } from "../format.js";
import { PRINTED_WIDTH } from "../drawing.js";
import { partColour } from "../parts.js";
import { colour, isOnPaper, onTheme } from "../theme.js";
import { table } from "../tables.js";

// Neighbours are far apart; a colour of the one comes again in the other only hatched.
const GOOD = [2, 0, 5, 6, 8];
const LOST = [1, 3, 4, 7, 0, 5];

/** @param {import("../panels").Table} first */
export function tablePanel(first) {
  const element = make("div");
  const update = (panel) =>
    element.replaceChildren(
      table(
        { columns: panel.columns, right: panel.right, count: panel.rows.length, row: (number) => panel.rows[number] },
        `${panel.title}: table`,
      ),
    );
  update(first);
  return { element, update };
}

/** @param {import("../panels").Text} first */
export function textPanel(first) {
  const element = make("pre", { class: "text", tabindex: "0", role: "region", "aria-label": `${first.title}: text` });
  const update = (panel) => {
    if (panel.language === "toml") element.replaceChildren(...panel.text.trimEnd().split("\n").map(tomlLine));
    else setText(element, panel.text);
  };
  update(first);
  return { element, update };
}

function tomlLine(line) {
  const [, name, rest] = /^(\s*[\w."-]+\s*)(=.*)$/.exec(line) ?? [];
  const isHeading = /^\s*\[/.test(line);
  const parts = isHeading ? [make("b", {}, line)] : name ? [make("span", { class: "toml-name" }, name), rest] : [line];
  return make("span", { class: /^\s*#/.test(line) ? "toml-note" : null }, ...parts, "\n");
}

/** @param {import("../panels").Shares} first */
export function sharesPanel(first) {
  const bar = make("div", { class: "shares-bar", role: "img" });
  const list = make("ul", { class: "shares-list" });
  const element = make("div", { class: "shares" }, bar, list);
  let panel = first;
  let pieces = [];

  function draw() {
    const whole = panel.parts.reduce((sum, part) => sum + part.amount, 0);
    const colours = pick(panel.parts);
    const shown = panel.parts
      .map((part, number) => ({ ...part, share: whole > 0 ? part.amount / whole : 0, colour: colours[number] }))
      .filter((part) => part.amount > 0);
    const text = (part) => `${part.name} ${percent(part.share)}`;
    bar.setAttribute(
      "aria-label",
      `${panel.title}: ${shown.map((part) => `${text(part)} (${amount(part.amount, panel.unit)}${part.good ? ", useful" : ""})`).join(", ")}.`,
    );
    pieces = shown.map((part) => {
      const label = make("span");
      const piece = make("div", { class: part.good ? "share" : "share share-lost", title: text(part) }, label);
      piece.style.flexGrow = String(part.share);
      piece.style.backgroundColor = colour(part.colour);
      return { piece, label, share: part.share, texts: [text(part), percent(part.share), ""] };
    });
    bar.replaceChildren(...pieces.map(({ piece }) => piece));
    name();
    list.replaceChildren(
      ...shown.map((part) => {
        const key = make("span", { class: part.good ? "swatch" : "swatch share-lost" });
        key.style.backgroundColor = colour(part.colour);
        return make(
          "li",
          {},
          key,
          make("span", { class: "share-name" }, part.name),
          make("span", { class: "share-amount" }, amount(part.amount, panel.unit)),
          make("span", { class: "share-part" }, percent(part.share)),
          part.note ? make("span", { class: "share-note" }, part.note) : null,
        );
      }),
    );
  }

  // The name of a part where there is room for it, else its share, else nothing.
  function name() {
    for (const { piece, label, texts, share } of pieces) {
      const room = isOnPaper() ? share * (PRINTED_WIDTH - 40) : piece.clientWidth;
      for (const text of texts) {
        setText(label, text);
        if (label.offsetWidth <= room - 14) break;
      }
    }
  }

  const forget = onTheme(draw);
  const watcher = new ResizeObserver(() => requestAnimationFrame(name));
  watcher.observe(bar);
  draw();
  queueMicrotask(name); // what is made for printing is in the page only now
  return {
    element,
    update(newPanel) {
      panel = newPanel;
      draw();
    },
    remove() {
      watcher.disconnect();
      forget();
    },
  };
}

// Useful parts are plain, lost ones are also hatched.
function pick(parts) {
  let [good, lost] = [0, 0];
  return parts.map((part) =>
    partColour(part.name, part.good ? GOOD[good++ % GOOD.length] : LOST[lost++ % LOST.length]),
  );
}
