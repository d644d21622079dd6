// A chart of curves: uPlot draws it, and the legend, the zoom and the keys are ours.
import uPlot from "uplot";
import { BESIDE, logRange, xAxis, xRange, yAxis, yRange } from "./axes.js";
import { onClock } from "./clock.js";
import { make } from "./dom.js";
import { columnAt, dotted, nearest } from "./models.js";
import { same } from "./same.js";
import { colour, dash, ink, mix, onTheme, seeThrough } from "./theme.js";

// Three charts to a page.
const PRINTED = { width: 680, height: 190 };
const MARK_COLOURS = { good: "good", info: "quiet", warning: "warning", error: "error" };
const NEAR = 8;
const FEW = 16;
const MANY_MARKS = 8;

/**
 * `label` is for those who hear it, the cursors of a `group` go together.
 * @typedef {{
 *   x: import("./panels").Lines["x"], unit: import("./format.js").Unit, most: number | null, fromZero: boolean,
 *   isLog: boolean, isStacked: boolean, marks: import("./panels").Mark[], start: number, label: string, group: string,
 *   onPlace: (place: { at: number, mark: string | null } | null) => void, onZoom: (isZoomed: boolean) => void,
 * }} Options
 */

/**
 * @param {import("./models.js").Model} model
 * @param {Set<string>} hidden
 * @param {Options} options
 */
export function plot(model, hidden, options) {
  const holder = make("div", { class: "plot", role: "img", tabindex: "0", "aria-label": options.label });
  let state = { model, options, zoom: null };
  let chart = null;

  function build() {
    chart?.destroy();
    chart = new uPlot(settings(state, hidden, { zoomTo, report }), state.model.columns, holder);
    if (state.zoom) chart.setScale("x", state.zoom);
  }

  function zoomTo(range) {
    const xs = state.model.columns[0];
    state.zoom = range;
    if (range) chart.setScale("x", range);
    else chart.setScale("x", { min: xs[0], max: xs[xs.length - 1] });
    state.options.onZoom(range !== null);
  }

  function report() {
    const at = chart?.cursor.idxs?.[0];
    if (at === null || at === undefined || chart.cursor.left < 0) return state.options.onPlace(null);
    const near = state.options.marks.find((mark) => Math.abs(chart.valToPos(mark.x, "x") - chart.cursor.left) < NEAR);
    return state.options.onPlace({ at, mark: near?.text ?? null });
  }

  // Moves the cursor to a column, as the mouse would.
  function pointAt(at) {
    const xs = state.model.columns[0];
    const place = Math.max(state.model.first, Math.min(xs.length - 1, at));
    const { min, max } = chart.scales.x;
    if (state.zoom && (xs[place] < min || xs[place] > max)) {
      const half = (max - min) / 2;
      zoomTo({ min: xs[place] - half, max: xs[place] + half });
    }
    queueMicrotask(() => chart.setCursor({ left: chart.valToPos(xs[place], "x"), top: 10 }));
  }

  function zoomBy(factor) {
    const { min, max } = chart.scales.x;
    const xs = state.model.columns[0];
    const at = chart.cursor.idxs?.[0];
    const middle = at === null || at === undefined ? (min + max) / 2 : xs[at];
    const half = ((max - min) / 2) * factor;
    const [low, high] = [Math.max(xs[0], middle - half), Math.min(xs[xs.length - 1], middle + half)];
    zoomTo(low <= xs[0] && high >= xs[xs.length - 1] ? null : { min: low, max: high });
  }

  holder.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !chart) return;
    const at = chart.cursor.idxs?.[0] ?? state.model.columns[0].length;
    const far = event.shiftKey ? 10 : 1;
    const keys = {
      ArrowLeft: () => pointAt(at - far),
      ArrowRight: () => pointAt(at + far),
      Home: () => pointAt(0),
      End: () => pointAt(Infinity),
      "+": () => zoomBy(0.5),
      "=": () => zoomBy(0.5),
      "-": () => zoomBy(2),
      0: () => zoomTo(null),
      Escape: () => zoomTo(null),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  holder.addEventListener("blur", () => chart?.setCursor({ left: -10, top: -10 }));

  function fit() {
    if (chart && holder.clientWidth > 0) chart.setSize(room(holder));
  }

  const watcher = new ResizeObserver(() => requestAnimationFrame(fit));
  const forget = [
    onTheme(() => {
      chart?.redraw();
      fit();
    }),
    onClock(() => chart && build()),
  ];
  const toPaper = () => chart?.setSize(PRINTED);
  addEventListener("beforeprint", toPaper);
  addEventListener("afterprint", fit);
  queueMicrotask(() => {
    build();
    watcher.observe(holder);
  });

  return {
    element: holder,
    resetZoom: () => zoomTo(null),
    // In place where the curves are the same ones; the zoom stays in any case.
    update(newModel, newOptions) {
      const isAlike = sameCurves(state.model, newModel) && sameSettings(state.options, newOptions);
      state = { model: newModel, options: newOptions, zoom: state.zoom };
      holder.setAttribute("aria-label", newOptions.label);
      if (!chart) return;
      if (!isAlike) return build();
      chart.setData(newModel.columns, state.zoom === null);
      if (state.zoom) chart.setScale("x", state.zoom);
    },
    showCurves() {
      state.model.curves.forEach((curve) => {
        for (const at of [curve.at, curve.low, curve.high])
          if (at !== null) chart?.setSeries(at, { show: !hidden.has(curve.name) });
      });
    },
    remove() {
      watcher.disconnect();
      forget.forEach((end) => end());
      removeEventListener("beforeprint", toPaper);
      removeEventListener("afterprint", fit);
      chart?.destroy();
    },
  };
}

function sameCurves(a, b) {
  return (
    a.curves.length === b.curves.length &&
    a.curves.every((curve, at) => ["name", "style", "at", "low"].every((field) => curve[field] === b.curves[at][field]))
  );
}

function sameSettings(a, b) {
  return ["x", "unit", "most", "fromZero", "isLog", "start"].every((field) => a[field] === b[field]) && same(a.marks, b.marks);
}

function room(holder) {
  const width = holder.clientWidth || PRINTED.width;
  return { width, height: width < 480 ? 230 : width < 900 ? 280 : 320 };
}

/**
 * @param {{ model: import("./models.js").Model, options: Options }} state
 * @param {Set<string>} hidden
 * @param {{ zoomTo: (range: { min: number, max: number } | null) => void, report: () => void }} tell
 * @returns {any} uPlot's options
 */
function settings({ model, options }, hidden, { zoomTo, report }) {
  const xs = model.columns[0];
  const series = [{}];
  model.curves.forEach((curve) => {
    const shown = { show: !hidden.has(curve.name), scale: "y" };
    series[curve.at] = { ...shown, ...look(curve) };
    if (curve.low === null || curve.high === null) return;
    series[curve.low] = { ...shown, stroke: "#0000", width: 0, points: { show: false } };
    series[curve.high] = { ...shown, stroke: "#0000", width: 0, points: { show: false } };
  });
  const bands = model.curves.flatMap((curve) =>
    curve.low === null ? [] : [{ series: [curve.high, curve.low], fill: () => seeThrough(colour(curve.colour), 0.2) }],
  );
  return {
    width: PRINTED.width,
    height: PRINTED.height,
    legend: { show: false },
    padding: [14, BESIDE, 0, 0],
    scales: {
      x: { time: false, range: (chart, low, high) => xRange(...onlyOne(chart, low, high)) },
      y: {
        distr: options.isLog ? 3 : 1,
        range: (_, low, high) => (options.isLog ? logRange(low, high) : yRange(low, high, options)),
      },
    },
    axes: [xAxis(options.x, options.start, xs), yAxis(options.unit, options.isLog)],
    series,
    bands,
    cursor: {
      y: false,
      drag: { x: true, y: false, setScale: false, dist: 6 },
      bind: { dblclick: () => () => zoomTo(null) },
      dataIdx: (chart, number, at, x) => {
        const shown = chart.data[0];
        if (!options.isStacked) return number === 0 ? at : nearest(chart.data[number], at, shown);
        const pixel = chart.posToVal(1, "x") - chart.posToVal(0, "x");
        return columnAt(shown, x - pixel, model.first);
      },
      points: {
        size: 9,
        fill: (chart, number) => colour(model.curves[numberOf(model, number)]?.colour ?? 0),
        stroke: () => ink("card"),
        width: 2,
        show: (chart, number) => isDrawn(model, number) && dot(),
      },
      sync: {
        key: `${options.group} ${options.x}`,
        scales: ["x", null],
        filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
      },
    },
    hooks: {
      setCursor: [report],
      setSelect: [
        (chart) => {
          if (chart.select.width < 6) return;
          const [min, max] = [chart.select.left, chart.select.left + chart.select.width].map((left) =>
            chart.posToVal(left, "x"),
          );
          chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          zoomTo({ min, max });
        },
      ],
      // Behind the lines, but not behind areas, which would hide them.
      [options.isStacked ? "draw" : "drawAxes"]: [(chart) => drawMarks(chart, options.marks)],
    },
  };
}

// Of one place alone uPlot makes an axis from 0 to twice that.
/**
 * @param {any} chart
 * @param {number} low
 * @param {number} high
 * @returns {[number, number]}
 */
function onlyOne(chart, low, high) {
  const xs = chart.data?.[0];
  return xs?.length === 1 ? [xs[0], xs[0]] : [low, high];
}

function dot() {
  return make("div", { class: "u-cursor-pt" });
}

function numberOf(model, at) {
  return model.curves.findIndex((curve) => curve.at === at);
}

function isDrawn(model, at) {
  return numberOf(model, at) >= 0;
}

function look(curve) {
  const stroke = () => colour(curve.colour);
  if (curve.style === "area")
    return {
      stroke,
      width: 1,
      fill: () => mix(colour(curve.colour), ink("card"), 0.35),
      paths: uPlot.paths.stepped?.({ align: -1 }),
      points: { show: false },
    };
  if (curve.style === "points")
    return { stroke, width: 0, paths: () => null, points: { show: true, size: 8, fill: stroke, stroke, width: 1 } };
  return {
    stroke,
    width: 2,
    dash: curve.style === "dashed" ? [6, 5] : dash(curve.colour),
    points: {
      show: false,
      size: 7,
      fill: stroke,
      stroke,
      filter: (chart, at) => dotted(chart.data[at], curve.style === "dashed" ? 1 : FEW),
    },
  };
}

// A thin line through the chart, with a flag on it that tells warnings from errors also without colour.
function drawMarks(chart, marks) {
  const { ctx } = chart;
  const { left, top, width, height } = chart.bbox;
  const scale = devicePixelRatio;
  const isMuch = marks.length > MANY_MARKS;
  let flagged = -Infinity;
  ctx.save();
  for (const mark of marks) {
    const x = chart.valToPos(mark.x, "x", true);
    if (x < left - 1 || x > left + width + 1) continue;
    ctx.strokeStyle = ctx.fillStyle = ink(MARK_COLOURS[mark.level] ?? "quiet");
    ctx.lineWidth = (isMuch ? 1 : 1.5) * scale;
    ctx.globalAlpha = isMuch ? 0.6 : 1;
    ctx.setLineDash(mark.level === "error" ? [] : [4 * scale, 3 * scale]);
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
    if (x - flagged < 11 * scale) continue;
    flagged = x;
    ctx.globalAlpha = 1;
    ctx.beginPath();
    ctx.moveTo(x - 5 * scale, top - 8 * scale);
    ctx.lineTo(x + 5 * scale, top - 8 * scale);
    ctx.lineTo(x, top);
    ctx.fill();
  }
  ctx.restore();
}
