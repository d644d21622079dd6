// Elements from data. Text only ever becomes text: nothing here, or anywhere in the page, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | null | undefined | (Node | string | null | undefined)[]} Child */

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, any>} attributes
 * @param {...Child} children
 */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/**
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, any>} attributes
 * @param {...Child} children
 */
export function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/**
 * `on` holds listeners; a value of null, undefined or false leaves the attribute out.
 * @template {Element} Kind
 * @param {Kind} element
 * @param {Record<string, any>} attributes
 * @param {Child[]} children
 */
function fill(element, { on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) setAttribute(element, name, value);
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
  return element;
}

/**
 * @param {Element} element
 * @param {string} name
 * @param {string | number | boolean | null | undefined} value
 */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else element.setAttribute(name, value === true ? "" : String(value));
}

/**
 * Writes only where something changes, so that a selection or a screen reader's place is not lost.
 * @param {Element} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * @param {string} text
 * @param {(event: Event) => void} press
 * @param {Record<string, any>} attributes
 */
export function button(text, press, attributes = {}) {
  return make("button", { type: "button", ...attributes, on: { click: press } }, text);
}

/**
 * A button that stays down.
 * @param {string} text
 * @param {boolean} isDown
 * @param {(isDown: boolean) => void} press
 * @param {Record<string, any>} attributes
 */
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

/**
 * @param {Element} element
 * @param {boolean} isDown
 */
export function setDown(element, isDown) {
  element.setAttribute("aria-pressed", String(isDown));
}

/** @param {Element} element */
export function isPressed(element) {
  return element.getAttribute("aria-pressed") === "true";
}

/** @param {string} text */
export function hiddenText(text) {
  return make("span", { class: "unseen" }, text);
}

let count = 0;

/** @param {string} prefix */
export function newId(prefix) {
  count += 1;
  return `${prefix}-${count}`;
}
