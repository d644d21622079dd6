import assert from "node:assert/strict";
import { test } from "node:test";
import { keyedList } from "../src/keyed.js";
import { same } from "../src/same.js";
import { remember, remembered } from "../src/store.js";

// A parent of elements, as far as a keyed list asks.
class Parent {
  children = [];
  get firstElementChild() {
    return this.children[0] ?? null;
  }
  insertBefore(element, place) {
    this.children = this.children.filter((one) => one !== element);
    this.children.splice(place ? this.children.indexOf(place) : this.children.length, 0, element);
  }
}

function listOf(parent, log) {
  return keyedList(
    parent,
    (item) => item.id,
    (item) => {
      const element = {
        text: item.text,
        get nextElementSibling() {
          return parent.children[parent.children.indexOf(element) + 1] ?? null;
        },
      };
      log.push(`+${item.id}`);
      return {
        element,
        update(next) {
          element.text = next.text;
        },
        remove() {
          log.push(`-${item.id}`);
          parent.children = parent.children.filter((one) => one !== element);
        },
      };
    },
  );
}

test("what is still there stays as it is, in its new place", () => {
  const [parent, log] = [new Parent(), []];
  const list = listOf(parent, log);
  list.update([
    { id: "a", text: "1" },
    { id: "b", text: "2" },
  ]);
  const [a, b] = parent.children;
  list.update([
    { id: "c", text: "3" },
    { id: "b", text: "two" },
    { id: "a", text: "1" },
  ]);
  assert.deepEqual(
    parent.children.map((one) => one.text),
    ["3", "two", "1"],
  );
  assert.ok(parent.children[1] === b && parent.children[2] === a);
  list.update([{ id: "b", text: "two" }]);
  assert.deepEqual(log, ["+a", "+b", "+c", "-c", "-a"]);
  list.clear();
  assert.deepEqual([parent.children, list.views()], [[], []]);
});

test("two of the same key are two", () => {
  const parent = new Parent();
  const list = listOf(parent, []);
  list.update([
    { id: "a", text: "1" },
    { id: "a", text: "2" },
  ]);
  assert.equal(list.views().length, 2);
});

test("two pieces of JSON say the same", () => {
  assert.ok(same({ a: [1, { b: null }] }, { a: [1, { b: null }] }));
  for (const [one, other] of [
    [{ a: 1 }, { a: 2 }],
    [{ a: 1 }, { a: 1, b: 2 }],
    [{ a: null }, { b: null }],
    [[1], { 0: 1 }],
    [null, {}],
    ["1", 1],
  ])
    assert.ok(!same(one, other), JSON.stringify([one, other]));
});

test("what a browser does not let us keep is forgotten", () => {
  const kept = new Map();
  globalThis.localStorage = {
    getItem: (name) => kept.get(name) ?? null,
    setItem: (name, value) => kept.set(name, value),
  };
  remember("theme", "dark");
  assert.equal(remembered("theme"), "dark");
  assert.deepEqual([...kept], [["lockstep-theme", "dark"]]);
  globalThis.localStorage = {
    getItem() {
      throw new Error("forbidden");
    },
    setItem() {
      throw new Error("forbidden");
    },
  };
  remember("theme", "light");
  assert.equal(remembered("theme"), null);
  delete globalThis.localStorage;
});
