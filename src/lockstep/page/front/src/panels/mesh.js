// Every rank in its place, coloured by host; an axis that is picked shows which ranks talk to each other.
import { button, make, setDown, setText, shape } from "../dom.js";
import { between, drawing } from "../drawing.js";
import { coordinates, groups, meshGrid, rankRanges } from "../grid.js";
import { colour, ink, mix, onTheme } from "../theme.js";

const EDGE = 8;
const MOST_HOSTS = 12;
const MOST_LINES = 8;

/**
 * @param {import("../panels").Mesh} first
 * @param {import("./curves.js").Context} context
 */
export function meshPanel(first, context) {
  let panel = first;
  let axis = null;
  let current = null;
  let grid = null;
  let cell = null;
  let overlay = null;
  const axes = make("div", { class: "choices", role: "group", "aria-label": "Who talks to whom" });
  const readout = make("p", { class: "readout" });
  const talk = make("ul", { class: "talk paper" });
  const hosts = make("ul", { class: "hosts" });
  const picture = drawing(draw, { move, point, className: "mesh" });
  const scroll = make("div", { class: "mesh-scroll" }, picture.element);
  const element = make("div", {}, axes, readout, talk, scroll, hosts);
  const forget = onTheme(listHosts);

  const sizes = () => panel.axes.map((one) => one.size);
  const world = () => sizes().reduce((product, size) => product * size, 1);
  const hostNames = () => [...new Set(panel.hosts)];
  const talking = () => (axis === null ? [] : groups(sizes(), axis));

  function draw(width) {
    const ranks = world();
    const isNarrow = width < 480;
    const isLarge = ranks <= 64;
    cell = isLarge
      ? { width: isNarrow ? 56 : 76, height: 44 }
      : ranks <= 512
        ? { width: 38, height: 26 }
        : { width: 32, height: 20 };
    grid = meshGrid(sizes(), cell, width - 2 * EDGE);
    const size = { width: Math.max(grid.width + 2 * EDGE, 1), height: grid.height + 2 * EDGE };
    const svg = shape("svg", { ...size, viewBox: `0 0 ${size.width} ${size.height}`, "aria-hidden": "true" });
    const names = hostNames();
    const slow = new Set(panel.slow);
    const number = new Map(names.map((name, at) => [name, at]));
    const tints = names.map((_, at) => [mix(colour(at), ink("card"), 0.78), colour(at)]);
    for (let rank = 0; rank < ranks; rank++) {
      const [x, y] = grid.places[rank].map((place) => place + EDGE);
      const [fill, stroke] = tints[number.get(panel.hosts[rank]) ?? -1] ?? [ink("card"), ink("quiet")];
      svg.append(
        shape("rect", {
          x,
          y,
          width: cell.width,
          height: cell.height,
          rx: isLarge ? 6 : 3,
          fill,
          stroke,
          "stroke-width": 1.5,
        }),
      );
      const text = `${slow.has(rank) ? "▲ " : ""}${rank}`;
      svg.append(
        shape(
          "text",
          {
            class: isLarge ? "rank large" : "rank",
            x: x + cell.width / 2,
            y: y + cell.height / 2 + (isLarge ? -2 : 4),
            "text-anchor": "middle",
          },
          text,
        ),
      );
      const host = panel.hosts[rank];
      if (isLarge && host)
        svg.append(
          shape(
            "text",
            { class: "rank-host", x: x + cell.width / 2, y: y + 35, "text-anchor": "middle" },
            shorten(host, isNarrow ? 7 : 10),
          ),
        );
      if (slow.has(rank))
        svg.append(
          shape("rect", {
            class: "slow",
            x: x + 1,
            y: y + 1,
            width: cell.width - 2,
            height: cell.height - 2,
            rx: isLarge ? 6 : 3,
          }),
        );
    }
    overlay = shape("g");
    svg.append(overlay);
    drawGroups();
    return [svg];
  }

  // A frame where the ranks of a group lie together, else a line from one to the next; that of the current rank is bold.
  // Many lines would hide one another: then one group is framed rank by rank, that of rank 0 unless another is pointed at.
  function drawGroups() {
    if (!overlay) return;
    const all = talking();
    const isMuch = isCrowded(all);
    const own = all.find((group) => group.includes(current ?? (isMuch ? 0 : -1)));
    overlay.replaceChildren(
      ...(isMuch ? [] : all.filter((group) => group !== own).map((group, at) => groupShape(group, colour(at), 2))),
    );
    if (own)
      overlay.append(
        ...(isMuch ? own.map((rank) => frameOf([rank], ink("ink"), 3)) : [groupShape(own, ink("ink"), 4)]),
      );
    if (current !== null) overlay.append(frameOf([current], ink("ink"), 3));
  }

  function isCrowded(all) {
    return all.length > MOST_LINES && !isTogether(all[0]);
  }

  function groupShape(group, stroke, wide) {
    return isTogether(group) ? frameOf(group, stroke, wide) : lineThrough(group, stroke, wide);
  }

  function isTogether(group) {
    const box = boxOf(group);
    const members = new Set(group);
    return grid.places.every(
      ([x, y], rank) => members.has(rank) || x < box.left || x > box.right || y < box.top || y > box.bottom,
    );
  }

  function boxOf(group) {
    const [xs, ys] = [0, 1].map((at) => group.map((rank) => grid.places[rank][at]));
    return { left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys) };
  }

  function frameOf(group, stroke, wide) {
    const box = boxOf(group);
    return shape("rect", {
      class: "group",
      x: box.left + EDGE - 3,
      y: box.top + EDGE - 3,
      width: box.right - box.left + cell.width + 6,
      height: box.bottom - box.top + cell.height + 6,
      rx: 7,
      stroke,
      "stroke-width": wide,
    });
  }

  function lineThrough(group, stroke, wide) {
    const points = group.map((rank) => [
      grid.places[rank][0] + EDGE + cell.width / 2,
      grid.places[rank][1] + EDGE + cell.height - 5,
    ]);
    const line = shape("path", {
      class: "group",
      d: `M${points.map((place) => place.join(" ")).join("L")}`,
      stroke,
      "stroke-width": wide,
    });
    return shape("g", {}, line, ...points.map(([cx, cy]) => shape("circle", { cx, cy, r: wide + 1, fill: stroke })));
  }

  function pick(number) {
    axis = axis === number ? null : number;
    showAxes();
    drawGroups();
    tell();
  }

  function showAxes() {
    axes.replaceChildren(
      ...panel.axes.map((one, number) => {
        const choice = /** @type {HTMLButtonElement} */ (axes.children[number]) ?? button("", () => pick(number), { class: "small" });
        setText(choice, `${one.name} = ${one.size}`);
        choice.disabled = one.size < 2;
        setDown(choice, axis === number);
        return choice;
      }),
    );
  }

  function tell() {
    const where = (rank) =>
      coordinates(rank, sizes())
        .map((at, number) => `${panel.axes[number].name} ${at}`)
        .join(", ");
    const parts = [];
    if (current !== null) {
      parts.push(
        `rank ${current}${panel.hosts[current] ? ` on ${panel.hosts[current]}` : ""}${panel.axes.length > 0 ? `: ${where(current)}` : ""}${panel.slow.includes(current) ? "; it holds the others up" : ""}`,
      );
      const group = talking().find((one) => one.includes(current));
      if (group) parts.push(`with ranks ${rankRanges(group)} on ${panel.axes[axis].name}`);
    } else if (axis !== null) {
      const one = panel.axes[axis];
      const count = world() / one.size;
      parts.push(`${one.name}: ${count} ${count === 1 ? "group" : "groups"} of ${one.size} ranks`, one.talk.replace(/\.$/, ""));
      if (grid && isCrowded(talking())) parts.push("framed is the group of rank 0, or of the rank that is pointed at");
    } else parts.push("Pick an axis to see which ranks talk to each other on it");
    setText(readout, `${parts.join("; ")}.`);
    if (current !== null && document.activeElement === picture.element) context.announce(readout.textContent);
  }

  function setCurrent(rank) {
    if (rank === current) return;
    current = rank;
    drawGroups();
    tell();
  }

  function move(right, down) {
    if (current === null) return setCurrent(0);
    if (right !== 0) return setCurrent(between(current + right, 0, world() - 1));
    const [x, y] = grid.places[current];
    const rows = [...new Set(grid.places.map((place) => place[1]))].sort((a, b) => a - b);
    const row = rows[between(rows.indexOf(y) + down, 0, rows.length - 1)];
    const candidates = grid.places
      .map((place, rank) => [Math.abs(place[0] - x), rank, place[1]])
      .filter((one) => one[2] === row);
    return setCurrent(candidates.sort((a, b) => a[0] - b[0])[0][1]);
  }

  function point(event) {
    if (!event || !grid) return setCurrent(null);
    const box = picture.element.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - EDGE, event.clientY - box.top - EDGE];
    const found = grid.places.findIndex(
      ([left, top]) => x >= left && x < left + cell.width && y >= top && y < top + cell.height,
    );
    return setCurrent(found < 0 ? null : found);
  }

  function listHosts() {
    const names = hostNames().filter((name) => name !== "");
    const ranksOf = (name) => panel.hosts.flatMap((host, rank) => (host === name ? [rank] : []));
    const entries = names.slice(0, MOST_HOSTS).map((name) => {
      const key = make("span", { class: "swatch" });
      key.style.backgroundColor = colour(hostNames().indexOf(name));
      return make("li", {}, key, make("b", {}, name), ` ranks ${rankRanges(ranksOf(name))}`);
    });
    if (names.length > MOST_HOSTS)
      entries.push(make("li", {}, `and ${names.length - MOST_HOSTS} more hosts, in the table`));
    if (panel.slow.length > 0)
      entries.push(make("li", { class: "level-error" }, `▲ rank ${rankRanges(panel.slow)}: holds the others up`));
    hosts.replaceChildren(...entries);
  }

  function show() {
    const layout = panel.axes.map((one) => `${one.name} ${one.size}${one.talk ? ` (${one.talk.replace(/\.$/, "")})` : ""}`).join(", ");
    picture.setLabel(
      `${panel.title}: ${world()} ranks${layout ? ` as ${layout}` : ""} on ${hostNames().filter(Boolean).length || "unknown"} hosts${panel.slow.length > 0 ? `; slow: ranks ${rankRanges(panel.slow)}` : ""}. Arrow keys go from rank to rank.`,
    );
    if (axis !== null && !(panel.axes[axis]?.size > 1)) axis = null;
    if (current !== null && current >= world()) current = null;
    axes.hidden = panel.axes.length === 0;
    showAxes();
    talk.replaceChildren(...panel.axes.map((one) => make("li", {}, make("b", {}, `${one.name} = ${one.size}`), ` ${one.talk}`)));
    listHosts();
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
    table: () => ({
      columns: ["rank", "host", ...panel.axes.map((one) => one.name), "slow"],
      right: [true, false, ...panel.axes.map(() => true), false],
      count: world(),
      row: (rank) => [
        String(rank),
        panel.hosts[rank] ?? "",
        ...coordinates(rank, sizes()).map(String),
        panel.slow.includes(rank) ? "slow" : "",
      ],
    }),
    remove() {
      forget();
      picture.remove();
    },
  };
}

function shorten(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}
