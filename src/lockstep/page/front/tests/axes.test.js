import assert from "node:assert/strict";
import { test } from "node:test";
import "./browser.js";

const { decades, logRange, placeHeading, placeText, xRange, yRange } = await import("../src/axes.js");

test("a place on the x axis in words", () => {
  assert.equal(placeText("step", 1200, 0), "step 1,200");
  assert.equal(placeText("ranks", 1, 0), "1 rank");
  assert.equal(placeText("ranks", 8, 0), "8 ranks");
  assert.equal(placeText("seconds", 0.25, 0), "250 ms");
  assert.equal(placeText("time", 90, 1_760_000_000), "+1 min 30 s");
  assert.equal(placeText("time", 0, 1_760_000_000), "start");
  assert.equal(placeHeading("time"), "time since the start");
});

test("the x axis ends where the values do, and one place alone has room", () => {
  assert.deepEqual(xRange(2, 9), [2, 9]);
  assert.deepEqual(xRange(5, 5), [4, 6]);
  assert.deepEqual(xRange(null, null), [0, 1]);
});

test("an amount begins at zero and a loss where its values are", () => {
  assert.deepEqual(yRange(5, 100, { unit: "s" }), [0, 106]);
  assert.deepEqual(yRange(0.2, 0.9, { unit: "share", most: 1 }), [0, 1]);
  assert.deepEqual(yRange(5, 100, { unit: "", fromZero: true }), [0, 106]);
  const [low, high] = yRange(2, 3, { unit: "" });
  assert.ok(low > 1.9 && low < 2 && high > 3 && high < 3.1);
  assert.deepEqual(yRange(null, 1, { unit: "", most: 7 }), [0, 7]);
});

test("what hardly changes is drawn flat", () => {
  const [low, high] = yRange(2.0001, 2.0002, { unit: "" });
  assert.ok(high - low > 0.2);
});

test("a logarithmic axis has room on both ends and survives what is not above zero", () => {
  const [low, high] = logRange(1, 100);
  assert.ok(low < 1 && high > 100);
  assert.deepEqual(logRange(0, 5), [0.1, 1]);
});

test("of a logarithmic axis the powers of ten are named, and 2 and 5 where there is room", () => {
  assert.deepEqual(decades([1, 2, 3, 10, 20, 100, 1000]), [1, null, null, 10, null, 100, 1000]);
  assert.deepEqual(decades([1, 2, 3, 5, 7, 8, 9, 10]), [1, 2, null, 5, null, null, null, 10]);
  assert.deepEqual(decades([2, 3, null]), [2, 3, null]);
});
