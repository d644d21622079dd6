// The frame of a panel: title, note, tools, and what its kind draws; drawn when it comes near the window.
import { make, newId, setText, toggle } from "./dom.js";
import { linesPanel, stackPanel } from "./panels/curves.js";
import { heatPanel } from "./panels/heat.js";
import { meshPanel } from "./panels/mesh.js";
import { sharesPanel, tablePanel, textPanel } from "./panels/texts.js";
import { timelinePanel } from "./panels/timeline.js";
import { timetablePanel } from "./panels/timetable.js";
import { same } from "./same.js";
import { table } from "./tables.js";

const KINDS = {
  lines: { draw: linesPanel, isEmpty: (panel) => panel.curves.every((curve) => curve.x.length === 0), height: 380 },
  stack: { draw: stackPanel, isEmpty: (panel) => panel.at.length === 0 || panel.parts.length === 0, height: 380 },
  shares: { draw: sharesPanel, isEmpty: (panel) => !panel.parts.some((part) => part.amount > 0) },
  heat: {
    draw: heatPanel,
    isEmpty: (panel) => panel.layers.length === 0 || panel.rows.length === 0 || panel.at.length === 0,
    height: 300,
  },
  timeline: {
    draw: timelinePanel,
    isEmpty: (panel) => panel.spans.length === 0 && panel.moments.length === 0,
    height: 200,
  },
  mesh: { draw: meshPanel, isEmpty: () => false, height: 200 },
  timetable: { draw: timetablePanel, isEmpty: (panel) => panel.lanes.length === 0, height: 200 },
  table: { draw: tablePanel, isEmpty: (panel) => panel.rows.length === 0 },
  text: { draw: textPanel, isEmpty: (panel) => panel.text === "" },
};

const waiting = new Map();
const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  },
  { rootMargin: "500px 0px" },
);

function draw(element) {
  watcher.unobserve(element);
  const mount = waiting.get(element);
  waiting.delete(element);
  mount?.();
}

// What is printed is printed whole.
export function drawAll() {
  for (const element of [...waiting.keys()]) draw(element);
}

export function panelKey(panel) {
  return `${panel.kind} ${panel.id}`;
}

export function panelView(first, context) {
  let panel = first;
  const kind = KINDS[panel.kind];
  const titleId = newId("panel");
  const title = make("h3", { id: titleId }, panel.title);
  const note = make("p", { class: "note" });
  const tools = make("div", { class: "tools" });
  const body = make("div", { class: "body" });
  const values = make("div", { class: "values" });
  const element = make(
    "div",
    { class: `panel panel-${kind ? panel.kind : "unknown"}`, role: "group", "aria-labelledby": titleId },
    make("div", { class: "panel-head" }, title, tools),
    note,
    body,
    values,
  );
  let view = null;
  let asTable = null;

  function describe() {
    setText(title, panel.title);
    setText(note, panel.note);
    note.hidden = !panel.note;
  }

  function mount() {
    body.style.minHeight = "";
    if (!kind)
      return body.replaceChildren(make("p", { class: "nothing" }, "This page does not know how to draw this panel."));
    if (kind.isEmpty(panel)) return body.replaceChildren(make("p", { class: "nothing" }, "Nothing was recorded."));
    tools.replaceChildren();
    view = kind.draw(panel, context, { tools });
    body.replaceChildren(view.element);
    if (view.table)
      tools.append(toggle("Table", false, showTable, { class: "small", title: "Show the values as a table" }));
    return undefined;
  }

  function showTable(isShown) {
    const hadFocus = values.contains(document.activeElement);
    asTable = isShown ? table(view.table(), `${panel.title}: values`) : null;
    values.replaceChildren(...(asTable ? [asTable] : []));
    if (hadFocus) /** @type {HTMLElement | null} */ (asTable?.firstElementChild ?? null)?.focus({ preventScroll: true });
  }

  function unmount() {
    view?.remove?.();
    view = null;
  }

  describe();
  if (kind?.height && !kind.isEmpty(panel)) {
    body.style.minHeight = `${kind.height}px`;
    waiting.set(element, mount);
    watcher.observe(element);
  } else mount();

  return {
    element,
    update(newPanel) {
      if (same(panel, newPanel)) return;
      const wasEmpty = kind?.isEmpty(panel) ?? true;
      panel = newPanel;
      describe();
      if (waiting.has(element)) return;
      if (view && !kind.isEmpty(panel)) {
        view.update(panel);
        if (asTable) showTable(true);
      } else if (kind && wasEmpty !== kind.isEmpty(panel)) {
        unmount();
        mount();
      }
    },
    remove() {
      watcher.unobserve(element);
      waiting.delete(element);
      unmount();
      element.remove();
    },
  };
}
