// Reads the data that is in the page, draws it, and follows the run where there is somebody to ask.
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { follow } from "./live.js";
import { pageView } from "./page.js";
import { startTheme } from "./theme.js";

const data = /** @type {HTMLElement} */ (document.getElementById("data"));
/** @type {import("./panels").Page} */
const page = JSON.parse(data.textContent ?? "");
startTheme();
const view = pageView(page);
document.getElementById("plain")?.replaceWith(view.element);
view.follow();
// The place that the address names is there only now.
if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
if (data.dataset.url && page.live) follow(data.dataset.url, view);
