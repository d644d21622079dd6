// The names of a chart's curves: each a button that hides its curve, with the value under the cursor, or the last one.
import { button, make, setDown, setText, shape } from "./dom.js";
import { colour, dash, onTheme } from "./theme.js";

const MANY = 8;

// `hidden` is a set of names, changed here; `onChange` is called after that.
export function legend(names, hidden, { isArea = false, styles, colours, onChange }) {
  const heading = make("span", { class: "legend-place" });
  const entries = names.map((name, number) => {
    const value = make("span", { class: "legend-value" });
    const key = button(
      "",
      () => {
        if (hidden.has(name)) hidden.delete(name);
        else hidden.add(name);
        show();
      },
      { class: "legend-key" },
    );
    const piece = sample(colours[number], isArea ? "area" : styles[number]);
    key.append(piece.element, make("span", { class: "legend-name" }, name), value);
    return { key, value, name, remove: piece.remove };
  });
  const whole = make("span", { class: "legend-whole" });
  const tools =
    names.length > MANY
      ? [
          button(
            "All",
            () => {
              hidden.clear();
              show();
            },
            { class: "small" },
          ),
          button(
            "None",
            () => {
              names.forEach((name) => hidden.add(name));
              show();
            },
            { class: "small" },
          ),
        ]
      : [];
  const list = make(
    "ul",
    { class: "legend-keys" },
    entries.map(({ key }) => make("li", {}, key)),
  );
  const element = make(
    "div",
    { class: "legend" },
    make("div", { class: "legend-head" }, heading, whole, ...tools),
    list,
  );

  function show() {
    press();
    onChange();
  }
  function press() {
    for (const { key, name } of entries) setDown(key, !hidden.has(name));
  }
  press();

  return {
    element,
    remove: () => entries.forEach((entry) => entry.remove()),
    // What to write: where the values are from, one text for each curve, and perhaps that of all together.
    tell(place, values, together = "") {
      setText(heading, place);
      setText(whole, together);
      entries.forEach(({ value }, number) => setText(value, values[number]));
    },
  };
}

// A piece of the curve, so that it is known by its dashes too.
function sample(number, style) {
  const picture = shape("svg", {
    class: "sample",
    viewBox: "0 0 28 12",
    width: "28",
    height: "12",
    "aria-hidden": "true",
  });
  const part =
    style === "area"
      ? shape("rect", { x: 2, y: 0, width: 24, height: 12, rx: 2 })
      : style === "points"
        ? shape("circle", { cx: 14, cy: 6, r: 4 })
        : shape("path", {
            d: "M0 6H28",
            "stroke-width": 3,
            "stroke-dasharray": (style === "dashed" ? [6, 5] : dash(number)).join(" ") || "none",
          });
  picture.append(part);
  const paint = () => part.setAttribute(style === "line" || style === "dashed" ? "stroke" : "fill", colour(number));
  paint();
  return { element: picture, remove: onTheme(paint) };
}
