// Rows and columns. A long table shows its beginning, and the rest when asked, or printed.
import { button, make } from "./dom.js";
import { grouped } from "./format.js";
import { isOnPaper } from "./theme.js";

const FIRST = 100;
const LONG = 32;
const WHOLE = "whole";

/**
 * `right` says which columns are numbers.
 * @typedef {{ columns: string[], right: boolean[], count: number, row: (number: number) => (string | Node)[] }} Rows
 */

/**
 * @param {Rows} data
 * @param {string} name
 */
export function table(data, name) {
  const body = make("tbody");
  const add = (from, to) => {
    for (let number = from; number < to; number++) {
      body.append(
        make(
          "tr",
          {},
          data.row(number).map((text, column) => make("td", { class: kindOf(text, data.right[column]) }, text)),
        ),
      );
    }
  };
  const first = isOnPaper() ? data.count : Math.min(FIRST, data.count);
  add(0, first);
  const head = make(
    "tr",
    {},
    data.columns.map((text, column) => make("th", { scope: "col", class: data.right[column] ? "right" : null }, text)),
  );
  const scroll = make(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": name },
    make("table", {}, make("thead", {}, head), body),
  );
  const element = make("div", { class: "table" }, scroll);
  if (first < data.count) {
    const showAll = () => {
      add(first, data.count);
      more.remove();
    };
    const press = () => {
      showAll();
      scroll.focus();
    };
    const more = button(`Show all ${grouped(data.count)} rows`, press, { class: "small more" });
    more.addEventListener(WHOLE, showAll);
    element.append(more);
  }
  return element;
}

// What is printed is printed whole.
export function showWholeTables() {
  for (const more of document.querySelectorAll(".table > .more")) more.dispatchEvent(new Event(WHOLE));
}

// Long texts break anywhere, so that all columns fit; a short one never does.
/**
 * @param {string | Node} text
 * @param {boolean | undefined} isRight
 */
function kindOf(text, isRight) {
  if (isRight) return "right";
  return typeof text === "string" && text.length > LONG ? "long" : null;
}
