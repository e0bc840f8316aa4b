// Puts the page together in one folder that any static file server can serve.
//
//     node build.js [FOLDER]        (default: dist)
import { cpSync, existsSync, mkdirSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const folder = resolve(process.argv[2] ?? join(here, "dist"));
const runtime = join(here, "node_modules", "onnxruntime-web", "dist");

const page = [
  "index.html",
  "style.css",
  "app.js",
  "contract.js",
  "errors.js",
  "heatmap.js",
  "model.js",
  "modelfile.js",
  "preprocessing.js",
  "resize.js",
  "scenes",
];

if (!existsSync(runtime)) {
  console.error("onnxruntime-web is not installed; run: npm ci");
  process.exit(1);
}
mkdirSync(join(folder, "ort"), { recursive: true });
for (const name of page) cpSync(join(here, name), join(folder, name), { recursive: true });
cpSync(join(here, "../../onnxplain/demo/garments.onnx"), join(folder, "garments.onnx"));
// As .js, because some servers send .mjs with a content type that browsers refuse to run.
cpSync(join(runtime, "ort.wasm.bundle.min.mjs"), join(folder, "ort", "ort.js"));
cpSync(
  join(runtime, "ort-wasm-simd-threaded.wasm"),
  join(folder, "ort", "ort-wasm-simd-threaded.wasm"),
);
console.log(folder);
