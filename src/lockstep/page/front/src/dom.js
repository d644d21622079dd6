// Elements from data. Text only ever becomes text: nothing here, or anywhere in the page, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// `on` holds listeners; a value of null, undefined or false leaves the attribute out.
function fill(element, { on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) setAttribute(element, name, value);
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else element.setAttribute(name, value === true ? "" : String(value));
}

// Writes only where something changes, so that a selection or a screen reader's place is not lost.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function button(text, press, attributes = {}) {
  return make("button", { type: "button", ...attributes, on: { click: press } }, text);
}

// A button that stays down.
export function toggle(text, isDown, press, attributes = {}) {
  const element = button(
    text,
    () => {
      setDown(element, !isPressed(element));
      press(isPressed(element));
    },
    attributes,
  );
  setDown(element, isDown);
  return element;
}

export function setDown(element, isDown) {
  element.setAttribute("aria-pressed", String(isDown));
}

export function isPressed(element) {
  return element.getAttribute("aria-pressed") === "true";
}

export function hiddenText(text) {
  return make("span", { class: "unseen" }, text);
}

let count = 0;

export function newId(prefix) {
  count += 1;
  return `${prefix}-${count}`;
}
