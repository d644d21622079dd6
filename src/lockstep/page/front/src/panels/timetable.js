// What each place of a pipeline did when, as bars with the numbers of their micro-batches.
import { make, setText, shape } from "../dom.js";
import { between, drawing } from "../drawing.js";
import { amount, axisTexts, percent } from "../format.js";
import { colour, ink, onTheme } from "../theme.js";

const NAMES = { F: "forward", B: "backward", I: "backward for inputs", W: "backward for weights" };
const COLOURS = { F: 0, B: 1, I: 3, W: 2 };
const ROW = 40;
const BAR = 30;
const AXIS = 28;
const LEFT = 84;
const BUSY = 62;
const LEAST_WIDTH = 560;

/**
 * @param {import("../panels").Timetable} first
 * @param {import("./curves.js").Context} context
 */
export function timetablePanel(first, context) {
  let panel = first;
  let current = null;
  let overlay = null;
  let scale = null;
  const readout = make("p", { class: "readout" });
  const keys = make("ul", { class: "hosts" });
  const picture = drawing(draw, { move, point, className: "timetable" });
  const element = make("div", {}, picture.element, readout, keys);
  const forget = onTheme(listKinds);

  function draw(given) {
    const width = Math.max(given, LEAST_WIDTH);
    const height = panel.lanes.length * ROW + AXIS;
    const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    const room = width - LEFT - BUSY;
    scale = (seconds) => LEFT + (panel.seconds > 0 ? seconds / panel.seconds : 0) * room;
    const ticks = ticksTo(panel.seconds, between(Math.floor(room / 110), 1, 8));
    axisTexts(ticks, "s").forEach((text, number) => {
      svg.append(shape("path", { class: "gridline", d: `M${scale(ticks[number])} 0V${height - AXIS + 4}` }));
      svg.append(
        shape(
          "text",
          { class: "quiet", x: scale(ticks[number]), y: height - 6, "text-anchor": number === 0 ? "start" : "middle" },
          text,
        ),
      );
    });
    panel.lanes.forEach((lane, place) => {
      const y = place * ROW + 5;
      svg.append(shape("text", { x: LEFT - 10, y: y + 20, "text-anchor": "end" }, `place ${place}`));
      svg.append(shape("rect", { class: "lane", x: LEFT, y, width: room, height: BAR, rx: 3 }));
      const stages = [...new Set(lane.map((one) => one[1]))].sort((a, b) => a - b);
      lane.forEach((one) => svg.append(...bar(one, y, stages)));
      if (panel.busy[place] !== undefined)
        svg.append(
          shape("text", { class: "quiet", x: width - 4, y: y + 20, "text-anchor": "end" }, percent(panel.busy[place])),
        );
    });
    overlay = shape("g");
    svg.append(overlay);
    outline();
    return [svg];
  }

  // A stripe at the bottom tells the second stage of a place from the first.
  function bar([what, stage, micro, begin, end], y, stages) {
    const [x, wide] = [scale(begin), Math.max(1, scale(end) - scale(begin) - 1)];
    const later = stages.indexOf(stage);
    const text = String(micro);
    return [
      shape("rect", { x, y, width: wide, height: BAR, rx: 3, fill: colour(COLOURS[what] ?? 5) }),
      later > 0 ? shape("rect", { x, y: y + BAR - 6, width: wide, height: 4, fill: ink("card") }) : null,
      wide > 8 * text.length + 3
        ? shape(
            "text",
            { class: "bar-text", x: x + wide / 2, y: y + (later > 0 ? 17 : 20), "text-anchor": "middle" },
            text,
          )
        : null,
    ].filter((node) => node !== null);
  }

  function outline() {
    if (!overlay) return;
    const one = current && panel.lanes[current.lane]?.[current.number];
    overlay.replaceChildren(
      ...(one
        ? [
            shape("rect", {
              class: "group",
              x: scale(one[3]) - 1,
              y: current.lane * ROW + 3,
              width: Math.max(3, scale(one[4]) - scale(one[3])) + 1,
              height: BAR + 4,
              rx: 4,
              stroke: ink("ink"),
              "stroke-width": 3,
            }),
          ]
        : []),
    );
  }

  function tell() {
    const one = current && panel.lanes[current.lane]?.[current.number];
    if (!one)
      return setText(
        readout,
        `One step of ${amount(panel.seconds, "s")}; on the right the share of it that each place computed.`,
      );
    const [what, stage, micro, begin, end] = one;
    const text = `place ${current.lane}, stage ${stage}: ${NAMES[what] ?? what} of micro-batch ${micro}, ${amount(end - begin, "s")}, from ${amount(begin, "s")} to ${amount(end, "s")}`;
    setText(readout, text);
    if (document.activeElement === picture.element) context.announce(text);
    return undefined;
  }

  function setCurrent(next) {
    current = next;
    outline();
    tell();
  }

  function move(right, down) {
    if (!current) return setCurrent({ lane: 0, number: 0 });
    const lane = between(current.lane + down, 0, panel.lanes.length - 1);
    return setCurrent({ lane, number: between(current.number + right, 0, Math.max(0, panel.lanes[lane].length - 1)) });
  }

  function point(event) {
    if (!event || !scale) return setCurrent(null);
    const box = picture.element.getBoundingClientRect();
    const lane = Math.floor((event.clientY - box.top) / ROW);
    const x = event.clientX - box.left + picture.element.scrollLeft;
    const number = (panel.lanes[lane] ?? []).findIndex((one) => x >= scale(one[3]) && x < scale(one[4]));
    return setCurrent(number < 0 ? null : { lane, number });
  }

  function listKinds() {
    const used = new Set(panel.lanes.flat().map((one) => one[0]));
    keys.replaceChildren(
      ...Object.keys(NAMES)
        .filter((what) => used.has(what))
        .map((what) => {
          const key = make("span", { class: "swatch" });
          key.style.backgroundColor = colour(COLOURS[what]);
          return make("li", {}, key, `${NAMES[what]} (${what})`);
        }),
    );
  }

  function show() {
    const parts = panel.lanes.map(
      (lane, place) =>
        `place ${place}: ${lane.length} parts${panel.busy[place] === undefined ? "" : `, busy ${percent(panel.busy[place])}`}`,
    );
    picture.setLabel(
      `${panel.title}: a step of ${amount(panel.seconds, "s")}. ${parts.join(". ")}. Arrow keys read the parts.`,
    );
    listKinds();
    tell();
    picture.redraw();
  }

  show();
  return {
    element,
    update(newPanel) {
      panel = newPanel;
      show();
    },
    table() {
      const rows = panel.lanes.flatMap((lane, place) => lane.map((one) => [place, ...one]));
      return {
        columns: ["place", "what", "stage", "micro-batch", "begin", "end"],
        right: [true, false, true, true, true, true],
        count: rows.length,
        row: (number) =>
          rows[number].map((value, at) =>
            at > 3 ? amount(Number(value), "s") : at === 1 ? (NAMES[value] ?? value) : String(value),
          ),
      };
    },
    remove() {
      forget();
      picture.remove();
    },
  };
}

function ticksTo(end, count) {
  if (!(end > 0)) return [0];
  const power = 10 ** Math.floor(Math.log10(end / count));
  const step = [1, 2, 2.5, 5, 10].map((digit) => digit * power).find((one) => end / one <= count) ?? end;
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, number) => number * step);
}
