// Bundles the page's script and style, with uPlot, into ../assets: the same bytes from the same sources.
import { readFile, writeFile } from "node:fs/promises";
import { build } from "esbuild";

const target = process.argv[2] ?? new URL("../assets/", import.meta.url).pathname;
const uplot = JSON.parse(await readFile(new URL("node_modules/uplot/package.json", import.meta.url)));
const licence = (await readFile(new URL("node_modules/uplot/LICENSE", import.meta.url), "utf8")).trim();
const banner = `/* With uPlot ${uplot.version}.\n${licence}\n*/`;

await build({
  entryPoints: [new URL("src/main.js", import.meta.url).pathname],
  bundle: true,
  minify: true,
  format: "iife",
  target: ["es2022"],
  charset: "utf8",
  legalComments: "none",
  banner: { js: banner, css: banner },
  outfile: `${target}/page.js`,
  logLevel: "warning",
});
await writeFile(
  `${target}/LICENSES.txt`,
  `The page's script and style contain uPlot ${uplot.version}:\n\n${licence}\n`,
);
