// The attempts of a run as bars, and what happened in them as a list that can be filtered.
import { TIME_STEPS, momentText, onClock, timeSplits, timeTexts } from "../clock.js";
import { hiddenText, make, setText, shape, toggle } from "../dom.js";
import { drawing } from "../drawing.js";
import { duration, grouped } from "../format.js";
import { levelMark } from "../levels.js";
import { table } from "../tables.js";

const BAR = 20;
const LOW_BAR = 10;
const FEW_BARS = 8;
const AROUND = 14;
const AXIS = 28;
const MOST_BARS = 24;
/** @type {import("../panels").Moment["level"][]} */
const LEVELS = ["error", "warning", "good", "info"];

/**
 * @param {import("../panels").Timeline} first
 * @param {import("./curves.js").Context} context
 */
export function timelinePanel(first, context) {
  let panel = first;
  const off = new Set();
  const picture = drawing(draw, { className: "timeline" });
  const filters = make("div", { class: "choices", role: "group", "aria-label": "Show" });
  const count = make("p", { class: "readout", role: "status" });
  const list = make("div", { class: "moments" });
  const earlier = make("p", { class: "note" });
  const element = make("div", {}, earlier, picture.element, filters, count, list);
  const forget = onClock(fillList);

  // Of very many attempts the last ones.
  const shownSpans = () => panel.spans.slice(-MOST_BARS);

  function draw(width) {
    const spans = shownSpans();
    if (spans.length === 0) return [];
    const left = 92;
    const begin = Math.min(...spans.map((span) => span.begin));
    const end = Math.max(...spans.map((span) => span.end), begin + 1);
    const at = (time) => left + ((time - begin) / (end - begin)) * (width - left - 8);
    const tall = spans.length <= FEW_BARS ? BAR : LOW_BAR;
    const row = tall + AROUND;
    const height = spans.length * row + AXIS;
    const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    const step = TIME_STEPS.find((one) => ((end - begin) / one) * 110 <= width - left) ?? TIME_STEPS[TIME_STEPS.length - 1];
    const splits = timeSplits(begin - context.start(), end - context.start(), step, context.start());
    timeTexts(splits, step, context.start()).forEach((text, number) => {
      const x = at(splits[number] + context.start());
      svg.append(shape("path", { class: "gridline", d: `M${x} 0V${height - AXIS + 4}` }));
      const anchor = x > width - 50 ? "end" : x < left + 30 ? "start" : "middle";
      svg.append(shape("text", { class: "quiet", x, y: height - 6, "text-anchor": anchor }, text));
    });
    spans.forEach((span, number) => svg.append(...bar(span, { y: number * row, tall, at, left })));
    return [svg];
  }

  function bar(span, { y, tall, at, left }) {
    const [x, wide] = [at(span.begin), Math.max(3, at(span.end) - at(span.begin))];
    const text = `attempt ${span.attempt}`;
    const about = `${text}: ${span.state} after ${duration(span.end - span.begin)}${span.text ? `. ${span.text}` : ""}`;
    const moments = panel.moments.filter((moment) => moment.attempt === span.attempt && !off.has(moment.level));
    const seen = new Set();
    const ticks = moments.filter((moment) => {
      const key = `${Math.round(at(moment.time))} ${moment.level}`;
      return !seen.has(key) && seen.add(key);
    });
    return [
      shape("text", { x: left - 10, y: y + tall / 2 + 10, "text-anchor": "end" }, text),
      shape(
        "rect",
        { class: `bar state-${span.state}`, x, y: y + 5, width: wide, height: tall, rx: 4 },
        shape("title", {}, about),
      ),
      ...ticks.map((moment) => tick(moment, at(moment.time), y, tall)),
      wide > 90 && tall >= BAR
        ? shape("text", { class: `bar-text state-${span.state}`, x: x + 8, y: y + 20 }, span.state)
        : null,
    ].filter((node) => node !== null);
  }

  function tick(moment, x, y, tall) {
    const paths = {
      error: `M${x - 5} ${y + 1}h10l-5 9z`,
      warning: `M${x - 5} ${y + 1}h10l-5 9z`,
      good: `M${x - 1} ${y + 3}h2v${tall + 4}h-2z`,
      info: `M${x - 0.75} ${y + tall + 6}h1.5v5h-1.5z`,
    };
    const line = moment.level === "error" || moment.level === "warning" ? `M${x - 0.75} ${y + 4}h1.5v${tall + 4}h-1.5z` : "";
    return shape(
      "path",
      { class: `tick level-${moment.level}`, d: paths[moment.level] + line },
      shape("title", {}, moment.text),
    );
  }

  function fillFilters() {
    filters.replaceChildren(
      ...LEVELS.map((level) => {
        const number = panel.moments.filter((moment) => moment.level === level).length;
        const pick = toggle(
          "",
          !off.has(level),
          (isOn) => {
            if (isOn) off.delete(level);
            else off.add(level);
            fillList();
            picture.redraw();
          },
          { class: `small level-${level}`, disabled: number === 0 },
        );
        pick.append(levelMark(level), ` ${level} ${grouped(number)}`);
        return pick;
      }),
    );
  }

  function fillList() {
    const shown = panel.moments.filter((moment) => !off.has(moment.level));
    setText(count, `${grouped(shown.length)} of ${grouped(panel.moments.length)} events`);
    if (shown.length === 0) return list.replaceChildren();
    const row = (number) => {
      const moment = shown[number];
      const what = make(
        "span",
        { class: `what level-${moment.level}` },
        levelMark(moment.level),
        hiddenText(`${moment.level}: `),
        moment.what,
      );
      return [
        momentText(moment.time, context.start()),
        what,
        moment.text,
        moment.step === null ? "" : grouped(moment.step),
        String(moment.attempt),
      ];
    };
    return list.replaceChildren(
      table(
        {
          columns: ["when", "what", "said", "step", "attempt"],
          right: [false, false, false, true, true],
          count: shown.length,
          row,
        },
        `${panel.title}: events`,
      ),
    );
  }

  function show() {
    const left = panel.spans.length - shownSpans().length;
    picture.setLabel(
      `${panel.title}: ${left > 0 ? `the last ${MOST_BARS} of ` : ""}${panel.spans.length} ${panel.spans.length === 1 ? "attempt" : "attempts"}. ${shownSpans()
        .map((span) => `Attempt ${span.attempt} ${span.state} after ${duration(span.end - span.begin)}`)
        .join(". ")}.`,
    );
    setText(earlier, left > 0 ? `The last ${MOST_BARS} of ${panel.spans.length} attempts.` : "");
    earlier.hidden = left <= 0;
    picture.element.hidden = panel.spans.length === 0;
    fillFilters();
    fillList();
    picture.redraw();
  }

  show();
  return {
    element,
    update(newPanel) {
      panel = newPanel;
      show();
    },
    remove() {
      forget();
      picture.remove();
    },
  };
}
