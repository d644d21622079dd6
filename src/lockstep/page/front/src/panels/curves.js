// Lines and stacks: a chart, its legend, and what can be done with it.
import { placeHeading, placeText } from "../axes.js";
import { onClock } from "../clock.js";
import { button, make, setAttribute, setText, toggle } from "../dom.js";
import { amount } from "../format.js";
import { legend } from "../legend.js";
import { ends, lastOf, linesModel, nearest, stackModel } from "../models.js";
import { plot } from "../plot.js";
import { same } from "../same.js";
import { isOnPaper, onTheme } from "../theme.js";

const SPOKEN = 6;
const LISTED_MARKS = 4;

/** @typedef {{ start: () => number, group: string, announce: (text: string) => void }} Context what a panel knows of its run */
/** @typedef {{ tools: HTMLElement }} Frame */

/**
 * @param {import("../panels").Lines} panel
 * @param {Context} context
 * @param {Frame} frame
 */
export function linesPanel(panel, context, frame) {
  return curvesPanel(panel, context, frame, false);
}

/**
 * @param {import("../panels").Stacked} panel
 * @param {Context} context
 * @param {Frame} frame
 */
export function stackPanel(panel, context, frame) {
  return curvesPanel(panel, context, frame, true);
}

function curvesPanel(first, context, frame, isStacked) {
  let panel = first;
  const hidden = new Set();
  let isLog = !isStacked && panel.log;
  let model = modelOf();
  let keys = null;
  const legendPlace = make("div");
  const marks = make("ul", { class: "marks" });
  const lost = make("p", { class: "note undrawn" });
  const reset = button("Reset zoom", () => chart.resetZoom(), { class: "small", hidden: true });
  frame.tools.append(reset);
  if (!isStacked) {
    frame.tools.append(
      toggle(
        "Log",
        isLog,
        (value) => {
          isLog = value;
          refresh();
        },
        { class: "small", title: "Logarithmic axis" },
      ),
    );
  }
  const chart = plot(model, hidden, options());
  const yName = make("p", { class: "y-name" });
  const element = make("div", { class: "curves" }, yName, chart.element, legendPlace, lost, marks);
  const forget = [
    onClock(() => {
      tell(null);
      listMarks();
    }),
    onTheme(listMarks),
  ];

  function modelOf() {
    return isStacked
      ? stackModel(panel, { start: context.start(), hidden })
      : linesModel(panel, { start: context.start(), isLog });
  }

  function options() {
    return {
      x: panel.x,
      unit: panel.unit,
      most: panel.most ?? null,
      fromZero: panel.from_zero ?? false,
      isLog,
      isStacked,
      start: context.start(),
      group: context.group,
      marks: inOrder(panel.marks).map((mark) => ({ ...mark, x: panel.x === "time" ? mark.x - context.start() : mark.x })),
      label: inWords(panel, model, context.start()),
      onPlace: tell,
      onZoom: (isZoomed) => setAttribute(reset, "hidden", !isZoomed),
    };
  }

  function refresh() {
    model = modelOf();
    const names = model.curves.map((curve) => curve.name);
    const styles = model.curves.map((curve) => curve.style);
    const colours = model.curves.map((curve) => curve.colour);
    if (!keys || !same(keys.names, names)) {
      keys?.remove();
      keys = { names, ...legend(names, hidden, { isArea: isStacked, styles, colours, onChange }) };
      legendPlace.replaceChildren(keys.element);
    }
    setText(yName, panel.y);
    yName.hidden = panel.y.toLowerCase() === panel.title.toLowerCase();
    setText(
      lost,
      model.lost > 0
        ? `${model.lost} ${model.lost === 1 ? "value is" : "values are"} not above 0, which a logarithmic axis cannot show.`
        : "",
    );
    chart.update(model, options());
    listMarks();
    tell(null);
  }

  function onChange() {
    if (isStacked) {
      model = modelOf();
      chart.update(model, options());
    }
    chart.showCurves();
    tell(null);
  }

  // The values at a place in the legend; without one, the last value of each.
  function tell(place) {
    if (!keys) return;
    const xs = model.columns[0];
    const texts = model.own.map((values, number) => {
      const at = place ? nearest(values, place.at, xs) : lastOf(values);
      if (at === null || values[at] === undefined) return "–";
      const text = amount(values[at], panel.unit);
      return place && xs[at] !== xs[place.at] && model.curves[number].style !== "dashed"
        ? `${text} (${placeText(panel.x, xs[at], context.start())})`
        : text;
    });
    const end = Math.max(...model.own.map((values) => lastOf(values) ?? -1));
    const total =
      isStacked && (place ? place.at : end) >= 0
        ? `together ${amount(model.total?.[place ? place.at : end], panel.unit)}`
        : "";
    const isOne = xs.length === model.first + 1;
    const where = place || isOne ? placeText(panel.x, xs[place?.at ?? model.first], context.start()) : "last values";
    keys.tell(place?.mark ? `${where}: ${place.mark}` : where, texts, total);
    if (place && document.activeElement === chart.element) {
      context.announce(
        `${where}. ${model.curves
          .map((curve, at) => `${curve.name} ${texts[at]}`)
          .slice(0, SPOKEN)
          .join(", ")}`,
      );
    }
  }

  function listMarks() {
    const shown = inOrder(panel.marks)
      .slice(0, isOnPaper() ? Infinity : LISTED_MARKS)
      .map((mark) =>
        make(
          "li",
          { class: `level-${mark.level}` },
          make("b", {}, placeText(panel.x, panel.x === "time" ? mark.x - context.start() : mark.x, context.start())),
          ` ${mark.text}`,
        ),
      );
    const more = panel.marks.length - shown.length;
    marks.replaceChildren(...shown, ...(more > 0 ? [make("li", {}, `and ${more} more, in the table`)] : []));
  }

  refresh();
  return {
    element,
    update(newPanel) {
      panel = newPanel;
      refresh();
    },
    table: () => asTable(panel, model, context.start()),
    remove() {
      forget.forEach((end) => end());
      keys.remove();
      chart.remove();
    },
  };
}

function inOrder(marks) {
  return [...marks].sort((a, b) => a.x - b.x);
}

// The range and the last value of each curve, for those who hear the chart.
function inWords(panel, model, start) {
  const xs = model.columns[0];
  if (xs.length === 0) return `${panel.title}: no values.`;
  const curves = model.curves.slice(0, SPOKEN).map((curve, number) => {
    const values = model.own[number];
    const range = ends(values);
    if (!range) return `${curve.name}: no values`;
    const last = lastOf(values) ?? 0;
    return `${curve.name}: from ${amount(range[0], panel.unit)} to ${amount(range[1], panel.unit)}, last ${amount(values[last], panel.unit)} at ${placeText(panel.x, xs[last], start)}`;
  });
  const more = model.curves.length - curves.length;
  const between = `${placeText(panel.x, xs[model.first], start)} to ${placeText(panel.x, xs[xs.length - 1], start)}`;
  return `${panel.title}: chart of ${panel.y || "values"}, ${between}. ${curves.join(". ")}.${more > 0 ? ` And ${more} more.` : ""} Arrow keys read values, + and - zoom.`;
}

function asTable(panel, model, start) {
  const hasMarks = panel.marks.length > 0;
  const xs = model.columns[0];
  const texts = new Map();
  for (const mark of panel.marks) {
    const x = panel.x === "time" ? mark.x - start : mark.x;
    texts.set(x, [...(texts.get(x) ?? []), mark.text]);
  }
  const bands = model.curves.map((curve) => curve.low !== null);
  const columns = [
    placeHeading(panel.x),
    ...model.curves.flatMap((curve, number) =>
      bands[number] ? [curve.name, `${curve.name}, lowest`, `${curve.name}, highest`] : [curve.name],
    ),
  ];
  const places = [...new Set([...xs.slice(model.first), ...texts.keys()])].sort((a, b) => a - b);
  const at = new Map(xs.map((x, number) => [x, number]));
  const row = (x) => [
    placeText(panel.x, x, start).replace(/^step /, ""),
    ...model.curves.flatMap((curve, number) => {
      const values = bands[number]
        ? [model.own[number], model.told[curve.low], model.told[curve.high]]
        : [model.own[number]];
      return values.map((column) => (at.has(x) ? cell(column[at.get(x)], panel.unit) : ""));
    }),
    ...(hasMarks ? [(texts.get(x) ?? []).join("; ")] : []),
  ];
  return {
    columns: hasMarks ? [...columns, "marks"] : columns,
    right: [false, ...columns.slice(1).map(() => true), ...(hasMarks ? [false] : [])],
    count: places.length,
    row: (number) => row(places[number]),
  };
}

// Nothing was measured there, or it was not a number.
function cell(value, unit) {
  if (value === undefined) return "";
  return value === null ? "not finite" : amount(value, unit);
}
