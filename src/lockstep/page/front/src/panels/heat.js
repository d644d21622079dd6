// Rows over steps or time as colours: which rank was slow, and when.
import { placeText } from "../axes.js";
import { button, make, setDown, setText } from "../dom.js";
import { between, drawing } from "../drawing.js";
import { amount } from "../format.js";
import { ramp, rampEnds } from "../ramp.js";
import { ink, isOnPaper } from "../theme.js";

const FONT = "13px system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif";
const AXIS = 26;

/**
 * @param {import("../panels").Heat} first
 * @param {import("./curves.js").Context} context
 */
export function heatPanel(first, context) {
  let panel = first;
  let chosen = 0;
  let cursor = null;
  let frame = null;
  const layers = make("div", { class: "choices", role: "group", "aria-label": "Layer" });
  const readout = make("p", { class: "readout" });
  const scale = make("div", { class: "scale" });
  const picture = drawing(draw, { move, point, className: "heat" });
  const element = make("div", {}, layers, picture.element, make("div", { class: "heat-foot" }, readout, scale));

  const layer = () => panel.layers[between(chosen, 0, panel.layers.length - 1)];
  const placeOf = (column) =>
    placeText(panel.x, panel.x === "time" ? panel.at[column] - context.start() : panel.at[column], context.start());

  // On paper all layers, one below the other.
  function draw(width) {
    return isOnPaper() ? panel.layers.map((one) => printed(one, width)) : [drawLayer(layer(), width)];
  }

  function printed(one, width) {
    const ends = rampEnds(one.values);
    const name = make("div", { class: "heat-foot" }, make("b", {}, one.name), make("div", { class: "scale" }, ends ? scaleParts(ends, one.unit) : "no values"));
    return make("div", { class: "heat-layer" }, name, !ends || ends.isFlat ? null : drawLayer(one, width));
  }

  function drawLayer(one, width) {
    const rows = panel.rows.length;
    const canvas = make("canvas");
    const pixels = devicePixelRatio;
    const pen = penOf(canvas);
    pen.font = FONT;
    const margin = Math.ceil(
      Math.min(width * 0.38, Math.max(...panel.rows.map((name) => pen.measureText(name).width)) + 12),
    );
    const tall = rows <= 16 ? 24 : between(Math.round(440 / rows), 3, 18);
    // The name of a low row is taller than the row.
    const top = Math.max(0, Math.ceil((16 - tall) / 2));
    frame = { left: margin, top, width: width - margin - 1, height: rows * tall, tall };
    const height = frame.top + frame.height + AXIS;
    canvas.width = Math.round(width * pixels);
    canvas.height = Math.round(height * pixels);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    pen.scale(pixels, pixels);
    hatch(pen, frame);
    const ends = rampEnds(one.values);
    if (ends)
      pen.drawImage(
        cells(one.values, ends, Math.round(frame.width * pixels)),
        frame.left,
        frame.top,
        frame.width,
        frame.height,
      );
    labels(pen, width);
    if (cursor && !isOnPaper()) outline(pen);
    return canvas;
  }

  function labels(pen, width) {
    pen.font = FONT;
    pen.fillStyle = ink("quiet");
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const every = Math.ceil(16 / frame.tall);
    panel.rows.forEach((name, row) => {
      if (row % every === 0)
        pen.fillText(shortened(pen, name, frame.left - 10), frame.left - 8, frame.top + (row + 0.5) * frame.tall + 1);
    });
    pen.textBaseline = "top";
    const count = Math.min(Math.max(Math.floor(frame.width / 130), 2), panel.at.length);
    for (let number = 0; number < count; number++) {
      const column = count === 1 ? 0 : Math.round((number * (panel.at.length - 1)) / (count - 1));
      pen.textAlign = number === 0 ? "left" : number === count - 1 ? "right" : "center";
      const x =
        frame.left + ((column + (number === 0 ? 0 : number === count - 1 ? 1 : 0.5)) / panel.at.length) * frame.width;
      pen.fillText(placeOf(column), Math.min(x, width - 1), frame.top + frame.height + 8);
    }
  }

  function outline(pen) {
    const wide = frame.width / panel.at.length;
    pen.lineWidth = 2;
    for (const inset of [0, 2]) {
      pen.strokeStyle = inset === 0 ? "#000000" : "#ffffff";
      pen.strokeRect(
        frame.left + cursor.column * wide - 1 + inset,
        frame.top + cursor.row * frame.tall - 1 + inset,
        Math.max(wide, 4) + 2 - 2 * inset,
        frame.tall + 2 - 2 * inset,
      );
    }
  }

  function show() {
    const ends = rampEnds(layer().values);
    picture.setLabel(inWords());
    layers.hidden = panel.layers.length < 2;
    layers.replaceChildren(
      ...panel.layers.map((one, number) => {
        const pick = button(
          one.name,
          () => {
            chosen = number;
            show();
            /** @type {HTMLElement} */ (layers.children[number]).focus();
          },
          { class: "small" },
        );
        setDown(pick, number === between(chosen, 0, panel.layers.length - 1));
        return pick;
      }),
    );
    scale.replaceChildren(...(ends ? scaleParts(ends, layer().unit) : []));
    tell();
    picture.redraw();
  }

  function tell() {
    if (!cursor) return setText(readout, `${layer().name}: point at a cell to read it.`);
    const value = layer().values[cursor.row]?.[cursor.column];
    const text = `${panel.rows[cursor.row]}, ${placeOf(cursor.column)}: ${value === null || value === undefined ? "no value" : amount(value, layer().unit)}`;
    setText(readout, text);
    if (document.activeElement === picture.element) context.announce(text);
  }

  function moveTo(column, row) {
    cursor = { column: between(column, 0, panel.at.length - 1), row: between(row, 0, panel.rows.length - 1) };
    tell();
    picture.redraw();
  }

  function move(right, down) {
    if (cursor) moveTo(cursor.column + right, cursor.row + down);
    else moveTo(0, 0);
  }

  function point(event) {
    if (!frame || !event) {
      cursor = null;
      tell();
      return picture.redraw();
    }
    const box = picture.element.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - frame.left, event.clientY - box.top - frame.top];
    if (x < 0 || y < 0 || x >= frame.width || y >= frame.height) return point(null);
    return moveTo(Math.floor((x / frame.width) * panel.at.length), Math.floor(y / frame.tall));
  }

  function inWords() {
    const top = rowsByMean(layer(), panel.rows)[0];
    const ends = rampEnds(layer().values);
    if (!ends) return `${panel.title}: no values.`;
    return `${panel.title}: ${layer().name} of ${panel.rows.length} rows, ${placeOf(0)} to ${placeOf(panel.at.length - 1)}; highest on average ${top.name} with ${amount(top.mean, layer().unit)}, highest of all ${amount(ends.most, layer().unit)}. Arrow keys read cells.`;
  }

  show();
  return {
    element,
    update(newPanel) {
      panel = newPanel;
      cursor = null;
      show();
    },
    table: () => asTable(panel, layer()),
    remove: () => picture.remove(),
  };
}

/**
 * @param {HTMLCanvasElement} canvas
 * @returns {CanvasRenderingContext2D}
 */
function penOf(canvas) {
  const pen = canvas.getContext("2d");
  if (!pen) throw new Error("this browser has no canvas");
  return pen;
}

// One pixel for every cell; where cells are narrower than a pixel, it shows the highest of them.
function cells(values, ends, room) {
  const columns = Math.max(...values.map((row) => row.length), 1);
  const width = Math.min(columns, Math.max(1, room));
  const canvas = make("canvas", { width, height: values.length });
  const pen = penOf(canvas);
  const image = pen.createImageData(width, values.length);
  values.forEach((row, y) => {
    for (let x = 0; x < width; x++) {
      let highest = null;
      for (let column = Math.floor((x * columns) / width); column < ((x + 1) * columns) / width; column++) {
        const value = row[column] ?? null;
        if (value !== null && (highest === null || value > highest)) highest = value;
      }
      if (highest === null) continue;
      image.data.set([...ramp((highest - ends.low) / (ends.high - ends.low)), 255], 4 * (y * width + x));
    }
  });
  pen.putImageData(image, 0, 0);
  return canvas;
}

// Where there is no value the hatching shows.
/**
 * @param {CanvasRenderingContext2D} pen
 * @param {{ left: number, top: number, width: number, height: number, tall: number }} frame
 */
function hatch(pen, { left, top, width, height }) {
  pen.save();
  pen.imageSmoothingEnabled = false;
  pen.beginPath();
  pen.rect(left, top, width, height);
  pen.clip();
  pen.strokeStyle = ink("line");
  pen.lineWidth = 1;
  pen.beginPath();
  for (let x = left - height; x < left + width; x += 8) {
    pen.moveTo(x, top + height);
    pen.lineTo(x + height, top);
  }
  pen.stroke();
  pen.restore();
  pen.imageSmoothingEnabled = false;
}

function scaleParts(ends, unit) {
  if (ends.isFlat) return [make("span", {}, `${amount(ends.most, unit)} everywhere`)];
  const bar = make("span", { class: "scale-bar", "aria-hidden": "true" });
  const stops = Array.from({ length: 11 }, (_, at) => `rgb(${ramp(at / 10).join(" ")})`);
  bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  const top = ends.isCut
    ? `${amount(ends.high, unit)} and more, up to ${amount(ends.most, unit)}`
    : amount(ends.high, unit);
  return [make("span", {}, amount(ends.low, unit)), bar, make("span", {}, top)];
}

function shortened(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let length = text.length - 1;
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > room) length--;
  return `${text.slice(0, length)}…`;
}

function rowsByMean(layer, names) {
  const rows = names.map((name, row) => {
    const known = (layer.values[row] ?? []).filter((value) => value !== null);
    const sum = known.reduce((total, value) => total + value, 0);
    return { name, known, mean: known.length > 0 ? sum / known.length : null };
  });
  return rows.sort((a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity));
}

// What each row comes to, the highest first: the cells themselves are read with the arrow keys.
function asTable(panel, layer) {
  const rows = rowsByMean(layer, panel.rows);
  const text = (value) => (value === undefined || value === null ? "–" : amount(value, layer.unit));
  return {
    columns: [`${layer.name} of`, "mean", "lowest", "highest", "last"],
    right: [false, true, true, true, true],
    count: rows.length,
    row: (number) => {
      const { name, known, mean } = rows[number];
      const lowest = known.reduce((a, b) => Math.min(a, b), Infinity);
      const highest = known.reduce((a, b) => Math.max(a, b), -Infinity);
      return [
        name,
        ...(known.length > 0 ? [mean, lowest, highest, known[known.length - 1]] : [null, null, null, null]).map(text),
      ];
    },
  };
}
